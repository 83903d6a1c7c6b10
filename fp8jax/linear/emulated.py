"""TODO docstring."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax.linear.operands import (
    CastRequest,
    Operand,
    PlainOperand,
    QuantizedOperand,
    plain_matmul,
)
from fp8jax.numerics.hadamard import hadamard
from fp8jax.numerics.quantization import dequantize, quantize
from fp8jax.numerics.tiles import TENSOR

# Quantizing ---------------------------------------------------------------------------------------


def _same_codes(one: CastRequest, other: CastRequest) -> bool:
    """Whether two casts of an array for different axes give one and the same."""
    cast = one.cast
    whole = cast.tile == TENSOR and cast.rounding == "nearest" and cast.hadamard == 1
    return whole and cast == other.cast


def quantize_each(
    x: jax.Array, requests: tuple[CastRequest, ...]
) -> tuple[tuple[QuantizedOperand, ...], jax.Array | None]:
    """`x` as each request has it, by `scaling.quantize`; equal ones once. No amax comes with it."""
    done: list[QuantizedOperand] = []
    for i, request in enumerate(requests):
        for before, coded in zip(requests[:i], done, strict=True):
            if _same_codes(before, request):
                done.append(dataclasses.replace(coded, axis=request.axis))
                break
        else:
            cast = request.cast
            source = hadamard(x, cast.hadamard, axis=request.axis) if cast.hadamard > 1 else x
            q = quantize(
                source, cast.format, cast.tile, contract_axis=request.axis, scale=cast.scale,
                amax=request.amax, rounding=cast.rounding, key=request.key,
            )  # fmt: skip
            done.append(QuantizedOperand(q, cast, request.axis))
    return tuple(done), None


def codes_of(operand: QuantizedOperand) -> PlainOperand:
    return PlainOperand(operand.q.values, operand.axis)


def result_scale(a: QuantizedOperand, b: QuantizedOperand) -> jax.Array:
    """The product of two separable scales, broadcastable to [..., M, N]."""
    rows, columns = a.q.float_scale(), b.q.float_scale()
    rows = rows if a.axis == -1 else jnp.swapaxes(rows, -1, -2)
    columns = columns if b.axis == -2 else jnp.swapaxes(columns, -1, -2)
    return rows * columns


def _exact(operand: Operand) -> jax.Array:
    """The operand's numbers: in bfloat16 where that is exact, else in float32."""
    if isinstance(operand, PlainOperand):
        return operand.x
    # A code has at most four significant bits; a power of two changes none of them.
    exact_in_bf16 = operand.cast.scale.power_of_two
    return dequantize(operand.q, jnp.bfloat16 if exact_in_bf16 else jnp.float32)


def matmul_emulated(a: Operand, b: Operand, dtype) -> jax.Array:
    """Exact products of the dequantized operands, accumulated in float32."""
    if (
        isinstance(a, QuantizedOperand)
        and isinstance(b, QuantizedOperand)
        and a.cast.separable
        and b.cast.separable
    ):
        # Codes alone are exact in bfloat16. The first barrier keeps XLA from undoing the rounding,
        # the second from making an FP8 GEMM of it, which on Hopper keeps 14 bits of the sums.
        codes = lax.optimization_barrier((a.q.values, b.q.values))
        left, right = lax.optimization_barrier(tuple(v.astype(jnp.bfloat16) for v in codes))
        y = plain_matmul(PlainOperand(left, a.axis), PlainOperand(right, b.axis), jnp.float32)
        return (y * result_scale(a, b)).astype(dtype)
    left, right = _exact(a), _exact(b)
    if left.dtype != right.dtype:
        left, right = left.astype(jnp.float32), right.astype(jnp.float32)
    left, right = lax.optimization_barrier((left, right))
    return plain_matmul(
        PlainOperand(left, a.axis), PlainOperand(right, b.axis), jnp.float32
    ).astype(dtype)
