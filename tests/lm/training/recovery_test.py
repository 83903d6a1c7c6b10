"""What the ladder does about a rejected step, with stand-ins for all that trains or writes."""

from unittest import mock

import jax.numpy as jnp
import pytest

from fp8jax.lm.records.checkpoint import Checkpointer, Restored
from fp8jax.lm.records.metrics import Metrics
from fp8jax.lm.stability.bad_steps import ACCEPTED, SPIKE
from fp8jax.lm.training.ladder import Ladder
from fp8jax.lm.training.optional_state import OptionalState
from fp8jax.lm.training.recovery import Recovery
from fp8jax.lm.training.resume import Position, initial_position
from fp8jax.lm.training.run import Run, Stage
from fp8jax.lm.training.step import TrainState

FIRST = {"loss": 3.0, "grad_norm": 1.0, "verdict": SPIKE, "promoted": 2.0}


@pytest.mark.parametrize(
    ("verdict", "overflow", "events", "settled"),
    [
        (SPIKE, 0.0, [("repeat", 3.0), ("skip", 3.0)], 3.0),
        (ACCEPTED, 1.0, [("repeat", 3.0), ("skip", 3.0)], 3.0),  # left out, for its loss scale
        (ACCEPTED, 0.0, [("repeat", 3.0)], 4.0),
    ],
)
def test_a_repeated_step_has_its_own_numbers_only_if_it_is_accepted(
    verdict, overflow, events, settled
):
    run, stage = mock.Mock(spec=Run), mock.Mock(spec=Stage)
    run.ladder = Ladder.parse("repeat:1,skip:1")
    state = TrainState(0, {}, {}, {}, None)
    stage.programs = mock.Mock()
    again = {"loss": 4.0, "grad_norm": 2.0, "verdict": verdict, "overflow": overflow}
    stage.programs.repeat_step.return_value = state, again
    metrics = mock.Mock(spec=Metrics)
    recovery = Recovery(run, mock.Mock(spec=Checkpointer), metrics, {})
    scalars = recovery.settle(7, FIRST, Position(stage=stage, state=state, seeding=False), {})
    written = [(call.args[1], call.kwargs["loss"]) for call in metrics.event.call_args_list]
    assert (written, scalars["loss"], scalars["promoted"]) == (events, settled, 2.0)


@pytest.mark.full
@pytest.mark.parametrize(
    ("meta", "seeds"),
    [({"seeding": True}, True), ({"seeding": False}, False), ({}, False)],
)
def test_a_checkpoint_says_whether_the_next_step_seeds(meta, seeds):
    """The first step of a stage was rejected, and some of its histories go on from the last one."""
    run, stage = mock.Mock(spec=Run), mock.Mock(spec=Stage)
    stage.state, run.at.return_value = TrainState(0, {}, {}, {}, None), stage
    run.optional_state = (
        OptionalState(field="histories", item="histories", key=lambda *_: None, fresh=None),
    )
    histories = {"old": jnp.ones(2), "new": jnp.zeros(2)}
    state = {"step": 3, "opt_state": {}, "key": None}
    arrays = {"params": {}, "state": state, "histories": histories}
    restored = Restored(step=3, arrays=arrays, meta=meta)
    assert initial_position(run, restored).seeding is seeds
