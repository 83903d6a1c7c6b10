"""The kernels that transform and cast: the bits of numerics/, in Pallas' interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.numerics.formats import FORMATS, cast, key_words
from fp8jax.numerics.hadamard import hadamard, whole_hadamard
from fp8jax.numerics.quantization import lengths, squared_error
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
