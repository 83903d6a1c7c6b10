"""Whether this process compiles now, and for how long it has.

JAX tells listeners how long tracing a function, lowering a program and compiling it took, each when
it is over. A thread lowers a program right before it compiles it. So XLA compiles from the second
of these events to the third. Python traces and lowers meanwhile, and each function that a program
calls is an event: one that came lately says that a program is made.
"""

import threading
import time

import jax

_ANY = "/jax/core/compile/"
LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
COMPILED = "/jax/core/compile/backend_compile_duration"


class Compiling:
    """Follows, from `open` to `close`, which threads compile."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}  # thread -> when it began to compile
        self._lately = False  # whether an event has come since `makes_program` was asked

    def open(self) -> None:
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def seconds(self) -> float:
        """Returns for how long a thread has compiled, the longest of them; 0 if none does."""
        began = self._since.copy().values()
        return time.monotonic() - min(began) if began else 0.0

    def makes_program(self) -> bool:
        """Returns whether a thread compiles, or has traced or lowered since the last question."""
        lately, self._lately = self._lately, False
        return lately or bool(self._since)

    def forget(self) -> None:
        """Says that no thread compiles now: what was lowered and not compiled is for reading."""
        self._since.clear()

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        self._lately = self._lately or event.startswith(_ANY)
        if event == LOWERED:
            self._since[threading.get_ident()] = time.monotonic()
        elif event == COMPILED:
            self._since.pop(threading.get_ident(), None)
