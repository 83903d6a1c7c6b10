"""Quantizers, bit for bit against the NumPy reference in tests/support/."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fp8jax.numerics.formats import FORMATS
from fp8jax.numerics.hadamard import hadamard
from fp8jax.numerics.names import as_recipe
from fp8jax.numerics.quantization import Quantized, dequantize, quantize
from fp8jax.numerics.scales import SCALES, Bias, Constant, Fp32, Mse, NvFp4, Pow2
from fp8jax.numerics.tiles import BLOCK128, MX32, NV16, ROW, TENSOR, TILE128, TOKEN, NV16x16, Tile
from tests.support import reference
from tests.support.arrays import edge_cases, normal, rotate

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
    **{name: rule for name, rule in SCALES.items() if name != "eden"},
    "Fp32(2)": Fp32(2),
    "Pow2(3)": Pow2(3),
    "Constant(2^-3)": Constant(0.125),
}


# rule -> the tiles that it takes, if not all
TILES_OF = {
    "mse": ("TENSOR",),
    "4over6": ("TILE128", "MX32", "NV16", "NV16x16"),
    "outer128": ("TOKEN", "TILE128", "BLOCK128", "MX32", "NV16", "NV16x16"),
    "outer128_unbiased": ("TOKEN", "TILE128", "BLOCK128", "MX32", "NV16", "NV16x16"),
}
# rule -> format of its scales
STORED = {
    "e8m0": "e8m0",
    "e8m0_floor": "e8m0",
    **dict.fromkeys(["nvfp4", "unbiased", "4over6"], "e4m3"),
}


@functools.partial(jax.jit, static_argnames="casts")
def quantized(x, casts, key=None):
    """Under each cast (format, tile, contracting axis, rule): codes and scales, and the numbers
    that they stand for. Many in one program: operation by operation, each one is compiled."""
    found = []
    for fmt, tile, axis, rule in casts:
        drawn = {} if key is None else dict(rounding="stochastic", key=key)
        q = quantize(x, fmt, TILES[tile], contract_axis=axis, scale=RULES[rule], **drawn)
        found.append((q, dequantize(q)))
    return found


def codes_of(q: Quantized) -> np.ndarray:
    return np.asarray(q.values).view(np.uint8)


def assert_all_same(x, casts, key=None):
    draws = None if key is None else reference.draws(key, x.shape)
    for cast, q in zip(casts, quantized(jnp.asarray(x), casts, key), strict=True):
        fmt, tile, axis, rule = cast
        assert_same(*q, x, fmt, TILES[tile], axis, RULES[rule], draws=draws)


def assert_same(q: Quantized, dequantized, x, fmt, tile, axis, rule, amax=None, draws=None):
    expected = reference.quantize_parts(x, fmt, tile, axis, rule, amax, draws=draws)
    values, scales = expected.values, expected.scales
    np.testing.assert_array_equal(codes_of(q), values.view(np.uint8))
    got = np.asarray(q.scale)
    assert got.ndim == np.ndim(x) and got.size == len(scales)
    for index, scale in scales.items():
        assert got[index] == scale, index
    # A code times the scale of its tile is exact if there is a tensor scale, so this rounds once.
    numbers = values.astype(np.float32) * expected.of_tiles * expected.tensor
    np.testing.assert_array_equal(np.asarray(dequantized), numbers)


@pytest.mark.parametrize(
    ("shape", "axis"), [((130, 200), -1), ((130, 200), -2), ((3, 40, 70), 1), ((300,), 0)]
)
def test_every_tile_matches_the_reference(shape, axis):
    """Shapes that the tiles do not divide, both contracting axes, rank 1 to 3, two formats."""
    casts = tuple((fmt, tile, axis, "fp32") for fmt in ("e5m2", "e2m1") for tile in TILES)
    assert_all_same(normal(shape), casts)


def test_every_scale_rule_matches_the_reference():
    """Over 64 binades, more than the values and the scales of any rule here hold."""
    casts = tuple(
        ("e2m1", "NV16", -1, rule)
        if isinstance(RULES[rule], NvFp4)
        else ("e4m3", "TENSOR" if rule == "mse" else "MX32", -1, rule)
        for rule in RULES
    )
    x = normal((64, 96)) * np.exp2(np.arange(-32, 32, dtype=np.float32)).reshape(64, 1)
    assert_all_same(x, casts)
    for rule, (q, _) in zip(RULES, quantized(jnp.asarray(x), casts), strict=True):
        stored = FORMATS[STORED[rule]].dtype if rule in STORED else jnp.float32
        assert q.scale.dtype == stored, rule


@pytest.mark.parametrize("tile", TILES)
def test_every_tile_under_every_rule(tile):
    """Two tiles or more along K but for TENSOR and ROW, the last one cut off; and, since each rule
    has to find its own way to the largest number, two formats."""
    x = normal((20, 200)) * np.exp2(np.arange(200, dtype=np.float32) / 20)
    casts = tuple(
        (fmt, tile, -1, rule)
        for rule in RULES
        if tile in TILES_OF.get(rule, TILES)
        for fmt in (("e2m1",) if isinstance(RULES[rule], NvFp4) else ("e4m3", "e2m1"))
    )
    assert_all_same(x, casts)


@pytest.mark.parametrize(
    ("fmt", "tile", "rule"),
    [
        ("e5m2", "TENSOR", "fp32"),
        ("e2m1", "NV16", "nvfp4"),
        ("e2m1", "NV16", "unbiased"),
        ("e2m1", "NV16", "outer128_unbiased"),
        ("e2m1", "MX32", "e8m0"),
        ("e4m3", "TILE128", "e8m0_floor"),
    ],
)
def test_stochastic_quantizers_match_the_reference(fmt, tile, rule):
    casts = tuple((fmt, tile, axis, rule) for axis in (-1, -2))
    assert_all_same(normal((130, 200)), casts, key=jax.random.key(5))


def test_the_smallest_and_largest_tensors_stay_finite():
    casts = tuple(
        ("e2m1", "NV16", -1, rule)
        if isinstance(RULES[rule], NvFp4)
        else ("e4m3", "TENSOR", -1, rule)
        for rule in RULES
    )
    for amax in (1e-38, 2.0**-126, 3e38):
        found = quantized(jnp.asarray(np.full(16, amax, np.float32)), casts)
        for (*_, rule), (_, y) in zip(casts, found, strict=True):
            assert np.isfinite(y).all(), (amax, rule)


def test_a_given_amax_takes_the_place_of_the_tensors_own():
    """Operation by operation, as outside `jax.jit`."""
    x = normal((8, 256))
    q = quantize(jnp.asarray(x), "e4m3", TENSOR, amax=jnp.float32(1.0))
    assert_same(q, dequantize(q), x, "e4m3", TENSOR, -1, SCALES["fp32"], amax=1.0)
    assert (np.abs(np.asarray(q.values, np.float32)).max()) == 448  # saturates


@functools.partial(jax.jit, static_argnames="fmt")
def with_amax(x, amax, fmt):
    return quantize(x, fmt, TENSOR, amax=amax)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_a_non_finite_element_poisons_the_scale_of_its_tile_only(fmt, bad):
    x = normal((4, 256))
    x[1, 200] = bad
    expected = np.zeros((4, 2), bool)
    expected[1, 1] = True
    casts = tuple((fmt, "TILE128", -1, rule) for rule in ("fp32", "e8m0"))
    for q, _ in quantized(jnp.asarray(x), casts):
        np.testing.assert_array_equal(np.isnan(q.float_scale()), expected)
    delayed = with_amax(jnp.asarray(x), jnp.float32(3.0), fmt)
    assert np.isnan(delayed.scale).all()


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
    "rules",
    [
        KINDS,
        pytest.param(
            tuple(r for r in RULES if r not in (*KINDS, *TILES_OF)), marks=pytest.mark.full
        ),
    ],
)
@pytest.mark.parametrize("tile", TILES)
def test_changing_one_element_changes_its_tile_only(tile, rules):
    """The element becomes its tile's amax, ten binades up. For all tiles but TENSOR the tensor's
    own amax, which NVFP4 reads too, lies elsewhere and stays. Exactly one scale changes, and codes
    within that tile only; under a constant only the element's own. Not of rules that look at more
    than the amax of a tile."""
    position = (129, 170)
    x = normal((130, 200))
    x[0, 0] = 5000.0 if tile != "TENSOR" else 1.0
    y = x.copy()
    y[position] = 2000.0
    casts = tuple(
        ("e2m1" if isinstance(RULES[rule], NvFp4) else "e4m3", tile, axis, rule)
        for axis in (-1, -2)
        for rule in rules
    )
    before, after = (quantized(jnp.asarray(v), casts) for v in (x, y))
    for (_, _, axis, rule), (a, _), (b, _) in zip(casts, before, after, strict=True):
        index, mask = tile_of(position, x.shape, TILES[tile], axis)
        codes = codes_of(a) != codes_of(b)
        scales = np.argwhere(np.asarray(a.float_scale()) != np.asarray(b.float_scale()))
        if isinstance(RULES[rule], Constant):
            assert len(scales) == 0 and np.argwhere(codes).tolist() == [list(position)], rule
        else:
            assert scales.tolist() == [list(index)], rule
            assert codes[mask].mean() > 0.5 and not codes[~mask].any(), rule


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
        casts = (("e2m1", tile, axis, rule),)
        a, b = (codes_of(quantized(jnp.asarray(v), casts)[0][0]) for v in (a, b))
        codes = a != b
        assert codes[mask].mean() > 0.5 and not codes[~mask].any()


def test_zero_empty_and_one_row_operands():
    zero = quantize(jnp.zeros((3, 5)), "e4m3", TILE128)
    assert (np.asarray(dequantize(zero)) == 0).all() and (np.asarray(zero.scale) == 1).all()
    casts = tuple(("e4m3", tile, -1, "fp32") for tile in TILES)
    for shape in [(0, 5), (5, 0), (1, 5)]:
        for q, dequantized in quantized(jnp.ones(shape), casts):
            assert dequantized.shape == q.values.shape == shape


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
        (lambda: quantize(jnp.ones((2, 2)), "e8m0", TENSOR), "e8m0 holds scales, not values"),
        (
            lambda: dequantize(
                jax.vmap(lambda x: quantize(x, "e4m3", TENSOR))(jnp.ones((2, 3, 4)))
            ),
            r"3 axes and their tile 2: .*jax.vmap\(fp8jax.dequantize\)",
        ),
        *((lambda n=n: hadamard(jnp.ones(512), n), f"got {n}") for n in (0, -2, 3, 24, 256)),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_least_squares_may_be_those_of_a_smaller_scale():
    """An amax just above a binade's end costs little where it saturates; what is small gains more:
    2^-9 is e4m3's least number under a scale of 1, and a tie that is rounded to 0 under 2."""
    x = jnp.asarray([448.01] + [2.0**-9] * 999, jnp.float32)
    plain, least = (quantize(x, "e4m3", "tensor", scale=rule) for rule in ("bias", "mse"))
    assert (float(plain.scale.squeeze()), float(least.scale.squeeze())) == (2.0, 1.0)
    np.testing.assert_array_equal(dequantize(least)[1:], x[1:])


@pytest.mark.parametrize("margin", [0, 3])
def test_the_least_squares_are_least_up_to_the_rounding_of_float32_sums(margin):
    """Under each cast of `fp8_amax:scale=mse`: the float64 error of the scale that was chosen."""
    casts = dict.fromkeys(as_recipe(f"fp8_amax:scale=mse,margin={margin}").casts)
    rules = {cast.format.name: cast.rule for cast in casts}
    assert rules == {"e4m3": Mse(), "e5m2": Mse(margin)}
    chosen = jax.jit(lambda x: {c.format.name: _scale(x, c) for c in casts})
    # Columns over so many binades; 40 is more than a format has.
    spread = [np.arange(160, dtype=np.float32) % max(n, 1) - np.float32(n / 2) for n in (0, 3, 40)]
    arrays = [(normal((128, 160)) * np.exp2(each), 1) for each in spread]
    # Many ties between 0 and the smallest number under the scale of 448.00003, none under half of
    # it: E4M3's are multiples of 2^-9, E5M2's of 2^-23. Half of it loses nothing of 448.00003,
    # which rounds to 448 anyway, but 32 of 480.
    odd = np.random.default_rng(0).choice(np.float32([-3, -1, 1, 3]), (128, 160))
    tiny = odd * np.float32(2.0**-9)
    for amax, small, ties in ((448.00003, 2.0**-14, 1), (480, 1, 2)):
        x = np.where(np.arange(160) % 2, tiny * np.float32(small), tiny)
        x[0, 0] = amax
        arrays.append((x, ties))
    for x, ties in [*arrays, (edge_cases(), 2)]:
        # A term ((x - q s) r)^2, r = 1 / amax, is rounded seven times: a difference, r and their
        # product, which all count twice, and the square; q s is exact, s being a power of two. A
        # sum of n terms, in any order, rounds each n - 1 times. With u = 2^-24, k = (n + 7) u (one
        # more for the float64 sums here) and g = k / (1 - k), a sum is 1 - g to 1 + g of the error,
        # less what is lost: terms below 2^-126. The chosen scale's sum is at most the best one's.
        k = (x.size + 7) * 2.0**-24
        g, lost = k / (1 - k), x.size * 2.0**-126 * np.abs(x).max().astype(np.float64) ** 2
        for fmt, scale in chosen(jnp.asarray(x)).items():
            errors = _errors(x, fmt)
            bound = ((1 + g) * min(errors.values()) + lost) / (1 - g)
            assert errors[float(scale.squeeze()) / 2 ** rules[fmt].margin] <= bound
            # It can be wrong: where `ties` is 2, two may be as good as equal.
            assert sorted(errors.values())[ties] > bound


def _scale(x, cast):
    return quantize(x, cast.format, cast.tile, scale=cast.rule).scale


def _errors(x: np.ndarray, fmt: str) -> dict[float, float]:
    """The squared error in float64 under each of the four scales that `Mse` compares."""
    largest, errors = reference.pow2_scale(np.abs(x).max(), fmt), {}
    for scale in (largest / np.float32(2**binades) for binades in range(4)):
        again = reference.saturating_cast(x / scale, fmt).astype(np.float64) * scale
        errors[float(scale)] = np.square(again - x).sum()
    return errors


def test_a_bias_is_limited_before_its_margin_is_taken_off():
    scale, _ = Bias(margin=3)(jnp.float32(2.0**-80), FORMATS["e4m3"])
    assert scale == 2.0**-28  # a bias of 31, less 3
