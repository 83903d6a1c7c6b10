"""Blockwise causal attention written out in JAX, to read and to experiment with.

Legend: B batch, T query length, S key length, K key and value heads, G query heads for each of
them, H head size, C keys in a block.

This is the algorithm of FlashAttention (arXiv 2307.08691). It loops over blocks of C keys. With
scores s = q k^T / sqrt(H), -inf where masked, it carries for each query the maximum m so far, the
sum l of exp(s - m), and the unnormalized output o:

    m' = max(m, rowmax s)   p = exp(s - m')   a = exp(m - m')
    l' = a l + rowsum p     o' = a o + p v                           out = o / l

p is cast to v's dtype before it is multiplied by v, as in the fused kernels. The forward saves out
and the log-sum-exp L = m + log l. The backward recomputes p = exp(s - L), block by block:

    dv = p^T do     dp = do v^T     delta = rowsum(do * out)     ds = p (dp - delta) / sqrt(H)
    dq = ds k       dk = ds^T q

The fused kernels also split the queries into blocks. That changes no number and is left out here.

Why low-precision training fails (arXiv 2510.04212). Where two keys of a row share the largest
score, both have p equal to exactly 1. The sum of two bfloat16 values with the same sign needs one
more bit than bfloat16 has, so every other sum is a tie, which the small remaining terms of the row
always break to the same side. The bias enters delta, and dq accumulates it over tokens and steps.
`RowMax` raises m for such rows: the softmax does not depend on m, and with a p < 1 that differs
from row to row the sums are no longer ties.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

BLOCK = 128  # C, keys in a block


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowMax:
    """Raises the m of rows in which several keys of a block share the largest score r.

    m becomes beta r where r > 0, and 0 where r < 0 (algorithm 1 of arXiv 2510.04212).

    One deviation from the paper: as printed, p underflows at large |r|, and the row becomes 0 / 0.
    Here m - r spans at most half the exponent range of p's dtype, so that weights down to 2^-63 of
    the largest in their row are still normal numbers in bfloat16. Beyond that limit, m - r starts
    again at a quarter of the range. The limit is reached at r = 44 with beta 2, and at r = 7.3 with
    beta 7. A constant m - r beyond the limit was rejected: all such rows would have the same p,
    which is rounded in the same way in all of them, or is as exact as 1.

    Attributes:
      beta: the authors recommend 2 to 8, show a run with 7, and use 2 in their code.
      tolerance: keys whose scores are this close to the largest count as sharing it.

    Raises:
      ValueError: beta or tolerance is out of range.
    """

    beta: float = 2.0
    tolerance: float = 1e-3

    def __post_init__(self):
        if not (1 < self.beta < math.inf and 0 <= self.tolerance < math.inf):
            raise ValueError(f"beta must be above 1, tolerance at least 0, both finite: got {self}")

    def raised(self, s_BKGTC: Array, r_BKGT: Array, dtype: Any) -> Array:
        """Returns the row maxima `r_BKGT`, raised where several scores share them.

        `dtype` is the dtype in which p is multiplied by v.
        """
        sharing = jnp.sum(s_BKGTC >= (r_BKGT - self.tolerance)[..., None], axis=-1)
        # A row whose keys are all masked has r = -inf, and stays as it is.
        size = jnp.where((sharing > 1) & jnp.isfinite(r_BKGT), jnp.abs(r_BKGT), 0.0)
        slope = jnp.where(r_BKGT > 0, self.beta - 1, 1.0)
        quarter = -math.log(jnp.finfo(dtype).tiny) / 4 / slope
        return r_BKGT + slope * jnp.minimum(size, quarter + size % quarter)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blockwise:
    """The blockwise algorithm, as the `attend` of an `Implementation`.

    Attributes:
      row_max: the fix for shared maxima, or None.
      rounded: round p v to v's dtype in each block.
    """

    row_max: RowMax | None
    rounded: bool

    def __call__(self, q_BTNH, k_BTKH, v_BTKH, segments_BT):
        """Returns attention [B, T, N, H]; groups query heads by the key head that they share."""
        batch, length, heads, size = q_BTNH.shape
        q_BTKGH = q_BTNH.reshape(batch, length, k_BTKH.shape[2], -1, size)
        out = _blockwise(self, q_BTKGH, k_BTKH, v_BTKH, segments_BT)
        return out.reshape(batch, length, heads, size)


def _key_blocks(x: Array, fill: int = 0) -> Array:
    """Reshapes [B, S, ...] to [blocks, B, C, ...]; pads the end of S with `fill`."""
    padding = [(0, 0), (0, -x.shape[1] % BLOCK)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, padding, constant_values=fill)
    return jnp.moveaxis(x.reshape(x.shape[0], -1, BLOCK, *x.shape[2:]), 1, 0)


def _scores(q_BTKGH, k_BCKH, segments_BT, segments_BC, index):
    """Returns the scores [B, K, G, T, C] of all queries with key block `index`; -inf if masked."""
    dtype = jnp.promote_types(q_BTKGH.dtype, jnp.float32)
    s_BKGTC = jnp.einsum("BTKGH,BCKH->BKGTC", q_BTKGH, k_BCKH, preferred_element_type=dtype)
    at_T = jnp.arange(segments_BT.shape[1])
    at_C = index * BLOCK + jnp.arange(BLOCK)
    seen_BTC = segments_BT[:, :, None] == segments_BC[:, None, :]
    seen_BTC &= (at_T[:, None] >= at_C[None])[None]
    return jnp.where(seen_BTC[:, None, None], s_BKGTC / math.sqrt(q_BTKGH.shape[-1]), -jnp.inf)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blockwise(how: Blockwise, q_BTKGH, k_BSKH, v_BSKH, segments_BT):
    return _blockwise_fwd(how, q_BTKGH, k_BSKH, v_BSKH, segments_BT)[0]


def _blockwise_fwd(how: Blockwise, q_BTKGH, k_BSKH, v_BSKH, segments_BT):
    dtype = jnp.promote_types(q_BTKGH.dtype, jnp.float32)
    rows = jnp.moveaxis(q_BTKGH, 1, 3)[..., 0]  # only its shape [B, K, G, T] is used

    def block(carry, scanned):
        m, l, o = carry  # noqa: E741
        index, k_BCKH, v_BCKH, segments_BC = scanned
        s_BKGTC = _scores(q_BTKGH, k_BCKH, segments_BT, segments_BC, index)
        r_BKGT = jnp.max(s_BKGTC, axis=-1)
        if how.row_max is not None:
            r_BKGT = how.row_max.raised(s_BKGTC, r_BKGT, v_BCKH.dtype)
        new_m = jnp.maximum(m, r_BKGT)
        # A query that has seen no key yet has m = -inf, and -inf - -inf would be NaN.
        finite_m = jnp.where(jnp.isneginf(new_m), 0.0, new_m)
        p_BKGTC = jnp.exp(s_BKGTC - finite_m[..., None])
        shrink = jnp.exp(m - finite_m)
        l = shrink * l + jnp.sum(p_BKGTC, axis=-1)  # noqa: E741
        pv = jnp.einsum(
            "BKGTC,BCKH->BKGTH", p_BKGTC.astype(v_BCKH.dtype), v_BCKH, preferred_element_type=dtype
        )
        if how.rounded:  # XLA may remove a pair of casts, but not this
            info = jnp.finfo(v_BCKH.dtype)
            pv = lax.reduce_precision(pv, info.nexp, info.nmant)
        return (new_m, l, shrink[..., None] * o + pv), None

    blocks = (_key_blocks(k_BSKH), _key_blocks(v_BSKH), _key_blocks(segments_BT, fill=-1))
    start = (
        jnp.full(rows.shape, -jnp.inf, dtype),
        jnp.zeros(rows.shape, dtype),
        jnp.zeros((*rows.shape, q_BTKGH.shape[-1]), dtype),
    )
    (m, l, o), _ = lax.scan(block, start, (jnp.arange(len(blocks[0])), *blocks))  # noqa: E741
    out_BTKGH = jnp.moveaxis(o / l[..., None], 3, 1).astype(q_BTKGH.dtype)
    return out_BTKGH, (q_BTKGH, k_BSKH, v_BSKH, segments_BT, out_BTKGH, m + jnp.log(l))


def _blockwise_bwd(how: Blockwise, residuals, do_BTKGH):
    q_BTKGH, k_BSKH, v_BSKH, segments_BT, out_BTKGH, lse_BKGT = residuals
    dtype = lse_BKGT.dtype
    matmul = functools.partial(jnp.einsum, preferred_element_type=dtype)
    delta_BTKG = jnp.sum(do_BTKGH.astype(dtype) * out_BTKGH.astype(dtype), axis=-1)
    delta_BKGT = jnp.moveaxis(delta_BTKG, 1, 3)

    def block(dq_BTKGH, scanned):
        index, k_BCKH, v_BCKH, segments_BC = scanned
        s_BKGTC = _scores(q_BTKGH, k_BCKH, segments_BT, segments_BC, index)
        p_BKGTC = jnp.exp(s_BKGTC - lse_BKGT[..., None])
        dv_BCKH = matmul("BKGTC,BTKGH->BCKH", p_BKGTC.astype(do_BTKGH.dtype), do_BTKGH)
        dp_BKGTC = matmul("BTKGH,BCKH->BKGTC", do_BTKGH, v_BCKH)
        ds_BKGTC = p_BKGTC * (dp_BKGTC - delta_BKGT[..., None]) / math.sqrt(q_BTKGH.shape[-1])
        ds_BKGTC = ds_BKGTC.astype(q_BTKGH.dtype)
        dq_BTKGH += matmul("BKGTC,BCKH->BTKGH", ds_BKGTC, k_BCKH)
        dk_BCKH = matmul("BKGTC,BTKGH->BCKH", ds_BKGTC, q_BTKGH)
        return dq_BTKGH, (dk_BCKH.astype(k_BCKH.dtype), dv_BCKH.astype(v_BCKH.dtype))

    blocks = (_key_blocks(k_BSKH), _key_blocks(v_BSKH), _key_blocks(segments_BT, fill=-1))
    dq, gradients = lax.scan(
        block, jnp.zeros(q_BTKGH.shape, dtype), (jnp.arange(len(blocks[0])), *blocks)
    )
    dk, dv = (
        jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, : k_BSKH.shape[1]]
        for x in gradients
    )
    return dq.astype(q_BTKGH.dtype), dk, dv, None


_blockwise.defvjp(_blockwise_fwd, _blockwise_bwd)
