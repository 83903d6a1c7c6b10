"""The backend `emulated`: exact GEMMs of quantized operands, on every device.

It runs every recipe and defines what a recipe computes. `quantize_each` is also the quantizer of
the backend `xla`.

    y[m, n] = outer * sum over k of    (code a * tile scale a)[m, k] * (code b * tile scale b)[k, n]

What is constant along the contracting axis multiplies the result: the scales of rows and of whole
tensors, and nvfp4's tensor scale. What is left of an operand, its numbers, has few significant
bits: where bfloat16 holds them (`Cast.exact_in`), the matrix unit multiplies them exactly and as
fast as any bfloat16. A float32 scale for each tile does not fit: those numbers are rounded to
float32, once, and multiplied in float32, which takes ten times as long. The float32 result is
rounded once, after its scale.

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

from fp8jax.device.hardware import platform
from fp8jax.gemm.backends.operands import (
    CastRequest,
    Operand,
    PlainOperand,
    QuantizedOperand,
    plain_matmul,
)
from fp8jax.numerics.quantization import ROTATION, Rotation, quantize_unchecked
from fp8jax.numerics.tiles import spread


def quantize_each(
    x: jax.Array, requests: tuple[CastRequest, ...]
) -> tuple[tuple[QuantizedOperand, ...], jax.Array | None]:
    """Quantizes `x` for each request; requests with the same result are computed once.

    Returns one operand per request, and None in place of max|x|.
    """
    x = materialized(x, requests)
    operands: list[QuantizedOperand] = []
    for i, request in enumerate(requests):
        operand = None
        for earlier, done in zip(requests[:i], operands, strict=True):
            # Of one array, also along another contracting axis.
            if request.cast.any_axis and request.cast == earlier.cast:
                operand = dataclasses.replace(done, axis=request.axis)
        operands.append(quantize_one(x, request) if operand is None else operand)
    return tuple(operands), None


def materialized(x: jax.Array, requests: tuple[CastRequest, ...]) -> jax.Array:
    """Returns x, which XLA writes before it quantizes it, if that takes scales of tiles.

    On GPUs it would otherwise compute the amax of each tile where it computes x, in kernels that
    take ten times as long as reading x once more.
    """
    if platform() != "gpu" or all(request.cast.separable for request in requests):
        return x
    return lax.optimization_barrier(x)


def quantize_one(
    x: jax.Array, request: CastRequest, rotation: Rotation = ROTATION
) -> QuantizedOperand:
    """Quantizes `x` for one request.

    Where signs are drawn, the contracting axis comes first: the kernels of rotate.py transform
    rows, and a draw of stochastic rounding belongs to a place in the array that is cast.
    """
    cast, axis = request.cast, request.axis
    if cast.redrawn and axis == -1:
        x, axis = jnp.swapaxes(x, -1, -2), -2
    q = quantize_unchecked(
        x,
        cast.format,
        cast.tile,
        contract_axis=axis,
        scale=cast.rule,
        amax=request.amax,
        key=request.key,
        hadamard=cast.hadamard,
        signs=request.signs,
        rotation=rotation,
    )
    return QuantizedOperand(q, cast, axis, signs=request.signs)


def matmul_emulated(a: Operand, b: Operand, dtype, accumulation: str) -> jax.Array:
    """Multiplies two operands as the module's docstring says; returns [..., M, N] in `dtype`.

    `accumulation` changes nothing, as it says, too.
    """
    wide = gemm_dtype(a, b)
    # The barrier keeps XLA from using an FP8 GEMM, which on Hopper keeps only 14 bits of the sums.
    left, right = lax.optimization_barrier((numbers_of(a, wide), numbers_of(b, wide)))
    outer = result_scale(a, b)
    # A GPU's GEMM rounds its float32 sums itself, which saves a pass over the result.
    rounds = outer is None and dtype == wide and platform() == "gpu"
    y = plain_matmul(
        PlainOperand(left, a.axis), PlainOperand(right, b.axis), dtype if rounds else jnp.float32
    )
    return (y if outer is None else y * outer).astype(dtype)


def gemm_dtype(a: Operand, b: Operand) -> jnp.dtype:
    """Returns the narrowest dtype that holds the numbers of both operands, or float32.

    That is bfloat16, or the dtype of an operand in high precision.
    """
    plain = [each.x.dtype for each in (a, b) if isinstance(each, PlainOperand)]
    wide = jnp.dtype(plain[0] if plain else jnp.bfloat16)
    quantized = [each.cast for each in (a, b) if isinstance(each, QuantizedOperand)]
    return wide if all(cast.exact_in(wide) for cast in quantized) else jnp.dtype(jnp.float32)


def numbers_of(operand: Operand, dtype: jnp.dtype) -> jax.Array:
    """Returns the operand's numbers in `dtype`, without what `_outer_scale` returns."""
    if isinstance(operand, PlainOperand):
        return operand.x.astype(dtype)
    q = operand.q
    # The first cast of codes is exact. XLA may leave out a conversion to a narrow dtype and back,
    # but not the rounding before it (numerics/formats.py).
    if operand.cast.separable:
        return q.values.astype(dtype)
    numbers = q.values.astype(jnp.float32) * spread(
        q.scale.astype(jnp.float32), q.tile, q.values.shape
    )
    return numbers.astype(dtype)


def result_scale(a: Operand, b: Operand) -> jax.Array | None:
    """Returns the scales that are constant along the contracting axis, multiplied.

    They broadcast to [..., M, N]: those of rows, columns and whole tensors. None for none.
    """
    scales = []
    for operand, free in ((a, -1), (b, -2)):
        if isinstance(operand, PlainOperand):
            continue
        if not operand.cast.separable:
            scales += [] if operand.q.tensor_scale is None else [operand.q.tensor_scale]
            continue
        scale = spread(operand.q.float_scale(), operand.q.tile, operand.q.values.shape)
        scales.append(scale if operand.axis == free else jnp.swapaxes(scale, -1, -2))
    return functools.reduce(operator.mul, scales) if scales else None
