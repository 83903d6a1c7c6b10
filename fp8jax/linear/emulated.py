"""The backend `emulated`: exact GEMMs of dequantized operands, on every device.

It runs every recipe and defines what a recipe computes. `quantize_each` is also the quantizer of
the backend `xla`.

Sums are in float32, whatever a recipe's accumulation is (numerics/accumulation.py): the backend
emulates formats, not the accumulators of a matrix unit. That loses less than `fast` may, and is
what `split` asks for.
"""

import dataclasses
import functools
import operator

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
from fp8jax.numerics.quantization import dequantize, quantize_unchecked


def quantize_each(
    x: jax.Array, requests: tuple[CastRequest, ...]
) -> tuple[tuple[QuantizedOperand, ...], jax.Array | None]:
    """Quantize `x` for each request; requests with the same result are computed once.

    Returns one operand per request, and None in place of max|x|.
    """
    operands: list[QuantizedOperand] = []
    for i, request in enumerate(requests):
        operand = None
        for earlier, done in zip(requests[:i], operands, strict=True):
            if _same_values(earlier, request):
                operand = dataclasses.replace(done, axis=request.axis)
        operands.append(_quantize_one(x, request) if operand is None else operand)
    return tuple(operands), None


def _quantize_one(x: jax.Array, request: CastRequest) -> QuantizedOperand:
    cast = request.cast
    if cast.hadamard > 1:
        x = hadamard(x, cast.hadamard, axis=request.axis)
    q = quantize_unchecked(
        x, cast.format, cast.tile, contract_axis=request.axis, scale=cast.scale,
        amax=request.amax, rounding=cast.rounding, key=request.key,
    )  # fmt: skip
    return QuantizedOperand(q, cast, request.axis)


def _same_values(one: CastRequest, other: CastRequest) -> bool:
    """Whether two casts of one array, with different contracting axes, give the same values."""
    return one.cast.any_axis and one.cast == other.cast


def matmul_emulated(a: Operand, b: Operand, dtype, accumulation: str) -> jax.Array:
    """Multiply the dequantized operands exactly, with sums in float32, and round to `dtype`.

    `accumulation` changes nothing, as the module's docstring says.

    Scales that are constant along the contracting axis are multiplied into the result.
    """
    if _is_separable(a) and _is_separable(b):
        return _matmul_separable(a, b).astype(dtype)
    left, right = _exact(a), _exact(b)
    if left.dtype != right.dtype:
        left, right = left.astype(jnp.float32), right.astype(jnp.float32)
    left, right = lax.optimization_barrier((left, right))
    return plain_matmul(
        PlainOperand(left, a.axis), PlainOperand(right, b.axis), jnp.float32
    ).astype(dtype)


def _is_separable(operand: Operand) -> bool:
    """Whether the operand's scales, if it has any, are constant along the contracting axis."""
    return isinstance(operand, PlainOperand) or operand.cast.separable


def _matmul_separable(a: Operand, b: Operand) -> jax.Array:
    # Codes are exact in bfloat16. The first barrier keeps XLA from undoing the rounding. The second
    # keeps it from using an FP8 GEMM, which on Hopper keeps only 14 bits of the sums.
    numbers = lax.optimization_barrier(tuple(map(_numbers, (a, b))))
    plain = [each.x.dtype for each in (a, b) if isinstance(each, PlainOperand)]
    wide = plain[0] if plain else jnp.bfloat16
    left, right = lax.optimization_barrier(tuple(each.astype(wide) for each in numbers))
    y = plain_matmul(PlainOperand(left, a.axis), PlainOperand(right, b.axis), jnp.float32)
    return y * result_scale(a, b)


def _numbers(operand: Operand) -> jax.Array:
    """Return the operand's codes without their scales, or its numbers in high precision."""
    return operand.x if isinstance(operand, PlainOperand) else operand.q.values


def _exact(operand: Operand) -> jax.Array:
    """Return the operand's numbers without rounding: in bfloat16 if it can hold them, else float32.

    A code has at most four significant bits, and multiplying by a power of two adds none.
    """
    if isinstance(operand, PlainOperand):
        return operand.x
    exact_in_bf16 = operand.cast.scale.power_of_two
    return dequantize(operand.q, jnp.bfloat16 if exact_in_bf16 else jnp.float32)


def codes_of(operand: QuantizedOperand) -> PlainOperand:
    """Return the operand's codes without their scales."""
    return PlainOperand(operand.q.values, operand.axis)


def result_scale(a: Operand, b: Operand) -> jax.Array:
    """Return the scales of quantized operands, multiplied, broadcastable to [..., M, N].

    At least one operand is quantized; scales must be separable.
    """
    scales = []
    if isinstance(a, QuantizedOperand):
        rows = a.q.float_scale()
        scales.append(rows if a.axis == -1 else jnp.swapaxes(rows, -1, -2))
    if isinstance(b, QuantizedOperand):
        columns = b.q.float_scale()
        scales.append(columns if b.axis == -2 else jnp.swapaxes(columns, -1, -2))
    return functools.reduce(operator.mul, scales)
