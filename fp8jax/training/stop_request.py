"""SIGTERM and Ctrl-C as requests to save and stop."""

import contextlib
import signal
import threading
from typing import Any


class StopRequest(contextlib.AbstractContextManager):
    """Inside this context SIGTERM and the first Ctrl-C set `signal`; a second Ctrl-C interrupts."""

    def __init__(self):
        self.signal: str | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number, frame):
        self.signal = signal.Signals(number).name
        signal.signal(number, self._previous[number])
