"""What is done about a rejected step: the rungs of the ladder (lm/training/ladder.py), in order.

The compiled step has already selected the old state. What is left to decide is whether to repeat
the batch in high precision, go on with the next one, go back to a checkpoint, or stop.
"""

import math
from typing import Any

import jax

from fp8jax.lm.data.loader import Batch
from fp8jax.lm.records.checkpoint import Checkpointer
from fp8jax.lm.records.events import Cause, Event
from fp8jax.lm.records.metrics import Metrics
from fp8jax.lm.stability.bad_steps import SPIKE
from fp8jax.lm.training.faults import inject_gradient
from fp8jax.lm.training.first_bad import find_bad, first_bad
from fp8jax.lm.training.resume import Position, initial_position, valid_items
from fp8jax.lm.training.run import Run
from fp8jax.lm.training.step import scale_of


class StoppedError(RuntimeError):
    """A step was rejected, and no rung of the ladder was left. Its update was never applied."""


class NonFiniteError(StoppedError):
    """A `StoppedError` whose cause is a loss or gradient that is not finite."""


class Recovery:
    """Climbs the ladder for each rejected step, within the budgets of a run.

    Attributes:
      run: whose checkpoints a rollback reads.
      spent: how often each rung was used; a checkpoint carries it.
    """

    def __init__(
        self,
        run: Run,
        checkpointer: Checkpointer,
        metrics: Metrics,
        spent: dict[str, int],
    ):
        self.run, self._checkpointer, self._metrics = run, checkpointer, metrics
        self.spent = {name: 0 for name, _ in run.ladder.rungs} | spent

    def settle(
        self, step: int, scalars: dict[str, Any], position: Position, batch: Batch
    ) -> dict[str, Any]:
        """Tries rungs until the step is settled; returns the step's scalars.

        `position` is changed in place: by a repeated step its state, by a rollback all of it.

        Raises:
          StoppedError: no rung is left.
        """
        tried: set[str] = set()
        while cause := rejection_cause(scalars):
            rung = self.run.ladder.next(self.spent, tried)
            if rung == Event.STOP:
                self._stop(step, cause, scalars, position, batch)
            tried.add(rung)
            if rung == Event.ROLLBACK and self._checkpointer.read_meta() is None:
                continue  # nothing was saved yet
            self.spent[rung] += 1
            values = {name: scalars[name] for name in ("loss", "grad_norm")}
            self._metrics.event(step, Event(rung), cause=cause, **values, spent=dict(self.spent))
            if rung == Event.REPEAT:
                programs = position.stage.programs
                numbers = programs.numbers(position.state)
                position.state, out = programs.repeat_step(position.state, batch, numbers)
                again = {name: float(value) for name, value in jax.device_get(out).items()}
                if not (rejection_cause(again) or overflowed(again)):
                    scalars = scalars | again  # which has no promotions
                continue
            if rung == Event.ROLLBACK:
                self._roll_back(position)
            break
        return scalars

    def _roll_back(self, position: Position) -> None:
        newest = self._checkpointer.read_meta()
        assert newest is not None  # `settle` has looked
        items = valid_items(self.run, *newest)  # it may be older than a change of the config
        earlier = initial_position(self.run, self._checkpointer.restore(items))
        position.stage, position.state = earlier.stage, earlier.state
        position.seeding = earlier.seeding

    def _stop(
        self, step: int, cause: Cause, scalars: dict[str, Any], position: Position, batch: Batch
    ) -> None:
        values = {name: scalars[name] for name in ("loss", "grad_norm")}
        said = ", ".join(f"{name}={value:g}" for name, value in values.items())
        first = self._first_bad(position, batch) if cause == Cause.NON_FINITE else ""
        self._metrics.event(step, Event.STOP, cause=cause, **values, first=first, spent=self.spent)
        kind = StoppedError if cause == Cause.SPIKE else NonFiniteError
        what = "a spike" if cause == Cause.SPIKE else f"not finite; first: {first}"
        raise kind(
            f"step {step}: {said} is {what}. The update was not applied and nothing of it was"
            " saved: the checkpoints of this run hold finite steps. No rung of"
            f" recovery.ladder={self.run.settings.recovery_ladder!r} is left. A lower learning"
            " rate or precision=bf16 may help."
        )

    def _first_bad(self, position: Position, batch: Batch) -> str:
        """The first tensor of the step that is not finite, from computing the step once more."""
        stage = position.stage
        model = stage.model.clone(seeded=not position.seeding)
        parts, scaling = self.run.settings.grad_accum, self.run.scaling
        find = jax.jit(
            lambda s, b, p: find_bad(
                model, s, b, parts, p, scale=scale_of(scaling, s), inject=inject_gradient
            )
        )
        promotion = stage.promotion(position.state)
        flags = jax.device_get(find(position.state, batch, promotion))
        return first_bad(flags) or "nothing, when computed again"


def overflowed(scalars: dict[str, Any]) -> bool:
    """Whether the step was left out because its gradients overflowed under a dynamic loss scale."""
    return bool("overflow" in scalars and scalars["overflow"])


def rejection_cause(scalars: dict[str, Any]) -> Cause | None:
    """Why the step was rejected; None if it was applied, or left out for its loss scale."""
    if overflowed(scalars):
        return None
    if not (math.isfinite(scalars["loss"]) and math.isfinite(scalars["grad_norm"])):
        return Cause.NON_FINITE
    return Cause.SPIKE if "verdict" in scalars and scalars["verdict"] == SPIKE else None
