"""The backward reads codes of what norms and activations have read, and the forward does not."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fp8jax.device.xla import compiler_options
from fp8jax.lm.model.fp8_inputs import with_fp8_inputs
from fp8jax.lm.model.layer import FeedForward, Linears
from fp8jax.lm.model.models import MODELS
from fp8jax.lm.model.norms import RMSNorm
from fp8jax.lm.model.transformer import Transformer
from fp8jax.numerics.names import as_policy
from tests.support.arrays import edge_cases, normal


def by_numpy(x: np.ndarray) -> np.ndarray:
    """x [rows, D] after its codes: groups of 16, scales 2^ceil(log2(a / 448))."""
    out = np.zeros_like(x, np.float32)
    for begin in range(0, x.shape[1], 16):
        group = x[:, begin : begin + 16].astype(np.float32)
        amax = np.abs(group).max(axis=1, keepdims=True).astype(np.float64)
        exponent = np.ceil(np.log2(np.where(amax > 0, amax, 448.0) / 448.0))
        scale = np.exp2(np.maximum(exponent, -127)).astype(np.float32)
        with np.errstate(invalid="ignore"):
            codes = (group / scale).astype(ml_dtypes.float8_e4m3fn)
            kept = codes.astype(np.float32) * scale
        out[:, begin : begin + 16] = np.where(np.isfinite(amax), kept, np.nan)
    return out


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_backward_reads_numpys_codes_and_the_forward_reads_x(dtype):
    """y = x^2 / 2, whose derivative is what was kept. Rows of 168 elements end in half a group."""
    x = np.concatenate([edge_cases(), normal((128, 8))], axis=1).astype(np.float64)
    x[0], x[1, :16], x[2, 3], x[3] = 0, 448, 2.0**-120, 2.0**100
    ties = [448, 17, 19, 21, 23, 25, 27, 29, 31, *np.exp2([-10, -9, -8]) * 3, 2.0**-10, 34, -38, 0]
    x[4, :16], x[4, 16:32] = ties, -np.array(ties) * 2.0**-40
    x[5, 1], x[6, 20], x[7, 163] = np.nan, np.inf, -np.inf
    x = jnp.asarray(x, dtype)
    half = jax.jit(lambda x: with_fp8_inputs(lambda x: x * x / 2, (x,)))
    y, vjp = jax.vjp(half, x)
    f32 = np.float32  # NumPy takes NaN of bfloat16 for unequal
    np.testing.assert_array_equal(y.astype(f32), (x * x / 2).astype(f32))
    expected = by_numpy(np.asarray(x)).astype(dtype)
    assert np.isnan(expected.astype(f32)).sum() == 16 + 16 + 8  # the groups of what is not finite
    np.testing.assert_array_equal(vjp(jnp.ones_like(y))[0].astype(f32), expected.astype(f32))
    assert (expected != np.asarray(x)).mean() > 0.5


def test_second_derivatives_are_refused():
    x, head = jnp.ones((4, 32)), jnp.ones((4, 32))
    kept = lambda x: with_fp8_inputs(jnp.tanh, (x,))  # noqa: E731
    slope = lambda x, g: jnp.sum(jax.vjp(kept, x)[1](g)[0] ** 2)  # noqa: E731
    for argument in (0, 1):
        with pytest.raises(NotImplementedError, match="first derivatives only"):
            jax.grad(slope, argument)(x, head)


def test_the_forward_waits_for_the_codes():
    """Otherwise XLA keeps x and makes them in the backward, where it schedules without a loop."""
    f = lambda x: with_fp8_inputs(jnp.tanh, (x,))  # noqa: E731
    jaxpr = jax.make_jaxpr(lambda x: jax.vjp(f, x)[0])(jnp.ones((4, 32), jnp.bfloat16)).jaxpr
    (barrier,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "optimization_barrier"]
    (tanh,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "tanh"]
    assert tanh.invars[0] in barrier.outvars
    assert {"float8_e4m3fn", "bfloat16"} < {v.aval.dtype.name for v in barrier.outvars}


def kept(f, *arguments):
    """Sizes and dtypes of what the backward keeps, arguments that are parameters included."""
    return {(leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(jax.vjp(f, *arguments)[1])}


def test_a_norm_keeps_codes_and_its_scale():
    x, norm = jnp.ones((2, 8, 32), jnp.bfloat16), RMSNorm(1e-5, fp8_inputs=True)
    variables = nn.meta.unbox(norm.init(jax.random.key(0), x))
    codes, scales = ((2, 8, 32), "float8_e4m3fn"), ((2, 8, 2), "float8_e8m0fnu")
    assert kept(lambda x: norm.apply(variables, x), x) == {codes, scales, ((1, 1, 32), "float32")}


@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
def test_the_mlp_keeps_gate_and_up_as_codes_and_is_never_fused(mlp, monkeypatch):
    monkeypatch.setattr(Linears, "fuses", lambda self, x: pytest.fail("it asked for a fused MLP"))
    config = dataclasses.replace(MODELS["llama_tiny"], d_model=32, d_ff=64, mlp=mlp)
    linears = Linears(config, as_policy("bf16"), None, "layers/mlp", None)
    x = jnp.ones((2, 8, 32), jnp.bfloat16)
    module = FeedForward(config, linears, fp8_inputs=True, parent=None)
    variables = nn.meta.unbox(module.init(jax.random.key(0), x))
    wide = {each for each in kept(lambda x: module.apply(variables, x), x) if each[0][-1] == 64}
    # In bfloat16 there are the input of down and the kernels [32, 64] of gate and up alone.
    rows = {(shape, dtype) for shape, dtype in wide if shape[0] == 2}
    assert rows <= {((2, 8, 64), "float8_e4m3fn"), ((2, 8, 64), "bfloat16")}
    plain = FeedForward(config, linears, parent=None)
    monkeypatch.setattr(Linears, "fuses", lambda self, x: False)

    def count(module):
        leaves = jax.tree.leaves(jax.vjp(lambda x: module.apply(variables, x), x)[1])
        return sum(leaf.shape == (2, 8, 64) and leaf.dtype == jnp.bfloat16 for leaf in leaves)

    assert count(plain) - count(module) == (2 if mlp == "swiglu" else 1)


def test_what_reads_no_kept_array_has_the_gradients_of_ever():
    """In a model of one layer the loss, the head, the last norm and down read none; gate does."""
    sizes = dict(d_model=32, d_ff=64, n_heads=2, n_kv_heads=2, head_dim=16, n_layers=1)
    config = dataclasses.replace(MODELS["llama_tiny"], **sizes)  # type: ignore[arg-type]
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 16)))
    inputs = tokens, jnp.ones_like(tokens), jnp.broadcast_to(jnp.arange(16), tokens.shape)

    def gradients(remat):
        model = Transformer(config, "bf16", remat=remat)
        variables = nn.meta.unbox(model.init(jax.random.key(0), *inputs))
        loss = lambda v: jnp.mean(jnp.square(model.apply(v, *inputs)))  # noqa: E731
        # x is rounded to bfloat16 before its norm reads it, with the barrier and without.
        return jax.jit(jax.value_and_grad(loss), compiler_options=compiler_options())(variables)

    (loss, exact), (same, found) = gradients("none"), gradients("fp8_inputs")
    assert loss == same
    exact, found = exact["params"], found["params"]
    for path in (("lm_head",), ("final_norm",), ("layers", "mlp", "down")):
        one, other = exact, found
        for name in path:
            one, other = one[name], other[name]
        jax.tree.map(np.testing.assert_array_equal, one, other)
    one, other = (g["layers"]["mlp"]["gate"]["kernel"] for g in (exact, found))
    assert 0 < jnp.linalg.norm(one - other) < jnp.linalg.norm(one) / 8
