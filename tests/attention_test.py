"""Attention against plain NumPy in float64: causal, within documents, grouped heads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.attention import dot_product_attention

B, T, N, H = 2, 12, 4, 8
# Documents of unlike lengths, a row of one document, and padding (0) at the end of the first.
SEGMENTS = np.array([[1] * 3 + [2] * 6 + [0] * 3, [1] * 12], np.int32)
attend = jax.jit(dot_product_attention)


def inputs(kv_heads: int, seed=0) -> tuple[np.ndarray, ...]:
    """q, k, v in float32; scores q k^T / sqrt(H) of size 2 or so: far from uniform weights."""
    rng = np.random.default_rng(seed)
    sizes = (N, kv_heads, kv_heads)
    q, k, v = (rng.normal(size=(B, T, heads, H)).astype(np.float32) for heads in sizes)
    return 2 * q, k, v


def in_numpy(q, k, v, segments, round_scores=lambda s: s) -> np.ndarray:
    """One query at a time, in float64, over the keys that it may see."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    group = q.shape[2] // k.shape[2]
    out = np.zeros_like(q)
    for b, t, n in np.ndindex(*q.shape[:3]):
        seen = [s for s in range(t + 1) if segments[b, s] == segments[b, t]]
        scores = np.array([q[b, t, n] @ k[b, s, n // group] for s in seen]) / np.sqrt(q.shape[3])
        scores = round_scores(scores)
        weights = np.exp(scores - scores.max())
        out[b, t, n] = weights / weights.sum() @ v[b, seen, n // group]
    return out


@functools.cache
def largest_score(kv_heads: int) -> float:
    q, k, _ = inputs(kv_heads)
    return float(np.linalg.norm(q, axis=-1).max() * np.linalg.norm(k, axis=-1).max() / np.sqrt(H))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_float32_equals_numpy(kv_heads):
    """A score is a sum of H products, off by H + 1 roundings of its magnitude S at most; its
    exponential is off by as much, relatively, and by 2 more (exp, subtraction of the maximum).
    Numerator and denominator, each a sum of T such terms: 2 * ((H + 1) * S + 2 * S + T + 4)
    units of 2^-24, relative to the largest |v|."""
    q, k, v = inputs(kv_heads)
    units = 2 * ((H + 3) * largest_score(kv_heads) + T + 4)
    y = attend(q, k, v, SEGMENTS)
    assert y.dtype == jnp.float32 and y.shape == q.shape
    assert np.abs(y - in_numpy(q, k, v, SEGMENTS)).max() <= units * 2.0**-24 * np.abs(v).max()


def test_bfloat16_in_and_out_and_scores_in_float32():
    """The inputs are bfloat16 numbers. Rounded, each by 2^-8 relative at most, are the weights
    and the result; both errors are under 2^-8 times the weighted sum of |v|. Scores rounded to
    bfloat16 break this bound, which the last line shows."""
    q, k, v = (jnp.asarray(a, jnp.bfloat16) for a in inputs(2))
    q = 8 * q  # scores of 30 and more
    y = attend(q, k, v, SEGMENTS)
    assert y.dtype == jnp.bfloat16
    exact = in_numpy(q, k, v, SEGMENTS)
    magnitude = in_numpy(q, k, np.abs(np.asarray(v, np.float32)), SEGMENTS)
    in_float32 = 2 * ((H + 3) * 8 * largest_score(2) + T + 4) * 2.0**-24  # as above
    bound = (2 + 2.0**-8) * 2.0**-8 * magnitude + in_float32 * np.abs(v).max().astype(np.float64)
    assert (np.abs(np.asarray(y, np.float64) - exact) <= bound).all()

    def round_scores(scores):
        return scores.astype(jnp.bfloat16).astype(np.float64)

    assert (np.abs(in_numpy(q, k, v, SEGMENTS, round_scores) - exact) > bound).any()


def test_grouped_heads_are_repeated_heads():
    """Query head n reads the key and value head n // (N / K). Same sums: as in NumPy's test."""
    q, k, v = inputs(2)
    repeated = (np.repeat(a, N // 2, axis=2) for a in (k, v))
    units = 2 * ((H + 3) * largest_score(2) + T + 4)
    difference = attend(q, k, v, SEGMENTS) - attend(q, *repeated, SEGMENTS)
    assert np.abs(difference).max() <= units * 2.0**-24 * np.abs(v).max()


@pytest.mark.parametrize("poison", [1e30, -1e30])
def test_what_is_not_seen_does_not_count_at_all(poison):
    """Keys and values of later positions and other documents, however large, change no bit."""
    q, k, v = inputs(2)
    reference = np.asarray(attend(q, k, v, SEGMENTS))
    for at in range(T):
        k2, v2 = k.copy(), v.copy()
        k2[:, at], v2[:, at] = poison, poison
        got = np.asarray(attend(q, k2, v2, SEGMENTS))
        sees = (np.arange(T) >= at) & (SEGMENTS == SEGMENTS[:, at : at + 1])
        np.testing.assert_array_equal(got[~sees], reference[~sees])
        assert (got[sees] != reference[sees]).any(axis=(-1, -2)).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_padding_is_finite_forward_and_backward(dtype):
    """A whole row of padding, and padding at an end: its values are not used, but a NaN among
    them would reach the gradients of all."""
    q, k, v = (jnp.asarray(a, dtype) for a in inputs(2))
    segments = jnp.asarray(np.stack([np.zeros(T, np.int32), SEGMENTS[0]]))

    @jax.jit
    def run(*args):
        y, vjp = jax.vjp(lambda *a: dot_product_attention(*a, segments), *args)
        return y, *vjp(jnp.ones_like(y))

    for value in run(q, k, v):
        assert np.isfinite(np.asarray(value, np.float32)).all()


def test_a_first_token_is_its_own_value():
    """It sees itself only: weight 1, exactly."""
    q, k, v = inputs(2)
    y = attend(q, k, v, SEGMENTS)
    for row, at in [(0, 0), (0, 3), (0, 9), (1, 0)]:
        np.testing.assert_array_equal(y[row, at], np.repeat(v[row, at], N // 2, axis=0))
