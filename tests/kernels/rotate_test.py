"""The kernels that transform and cast: the bits of numerics/, in Pallas' interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.numerics.formats import FORMATS, cast, key_words
from fp8jax.numerics.hadamard import hadamard, whole_hadamard
from fp8jax.numerics.quantization import lengths, squared_error
from tests.support import reference
from tests.support.arrays import edge_cases, normal
from tests.support.interpreter import interpret, needs_pallas

pytestmark = needs_pallas


def rotated(size: int, dtype=jnp.bfloat16, rows: int = 64, columns: int = 256):
    """An array, its transform and the amax of each block of that, by XLA."""
    x = jax.random.normal(jax.random.key(0), (rows, columns)).astype(dtype)
    y = hadamard(x, size, axis=0)
    return x, y, jnp.abs(y).reshape(rows // size, size, columns).max(1)


@pytest.mark.parametrize(
    ("size", "dtype", "columns"),
    [(16, jnp.bfloat16, 256), (16, jnp.float32, 128), (2, jnp.bfloat16, 512)],
)
def test_the_amax_of_each_block_is_xlas(size, dtype, columns):
    from fp8jax.kernels.rotate import rotated_amax

    x, _, amax = rotated(size, dtype, columns=columns)
    x = x.at[0, 3].set(jnp.nan)
    got = interpret(functools.partial(rotated_amax, size=size), x)
    np.testing.assert_array_equal(got, amax.at[0, 3].set(jnp.nan))


@pytest.mark.parametrize(
    ("size", "fmt", "stochastic"),
    [(16, "e2m1", False), (16, "e2m1", True), (4, "e4m3", True), (32, "e2m1", False)],
)
def test_codes_are_xlas(size, fmt, stochastic):
    from fp8jax.kernels.rotate import rotated_codes

    x, y, amax = rotated(size)
    reciprocal, key = FORMATS[fmt].max / (amax * 0.9), jax.random.key(5)  # some saturate
    words = jnp.stack([*key_words(key), *jnp.zeros(2, jnp.uint32)]) if stochastic else None
    kernel = functools.partial(rotated_codes, fmt=FORMATS[fmt], size=size, words=words)
    got = interpret(kernel, x, reciprocal)
    how = dict(rounding="stochastic", key=key) if stochastic else {}
    expected = cast(y * jnp.repeat(reciprocal, size, axis=0), fmt, **how)
    assert got.dtype == FORMATS["e4m3"].dtype
    np.testing.assert_array_equal(got.astype(jnp.float32), expected.astype(jnp.float32))


def test_a_part_of_an_array_has_the_draws_of_its_places():
    from fp8jax.kernels.rotate import rotated_codes

    x, _, amax = rotated(16)
    reciprocal, words = 6 / amax, key_words(jax.random.key(5))
    of = lambda row, column: jnp.stack([*words, jnp.uint32(row), jnp.uint32(column)])  # noqa: E731
    kernel = functools.partial(rotated_codes, fmt=FORMATS["e2m1"], size=16)
    whole = interpret(lambda x, r: kernel(x, r, words=of(0, 0)), x, reciprocal)
    part = interpret(
        lambda x, r: kernel(x, r, words=of(32, 128), columns=256),
        x[32:, 128:],
        reciprocal[2:, 128:],
    )
    np.testing.assert_array_equal(part.view(jnp.uint8), whole[32:, 128:].view(jnp.uint8))


@pytest.mark.parametrize(
    ("shape", "size", "message"),
    [((64, 100), 16, "128 columns"), ((60, 128), 16, "blocks of 16 rows"), ((64, 128), 64, "64")],
)
def test_what_the_kernels_do_not_take(shape, size, message):
    from fp8jax.kernels.rotate import rotated_amax

    with pytest.raises(ValueError, match=message):
        interpret(functools.partial(rotated_amax, size=size), jnp.ones(shape, jnp.bfloat16))


SIGNS = jnp.uint32(0x9C3B51E7)


@pytest.mark.parametrize("tile", [16, 32])
def test_the_amax_of_tiles_with_new_signs_is_xlas(tile):
    from fp8jax.kernels.rotate import rotated_amax

    x, *_ = rotated(32)
    y = jnp.abs(whole_hadamard(x, 32, SIGNS, axis=0))
    got = interpret(lambda x, signs: rotated_amax(x, 32, tile, signs), x, SIGNS)
    np.testing.assert_array_equal(got, y.reshape(-1, tile, y.shape[1]).max(1))


def test_errors_of_codes_are_xlas():
    from fp8jax.kernels.rotate import rotated_errors

    x, y, amax = rotated(16)
    reciprocal = 6 / (amax * 0.9)
    got = interpret(lambda x, r: rotated_errors(x, r, FORMATS["e2m1"], 16), x, reciprocal)
    expected = squared_error(y * jnp.repeat(reciprocal, 16, axis=0), FORMATS["e2m1"])
    np.testing.assert_array_equal(got, expected.reshape(-1, 16, y.shape[1]).sum(1))


def test_lengths_of_codes_are_xlas():
    from fp8jax.kernels.rotate import rotated_lengths

    x, *_ = rotated(32)
    y = whole_hadamard(x, 32, SIGNS, axis=0)
    reciprocal = 6.1 / jnp.abs(y).reshape(-1, 16, y.shape[1]).max(1)
    kernel = lambda x, r, signs: rotated_lengths(x, r, FORMATS["e2m1"], 32, signs)  # noqa: E731
    codes, *sums = interpret(kernel, x, reciprocal, SIGNS)
    scaled = y * jnp.repeat(reciprocal, 16, axis=0)
    expected = cast(scaled, "e2m1").astype(jnp.float32)
    np.testing.assert_array_equal(codes.astype(jnp.float32), expected)
    for got, each in zip(sums, lengths(scaled, FORMATS["e2m1"]), strict=True):
        np.testing.assert_array_equal(got, each.reshape(-1, 32, y.shape[1]).sum(1))


def extreme(size: int) -> np.ndarray:
    """The edge cases [64, 128], and below them blocks of which some are not finite."""
    x = np.concatenate([edge_cases()[32:96, :128], normal((96, 128))])
    x[32:48, :8] *= 16  # a transform of the smallest numbers is subnormal, which XLA makes zeros
    # One number a block: the transform is that over sqrt(size), of 16 with ties of e2m1.
    x[64:96] = 0
    x[64, :] = np.arange(128, dtype=np.float32) % 31 * np.float32(0.25 * size**0.5)
    x[96, 0], x[97, 1], x[128, 2], x[129, 3] = np.nan, np.inf, -np.inf, np.nan
    return x


@pytest.mark.full
@pytest.mark.parametrize("stochastic", [False, True])
def test_codes_are_numpys(stochastic):
    from fp8jax.kernels.rotate import rotated_codes

    x, key = extreme(16), jax.random.key(5)
    reciprocal, scaled = scaled_by_numpy(x, 16)
    words = jnp.stack([*key_words(key), *jnp.zeros(2, jnp.uint32)]) if stochastic else None
    kernel = functools.partial(rotated_codes, fmt=FORMATS["e2m1"], size=16, words=words)
    got = np.asarray(interpret(kernel, jnp.asarray(x), reciprocal)).astype(np.float32)
    expected = rounded_by_numpy(scaled, reference.draws(key, x.shape) if stochastic else None)
    finite = np.isfinite(scaled)
    np.testing.assert_array_equal(got[finite], expected[finite])
    assert (np.abs(got[np.isinf(scaled)]) == 6).all()
    assert 16 <= (~finite).sum() <= 64 and (np.abs(expected[finite]) == 6).sum() > 100


@pytest.mark.full
def test_errors_are_numpys():
    from fp8jax.kernels.rotate import rotated_errors

    x = extreme(16)
    reciprocal, scaled = scaled_by_numpy(x, 16)
    got = interpret(
        lambda x, r: rotated_errors(x, r, FORMATS["e2m1"], 16), jnp.asarray(x), reciprocal
    )
    for (block, column), error in np.ndenumerate(np.asarray(got)):
        numbers = scaled[block * 16 : block * 16 + 16, column]
        numbers = np.nan_to_num(numbers, nan=0, posinf=24, neginf=-24)
        assert error == reference.error_units(numbers), (block, column)


@pytest.mark.full
def test_lengths_are_numpys():
    from fp8jax.kernels.rotate import rotated_lengths

    x = extreme(32)
    reciprocal, scaled = scaled_by_numpy(x, 32, int(SIGNS), tile=16)
    kernel = lambda x, r, signs: rotated_lengths(x, r, FORMATS["e2m1"], 32, signs)  # noqa: E731
    codes, squares, products = interpret(kernel, jnp.asarray(x), reciprocal, SIGNS)
    expected, finite = rounded_by_numpy(scaled), np.isfinite(scaled)
    np.testing.assert_array_equal(np.asarray(codes).astype(np.float32)[finite], expected[finite])
    units = np.rint(np.clip(scaled, -7, 7) * np.float32(64)).astype(np.float64)
    whole = finite.reshape(-1, 32, 128).all(1)
    for got, each in ((squares, units * units), (products, units * expected * 64)):
        total = each.reshape(-1, 32, 128).sum(1)
        np.testing.assert_array_equal(np.asarray(got)[whole], total[whole])
    assert whole.sum() >= 5 * 128 - 4


def scaled_by_numpy(x: np.ndarray, size: int, word: int = 0, tile: int | None = None):
    """Reciprocals of the scales of tiles, 1 for the third 32 rows, and x' times them."""
    tile = size if tile is None else tile
    with np.errstate(invalid="ignore"):
        y = reference.hadamard(x, size, 0, word)
        amax = np.abs(y).reshape(-1, tile, y.shape[1]).max(1)
        reciprocal = np.float32(6.4) / np.where((amax > 0) & np.isfinite(amax), amax, 6.4).astype(
            np.float32
        )
        reciprocal[64 // tile : 96 // tile] = 1
        return jnp.asarray(reciprocal), y * np.repeat(reciprocal, tile, axis=0)


def rounded_by_numpy(scaled: np.ndarray, draws=None) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        finite = np.where(np.isfinite(scaled), scaled, 0)
    if draws is None:
        return reference.saturating_cast(finite, "e2m1").astype(np.float32)
    return reference.stochastic_cast(finite, "e2m1", draws).astype(np.float32)
