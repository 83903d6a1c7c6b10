"""Quantizers, bit for bit against the NumPy reference in tests/support/."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fp8jax.numerics.formats import FORMATS
from fp8jax.numerics.hadamard import hadamard
from fp8jax.numerics.quantization import Quantized, dequantize, quantize
from fp8jax.numerics.scales import SCALES, Constant, Fp32, Pow2
from fp8jax.numerics.tiles import BLOCK128, MX32, NV16, ROW, TENSOR, TILE128, TOKEN, NV16x16, Tile
from tests.support import reference
from tests.support.arrays import normal, rotate

TILES = {
    "TENSOR": TENSOR,
    "ROW": ROW,
    "TOKEN": TOKEN,
    "TILE128": TILE128,
    "BLOCK128": BLOCK128,
    "MX32": MX32,
    "NV16": NV16,
    "NV16x16": NV16x16,
}


RULES = {
    **SCALES, "Fp32(2)": Fp32(2), "Pow2(3)": Pow2(3), "Constant(2^-3)": Constant(0.125),
}  # fmt: skip


STORED = {"e8m0": "e8m0", "e8m0_floor": "e8m0", "nvfp4": "e4m3"}  # rule -> format of its scales


def assert_same(q: Quantized, x, fmt, tile, axis, rule, amax=None, draws=None):
    expected = reference.quantize_parts(x, fmt, tile, axis, rule, amax, draws=draws)
    values, scales = expected.values, expected.scales
    np.testing.assert_array_equal(np.asarray(q.values).view(np.uint8), values.view(np.uint8))
    got = np.asarray(q.scale)
    assert got.ndim == np.ndim(x) and got.size == len(scales)
    for index, scale in scales.items():
        assert got[index] == scale, index
    # A code times the scale of its tile is exact if there is a tensor scale, so this rounds once.
    numbers = values.astype(np.float32) * expected.of_tiles * expected.tensor
    np.testing.assert_array_equal(np.asarray(dequantize(q)), numbers)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    ("shape", "axis"), [((130, 200), -1), ((130, 200), -2), ((3, 40, 70), 1), ((300,), 0)]
)
def test_every_tile_matches_the_reference(tile, shape, axis):
    """Shapes that the tiles do not divide, both contracting axes, rank 1 to 3, two formats."""
    for fmt in ("e5m2", "e2m1"):
        x = normal(shape)
        q = quantize(jnp.asarray(x), fmt, TILES[tile], contract_axis=axis, scale="fp32")
        assert_same(q, x, fmt, TILES[tile], axis, SCALES["fp32"])


@pytest.mark.parametrize("rule", RULES)
def test_every_scale_rule_matches_the_reference(rule):
    """Over 64 binades, more than the values and the scales of any rule here hold."""
    fmt = "e2m1" if rule == "nvfp4" else "e4m3"
    tile = NV16 if rule == "nvfp4" else MX32
    x = normal((64, 96)) * np.exp2(np.arange(-32, 32, dtype=np.float32)).reshape(64, 1)
    q = quantize(jnp.asarray(x), fmt, tile, scale=RULES[rule])
    assert_same(q, x, fmt, tile, -1, RULES[rule])
    assert q.scale.dtype == (FORMATS[STORED[rule]].dtype if rule in STORED else jnp.float32)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tile", TILES)
def test_every_tile_under_every_rule(tile, rule):
    """Two tiles or more along K but for TENSOR and ROW, the last one cut off; and, since each rule
    has to find its own way to the largest number, two formats."""
    x = normal((20, 200)) * np.exp2(np.arange(200, dtype=np.float32) / 20)
    for fmt in ("e2m1",) if rule == "nvfp4" else ("e4m3", "e2m1"):
        q = quantize(jnp.asarray(x), fmt, TILES[tile], scale=RULES[rule])
        assert_same(q, x, fmt, TILES[tile], -1, RULES[rule])


@pytest.mark.parametrize(
    ("fmt", "tile", "rule"), [("e5m2", "TENSOR", "fp32"), ("e2m1", "NV16", "nvfp4"),
                              ("e2m1", "MX32", "e8m0"), ("e4m3", "TILE128", "e8m0_floor")],
)  # fmt: skip
def test_stochastic_quantizers_match_the_reference(fmt, tile, rule):
    x, key = normal((130, 200)), jax.random.key(5)
    draws = reference.draws(key, x.shape)
    for axis in (-1, -2):
        q = quantize(jnp.asarray(x), fmt, TILES[tile], contract_axis=axis, scale=rule,
                     rounding="stochastic", key=key)  # fmt: skip
        assert_same(q, x, fmt, TILES[tile], axis, SCALES[rule], draws=draws)


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


def tile_of(position, shape, tile, axis) -> tuple[tuple[int, ...], np.ndarray]:
    """(index of the tile that holds an element, mask of the elements of that tile)."""
    for index, where in reference.tiles(shape, tile, axis):
        mask = np.zeros(shape, bool)
        mask[where] = True
        if mask[position]:
            return index, mask
    raise AssertionError(position)


# Which elements share a scale is the tile's matter; a rule is one of these kinds.
KINDS = ("fp32", "e8m0", "nvfp4", "Constant(2^-3)")


@pytest.mark.parametrize(
    "rule",
    [rule if rule in KINDS else pytest.param(rule, marks=pytest.mark.full) for rule in RULES],
)
@pytest.mark.parametrize("tile", TILES)
def test_changing_one_element_changes_its_tile_only(tile, rule):
    """The element becomes its tile's amax, ten binades up. For all tiles but TENSOR the tensor's
    own amax, which NVFP4 reads too, lies elsewhere and stays. Exactly one scale changes, and codes
    within that tile only; under a constant only the element's own."""
    fmt, position = "e2m1" if rule == "nvfp4" else "e4m3", (129, 170)
    x = normal((130, 200))
    x[0, 0] = 5000.0 if tile != "TENSOR" else 1.0
    y = x.copy()
    y[position] = 2000.0
    for axis in (-1, -2):
        index, mask = tile_of(position, x.shape, TILES[tile], axis)
        a, b = (quantize(jnp.asarray(v), fmt, TILES[tile], contract_axis=axis, scale=RULES[rule])
                for v in (x, y))  # fmt: skip
        codes = np.asarray(a.values).view(np.uint8) != np.asarray(b.values).view(np.uint8)
        scales = np.argwhere(np.asarray(a.float_scale()) != np.asarray(b.float_scale()))
        if isinstance(RULES[rule], Constant):
            assert len(scales) == 0 and np.argwhere(codes).tolist() == [list(position)]
        else:
            assert scales.tolist() == [list(index)]
            assert codes[mask].mean() > 0.5 and not codes[~mask].any()


@pytest.mark.parametrize(("tile", "rule"), [("NV16", "nvfp4"), ("MX32", "e8m0")])
def test_a_rotation_keeps_changes_within_the_tile(tile, rule):
    """Blocks of 16 along the contraction lie within a tile of 16 or 32."""
    for axis in (-1, -2):
        x = normal((130, 200))
        x[0, 0] = 5000.0
        y = x.copy()
        y[101, 170] = 2000.0
        a, b = (rotate(v, 16, axis=axis) for v in (x, y))
        _, mask = tile_of((101, 170), a.shape, TILES[tile], axis)
        assert ((a != b).sum(), (a != b)[mask].sum()) == (16, 16)
        a, b = (quantize(jnp.asarray(v), "e2m1", TILES[tile], contract_axis=axis, scale=rule)
                for v in (a, b))  # fmt: skip
        codes = np.asarray(a.values).view(np.uint8) != np.asarray(b.values).view(np.uint8)
        assert codes[mask].mean() > 0.5 and not codes[~mask].any()


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


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_dequantize_multiplies_in_float32_and_rounds_once(dtype):
    x = normal((4, 256))
    parts = reference.quantize_parts(x, "e4m3", TILE128, -1, Fp32())
    numbers = parts.values.astype(np.float32) * parts.of_tiles
    got = np.asarray(dequantize(quantize(jnp.asarray(x), "e4m3", TILE128), dtype))
    np.testing.assert_array_equal(got, numbers.astype(dtype))
    rounded_twice = (parts.values.astype(np.float32) * parts.of_tiles.astype(dtype)).astype(dtype)
    assert (got != rounded_twice).any()


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
        *((lambda n=n: hadamard(jnp.ones(512), n), f"got {n}") for n in (0, -2, 3, 24, 256)),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()
