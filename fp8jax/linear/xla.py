"""TODO docstring."""

import jax
import jax.numpy as jnp

from fp8jax.device import xla
from fp8jax.kernels.blackwell import scaled_matmul
from fp8jax.linear.emulated import codes_of, result_scale
from fp8jax.linear.operands import Operand, QuantizedOperand, plain_matmul
from fp8jax.linear.refusals import is_block_scaled


def matmul_xla(a: Operand, b: Operand, dtype) -> jax.Array:
    """float8 codes into the matrix unit, scales multiplied into its result."""
    assert isinstance(a, QuantizedOperand) and isinstance(
        b, QuantizedOperand
    )  # what `_xla_refuses` is for
    if is_block_scaled(a.cast, b.cast):
        return scaled_matmul(a.q, b.q, a.axis, b.axis).astype(dtype)
    y = plain_matmul(codes_of(a), codes_of(b), dtype)
    scale = result_scale(a, b)
    if scale.size == 1 and xla.folds_scales():
        # XLA folds this spelling, and only this, into the GEMM's epilogue, where scale and result
        # are float32 (a test on the GPU compares bits): no second pass over y.
        return y * scale.astype(dtype)
    # Elsewhere in float32: a scale in bfloat16 would be off by up to 2^-9 for the whole tensor.
    return (y.astype(jnp.float32) * scale).astype(dtype)
