"""Quantisers bit for bit against tests/reference.py; scale rules by hand; histories."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fp8jax import scaling
from fp8jax.formats import FORMATS
from fp8jax.scaling import (
    BLOCK128,
    MX32,
    NV16,
    ROW,
    SCALES,
    TENSOR,
    TILE128,
    Constant,
    NV16x16,
    Pow2,
    Tile,
    dequantize,
    merge_history,
    quantize,
    record_amax,
)
from tests import reference

TILES = {
    "TENSOR": TENSOR,
    "ROW": ROW,
    "TILE128": TILE128,
    "BLOCK128": BLOCK128,
    "MX32": MX32,
    "NV16": NV16,
    "NV16x16": NV16x16,
}
RULES = {**SCALES, "Pow2(3)": Pow2(3), "Constant(2^-3)": Constant(0.125)}


def normal(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def assert_same(q: scaling.Quantized, x, fmt, tile, axis, rule, amax=None):
    values, spread, scales = reference.quantize(x, fmt, tile, axis, rule, amax)
    np.testing.assert_array_equal(np.asarray(q.values).view(np.uint8), values.view(np.uint8))
    got = np.asarray(q.scale)
    assert got.ndim == np.ndim(x) and got.size == len(scales)
    for index, scale in scales.items():
        assert got[index] == scale, index
    np.testing.assert_array_equal(
        np.asarray(dequantize(q)), values.astype(np.float32) * spread
    )  # fmt: skip


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "e2m1"])
def test_every_tile_matches_the_reference(tile, fmt):
    """Shapes that the tiles divide and that they do not, both contracting axes, rank 1 to 3."""
    for shape, axis in [((130, 200), -1), ((130, 200), -2), ((3, 40, 70), 1), ((300,), 0)]:
        x = normal(shape)
        for rule in ("fp32", "pow2"):
            q = quantize(jnp.asarray(x), fmt, TILES[tile], contract_axis=axis, scale=rule)
            assert_same(q, x, fmt, TILES[tile], axis, SCALES[rule])


@pytest.mark.parametrize("rule", RULES)
def test_every_scale_rule_matches_the_reference(rule):
    fmt = "e2m1" if rule == "nvfp4" else "e4m3"
    tile = NV16 if rule == "nvfp4" else MX32
    x = normal((64, 96)) * np.exp2(np.arange(-32, 32, dtype=np.float32)).reshape(64, 1)
    q = quantize(jnp.asarray(x), fmt, tile, scale=RULES[rule])
    assert_same(q, x, fmt, tile, -1, RULES[rule])
    assert q.scale.dtype == {"e8m0": FORMATS["e8m0"].dtype, "nvfp4": FORMATS["e4m3"].dtype}.get(
        rule, jnp.float32
    )


@pytest.mark.parametrize(
    ("rule", "amaxes", "expected"),
    [  # e4m3: max 448
        ("fp32", [0, 448, 224, 1, 4480], [1, 1, 0.5, np.float32(1) / np.float32(448), 10]),
        ("pow2", [0, 448, 449, 1, 224], [1, 1, 2, 2.0**-8, 0.5]),
        (Pow2(3), [0, 448, 449, 1, 224], [1, 8, 16, 2.0**-5, 4]),
        ("e8m0", [0, 448, 449, 1, 3e38], [1, 1, 2, 2.0**-8, 2.0**120]),
        (Constant(4.0), [0, 448, 449, 1, 224], [4, 4, 4, 4, 4]),
    ],
)
def test_scale_rules_by_hand(rule, amaxes, expected):
    got = [quantize(jnp.full(8, a, jnp.float32), "e4m3", TENSOR, scale=rule) for a in amaxes]
    assert [float(q.scale[0].astype(jnp.float32)) for q in got] == [float(e) for e in expected]


def test_nvfp4_by_hand():
    """Five tiles under one tensor scale of 1: amax 2688 = 6 * 448 pins it."""
    amaxes = np.float32([2688, 6, 3, 0, 0.001])
    x = np.repeat(amaxes, 16).reshape(1, 80)
    q = quantize(jnp.asarray(x), "e2m1", NV16, scale="nvfp4")
    assert float(q.tensor_scale) == 1.0
    np.testing.assert_array_equal(q.scale.astype(jnp.float32), [[448, 1, 0.5, 1, 2.0**-9]])
    np.testing.assert_array_equal(dequantize(q)[0, ::16], [2688, 6, 3, 0, 2.0**-10])


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "e2m1"])
def test_powers_of_two_never_saturate_and_waste_less_than_a_binade(fmt):
    """At, just below and just above max * 2^k for every k of float32's range."""
    top = np.float32(FORMATS[fmt].max)
    around = [np.nextafter(top, np.float32(0)), top, np.nextafter(top, np.float32(1e9))]
    with np.errstate(over="ignore"):
        amax = np.float32([a * np.float32(2.0) ** k for k in range(-115, 125) for a in around])
    amax = amax[np.isfinite(amax)]
    scale, _ = Pow2()(jnp.asarray(amax), FORMATS[fmt])
    ratio = amax.astype(np.float64) / np.asarray(scale, np.float64)
    assert (ratio <= top).all() and (ratio > top / 2).all()
    assert (np.frexp(np.asarray(scale))[0] == 0.5).all()


def test_the_smallest_and_largest_tensors_stay_finite():
    for amax, rule in itertools.product((1e-38, 2.0**-126, 3e38), RULES):
        fmt, tile = ("e2m1", NV16) if rule == "nvfp4" else ("e4m3", TENSOR)
        y = dequantize(quantize(jnp.full(16, amax, jnp.float32), fmt, tile, scale=RULES[rule]))
        assert np.isfinite(y).all(), (amax, rule)


def test_a_given_amax_takes_the_place_of_the_tensors_own():
    x = normal((8, 256))
    q = quantize(jnp.asarray(x), "e4m3", TENSOR, amax=jnp.float32(1.0))
    assert_same(q, x, "e4m3", TENSOR, -1, SCALES["fp32"], amax=1.0)
    assert (np.abs(np.asarray(q.values, np.float32)).max()) == 448  # saturates


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_a_non_finite_element_poisons_the_scale_of_its_tile_only(fmt, bad):
    x = normal((4, 256))
    x[1, 200] = bad
    q = quantize(jnp.asarray(x), fmt, TILE128)
    expected = np.zeros((4, 2), bool)
    expected[1, 1] = True
    np.testing.assert_array_equal(np.isnan(q.scale), expected)
    delayed = quantize(jnp.asarray(x), fmt, TENSOR, amax=jnp.float32(3.0))
    assert np.isnan(delayed.scale).all()
    stored = quantize(jnp.asarray(x), fmt, TILE128, scale="e8m0")
    np.testing.assert_array_equal(np.isnan(stored.scale.astype(jnp.float32)), expected)


def test_changing_one_element_changes_the_codes_of_its_tile_only():
    x = normal((4, 256))
    y = x.copy()
    y[2, 5] = 100.0
    a, b = (np.asarray(quantize(jnp.asarray(v), "e4m3", TILE128).values).view(np.uint8)
            for v in (x, y))  # fmt: skip
    changed = (a != b).any(axis=-1)
    assert changed[2] and not changed[[0, 1, 3]].any()
    np.testing.assert_array_equal(a[2, 128:], b[2, 128:])


def test_zero_empty_and_one_row_operands():
    zero = quantize(jnp.zeros((3, 5)), "e4m3", TILE128)
    assert (np.asarray(dequantize(zero)) == 0).all() and (np.asarray(zero.scale) == 1).all()
    for shape in [(0, 5), (5, 0), (1, 5)]:
        for tile in TILES.values():
            q = quantize(jnp.ones(shape), "e4m3", tile)
            assert dequantize(q).shape == shape


def test_quantized_is_a_pytree_with_a_static_tile():
    q = quantize(jnp.asarray(normal((4, 256))), "e4m3", TILE128)
    out = jax.jit(lambda q: q)(q)
    assert out.tile == q.tile == (1, 128)
    assert np.asarray(out.values).dtype == ml_dtypes.float8_e4m3fn


def test_dequantize_is_not_collapsed_when_compiled():
    x = jnp.asarray(normal((4, 256)))
    f = jax.jit(lambda x: dequantize(quantize(x, "e4m3", TILE128), jnp.bfloat16))
    assert (np.asarray(f(x), np.float32) != np.asarray(x.astype(jnp.bfloat16), np.float32)).any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tile(0, 1), "at least one element"),
        (lambda: Constant(0.0), "between 2.-126 and 2.126"),
        (lambda: Constant(float("nan")), "between 2.-126 and 2.126"),
        (lambda: quantize(jnp.ones((2, 2)), "e4m3", TENSOR, scale="pow"), "mean 'pow2'"),
        (lambda: quantize(jnp.ones((2, 2)), "e4m3", TENSOR, contract_axis=2), "out of range"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_history_rolls_and_ignores_what_is_not_finite():
    h = jnp.zeros(3)
    steps = [(2.0, [2, 0, 0]), (5.0, [5, 2, 0]), (np.inf, [5, 5, 2]), (np.nan, [5, 5, 5]),
             (1.0, [1, 5, 5])]  # fmt: skip
    for amax, expected in steps:
        h = record_amax(h, jnp.float32(amax))
        np.testing.assert_array_equal(h, expected)


def test_a_history_that_received_nothing_stays():
    old = jnp.asarray([[3.0, 2.0], [3.0, 2.0], [3.0, 2.0], [0.0, 0.0]])
    new = jnp.asarray([[4.0, 3.0], [0.0, 0.0], [-np.inf, -np.inf], [0.0, 0.0]])
    np.testing.assert_array_equal(
        merge_history(old, new), [[4, 3], [3, 2], [3, 2], [0, 0]]
    )  # fmt: skip
