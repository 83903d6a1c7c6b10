"""Aborts of JAX's runtime, held so that the process can still say why it ends."""

import ctypes
import signal
import time
from typing import Any

_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)
_kept: list[Any] = []  # handlers, which C may call as long as the process lives


class Aborts:
    """From `open` to `close` a thread that aborts waits for ever, and the others go on.

    JAX aborts a process whose coordinator has gone, at once and in a thread of its own. Whoever
    opens this looks at `seen`, and ends the process. Python's own handlers of signals cannot do
    that: they run in the main thread, which may wait for a collective, and after the abort.

    Attributes:
      seen: whether a thread has aborted.
    """

    def __init__(self) -> None:
        self.seen = False

    def open(self) -> None:
        handler = _HANDLER(self._wait)
        _kept.append(handler)
        self._before = _set_handler(ctypes.cast(handler, ctypes.c_void_p))

    def close(self) -> None:
        if not self.seen:
            _set_handler(self._before)

    def _wait(self, number: int) -> None:
        self.seen = True
        while True:
            time.sleep(60)


def _set_handler(handler: Any) -> Any:
    """Sets the handler of SIGABRT; returns the one before."""
    function = ctypes.CDLL(None).signal
    function.argtypes, function.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    return function(signal.SIGABRT, handler)
