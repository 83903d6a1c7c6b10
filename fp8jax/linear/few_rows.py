"""GEMMs of one or two rows with weights in a narrow format, as decoding has them.

Such a GEMM takes as long as reading its weights. The emulated backend writes the widened weights to
memory first, and then reads them: more bytes than bfloat16 weights have. Here the widening, the
products and their sums are one reduction, for which XLA reads each code once, for all rows:

    y[m, n] = sum over k of  x[m, k] * code[n, k] * scale[n, k]

The codes lie with the contracting axis last. So a warp reads neighboring codes of one sum in words,
where it would read single bytes of many sums with the other layout. All numbers are float32, so
that only the order of the sums differs from that backend's.
"""

import dataclasses
import operator

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax.linear.operands import Operand, PlainOperand, QuantizedOperand
from fp8jax.numerics.tiles import spread

MOST_ROWS = 2


def has_few_rows(x: jax.Array, w: QuantizedOperand) -> bool:
    """Whether `matmul_few_rows` can multiply x [M, K] in high precision with these codes."""
    return x.ndim == 2 and 0 < x.shape[0] <= MOST_ROWS and w.axis == -1


def contracting_last(operand: QuantizedOperand) -> QuantizedOperand:
    """Returns an operand [K, N], contracted along K, as [N, K]: the same numbers."""
    if operand.axis == -1:
        return operand
    q = operand.q
    q = dataclasses.replace(
        q, values=q.values.swapaxes(-1, -2), scale=q.scale.swapaxes(-1, -2), tile=q.tile[::-1]
    )
    return dataclasses.replace(operand, q=q, axis=-1)


def matmul_few_rows(a: Operand, b: Operand, dtype, accumulation: str) -> jax.Array:
    """Multiply x [M, K] and codes [N, K] to [M, N], a `Backend.matmul`; only if `has_few_rows`.

    `accumulation` changes nothing: sums are in float32.
    """
    assert isinstance(a, PlainOperand) and isinstance(b, QuantizedOperand)
    w_NK, scale, (of_rows, of_K) = b.q.values.astype(jnp.float32), b.q.float_scale(), b.q.tile
    if of_K is not None:
        w_NK = w_NK * spread(scale, b.q.tile, w_NK.shape)
    terms = tuple(w_NK * row[None].astype(jnp.float32) for row in a.x)
    # One reduction of all rows: XLA would write the widened codes, to share them among several.
    zeros = (jnp.zeros((), jnp.float32),) * len(terms)
    sums = lax.reduce(terms, zeros, lambda x, y: tuple(map(operator.add, x, y)), (1,))
    y_MN = jnp.stack(sums)
    if of_K is None:
        y_MN = y_MN * spread(scale, (of_rows, 1), (w_NK.shape[0], 1)).T
    return y_MN.astype(dtype)
