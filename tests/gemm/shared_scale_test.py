"""Shared casts: weights that are multiplied with one x have the scales of one fused weight.

Powers of two and few bits make every product exact. What a shared scale changes is then only the
underflow of the smaller weight and the smaller gradient, which tests compute by hand and compare
with the GEMM of the fused weight.
"""

from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.gemm import vjp
from fp8jax.gemm.dot import dot_general, dot_general_together
from fp8jax.gemm.modules import Dense, together
from fp8jax.gemm.promotable import promotable_dot
from fp8jax.gemm.weight import Weight
from fp8jax.lm.model.config import ModelConfig
from fp8jax.lm.model.transformer import Transformer, abstract_variables
from fp8jax.numerics.names import as_policy
from fp8jax.numerics.recipe import Recipe
from fp8jax.numerics.recipes import RECIPES
from tests.support.products import MATMUL

ALONE = RECIPES["fp8_amax"]
SHARED = ALONE.sharing_scales()
M, K, N, LARGE = 8, 16, 6, 4


def small_and_large(seed: int = 0) -> tuple[jax.Array, ...]:
    """x, the small and the large weight, and the gradients of their results.

    The large weight's amax is 448, so that the shared scale is 1 and E4M3's spacing near zero 2^-9;
    the small weight has multiples of 2^-12. The large gradient's amax is 57344, so that E5M2's
    spacing is 2^-16; the small one has multiples of 2^-18. Alone, all have scales that are exact.
    """
    rng = np.random.default_rng(seed)

    def integers(largest: int, *shape: int) -> np.ndarray:
        values = rng.integers(-largest, largest + 1, shape)
        values.flat[0] = largest
        return values.astype(np.float32)

    x, small, large = integers(3, M, K), integers(15, K, N), integers(7, K, LARGE)
    g_small, g_large = integers(7, M, N), integers(7, M, LARGE)
    arrays = (x, small * 2.0**-12, large * 64, g_small * 2.0**-18, g_large * 8192)
    return tuple(map(jnp.asarray, arrays))


def rounded(x: jax.Array, spacing: float) -> np.ndarray:
    """x to the nearest multiple of `spacing`, ties to even."""
    return np.round(np.asarray(x) / spacing).astype(np.float32) * np.float32(spacing)


@jax.jit
def run_shared(x, ws, gs):
    def multiply(x, ws):
        return dot_general_together(
            x, tuple(map(Weight, ws)), MATMUL, recipe=SHARED, backend="emulated"
        )

    ys, back = jax.vjp(multiply, x, ws)
    return ys, *back(gs)


@jax.jit
def run_alone(x, w, g):
    def multiply(x, w):
        return dot_general(x, w, MATMUL, recipe=ALONE, backend="emulated")

    y, back = jax.vjp(multiply, x, w)
    return y, *back(g)


def test_weights_and_gradients_are_quantized_as_one_fused_tensor():
    x, small, large, g_small, g_large = small_and_large()
    (y, _), _, (dw, _) = run_shared(x, (small, large), (g_small, g_large))
    fused_w, fused_g = jnp.hstack([small, large]), jnp.hstack([g_small, g_large])
    fused_y, _, fused_dw = run_alone(x, fused_w, fused_g)
    alone_y, _, alone_dw = run_alone(x, small, g_small)
    np.testing.assert_array_equal(y, x @ rounded(small, 2.0**-9))
    np.testing.assert_array_equal(y, fused_y[:, :N])
    np.testing.assert_array_equal(dw, x.T @ rounded(g_small, 2.0**-16))
    np.testing.assert_array_equal(dw, fused_dw[:, :N])
    np.testing.assert_array_equal(alone_y, x @ small)
    np.testing.assert_array_equal(alone_dw, x.T @ g_small)
    assert (y != alone_y).any() and (dw != alone_dw).any()


def test_the_weights_of_dgrad_share_too():
    """With a gradient of zero for the large weight, dx is the product of the small one alone."""
    x, small, large, g_small, g_large = small_and_large(1)
    _, dx, _ = run_shared(x, (small, large), (g_small, 0 * g_large))
    np.testing.assert_array_equal(dx, g_small @ rounded(small, 2.0**-9).T)
    _, alone, _ = run_alone(x, small, g_small)
    assert (dx != alone).any()


class Pair(nn.Module):
    recipes: tuple[Recipe, Recipe]

    @nn.compact
    def __call__(self, x):
        layers = [
            Dense(features, recipe, backend="emulated", name=name)
            for features, recipe, name in zip((N, LARGE), self.recipes, "qk", strict=True)
        ]
        return together(layers, x, (None, None))


def test_layers_together_share_and_others_are_refused():
    x, small, large, _, _ = small_and_large()
    params = {"params": {"q": {"kernel": small}, "k": {"kernel": large}}}
    y, _ = Pair((SHARED, SHARED)).apply(params, x)
    np.testing.assert_array_equal(y, x @ rounded(small, 2.0**-9))
    with pytest.raises(ValueError, match="layers q, k cannot share scales: they need equal"):
        Pair((SHARED, ALONE)).apply(params, x)
    with pytest.raises(ValueError, match="shares scales between weights.*drop qkv=shared"):
        promotable_dot(x, Weight(small), jnp.asarray(True), low=SHARED, high=ALONE)


def test_a_model_shares_among_queries_keys_and_values_only():
    config = ModelConfig(
        vocab_size=16, d_model=8, n_layers=2, n_heads=2, n_kv_heads=1, d_ff=8, head_dim=4
    )
    model, row = Transformer(config, as_policy("fp8_amax:qkv=shared")), jnp.ones((1, 4), jnp.int32)
    variables = abstract_variables(model)

    def loss(variables):
        return jnp.sum(model.apply(variables, row, row, row))

    with mock.patch.object(vjp, "joint_amax", wraps=vjp.joint_amax) as joint_amax:
        jax.eval_shape(jax.grad(loss), variables)
    shapes = [[array.shape for array in call.args[0]] for call in joint_amax.call_args_list]
    weights, gradients = [(8, 8), (8, 4), (8, 4)], [(4, 8), (4, 4), (4, 4)]
    assert shapes.count(weights) >= 2 and shapes.count(gradients) >= 1  # w: fwd and dgrad
    assert all(shape in (weights, gradients) for shape in shapes)
