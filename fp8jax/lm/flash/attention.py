"""Causal attention within the documents of packed rows, on Hopper: forward and backward.

Legend: B rows, T positions, N query heads, K key and value heads, H head size.

    s = scale q k^T, where a query sees the keys of its own document up to its own position
    y = softmax(s) v

A row holds its documents one after the other. So query t sees the keys from begin[t], the first
position of its document, to t. Key t is seen by the queries t to end[t] - 1. A window of w keys
raises begin[t] to t - w + 1 and lowers end[t] to t + w. Neither array falls along a row, so a tile
of 128 queries or keys has to look at its first and last entry only:

  * Blocks of keys before the document of the tile's first query are not read, and neither are
    blocks of queries behind the document of the tile's last key. Time falls with the lengths of
    documents.
  * Only blocks in which a document begins or ends are compared with `begin` or `end`, and only
    those on the diagonal compare positions. All other blocks have no mask.
  * One number for each position describes the mask, for any number of documents.

The kernels are flash attention: blocks of keys pass through shared memory, where a copying
warpgroup fills slots and two multiplying ones empty them. No T x T array exists. The forward saves
one number a query, lse2 = log2 of the sum of 2^(s log2 e). The backward computes
p = 2^(s log2 e - lse2) again:

    delta = sum over H of y dy                          (once a query, in the kernel of dq)
    dp = dy v^T;  ds = p (dp - delta)
    dq = scale ds k        tiles of queries, blocks of keys
    dk = scale ds^T q      tiles of keys, blocks of queries, over all query heads of the key head
    dv = p^T dy            likewise

One kernel computes dq, another one dk and dv. Both compute s and dp. A single kernel would not, but
it would have to sum dq by atomic additions, in an order that changes from run to run.

Products are of the operands' dtype, with float32 sums; p and ds are rounded to that dtype before
they are multiplied. All else is float32. The hardware's exponential is off by up to
2^-22 + |x| 2^-24.

FlashAttention-2 (arXiv 2307.08691) has the algorithm. FlashAttention-3 (arXiv 2407.08608) has the
schedule of the forward: one warpgroup multiplies while the other one takes exponentials.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from fp8jax.lm.flash import partition
from fp8jax.lm.flash.tiles import TILE

_HEAD_SIZES = 64  # `wgmma` and the layout of shared memory take multiples of this


def flash_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    segments_BT: Int[Array, "B T"],
    window: int | Int[Array, ""] | None = None,
) -> Float[Array, "B T N H"]:
    """Returns the attention of the module docstring, for rows of any length.

    On a mesh the rows and the heads are sharded, as the operands are.

    Args:
      q_BTNH, k_BTKH, v_BTKH: bfloat16 or float16; N is a multiple of K, H at most 128. Heads are
        padded with zeros to a size of 64 or 128, and rows to a multiple of 128 positions.
      segments_BT: a number for each position. A document is a run of equal numbers.
      window: how many keys a query sees at most, its own included; None for all.

    Raises:
      NotImplementedError: the kernels cannot run here.
    """
    _, length, heads, head_dim = q_BTNH.shape
    padding = (0, -length % TILE), (0, 0), (0, -head_dim % _HEAD_SIZES)

    def pad(x):
        return jnp.pad(x, ((0, 0), *padding)) if any(after for _, after in padding) else x

    # Padding is one more document of each row.
    segments_BT = jnp.pad(segments_BT, ((0, 0), padding[0]), mode="constant", constant_values=-1)
    begin_BT, end_BT = visible_bounds(segments_BT, window)
    # Query heads as [key head, head of its group], so that both are sharded alike.
    q_BTKGH = pad(q_BTNH)
    q_BTKGH = q_BTKGH.reshape(*q_BTKGH.shape[:2], k_BTKH.shape[2], -1, q_BTKGH.shape[-1])
    y_BTKGH = _attend(q_BTKGH, pad(k_BTKH), pad(v_BTKH), begin_BT, end_BT, head_dim**-0.5)
    return y_BTKGH.reshape(*y_BTKGH.shape[:2], heads, -1)[:, :length, :, :head_dim]


def visible_bounds(
    segments_BT: Int[Array, "B T"], window: int | Int[Array, ""] | None = None
) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Returns the first key that each query sees, and behind the last query that sees each key."""
    length = segments_BT.shape[1]
    at_T = jnp.arange(length, dtype=jnp.int32)
    changes = segments_BT[:, 1:] != segments_BT[:, :-1]
    begins = jnp.pad(changes, ((0, 0), (1, 0)), constant_values=True)
    ends = jnp.pad(changes, ((0, 0), (0, 1)), constant_values=True)
    begin_BT = lax.cummax(jnp.where(begins, at_T, 0), axis=1)
    end_BT = lax.cummin(jnp.where(ends, at_T + 1, length), axis=1, reverse=True)
    if window is not None:
        begin_BT = jnp.maximum(begin_BT, (at_T + (1 - window))[None])
        end_BT = jnp.minimum(end_BT, (at_T + window)[None])
    return begin_BT, end_BT


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(q_BTKGH, k_BTKH, v_BTKH, begin_BT, end_BT, scale: float) -> jax.Array:
    return partition.flash_forward(q_BTKGH, k_BTKH, v_BTKH, begin_BT, scale)[0]


def _attend_fwd(q_BTKGH, k_BTKH, v_BTKH, begin_BT, end_BT, scale: float):
    y_BTKGH, lse_BKGT = partition.flash_forward(q_BTKGH, k_BTKH, v_BTKH, begin_BT, scale)
    return y_BTKGH, (q_BTKGH, k_BTKH, v_BTKH, y_BTKGH, lse_BKGT, begin_BT, end_BT)


def _attend_bwd(scale: float, residuals, dy_BTKGH):
    q, k, v, y, lse, begin_BT, end_BT = residuals
    dq, delta = partition.flash_gradient_q(q, k, v, y, dy_BTKGH, lse, begin_BT, scale)
    dk, dv = partition.flash_gradient_kv(q, k, v, dy_BTKGH, lse, delta, end_BT, scale)
    return dq, dk, dv, None, None


_attend.defvjp(_attend_fwd, _attend_bwd)
