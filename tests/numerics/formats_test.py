"""All codes of every format against ml_dtypes; saturation; stochastic rounding."""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fp8jax.numerics import formats
from fp8jax.numerics.formats import FORMATS, Format, as_format, cast
from tests.support import reference

ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}
# Compiled whole: operation by operation, each one is compiled for each shape.
compiled_cast = jax.jit(cast, static_argnames=("fmt", "rounding"))
SIGNED = [name for name, fmt in FORMATS.items() if fmt.signed]


def all_codes(fmt: Format) -> np.ndarray:
    return np.arange(2**fmt.bits, dtype=np.uint8).view(ML_DTYPES[fmt.name])


def stored(x: np.ndarray, name: str) -> np.ndarray:
    """float32 numbers by ml_dtypes, in the dtype of the format's arrays: e4m3 for e3m2."""
    codes = x.astype(ML_DTYPES[name])
    return codes if name != "e3m2" else codes.astype(np.float32).astype(ML_DTYPES["e4m3"])


def finite_values(fmt: Format) -> np.ndarray:
    """Every finite number of the format as float32, ascending, zero once."""
    values = all_codes(fmt).astype(np.float32)
    return np.unique(values[np.isfinite(values)])


def bits(x) -> np.ndarray:
    return np.asarray(x).view(np.uint8)


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_survives_a_round_trip(name):
    fmt = FORMATS[name]
    decoded = all_codes(fmt).astype(np.float32)
    codes = stored(decoded, name)
    np.testing.assert_array_equal(jnp.asarray(codes).astype(jnp.float32), decoded)
    keep = np.isfinite(decoded)
    np.testing.assert_array_equal(bits(compiled_cast(decoded[keep], name)), bits(codes[keep]))


@pytest.mark.parametrize("name", FORMATS)
def test_matches_ml_dtypes_on_ties_and_on_random_numbers(name):
    fmt = FORMATS[name]
    grid = finite_values(fmt)
    ties = ((grid[1:].astype(np.float64) + grid[:-1]) / 2).astype(np.float32)
    rng = np.random.default_rng(0)
    noise = rng.normal(size=20_000).astype(np.float32)
    x = np.concatenate(
        [
            ties,
            *(np.nextafter(ties, d) for d in np.float32([-np.inf, np.inf])),
            *(noise * np.float32(10.0) ** k for k in range(-6, 6)),
        ]
    )
    x = np.clip(x, -fmt.max, fmt.max) if fmt.signed else np.abs(x[x != 0])
    np.testing.assert_array_equal(bits(compiled_cast(x, name)), bits(stored(x, name)))


@pytest.mark.parametrize("name", FORMATS)
def test_declared_properties_are_those_of_the_codes(name):
    fmt = FORMATS[name]
    values = all_codes(fmt).astype(np.float32)
    assert fmt.max == finite_values(fmt).max()
    assert fmt.tiny == finite_values(fmt)[finite_values(fmt) > 0].min()
    assert fmt.has_nan == np.isnan(values).any()
    assert fmt.signed == (finite_values(fmt) < 0).any()
    normal = finite_values(fmt)[finite_values(fmt) >= 2.0**fmt.min_exponent].astype(np.float64)
    assert np.diff(normal).max() / fmt.max <= 2.0**-fmt.mantissa
    assert (np.diff(normal) / normal[:-1]).max() == 2.0 * fmt.unit_roundoff


@pytest.mark.parametrize("name", SIGNED)
def test_saturates_and_keeps_nan_where_there_is_one(name):
    fmt = FORMATS[name]
    x = np.float32([1e4 * fmt.max, -1e4 * fmt.max, np.inf, -np.inf, np.nan, -0.0])
    y = np.asarray(compiled_cast(x, name)).astype(np.float32)
    np.testing.assert_array_equal(y[:4], [fmt.max, -fmt.max, fmt.max, -fmt.max])
    assert np.isnan(y[4]) if fmt.has_nan else y[4] == 0
    assert y[5] == 0


def test_documented_example():
    assert float(cast(jnp.float32(1e4), "e4m3").astype(jnp.float32)) == 448.0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", SIGNED)
def test_sixteen_bit_sources_round_once(name, dtype):
    x = jnp.asarray(np.random.default_rng(1).normal(size=4096), dtype)
    expected = stored(np.asarray(x).astype(np.float32), name)
    np.testing.assert_array_equal(bits(compiled_cast(x, name)), bits(expected))


# Stochastic rounding ------------------------------------------------------------------------------

DRAWS, POINTS = 4096, 64  # one shape for all: random bits take long to compile


def round_stochastically(x, name: str, seed: int = 0) -> np.ndarray:
    return np.asarray(cast(jnp.asarray(x), name, rounding="stochastic", key=jax.random.key(seed)))


def between(low: float, high: float) -> np.ndarray:
    """float32 numbers within [low, high], half of them log-uniform and half uniform."""
    rng = np.random.default_rng(0)
    log = np.exp2(rng.uniform(np.log2(low), np.log2(high), POINTS // 2))
    both = np.concatenate([log, rng.uniform(low, high, POINTS // 2)])
    return np.clip(both, low, high).astype(np.float32)


def one_in_each_cell(fmt: Format) -> np.ndarray:
    grid = finite_values(fmt)
    cell = np.linspace(0, grid.size - 2, POINTS).round().astype(int)
    return grid[cell] + np.float32(0.3) * np.diff(grid)[cell]


PLACES = {
    "normal": lambda fmt: between(2.0**fmt.min_exponent, fmt.max),
    "subnormal": lambda fmt: between(fmt.tiny, 2.0**fmt.min_exponent),
    "below the smallest": lambda fmt: between(fmt.tiny / 64, fmt.tiny),
    "last step": lambda fmt: between(finite_values(fmt)[-2], fmt.max),
    "everywhere": one_in_each_cell,
}


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", SIGNED)
def test_stochastic_rounding_is_unbiased(name, place, sign):
    """A draw is hi with probability p = (x - lo) / (hi - lo), else lo, so that its mean is x and
    its variance (hi - lo)^2 p (1 - p) = (x - lo) (hi - x): of n draws, the mean is within five
    standard errors."""
    x = sign * PLACES[place](FORMATS[name])
    y = round_stochastically(np.tile(x, (DRAWS, 1)), name).astype(np.float64)
    grid, x = finite_values(FORMATS[name]).astype(np.float64), x.astype(np.float64)
    above = np.searchsorted(grid, x, side="right").clip(1, grid.size - 1)
    lo, hi = grid[above - 1], grid[above]
    assert ((y == lo) | (y == hi)).all()
    assert (np.abs(y.mean(axis=0) - x) <= 5 * np.sqrt((x - lo) * (hi - x) / DRAWS)).all()


@pytest.mark.parametrize("name", SIGNED)
def test_stochastic_rounding_matches_a_table_given_the_same_draws(name):
    """Over the whole range and far beyond it, against explicit neighbors in float64."""
    rng, shape = np.random.default_rng(0), (DRAWS, POINTS)
    x = (rng.normal(size=shape) * 10.0 ** rng.integers(-6, 6, shape)).astype(np.float32)
    draws = reference.draws(jax.random.key(1), shape)
    got = round_stochastically(x, name, seed=1)
    np.testing.assert_array_equal(bits(got), bits(reference.stochastic_cast(x, name, draws)))
    assert (bits(got) != bits(compiled_cast(x, name))).mean() > 0.01  # nearest would fail


@pytest.mark.parametrize("name", SIGNED)
def test_stochastic_rounding_keeps_exact_numbers_and_saturates(name):
    fmt = FORMATS[name]
    exact = finite_values(fmt)
    beyond = np.nextafter(fmt.max, np.inf, dtype=np.float32)
    far = np.float32([beyond, 1.01 * fmt.max, 3e38, np.inf])
    x, expected = np.concatenate([exact, far, -far]), [*exact, *[fmt.max] * 4, *[-fmt.max] * 4]
    y = round_stochastically(np.resize(x, (DRAWS, POINTS)), name).astype(np.float32)
    np.testing.assert_array_equal(y, np.resize(np.float32(expected), y.shape))
    y = round_stochastically(np.full((DRAWS, POINTS), np.nan, np.float32), name).astype(np.float32)
    assert np.isnan(y).all() if fmt.has_nan else (y == 0).all()


@pytest.mark.parametrize("draw", [2.0**-17, 1 - 2.0**-17])
@pytest.mark.parametrize("name", SIGNED)
def test_the_smallest_and_the_largest_draw(name, draw, monkeypatch):
    """Draws lie between 0 and 1. The smallest moves no exact number, the largest others down."""
    monkeypatch.setattr(formats, "draws", lambda key, at: jnp.full(at.shape, draw))
    grid = finite_values(FORMATS[name])
    middle, moved = (grid[1:] + grid[:-1]) / 2, grid[1:] if draw < 0.5 else grid[:-1]
    for x, expected in [(grid, grid), (middle, moved)]:
        y = round_stochastically(np.resize(x, (DRAWS, POINTS)), name).astype(np.float32)
        np.testing.assert_array_equal(y, np.resize(expected, y.shape))


@pytest.mark.parametrize(
    "key", [jax.random.key(3), jax.random.PRNGKey(4), jax.random.key(5, impl="rbg")], ids=str
)
def test_draws_are_those_of_the_definition(key):
    """Bit for bit, for every kind of key: it is defined in NumPy, in tests/support/reference.py."""
    shapes = [(7,), (3, 5), (2, 3, 4, 6), (130, 200), (), (0, 4)]
    draws = jax.jit(lambda key: [formats.draws(key, formats.places(shape)) for shape in shapes])
    for shape, found in zip(shapes, draws(key), strict=True):
        np.testing.assert_array_equal(found, reference.draws(key, shape), err_msg=str(shape))


def test_folded_keys_are_those_of_the_definition_and_differ():
    for key in (jax.random.key(3), jax.random.PRNGKey(4), jax.random.key(5, impl="rbg")):
        found = set()
        for numbers in itertools.product(range(4), range(8), range(6)):
            got = functools.reduce(formats.folded, numbers, key)
            assert got.dtype == key.dtype and got.shape == key.shape
            words = reference.folded(key, *numbers)
            np.testing.assert_array_equal(reference.words_of(got), words)
            found.add(tuple(words))
        assert len(found) == 4 * 8 * 6


def test_draws_are_uniform_and_do_not_depend_on_each_other():
    """2^20 of them, each within six standard deviations: the numbers in each of 256 bins, of the
    upper and of the lower 8 bits; and correlations between neighbors, rows and keys, which are
    0 ± 2^-10."""
    count, bins = 2**20, 256
    one = reference.draws(jax.random.key(0), (count,)).astype(np.float64)
    for bits in (one * bins, one * 2**16 % bins):
        found = np.bincount(bits.astype(int), minlength=bins)
        assert np.abs(found - count / bins).max() <= 6 * np.sqrt(count / bins)
    others = [reference.draws(jax.random.key(seed), (count,)).astype(np.float64) for seed in (1, 2)]
    shifted = [np.roll(one, shift) for shift in (1, 2, 16, 768, 4096)]
    for other in (*others, *shifted):
        assert abs(np.corrcoef(one, other)[0, 1]) <= 6 * 2.0**-10


def test_each_probability_is_rounded_to_16_bits():
    """Over all 2^16 draws, a number at p of the way to the next one moves up with the multiple of
    2^-16 nearest to p: unbiased to within 2^-17, and exact numbers stay."""
    every = (np.arange(2**16, dtype=np.float32) + 0.5) / 2**16
    rounded = jax.jit(lambda x: formats.cast_unchecked(x, FORMATS["e2m1"], jnp.asarray(every)))
    for p in (0.0, 2.0**-18, 2.0**-16, 0.1, 0.5, 0.7, 1 - 2.0**-18):
        up = np.asarray(rounded(np.full(2**16, 4 + 2 * p, np.float32))).astype(np.float32) == 6
        assert up.mean() == np.round(p * 2**16) / 2**16


def test_stochastic_rounding_is_reproducible():
    """The same key gives the same codes, compiled or not; another key gives others."""
    x = jnp.linspace(-600.0, 600.0, DRAWS * POINTS).reshape(DRAWS, POINTS)
    key, expected = jax.random.key(0), bits(round_stochastically(x, "e4m3"))
    for f in (cast, jax.jit(cast, static_argnames=("fmt", "rounding"))):
        got = f(x, fmt="e4m3", rounding="stochastic", key=key)
        np.testing.assert_array_equal(bits(got), expected)
    assert (bits(round_stochastically(x, "e4m3", seed=1)) != expected).any()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(fmt="e4m4"), "unknown format 'e4m4'; did you mean 'e4m3'"),
        (dict(fmt="e4m3", rounding="up"), "unknown rounding 'up'"),
        (dict(fmt="e4m3", rounding="stochastic"), "takes a key"),
        (dict(fmt="e4m3", key=jax.random.key(0)), "takes no key"),
        (dict(fmt="e8m0", rounding="stochastic", key=jax.random.key(0)), "format for scales"),
    ],
)
def test_bad_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        cast(jnp.ones(3), **kwargs)


def test_formats_resolve_once():
    assert as_format("e5m2") is FORMATS["e5m2"] is as_format(FORMATS["e5m2"])
