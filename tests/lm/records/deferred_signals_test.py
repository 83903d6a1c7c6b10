"""Signals that wait for the end of a piece of work."""

import signal
import threading

import pytest

from fp8jax.lm.records.deferred_signals import deferred_signals

HANDLED = (signal.SIGINT, signal.SIGTERM)

pytestmark = pytest.mark.usefixtures("takes_ctrl_c")


def test_ctrl_c_waits_for_the_end():
    before = [signal.getsignal(number) for number in HANDLED]
    done = []
    with pytest.raises(KeyboardInterrupt):
        with deferred_signals():
            signal.raise_signal(signal.SIGINT)
            done.append("work")
    assert done == ["work"]
    assert [signal.getsignal(number) for number in HANDLED] == before


def test_a_signal_matters_more_than_the_error_of_the_work():
    with pytest.raises(KeyboardInterrupt) as interrupted:
        with deferred_signals():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("failed")
    assert isinstance(interrupted.value.__context__, ValueError)


def test_sigterm_is_left_to_the_handler_that_was_there():
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        with deferred_signals():
            signal.raise_signal(signal.SIGTERM)
            assert received == []
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_second_signal_ends_the_process():
    with pytest.raises(KeyboardInterrupt):
        with deferred_signals():
            signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL


def test_other_threads_get_no_signals_to_hold_back():
    handlers = []

    def work():
        with deferred_signals():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]


def test_a_signal_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with deferred_signals():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_that_is_ignored_ends_nothing_beside_one_that_waits(takes_ctrl_c):
    before, done = signal.signal(signal.SIGTERM, signal.SIG_IGN), []
    try:
        with pytest.raises(KeyboardInterrupt):
            with deferred_signals():
                signal.raise_signal(signal.SIGINT)
                assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
                done.append(1)
        assert done and signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
