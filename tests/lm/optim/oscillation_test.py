"""The reset of oscillating weights against NumPy, step by step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.lm.optim.optimizers import make_optimizer
from fp8jax.lm.optim.oscillation import PERIOD, RATIO, WINDOW, reset_oscillating
from fp8jax.numerics.recipes import RECIPES
from tests.support import reference
from tests.support.optimizers import configured, nested

PATH = "layers/mlp/up/kernel"


def quantized(w: np.ndarray) -> np.ndarray:
    cast = RECIPES["tetrajet2"].fwd_w
    parts = [reference.quantize_parts(m, "e2m1", cast.tile, -2, cast.rule) for m in w]
    return np.stack([p.values.astype(np.float32) * p.of_tiles for p in parts])


def test_weights_that_oscillate_are_reset_at_the_end_of_a_window():
    """A third of the weights jump to and fro over the middle of two codes, by a tenth of their
    distance; the others drift so far that a code crossed is no more than 8 times it. Two windows of
    steps; nothing before the first one that counts."""
    rng = np.random.default_rng(0)
    w = rng.normal(size=(2, 128, 16)).astype(np.float32)
    jump = np.zeros_like(w)
    jump[:, 1::3] = 0.04
    w[:, 1::3] = np.where(w[:, 1::3] > 0, 1.25, -1.25) + 0.02
    w[:, ::16], jump[:, ::16] = 6.0, 0  # the amax of each tile stays
    drift = np.float32(1e-2) * (jump == 0)
    drift[:, ::16] = 0
    transformation = reset_oscillating("tetrajet2", begin=2 * PERIOD - WINDOW)  # a window's first
    other = {"embedding": np.ones((4, 4), np.float32)}
    params = nested({PATH: w}) | other
    state = jax.jit(transformation.init)(params)
    update = jax.jit(transformation.update)
    codes = weights = np.zeros_like(w)
    reset = []
    for step in range(2 * PERIOD):
        u = (drift - jump if step % 2 == 0 else drift + jump).astype(np.float32)
        if step % PERIOD < PERIOD - WINDOW - 2:
            u = np.zeros_like(w)
        given = nested({PATH: u}) | {"embedding": np.ones((4, 4), np.float32)}
        updates, state = update(given, state, nested({PATH: w}) | other)
        got = np.asarray(updates["layers"]["mlp"]["up"]["kernel"])
        expected = u
        if step >= PERIOD and step % PERIOD >= PERIOD - WINDOW:
            if step % PERIOD == PERIOD - WINDOW:
                codes = weights = np.zeros_like(w)
            after = quantized(w + u)
            codes, weights = codes + np.abs(after - quantized(w)), weights + np.abs(u)
            if step % PERIOD == PERIOD - 1:
                oscillates = (weights > 0) & (codes >= RATIO * weights)
                expected = np.where(oscillates, after - w, u)
                reset.append(oscillates)
        np.testing.assert_array_equal(got, expected)
        np.testing.assert_array_equal(updates["embedding"], given["embedding"])
        w = w + got
    (oscillates,) = reset
    # Sums of WINDOW numbers, each addition rounded to float32.
    for found, sums in ((state.inner_state.codes, codes), (state.inner_state.weights, weights)):
        kernel = found["layers"]["mlp"]["up"]["kernel"]
        np.testing.assert_allclose(kernel, sums, rtol=WINDOW * 2.0**-23)
    assert oscillates[jump > 0].mean() > 0.9 and not oscillates[jump == 0].any()
    np.testing.assert_allclose(w[oscillates], quantized(w)[oscillates], rtol=1e-6)


def test_a_config_asks_for_it():
    optimizer, _ = make_optimizer(configured(reset="tetrajet2"))
    plain, _ = make_optimizer(configured())
    params = nested({PATH: jnp.ones((2, 16, 8))}) | {"embedding": jnp.ones((4, 4))}
    sizes = [
        sum(x.size for x in jax.tree.leaves(jax.eval_shape(each.init, params)))
        for each in (optimizer, plain)
    ]
    assert sizes[0] - sizes[1] == 2 * 2 * 16 * 8 + 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(reset="bf16"), "reset=bf16: the recipe has no current cast of weights"),
        (dict(reset="fp8_delayed"), "reset=fp8_delayed: the recipe has no current cast"),
        (dict(reset="tetrajet"), "unknown recipe 'tetrajet'; did you mean 'tetrajet2'"),
        (dict(reset_from=1.0), r"reset_from=1.0 does not lie in \[0, 1\)"),
    ],
)
def test_what_cannot_be_reset(changes, message):
    with pytest.raises(ValueError, match=message):
        make_optimizer(configured(**changes))
