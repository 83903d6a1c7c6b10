"""One step as a pure function: accumulation, what histories never reach, the gate."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.gemm.histories.amax_history import HISTORIES
from fp8jax.lm.data.loader import to_devices, train_batches
from fp8jax.lm.model.models import MODELS
from fp8jax.lm.model.transformer import Transformer, abstract_variables
from fp8jax.lm.optim.master_weights import to_float32
from fp8jax.lm.training import step
from fp8jax.lm.training.build import build
from fp8jax.lm.training.step import TrainState, loss_sum
from fp8jax.lm.training.step import accumulate as accumulate_step
from fp8jax.numerics.formats import FORMATS
from fp8jax.numerics.policy import POLICIES, Policy
from fp8jax.numerics.recipe import Cast, Recipe
from tests.support.runs import ONE_LINEAR, copied, corpus, one_layer, tiny


@pytest.fixture(scope="module", autouse=True)
def policies():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(POLICIES, "one_linear", ONE_LINEAR)
        yield


@functools.cache
def seeded(data):
    """(run, state, batch) of one device after a first step, which wrote the histories."""
    run = build(one_layer(data, precision="one_linear"), jax.devices()[:1])
    batches = train_batches(corpus(*data).train, seed=0, batch_size=16)
    batch = to_devices(next(batches), run.batch_sharding)
    batches.close()
    with jax.set_mesh(run.mesh):
        programs = run.stages[0].programs
        state = programs.initialize()
        state, _ = programs.seed_step(state, batch, programs.numbers(state))
    return run, state, batch


def test_accumulation_adds_gradients_and_takes_the_maximum_of_histories(data):
    """Against each microbatch by itself: same sums but for float32 order, same maxima."""
    run, state, _ = seeded(data)
    batches = train_batches(corpus(*data).train, seed=5, batch_size=16)
    batch = next(batches)
    batches.close()
    accumulate = functools.partial(accumulate_step, run.stages[0].model, state)
    loss, grads, histories = jax.jit(accumulate, static_argnums=1)(batch, 4)
    total = batch["weights"].sum()
    alone = jax.jit(
        jax.value_and_grad(
            lambda p, h, micro: loss_sum(run.stages[0].model, p, h, micro, None) / total,
            argnums=(0, 1),
        )
    )
    parts = [
        alone(state.params, state.histories, {k: v[j::4] for k, v in batch.items()})
        for j in range(4)
    ]
    np.testing.assert_allclose(loss, sum(part[0] for part in parts), rtol=1e-6)
    one = jax.jit(accumulate, static_argnums=1)(batch, 1)[2]
    for got, whole, *each in zip(
        *map(jax.tree.leaves, (histories, one, *(part[1][1] for part in parts))), strict=True
    ):
        np.testing.assert_allclose(got, np.max(each, axis=0), rtol=1e-6)
        np.testing.assert_array_equal(got[:, 1:], whole[:, 1:])  # rolled once, not four times
    for got, *each in zip(
        *map(jax.tree.leaves, (grads, *(part[1][0] for part in parts))), strict=True
    ):
        # bfloat16 activations inside: one program rounds elsewhere than another.
        assert np.linalg.norm(got - sum(each)) <= 2e-2 * np.linalg.norm(got)


def test_a_microbatch_has_every_nth_row_and_a_key_of_its_own(monkeypatch):
    """In place of the loss: its largest row number, and a random integer."""

    def numbered(model, params, histories, micro, key, promoted, total):
        return jnp.max(micro["rows"]) + jax.random.randint(key, (), 0, 2**16) + 0 * params["w"]

    monkeypatch.setattr(step, "loss_sum", numbered)
    recipe = Recipe(fwd_x=Cast(format=FORMATS["e4m3"], rounding="stochastic"))
    model = Transformer(MODELS["llama_tiny"], Policy((("*", recipe),)))
    key = jax.random.key(3)
    state = TrainState(jnp.asarray(7), {"w": jnp.ones(())}, {}, {}, key)
    batch = {"rows": np.arange(8, dtype=np.float32), "weights": np.ones(8, np.float32)}
    loss, _, _ = jax.jit(accumulate_step, static_argnums=(0, 3))(model, state, batch, 4)
    of_step = jax.random.fold_in(key, 7)
    drawn = [jax.random.randint(jax.random.fold_in(of_step, j), (), 0, 2**16) for j in range(4)]
    assert loss == sum(drawn) + 4 + 5 + 6 + 7


def test_a_history_receives_the_largest_of_all_microbatches(monkeypatch):
    """In place of the loss: one whose gradient of a history is the number of the row."""

    def numbered(model, params, histories, micro, key, promoted, total):
        return jnp.sum(histories["h"]) * jnp.max(micro["rows"]) + 0 * params["w"]

    monkeypatch.setattr(step, "loss_sum", numbered)
    model = Transformer(MODELS["llama_tiny"], "bf16")
    histories = {"h": jnp.zeros(2)}
    state = TrainState(jnp.asarray(0), {"w": jnp.ones(())}, histories, {}, jax.random.key(0))
    batch = {"rows": np.float32([2, 9, 1, 3]), "weights": np.ones(4, np.float32)}
    _, _, received = jax.jit(accumulate_step, static_argnums=(0, 3))(model, state, batch, 4)
    np.testing.assert_array_equal(received["h"], [9, 9])


def test_rows_and_keys_of_microbatches_by_hand():
    rows, indices = step._microbatches({"rows": np.arange(6)[:, None]}, 2)
    np.testing.assert_array_equal(rows["rows"][..., 0], [[0, 2, 4], [1, 3, 5]])
    recipe = Recipe(fwd_x=Cast(format=FORMATS["e4m3"], rounding="stochastic"))
    model = Transformer(MODELS["llama_tiny"], Policy((("*", recipe),)))
    state = TrainState(jnp.asarray(7), {}, {}, {}, jax.random.key(3))
    keys = [jax.random.key_data(step._microbatch_key(model, state, i)) for i in indices]
    assert (keys[0] != keys[1]).any()


def test_norms_of_layers_by_hand():
    layers = {"a": np.float32([[[3], [0]], [[6], [2]]]), "b": np.float32([[4], [3]])}
    assert step.unit_norms({"layers": layers, "head": layers["a"]}, ()).tolist() == [5, 7]
    grads = {"layers": {"mlp": {name: {"kernel": g} for name, g in layers.items()}}}
    found = step.unit_norms(grads, ("layers/mlp/b", "layers/mlp/a"))
    np.testing.assert_allclose(found, [[4, 3], [3, np.sqrt(40)]], rtol=1e-6)


def test_histories_reach_neither_clipping_nor_the_optimizer(data):
    stage = build(tiny(data, precision="fp8_delayed")).stages[0]
    state = stage.state
    assert jax.tree.structure(state.histories) != jax.tree.structure({})
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert len(moments) == 2 * len(jax.tree.leaves(state.params))
    variables = abstract_variables(stage.model)
    assert set(variables) == {"params", HISTORIES}


def test_a_rejected_step_changes_nothing(data):
    run, state, batch = seeded(data)
    with jax.set_mesh(run.mesh):
        state = copied(state)
        bad = dict(batch, weights=batch["weights"].at[3, 3].set(jnp.nan))
        before = jax.tree.map(np.array, dataclasses.replace(state, key=0))
        programs = run.stages[0].programs
        numbers = programs.numbers(state)
        after, out = programs.step(state, bad, numbers)
        again = programs.numbers(after)
    assert np.isnan(out["loss"])
    jax.tree.map(np.testing.assert_array_equal, numbers, again)  # the learning rate waits, too
    assert float(out["learning_rate"]) == float(numbers.learning_rate) > 0
    jax.tree.map(np.testing.assert_array_equal, before, dataclasses.replace(after, key=0))


@pytest.mark.optimized_too
def test_bfloat16_master_weights_take_the_float32_step_and_round_it_once(data):
    """Against a float32 run with the same values: equal loss and optimizer state, and weights equal
    after one rounding. Two microbatches, whose gradients add up in float32."""
    wide, narrow = (
        build(one_layer(data, grad_accum=2, optimizer__master_weights=dtype), jax.devices()[:1])
        for dtype in ("float32", "bfloat16")
    )
    batches = train_batches(corpus(*data).train, seed=0, batch_size=16)
    batch = to_devices(next(batches), wide.batch_sharding)
    batches.close()
    with jax.set_mesh(wide.mesh):
        state = narrow.stages[0].programs.initialize()
        assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("bfloat16")}
        same = copied(state)
        same = dataclasses.replace(same, params=jax.jit(to_float32)(same.params))
        numbers = narrow.stages[0].programs.numbers(state)
        state, out = narrow.stages[0].programs.step(state, batch, numbers)
        same, expected = wide.stages[0].programs.step(same, batch, numbers)
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), same.params)
    jax.tree.map(np.testing.assert_array_equal, out, expected)
    jax.tree.map(np.testing.assert_array_equal, state.params, rounded)
    jax.tree.map(np.testing.assert_array_equal, state.opt_state, same.opt_state)


def test_a_run_with_rejected_steps_equals_one_without_those_batches(data):
    """To the bit: parameters, moments in FP8 and their rounding, histories, and what the spike
    detector remembers. Seeding, then 22 good batches with a NaN and three spikes among them."""
    # One moment: to encode one takes as long to compile as all else.
    moments = dict(optimizer__moments="fp8", optimizer__name="lion")
    config = one_layer(data, precision="one_linear", recovery__spike_window=8, **moments)
    run = build(config, jax.devices()[:1])
    batches = train_batches(corpus(*data).train, seed=0, batch_size=16)
    good = [to_devices(next(batches), run.batch_sharding) for _ in range(23)]
    batches.close()
    nan = dict(good[0], weights=good[0]["weights"].at[3, 3].set(jnp.nan))
    spike = dict(good[0], targets=255 - good[0]["targets"])

    def train(batches):
        verdicts, rates = [], []
        with jax.set_mesh(run.mesh):
            programs = run.stages[0].programs
            state = programs.initialize()
            state, _ = programs.seed_step(state, good[0], programs.numbers(state))
            for batch in batches:
                state, out = programs.step(state, batch, programs.numbers(state))
                verdicts.append(int(out["verdict"]))
                rates.append(float(out["learning_rate"]))
        return jax.tree.map(np.array, dataclasses.replace(state, key=0)), verdicts, rates

    state, verdicts, rates = train([*good[1:4], nan, *good[4:21], *[spike] * 3, *good[21:]])
    assert verdicts == [0] * 3 + [2] + [0] * 17 + [1] * 3 + [0] * 2
    expected, none, steady = train(good[1:])
    assert not any(none) and expected.step == 23
    accepted = [rate for rate, verdict in zip(rates, verdicts, strict=True) if not verdict]
    assert accepted == steady
    # A rejected step has the rate of the next one.
    assert all(rates[i] == rates[i + 1] for i, verdict in enumerate(verdicts) if verdict)
    jax.tree.map(np.testing.assert_array_equal, expected, state)


def test_without_a_detector_the_state_remembers_nothing(data):
    run = build(tiny(data))
    assert jax.tree.leaves(run.stages[0].state.spikes) == []
    run = build(tiny(data, recovery__spike_window=8))
    assert len(jax.tree.leaves(run.stages[0].state.spikes)) == 2
