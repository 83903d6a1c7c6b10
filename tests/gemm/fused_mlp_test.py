"""The gated MLP in one piece against three products with the same SwiGLU between them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.device import hardware
from fp8jax.gemm.dot import dot_general_together
from fp8jax.gemm.fused_mlp import can_fuse_mlp, fused_mlp
from fp8jax.gemm.histories.amax_history import init_state
from fp8jax.gemm.weight import Weight
from fp8jax.kernels.swiglu import SWIGLU, SWIGLU_GRAD
from fp8jax.numerics.names import as_recipe
from fp8jax.numerics.recipes import RECIPES
from tests.support.interpreter import TOO_OLD, interpret, needs_pallas
from tests.support.products import MATMUL

BF16, F32 = jnp.bfloat16, jnp.float32
NAMES = ("fp8_delayed", "fp8_block", "fp8_block_ue8m0", "fp4_naive")
BLOCKS = "fp8_block:wgrad_g_tile=block128"
H200 = hardware.Device("gpu", "NVIDIA H200", (9, 0))


@jax.custom_vjp
def swiglu(gate, up):
    return SWIGLU.compute(gate.astype(F32), up.astype(F32))[0].astype(gate.dtype)


def _swiglu_bwd(factors, dh):
    *grads, _ = SWIGLU_GRAD.compute(*(a.astype(F32) for a in (dh, *factors)))
    return tuple(g.astype(dh.dtype) for g in grads)


swiglu.defvjp(lambda gate, up: (swiglu(gate, up), (gate, up)), _swiglu_bwd)


def apart(x, ws, states, *, recipe, backend):
    """down(silu(gate(x)) * up(x)) of three products."""
    gate, up, down = map(Weight, ws, states)
    f = functools.partial(
        dot_general_together, dimension_numbers=MATMUL, recipe=recipe, backend=backend
    )
    return f(swiglu(*f(x, (gate, up))), (down,))[0]


def whole(x, ws, states, *, recipe):
    weights = tuple(map(Weight, ws, states))
    return fused_mlp(x, weights, recipes=(recipe, recipe), backend="pallas")


def mlp_arguments(m: int, k: int, f: int, recipe):
    """x, three weights, their histories, dy; h and its gradient have unlike scales."""
    rng = np.random.default_rng(0)
    x, dy = (jnp.asarray(rng.normal(size=(m, k)) * size, BF16) for size in (1.0, 1e-3))
    ws = tuple(jnp.asarray(rng.normal(size=shape) * 0.1, F32) for shape in ((k, f), (k, f), (f, k)))
    amaxes = {"x": 4.0, "w": 0.5, "g": 4e-3}
    states = tuple(
        {o: h.at[:2].set(amaxes[o] * size) for o, h in init_state(recipe).items()}
        for size in (1.0, 1.0, 2.0)
    )
    return x, ws, states, dy


def with_gradients(mlp, x, ws, states, dy):
    y, vjp = jax.vjp(mlp, x, ws, states)
    return y, *vjp(dy)


def distance(a, b) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


RAGGED = (72, 136, 200)


@needs_pallas
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *((name, RAGGED) for name in [*NAMES, BLOCKS]),
        # Whole tiles go through the same code; one recipe of them is in every run.
        *(
            pytest.param(
                name, (256, 128, 384), marks=() if name == "fp8_block" else pytest.mark.full
            )
            for name in [*NAMES, BLOCKS]
        ),
    ],
)
def test_equals_three_products(name, shape):
    """Bit for bit: codes, products and histories are the same."""
    recipe = as_recipe(name)
    given = mlp_arguments(*shape, recipe)
    of_whole = functools.partial(with_gradients, functools.partial(whole, recipe=recipe))
    of_three = functools.partial(apart, recipe=recipe, backend="pallas")
    got = interpret(jax.jit(of_whole), *given)
    expected = interpret(jax.jit(functools.partial(with_gradients, of_three)), *given)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and bool(jnp.isfinite(a.astype(F32)).all())
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@needs_pallas
def test_y_alone_is_the_same():
    recipe = RECIPES["fp8_delayed"]
    x, ws, states, dy = mlp_arguments(128, 128, 256, recipe)
    f = functools.partial(whole, recipe=recipe)
    with_grads = interpret(jax.jit(functools.partial(with_gradients, f)), x, ws, states, dy)
    np.testing.assert_array_equal(interpret(jax.jit(f), x, ws, states), with_grads[0])


@needs_pallas
def test_a_second_derivative_is_refused(monkeypatch):
    """It would be zero: so are the derivatives of casts."""
    monkeypatch.setattr(hardware, "device", lambda: H200)
    recipe = RECIPES["fp8_block"]
    x, ws, states, dy = mlp_arguments(*RAGGED, recipe)

    def penalty(x):
        mlp = functools.partial(whole, ws=ws, states=states, recipe=recipe)
        return jnp.sum(jax.vjp(mlp, x)[1](dy)[0].astype(F32) ** 2)

    with pytest.raises(NotImplementedError, match="first derivatives only"):
        jax.eval_shape(jax.grad(penalty), x)


def test_which_recipes_fuse(monkeypatch):
    """All others quantize by an amax of the array itself, in other formats, or not at all."""
    monkeypatch.setattr(hardware, "device", lambda: H200)
    fused = {n for n, r in RECIPES.items() if can_fuse_mlp(r, r, None, BF16)}
    assert fused == (set(NAMES) if (TOO_OLD is None) else set())
    block, delayed = RECIPES["fp8_block"], RECIPES["fp8_delayed"]
    blocks = as_recipe(BLOCKS)
    assert can_fuse_mlp(blocks, blocks, None, BF16) == (TOO_OLD is None)
    assert not can_fuse_mlp(block, block, None, F32)
    assert not can_fuse_mlp(block, RECIPES["bf16"], None, BF16)
    assert not can_fuse_mlp(delayed.current(), delayed.current(), None, BF16)
    assert not can_fuse_mlp(block, delayed, None, BF16)
    assert not can_fuse_mlp(block, RECIPES["fp8_block_ue8m0"], None, BF16)
    assert not can_fuse_mlp(delayed, delayed, "xla", BF16)


def test_refuses_what_does_not_fuse():
    recipe = RECIPES["fp8_current"]
    x, ws, states, _ = mlp_arguments(8, 8, 8, recipe)
    with pytest.raises(ValueError, match="no kernels for 'fp8_current' and 'fp8_current'"):
        whole(x, ws, states, recipe=recipe)


# On the device ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(512, 1024, 768), (200, 136, 328)])
@pytest.mark.parametrize("name", [*NAMES, BLOCKS])
def test_equals_three_products_on_the_gpu(name, shape):
    """The GPU's exponential is off by 2^-22, so that one bfloat16 in 2^13 of h and of the gradients
    rounds otherwise, and a code with it, by 2^-3 of itself at most: 2^-3 * 2^-6.5 of all. Amaxes
    are within a unit of bfloat16."""
    recipe = as_recipe(name)
    given = mlp_arguments(*shape, recipe)
    *got, states = jax.jit(
        functools.partial(with_gradients, functools.partial(whole, recipe=recipe))
    )(*given)
    of_three = functools.partial(apart, recipe=recipe, backend="pallas")
    *expected, histories = jax.jit(functools.partial(with_gradients, of_three))(*given)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and distance(a, b) <= 2.0**-8
    for a, b in zip(jax.tree.leaves(states), jax.tree.leaves(histories), strict=True):
        np.testing.assert_allclose(a, b, rtol=2**-7)
