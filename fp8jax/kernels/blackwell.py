"""The block-scaled GEMM of Blackwell, through `jax.nn.scaled_matmul`.

    y[m, n] = sum over blocks c of K    s[m, c] t[n, c] * sum over k in c    a[m, k] b[n, k]

cuDNN runs it on codes with K as the last axis of both operands. There are two formats:

    MXFP8    E4M3 or E5M2 codes, an E8M0 scale per block of 32
    NVFP4    E2M1 codes, an E4M3 scale per block of 16, and a float32 scale per tensor, which is
             multiplied into the result

For operands in other formats XLA silently dequantizes and multiplies in 16 bits. The backends of
gemm/ therefore call this only for the two formats.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from fp8jax.numerics.quantization import Quantized
from fp8jax.numerics.tiles import spread


def scaled_matmul(
    a: Quantized, b: Quantized, contract_a: int, contract_b: int
) -> Float[Array, "..."]:
    """Returns the GEMM of two block-scaled operands as float32 [..., M, N].

    Args:
      a, b: operands with 2 axes, or 3 of which the first is a batch. Their tiles have 16 or 32
        elements along the contracting axis.
      contract_a, contract_b: the contracting axis of each: -1 or -2.
    """
    (left, left_scale), (right, right_scale) = _rows(a, contract_a), _rows(b, contract_b)
    y = jax.nn.scaled_matmul(left, right, left_scale, right_scale, jnp.float32)
    for operand in (a, b):
        if operand.tensor_scale is not None:
            y = y * operand.tensor_scale
    return y if a.values.ndim == 3 else y[0]


def _rows(x: Quantized, axis: int) -> tuple[Shaped[Array, "B M K"], Shaped[Array, "B M blocks"]]:
    """Returns codes with K last, zero-padded to whole blocks, and one scale per row and block.

    Args:
      x: the operand.
      axis: its contracting axis: -1 or -2.
    """
    values, scale, tile = x.values, x.scale, list(x.tile)
    block = tile[axis]
    assert block is not None
    # If a tile has several rows (16x16), repeat its scale for each of them.
    shape = list(values.shape)
    shape[axis], tile[axis] = scale.shape[axis], 1
    scale = jnp.broadcast_to(spread(scale, tuple(tile), tuple(shape)), shape)
    if axis == -2:
        values, scale = jnp.swapaxes(values, -1, -2), jnp.swapaxes(scale, -1, -2)
    missing = scale.shape[-1] * block - values.shape[-1]
    values = jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, missing)])
    return (values, scale) if values.ndim == 3 else (values[None], scale[None])
