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

The fused kernels also split the queries into blocks. That is left out here, since it changes a
number only where dk and dv are rounded between blocks of queries (`Rounded.ALL`).

Three arithmetics (`Rounded`) differ in what they round to the inputs' dtype. With bfloat16 inputs
these are the dtypes of the intermediates:

    intermediate                                       OUTPUT      PRODUCTS    ALL
    scores s, row maxima m, s - m', m - m'             float32     float32     bfloat16
    exponentials p, log-sum-exp L                      float32     float32     float32
    p where it is multiplied by v or do                bfloat16    bfloat16    bfloat16
    product p v of a block                             float32     bfloat16    bfloat16
    row sums l                                         float32     float32     bfloat16
    unnormalized output: a o, and a o + p v            float32     float32     bfloat16
    output out = o / l                                 bfloat16    bfloat16    bfloat16
    do * out, and delta                                float32     float32     bfloat16
    dp, dp - delta                                     float32     float32     bfloat16
    ds where it is multiplied by k or q                bfloat16    bfloat16    bfloat16
    sums of dq over key blocks                         float32     float32     bfloat16
    sums of dk and dv over query blocks                float32     float32     bfloat16
    results dq, dk, dv                                 bfloat16    bfloat16    bfloat16

Products and sums are accumulated in float32 before they are rounded. OUTPUT is close to fused
kernels. ALL is the arithmetic of the code that the authors of arXiv 2510.04212 published, under
PyTorch's autocast, which computes exp and log in float32. (Autocast can also leave the sum delta in
float32; here it has the dtype of the tensors that it is computed from.) Three things of that code
are not copied: its blocks have 512 keys; it replaces a block's sum of p by 1e-10 where that is
larger; and its fix also counts the masked scores of a block that a query does not see at all.

Why low-precision training fails (arXiv 2510.04212). Where two keys of a row share the largest
score, both have p equal to exactly 1. The sum of two bfloat16 values with the same sign needs one
more bit than bfloat16 has, so every other sum is a tie, which the small remaining terms of the row
always break to the same side. The bias enters delta, and dq accumulates it over tokens and steps.
`RowMax` raises m for such rows: the softmax does not depend on m, and with a p < 1 that differs
from row to row the sums are no longer ties.
"""

import dataclasses
import enum
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

BLOCK = 128  # C, keys in a block


def _same(x: Array) -> Array:
    return x


def _round_to(dtype: Any) -> Callable[[Array], Array]:
    """Returns a function that rounds to `dtype` and keeps the dtype of its argument.

    XLA may remove a pair of casts, but not this.
    """
    info = jnp.finfo(dtype)
    return functools.partial(
        lax.reduce_precision, exponent_bits=info.nexp, mantissa_bits=info.nmant
    )


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

    def raised(
        self, s_BKGTC: Array, r_BKGT: Array, dtype: Any, rounded: Callable[[Array], Array] = _same
    ) -> Array:
        """Returns the row maxima `r_BKGT`, raised where several scores share them.

        `dtype` is the dtype in which p is multiplied by v; `rounded` rounds what is compared with
        scores, and the result.
        """
        sharing = jnp.sum(s_BKGTC >= rounded(r_BKGT - self.tolerance)[..., None], axis=-1)
        # A row whose keys are all masked has r = -inf, and stays as it is.
        size = jnp.where((sharing > 1) & jnp.isfinite(r_BKGT), jnp.abs(r_BKGT), 0.0)
        slope = jnp.where(r_BKGT > 0, self.beta - 1, 1.0)
        quarter = -math.log(jnp.finfo(dtype).tiny) / 4 / slope
        return rounded(r_BKGT + slope * jnp.minimum(size, quarter + size % quarter))


class Rounded(enum.StrEnum):
    """What an arithmetic rounds to the inputs' dtype; the table above has each intermediate."""

    OUTPUT = "output"  # the output, and the operands of products
    PRODUCTS = "products"  # p v of each block, too
    ALL = "all"  # all but the exponentials and the log-sum-exp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blockwise:
    """The blockwise algorithm, as the `attend` of an `Implementation`.

    Attributes:
      row_max: the fix for shared maxima, or None.
      rounded: what is rounded to the inputs' dtype.
    """

    row_max: RowMax | None
    rounded: Rounded

    def __call__(self, q_BTNH, k_BTKH, v_BTKH, segments_BT, window=None):
        """Returns attention [B, T, N, H]; groups query heads by the key head that they share."""
        batch, length, heads, size = q_BTNH.shape
        q_BTKGH = q_BTNH.reshape(batch, length, k_BTKH.shape[2], -1, size)
        out = _blockwise(self, q_BTKGH, k_BTKH, v_BTKH, segments_BT, window)
        return out.reshape(batch, length, heads, size)

    def round_product(self, dtype: Any) -> Callable[[Array], Array]:
        """Returns what rounds p v."""
        return _same if self.rounded is Rounded.OUTPUT else _round_to(dtype)

    def round_other(self, dtype: Any) -> Callable[[Array], Array]:
        """Returns what rounds the intermediates that only `Rounded.ALL` rounds."""
        return _round_to(dtype) if self.rounded is Rounded.ALL else _same

    def exponentials(self, s_BKGTC: Array, m_BKGT: Array, dtype: Any) -> tuple[Array, Array, Array]:
        """Returns m' [B, K, G, T], p [B, K, G, T, C] and a [B, K, G, T] of one block.

        `m_BKGT` are the maxima of the blocks before; `dtype` is the inputs'.
        """
        rounded = self.round_other(dtype)
        r_BKGT = jnp.max(s_BKGTC, axis=-1)
        if self.row_max is not None:
            r_BKGT = self.row_max.raised(s_BKGTC, r_BKGT, dtype, rounded)
        new_m = jnp.maximum(m_BKGT, r_BKGT)
        # A query that has seen no key yet has m = -inf, and -inf - -inf would be NaN.
        finite_m = jnp.where(jnp.isneginf(new_m), 0.0, new_m)
        p_BKGTC = jnp.exp(rounded(s_BKGTC - finite_m[..., None]))
        return new_m, p_BKGTC, jnp.exp(rounded(m_BKGT - finite_m))


def _blocks(x: Array, fill: int = 0) -> Array:
    """Reshapes [B, S, ...] to [blocks, B, C, ...]; pads the end of S with `fill`."""
    padding = [(0, 0), (0, -x.shape[1] % BLOCK)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, padding, constant_values=fill)
    return jnp.moveaxis(x.reshape(x.shape[0], -1, BLOCK, *x.shape[2:]), 1, 0)


def _scores(how: Blockwise, q_BTKGH, k_BCKH, segments_BT, segments_BC, index, window=None):
    """Returns the scores [B, K, G, T, C] of all queries with key block `index`; -inf if masked."""
    dtype = jnp.promote_types(q_BTKGH.dtype, jnp.float32)
    rounded = how.round_other(q_BTKGH.dtype)
    s_BKGTC = jnp.einsum("BTKGH,BCKH->BKGTC", q_BTKGH, k_BCKH, preferred_element_type=dtype)
    at_T = jnp.arange(segments_BT.shape[1])
    at_C = index * BLOCK + jnp.arange(BLOCK)
    seen_BTC = segments_BT[:, :, None] == segments_BC[:, None, :]
    seen_BTC &= (at_T[:, None] >= at_C[None])[None]
    if window is not None:
        seen_BTC &= (at_T[:, None] - at_C[None] < window)[None]
    root = math.sqrt(q_BTKGH.shape[-1])
    return jnp.where(seen_BTC[:, None, None], rounded(rounded(s_BKGTC) / root), -jnp.inf)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blockwise(how: Blockwise, q_BTKGH, k_BSKH, v_BSKH, segments_BT, window):
    return _blockwise_fwd(how, q_BTKGH, k_BSKH, v_BSKH, segments_BT, window)[0]


def _blockwise_fwd(how: Blockwise, q_BTKGH, k_BSKH, v_BSKH, segments_BT, window):
    dtype = jnp.promote_types(q_BTKGH.dtype, jnp.float32)
    rounded, rounded_product = how.round_other(v_BSKH.dtype), how.round_product(v_BSKH.dtype)
    matmul = functools.partial(jnp.einsum, preferred_element_type=dtype)
    rows = jnp.moveaxis(q_BTKGH, 1, 3)[..., 0]  # only its shape [B, K, G, T] is used

    def block(carry, scanned):
        m, l, o = carry  # noqa: E741
        index, k_BCKH, v_BCKH, segments_BC = scanned
        s_BKGTC = _scores(how, q_BTKGH, k_BCKH, segments_BT, segments_BC, index, window)
        m, p_BKGTC, shrink = how.exponentials(s_BKGTC, m, v_BCKH.dtype)
        l = rounded(shrink * l + jnp.sum(p_BKGTC, axis=-1))  # noqa: E741
        p_BKGTC = rounded(p_BKGTC).astype(v_BCKH.dtype)
        pv = rounded_product(matmul("BKGTC,BCKH->BKGTH", p_BKGTC, v_BCKH))
        o = rounded(rounded(shrink[..., None] * o) + pv)
        return (m, l, o), None

    blocks = (_blocks(k_BSKH), _blocks(v_BSKH), _blocks(segments_BT, fill=-1))
    start = (
        jnp.full(rows.shape, -jnp.inf, dtype),
        jnp.zeros(rows.shape, dtype),
        jnp.zeros((*rows.shape, q_BTKGH.shape[-1]), dtype),
    )
    (m, l, o), _ = lax.scan(block, start, (jnp.arange(len(blocks[0])), *blocks))  # noqa: E741
    out_BTKGH = jnp.moveaxis(rounded(o / l[..., None]), 3, 1).astype(q_BTKGH.dtype)
    return out_BTKGH, (q_BTKGH, k_BSKH, v_BSKH, segments_BT, window, out_BTKGH, m + jnp.log(l))


def first_exponentials(how: Blockwise, q_BTKGH: Array, k_BSKH: Array, segments_BT: Array) -> Array:
    """Returns p [B, K, G, T, C] of the first block of keys, as it is multiplied by v."""
    k_BCKH, segments_BC = _blocks(k_BSKH)[0], _blocks(segments_BT, fill=-1)[0]
    s_BKGTC = _scores(how, q_BTKGH, k_BCKH, segments_BT, segments_BC, 0)
    nothing_BKGT = jnp.full(s_BKGTC.shape[:-1], -jnp.inf, s_BKGTC.dtype)
    _, p_BKGTC, _ = how.exponentials(s_BKGTC, nothing_BKGT, k_BSKH.dtype)
    return _round_to(k_BSKH.dtype)(p_BKGTC)


def deltas(how: Blockwise, do_BTKGH: Array, out_BTKGH: Array) -> Array:
    """Returns delta = rowsum(do * out) [B, T, K, G], in float32 or more."""
    dtype = jnp.promote_types(out_BTKGH.dtype, jnp.float32)
    rounded = how.round_other(out_BTKGH.dtype)
    terms_BTKGH = rounded(do_BTKGH.astype(dtype) * out_BTKGH.astype(dtype))
    return rounded(jnp.sum(terms_BTKGH, axis=-1))


def _sum_over_queries(how: Blockwise, weights_BKGTC: Array, x_BTKGH: Array, dtype: Any) -> Array:
    """Returns weights^T x [B, C, K, H], for dk and dv; `Rounded.ALL` rounds it between blocks."""
    matmul = functools.partial(jnp.einsum, preferred_element_type=dtype)
    if how.rounded is not Rounded.ALL:
        return matmul("BKGTC,BTKGH->BCKH", weights_BKGTC, x_BTKGH)
    rounded = how.round_other(x_BTKGH.dtype)

    def add(total_BCKH, block):
        return rounded(total_BCKH + rounded(matmul("BTKGC,BTKGH->BCKH", *block))), None

    batch, keys = x_BTKGH.shape[0], weights_BKGTC.shape[-1]
    start = jnp.zeros((batch, keys, x_BTKGH.shape[2], x_BTKGH.shape[-1]), dtype)
    blocks = (_blocks(jnp.moveaxis(weights_BKGTC, 3, 1)), _blocks(x_BTKGH))
    return lax.scan(add, start, blocks)[0]


def _blockwise_bwd(how: Blockwise, residuals, do_BTKGH):
    q_BTKGH, k_BSKH, v_BSKH, segments_BT, window, out_BTKGH, lse_BKGT = residuals
    dtype = lse_BKGT.dtype
    rounded = how.round_other(q_BTKGH.dtype)
    matmul = functools.partial(jnp.einsum, preferred_element_type=dtype)
    delta_BKGT = jnp.moveaxis(deltas(how, do_BTKGH, out_BTKGH), 1, 3)

    def block(dq_BTKGH, scanned):
        index, k_BCKH, v_BCKH, segments_BC = scanned
        s_BKGTC = _scores(how, q_BTKGH, k_BCKH, segments_BT, segments_BC, index, window)
        p_BKGTC = jnp.exp(s_BKGTC - lse_BKGT[..., None])
        low_p_BKGTC = rounded(p_BKGTC).astype(do_BTKGH.dtype)
        dv_BCKH = _sum_over_queries(how, low_p_BKGTC, do_BTKGH, dtype)
        dp_BKGTC = rounded(matmul("BTKGH,BCKH->BKGTC", do_BTKGH, v_BCKH))
        ds_BKGTC = p_BKGTC * rounded(dp_BKGTC - delta_BKGT[..., None])
        ds_BKGTC = rounded(ds_BKGTC / math.sqrt(q_BTKGH.shape[-1])).astype(q_BTKGH.dtype)
        dq_BTKGH = rounded(dq_BTKGH + rounded(matmul("BKGTC,BCKH->BTKGH", ds_BKGTC, k_BCKH)))
        dk_BCKH = _sum_over_queries(how, ds_BKGTC, q_BTKGH, dtype)
        return dq_BTKGH, (dk_BCKH.astype(k_BCKH.dtype), dv_BCKH.astype(v_BCKH.dtype))

    blocks = (_blocks(k_BSKH), _blocks(v_BSKH), _blocks(segments_BT, fill=-1))
    dq, gradients = lax.scan(
        block, jnp.zeros(q_BTKGH.shape, dtype), (jnp.arange(len(blocks[0])), *blocks)
    )
    dk, dv = (
        jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, : k_BSKH.shape[1]]
        for x in gradients
    )
    return dq.astype(q_BTKGH.dtype), dk, dv, None, None


_blockwise.defvjp(_blockwise_fwd, _blockwise_bwd)
