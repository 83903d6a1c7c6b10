"""TODO docstring."""

import math
from typing import Any

import jax
from ml_collections import ConfigDict

from fp8jax.data.loader import Batch
from fp8jax.records.checkpoint import Checkpointer
from fp8jax.records.metrics import Metrics
from fp8jax.stability.bad_steps import CAUSES, NON_FINITE, SPIKE
from fp8jax.stability.ladder import STOP
from fp8jax.training.first_bad import find_bad, first_bad
from fp8jax.training.resume import checkpoint_items, initial_stage
from fp8jax.training.run import Run
from fp8jax.training.step import TrainState


class StoppedError(RuntimeError):
    """A step was rejected, and the ladder had nothing left; nothing of it was kept or saved."""


class NonFiniteError(StoppedError):
    """The same, for a loss or gradient that is not finite."""


class Recovery:
    """What is done about rejected steps: the ladder's rungs, each within its budget."""

    def __init__(
        self, run: Run, config: ConfigDict, checkpointer: Checkpointer, metrics: Metrics,
        spent: dict[str, int],
    ):  # fmt: skip
        self._run, self._config = run, config
        self._checkpointer, self._metrics = checkpointer, metrics
        self.spent = {name: 0 for name, _ in run.ladder.rungs} | spent

    def settle(
        self, step: int, scalars: dict[str, Any], stage: Run, state: TrainState, batch: Batch,
        seeding: bool,
    ) -> tuple[dict[str, Any], Run, TrainState, bool]:  # fmt: skip
        """The step's scalars, and stage, state and seeding to go on with: a seeding step that was
        rejected, or repeated without histories, is still to come.

        Raises StoppedError where nothing is left to try.
        """
        tried: set[str] = set()
        while cause := rejection_cause(scalars):
            rung = self._run.ladder.next(self.spent, tried)
            if rung == STOP:
                self._stop(step, cause, scalars, stage, state, batch)
            tried.add(rung)
            if rung == "rollback" and self._checkpointer.read_meta() is None:
                continue  # nothing was saved yet
            self.spent[rung] += 1
            values = {name: scalars[name] for name in ("loss", "grad_norm")}
            self._metrics.event(step, rung, cause=cause, **values, spent=dict(self.spent))
            if rung == "repeat":
                state, out = stage.repeat_step(state, batch)
                again = {name: float(value) for name, value in jax.device_get(out).items()}
                scalars = scalars if rejection_cause(again) else again
                continue
            if rung == "rollback":
                stage, state, seeding = self._roll_back()
            break
        return scalars, stage, state, seeding

    def _roll_back(self) -> tuple[Run, TrainState, bool]:
        found = self._checkpointer.read_meta()
        assert found is not None  # it was looked at
        abstract = checkpoint_items(self._run.at(found[0]).state)
        return initial_stage(self._run, self._checkpointer.restore(abstract))

    def _stop(
        self, step: int, cause: str, scalars: dict[str, Any], stage: Run, state: TrainState,
        batch: Batch,
    ) -> None:  # fmt: skip
        values = {name: scalars[name] for name in ("loss", "grad_norm")}
        said = ", ".join(f"{name}={value:g}" for name, value in values.items())
        first = ""
        if cause == CAUSES[NON_FINITE]:
            model = (
                stage.model if int(state.step) else stage.model.clone(policy=stage.policy.seeding())
            )
            find = jax.jit(lambda s, b: find_bad(model, s, b, self._config.grad_accum))
            first = first_bad(jax.device_get(find(state, batch))) or "nothing, when computed again"
        self._metrics.event(step, STOP, cause=cause, **values, first=first, spent=self.spent)
        spike = cause == CAUSES[SPIKE]
        kind = StoppedError if spike else NonFiniteError
        what = "a spike" if spike else f"not finite; first: {first}"
        raise kind(
            f"step {step}: {said} is {what}. The update was not applied and nothing of it was"
            " saved: what checkpoints there are hold finite steps. Of recovery="
            f"{self._config.recovery!r} nothing is left to try. A lower learning rate or"
            " precision=bf16 may help."
        )


def rejection_cause(scalars: dict[str, Any]) -> str:
    """Why the step was rejected, "" if it was not."""
    if not (math.isfinite(scalars["loss"]) and math.isfinite(scalars["grad_norm"])):
        return CAUSES[NON_FINITE]
    return CAUSES[SPIKE] if "verdict" in scalars and scalars["verdict"] == SPIKE else ""
