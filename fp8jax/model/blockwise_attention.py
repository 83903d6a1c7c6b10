"""TODO docstring."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

BLOCK = 128  # keys in a block of the reference


# The blockwise reference --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowMax:
    """The m of rows whose largest score r in a block is shared by several keys: beta r where r > 0,
    0 where r < 0 (Algorithm 1 of arXiv 2510.04212).

    One deviation: as printed, p underflows at large |r|, and the row is 0 / 0. Here m - r takes at
    most half the exponents of p's dtype, which leaves weights down to 2^-63 of the largest normal
    in bfloat16; beyond, it starts again at a quarter. A constant limit was rejected: its p, one for
    all such rows, is rounded alike in all, or as exact as 1. Beta 2 gets there at r = 44, 7 at 7.3.

    Attributes:
      beta: the authors advise 2 to 8, show a run with 7, and have 2 in their code.
      tolerance: scores this little below the largest share it.
    """

    beta: float = 2.0
    tolerance: float = 1e-3

    def __post_init__(self):
        if not (1 < self.beta < math.inf and 0 <= self.tolerance < math.inf):
            raise ValueError(f"beta must be above 1, tolerance at least 0, both finite: {self}")

    def raised(self, s_BKGTC: Array, r_BKGT: Array, dtype: Any) -> Array:
        """The row maxima `r_BKGT` of scores, raised where they are shared; `dtype` is p's."""
        sharing = jnp.sum(s_BKGTC >= (r_BKGT - self.tolerance)[..., None], axis=-1)
        size = jnp.where((sharing > 1) & jnp.isfinite(r_BKGT), jnp.abs(r_BKGT), 0.0)  # not masked
        slope = jnp.where(r_BKGT > 0, self.beta - 1, 1.0)
        quarter = -math.log(jnp.finfo(dtype).tiny) / 4 / slope
        return r_BKGT + slope * jnp.minimum(size, quarter + size % quarter)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blockwise:
    """The blockwise algorithm, with `row_max` or without; `rounded`: p v to v's dtype."""

    row_max: RowMax | None
    rounded: bool

    def __call__(self, q_BTNH, k_BTKH, v_BTKH, segments_BT):
        """Heads grouped by the key head they share, and back."""
        batch, length, heads, size = q_BTNH.shape
        q_BTKGH = q_BTNH.reshape(batch, length, k_BTKH.shape[2], -1, size)
        out = _blockwise(self, q_BTKGH, k_BTKH, v_BTKH, segments_BT)
        return out.reshape(batch, length, heads, size)


def _key_blocks(x: Array, fill: int = 0) -> Array:
    """[B, S, ...] as [blocks, B, C, ...], filled up at the end."""
    padding = [(0, 0), (0, -x.shape[1] % BLOCK)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, padding, constant_values=fill)
    return jnp.moveaxis(x.reshape(x.shape[0], -1, BLOCK, *x.shape[2:]), 1, 0)


def _scores(q_BTKGH, k_BCKH, segments_BT, segments_BC, index):
    """Scores [B, K, G, T, C] of all queries with block `index` of keys, -inf where masked."""
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
    rows = jnp.moveaxis(q_BTKGH, 1, 3)[..., 0]  # for its shape, [B, K, G, T]

    def block(carry, scanned):
        m, l, o = carry  # noqa: E741
        index, k_BCKH, v_BCKH, segments_BC = scanned
        s_BKGTC = _scores(q_BTKGH, k_BCKH, segments_BT, segments_BC, index)
        r_BKGT = jnp.max(s_BKGTC, axis=-1)
        if how.row_max is not None:
            r_BKGT = how.row_max.raised(s_BKGTC, r_BKGT, v_BCKH.dtype)
        new_m = jnp.maximum(m, r_BKGT)
        # A query that has seen no key yet has m = -inf, and -inf - -inf is no number.
        finite_m = jnp.where(jnp.isneginf(new_m), 0.0, new_m)
        p_BKGTC = jnp.exp(s_BKGTC - finite_m[..., None])
        shrink = jnp.exp(m - finite_m)
        l = shrink * l + jnp.sum(p_BKGTC, axis=-1)  # noqa: E741
        pv = jnp.einsum(
            "BKGTC,BCKH->BKGTH", p_BKGTC.astype(v_BCKH.dtype), v_BCKH, preferred_element_type=dtype
        )
        if how.rounded:  # not by two casts, which XLA may drop
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


def _blockwise_bwd(how: Blockwise, kept, do_BTKGH):
    q_BTKGH, k_BSKH, v_BSKH, segments_BT, out_BTKGH, lse_BKGT = kept
    dtype = lse_BKGT.dtype
    product = functools.partial(jnp.einsum, preferred_element_type=dtype)
    delta_BTKG = jnp.sum(do_BTKGH.astype(dtype) * out_BTKGH.astype(dtype), axis=-1)
    delta_BKGT = jnp.moveaxis(delta_BTKG, 1, 3)

    def block(dq_BTKGH, scanned):
        index, k_BCKH, v_BCKH, segments_BC = scanned
        s_BKGTC = _scores(q_BTKGH, k_BCKH, segments_BT, segments_BC, index)
        p_BKGTC = jnp.exp(s_BKGTC - lse_BKGT[..., None])
        dv_BCKH = product("BKGTC,BTKGH->BCKH", p_BKGTC.astype(do_BTKGH.dtype), do_BTKGH)
        dp_BKGTC = product("BTKGH,BCKH->BKGTC", do_BTKGH, v_BCKH)
        ds_BKGTC = p_BKGTC * (dp_BKGTC - delta_BKGT[..., None]) / math.sqrt(q_BTKGH.shape[-1])
        ds_BKGTC = ds_BKGTC.astype(q_BTKGH.dtype)
        dq_BTKGH += product("BKGTC,BCKH->BTKGH", ds_BKGTC, k_BCKH)
        dk_BCKH = product("BKGTC,BTKGH->BCKH", ds_BKGTC, q_BTKGH)
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
