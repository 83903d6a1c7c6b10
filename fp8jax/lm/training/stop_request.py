"""SIGTERM and Ctrl-C as requests to save and stop."""

import contextlib
import signal
import socket
import sys
import threading
from types import FrameType, TracebackType
from typing import Any


class StopRequest(contextlib.AbstractContextManager):
    """Here the first of SIGTERM and Ctrl-C sets `signal`, and the next Ctrl-C interrupts.

    Another SIGTERM changes nothing: schedulers send it more than once.

    A thread answers the first one at once: Python calls its own handlers only when the main thread
    runs Python again, which a compilation may keep from it for minutes.

    The first Ctrl-C raises KeyboardInterrupt at the end of the context, unless that ends with
    another exception: whoever calls learns that the user wants to stop, and trains nothing else.
    """

    def __init__(self, asked: threading.Event | None = None):
        """`asked` is set as soon as a signal has come."""
        self.signal: str | None = None
        self._asked = asked
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
            self._received, self._wakeup = socket.socketpair()
            self._wakeup.setblocking(False)
            self._previous_wakeup = signal.set_wakeup_fd(self._wakeup.fileno())
            self._answering = threading.Thread(target=self._answer, daemon=True)
            self._answering.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._previous:
            signal.set_wakeup_fd(self._previous_wakeup)
            self._wakeup.close()  # which ends the thread
            self._answering.join()
            self._received.close()
        if self.signal == signal.SIGINT.name and error is None:
            raise KeyboardInterrupt

    def reached(self, step: int) -> bool:
        """Whether the run stops after this step."""
        return self.signal is not None

    def _answer(self) -> None:
        """Says that the first signal has come, and notes it."""
        while received := self._received.recv(1):
            if received[0] in (signal.SIGTERM, signal.SIGINT):
                name = signal.Signals(received[0]).name
                text = f"{name}: the run saves its state and stops; Ctrl-C now stops it at once"
                print(text, file=sys.stderr, flush=True)
                self.signal = name
                if self._asked is not None:
                    self._asked.set()
                return

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:  # the thread has not noted it yet
            self.signal = signal.Signals(number).name
        signal.signal(signal.SIGINT, self._previous[signal.SIGINT])
