"""The casts of NVFP4's variants: bits against NumPy, and what their papers say of their errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.gemm.backends.emulated import quantize_one
from fp8jax.gemm.backends.operands import CastRequest
from fp8jax.gemm.dot import dot_general_together
from fp8jax.gemm.weight import Weight
from fp8jax.numerics.formats import FORMATS
from fp8jax.numerics.names import as_recipe
from fp8jax.numerics.quantization import dequantize, quantize
from fp8jax.numerics.recipe import Cast
from fp8jax.numerics.recipes import RECIPES
from fp8jax.numerics.scales import SCALES, refuse_tile
from fp8jax.numerics.tiles import BLOCK128, TENSOR, TILES
from tests.support import reference
from tests.support.arrays import edge_cases, normal
from tests.support.products import MATMUL

NV16 = dict(format=FORMATS["e2m1"], tile=TILES["nv16"])
KEY, WORD = jax.random.key(3), 0x9C3B51E7
# Each cast once; they quantize the array itself.
CASTS = {
    "gradient": RECIPES["nvfp4_unbiased"].dgrad_g,
    "rotated gradient": RECIPES["nvfp4_unbiased"].wgrad_g,
    "activation": RECIPES["nvfp4_4over6"].fwd_x,
    "weight": RECIPES["nvfp4_4over6"].fwd_w,
    "rotated activation": RECIPES["nvfp4_4over6"].wgrad_x,
    "outer": RECIPES["tetrajet2"].fwd_x,
    "outer gradient": RECIPES["tetrajet2"].dgrad_g,
    "eden": RECIPES["quartet2"].dgrad_g,
}


@functools.partial(jax.jit, static_argnames="casts")
def quantized(x, casts: tuple[Cast, ...], key):
    """Codes and scales of x [K, M] under each cast, contracted along K."""
    found = []
    for cast in casts:
        request = CastRequest(
            cast,
            -2,
            None,
            key if cast.rounding == "stochastic" else None,
            jnp.uint32(WORD) if cast.redrawn else None,
        )
        found.append(quantize_one(x, request).q)
    return found


def test_codes_and_scales_are_numpys():
    x = edge_cases()
    assert x.size >= 20_000
    for name, q in zip(CASTS, quantized(jnp.asarray(x), tuple(CASTS.values()), KEY), strict=True):
        cast = CASTS[name]
        y = reference.rotated(x, cast, -2, WORD if cast.redrawn else 0)
        shape = (8, 160) if name == "eden" else y.shape
        draws = reference.draws(KEY, shape) if cast.rounding == "stochastic" else None
        expected = reference.quantize_parts(y, "e2m1", cast.tile, -2, cast.rule, draws=draws)
        # By value where draws decide: there the reference has one zero.
        kind = np.uint8 if draws is None or name == "eden" else expected.values.dtype
        got, wanted = np.asarray(q.values).view(kind), expected.values.view(kind)
        np.testing.assert_array_equal(got.astype(np.float32), wanted.astype(np.float32), name)
        for index, scale in expected.scales.items():
            assert np.asarray(q.scale)[index] == scale, (name, index)
        assert expected.tensor == (1 if q.tensor_scale is None else q.tensor_scale), name


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_makes_the_scale_of_its_tile_nan(bad):
    x = edge_cases()
    x[70, 9] = bad
    for name, q in zip(CASTS, quantized(jnp.asarray(x), tuple(CASTS.values()), KEY), strict=True):
        tile = q.scale.astype(jnp.float32)[64 // q.tile[0], 9 // q.tile[1]]
        assert np.isnan(tile), name


@pytest.mark.parametrize(
    "which", ["here", "not rotated", pytest.param("all", marks=pytest.mark.full)]
)
def test_subnormal_numbers_are_zeros(which):
    """Under each cast of each recipe: alone in a tensor or a tile, and beside normal numbers."""
    mixed = edge_cases()
    mixed[96:112, :16] = np.float32(2.0**-127) * np.linspace(-1.9, 1.9, 16, dtype=np.float32)
    mixed[112:120, :] = np.float32(2.0**-149)
    alone = normal(mixed.shape) * np.float32(2.0**-130)
    assert (alone != 0).all() and np.abs(alone).max() < np.float32(2.0**-126)
    names = [*RECIPES, "fp8_amax:scale=mse"]
    casts = tuple(dict.fromkeys(c for name in names for c in as_recipe(name).casts))
    assert set(CASTS.values()) < set(casts)
    if which == "here":
        casts = tuple(CASTS.values())
    elif which == "not rotated":
        casts = tuple(c for c in casts if c.hadamard == 1 and c not in CASTS.values())
        assert len(casts) >= 20
    for x in (mixed, alone):
        tiny = np.abs(x) < np.float32(2.0**-126)
        assert (tiny & (x != 0)).sum() > 1500
        zeros = np.where(tiny, np.copysign(np.float32(0), x), x)
        both = [quantized(jnp.asarray(each), casts, KEY) for each in (x, zeros)]
        for cast, one, other in zip(casts, *both, strict=True):
            for got, wanted in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
                kind = np.dtype(f"u{got.dtype.itemsize}")
                np.testing.assert_array_equal(
                    np.asarray(got).view(kind), np.asarray(wanted).view(kind), str(cast)
                )


# Errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "tile"), [("unbiased", "nv16"), ("outer128_unbiased", "nv16"), ("e8m0", "mx32")]
)
def test_stochastic_rounding_is_unbiased_maxima_included(scale, tile):
    """Within four standard errors of each element, from the two numbers around it."""
    x, keys = normal((8, 256)), jax.random.split(KEY, 4096)

    @jax.jit
    def means(x, keys):
        def total(sum_, key):
            q = quantize(x, "e2m1", tile, scale=scale, rounding="stochastic", key=key)
            return sum_ + q.values.astype(jnp.float32), q.float_scale()

        sum_, scales = jax.lax.scan(total, jnp.zeros_like(x), keys)
        return sum_ / len(keys), scales[0]

    mean, scales = (np.asarray(v, np.float64) for v in means(x, keys))
    scaled, table = (
        x / np.repeat(scales, x.shape[1] // scales.shape[1], axis=1),
        reference.finite_values("e2m1"),
    )
    assert np.abs(scaled).max() <= 6
    above = np.searchsorted(table, scaled, side="right").clip(1, len(table) - 1)
    lo, hi = table[above - 1], table[above]
    share = (scaled - lo) / (hi - lo)
    error = (hi - lo) * np.sqrt(share * (1 - share) / len(keys))
    assert (np.abs(mean - scaled) <= 4 * error).all()


def test_nvfp4_clips_maxima():
    """What scales.py says: of maxima E[q] / x is 0.989, 16/17 at least; the projection, 0.9965."""
    x = normal((512, 1024))
    q = quantize(jnp.asarray(x), "e2m1", "nv16", scale="nvfp4")
    limit = 6 * np.repeat(np.asarray(q.float_scale(), np.float64), 16, axis=1)
    mean = np.clip(x, -limit, limit)
    maxima = np.abs(x).reshape(-1, 16).max(1)
    kept = np.abs(mean).reshape(-1, 16).max(1) / maxima
    assert abs(kept.mean() - 0.989) <= 0.001 and abs(kept.min() - 16 / 17) <= 0.002
    assert abs((mean * x).sum() / (x * x).sum() - 0.9965) <= 0.0005


@pytest.mark.parametrize("tile", ["nv16", pytest.param("nv16x16", marks=pytest.mark.full)])
def test_four_over_six_has_a_smaller_error(tile):
    """At most 0.85 of the squared error of tiles of 16, as in the paper; blocks of 256 have an amax
    further out, and gain less."""
    x = normal((256, 1024))
    errors = []
    for scale in ("4over6", "nvfp4"):
        again = dequantize(quantize(jnp.asarray(x), "e2m1", tile, scale=scale))
        errors.append(np.square(np.asarray(again, np.float64) - x).sum())
    assert errors[0] <= {"nv16": 0.85, "nv16x16": 1.0}[tile] * errors[1]


def test_eden_keeps_the_projection():
    """<E q, y> / <y, y> within 0.1%, of normal numbers and of numbers with outliers."""
    x = normal((256, 256))
    x[:, 128:] *= np.exp2(np.round(normal((256, 128), seed=1)))
    cast = CASTS["eden"]

    @jax.jit
    def projected(key):
        (q,) = quantized(x, (cast,), key)
        return dequantize(q)

    mean = np.mean([np.asarray(projected(key), np.float64) for key in jax.random.split(KEY, 16)], 0)
    y = reference.hadamard(x, 32, -2, WORD).astype(np.float64)
    for half in (slice(0, 128), slice(128, 256)):
        ratio = (mean * y)[:, half].sum() / (y * y)[:, half].sum()
        assert abs(ratio - 1) <= 0.001
    plain = quantize(jnp.asarray(y, jnp.float32), "e2m1", "nv16", contract_axis=0, scale="nvfp4")
    # To nearest without the correction, and with the same transform, it is not within that.
    nearest = (np.asarray(dequantize(plain), np.float64) * y).sum() / (y * y).sum()
    assert abs(nearest - 1) > 0.002


# Recipes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tetrajet2", pytest.param("quartet2", marks=pytest.mark.full)])
def test_weights_that_share_x_share_its_signs(name):
    """Each gradient is that of its weight, to the noise of 4 bits: with signs of their own, x and g
    would be transformed differently, and the product of both would be noise."""
    x, g = (jnp.asarray(normal((64, 128), seed=seed)) for seed in (0, 1))
    ws = [jnp.asarray(normal((128, 128), seed=seed)) for seed in (2, 3)]

    @jax.jit
    def gradients(ws):
        def products(ws):
            weights = [Weight(w, key=k) for w, k in zip(ws, jax.random.split(KEY), strict=True)]
            return dot_general_together(x, weights, MATMUL, recipe=name)

        return jax.vjp(products, ws)[1]((g, g))[0]

    exact = np.asarray(x).T @ np.asarray(g)
    for dw in gradients(ws):
        error = np.linalg.norm(dw - exact) / np.linalg.norm(exact)
        assert 0.05 <= error <= 0.35


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(scale=SCALES["4over6"], tile=TENSOR), "4over6 compares tiles of up to 256"),
        (dict(scale=SCALES["outer128"], tile=TENSOR), "outer128 needs a tile that divides 128"),
        (dict(scale=SCALES["eden"], tile=BLOCK128, redrawn=True), "eden needs tiles of 1 x n"),
        (dict(scale=SCALES["eden"], redrawn=False), "contradicts redrawn=False"),
        (dict(scale=SCALES["unbiased"], format=FORMATS["e4m3"]), "unbiased needs format e2m1"),
        (dict(hadamard=1), "redrawn=True needs a Hadamard"),
        (dict(scale=SCALES["fp32"], shared_scale=True, tile=TENSOR), "shared"),
    ],
)
def test_what_contradicts_is_refused(change, message):
    base = dict(NV16, scale=SCALES["unbiased"], hadamard=32, redrawn=True)
    with pytest.raises(ValueError, match=message):
        Cast(**base | change)


def test_what_is_quantized_again_is_x_or_w_of_the_backward():
    recipe = RECIPES["quartet2"]
    with pytest.raises(ValueError, match="only dgrad_w and wgrad_x may"):
        recipe.map(lambda name, cast: recipe.dgrad_w if name == "dgrad_g" else cast)
    with pytest.raises(ValueError, match="draws signs for one operand"):
        fixed = Cast(**NV16, scale=SCALES["nvfp4"], hadamard=32)
        recipe.map(lambda name, cast: fixed if name == "dgrad_g" else cast)
    with pytest.raises(ValueError, match="scale rule eden"):
        quantize(jnp.ones((32, 32)), "e2m1", "nv16", scale="eden")
    refuse_tile(CASTS["weight"].rule, CASTS["weight"].tile, hadamard=1)
