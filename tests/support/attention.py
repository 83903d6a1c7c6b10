"""Attention and its gradients by the plain formula, in NumPy and float64."""

import numpy as np


def forward_in_numpy(q, k, v, segments):
    """y, and the sum of weights times |v|, in float64."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    k, v = (np.repeat(a, q.shape[2] // k.shape[2], axis=2) for a in (k, v))
    segments = np.asarray(segments)
    seen = segments[:, None, :, None] == segments[:, None, None, :]
    seen = seen & np.tri(segments.shape[1], dtype=bool)
    s = np.where(seen, np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[3]), -np.inf)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    return np.einsum("bnts,bsnh->btnh", p, v), np.einsum("bnts,bsnh->btnh", p, np.abs(v))


def gradients_in_numpy(q, k, v, segments, dy):
    """[(gradient, what its terms' magnitudes sum to)] for q, k and v, in float64."""
    q, k, v, dy = (np.asarray(a, np.float64) for a in (q, k, v, dy))
    group, length = q.shape[2] // k.shape[2], q.shape[1]
    k, v = (np.repeat(a, group, axis=2) for a in (k, v))
    seen = segments[:, None, :, None] == segments[:, None, None, :]
    seen = seen & np.tri(length, dtype=bool)
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
