"""The block-scaled product of Blackwell, through `jax.nn.scaled_matmul`.

    y[m, n] = sum over blocks c of K    s[m, c] t[n, c] * sum over k in c    a[m, k] b[n, k]

cuDNN runs it on codes with K last in both operands: E4M3 or E5M2 with an E8M0 scale for every 32
numbers (MXFP8), or E2M1 with an E4M3 scale for every 16 (NVFP4), whose float32 scales of the whole
tensor are multiplied into the result. What does not match is dequantized by XLA and multiplied in
16 bits, without a word: linear/dot.py lets nothing else in.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from fp8jax.numerics.quantization import Quantized
from fp8jax.numerics.tiles import spread


def scaled_matmul(
    a: Quantized, b: Quantized, contract_a: int, contract_b: int
) -> Float[Array, "..."]:
    """float32 [..., M, N] from operands that contract axis -1 or -2, one leading axis at most being
    a batch; their tiles hold 16 or 32 numbers of it."""
    (left, left_scale), (right, right_scale) = _rows(a, contract_a), _rows(b, contract_b)
    y = jax.nn.scaled_matmul(left, right, left_scale, right_scale, jnp.float32)
    for operand in (a, b):
        y = y if operand.tensor_scale is None else y * operand.tensor_scale
    return y if a.values.ndim == 3 else y[0]


def _rows(x: Quantized, axis: int) -> tuple[Shaped[Array, "B M K"], Shaped[Array, "B M blocks"]]:
    """Codes with K last, filled up to whole blocks, and a scale for each block of each row."""
    values, scale, tile = x.values, x.scale, list(x.tile)
    block = tile[axis]
    assert block is not None
    # A tile may hold several rows: 16x16 is sixteen times 1x16.
    shape = list(values.shape)
    shape[axis], tile[axis] = scale.shape[axis], 1
    scale = jnp.broadcast_to(spread(scale, tuple(tile), tuple(shape)), shape)
    if axis == -2:
        values, scale = jnp.swapaxes(values, -1, -2), jnp.swapaxes(scale, -1, -2)
    missing = scale.shape[-1] * block - values.shape[-1]
    values = jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, missing)])
    return (values, scale) if values.ndim == 3 else (values[None], scale[None])
