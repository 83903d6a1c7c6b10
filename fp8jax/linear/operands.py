"""TODO docstring."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax.numerics.quantization import Quantized
from fp8jax.numerics.recipe import Cast


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("q",),
    meta_fields=("cast", "axis", "rows"),
)
@dataclasses.dataclass(frozen=True)
class QuantizedOperand:
    """A quantized operand.

    Attributes:
      q: codes and scales.
      cast: that made them.
      axis: of `q.values`, -1 or -2, that is contracted.
      rows: along the axis that is not contracted, without what was filled up to whole blocks; None
        where nothing was.
    """

    q: Quantized
    cast: Cast
    axis: int
    rows: int | None = None


@functools.partial(jax.tree_util.register_dataclass, data_fields=("x",), meta_fields=("axis",))
@dataclasses.dataclass(frozen=True)
class PlainOperand:
    """An operand left in high precision, and the axis, -1 or -2, that is contracted."""

    x: jax.Array
    axis: int


Operand = QuantizedOperand | PlainOperand


class CastRequest(NamedTuple):
    """What a product asks of an operand [..., rows, columns].

    Attributes:
      cast: how.
      axis: -1 or -2, the one that is contracted.
      amax: where the scale comes from instead of the array itself, or None.
      key: for stochastic rounding, else None.
    """

    cast: Cast
    axis: int
    amax: jax.Array | None
    key: jax.Array | None


Quantizer = Callable[
    [jax.Array, tuple[CastRequest, ...]], tuple[tuple[QuantizedOperand, ...], jax.Array | None]
]


# Multiplying --------------------------------------------------------------------------------------


def plain_matmul(a: PlainOperand, b: PlainOperand, dtype) -> jax.Array:
    """[..., M, N]: both without their contracted axes, a leading axis being a batch."""
    batch = tuple(range(a.x.ndim - 2))
    contract = ((a.x.ndim + a.axis,), (b.x.ndim + b.axis,))
    # For float32 operands the default would be TF32 on a GPU.
    precision = lax.Precision.HIGHEST if a.x.dtype == jnp.float32 else None
    return lax.dot_general(
        a.x, b.x, (contract, (batch, batch)), precision, preferred_element_type=dtype
    )
