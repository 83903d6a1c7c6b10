"""Causal attention that stays inside a document.

Legend: B batch, T query length, S key length, N query heads, K key and value heads, G = N / K,
H head size, C keys in a block.

The core is never quantized: scores and their softmax are at least float32 inside, inputs and
outputs in the activations' dtype. Packed rows carry segment ids; a query sees the keys of its own
segment only, at its own position and before.

    xla        `jax.nn.dot_product_attention`: the T x T scores are in memory
    cudnn      the same call into cuDNN's fused kernels; the mask of segments is an additive bias of
               T x T numbers for each row of the batch
    cudnn_causal  the same without a mask: segments are not looked at, so that a packed document
               sees those before it in its row, as in most published training codes
    reference  the blockwise algorithm of FlashAttention (arXiv 2307.08691) written out, on every
               device, to read and to experiment on: memory grows with T, not with its square

The reference goes over blocks of C keys. With scores s = q k^T / sqrt(H), -inf where masked, it
keeps for each query the maximum m so far, the sum l of exp(s - m) and the unnormalized output o:

    m' = max(m, rowmax s)   p = exp(s - m')   a = exp(m - m')
    l' = a l + rowsum p     o' = a o + p v                           out = o / l

p enters its product in v's dtype, as in the fused kernels. What is kept for the backward is out and
the log-sum-exp L = m + log l. There p = exp(s - L) is computed again, block by block:

    dv = p^T do     dp = do v^T     delta = rowsum(do * out)     ds = p (dp - delta) / sqrt(H)
    dq = ds k       dk = ds^T q

Blocks of queries, which the kernels have too, are left out: they change no number.

Why low-precision training fails (arXiv 2510.04212). Where two keys of a row share the largest
score, their p is exactly 1. The sum of two bfloat16 values of one sign has a bit too many: every
other one is a tie, which the small rest of the row breaks to the same side each time. delta
inherits the bias, and dq adds it up over tokens and steps. `RowMax` raises m for such rows: the
softmax is the same for any m, and with another p < 1 in each row the sums are no ties.

    reference, stabilized            float32 sums, without and with the fix. Only out is rounded,
                                     with a bias where sharing keys' values are unlike the others'
    reference_bf16, stabilized_bf16  p v rounded to v's dtype in each block, as in the authors'
                                     code: with a bias wherever values have one sign
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fp8jax.device import hardware
from fp8jax.lookup import lookup
from fp8jax.model.blockwise_attention import Blockwise, RowMax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to compute attention: the function, and why it refuses such queries (None: it takes
    them). Compares and hashes as these two do: it is part of what a program is compiled for."""

    attend: Callable[..., Array]
    refuses: Callable[[Array | jax.ShapeDtypeStruct], str | None]


def dot_product_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    segments_BT: Int[Array, "B T"],
    *,
    implementation: str | Implementation | None = None,
) -> Float[Array, "B T N H"]:
    """softmax(q k^T / sqrt(H)) v, causal and within segments; N is a multiple of K (GQA).

    Args:
      q_BTNH, k_BTKH, v_BTKH: one float dtype, which is also that of the result.
      segments_BT: document number of each position within its row; 0 is padding, and attends to
        padding.
      implementation: a key of `ATTENTIONS` or an `Implementation`; None is "xla", which runs
        everywhere and gives the same bits twice.

    Raises:
      ValueError: an unknown implementation.
      NotImplementedError: the device or the shapes are not for the one named; says why.
    """
    chosen = choose_attention(implementation, q_BTNH)
    return chosen.attend(q_BTNH, k_BTKH, v_BTKH, segments_BT)


def choose_attention(
    name: str | Implementation | None,
    q_BTNH: Array | jax.ShapeDtypeStruct,
    *,
    beta: float | None = None,
    tolerance: float | None = None,
) -> Implementation:
    """`name`, resolved, for such queries; raises as `dot_product_attention` does. `beta` and
    `tolerance`, where given, change its `RowMax`: ValueError where it has none."""
    known = "xla" if name is None else name
    chosen = known if isinstance(known, Implementation) else lookup("attention", known, ATTENTIONS)
    reason = chosen.refuses(q_BTNH)
    if reason is not None:
        raise NotImplementedError(f"attention {name!r} cannot run here: {reason}")
    given = {"beta": beta, "tolerance": tolerance}
    fix = {field: value for field, value in given.items() if value is not None}
    if not fix:
        return chosen
    if isinstance(chosen.attend, Blockwise) and chosen.attend.row_max is not None:
        row_max = dataclasses.replace(chosen.attend.row_max, **fix)
        return reference(row_max, rounded=chosen.attend.rounded)
    raise ValueError(
        f"attention_beta={beta} and attention_tie_tolerance={tolerance} are of "
        f"attention='stabilized' or 'stabilized_bf16', got attention={name!r}"
    )


def _mask(segments_BT: Int[Array, "B T"]) -> Array:
    """[B, 1, T, S]: whether a query sees a key."""
    same_BTT = segments_BT[:, :, None] == segments_BT[:, None, :]
    causal_TT = jnp.tril(jnp.ones((segments_BT.shape[1],) * 2, bool))
    return (same_BTT & causal_TT[None])[:, None]


def _jax_nn(implementation: Any, q_BTNH, k_BTKH, v_BTKH, segments_BT):
    return jax.nn.dot_product_attention(
        q_BTNH, k_BTKH, v_BTKH, mask=_mask(segments_BT), implementation=implementation
    )


def _cudnn_causal(q_BTNH, k_BTKH, v_BTKH, segments_BT):
    return jax.nn.dot_product_attention(
        q_BTNH, k_BTKH, v_BTKH, is_causal=True, implementation="cudnn"
    )


def _cudnn_refuses(q_BTNH: Array | jax.ShapeDtypeStruct) -> str | None:
    """Why cuDNN's fused kernels do not take such queries on this device."""
    capability = hardware.compute_capability()
    if capability is None or capability < (8, 0):
        return (
            "it needs an NVIDIA GPU of compute capability 8.0 or later, got "
            f"{hardware.device_kind()}"
        )
    if q_BTNH.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 and float16, got {q_BTNH.dtype}"
    length, head_dim = q_BTNH.shape[1], q_BTNH.shape[3]
    largest = 256 if capability >= (9, 0) else 128
    if head_dim % 8 or head_dim > largest:
        return f"it takes a head_dim that is a multiple of 8 up to {largest}, got {head_dim}"
    return f"it takes rows of an even length, got {length}" if length % 2 else None


def _refuses_nothing(q_BTNH: Array | jax.ShapeDtypeStruct) -> str | None:
    return None


def reference(row_max: RowMax | None = None, *, rounded: bool = False) -> Implementation:
    """The blockwise reference, with the fix `row_max` if given; `rounded` as in `Blockwise`."""
    attend = Blockwise(row_max=row_max, rounded=rounded)
    return Implementation(attend=attend, refuses=_refuses_nothing)


ATTENTIONS: dict[str, Implementation] = {
    "xla": Implementation(attend=functools.partial(_jax_nn, "xla"), refuses=_refuses_nothing),
    "cudnn": Implementation(attend=functools.partial(_jax_nn, "cudnn"), refuses=_cudnn_refuses),
    "cudnn_causal": Implementation(attend=_cudnn_causal, refuses=_cudnn_refuses),
    "reference": reference(),
    "stabilized": reference(RowMax()),
    "reference_bf16": reference(rounded=True),
    "stabilized_bf16": reference(RowMax(), rounded=True),
}
