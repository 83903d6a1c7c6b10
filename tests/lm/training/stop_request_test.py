"""Signals as requests: the first one is noted, and Ctrl-C is raised at the end."""

import signal

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


def test_another_error_comes_first():
    with pytest.raises(ValueError), StopRequest():
        signal.raise_signal(signal.SIGINT)
        raise ValueError
