"""TODO docstring."""

import contextlib
import signal
import threading
from typing import Any


class StopRequest(contextlib.AbstractContextManager):
    """SIGTERM and the first Ctrl-C ask the loop to save and end; the second Ctrl-C ends at once."""

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
