"""Rotary positions against complex numbers in float64, and the published scalings' numbers."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.lm.model.rope import ROPE_SCALINGS, Linear, Llama3, Yarn, frequencies, rotate
from tests.support import hf_vectors

H = 8


def random_heads(seed, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(2, 5, 3, H)), dtype)


def rotated(x, positions, scaling=None):
    positions = jnp.broadcast_to(jnp.asarray(positions), x.shape[:2])
    magnitude = None if scaling is None else scaling.magnitude
    return np.asarray(rotate(x, positions, frequencies(1e4, H, scaling), magnitude))


# A frequency 1e4^(-i/4) is off by 8 units of 2^-24 at most (exponent times a logarithm up to 9.2,
# then the exponential), an angle by one more, cosine and sine of it by two more.
def angle_error(position: int) -> float:
    return (9 * position + 2) * 2.0**-24


# Rotation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaling", [None, *ROPE_SCALINGS.values()])
def test_rotation_equals_complex_numbers_in_float64(scaling):
    """A multiplier adds two roundings to each frequency, a magnitude one more to the result."""
    x, positions = random_heads(0), np.array([0, 1, 2, 77, 1000], np.int32)
    a, b = np.split(np.asarray(x, np.float64), 2, axis=-1)
    frequencies, magnitude = 1e4 ** (-np.arange(H // 2) / (H // 2)), 1.0
    if scaling is not None:
        frequencies = frequencies * scaling.multipliers(1e4, H)
        magnitude = scaling.magnitude
    turned = (a + 1j * b) * np.exp(1j * positions[:, None] * frequencies)[None, :, None]
    expected = magnitude * np.concatenate([turned.real, turned.imag], axis=-1)
    error = np.abs(rotated(x, positions, scaling) - expected).max(axis=(0, 2, 3))
    size = magnitude * np.abs(a + 1j * b).max()
    extra = 0.0 if scaling is None else 2.0**-23
    bounds = [2 * size * (angle_error(p) + p * extra + 2.0**-23 + extra / 2) for p in positions]
    assert (error <= bounds).all()
    if magnitude == 1.0:  # position 0
        np.testing.assert_array_equal(rotated(x, positions, scaling)[:, 0], np.asarray(x)[:, 0])


def test_rotation_keeps_the_length_of_every_pair():
    """cos^2 + sin^2 is 1 within 4 roundings whatever the angle; 3 more for products and sum."""
    x = random_heads(0)
    y = rotated(x, np.array([0, 3, 50, 999, 4095], np.int32))
    pairs = lambda z: np.hypot(*np.split(np.asarray(z, np.float64), 2, axis=-1))  # noqa: E731
    np.testing.assert_allclose(pairs(y), pairs(x), rtol=7 * 2.0**-24)


def test_scores_depend_on_the_distance_of_positions_only():
    q, k = random_heads(0), random_heads(1)
    near, far = np.array([0, 1, 2, 3, 9], np.int32), np.array([4, 2, 0, 7, 9], np.int32)

    def scores(shift):
        return np.sum(rotated(q, near + shift) * rotated(k, far + shift), axis=-1)

    size = np.linalg.norm(q, axis=-1).max() * np.linalg.norm(k, axis=-1).max()
    bound = size * 2 * (angle_error(509) + (H + 4) * 2.0**-24)
    assert np.abs(scores(500) - scores(0)).max() <= bound
    unlike = np.sum(rotated(q, near) * rotated(k, far + 500), axis=-1)
    assert np.abs(unlike - scores(0)).max() > 100 * bound


def test_rotation_keeps_the_dtype_and_computes_in_float32():
    x = random_heads(0, jnp.bfloat16)
    positions = np.array([0, 1, 2, 77, 1000], np.int32)
    exact = rotated(x.astype(jnp.float32), positions)
    positions = jnp.broadcast_to(jnp.asarray(positions), x.shape[:2])
    y = rotate(x, positions, frequencies(1e4, H))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, exact.astype(jnp.bfloat16))


def test_linear_scaling_is_a_division_of_positions():
    """By a power of two exactly: 2 p times half a frequency is p times the frequency."""
    x, positions = random_heads(0), np.array([0, 1, 2, 77, 1000], np.int32)
    np.testing.assert_array_equal(
        rotated(x, 2 * positions, Linear(factor=2.0)), rotated(x, positions)
    )
    np.testing.assert_array_equal(
        rotated(x, 4 * positions, Linear(factor=4.0)), rotated(x, positions)
    )


# Scalings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROPE_SCALINGS)
def test_published_scalings_have_the_frequencies_of_hugging_face(name):
    """Theirs are computed in float32: theta^(2i/H) is off by ln(theta) < 14 units of 2^-24 for a
    rounded exponent, what remains by 8 more, and between the kept and the divided wavelengths of
    llama3 the multiplier depends on the frequency once more: twice that."""
    assert name in hf_vectors.SCALINGS, "add it to tests/support/hf_vectors.py, and run that"
    theirs = json.loads(hf_vectors.FILE.read_text())["rope"][name]
    theta, head_dim, scaling = theirs["theta"], theirs["head_dim"], ROPE_SCALINGS[name]
    plain = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    ours = plain * scaling.multipliers(theta, head_dim)
    np.testing.assert_allclose(ours, theirs["frequencies"], rtol=2 * 22 * 2.0**-24)
    assert scaling.magnitude == pytest.approx(theirs["magnitude"], rel=1e-12)


# Heads of 16 and theta 1e4: the wavelength i is 2 pi 10^(i/2).
BY_HAND = [
    (Linear(factor=4.0), [0.25] * 8, 1.0),
    # 64 positions hold 64 / (2 pi) = 10.186 turns of the shortest, 10.186 / sqrt(10) = 3.2211 of
    # the next, then 1.0186: kept over 4, divided by 8 under 1, (turns - 1) / 3 of the way between.
    (
        Llama3(factor=8.0, low=1.0, high=4.0, original=64),
        [1.0, 0.740357 + 0.259643 / 8, 0.006197 + 0.993803 / 8, *[1 / 8] * 5],
        1.0,
    ),
    # One turn at i = 2 log10(10.186) = 2.016, rounded up; 32 turns at none: a line from 0 to 3.
    (
        Yarn(factor=4.0, original=64),
        [1.0, 1 / 3 / 4 + 2 / 3, 2 / 3 / 4 + 1 / 3, *[1 / 4] * 5],
        0.1 * np.log(4) + 1,
    ),
    # 32768 positions: 32 turns at i = 4.42, down; one at 7.43, up.
    (
        Yarn(factor=2.0, original=32_768),
        [1.0, 1.0, 1.0, 1.0, 1.0, 0.875, 0.75, 0.625],
        0.1 * np.log(2) + 1,
    ),
]


@pytest.mark.parametrize(("scaling", "multipliers", "magnitude"), BY_HAND)
def test_multipliers_by_hand(scaling, multipliers, magnitude):
    """Six digits were written."""
    np.testing.assert_allclose(scaling.multipliers(1e4, 16), multipliers, atol=1e-6)
    assert scaling.magnitude == pytest.approx(magnitude, rel=1e-15)


@pytest.mark.parametrize("name", ROPE_SCALINGS)
@pytest.mark.parametrize(("theta", "head_dim"), [(1e4, 8), (1e4, 64), (5e5, 128), (1e6, 128)])
def test_no_frequency_grows_and_none_falls_below_the_factor(name, theta, head_dim):
    scaling = ROPE_SCALINGS[name]
    multipliers = scaling.multipliers(theta, head_dim)
    assert multipliers.shape == (head_dim // 2,) and multipliers.dtype == np.float64
    # (1 - x) + x / factor rounds thrice.
    assert (multipliers >= (1 - 2.0**-51) / scaling.factor).all() and (multipliers <= 1).all()
    assert (np.diff(multipliers) <= 0).all()  # longer wavelengths are divided more


def test_a_yarn_line_of_no_length_is_a_step():
    """6 positions are less than a turn of the shortest wavelength: the line is from 0 to 0."""
    multipliers = Yarn(factor=4.0, original=6).multipliers(1e4, 16)
    np.testing.assert_array_equal(multipliers, [1.0, *[0.25] * 7])


def test_a_given_attention_factor_replaces_the_papers():
    scaling = Yarn(factor=4.0, original=64, attention_factor=1.25)
    assert scaling.magnitude == 1.25
    plain = Yarn(factor=4.0, original=64).multipliers(1e4, 16)
    np.testing.assert_array_equal(scaling.multipliers(1e4, 16), plain)


def test_a_yarn_line_may_end_between_two_dimensions():
    """One turn at i = 2 log10(64 / (2 pi)) = 2.016000; 32 turns before 0."""
    divided = np.minimum(np.arange(8) / 2.016000, 1)
    multipliers = Yarn(factor=4.0, original=64, truncate=False).multipliers(1e4, 16)
    np.testing.assert_allclose(multipliers, 1 - 0.75 * divided, atol=1e-6)
