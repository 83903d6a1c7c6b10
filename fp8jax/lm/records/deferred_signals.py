"""Ctrl-C and SIGTERM that wait for the end of a piece of work.

KeyboardInterrupt in the middle of Orbax's code leaves its threads running: they go on writing while
the caller removes what they wrote, or wait for a signal that nobody gives any more.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """Holds SIGINT and SIGTERM back until the context ends, with an exception or without one.

    A second signal of the same kind ends the process at once. Outside the main thread, which alone
    gets signals, the context does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def defer(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(number, signal.SIG_DFL)

    previous = {
        number: signal.signal(number, defer)
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) is not signal.SIG_IGN  # as SIGINT in a job of the background
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])
