"""GEMMs of one or two rows with weights in a narrow format, as decoding has them.

Such a GEMM takes as long as reading its weights. The emulated backend writes the widened weights to
memory first, and then reads them: more bytes than bfloat16 weights have. Here the widening, the
products and their sums are one reduction, for which XLA reads each code once:

    y[n] = sum over blocks b of  scale[b, n] * (sum over k in b of  x[k] * code[k, n])

All numbers are float32, so that only the order of the sums differs from that backend's. XLA shares
the reading of codes among two rows, not more.
"""

import jax
import jax.numpy as jnp

from fp8jax.linear.operands import Operand, PlainOperand, QuantizedOperand
from fp8jax.numerics.quantization import Quantized
from fp8jax.numerics.tiles import spread

MOST_ROWS = 2
_BLOCK = 128  # elements of a partial sum where the scale is that of the whole axis


def has_few_rows(x: jax.Array, w: QuantizedOperand) -> bool:
    """Whether `matmul_few_rows` can multiply x [M, K] in high precision with these codes."""
    return x.ndim == 2 and 0 < x.shape[0] <= MOST_ROWS and w.axis == -2 and _block(w.q) > 0


def _block(q: Quantized) -> int:
    """Returns how many elements along K a partial sum has; 0 if blocks do not divide K."""
    size, tile = q.values.shape[0], q.tile[0]
    if tile is None:
        return _BLOCK if size % _BLOCK == 0 else size
    return tile if size % tile == 0 else 0


def matmul_few_rows(a: Operand, b: Operand, dtype, accumulation: str) -> jax.Array:
    """Multiply x [M, K] and codes [K, N] to [M, N], a `Backend.matmul`; only if `has_few_rows`.

    `accumulation` changes nothing: sums are in float32.
    """
    assert isinstance(a, PlainOperand) and isinstance(b, QuantizedOperand)
    block, (size, columns) = _block(b.q), b.q.values.shape
    blocks = size // block
    codes_BKN = b.q.values.reshape(blocks, block, columns).astype(jnp.float32)
    tile = (None if b.q.tile[0] is None else 1, b.q.tile[1])
    scale_BN = spread(b.q.float_scale(), tile, (blocks, columns))
    rows = []
    # Not one reduction for all rows: XLA would write the widened codes first.
    for row in a.x:
        x_BK1 = row.astype(jnp.float32).reshape(blocks, block, 1)
        rows.append(jnp.sum(jnp.sum(codes_BKN * x_BK1, axis=1) * scale_BN, axis=0))
    return jnp.stack(rows).astype(dtype)
