"""The backend `pallas`: the Hopper kernels of fp8jax/kernels/.

The quantization kernels quantize an operand for both of its GEMMs in one pass, where both casts are
the same. They write the codes with the contracting axis last, padded to whole blocks. Scales of
whole tensors are multiplied as in the backend `xla`; scales of rows and of 128 elements are
multiplied inside kernels/row_gemm.py, which has fast accumulation only, and kernels/block_gemm.py,
which adds up blocks of 128 in float32.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fp8jax.gemm.backends.emulated import (
    materialized,
    matmul_emulated,
    numbers_of,
    quantize_each,
    quantize_one,
    result_scale,
)
from fp8jax.gemm.backends.operands import CastRequest, Operand, QuantizedOperand
from fp8jax.gemm.backends.refusals import has_tile_kernel, kernels_refuse
from fp8jax.gemm.backends.xla import matmul_xla
from fp8jax.kernels.hopper import BLOCK, pad_to_blocks, stored
from fp8jax.kernels.partition import (
    block_scaled_matmul,
    cast_produced,
    cast_rows_columns,
    cast_transpose,
    quantize_blocks,
    quantize_tiles,
    rotated_amax,
    rotated_codes,
    rotated_errors,
    rotated_lengths,
    row_scaled_matmul,
    scaled_matmul,
    tiles_produced,
)
from fp8jax.kernels.rotate import SIZES as ROTATED_ROWS
from fp8jax.kernels.row_gemm import fits_scaled
from fp8jax.kernels.swiglu import Producer
from fp8jax.numerics.formats import Format, key_words, nan_unless
from fp8jax.numerics.quantization import ROTATION, Quantized, Rotation
from fp8jax.numerics.recipe import Cast
from fp8jax.numerics.scales import Eden, FourOverSix
from fp8jax.numerics.tiles import BLOCK128, ROW, TENSOR, TILE128, tensor_amax, tile_amax, tile_grid

_KERNEL_TILES = (TENSOR, ROW, TILE128, BLOCK128)


class _Codes(NamedTuple):
    """Codes with the contracting axis last, and their scales in the layout of `Quantized`."""

    values: jax.Array
    scale: jax.Array


class _Fused(NamedTuple):
    """What one pass over an array [M, K] computes; None for what was not requested.

    Attributes:
      rows: codes [M, K] of the rows, for a GEMM that contracts axis -1.
      columns: codes [K, M] of the columns, for a GEMM that contracts axis -2.
      amax: max|x| in float32, if the kernel computed it.
    """

    rows: _Codes | None
    columns: _Codes | None
    amax: jax.Array | None


# Quantizing ---------------------------------------------------------------------------------------


def quantize_fused(
    x: jax.Array, requests: tuple[CastRequest, ...]
) -> tuple[tuple[QuantizedOperand, ...], jax.Array | None]:
    """Quantizes `x` [M, K] for all requests in one pass; returns max|x|, too, if a kernel has it.

    Requests for tiles and for blocks of 128 take one pass each. There is no kernel for other
    requests with different casts, nor for tiles of 128 in arrays that are not bfloat16, or that
    round stochastically or have a rule or a format of which there is none (`has_tile_kernel`).
    `quantize_each` handles those, and casts to other tiles, whose transform has a kernel.
    """
    cast = requests[0].cast
    if any(request.cast.hadamard > 1 for request in requests):
        x = materialized(x, requests)
        return tuple(_quantize_rotated(x, request) for request in requests), None
    if not all(request.cast.tile in _KERNEL_TILES for request in requests):
        return quantize_each(x, requests)
    if any(request.cast != cast for request in requests):
        if all(request.cast.tile in (TILE128, BLOCK128) for request in requests):
            return tuple(quantize_fused(x, (request,))[0][0] for request in requests), None
        return quantize_each(x, requests)
    if cast.tile == TILE128 and x.dtype != jnp.bfloat16:
        return quantize_each(x, requests)
    if cast.tile in (TILE128, BLOCK128) and not has_tile_kernel(cast):
        return quantize_each(x, requests)
    axes = {request.axis for request in requests}
    rows, columns = -1 in axes, -2 in axes
    padded = pad_to_blocks(x)
    if cast.tile == TENSOR:
        fused = _quantize_tensor(x, padded, cast, requests[0].amax, rows, columns)
    elif cast.tile == ROW:
        fused = _quantize_rows(padded, cast, rows, columns)
    elif cast.tile == TILE128:
        fused = _quantize_tiles(padded, cast, rows, columns)
    else:
        fused = _quantize_blocks(padded, cast, rows, columns)
    return _operands(fused, requests, x.shape), fused.amax


def _quantize_rotated(x: jax.Array, request: CastRequest) -> QuantizedOperand:
    """Quantizes `x` for one request; with the kernels of rotate.py, where there is one for it."""
    cast = request.cast
    # Where signs are drawn, the contracting axis comes first (`quantize_one`).
    rows, columns = x.shape if request.axis == -2 else x.shape[::-1]
    has_kernel = (
        (request.axis == -2 or cast.redrawn)
        and cast.hadamard in ROTATED_ROWS
        and cast.format.name in ("e2m1", "e4m3")
        and cast.tile.free == 1
        and _fits(cast)
        and rows % cast.hadamard == 0
        and columns % BLOCK == 0
    )
    return quantize_one(x, request, _ROTATION if has_kernel else ROTATION)


def _fits(cast: Cast) -> bool:
    """Whether the kernels have the cast's tiles: whole blocks of the transform, or parts of one for
    `Eden`. For a cast without new signs or choices of scales, XLA transforms x first, elsewhere."""
    whole = (cast.tile.contract or cast.hadamard) % cast.hadamard == 0
    chooses = cast.redrawn or isinstance(cast.rule, FourOverSix)
    return whole or isinstance(cast.rule, Eden) or not chooses


def _codes_of_rotated(
    x: jax.Array, size: int, axis: int, reciprocal: jax.Array, fmt: Format, key: Any, signs: Any
) -> jax.Array:
    words = None if key is None else key_words(key)
    return rotated_codes(x, reciprocal, fmt, size, words, signs)


# Of rows only: `_quantize_rotated` takes no other axis.
_ROTATION = Rotation(
    lambda x, size, axis, tile, signs: rotated_amax(x, size, tile, signs),
    _codes_of_rotated,
    lambda x, size, axis, reciprocal, fmt, signs: rotated_errors(x, reciprocal, fmt, size),
    lambda x, size, axis, reciprocal, fmt, signs: rotated_lengths(x, reciprocal, fmt, size, signs),
)


def _operands(
    fused: _Fused, requests: tuple[CastRequest, ...], shape: tuple[int, ...]
) -> tuple[QuantizedOperand, ...]:
    """Returns the operand of each request, from the codes of an array of that unpadded shape."""
    operands = []
    for request in requests:
        codes = fused.rows if request.axis == -1 else fused.columns
        assert codes is not None  # it was requested
        q = Quantized(codes.values, codes.scale, None, request.cast.tile.per_axis(2, -1))
        length = shape[0] if request.axis == -1 else shape[1]
        operands.append(QuantizedOperand(q, request.cast, -1, length))
    return tuple(operands)


def _quantize_tensor(
    x: jax.Array, padded: jax.Array, cast: Cast, amax: jax.Array | None, rows: bool, columns: bool
) -> _Fused:
    """Quantizes with one scale, from the given amax or else from max|x|."""
    source = tensor_amax(x) if amax is None else amax.astype(jnp.float32)
    scale, _ = cast.rule(source, cast.format)
    values, transposed, own_amax = cast_transpose(
        padded, scale, cast.format, values=rows, transposed=columns
    )
    checked = _checked(scale, own_amax, source)
    return _Fused(
        rows=None if values is None else _Codes(values, checked),
        columns=None if transposed is None else _Codes(transposed, checked),
        amax=own_amax,
    )


def _checked(scale: jax.Array, *amaxes: jax.Array) -> jax.Array:
    """Returns the scale of a whole array as [1, 1]; NaN if an amax is not finite."""
    finite = functools.reduce(jnp.logical_and, map(jnp.isfinite, amaxes))
    return nan_unless(finite, scale.astype(jnp.float32)).reshape(1, 1)


def _quantize_rows(padded: jax.Array, cast: Cast, rows: bool, columns: bool) -> _Fused:
    """Quantizes with one scale per row or per column; a padded row or column has scale 1."""
    axes: list[int] = []
    if rows:
        axes.append(-1)
    if columns:
        axes.append(-2)
    amaxes = [tile_amax(padded, cast.tile.per_axis(2, axis)).reshape(-1) for axis in axes]
    scales = [cast.rule(amax, cast.format)[0].astype(jnp.float32) for amax in amaxes]
    row_scale = scales[0] if rows else None
    column_scale = scales[-1] if columns else None
    row_values, column_values = cast_rows_columns(padded, row_scale, column_scale, cast.format)
    checked = [
        nan_unless(jnp.isfinite(amax), scale) for amax, scale in zip(amaxes, scales, strict=True)
    ]
    return _Fused(
        rows=None if row_values is None else _Codes(row_values, checked[0].reshape(-1, 1)),
        columns=(
            None if column_values is None else _Codes(column_values, checked[-1].reshape(-1, 1))
        ),
        amax=None,
    )


def _quantize_tiles(padded: jax.Array, cast: Cast, rows: bool, columns: bool) -> _Fused:
    """Quantizes in tiles of 128 elements along the contracting axis."""
    of_rows, of_columns = quantize_tiles(padded, cast.format, cast.rule, rows=rows, columns=columns)
    return _Fused(
        rows=None if of_rows is None else _Codes(of_rows.values, of_rows.scale.T),
        columns=None if of_columns is None else _Codes(of_columns.values, of_columns.scale.T),
        amax=None,
    )


def _quantize_blocks(padded: jax.Array, cast: Cast, rows: bool, columns: bool) -> _Fused:
    """Quantizes in blocks of 128x128; codes of rows and of columns have the same scales."""
    of_rows = of_columns = None
    if rows:
        codes = quantize_blocks(padded, cast.format, cast.rule, transposed=False)
        of_rows = _Codes(codes.values, codes.scale)
    if columns:
        codes = quantize_blocks(padded, cast.format, cast.rule, transposed=True)
        of_columns = _Codes(codes.values, codes.scale.T)
    return _Fused(rows=of_rows, columns=of_columns, amax=None)


def quantize_swiglu(
    producer: Producer, sources: tuple[jax.Array, ...], each: tuple[tuple[CastRequest, ...], ...]
) -> tuple[tuple[tuple[QuantizedOperand, ...], jax.Array | None], ...]:
    """Applies `quantize_fused` to each result of the producer, without storing the results.

    Args:
      producer: an elementwise function such as SwiGLU (kernels/swiglu.py).
      sources: its arguments, [M, K] each.
      each: the requests for each result, of recipes for which `can_fuse_swiglu` is True.
    """
    padded, shape = tuple(map(pad_to_blocks, sources)), sources[0].shape
    if each[0][0].cast.tile == TILE128:
        results = _swiglu_tiles(producer, padded, each)
    else:
        results = _swiglu_tensors(producer, padded, each)
    return tuple(
        (_operands(fused, requests, shape), fused.amax)
        for fused, requests in zip(results, each, strict=True)
    )


def _requested_axes(each: tuple[tuple[CastRequest, ...], ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(request.axis for request in requests) for requests in each)


def _swiglu_tiles(
    producer: Producer, padded: tuple[jax.Array, ...], each: tuple[tuple[CastRequest, ...], ...]
) -> list[_Fused]:
    cast = each[0][0].cast
    blocks = [i for i, requests in enumerate(each) if requests[-1].cast.tile == BLOCK128]
    results = tiles_produced(
        producer, padded, cast.format, cast.rule, _requested_axes(each), frozenset(blocks)
    )
    fused = []
    for by_axis in results:
        codes = {axis: _Codes(c.values, c.scale.T) for axis, c in by_axis.items()}
        fused.append(_from_axes(codes, None))
    return fused


def _swiglu_tensors(
    producer: Producer, padded: tuple[jax.Array, ...], each: tuple[tuple[CastRequest, ...], ...]
) -> list[_Fused]:
    casts = [requests[0].cast for requests in each]
    amaxes = []
    for requests in each:
        assert requests[0].amax is not None  # `can_fuse_swiglu` requires delayed scaling
        amaxes.append(requests[0].amax.astype(jnp.float32))
    scales = tuple(c.rule(amax, c.format)[0] for c, amax in zip(casts, amaxes, strict=True))
    formats = tuple(cast.format for cast in casts)
    results = cast_produced(producer, padded, scales, formats, _requested_axes(each))
    fused = []
    for (by_axis, own_amax), scale, amax in zip(results, scales, amaxes, strict=True):
        checked = _checked(scale, amax if own_amax is None else own_amax, amax)
        codes = {axis: _Codes(values, checked) for axis, values in by_axis.items()}
        fused.append(_from_axes(codes, own_amax))
    return fused


def _from_axes(codes: dict[int, _Codes], amax: jax.Array | None) -> _Fused:
    return _Fused(
        rows=codes[-1] if -1 in codes else None,
        columns=codes[-2] if -2 in codes else None,
        amax=amax,
    )


# Multiplying --------------------------------------------------------------------------------------


def matmul_pallas(a: Operand, b: Operand, dtype, accumulation: str) -> jax.Array:
    """Multiplies two operands; returns [M, N] in `dtype`, without the padding.

    `accumulation` is "fast" unless both operands have one scale: `pallas_refuses` excludes others.
    Scales of whole tensors are multiplied as in `matmul_xla`, other scales inside the kernels. One
    operand in high precision is multiplied as `emulated` does it.
    """
    if not (isinstance(a, QuantizedOperand) and isinstance(b, QuantizedOperand)):
        return matmul_emulated(a, b, dtype, accumulation)
    if kernels_refuse(a.cast, b.cast, accumulation) is not None:
        # Of a cast by a kernel and one by XLA, only the first is padded.
        k = min(each.q.values.shape[each.axis] for each in (a, b))
        return _matmul_bf16(_unpadded(a, k), _unpadded(b, k), dtype, accumulation)
    if a.cast.tile == b.cast.tile == TENSOR:
        return matmul_xla(a, b, dtype, accumulation)[: _free_length(a), : _free_length(b)]
    assert accumulation == "fast"
    (left, sa), (right, sb) = _contracted_last(a), _contracted_last(b)
    if a.cast.separable and b.cast.separable:
        sa, sb = (jnp.broadcast_to(s[0], v.shape[:1]) for s, v in ((sa, left), (sb, right)))
        y = row_scaled_matmul(left, right, sa, sb, dtype)
    else:
        y = block_scaled_matmul(left, right, sa, sb, dtype)
    return y[: _free_length(a), : _free_length(b)]


def _matmul_bf16(
    a: QuantizedOperand, b: QuantizedOperand, dtype: jnp.dtype, accumulation: str
) -> jax.Array:
    """Multiplies operands whose numbers bfloat16 holds, as the backend `emulated` does."""
    scale, numbers = result_scale(a, b), [numbers_of(each, jnp.bfloat16) for each in (a, b)]
    (m, k), (n, _) = (
        x.shape if each.axis == -1 else x.shape[::-1]
        for x, each in zip(numbers, (a, b), strict=True)
    )
    if scale is None or dtype != jnp.bfloat16 or not fits_scaled(m, k, n):
        return matmul_emulated(a, b, dtype, accumulation)
    return scaled_matmul(numbers[0], numbers[1], scale, (a.axis, b.axis), dtype)


def _unpadded(operand: QuantizedOperand, k: int) -> QuantizedOperand:
    """Cuts off padding: the free axis gets its own length, the contracting one k."""
    q, free = operand.q, _free_length(operand)
    shape = (free, k) if operand.axis == -1 else (k, free)
    if q.values.shape == shape:
        return operand
    scales = (count for count, _ in tile_grid(shape, q.tile))
    of_values, of_scales = (tuple(map(slice, counts)) for counts in (shape, scales))
    q = dataclasses.replace(q, values=q.values[of_values], scale=q.scale[of_scales])
    return dataclasses.replace(operand, q=q, rows=None)


def _free_length(operand: QuantizedOperand) -> int:
    """Returns the unpadded length of the operand's free axis."""
    if operand.rows is not None:
        return operand.rows
    return operand.q.values.shape[-2 if operand.axis == -1 else -1]


def _contracted_last(operand: QuantizedOperand) -> tuple[jax.Array, jax.Array]:
    """Returns the codes [rows, K], padded to whole blocks, and their scales.

    The scales are [K / 128 or 1, n], where n is the number of rows, of blocks of rows, or 1.
    """
    values, scale = operand.q.values, operand.q.float_scale()
    if operand.cast.format.bits == 4:  # codes by XLA; conversions from and to them are exact
        values = values.astype(jnp.float32).astype(stored(operand.cast.format))
    if operand.axis == -2:
        values = values.T
    else:
        scale = scale.T
    values = pad_to_blocks(values)
    missing = 0
    if operand.cast.tile.free == 1:
        missing = values.shape[0] - scale.shape[1]
    return values, jnp.pad(scale, ((0, 0), (0, missing)), constant_values=1)
