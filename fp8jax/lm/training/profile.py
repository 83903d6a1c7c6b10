"""A trace of some steps, for xprof: the flag --profile=A:B."""

import os

import jax

from fp8jax.lm.training.step import TrainState


def parse_profile(text: str) -> tuple[int, int]:
    """The first and last step to trace, of "A:B".

    Raises:
      ValueError: anything but two whole numbers with 1 <= A <= B.
    """
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise ValueError(f"profile={text!r}: give the first and last step as A:B, 1 <= A <= B")
    return int(first), int(last)


class Profile:
    """Traces the steps `steps`, first to last, into WORKDIR/profile; does nothing for None."""

    def __init__(self, steps: tuple[int, int] | None, workdir: str):
        self.directory = os.path.join(workdir, "profile")
        self._steps = steps
        self._running = False

    def require_within(self, start: int, num_steps: int) -> None:
        """Raises ValueError if the run will not train all of the steps to trace."""
        if self._steps and not start < self._steps[0] <= self._steps[1] <= num_steps:
            first, last = self._steps
            raise ValueError(
                f"profile={first}:{last} does not lie within the steps {start + 1} to {num_steps} "
                "of this run"
            )

    def start_if_due(self, step: int, state: TrainState) -> None:
        if self._steps and step == self._steps[0]:
            jax.block_until_ready(state)  # so that the trace does not hold the step before
            jax.profiler.start_trace(self.directory)
            self._running = True

    def ends_with(self, step: int) -> bool:
        return self._running and self._steps is not None and step == self._steps[1]

    def stop(self, state: TrainState | None = None) -> None:
        """Ends a running trace, once `state` is ready."""
        if self._running:
            jax.block_until_ready(state)
            jax.profiler.stop_trace()
            self._running = False
