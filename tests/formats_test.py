"""All codes of every format against ml_dtypes; saturation; stochastic rounding."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fp8jax.formats import FORMATS, Format, as_format, cast

ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}
SIGNED = [name for name, fmt in FORMATS.items() if fmt.signed]


def all_codes(fmt: Format) -> np.ndarray:
    return np.arange(2**fmt.bits, dtype=np.uint8).view(ML_DTYPES[fmt.name])


def finite_values(fmt: Format) -> np.ndarray:
    """Every finite number of the format as float32, ascending, zero once."""
    values = all_codes(fmt).astype(np.float32)
    return np.unique(values[np.isfinite(values)])


def bits(x) -> np.ndarray:
    return np.asarray(x).view(np.uint8)


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_survives_a_round_trip(name):
    fmt = FORMATS[name]
    codes = all_codes(fmt)
    decoded = codes.astype(np.float32)
    np.testing.assert_array_equal(jnp.asarray(codes).astype(jnp.float32), decoded)
    keep = np.isfinite(decoded)
    np.testing.assert_array_equal(bits(cast(jnp.asarray(decoded[keep]), name)), bits(codes[keep]))


@pytest.mark.parametrize("name", FORMATS)
def test_matches_ml_dtypes_on_ties_and_on_random_numbers(name):
    fmt = FORMATS[name]
    grid = finite_values(fmt)
    ties = ((grid[1:].astype(np.float64) + grid[:-1]) / 2).astype(np.float32)
    rng = np.random.default_rng(0)
    noise = rng.normal(size=20_000).astype(np.float32)
    x = np.concatenate([ties, *(np.nextafter(ties, d) for d in np.float32([-np.inf, np.inf])),
                        *(noise * np.float32(10.0) ** k for k in range(-6, 6))])  # fmt: skip
    x = np.clip(x, -fmt.max, fmt.max) if fmt.signed else np.abs(x[x != 0])
    np.testing.assert_array_equal(bits(cast(jnp.asarray(x), name)), bits(x.astype(ML_DTYPES[name])))


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
    x = jnp.array([1e4 * fmt.max, -1e4 * fmt.max, np.inf, -np.inf, np.nan, -0.0], jnp.float32)
    y = np.asarray(cast(x, name).astype(jnp.float32))
    np.testing.assert_array_equal(y[:4], [fmt.max, -fmt.max, fmt.max, -fmt.max])
    assert np.isnan(y[4]) if fmt.has_nan else y[4] == 0
    assert y[5] == 0


def test_documented_example():
    assert float(cast(jnp.float32(1e4), "e4m3").astype(jnp.float32)) == 448.0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", SIGNED)
def test_sixteen_bit_sources_round_once(name, dtype):
    x = jnp.asarray(np.random.default_rng(1).normal(size=4096), dtype)
    expected = np.asarray(x).astype(np.float32).astype(ML_DTYPES[name])
    np.testing.assert_array_equal(bits(cast(x, name)), bits(expected))


@pytest.mark.parametrize("name", SIGNED)
def test_stochastic_rounding_is_unbiased_and_stays_between_neighbours(name):
    """Subnormals and the last step below the maximum included; exact numbers never move."""
    fmt = FORMATS[name]
    grid = finite_values(fmt).astype(np.float64)
    lo, hi = grid[:-1], grid[1:]
    n = 4096
    for fraction in (0.0, 0.25, 0.7):
        x = jnp.asarray(lo + fraction * (hi - lo), jnp.float32)
        keys = jax.random.split(jax.random.key(3), n)
        y = jax.vmap(lambda k, x=x: cast(x, name, rounding="stochastic", key=k))(keys)
        y = np.asarray(y.astype(jnp.float32), np.float64)
        assert ((y == lo) | (y == hi)).all()
        # The share that goes up is binomial: sd <= 0.5 / sqrt(n). Six of them over < 256 points.
        share = ((y - lo) / (hi - lo)).mean(axis=0)
        exact = (np.asarray(x, np.float64) - lo) / (hi - lo)
        assert np.abs(share - exact).max() <= 6 * 0.5 / np.sqrt(n)
        if fraction == 0.0:
            assert (y == lo).all()


def test_stochastic_rounding_is_reproducible_and_saturates():
    x = jnp.linspace(-600.0, 600.0, 999)
    key = jax.random.key(0)
    a, b = (cast(x, "e4m3", rounding="stochastic", key=key) for _ in range(2))
    np.testing.assert_array_equal(bits(a), bits(b))
    assert (np.abs(np.asarray(a.astype(jnp.float32))) <= 448).all()
    other = cast(x, "e4m3", rounding="stochastic", key=jax.random.key(1))
    assert (bits(a) != bits(other)).any()


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
