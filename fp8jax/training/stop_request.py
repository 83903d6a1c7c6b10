"""SIGTERM and Ctrl-C as requests to save and stop."""

import contextlib
import signal
import threading
from typing import Any

import numpy as np
from jax.experimental import multihost_utils


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

    def agree(self) -> None:
        """Let all processes of a run have the signal of any; each must call this at the same step.

        A scheduler may send a signal to one process alone. If that one stopped, the others would
        wait for it for ever.
        """
        number = 0 if self.signal is None else signal.Signals[self.signal].value
        largest = int(multihost_utils.process_allgather(np.int32(number)).max())
        self.signal = signal.Signals(largest).name if largest else None

    def _handle(self, number, frame):
        self.signal = signal.Signals(number).name
        signal.signal(number, self._previous[number])
