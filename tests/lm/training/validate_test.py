"""Which rows validate, and that the number of microbatches does not change the loss."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.lm.data.rows import PackedRows
from fp8jax.lm.training.build import build
from fp8jax.lm.training.validate import validate
from tests.support.runs import corpus, tiny


def sums(state, batch):
    """In the place of eval_step: sums of small whole numbers, exact in float32 in any order."""
    weights = batch["weights"]
    return {
        "nats": jnp.sum(batch["targets"] * weights),
        "tokens": jnp.sum(weights),
        "bytes": jnp.sum(weights),
        "hidden": jnp.max(batch["targets"])[None] / 2,
    }


def test_a_batch_validates_in_all_its_microbatches(data):
    seen = []

    def counted(state, batch):
        seen.append(len(batch["weights"]))
        return sums(state, batch)

    run = build(tiny(data, batch_size=8, grad_accum=4, valid__batches=2), jax.devices()[:1])
    (stage,) = run.stages
    stage = dataclasses.replace(
        stage, programs=dataclasses.replace(stage.programs, eval_step=counted)
    )
    validate(run, stage, stage.state, corpus(*data))
    assert seen == [2] * 8


@pytest.mark.parametrize("valid_batches", [1, 2, None])
def test_grad_accum_does_not_change_which_rows_validate(data, valid_batches):
    found = []
    for grad_accum in (1, 2, 4):
        changes = dict(batch_size=8, grad_accum=grad_accum, valid__batches=valid_batches)
        run = build(tiny(data, **changes), jax.devices()[:1])
        (stage,) = run.stages
        programs = dataclasses.replace(stage.programs, eval_step=sums)
        stage = dataclasses.replace(stage, programs=programs)
        found.append(validate(run, stage, stage.state, corpus(*data)))
    assert found[0] == found[1] == found[2]

    (rows,) = corpus(*data).valid.values()
    assert isinstance(rows, PackedRows) and len(rows) > 2 * 8 and len(rows) % 8
    count = len(rows) if valid_batches is None else valid_batches * 8
    weights = np.stack([rows[i]["weights"] for i in range(count)])
    targets = np.stack([rows[i]["targets"] for i in range(count)])
    scalars, hidden = found[0]
    assert scalars["valid_loss"] == (targets * weights).sum() / weights.sum()
    assert hidden == [targets.max() / 2]
