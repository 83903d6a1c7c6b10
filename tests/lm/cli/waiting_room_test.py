"""Processes wait for each other, here as threads; each end reaches all of them."""

import concurrent.futures
import socket
import time

import pytest

from fp8jax.lm.cli import waiting_room
from fp8jax.lm.cli.waiting_room import Guest, JoinError, meet
from tests.support.coordinator import free_port


def results(guests, timeout_s=20.0, port=None, say=lambda line: None):
    """What each of them gets from `meet`: hosts, or the message of its error."""
    address = f"localhost:{port or free_port()}"

    def one(guest):
        try:
            return meet(address, guest, timeout_s, say)
        except JoinError as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor(len(guests)) as pool:
        return list(pool.map(one, guests))


def guest(index, count=3, host=None):
    return Guest(index=index, count=count, host=host or f"node{index}")


def test_all_learn_the_hosts_of_all_and_the_port_is_free_again():
    port = free_port()
    hosts = {0: "node0", 1: "node1", 2: "node2"}
    for _ in range(2):
        assert results([guest(2), guest(0), guest(1)], port=port) == [hosts] * 3


def test_who_is_missing_is_said_and_ends_the_run(monkeypatch):
    monkeypatch.setattr(waiting_room, "SAY_EVERY_S", 0.5)
    said = []
    first, other = results([guest(0, 4), guest(2, 4)], timeout_s=1, say=said.append)
    end = "processes 1, 3 have not joined within 1 s (--join_timeout); joined: 0 on node0, 2 on"
    assert first == other and first.startswith(end)
    for name in ("0", "2"):
        begin = f"waiting: process {name} of 4 on node{name}: processes 1, 3 have not joined; "
        assert any(line.startswith(begin) and line.endswith("of 1 s)") for line in said), said


def test_process_0_is_missing(monkeypatch):
    monkeypatch.setattr(waiting_room, "SAY_EVERY_S", 0.0)
    said, port = [], free_port()
    (got,) = results([guest(1)], timeout_s=0.5, port=port, say=said.append)
    at = f"process 0 at localhost:{port}"
    assert got.startswith(f"process 1 of 3 on node1 has not reached {at} within 0 s")
    assert said[0].startswith(f"waiting: process 1 of 3 on node1: {at} does not answer: ")


@pytest.mark.parametrize(
    "other, message",
    [
        (guest(1, 4), "process 1 of 4 on node1 and process 0 of 3 on node0 expect different"),
        (guest(3), "process 3 of 3 on node3 has a number that another one on nowhere has, too"),
    ],
)
def test_who_does_not_fit_ends_the_run(other, message):
    first, got = results([guest(0), other])
    assert first == got and first.startswith(message)


def test_a_second_process_of_one_number_ends_the_run():
    got = results([guest(0), guest(1), guest(1, host="b")])
    assert "has a number that another one on" in got[0] and got == [got[0]] * 3


def test_a_port_that_another_program_has_ends_process_0():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        (got,) = results([guest(0)], port=port)
    assert got == f"process 0 of 3 on node0 cannot listen at port {port}: Address already in use"


def test_who_leaves_ends_the_run_and_strangers_do_not():
    port = free_port()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(results, [guest(0)], 20.0, port)
        while True:
            try:
                stranger = socket.create_connection(("localhost", port))
                break
            except OSError:
                time.sleep(0.01)
        stranger.sendall(b"GET / HTTP/1.1\n")
        leaving = socket.create_connection(("localhost", port))
        leaving.sendall(b'{"index": 2, "count": 3, "host": "node2"}\n')
        assert leaving.recv(100).endswith(b'"2": "node2"}}\n')
        assert stranger.recv(1) == b""  # it was sent away
        leaving.close()
        assert first.result() == ["process 2 of 3 on node2 left before all had joined"]
        stranger.close()
