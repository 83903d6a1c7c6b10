"""The arithmetic of the code published with arXiv 2510.04212, bit for bit.

The algorithm is written out in NumPy, one block of queries and keys at a time, with a rounding to
bfloat16 wherever that code stores a tensor of the inputs' dtype.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fp8jax.lm.model import blockwise_attention
from fp8jax.lm.model.attention import dot_product_attention

T, N, K, H, BLOCK = 10, 4, 2, 4, 4  # blocks of 4, 4 and 2 keys; sqrt(H) is a power of two
SEGMENTS = np.array([[1] * 10, [1] * 5 + [2] * 4 + [0]], np.int32)
pytestmark = pytest.mark.optimized_too  # bits that users get


def bf16(x) -> np.ndarray:
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def clear(x, slack=2.0**-18) -> np.ndarray:
    """Rounds `x`, after a check that float32's value of it, which is within slack x of it, rounds
    to the same.

    The default is for what holds exponentials. In s - L and L = m + log l, log l and L are below 16
    and s - L is below 32: log is off by 2^-20, the sum and the difference by as much together and
    half as much. exp, products and a sum of 5 add less than 2^-20.
    """
    slack = slack * np.abs(x)
    assert (bf16(x - slack) == bf16(x + slack)).all(), "a value next to a tie: take another seed"
    return bf16(x)


def total(terms, axis: int) -> np.ndarray:
    """Rounds a sum of n products of bfloat16 numbers. In float32, in any order, it is off by
    n 2^-24 of the sum of magnitudes, or exact if that sum has 24 bits down to the lowest of any."""
    terms = np.float64(terms)
    fraction, exponent = np.frexp(terms)
    integer = np.int64(np.ldexp(fraction, 24))
    lowest = np.where(terms == 0, np.inf, np.ldexp(np.float64(integer & -integer), exponent - 24))
    x, magnitude = terms.sum(axis), np.abs(terms).sum(axis)
    slack = np.where(magnitude <= 2.0**24 * lowest.min(axis), 0, terms.shape[axis] * 2.0**-24)
    with np.errstate(divide="ignore", invalid="ignore"):
        return clear(x, np.where(slack > 0, slack * magnitude / np.abs(x), 0))


def dot(x, y) -> np.ndarray:
    return total(np.float64(x)[:, :, None] * np.float64(y), axis=1)


def scores(q, k, queries, keys, segments) -> np.ndarray:
    seen = (queries[:, None] >= keys) & (segments[queries][:, None] == segments[keys])
    return np.where(seen, bf16(dot(q[queries], k[keys].T) * np.float32(H**-0.5)), -np.inf)


def stabilize(s, r) -> np.ndarray:
    shared = (s >= bf16(r - np.float32(1e-3))[:, None]).sum(axis=1) > 1
    r = np.where(shared & (r > 0), bf16(2 * r), r)
    return np.where(shared & (r < 0), 0, r)


def forward(q, k, v, segments, stabilized) -> tuple[np.ndarray, np.ndarray]:
    """The output and the log-sum-exp of one head."""
    out, lse = np.zeros((T, H), np.float32), np.zeros(T)
    for queries in np.split(np.arange(T), range(BLOCK, T, BLOCK)):
        m = np.full(len(queries), -1e30, np.float32)
        l, o = np.zeros(len(queries)), np.zeros((len(queries), H), np.float32)  # noqa: E741
        for keys in np.split(np.arange(T), range(BLOCK, T, BLOCK)):
            s = scores(q, k, queries, keys, segments)
            sees = np.isfinite(s).any(axis=1)
            r = np.where(sees, s.max(axis=1), m)
            new_m = np.maximum(m, np.where(sees, stabilize(s, r), m) if stabilized else r)
            p = np.exp(np.float64(bf16(s - new_m[:, None])))
            shrink = np.exp(np.float64(bf16(m - new_m)))
            l = clear(shrink * l + p.sum(axis=1))  # noqa: E741
            o = bf16(clear(shrink[:, None] * o) + dot(clear(p), v[keys]))
            m = new_m
        out[queries], lse[queries] = bf16(o / l[:, None]), m + np.log(l)
    return out, lse


def backward(heads, k, v, segments):
    """The dq of each head, and dk and dv of the key head that they share.

    `heads` lists q, dy, the output and the log-sum-exp of each.
    """
    dqs = [np.zeros((T, H), np.float32) for _ in heads]
    dk, dv = np.zeros((T, H), np.float32), np.zeros((T, H), np.float32)
    for queries in np.split(np.arange(T), range(BLOCK, T, BLOCK)):
        for keys in np.split(np.arange(T), range(BLOCK, T, BLOCK)):
            ps, dss = [], []
            for (q, dy, out, lse), dq in zip(heads, dqs, strict=True):
                s = scores(q, k, queries, keys, segments)
                p = np.exp(s - lse[queries, None])
                dp = dot(dy[queries], v[keys].T)
                delta = total(bf16(dy[queries] * out[queries]), axis=1)
                ds = clear(p * H**-0.5 * bf16(dp - delta[:, None]))
                dq[queries] = bf16(dq[queries] + dot(ds, k[keys]))
                ps.append(clear(p))
                dss.append(ds)
            q, dy = (np.concatenate([head[i][queries] for head in heads]) for i in (0, 1))
            dv[keys] = bf16(dv[keys] + dot(np.concatenate(ps).T, dy))
            dk[keys] = bf16(dk[keys] + dot(np.concatenate(dss).T, q))
    return dqs, dk, dv


def in_numpy(q, k, v, dy, stabilized) -> list[np.ndarray]:
    """y, dq, dk and dv of all heads."""
    y, dq, dk, dv = (np.zeros(a.shape, np.float32) for a in (q, q, k, v))
    group = N // K
    for b, n in np.ndindex(len(q), K):
        heads = []
        for head in range(n * group, (n + 1) * group):
            out, lse = forward(q[b, :, head], k[b, :, n], v[b, :, n], SEGMENTS[b], stabilized)
            heads.append((q[b, :, head], dy[b, :, head], out, lse))
            y[b, :, head] = out
        dqs, dk[b, :, n], dv[b, :, n] = backward(heads, k[b, :, n], v[b, :, n], SEGMENTS[b])
        dq[b, :, n * group : (n + 1) * group] = np.stack(dqs, axis=1)
    return [y, dq, dk, dv]


def inputs(seed: int) -> list[np.ndarray]:
    """Sixteenths up to 2: scores and dp are exact in float32, and not in bfloat16. Row maxima are
    shared, since two pairs of keys are equal."""
    rng = np.random.default_rng(seed)
    q, k, v, dy = (rng.integers(-32, 33, (2, T, heads, H)) / 16 for heads in (N, K, K, N))
    k[:, 1], k[:, 7] = k[:, 0], k[:, 5]
    return [np.float32(a) for a in (q, k, v, dy)]


@functools.partial(jax.jit, static_argnums=0)
def gradients(name: str, q, k, v, dy):
    attend = functools.partial(dot_product_attention, implementation=name)
    y, vjp = jax.vjp(lambda *args: attend(*args, jnp.asarray(SEGMENTS)), q, k, v)
    return y, *vjp(dy)


@pytest.mark.parametrize("stabilized", [False, True])
def test_outputs_and_gradients_have_the_bits_of_the_published_code(monkeypatch, stabilized):
    """Two documents and padding, blocks that are not full, rows that share their maxima, two query
    heads for each key head. The arithmetic that rounds only p v gives other bits."""
    monkeypatch.setattr(blockwise_attention, "BLOCK", BLOCK)
    arrays = inputs(seed=1)
    name = "stabilized" if stabilized else "reference"
    got, other = (
        gradients(name + suffix, *(jnp.asarray(a, jnp.bfloat16) for a in arrays))
        for suffix in ("_all_bf16", "_bf16")
    )
    for a, b, expected in zip(got, other, in_numpy(*arrays, stabilized), strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(a, np.float32), expected)
        assert (np.asarray(b, np.float32) != expected).any()
