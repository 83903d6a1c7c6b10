"""SIGTERM and Ctrl-C as requests to save and stop."""

import contextlib
import signal
import socket
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

import numpy as np
from jax.experimental import multihost_utils


class StopRequest(contextlib.AbstractContextManager):
    """Inside this context SIGTERM and the first Ctrl-C set `signal`; a second Ctrl-C interrupts.

    A thread answers the first one at once: Python calls its own handlers only when the main thread
    runs Python again, which a compilation may keep from it for minutes.

    The first Ctrl-C raises KeyboardInterrupt at the end of the context, unless that ends with
    another exception: whoever calls learns that the user wants to stop, and trains nothing else.
    """

    def __init__(self):
        self.signal: str | None = None
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

    def agree(self) -> None:
        """Lets all processes of a run have the signal of any; each must call this at the same step.

        A scheduler may send a signal to one process alone. If that one stopped, the others would
        wait for it for ever.
        """
        number = 0 if self.signal is None else signal.Signals[self.signal].value
        largest = int(multihost_utils.process_allgather(np.int32(number)).max())
        self.signal = signal.Signals(largest).name if largest else None

    def _answer(self) -> None:
        """Says that the first signal has come."""
        while received := self._received.recv(1):
            if received[0] in (signal.SIGTERM, signal.SIGINT):
                name = signal.Signals(received[0]).name
                text = f"{name}: the run saves its state and stops; Ctrl-C now stops it at once"
                print(text, file=sys.stderr, flush=True)
                return

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number).name
        signal.signal(number, self._previous[number])
