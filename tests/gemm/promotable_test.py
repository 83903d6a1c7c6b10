"""The switched product against the products of its two recipes, to the bit."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.gemm.dot import dot_general
from fp8jax.gemm.histories.amax_history import init_state
from fp8jax.gemm.promotable import promotable_dot
from fp8jax.gemm.weight import Weight
from fp8jax.numerics.recipes import RECIPES
from tests.support.products import normal_operands

MATMUL = (((2,), (0,)), ((), ()))
PAIRS = [
    ("fp4_naive", "fp8_current"),
    ("fp8_delayed", "bf16"),
    ("fp8_block", "fp8_current"),
    ("nvfp4", "bf16"),
]
pytestmark = pytest.mark.optimized_too  # bits of different programs


def arrays():
    x, w, g = normal_operands(2 * 16, 128, 64, sigma=(1, 1, 1), dtype=jnp.bfloat16).values()
    return jnp.asarray(x.reshape(2, 16, 128)), jnp.asarray(w), jnp.asarray(g.reshape(2, 16, 64))


@functools.partial(jax.jit, static_argnames=("low", "high", "seeded"))
def switched(x, w, state, g, key, promoted, *, low, high, seeded=True):
    recipes = dict(low=RECIPES[low], high=RECIPES[high])
    y, back = jax.vjp(
        lambda x, w, state: promotable_dot(
            x, Weight(w, state, key), promoted, **recipes, seeded=seeded
        ),
        x,
        w,
        state,
    )
    return y, *back(g)


@functools.partial(jax.jit, static_argnames="recipe")
def alone(x, w, state, g, key, *, recipe):
    def product(x, w, state):
        return dot_general(x, w, MATMUL, recipe=RECIPES[recipe], state=state, key=key)

    y, back = jax.vjp(product, x, w, state)
    return y, *back(g)


@pytest.mark.parametrize(("low", "high"), PAIRS)
@pytest.mark.parametrize("promoted", [False, True])
def test_it_is_one_of_the_two_products(low, high, promoted):
    x, w, g = arrays()
    key = jax.random.key(7)
    state = {k: np.full(h.shape, 3.0, np.float32) for k, h in init_state(low).items()}
    got = switched(x, w, state, g, key, jnp.asarray(promoted), low=low, high=high)
    expected = alone(x, w, {} if promoted else state, g, key, recipe=high if promoted else low)
    for a, b in itertools.islice(zip(got, expected, strict=True), 3):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    for operand, new in got[3].items():  # histories: of the arrays, whichever recipe ran
        amax = {"x": x, "w": w, "g": g}[operand]
        assert new[0] == np.abs(np.asarray(amax, np.float32)).max()
        np.testing.assert_array_equal(new[1:], state[operand][:-1])


@pytest.mark.full
def test_empty_histories_take_the_amaxes_of_the_operands():
    """In the first step of a run, as without promotions: fp8_current has these scales."""
    x, w, g = arrays()
    key, state = jax.random.key(7), init_state("fp8_delayed")
    pair = dict(low="fp8_delayed", high="bf16", seeded=False)
    got = switched(x, w, state, g, key, jnp.asarray(False), **pair)
    expected = alone(x, w, {}, g, key, recipe="fp8_current")
    for a, b in zip(got[:3], expected[:3], strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_what_is_kept_is_x_once():
    """No codes, and nothing of the branch that did not run."""
    x, w, g = arrays()

    def f(x, w, promoted):
        return promotable_dot(
            x,
            Weight(w),
            promoted,
            low=RECIPES["fp4_naive"],
            high=RECIPES["fp8_current"],
        )

    _, back = jax.eval_shape(functools.partial(jax.vjp, f), x, w, jnp.asarray(True))
    kept = [leaf for leaf in jax.tree.leaves(back) if hasattr(leaf, "size") and leaf.size > 1]
    assert sorted(leaf.size for leaf in kept) == sorted([x.size, w.size])


@pytest.mark.parametrize(("low", "high"), [("fp8_amax", "bf16"), ("bf16", "fp8_amax")])
def test_a_second_derivative_is_refused(low, high):
    """It would be zero: so are the derivatives of casts."""
    x, w, _ = arrays()

    def penalty(x, w):
        def loss(x, w):
            recipes = dict(low=RECIPES[low], high=RECIPES[high])
            return jnp.sum(promotable_dot(x, Weight(w), jnp.asarray(False), **recipes) ** 3)

        return sum(jnp.sum(g**2) for g in jax.grad(loss, (0, 1))(x, w))

    for argument in (0, 1):
        with pytest.raises(NotImplementedError, match="first derivatives only"):
            jax.eval_shape(jax.grad(penalty, argument), x, w)


def test_a_high_recipe_with_histories_is_refused():
    x, w, _ = arrays()
    with pytest.raises(ValueError, match="'fp8_delayed' needs amax histories"):
        promotable_dot(
            x,
            Weight(w),
            jnp.asarray(True),
            low=RECIPES["fp4_naive"],
            high=RECIPES["fp8_delayed"],
        )


def test_no_rows_are_no_error():
    """Nor for the gradient of the weight, which is zero."""
    x, w = jnp.ones((2, 0, 16)), jnp.ones((16, 8))

    def loss(w):
        recipes = dict(low=RECIPES["fp4_naive"], high=RECIPES["fp8_current"])
        y = promotable_dot(x, Weight(w), jnp.asarray(True), **recipes)
        assert y.shape == (2, 0, 8)
        return jnp.sum(y)

    np.testing.assert_array_equal(jax.grad(loss)(w), jnp.zeros_like(w))
