"""Attention and its gradients by the plain formula, in NumPy and float64."""

import numpy as np


def seen_by(segments, window=None):
    """Whether a query sees a key, bool [B, T, T]: of its document, not behind it, in its window."""
    segments = np.asarray(segments)
    at = np.arange(segments.shape[1])
    distance = at[:, None] - at[None, :]
    near = (distance >= 0) & (distance < (len(at) if window is None else window))
    return (segments[:, :, None] == segments[:, None, :]) & near


def forward_in_numpy(q, k, v, segments, window=None):
    """y, and the sum of weights times |v|, in float64."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    k, v = (np.repeat(a, q.shape[2] // k.shape[2], axis=2) for a in (k, v))
    seen = seen_by(segments, window)[:, None]
    s = np.where(seen, np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[3]), -np.inf)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    return np.einsum("bnts,bsnh->btnh", p, v), np.einsum("bnts,bsnh->btnh", p, np.abs(v))


def gradients_in_numpy(q, k, v, segments, dy, window=None):
    """[(gradient, what its terms' magnitudes sum to)] for q, k and v, in float64."""
    q, k, v, dy = (np.asarray(a, np.float64) for a in (q, k, v, dy))
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(a, group, axis=2) for a in (k, v))
    seen = seen_by(segments, window)[:, None]
    s = np.where(seen, np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[3]), -np.inf)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)

    def backward(q, k, v, dy, sign):
        dp = np.einsum("btnh,bsnh->bnts", dy, v)
        delta = np.sum(p * dp, axis=-1, keepdims=True)
        ds = p * (dp - sign * delta) / np.sqrt(q.shape[3])
        ungroup = lambda a: a.reshape(*a.shape[:2], -1, group, a.shape[3]).sum(axis=3)  # noqa: E731
        dq = np.einsum("bnts,bsnh->btnh", ds, k)
        dk = ungroup(np.einsum("bnts,btnh->bsnh", ds, q))
        return dq, dk, ungroup(np.einsum("bnts,btnh->bsnh", p, dy))

    magnitudes = backward(*map(np.abs, (q, k, v, dy)), sign=-1)
    return list(zip(backward(q, k, v, dy, sign=1), magnitudes, strict=True))
