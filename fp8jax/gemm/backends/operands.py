"""Operands of a GEMM, quantized or in high precision, and the requests to quantize them.

An operand is a matrix, or a batch of them, of which either axis may be contracted. `plain_matmul`
multiplies operands in high precision; the backends (choice.py) multiply quantized ones.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax.device.hardware import platform
from fp8jax.numerics.quantization import Quantized, dequantize
from fp8jax.numerics.recipe import Cast


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("q", "signs"),
    meta_fields=("cast", "axis", "rows"),
)
@dataclasses.dataclass(frozen=True)
class QuantizedOperand:
    """An operand after quantization.

    Attributes:
      q: values and scales.
      cast: the cast that quantized it.
      axis: the contracting axis of `q.values`, -1 or -2.
      rows: unpadded length of the free axis; None if not padded.
      signs: the word of the signs that the cast has drawn for its transform; None for fixed ones.
    """

    q: Quantized
    cast: Cast
    axis: int
    rows: int | None = None
    signs: jax.Array | None = None


@functools.partial(jax.tree_util.register_dataclass, data_fields=("x",), meta_fields=("axis",))
@dataclasses.dataclass(frozen=True)
class PlainOperand:
    """An operand in high precision, and its contracting axis, -1 or -2."""

    x: jax.Array
    axis: int


Operand = QuantizedOperand | PlainOperand


def inner_numbers(operand: QuantizedOperand) -> tuple[jax.Array, jax.Array | None]:
    """Returns an operand's numbers without the scale of the tensor, and that scale or None.

    In bfloat16 where it holds them exactly, in float32 elsewhere.
    """
    q, cast = operand.q, operand.cast
    exact = not cast.separable and cast.exact_in(jnp.bfloat16)
    inner = dataclasses.replace(q, tensor_scale=None)
    return dequantize(inner, jnp.bfloat16 if exact else jnp.float32), q.tensor_scale


def scaled(operand: QuantizedOperand, factor: jax.Array) -> QuantizedOperand:
    """Returns the operand times a factor, which multiplies the scale of the tensor."""
    outer = operand.q.tensor_scale
    outer = factor if outer is None else outer * factor
    return dataclasses.replace(operand, q=dataclasses.replace(operand.q, tensor_scale=outer))


class CastRequest(NamedTuple):
    """How one GEMM needs an array [..., rows, columns] quantized.

    Attributes:
      cast: the cast.
      axis: the contracting axis of the array, -1 or -2.
      amax: the amax to compute the scale from (delayed scaling); None for the array's own.
      key: a PRNG key for stochastic rounding, else None.
      signs: the word of the signs of a transform that draws them, else None.
    """

    cast: Cast
    axis: int
    amax: jax.Array | None
    key: jax.Array | None
    signs: jax.Array | None = None


# (array, requests) -> one operand per request, and max|array| in float32 if a kernel computed it.
Quantizer = Callable[
    [jax.Array, tuple[CastRequest, ...]], tuple[tuple[QuantizedOperand, ...], jax.Array | None]
]


def plain_matmul(
    a: PlainOperand, b: PlainOperand, dtype, precision: lax.Precision | None = None
) -> jax.Array:
    """Multiplies [..., M, K] and [..., K, N] (or transposed, as `axis` says) to [..., M, N].

    Leading axes are batch axes. The result has dtype `dtype`. `precision` is that of
    `lax.dot_general`; for None, float32 operands are not rounded to TF32.
    """
    if a.axis == -2 and dtype == jnp.float32 and platform() == "cpu":
        a, b = (PlainOperand(_widened(each.x), each.axis) for each in (a, b))
    batch = tuple(range(a.x.ndim - 2))
    contract = ((a.x.ndim + a.axis,), (b.x.ndim + b.axis,))
    if precision is None and a.x.dtype == jnp.float32:
        precision = lax.Precision.HIGHEST
    return lax.dot_general(
        a.x, b.x, (contract, (batch, batch)), precision, preferred_element_type=dtype
    )


def _widened(x: jax.Array) -> jax.Array:
    """Returns x in float32: XLA multiplies in it on a CPU, and fails in bfloat16 under `jax.vmap`.

    It fails where the first operand is transposed and the second is mapped, as over cotangents.
    XLA may leave out a conversion to bfloat16 and back, and the rounding with it;
    `reduce_precision` is that rounding once more, and stays.
    """
    if x.dtype != jnp.bfloat16:
        return x
    return lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)
