"""Signals as requests: the first one is noted, and Ctrl-C is raised at the end."""

import hashlib
import io
import os
import signal
import threading
import time

import pytest

from fp8jax.lm.training.stop_request import StopRequest


@pytest.fixture(autouse=True)
def pythons_own_handler():
    """Python inherits an ignored SIGINT from a shell that runs the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_is_raised_at_the_end():
    before = signal.getsignal(signal.SIGINT)
    reached = False
    with pytest.raises(KeyboardInterrupt):
        with StopRequest() as stop:
            assert stop.signal is None
            signal.raise_signal(signal.SIGINT)
            assert stop.signal == "SIGINT"
            reached = True
    assert reached and signal.getsignal(signal.SIGINT) == before


def test_a_second_ctrl_c_interrupts():
    reached = False
    with pytest.raises(KeyboardInterrupt):
        with StopRequest():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            reached = True
    assert not reached


def test_sigterm_is_no_error():
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGTERM)
    assert stop.signal == "SIGTERM"


def test_a_second_sigterm_changes_nothing_and_ctrl_c_interrupts():
    reached = False
    with pytest.raises(KeyboardInterrupt):
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            reached = stop.signal == "SIGTERM"
            signal.raise_signal(signal.SIGINT)
            reached = False
    assert reached and stop.signal == "SIGTERM"


def test_another_error_comes_first():
    with pytest.raises(ValueError), StopRequest():
        signal.raise_signal(signal.SIGINT)
        raise ValueError


class _Timed(io.StringIO):
    """Knows when something was last written to it."""

    at = float("inf")

    def write(self, text):
        self.at = time.monotonic()
        return super().write(text)


def test_ctrl_c_is_answered_while_the_main_thread_runs_no_python(monkeypatch):
    said = _Timed()
    monkeypatch.setattr("sys.stderr", said)
    with pytest.raises(KeyboardInterrupt):
        with StopRequest() as stop:
            begin = time.monotonic()
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
            while stop.signal is None:  # a call is one piece of C, half a second or more
                hashlib.pbkdf2_hmac("sha256", b"a", b"b", 2_000_000)
            handled = time.monotonic()
    assert begin < said.at < handled
    assert said.getvalue().startswith("SIGINT: the run saves its state and stops; Ctrl-C")
