"""Learning rate, schedule, steps and clipping threshold: inputs of a training step, not constants.

That a rejected step does not move the learning rate is in step_test.py.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fp8jax.device import xla
from fp8jax.lm.optim.config import OptimizerConfig
from fp8jax.lm.optim.optimizers import make_optimizer
from fp8jax.lm.training.build import build
from fp8jax.lm.training.loop import train_and_evaluate
from fp8jax.lm.training.programs import lower_program
from fp8jax.numerics.policy import POLICIES
from tests.support.runs import ONE_LINEAR, one_layer

SHORT = dict(
    optimizer__schedule="wsd",
    optimizer__learning_rate=0.5,
    optimizer__warmup_steps=2,
    num_steps=13,
    optimizer__clip_norm=0.25,
)
OTHERS = {"short": SHORT, "unclipped": SHORT | dict(optimizer__clip_norm=math.inf)}
GNMR = dict(precision="fp8_current", gnmr__alpha=(1.5, 1.1), gnmr__first=0.5)


def one_device(config):
    return build(config, jax.devices()[:1])


@pytest.mark.parametrize(
    ("recipe", "names", "numbers"),
    [
        (dict(precision="one_linear"), ["seed_step", "step"], OTHERS["unclipped"]),
        (GNMR, ["step", "repeat_step"], OTHERS["short"]),
    ],
    ids=["delayed", "gnmr"],
)
def test_runs_that_differ_in_their_numbers_have_one_text(data, monkeypatch, recipe, names, numbers):
    monkeypatch.setitem(POLICIES, "one_linear", ONE_LINEAR)

    def texts(names=names, **changes):
        run = one_device(one_layer(data, **recipe, **changes))
        return [lower_program(run, run.stages[0], name).as_text() for name in names]

    expected = texts()
    assert texts(**numbers) == expected
    assert (
        texts(["step"], optimizer__weight_decay=0.2)[0] not in expected
    )  # what is a constant shows


@pytest.mark.parametrize("numbers", [{}, *OTHERS.values()], ids=["base", *OTHERS])
def test_the_numbers_of_a_step_are_those_of_the_config_at_the_count_of_the_state(data, numbers):
    config = one_layer(data, **GNMR, **numbers)
    (stage,) = one_device(config).stages
    rate = make_optimizer(OptimizerConfig.from_config(config))[1]
    count = optax.ScaleByScheduleState(jnp.int32(9))
    is_schedule = lambda node: isinstance(node, type(count))  # noqa: E731
    opt_state = jax.tree.map(
        lambda leaf: count if is_schedule(leaf) else leaf,
        stage.state.opt_state,
        is_leaf=is_schedule,
    )
    got = stage.programs.numbers(dataclasses.replace(stage.state, opt_state=opt_state))
    assert float(got.learning_rate) == float(jax.jit(rate)(jnp.int32(9)))
    assert float(got.clip_norm) == config.optimizer.clip_norm
    assert int(got.promoter) == round(0.5 * config.num_steps)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(got)} == {"float32", "int32"}
    without = (
        one_device(one_layer(data))
        .stages[0]
        .programs.numbers(dataclasses.replace(stage.state, opt_state=opt_state))
    )
    assert without.promoter is None


def test_every_device_has_the_numbers(data):
    run = build(one_layer(data, mesh="fsdp"))
    with jax.set_mesh(run.mesh):
        state = run.stages[0].programs.initialize()
        got = run.stages[0].programs.numbers(state)
    for leaf in jax.tree.leaves(got):
        assert leaf.sharding.is_fully_replicated and len(leaf.sharding.device_set) == 8


@pytest.fixture
def programs_kept(tmp_path):
    """A function to the names of the programs of training steps in an own compilation cache."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: jax.config.values[name] for name in names}
    folder = tmp_path / "cache"
    jax.config.update(names[0], str(folder))
    jax.config.update(names[1], 0.0)
    xla.compilation_cache.reset_cache()
    yield lambda: {path.name for path in folder.iterdir() if path.name.startswith("jit_step-")}
    for name, value in before.items():
        jax.config.update(name, value)
    xla.compilation_cache.reset_cache()


@pytest.mark.counts_compilations
def test_a_run_resumed_with_other_numbers_compiles_no_step_anew(data, tmp_path, programs_kept):
    changes = dict(valid__batches=1)
    train_and_evaluate(one_layer(data, num_steps=1, **changes), str(tmp_path / "run"))
    compiled = programs_kept()
    assert len([name for name in compiled if name.endswith("-cache")]) == 1
    other = one_layer(data, resume_with_changes=True, **changes | SHORT)
    other.num_steps = 3
    last = train_and_evaluate(other, str(tmp_path / "run"))
    assert programs_kept() == compiled
    rate = make_optimizer(OptimizerConfig.from_config(other))[1]
    np.testing.assert_allclose(last["learning_rate"], rate(2), rtol=1e-6)
