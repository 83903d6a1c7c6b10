"""Telemetry of linen and NNX models, of the transformer, and which tensors it names."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp8jax
from fp8jax import telemetry
from fp8jax.lm.model.config import ModelConfig
from fp8jax.lm.model.freeze import freeze
from fp8jax.lm.model.telemetry import measure_forward
from fp8jax.lm.model.transformer import Transformer, abstract_variables
from fp8jax.nn import HISTORIES
from fp8jax.telemetry.rows import Table
from tests.support import arrays
from tests.support.random_weights import random_weights

DELAYED = "fp8_delayed:history=2"
QUANTIZED = functools.partial(fp8jax.nn.Fp8DotGeneral, DELAYED)
BLOCKS = functools.partial(fp8jax.nn.Fp8DotGeneral, "fp8_block")


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        h = nn.relu(nn.Dense(32, dot_general_cls=BLOCKS)(x))
        return x + nn.Dense(16, dot_general_cls=QUANTIZED)(h), None


class Stack(nn.Module):
    named: tuple = (fp8jax.nn.TELEMETRY,)

    @nn.compact
    def __call__(self, x):
        axes = {name: 0 for name in ("params", fp8jax.nn.HISTORIES, *self.named)}
        layers = nn.scan(nn.remat(Layer), variable_axes=axes, split_rngs={"params": True}, length=3)
        x, _ = layers()(x, None)
        return fp8jax.nn.Dense(16, DELAYED)(x)


def normal(shape):
    return jnp.asarray(arrays.normal(shape))


X = normal((8, 16))


def variables_of(model, x=X):
    return random_weights(jax.eval_shape(model.init, jax.random.key(0), x))


def row(table, linear, cast, layer=-1, what_if=False):
    (found,) = [
        row
        for row in table.rows
        if (row.linear, row.cast, row.layer, row.what_if) == (linear, cast, layer, what_if)
    ]
    return found


STACK = Stack()
LAYERS = "ScanCheckpointLayer_0"


@functools.cache
def stack():
    return variables_of(STACK)


def loss_of_stack(variables, x):
    return jnp.mean(STACK.apply(variables, x) ** 2)


def measured(variables):
    """The telemetry of a step of the stack. One program for all tests."""
    return telemetry.measure(loss_of_stack, variables, X, what_if="fp4_naive")


def test_linen_layers_in_a_scan_with_rematerialization():
    table = measured(stack())
    linears = {"Dense_0", "CheckpointLayer_0/Dense_0", "CheckpointLayer_0/Dense_1"}
    assert {r.linear.split("Scan")[-1] for r in table.rows} == linears
    assert len(table.rows) == (1 + 3 + 3) * 12  # casts of the run, and those of fp4_naive
    kernels = stack()["params"][LAYERS]["Dense_0"]["kernel"]
    for layer in range(3):
        found = row(table, f"{LAYERS}/Dense_0", "fwd_w", layer)
        assert found.amax == np.abs(kernels[layer]).max() and found.elements == 16 * 32
        assert found.recipe == "fp8_block" and found.delay is None
    last = row(table, "Dense_0", "fwd_w")
    assert last.delay == 0 and last.scale == pytest.approx(last.amax / 448)
    assert row(table, "Dense_0", "fwd_w", what_if=True).format == "e2m1"
    assert row(table, "Dense_0", "fwd_w", what_if=True).sqnr_db < last.sqnr_db


def test_forward_pass_and_bad_input():
    model = Stack(())
    variables = variables_of(model)

    def outputs(v, x):
        return model.apply(v, x)

    with pytest.raises(ValueError, match="'ScanCheckpointLayer_0/.*must name the collection"):
        telemetry.measure(outputs, variables, X, gradients=False)
    dense = nn.Dense(4, dot_general_cls=QUANTIZED)
    variables = variables_of(dense)
    table = telemetry.measure(dense.apply, variables, X, gradients=False)
    assert [r.cast for r in table.rows] == ["fwd_x", "fwd_w"]
    assert table.rows[0].amax == np.abs(X).max()
    assert "fwd_x  fp8_delayed:history=2  e4m3" in str(table)
    with pytest.raises(TypeError, match="must return a scalar"):
        telemetry.measure(dense.apply, variables, X)
    with pytest.raises(ValueError, match="unknown recipe 'fp9'"):
        telemetry.measure(dense.apply, variables, X, what_if="fp9")
    with pytest.raises(ValueError, match="no linear to measure"):
        telemetry.measure(nn.Dense(4).apply, variables, X, gradients=False)
    with pytest.raises(ValueError, match="no 'params', but kernel"):
        telemetry.measure(dense.apply, {"kernel": X}, X)
    with pytest.raises(TypeError, match="expected flax's variables"):
        telemetry.measure(dense.apply, X, X)


def test_nnx_model_with_a_layer_that_is_called_twice():
    class MLP(nnx.Module):
        def __init__(self, rngs):
            options = dict(kernel_init=lambda key, shape, dtype: normal(shape), rngs=rngs)
            self.up = fp8jax.nnx.Linear(16, 16, "fp8_delayed:history=2", **options)
            self.down = fp8jax.nnx.Linear(16, 4, "fp8_block", **options)

        def __call__(self, x):
            return self.down(nnx.relu(self.up(nnx.relu(self.up(x)))))

    model = MLP(nnx.Rngs(0))
    before = nnx.to_pure_dict(nnx.state(model))
    table = telemetry.measure(lambda m, x: jnp.mean(m(x) ** 2), model, X)
    jax.tree.map(np.testing.assert_array_equal, before, nnx.to_pure_dict(nnx.state(model)))
    assert row(table, "up", "fwd_x").elements == 2 * X.size
    h = nnx.jit(lambda up, x: nnx.relu(up(x)))(model.up, X)
    assert row(table, "up", "fwd_x").amax == max(np.abs(X).max(), np.abs(h).max())
    assert row(table, "down", "dgrad_g").amax > 0


# Tensors out of line ------------------------------------------------------------------------------


def test_one_weight_times_1000_is_named_and_no_other():
    assert telemetry.out_of_line(measured(stack()).rows) == []
    for linear, change in (("Dense_0", "all"), ("Dense_0", "one"), ("Dense_1", "all")):
        changed = jax.tree.map(np.array, stack())
        leaf = changed["params"][LAYERS][linear]["kernel"]
        leaf[1 if change == "all" else (1, 3, 5)] *= 1000
        found = telemetry.out_of_line(measured(changed).rows)
        assert [(f.layer, f.linear, f.operand) for f in found] == [(1, f"{LAYERS}/{linear}", "w")]
        assert f"w of {LAYERS}/{linear} in layer 1: its amax" in str(found[0])


def at_step(table, step):
    return [dataclasses.replace(r, step=step) for r in table.rows]


def filled(variables, table):
    """Variables whose histories are full of the amaxes of a table."""
    amaxes = {(r.linear, r.operand, r.layer): r.amax for r in table.rows}

    def fill(path, history):
        *linear, name = (key.key for key in path if key.key != "Fp8DotGeneral_0")
        layers = range(3) if history.ndim > 1 else [-1]
        own = np.float32([amaxes["/".join(linear), name[0], layer] for layer in layers])
        return np.broadcast_to(own[:, None], (len(own), 2)).reshape(history.shape)

    return {**variables, HISTORIES: jax.tree_util.tree_map_with_path(fill, variables[HISTORIES])}


def test_a_spike_in_a_delayed_run_is_named():
    first = measured(stack())
    variables = jax.tree.map(np.array, filled(stack(), first))
    steady = at_step(measured(variables), 1)
    assert telemetry.out_of_line(steady) == []
    hidden = row(Table(tuple(steady)), f"{LAYERS}/Dense_1", "fwd_x", 1).amax
    variables["params"][LAYERS]["Dense_0"]["bias"][1, 0] += 64 * hidden
    first, *others = telemetry.out_of_line([*steady, *at_step(measured(variables), 2)])
    assert (first.step, first.layer, first.operand) == (2, 1, "x")
    assert first.linear == f"{LAYERS}/Dense_1"
    assert "its delayed scale is 64" in str(first) and "times too small" in str(first)
    assert not any(f.operand == "w" for f in others)


def test_the_first_tensor_of_a_four_bit_run_that_diverges_is_named():
    class MLP(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(3):
                x = x + fp8jax.nn.Dense(16, "fp4_naive")(nn.relu(x))
            return x

    model = MLP()
    variables = jax.tree.map(np.asarray, variables_of(model))

    def loss(v, x):
        return jnp.mean(model.apply(v, x) ** 2)

    gradients = jax.jit(jax.grad(loss))

    def rows_of_run(rate, variables):
        rows = []
        for step in range(1, 5):
            rows += at_step(telemetry.measure(loss, variables, X), step)
            grads = gradients(variables, X)
            with np.errstate(over="ignore"):
                variables = jax.tree.map(
                    lambda p, g: p - np.float32(rate) * np.asarray(g), variables, grads
                )
        return rows

    assert telemetry.out_of_line(rows_of_run(0.01, variables)) == []
    first, *_ = telemetry.out_of_line(rows_of_run(300.0, variables))
    # The first update makes the weights large; the loss is not finite one step later.
    assert (first.step, first.operand) == (2, "w") and "times its largest before" in first.why


# The transformer ----------------------------------------------------------------------------------


@functools.cache
def transformer():
    """(model, variables, the same with frozen kernels, ids)."""
    config = ModelConfig(
        vocab_size=64, d_model=32, n_layers=3, n_heads=2, n_kv_heads=1, d_ff=64, head_dim=16
    )
    model = Transformer(config, "fp8_current", attention="xla")
    variables = random_weights(abstract_variables(model))
    tokens = np.random.default_rng(1).integers(0, 64, (2, 16)).astype(np.int32)
    positions = np.broadcast_to(np.arange(16, dtype=np.int32), tokens.shape)
    ids = tuple(jnp.asarray(array) for array in (tokens, np.ones_like(tokens), positions))
    return model, variables, freeze(model, variables), ids


def test_a_transformer_with_frozen_kernels():
    """Of them there are rows of activations alone; x of the first linears is the norm's output."""
    model, variables, kernels, ids = transformer()
    table = telemetry.measure(
        lambda v, ids: model.apply(v, *ids), kernels, ids, what_if="bf16", gradients=False
    )
    casts = {(r.recipe, r.what_if, r.cast) for r in table.rows}
    assert casts == {
        ("fp8_current", False, "fwd_x"),
        ("bf16", True, "fwd_x"),
        ("fp8_current", False, ""),
    }
    run = table.where(lambda r: not r.what_if).rows
    assert len(run) == (7 + 1) * 3
    hidden = [r.amax for r in run if r.operand == "hidden"]
    down = [r.amax for r in run if r.linear == "layers/mlp/down"]
    # Rounded to BF16, or not.
    np.testing.assert_allclose(hidden, down, rtol=2**-8)
    assert len(hidden) == 3
    embedded = np.asarray(variables["params"]["embedding"])[np.asarray(ids[0])]
    normed = embedded / np.sqrt(
        np.mean(embedded**2, axis=-1, keepdims=True) + model.config.norm_eps
    )
    for linear in "qkv":
        amax = row(table, f"layers/attention/{linear}", "fwd_x", 0).amax
        assert amax == pytest.approx(np.abs(normed).max(), rel=2**-7)  # two roundings to BF16


# tests/lm/model/freeze_test.py shows that the logits are the same.
@pytest.mark.full
def test_frozen_kernels_have_the_same_activations():
    model, variables, kernels, ids = transformer()
    plain = measure_forward(model, variables, *ids, what_if="fp8_block")
    frozen = measure_forward(model, kernels, *ids, what_if="fp8_block")
    assert {r.cast for r in plain.rows} == {"fwd_x", "fwd_w", ""}
    for r in frozen.where(lambda r: r.cast == "fwd_x").rows:
        (other,) = [p for p in plain.rows if p == r]
    assert {r.cast for r in frozen.rows} == {"fwd_x", ""}
    run = plain.where(lambda r: not r.what_if).rows
    hidden = [r.amax for r in run if r.operand == "hidden"]
    down = [r.amax for r in run if r.linear.endswith("down") and r.cast == "fwd_x"]
    assert hidden == down and len(hidden) == 3
