"""TODO docstring."""

import functools

import jax
import jax.numpy as jnp

from fp8jax.kernels.hopper import pad_to_blocks
from fp8jax.kernels.partition import (
    block_scaled_matmul,
    cast_rows_columns,
    cast_transpose,
    quantize_blocks,
    quantize_tiles,
    row_scaled_matmul,
)
from fp8jax.kernels.swiglu import Producer
from fp8jax.kernels.swiglu_quantize import cast_produced, tiles_produced
from fp8jax.linear.emulated import quantize_each
from fp8jax.linear.operands import CastRequest, Operand, QuantizedOperand
from fp8jax.linear.xla import matmul_xla
from fp8jax.numerics.quantization import Quantized
from fp8jax.numerics.recipe import Cast
from fp8jax.numerics.tiles import ROW, TENSOR, TILE128, tensor_amax, tile_amax

Fused = dict[int, tuple[jax.Array, jax.Array]]  # contracted axis of x -> codes, scale


def quantize_fused(
    x: jax.Array, requests: tuple[CastRequest, ...]
) -> tuple[tuple[QuantizedOperand, ...], jax.Array | None]:
    """The same by kernels/quantize.py, and the amax where a kernel found it. Codes have the
    contracted axis last, and are filled up to whole blocks."""
    cast, axes = requests[0].cast, {request.axis for request in requests}
    several = any(request.cast != cast for request in requests)
    if several or (cast.tile == TILE128 and x.dtype != jnp.bfloat16):
        return quantize_each(x, requests)
    padded, amax = pad_to_blocks(x), None
    if cast.tile == TENSOR:
        fused, amax = _whole(x, padded, cast, requests[0].amax, axes)
    elif cast.tile == ROW:
        fused = _vectors(padded, cast, axes)
    elif cast.tile == TILE128:
        fused = _tiles(padded, cast, axes)
    else:
        fused = _blocks(padded, cast, axes)
    return _as_requested(fused, requests, x.shape), amax


def _as_requested(
    fused: Fused, requests: tuple[CastRequest, ...], shape: tuple[int, ...]
) -> tuple[QuantizedOperand, ...]:
    """Of each request, from the codes of an array of such a shape."""
    cast = requests[0].cast
    tile = cast.tile.per_axis(2, -1)
    coded = {
        axis: QuantizedOperand(
            Quantized(codes, scale, None, tile), cast, -1, shape[0 if axis == -1 else 1]
        )
        for axis, (codes, scale) in fused.items()
    }
    return tuple(coded[request.axis] for request in requests)


def _whole(x, padded, cast: Cast, given, axes: set[int]) -> tuple[Fused, jax.Array]:
    """One scale, of the amax that is given or of x; and x's amax."""
    source = tensor_amax(x) if given is None else given.astype(jnp.float32)
    scale, _ = cast.scale(source, cast.format)
    plain, transposed, amax = cast_transpose(
        padded, scale, cast.format, values=-1 in axes, transposed=-2 in axes
    )
    checked = _checked(scale, amax, source)
    found = {-1: plain, -2: transposed}
    return {axis: (codes, checked) for axis, codes in found.items() if codes is not None}, amax


def _checked(scale: jax.Array, *amaxes: jax.Array) -> jax.Array:
    """[1, 1]: the scale of a whole array, NaN where an amax is not finite."""
    finite = functools.reduce(jnp.logical_and, map(jnp.isfinite, amaxes))
    return jnp.where(finite, scale, jnp.nan).astype(jnp.float32).reshape(1, 1)


def _vectors(padded, cast: Cast, axes: set[int]) -> Fused:
    """One scale a row along either axis; that of rows which were filled up is 1."""
    amax = {axis: tile_amax(padded, cast.tile.per_axis(2, axis)).reshape(-1) for axis in axes}
    scale = {axis: cast.scale(a, cast.format)[0].astype(jnp.float32) for axis, a in amax.items()}
    rows, columns = cast_rows_columns(padded, scale.get(-1), scale.get(-2), cast.format)
    checked = {axis: jnp.where(jnp.isfinite(amax[axis]), scale[axis], jnp.nan) for axis in axes}
    found = {-1: rows, -2: columns}
    return {
        axis: (codes, checked[axis].reshape(-1, 1))
        for axis, codes in found.items()
        if codes is not None
    }


def _tiles(padded, cast: Cast, axes: set[int]) -> Fused:
    """1x128 along either axis."""
    both = quantize_tiles(padded, cast.format, cast.scale, rows=-1 in axes, columns=-2 in axes)
    found = zip((-1, -2), both, strict=True)
    return {axis: (codes.values, codes.scale.T) for axis, codes in found if codes is not None}


def quantize_swiglu(
    producer: Producer, sources: tuple[jax.Array, ...], each: tuple[tuple[CastRequest, ...], ...]
) -> tuple[tuple[tuple[QuantizedOperand, ...], jax.Array | None], ...]:
    """`_quantize_fused` of each result of the producer, for recipes that `fuses` takes."""
    casts = [requests[0].cast for requests in each]
    axes = tuple(tuple(request.axis for request in requests) for requests in each)
    padded, shape = tuple(map(pad_to_blocks, sources)), sources[0].shape
    if casts[0].tile == TILE128:
        tiles = tiles_produced(producer, padded, casts[0].format, casts[0].scale, axes)
        found = [({a: (c.values, c.scale.T) for a, c in of.items()}, None) for of in tiles]
    else:
        given = [r[0].amax.astype(jnp.float32) for r in each if r[0].amax is not None]  # all
        scales = [c.scale(amax, c.format)[0] for c, amax in zip(casts, given, strict=True)]
        formats = tuple(cast.format for cast in casts)
        whole = cast_produced(producer, padded, jnp.stack(scales), formats, axes)
        found = []
        for (of, amax), scale, source in zip(whole, scales, given, strict=True):
            checked = _checked(scale, source if amax is None else amax, source)
            found.append(({axis: (codes, checked) for axis, codes in of.items()}, amax))
    return tuple(
        (_as_requested(fused, requests, shape), amax)
        for (fused, amax), requests in zip(found, each, strict=True)
    )


def _blocks(padded, cast: Cast, axes: set[int]) -> Fused:
    """128x128: codes as they are or transposed, with the same scales."""
    fused = {}
    for axis in axes:
        codes = quantize_blocks(padded, cast.format, cast.scale, transposed=axis == -2)
        fused[axis] = codes.values, codes.scale if axis == -1 else codes.scale.T
    return fused


def matmul_pallas(a: Operand, b: Operand, dtype) -> jax.Array:
    """As `_xla` where scales are of whole tensors, else by kernels/row_gemm.py and
    block_gemm.py."""
    assert isinstance(a, QuantizedOperand) and isinstance(b, QuantizedOperand)
    if a.cast.tile == b.cast.tile == TENSOR:
        return matmul_xla(a, b, dtype)[: _rows(a), : _rows(b)]
    (left, sa), (right, sb) = _contracted_last(a), _contracted_last(b)
    if a.cast.separable and b.cast.separable:
        sa, sb = (jnp.broadcast_to(s[0], v.shape[:1]) for s, v in ((sa, left), (sb, right)))
        y = row_scaled_matmul(left, right, sa, sb, dtype)
    else:
        y = block_scaled_matmul(left, right, sa, sb, dtype)
    return y[: _rows(a), : _rows(b)]


def _rows(operand: QuantizedOperand) -> int:
    """Of the operand as it came, along the axis that is not contracted."""
    free = -2 if operand.axis == -1 else -1
    return operand.q.values.shape[free] if operand.rows is None else operand.rows


def _contracted_last(operand: QuantizedOperand) -> tuple[jax.Array, jax.Array]:
    """Codes [rows, K] and scales [K / 128 or 1, rows or blocks of them or 1], in whole blocks."""
    values, scale = operand.q.values, operand.q.float_scale()
    if operand.axis == -2:
        values = values.T
    else:
        scale = scale.T
    values = pad_to_blocks(values)
    missing = 0 if operand.cast.tile.free != 1 else values.shape[0] - scale.shape[1]
    return values, jnp.pad(scale, ((0, 0), (0, missing)), constant_values=1)
