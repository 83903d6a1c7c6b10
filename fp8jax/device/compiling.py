"""Whether this process compiles now, and for how long it has.

JAX tells listeners how long lowering a program took and how long compiling it took, each when it is
over. A thread lowers a program right before it compiles it. So it compiles from the first of these
events to the second; tracing and lowering themselves do not count.
"""

import threading
import time

import jax

LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
COMPILED = "/jax/core/compile/backend_compile_duration"


class Compiling:
    """Follows, from `open` to `close`, which threads compile."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}  # thread -> when it began to compile

    def open(self) -> None:
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def seconds(self) -> float:
        """Returns for how long a thread has compiled, the longest of them; 0 if none does."""
        began = self._since.copy().values()
        return time.monotonic() - min(began) if began else 0.0

    def forget(self) -> None:
        """Says that no thread compiles now: what was lowered and not compiled is for reading."""
        self._since.clear()

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == LOWERED:
            self._since[threading.get_ident()] = time.monotonic()
        elif event == COMPILED:
            self._since.pop(threading.get_ident(), None)
