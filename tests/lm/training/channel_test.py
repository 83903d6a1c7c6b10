"""What processes tell each other, with threads in their place: a stop, a failure, a silence."""

import contextlib
import itertools
import threading
import time
import types

import jax
import pytest

from fp8jax.lm.training import channel
from fp8jax.lm.training.channel import RUN_AGAIN, Channel

SILENT_S = 0.4
NOTHING = lambda: None  # noqa: E731  # has failed in the background


class _Store:
    """What device/processes.py has, for one of several threads that share `texts`."""

    def __init__(self, texts, index, count, left):
        self._texts, self._index, self._count, self._left = texts, index, count, left
        self.reachable = True

    def index(self):
        return self._index

    def count(self):
        return self._count

    def host(self):
        return f"node{self._index}"

    def put(self, key, text):
        if not self.reachable:
            raise ConnectionError
        self._texts[key] = text

    def keys(self, folder):
        if not self.reachable:
            raise ConnectionError
        begin = folder + "/"
        return {
            k.removeprefix(begin): v for k, v in self._texts.copy().items() if k.startswith(begin)
        }

    def leave(self, status):
        self._left.setdefault(self._index, status)
        threading.Event().wait()  # the thread, a daemon, does nothing more


class _NoAborts:
    seen = False

    def open(self):
        pass

    close = open


class _Compiling:
    """In place of what hears JAX: every process of a test has one of its own."""

    def __init__(self):
        self.lasts = 0.0

    def seconds(self):
        return self.lasts

    def makes_program(self):
        return self.lasts > 0

    def open(self):
        pass

    close = forget = open


@pytest.fixture
def left(monkeypatch):
    """The status of each process that left, by its number."""
    monkeypatch.setattr(channel, "_BEAT_S", 0.02)
    monkeypatch.setattr(channel, "SILENT_S", SILENT_S)
    monkeypatch.setattr(channel, "_SUSPECT_S", SILENT_S / 2)
    monkeypatch.setattr(channel, "_end_in", lambda seconds, status: None)
    monkeypatch.setattr(channel, "_wait_for_the_end", lambda: None)
    monkeypatch.setattr(channel, "_opened", itertools.repeat(0))
    monkeypatch.setattr(channel.atexit, "register", lambda *_: None)
    monkeypatch.setattr(channel, "Aborts", _NoAborts)
    monkeypatch.setattr(channel, "Compiling", _Compiling)
    return {}


def channels(count, left, **options):
    texts = {}
    stores = [_Store(texts, index, count, left) for index in range(count)]
    return [Channel(store=store, **options) for store in stores]


def wait_for(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "in vain"
        time.sleep(0.01)


def in_threads(works):
    """Runs each work in a thread; the exception that ended it, by its place."""
    ended = {}

    def run(index, work):
        try:
            work()
        except BaseException as error:
            ended[index] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return ended


@pytest.mark.parametrize("asking", range(3))
def test_all_stop_after_the_same_step_with_the_status_that_says_again(left, capsys, asking):
    barrier, last = threading.Barrier(3), {}

    def loop(index, talks):
        with talks:
            for step in itertools.count(8):
                barrier.wait(10)  # a step of all
                if index == asking and step == 12:
                    talks._request.signal = "SIGTERM"
                if talks.reached(step):
                    last[index] = step, talks.signal
                    return

    ends = in_threads([lambda i=i, c=c: loop(i, c) for i, c in enumerate(channels(3, left))])
    assert set(last.values()) == {last[0]} and last[0][0] > 12 and last[0][1] == "SIGTERM"
    assert [type(ends[i]) for i in range(3)] == [SystemExit] * 3
    assert {ends[i].code for i in range(3)} == {RUN_AGAIN} and not left
    said = f"SIGTERM in process {asking} of 3 on node{asking}: all stop after step {last[0][0]}"
    assert capsys.readouterr().err.count(said) == 3


def test_a_stop_before_all_have_begun_leaves_at_once_with_nothing_to_save(left, capsys):
    """One waits in its first step for the other, which compiles."""
    first, second = channels(2, left)
    with first, second:
        assert not first.reached(1)
        second._request.signal = "SIGINT"
        wait_for(lambda: left == {0: RUN_AGAIN, 1: RUN_AGAIN})
    said = "SIGINT in process 1 of 2 on node1: no step is complete and nothing is to be saved"
    assert capsys.readouterr().err.count(said) == 2


def test_a_run_that_ends_before_the_step_ends_as_ever(left):
    with contextlib.ExitStack() as stack:
        both = [stack.enter_context(each) for each in channels(2, left)]
        assert not any(each.reached(5) for each in both)
        both[1]._request.signal = "SIGTERM"
        wait_for(lambda: all(each._agreed.is_set() for each in both))
    assert not left


def test_one_that_has_ended_holds_up_no_stop(left, monkeypatch):
    """The other is asked while it takes the step that was the last of the run."""
    first, second = channels(2, left)
    monkeypatch.setattr(channel, "_BEAT_S", 20)  # its thread hears of the signal from `reached`
    began = first._answered
    with first:
        with second:
            assert not first.reached(5) and not second.reached(5)
        wait_for(lambda: first._answered != began)
        first._request.signal = "SIGTERM"
        assert not in_threads([lambda: first.reached(6)])
        assert first._last == 7
    assert not left


def test_a_failure_is_said_by_all_with_process_and_host_and_leaves_files(left, tmp_path, capsys):
    first, second, third = channels(3, left)
    recorded = []
    with first, second:
        for each in (first, second):
            each.trains(str(tmp_path), lambda: 7, NOTHING, recorded.extend)
        with pytest.raises(OSError, match="the disk"), third:
            third.trains(str(tmp_path), lambda: 7, NOTHING, recorded.extend)
            raise OSError("the disk\nis full")
        wait_for(lambda: left == {0: 1, 1: 1})
    line = "process 2 of 3 on node2 failed at step 7: OSError: the disk is full"
    assert capsys.readouterr().err.count(line) == 3 and recorded == [line, line]
    files = {path.name: path.read_text() for path in (tmp_path / "errors").iterdir()}
    assert sorted(files) == [f"process_{i}.txt" for i in range(3)]
    assert all(line in text and "Thread 0x" in text for text in files.values())
    assert 'raise OSError("the disk' in files["process_2.txt"]
    assert "process 0 of 3 on node0 left at step 7" in files["process_0.txt"]


@pytest.mark.parametrize("silent", range(2))
def test_a_process_that_is_silent_is_named(left, capsys, silent):
    """A killed one does not speak; a killed process 0 takes the store with it."""
    both = channels(2, left)
    other = both[1 - silent]
    with other:
        with both[silent]:
            wait_for(lambda: len(other._who) == 2)
            for each in both if silent == 0 else [both[1]]:
                each._store.reachable = False
            wait_for(lambda: left.get(1 - silent) == 1)
    said = capsys.readouterr().err
    assert f"error: process {silent} of 2 on node{silent} has not been heard from for 0 s" in said


def test_one_that_has_ended_is_not_silent(left):
    first, second = channels(2, left)
    with first:
        with second:
            wait_for(lambda: len(first._who) == 2)
        time.sleep(2 * SILENT_S)
    assert not left


def test_a_pause_of_all_processes_is_no_silence_and_no_slow_step(left, tmp_path, monkeypatch):
    """Two hours, in which no process runs."""
    both, slept = channels(2, left), [0.0]
    clock = types.SimpleNamespace(**vars(time) | {"monotonic": lambda: time.monotonic() + slept[0]})
    monkeypatch.setattr(channel, "time", clock)
    with both[0], both[1]:
        wait_for(lambda: all(len(each._who) == 2 for each in both))
        for each in both:
            each.trains(str(tmp_path), lambda: 3, NOTHING, lambda _: None)
            assert not each.reached(2)
        slept[0] = 7200.0
        time.sleep(SILENT_S / 2)
        assert not left
        # The clock goes on: a process that is silent from now on is noticed.
        both[1]._store.reachable = False
        wait_for(lambda: 1 in left.values())


def test_a_step_that_takes_too_long_ends_all(left, tmp_path, capsys):
    with contextlib.ExitStack() as stack:
        both = [stack.enter_context(each) for each in channels(2, left, step_timeout=0.2)]
        both[1].trains(str(tmp_path), lambda: 3, NOTHING, lambda _: None)
        assert not both[1].reached(2)
        wait_for(lambda: left == {0: 1, 1: 1})
    line = "process 1 of 2 on node1 failed: step 3 has not finished in 0.2 s"
    assert capsys.readouterr().err.count(f"error: {line}") == 2


@pytest.mark.parametrize("compiling", range(2))
def test_a_step_has_its_time_beside_a_compilation_in_any_process(left, tmp_path, compiling):
    with contextlib.ExitStack() as stack:
        both = [stack.enter_context(each) for each in channels(2, left, step_timeout=0.8)]
        both[compiling]._compiling.lasts = 1.0
        wait_for(lambda: both[0]._compiled and both[1]._compiled)
        for each in both:
            each.trains(str(tmp_path), lambda: 1, NOTHING, lambda _: None)
        time.sleep(2 * 0.8)
        assert not left
        both[compiling]._compiling.lasts = 0.0
        wait_for(lambda: left == {0: 1, 1: 1})


def test_a_compilation_has_a_limit_of_its_own(left, tmp_path, capsys):
    with contextlib.ExitStack() as stack:
        both = [stack.enter_context(each) for each in channels(2, left)]
        both[1].trains(str(tmp_path), lambda: 3, NOTHING, lambda _: None)
        both[1]._compiling.lasts = channel.COMPILE_TIMEOUT_S + 1
        wait_for(lambda: left == {0: 1, 1: 1})
    line = "error: process 1 of 2 on node1 failed: step 3 has not compiled in 7200 s"
    assert capsys.readouterr().err.count(line) == 2


def test_what_fails_in_the_background_is_told_though_the_loop_waits(left, tmp_path, capsys):
    failed = []
    with contextlib.ExitStack() as stack:
        both = [stack.enter_context(each) for each in channels(2, left)]
        both[1].trains(str(tmp_path), lambda: 3, lambda: next(iter(failed), None), lambda _: None)
        failed.append(OSError("no space"))
        wait_for(lambda: left == {0: 1, 1: 1})
    line = "error: process 1 of 2 on node1 failed at step 3: OSError: no space"
    assert capsys.readouterr().err.count(line) == 2


def test_a_broken_collective_waits_for_its_cause(left, monkeypatch, capsys):
    """The process that was killed is named, not the one whose collective failed of it."""
    monkeypatch.setattr(channel, "_wait_for_the_end", threading.Event().wait)
    first, second = channels(2, left)
    gloo = jax.errors.JaxRuntimeError("UNKNOWN: Gloo AllGather failed: Connection reset by peer")
    with first:
        with second:
            wait_for(lambda: len(first._who) == 2)
            second._store.reachable = False
            failing = threading.Thread(
                target=first.fail, args=(type(gloo), gloo, None), daemon=True
            )
            failing.start()
            wait_for(lambda: left.get(0) == 1)
            failing.join(SILENT_S)
            assert failing.is_alive()
    said = capsys.readouterr().err
    assert "process 1 of 2 on node1 has not been heard from" in said and "Gloo" not in said


def test_a_stopped_process_of_this_host_is_killed_and_no_other(monkeypatch, left):
    (alone,) = channels(1, left)
    killed = []
    monkeypatch.setattr(channel.os, "kill", lambda *given: killed.append(given))
    monkeypatch.setattr(channel, "_began", lambda pid: "12")
    for index, host, began in ((1, "node0", "12"), (2, "node9", "12"), (3, "node0", "11")):
        alone._who[index] = {"me": "", "host": host, "pid": 100 + index, "began": began}
        alone._kill(index)
    alone._kill(4)  # unknown
    assert killed == [(101, channel.signal.SIGKILL)]
