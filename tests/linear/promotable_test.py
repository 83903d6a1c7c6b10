"""The switched product against the products of its two recipes, to the bit."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.linear.amax_history import init_state
from fp8jax.linear.dot import dot_general
from fp8jax.linear.promotable import promotable_dot
from fp8jax.numerics.recipes import RECIPES

MATMUL = (((2,), (0,)), ((), ()))
PAIRS = [("fp4_naive", "fp8_current"), ("fp8_delayed", "bf16"), ("fp8_block", "fp8_current"),
         ("nvfp4", "bf16")]  # fmt: skip


def arrays():
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (2, 16, 128), jnp.bfloat16)
    return (
        x,
        jax.random.normal(keys[1], (128, 64)),
        jax.random.normal(keys[2], (2, 16, 64), x.dtype),
    )


@pytest.mark.parametrize(("low", "high"), PAIRS)
@pytest.mark.parametrize("promoted", [False, True])
def test_it_is_one_of_the_two_products(low, high, promoted):
    x, w, g = arrays()
    key = jax.random.key(7)
    recipes = RECIPES[low], RECIPES[high]
    state = jax.tree.map(lambda h: h + 3.0, init_state(low))

    @jax.jit
    def switched(x, w, state, g, promoted):
        y, back = jax.vjp(
            lambda x, w, state: promotable_dot(
                x, w, promoted, low=recipes[0], high=recipes[1], state=state, key=key
            ), x, w, state,
        )  # fmt: skip
        return y, *back(g)

    chosen = recipes[promoted]

    @jax.jit
    def alone(x, w, state, g):
        def product(x, w, state):
            return dot_general(x, w, MATMUL, recipe=chosen, state=state, key=key)

        y, back = jax.vjp(product, x, w, state)
        return y, *back(g)

    got = switched(x, w, state, g, jnp.asarray(promoted))
    expected = alone(x, w, state if not promoted else {}, g)
    for a, b in itertools.islice(zip(got, expected, strict=True), 3):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    for operand, new in got[3].items():  # histories: of the arrays, whichever recipe ran
        amax = {"x": x, "w": w, "g": g}[operand]
        assert new[0] == jnp.max(jnp.abs(amax)).astype(jnp.float32)
        np.testing.assert_array_equal(new[1:], state[operand][:-1])


def test_what_is_kept_is_x_once():
    """No codes, and nothing of the branch that did not run."""
    x, w, g = arrays()

    def f(x, w, promoted):
        return promotable_dot(
            x,
            w,
            promoted,
            low=RECIPES["fp4_naive"],
            high=RECIPES["fp8_current"],
            state={},
            key=None,
        )

    _, back = jax.vjp(f, x, w, jnp.asarray(True))
    kept = [leaf for leaf in jax.tree.leaves(back) if hasattr(leaf, "size") and leaf.size > 1]
    assert sorted(leaf.size for leaf in kept) == sorted([x.size, w.size])


def test_a_high_recipe_with_histories_is_refused():
    x, w, _ = arrays()
    with pytest.raises(ValueError, match="'fp8_delayed' needs amax histories"):
        promotable_dot(
            x, w, jnp.asarray(True), low=RECIPES["fp4_naive"], high=RECIPES["fp8_delayed"],
            state={}, key=None,
        )  # fmt: skip
