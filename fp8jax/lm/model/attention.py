"""Causal attention within documents, in several implementations.

Legend: B batch, T query length, S key length, N query heads, K key and value heads, H head size.

Attention itself is never quantized. Scores and softmax are computed in float32 or more, except in
the last two variants below; inputs and outputs have the activations' dtype. Packed rows carry
segment ids: a query sees the keys of its own segment, at its own position and before. With a
window of w tokens it sees the last w of these keys, its own included. Segments are consecutive, so
that a window within the row is one within the document.

    flash         our kernels for Hopper (lm/flash/attention.py): their time falls with the
                  lengths of documents, their memory grows with T, and they give the same bits twice
    cudnn         `jax.nn.dot_product_attention` with cuDNN's fused kernels; the segment mask is an
                  additive bias of T x T numbers for each row of the batch
    cudnn_causal  as cudnn, without the segment mask: a document also sees the documents before it
                  in its row, as in most published training code
    xla           the same call without fused kernels; it writes the T x T scores to memory
    reference     the blockwise algorithm written out in JAX (blockwise_attention.py); it runs on
                  every device, and its memory grows with T instead of T^2

blockwise_attention.py explains the bias of low-precision attention that `RowMax` removes. The
variants of the reference, without and with it, differ in what they round to the inputs' dtype. Its
table lists every intermediate.

    reference, stabilized            only the output: biased where the values of keys that share the
                                     largest score differ from the other values
    reference_bf16, stabilized_bf16  the product p v of each block, too, which is what the paper
                                     blames: biased wherever values have one sign
    reference_all_bf16, stabilized_all_bf16
                                     scores, maxima, sums, outputs and deltas, too, as in the code
                                     that the authors of the paper published
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fp8jax.device import hardware
from fp8jax.lm.flash import refusals
from fp8jax.lm.model.blockwise_attention import Blockwise, Rounded, RowMax
from fp8jax.lookup import lookup


@dataclasses.dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to compute attention.

    Compares and hashes by value, since it is a static argument of compiled programs.

    Attributes:
      attend: (q_BTNH, k_BTKH, v_BTKH, segments_BT) -> output [B, T, N, H]; models with windows
        give one more argument, the window: a number, or an array [] where layers are unlike.
      refuses: queries -> the reason why it cannot run them on this device, or None if it can.
      saves_output: whether its backward reads its output, which so is kept since the forward.
    """

    attend: Callable[..., Array]
    refuses: Callable[[Array | jax.ShapeDtypeStruct], str | None]
    saves_output: bool = False


def dot_product_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    segments_BT: Int[Array, "B T"],
    *,
    window: Any = None,
    implementation: str | Implementation | None = None,
) -> Float[Array, "B T N H"]:
    """Returns softmax(q k^T / sqrt(H)) v, causal and within segments; N is a multiple of K (GQA).

    Args:
      q_BTNH, k_BTKH, v_BTKH: all of one float dtype, which the result has too.
      segments_BT: number of each position's document within its row; 0 is padding, which attends
        to padding. The positions of a document are consecutive.
      window: how many keys a query sees at most, its own included; None for all.
      implementation: a key of `ATTENTIONS` or an `Implementation`. None is the first of
        `FASTEST` that can run on this device.

    Raises:
      ValueError: the implementation is unknown.
      NotImplementedError: the implementation cannot run on this device or with these shapes; the
        message says why.
    """
    chosen = choose_attention(implementation, q_BTNH)
    limits = () if window is None else (window,)
    return chosen.attend(q_BTNH, k_BTKH, v_BTKH, segments_BT, *limits)


def choose_attention(
    name: str | Implementation | None,
    q_BTNH: Array | jax.ShapeDtypeStruct,
    *,
    beta: float | None = None,
    tolerance: float | None = None,
) -> Implementation:
    """Returns the implementation that `name` stands for, after a check that it can run.

    Args:
      name: as `implementation` in `dot_product_attention`.
      q_BTNH: queries, or their shape and dtype.
      beta, tolerance: where given, replace the fields of the implementation's `RowMax`.

    Raises:
      ValueError: the name is unknown, or the implementation has no `RowMax` to change.
      NotImplementedError: as in `dot_product_attention`.
    """
    known = fastest_attention(q_BTNH) if name is None else name
    chosen = known if isinstance(known, Implementation) else lookup("attention", known, ATTENTIONS)
    reason = chosen.refuses(q_BTNH)
    if reason is not None:
        raise NotImplementedError(f"attention {name!r} cannot run here: {reason}")
    changes = {}
    if beta is not None:
        changes["beta"] = beta
    if tolerance is not None:
        changes["tolerance"] = tolerance
    if not changes:
        return chosen
    if isinstance(chosen.attend, Blockwise) and chosen.attend.row_max is not None:
        row_max = dataclasses.replace(chosen.attend.row_max, **changes)
        return reference(row_max, rounded=chosen.attend.rounded)
    raise ValueError(
        f"attention_beta={beta} and attention_tie_tolerance={tolerance} apply to attention="
        f"'stabilized', 'stabilized_bf16' and 'stabilized_all_bf16' only, got attention={name!r}"
    )


def fastest_attention(q_BTNH: Array | jax.ShapeDtypeStruct) -> str:
    """Returns the first of `FASTEST` that can run these queries, or such a shape, here."""
    return next(name for name in FASTEST if ATTENTIONS[name].refuses(q_BTNH) is None)


def _flash(q_BTNH, k_BTKH, v_BTKH, segments_BT, window=None):
    from fp8jax.lm.flash.attention import flash_attention  # Pallas, when a kernel first runs

    return flash_attention(q_BTNH, k_BTKH, v_BTKH, segments_BT, window)


def _near(length: int, window: Any) -> Array:
    """Returns whether a key is within the window of a query, or behind it, bool [1, 1, T, T]."""
    at_T = jnp.arange(length)
    return (at_T[:, None] - at_T[None, :] < window)[None, None]


def _jax_nn(implementation: Any, q_BTNH, k_BTKH, v_BTKH, segments_BT, window=None):
    same_B1TT = (segments_BT[:, :, None] == segments_BT[:, None, :])[:, None]
    if window is not None:
        same_B1TT &= _near(q_BTNH.shape[1], window)
    # cuDNN skips the blocks above the diagonal only if it is told that there is one.
    return jax.nn.dot_product_attention(
        q_BTNH, k_BTKH, v_BTKH, mask=same_B1TT, is_causal=True, implementation=implementation
    )


def _cudnn_causal(q_BTNH, k_BTKH, v_BTKH, segments_BT, window=None):
    near = None if window is None else _near(q_BTNH.shape[1], window)
    return jax.nn.dot_product_attention(
        q_BTNH, k_BTKH, v_BTKH, mask=near, is_causal=True, implementation="cudnn"
    )


def _cudnn_refuses(q_BTNH: Array | jax.ShapeDtypeStruct) -> str | None:
    """Returns why cuDNN's fused kernels cannot run these queries on this device, or None."""
    capability = hardware.compute_capability()
    if capability is None or capability < (8, 0):
        return (
            "it needs an NVIDIA GPU of compute capability 8.0 or later, got "
            f"{hardware.device_kind()}"
        )
    if q_BTNH.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it needs bfloat16 or float16, got {q_BTNH.dtype}"
    length, head_dim = q_BTNH.shape[1], q_BTNH.shape[3]
    largest = 256 if capability >= (9, 0) else 128
    if head_dim % 8 or head_dim > largest:
        return f"it needs a head_dim that is a multiple of 8 up to {largest}, got {head_dim}"
    return f"it needs rows of an even length, got {length}" if length % 2 else None


def _refuses_nothing(q_BTNH: Array | jax.ShapeDtypeStruct) -> str | None:
    return None


def reference(
    row_max: RowMax | None = None, *, rounded: Rounded = Rounded.OUTPUT
) -> Implementation:
    """Returns the blockwise implementation; see `Blockwise` for the arguments."""
    attend = Blockwise(row_max=row_max, rounded=rounded)
    return Implementation(attend=attend, refuses=_refuses_nothing, saves_output=True)


ATTENTIONS: dict[str, Implementation] = {
    "flash": Implementation(attend=_flash, refuses=refusals.refuses, saves_output=True),
    "xla": Implementation(attend=functools.partial(_jax_nn, "xla"), refuses=_refuses_nothing),
    "cudnn": Implementation(attend=functools.partial(_jax_nn, "cudnn"), refuses=_cudnn_refuses),
    "cudnn_causal": Implementation(attend=_cudnn_causal, refuses=_cudnn_refuses),
    "reference": reference(),
    "stabilized": reference(RowMax()),
    "reference_bf16": reference(rounded=Rounded.PRODUCTS),
    "stabilized_bf16": reference(RowMax(), rounded=Rounded.PRODUCTS),
    "reference_all_bf16": reference(rounded=Rounded.ALL),
    "stabilized_all_bf16": reference(RowMax(), rounded=Rounded.ALL),
}

# Without a choice, the first of these that can run; documents never see each other in any of them.
FASTEST = ("flash", "cudnn", "xla")
