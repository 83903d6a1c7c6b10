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
from fp8jax.model.config import ModelConfig
from fp8jax.model.freeze import freeze
from fp8jax.model.transformer import Transformer

QUANTIZED = functools.partial(fp8jax.nn.Fp8DotGeneral, "fp8_delayed:history=2")


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        h = nn.relu(fp8jax.nn.Dense(32, "fp8_block")(x))
        return x + nn.Dense(16, dot_general_cls=QUANTIZED)(h), None


class Stack(nn.Module):
    named: tuple = (fp8jax.nn.TELEMETRY,)

    @nn.compact
    def __call__(self, x):
        axes = {name: 0 for name in ("params", fp8jax.nn.HISTORIES, *self.named)}
        layers = nn.scan(nn.remat(Layer), variable_axes=axes, split_rngs={"params": True}, length=3)
        x, _ = layers()(x, None)
        return nn.Dense(16, dot_general_cls=QUANTIZED)(x)


X = jax.random.normal(jax.random.key(0), (8, 16))


def row(table, linear, cast, layer=-1, what_if=False):
    (found,) = [
        row
        for row in table.rows
        if (row.linear, row.cast, row.layer, row.what_if) == (linear, cast, layer, what_if)
    ]
    return found


def test_linen_layers_in_a_scan_with_rematerialization():
    model = Stack()
    variables = model.init(jax.random.key(1), X)
    table = telemetry.measure(
        lambda v, x: jnp.mean(model.apply(v, x) ** 2), variables, X, what_if="fp4_naive"
    )
    linears = {"Dense_0", "CheckpointLayer_0/Dense_0", "CheckpointLayer_0/Dense_1"}
    assert {r.linear.split("Scan")[-1] for r in table.rows} == linears
    assert len(table.rows) == (1 + 3 + 3) * 12  # casts of the run, and those of fp4_naive
    kernels = variables["params"]["ScanCheckpointLayer_0"]["Dense_0"]["kernel"]
    for layer in range(3):
        found = row(table, "ScanCheckpointLayer_0/Dense_0", "fwd_w", layer)
        assert found.amax == np.abs(kernels[layer]).max() and found.elements == 16 * 32
        assert found.recipe == "fp8_block" and found.delay is None
    last = row(table, "Dense_0", "fwd_w")
    assert last.delay == 0 and last.scale == pytest.approx(last.amax / 448)
    assert row(table, "Dense_0", "fwd_w", what_if=True).format == "e2m1"
    assert row(table, "Dense_0", "fwd_w", what_if=True).sqnr_db < last.sqnr_db


def test_forward_pass_and_bad_input():
    model = Stack(())
    variables = model.init(jax.random.key(1), X)

    def outputs(v, x):
        return model.apply(v, x)

    with pytest.raises(ValueError, match="'ScanCheckpointLayer_0/.*must name the collection"):
        telemetry.measure(outputs, variables, X, gradients=False)
    dense = nn.Dense(4, dot_general_cls=QUANTIZED)
    variables = dense.init(jax.random.key(1), X)
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
            self.up = fp8jax.nnx.Linear(16, 16, "fp8_delayed:history=2", rngs=rngs)
            self.down = fp8jax.nnx.Linear(16, 4, "fp8_block", rngs=rngs)

        def __call__(self, x):
            return self.down(nnx.relu(self.up(nnx.relu(self.up(x)))))

    model = MLP(nnx.Rngs(0))
    before = nnx.to_pure_dict(nnx.state(model))
    table = telemetry.measure(lambda m, x: jnp.mean(m(x) ** 2), model, X)
    jax.tree.map(np.testing.assert_array_equal, before, nnx.to_pure_dict(nnx.state(model)))
    assert row(table, "up", "fwd_x").elements == 2 * X.size
    h = nnx.relu(model.up(X))
    assert row(table, "up", "fwd_x").amax == max(np.abs(X).max(), np.abs(h).max())
    assert row(table, "down", "dgrad_g").amax > 0


# The transformer ----------------------------------------------------------------------------------

SHAPE = ModelConfig(
    vocab_size=64, d_model=32, n_layers=3, n_heads=2, n_kv_heads=1, d_ff=64, head_dim=16
)  # fmt: skip


@functools.cache
def transformer(policy):
    tokens = jax.random.randint(jax.random.key(0), (2, 16), 0, 64)
    ids = tokens, jnp.ones_like(tokens), jnp.arange(16)[None] + jnp.zeros_like(tokens)
    model = Transformer(SHAPE, policy, attention="xla")
    return model, nn.meta.unbox(model.init(jax.random.key(1), *ids)), ids


def loss_of(model, variables, ids):
    return jnp.mean(jax.nn.logsumexp(model.apply(variables, *ids), axis=-1))


@functools.cache
def measured(policy):
    """A function of variables; it compiles once."""
    model, _, ids = transformer(policy)
    loss = functools.partial(loss_of, model)
    return lambda v: telemetry.measure(loss, v, ids)


def test_one_weight_times_1000_is_named_and_no_other():
    _, variables, _ = transformer("fp8_current")
    assert telemetry.out_of_line(measured("fp8_current")(variables).rows) == []
    for kernel, change in (("up", "all"), ("up", "one"), ("down", "all")):
        changed = jax.tree.map(lambda x: x, variables)
        leaf = changed["params"]["layers"]["mlp"][kernel]["kernel"]
        part = leaf.at[1] if change == "all" else leaf.at[1, 3, 5]
        changed["params"]["layers"]["mlp"][kernel]["kernel"] = part.multiply(1000)
        found = telemetry.out_of_line(measured("fp8_current")(changed).rows)
        assert [(f.layer, f.linear, f.operand) for f in found] == [(1, f"layers/mlp/{kernel}", "w")]
        assert f"w of layers/mlp/{kernel} in layer 1: its amax" in str(found[0])


def at_step(table, step):
    return [dataclasses.replace(r, step=step) for r in table.rows]


def test_a_spike_in_a_delayed_run_is_named():
    model, variables, ids = transformer("fp8_delayed:history=4")
    measure = measured("fp8_delayed:history=4")
    variables = fp8jax.seed(lambda v: loss_of(model, v, ids), variables)
    steady = at_step(measure(variables), 1)
    assert telemetry.out_of_line(steady) == []
    spiked = jax.tree.map(lambda x: x, variables)
    norm = spiked["params"]["layers"]["mlp_norm"]
    norm["scale"] = norm["scale"].at[1].multiply(64)
    first, *others = telemetry.out_of_line([*steady, *at_step(measure(spiked), 2)])
    assert (first.step, first.layer, first.operand) == (2, 1, "x")
    assert first.linear == "layers/mlp/gate"
    assert "its delayed scale is 64 times too small" in str(first)
    assert not any(f.operand == "w" for f in others)


def test_the_first_tensor_of_a_four_bit_run_that_diverges_is_named():
    class MLP(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(3):
                x = x + fp8jax.nn.Dense(16, "fp4_naive")(nn.relu(x))
            return x

    model = MLP()
    variables = model.init(jax.random.key(1), X)

    def loss(v, x):
        return jnp.mean(model.apply(v, x) ** 2)

    def rows_of_run(rate, variables):
        rows = []
        for step in range(1, 5):
            rows += at_step(telemetry.measure(loss, variables, X), step)
            grads = jax.grad(loss)(variables, X)
            variables = jax.tree.map(lambda p, g: p - rate * g, variables, grads)
        return rows

    assert telemetry.out_of_line(rows_of_run(0.01, variables)) == []
    first, *_ = telemetry.out_of_line(rows_of_run(300.0, variables))
    # The first update makes the weights large; the loss is not finite one step later.
    assert (first.step, first.operand) == (2, "w") and "times its largest before" in first.why


def test_frozen_kernels_have_the_same_activations():
    model, variables, ids = transformer("fp8_current")
    plain = telemetry.measure_forward(model, variables, *ids, what_if="fp8_block")
    frozen = telemetry.measure_forward(model, freeze(model, variables), *ids, what_if="fp8_block")
    assert {r.cast for r in plain.rows} == {"fwd_x", "fwd_w", ""}
    for r in frozen.where(lambda r: r.cast == "fwd_x").rows:
        (other,) = [p for p in plain.rows if p == r]
    assert {r.cast for r in frozen.rows} == {"fwd_x", ""}
    run = plain.where(lambda r: not r.what_if).rows
    hidden = [r.amax for r in run if r.operand == "hidden"]
    down = [r.amax for r in run if r.linear.endswith("down") and r.cast == "fwd_x"]
    assert hidden == down and len(hidden) == 3
