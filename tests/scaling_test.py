"""Quantizers and rotations, bit for bit against tests/reference.py or by hand; amax histories."""

import itertools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fp8jax.linear.amax_history import merge_history, record_amax
from fp8jax.numerics.formats import FORMATS
from fp8jax.numerics.hadamard import hadamard
from fp8jax.numerics.quantization import Quantized, dequantize, quantize
from fp8jax.numerics.scales import SCALES, Constant, Fp32, Pow2
from fp8jax.numerics.tiles import BLOCK128, MX32, NV16, ROW, TENSOR, TILE128, NV16x16, Tile
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
RULES = {
    **SCALES, "Fp32(2)": Fp32(2), "Pow2(3)": Pow2(3), "Constant(2^-3)": Constant(0.125),
}  # fmt: skip
STORED = {"e8m0": "e8m0", "e8m0_floor": "e8m0", "nvfp4": "e4m3"}  # rule -> format of its scales


def normal(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def rotate(x, size: int, axis: int = -1) -> np.ndarray:
    return np.asarray(jax.jit(hadamard, static_argnames=("size", "axis"))(x, size, axis=axis))


def assert_same(q: Quantized, x, fmt, tile, axis, rule, amax=None, draws=None):
    values, spread, scales = reference.quantize(x, fmt, tile, axis, rule, amax, draws=draws)
    np.testing.assert_array_equal(np.asarray(q.values).view(np.uint8), values.view(np.uint8))
    got = np.asarray(q.scale)
    assert got.ndim == np.ndim(x) and got.size == len(scales)
    for index, scale in scales.items():
        assert got[index] == scale, index
    np.testing.assert_array_equal(
        np.asarray(dequantize(q)), values.astype(np.float32) * spread
    )  # fmt: skip


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
    draws = np.asarray(jax.random.uniform(key, x.shape))
    for axis in (-1, -2):
        q = quantize(jnp.asarray(x), fmt, TILES[tile], contract_axis=axis, scale=rule,
                     rounding="stochastic", key=key)  # fmt: skip
        assert_same(q, x, fmt, TILES[tile], axis, SCALES[rule], draws=draws)


@pytest.mark.parametrize(
    ("rule", "fmt", "amaxes", "expected"),
    [  # largest numbers: e4m3 448, e5m2 57344, e2m1 6
        ("fp32", "e4m3", [0, 448, 224, 1, 4480], [1, 1, 0.5, np.float32(1) / np.float32(448), 10]),
        (Fp32(2), "e4m3", [0, 448, 224, 56, 4480], [1, 4, 2, 0.5, 40]),
        ("pow2", "e4m3", [0, 448, 449, 1, 224], [1, 1, 2, 2.0**-8, 0.5]),
        (Pow2(3), "e4m3", [0, 448, 449, 1, 224], [1, 8, 16, 2.0**-5, 4]),
        ("e8m0", "e4m3", [0, 448, 449, 1, 3e38], [1, 1, 2, 2.0**-8, 2.0**120]),
        ("e8m0", "e2m1", [0, 6, 6.1, 12, 1], [1, 1, 2, 2, 0.25]),
        # floor(log2(amax)) - 8, - 15 and - 2: whole binades, the maximum itself plays no part
        ("e8m0_floor", "e4m3", [0, 256, 511, 512, 1], [1, 1, 1, 2, 2.0**-8]),
        ("e8m0_floor", "e5m2", [0, 57344, 65535, 65536, 3], [1, 1, 1, 2, 2.0**-14]),
        ("e8m0_floor", "e2m1", [0, 6, 7.9, 8, 3e38], [1, 1, 1, 2, 2.0**125]),
        (Constant(4.0), "e4m3", [0, 448, 449, 1, 224], [4, 4, 4, 4, 4]),
    ],
)
def test_scale_rules_by_hand(rule, fmt, amaxes, expected):
    got = [quantize(jnp.full(8, a, jnp.float32), fmt, TENSOR, scale=rule) for a in amaxes]
    assert [float(q.scale[0].astype(jnp.float32)) for q in got] == [float(e) for e in expected]


def test_a_floored_scale_saturates_where_a_ceiled_one_does_not():
    x = jnp.float32([[511, 310, 1, -480]])
    floor, ceil = (dequantize(quantize(x, "e4m3", MX32, scale=r)) for r in ("e8m0_floor", "e8m0"))
    np.testing.assert_array_equal(floor, [[448, 320, 1, -448]])  # scale 1: steps of 32 at 310
    np.testing.assert_array_equal(ceil, [[512, 320, 1, -480]])  # scale 2


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


def tile_of(position, shape, tile, axis) -> tuple[tuple[int, ...], np.ndarray]:
    """(index of the tile that holds an element, mask of the elements of that tile)."""
    for index, where in reference.tiles(shape, tile, axis):
        mask = np.zeros(shape, bool)
        mask[where] = True
        if mask[position]:
            return index, mask
    raise AssertionError(position)


@pytest.mark.parametrize("rule", RULES)
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


# The random Hadamard transform --------------------------------------------------------------------

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


@pytest.mark.parametrize("size", SIZES)
def test_a_rotation_has_the_bits_of_the_reference(size):
    """Along a last axis that the size may not divide, and along one in the middle."""
    for shape, axis in [((3, 130), -1), ((2, 48, 3), 1)]:
        x = normal(shape) * np.float32(1e3)
        expected = reference.hadamard(x, size, axis)
        assert expected.shape[axis] == -(-shape[axis] // size) * size
        np.testing.assert_array_equal(rotate(x, size, axis), expected)


@pytest.mark.parametrize("size", SIZES)
def test_a_rotation_is_the_matrix_of_signs_and_sylvester(size):
    """Rotating the unit vectors gives the matrix itself: one product with 1 / sqrt(size), which is
    exact at even powers of two, where the matrix is orthogonal to the last bit in float64. At odd
    ones 1 / sqrt(size) is off by 2^-24 relative, once in an entry and twice in a product of two."""
    matrix = rotate(np.eye(size, dtype=np.float32), size).astype(np.float64)
    error = 0 if math.isqrt(size) ** 2 == size else 2.0**-24
    entry = 1 / np.sqrt(size)
    assert np.abs(matrix - reference.hadamard_matrix(size)).max() <= error * entry
    assert np.abs(matrix @ matrix.T - np.eye(size)).max() <= 2.001 * error
    signs = np.sign(matrix[:, 0])
    # 3.243F6A88 85A308D3 13198A2E 03707344 in hexadecimal.
    pi = f"{0x243F6A8885A308D313198A2E03707344:0128b}"[:size]
    assert pi == "".join("1" if s < 0 else "0" for s in signs)
    assert pi == "".join(map(str, reference.bits_of_pi(size)))


def test_a_rotation_cancels_in_a_product():
    """Each side is rounded in 4 sums and never in the product with 1/4, so that an element of x'
    is off by at most 4 * 2^-24 of |x| |H| / 4, and the product by twice that, to first order. 130
    is no multiple of 16: the zeros that fill the block up add nothing."""
    x, y = normal((8, 130)), normal((130, 6), 1)
    a, b = rotate(x, 16).astype(np.float64), rotate(y, 16, axis=0).astype(np.float64)
    assert a.shape == (8, 144) and b.shape == (144, 6)
    spread = np.kron(np.eye(9), np.full((16, 16), 0.25))[:130]  # |H| / 4
    bound = 2.001 * 4 * 2.0**-24 * (np.abs(x) @ spread) @ (np.abs(y).T @ spread).T
    exact = x.astype(np.float64) @ y.astype(np.float64)
    assert (np.abs(a @ b - exact) <= bound).all()
    assert np.abs(a[:, :130] - x).max() > 1  # and yet something was rotated


def test_an_outlier_is_spread_over_its_block():
    x = np.zeros((2, 48), np.float32)
    x[1, 20] = 1.0
    y = np.abs(rotate(x, 16))
    np.testing.assert_array_equal(y[1], np.repeat(np.float32([0, 0.25, 0]), 16))
    assert (y[0] == 0).all()


def test_rotations_of_empty_and_narrow_arrays():
    for shape, axis, expected in [((0, 5), 1, (0, 16)), ((0, 5), 0, (0, 5)), ((5, 0), -1, (5, 0))]:
        assert rotate(np.ones(shape, np.float32), 16, axis).shape == expected
    x = normal((4, 32)).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(rotate(x, 16), reference.hadamard(x.astype(np.float32), 16))


# Histories ----------------------------------------------------------------------------------------


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
