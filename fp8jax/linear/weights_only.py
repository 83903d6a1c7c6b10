"""GEMMs of activations in bfloat16 with weights in a narrow format, on a GPU's matrix unit.

A GEMM of few rows takes as long as reading its weights. The emulated backend writes the widened
weights to memory first, and then reads them: more bytes than bfloat16 weights have. Here the codes
themselves, which bfloat16 holds exactly, are multiplied, and XLA widens them inside the GEMM:

    scales of rows, or of the tensor   y[m, n] = (sum over k of x[m, k] * code[n, k]) * scale[n]
    scales of tiles along K            y[m, n] = sum over tiles t of
                                         (sum over k in t of x[m, k] * code[n, k]) * scale[n, t]

All sums are float32. Those of tiles are written to memory, 4 M bytes for each tile of a row of
weights; `multiplies_codes` says for which M that pays.

XLA widens inside the GEMM where it may use Triton: in programs compiled with
`xla.compiler_options(weights_only=True)`. The codes lie with the contracting axis last, as the
matrix unit reads them.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax.linear.operands import Operand, PlainOperand, QuantizedOperand
from fp8jax.numerics.tiles import spread


def multiplies_codes(x: jax.Array, w: QuantizedOperand) -> bool:
    """Whether `matmul_codes` multiplies x [M, K] with these codes, and pays.

    The sums of tiles may take at most the bytes of widened weights, 2 for each code.
    """
    size, tile = x.shape[-1], w.q.tile[-1]
    if x.ndim != 2 or x.dtype != jnp.bfloat16 or w.axis != -1 or w.q.values.shape[-1] != size:
        return False
    return tile is None or (size % tile == 0 and 4 * x.shape[0] <= 2 * tile)


def contracting_last(operand: QuantizedOperand) -> QuantizedOperand:
    """Returns an operand [K, N], contracted along K, as [N, K]: the same numbers."""
    if operand.axis == -1:
        return operand
    q = operand.q
    q = dataclasses.replace(
        q, values=q.values.swapaxes(-1, -2), scale=q.scale.swapaxes(-1, -2), tile=q.tile[::-1]
    )
    return dataclasses.replace(operand, q=q, axis=-1)


def matmul_codes(a: Operand, b: Operand, dtype, accumulation: str) -> jax.Array:
    """Multiply x [M, K] and codes [N, K] to [M, N], a `Backend.matmul`; see `multiplies_codes`.

    `accumulation` changes nothing: sums are in float32.
    """
    assert isinstance(a, PlainOperand) and isinstance(b, QuantizedOperand)
    x_MK, w_NK = a.x, b.q.values.astype(a.x.dtype)
    (size, K), (of_rows, of_K) = w_NK.shape, b.q.tile
    tile = K if of_K is None else of_K
    x_MTK, w_NTK = x_MK.reshape(-1, K // tile, tile), w_NK.reshape(size, K // tile, tile)
    contract_K, batch_T = ((2,), (2,)), ((1,), (1,))
    sums_TMN = lax.dot_general(
        x_MTK, w_NTK, (contract_K, batch_T), preferred_element_type=jnp.float32
    )
    scale_NT = spread(b.q.float_scale(), (of_rows, 1), (size, K // tile))
    return (sums_TMN * scale_NT.T[:, None]).sum(0).astype(dtype)
