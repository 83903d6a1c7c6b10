"""The backend `xla`: XLA's FP8 GEMMs, and cuDNN's block-scaled GEMMs on Blackwell.

FP8 codes go into `lax.dot_general` and the scales are multiplied into its result. On Blackwell,
MXFP8 and NVFP4 codes go into `jax.nn.scaled_matmul` together with their scales.

XLA passes the precision of the `dot_general` on to cuBLAS: an FP8 GEMM of precision DEFAULT has
cuBLAS's fast accumulation, one of precision HIGHEST has not. So this backend honors a recipe's
accumulation (numerics/accumulation.py), also against `jax_default_matmul_precision`. Block-scaled
GEMMs have no such choice.

The more obvious program, which dequantizes and then multiplies, was rejected: where XLA does not
recognize the pattern it silently runs a BF16 GEMM, and on a GPU it even drops the rounding.
"""

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax.device import xla
from fp8jax.gemm.backends.emulated import result_scale
from fp8jax.gemm.backends.operands import Operand, PlainOperand, QuantizedOperand, plain_matmul
from fp8jax.gemm.backends.refusals import is_block_scaled
from fp8jax.kernels.blackwell import scaled_matmul

_PRECISIONS = {"fast": lax.Precision.DEFAULT, "split": lax.Precision.HIGHEST}


def matmul_xla(a: Operand, b: Operand, dtype, accumulation: str) -> jax.Array:
    """Multiplies two quantized operands in the matrix unit; returns [..., M, N] in `dtype`.

    `accumulation` is an entry of `ACCUMULATIONS`, "fast" for block-scaled operands.
    """
    assert isinstance(a, QuantizedOperand)  # `xla_refuses` excludes operands in high precision
    assert isinstance(b, QuantizedOperand)
    if is_block_scaled(a.cast, b.cast):
        return scaled_matmul(a.q, b.q, a.axis, b.axis).astype(dtype)
    # Without the scales, products of codes overflow float16.
    wide = jnp.float32 if dtype == jnp.float16 else dtype
    left, right = (PlainOperand(each.q.values, each.axis) for each in (a, b))
    y = plain_matmul(left, right, wide, _PRECISIONS[accumulation])
    scale = result_scale(a, b)
    assert scale is not None  # `xla_refuses` excludes operands without one
    if scale.size == 1 and xla.folds_scales():
        # XLA folds only this expression into the GEMM's epilogue, which saves a pass over y. There
        # scale and result are float32 (a GPU test compares the bits).
        return y * scale.astype(dtype)
    # Elsewhere in float32: a scale rounded to bfloat16 would change the whole tensor by up to 2^-9.
    return (y.astype(jnp.float32) * scale).astype(dtype)
