"""GEMMs of activations in bfloat16 with weights in a narrow format, on a GPU's matrix unit.

A GEMM of few rows takes as long as reading its weights. The emulated backend writes the widened
weights to memory first, and then reads them: more bytes than bfloat16 weights have. Here the codes
themselves, which bfloat16 holds exactly, are multiplied, and XLA widens them inside the GEMM:

    scales of rows, or of the tensor   y[m, n] = (sum over k of x[m, k] * code[n, k]) * scale[n]
    scales of tiles along K            y[m, n] = sum over tiles t of
                                         (sum over k in t of x[m, k] * code[n, k]) * scale[n, t]

All sums are float32. Those of tiles are written to memory, 4 M bytes for each tile of a row of
weights, which pays for few rows only. For many rows the weights are widened first. If scales are
powers of two, bfloat16 holds widened weights exactly, and the emulated backend multiplies them.
Otherwise they are float32 numbers of 24 bits, which are split into three bfloat16 numbers of 8 bits
each. That takes three GEMMs; one GEMM of float32 numbers takes as long as fourteen.

XLA widens inside the GEMM where it may use Triton: in programs compiled with
`xla.compiler_options(weights_only=True)`. The codes lie with the contracting axis last, as the
matrix unit reads them.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax.device import hardware
from fp8jax.gemm.backends.operands import Operand, PlainOperand, QuantizedOperand, plain_matmul
from fp8jax.numerics.quantization import dequantize
from fp8jax.numerics.recipe import Recipe
from fp8jax.numerics.tiles import spread

Matmul = Callable[[Operand, Operand, jnp.dtype, str], jax.Array]  # as `Backend.matmul`


def multiplies_codes(recipe: Recipe) -> bool:
    """Whether this module may multiply for a recipe on the default device."""
    return recipe.fwd_x is None and hardware.device().platform == "gpu"


def weights_only_matmul(x: jax.Array, ws: Sequence[QuantizedOperand]) -> Matmul | None:
    """Returns what multiplies x [M, K] with each of these codes [N, K], contracted along K.

    None: nothing here does so faster than the emulated backend, or at all for other layouts.
    """
    in_layout = all(w.axis == -1 and w.q.values.shape[-1] == x.shape[-1] for w in ws)
    if x.dtype != jnp.bfloat16 or not in_layout:
        return None
    if all(_sums_pay(x, w.q.tile[-1]) for w in ws):
        return matmul_codes
    return None if all(w.cast.rule.power_of_two for w in ws) else matmul_parts


def _sums_pay(x: jax.Array, tile: int | None) -> bool:
    """Whether the sums of tiles take at most the bytes of widened weights, 2 for each code."""
    rows, size = x.shape
    return tile is None or (size % tile == 0 and 4 * rows <= 2 * tile)


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
    """Multiplies x [M, K] and codes [N, K] to [M, N], with the sums of tiles; a `Matmul`.

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


def matmul_parts(a: Operand, b: Operand, dtype, accumulation: str) -> jax.Array:
    """Multiplies x [M, K] and codes [N, K] to [M, N], as three bfloat16 parts; a `Matmul`.

    `accumulation` changes nothing: sums are in float32.
    """
    assert isinstance(a, PlainOperand) and isinstance(b, QuantizedOperand)
    rest, y_MN = dequantize(b.q, jnp.float32), jnp.zeros((), jnp.float32)
    for _ in range(3):
        # Not a conversion there and back, which XLA may leave out.
        part = lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
        rest = rest - part
        narrow = PlainOperand(part.astype(jnp.bfloat16), b.axis)
        y_MN = y_MN + plain_matmul(a, narrow, jnp.float32)
    return y_MN.astype(dtype)
