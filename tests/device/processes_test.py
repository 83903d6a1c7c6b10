"""The processes of a run and their store, on JAX's own coordinator."""

import threading
import time

import jax
import pytest

from fp8jax.device import processes
from tests.support.coordinator import joined


def test_a_process_by_itself_has_a_store_of_its_own(monkeypatch):
    monkeypatch.setattr(processes, "_alone", {})
    assert (processes.index(), processes.count()) == (0, 1) and processes.host()
    processes.put("a/0", "x")
    processes.put("a/0", "y")
    processes.put("ab", "")
    assert processes.get("a/0", 0) == "y"
    assert processes.keys("a") == {"0": "y"}
    with pytest.raises(TimeoutError, match="nobody stored b"):
        processes.get("b", 0)


def test_processes_share_a_store_without_a_backend(monkeypatch):
    """What is private in JAX and used: `global_state`, its numbers, and its client."""
    monkeypatch.setattr(jax, "devices", None)
    with joined(2) as be:
        with be(1):
            assert (processes.index(), processes.count()) == (1, 2)
            processes.put("hosts/1", "node b")
            processes.put("hosts/1", "node b, again")
            assert processes.keys("nothing") == {}
            with pytest.raises(TimeoutError, match="nobody stored hosts/0 within 0.05 s"):
                processes.get("hosts/0", 0.05)
        with be(0):
            assert (processes.index(), processes.count()) == (0, 2)
            processes.put("hosts", "not in the folder hosts")

            def put_later():
                time.sleep(0.1)
                with be(1):
                    processes.put("hosts/0", "node a")

            later = threading.Thread(target=put_later)
            later.start()
            assert processes.get("hosts/0", 10) == "node a"  # it waits, and lets others run
            later.join()
            assert processes.keys("hosts") == {"0": "node a", "1": "node b, again"}
            assert processes.get("hosts/1", 1) == "node b, again"
