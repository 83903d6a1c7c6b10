"""Quantized arrays: `quantize` brings a tensor into a narrow format, `dequantize` back.

    x ≈ values * scale,      values = cast(x * (1 / scale))

The values are multiplied by the reciprocal, which is computed once per tile. For x / scale, XLA
uses that multiplication for some shapes and not for others, and the values would depend on it.

With delayed scaling, the scale comes from a history of amaxes (gemm/histories/amax_history.py)
instead of the tensor itself, so the cast does not wait for a reduction over the whole tensor. A
finite value above every amax of the history saturates silently. An infinity or a NaN must not, so
`quantize` also computes the tensor's own amax, in parallel with the cast, and returns a NaN scale
where that amax is not finite. The result of the GEMM is then NaN, and the training step is
rejected.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Shaped

from fp8jax.lookup import brief
from fp8jax.numerics.formats import (
    Format,
    FormatLike,
    as_format,
    cast_unchecked,
    check_float,
    check_result_dtype,
    check_rounding,
    draws,
    nan_unless,
    places,
)
from fp8jax.numerics.hadamard import hadamard_parts, joined, split
from fp8jax.numerics.scales import ScaleRule, as_scale_rule
from fp8jax.numerics.tiles import TileLike, as_tile, spread, tile_amax, tile_grid


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """A quantized array: x ≈ values * scale, or values * scale * tensor_scale if there is one.

    Attributes:
      values: the codes, with x's shape and the format's dtype.
      scale: one scale per tile: x's rank, and ceil(dim / tile) entries along each axis (1 where the
        tile is None). float32; float8_e8m0fnu for the rules e8m0, float8_e4m3fn for nvfp4.
      tensor_scale: a float32 scalar for the rule nvfp4, else None.
      tile: the tile's size along each axis. Static: the shapes alone do not determine it.

    In a stack of quantized arrays each leaf has leading axes; only slices of it can be dequantized.

    Example:
      >>> q = fp8jax.quantize(jnp.ones((256, 512)), "e4m3", fp8jax.BLOCK128)
      >>> q.values.dtype.name, q.values.shape, q.scale.shape, q.tile
      ('float8_e4m3fn', (256, 512), (2, 4), (128, 128))
    """

    values: Shaped[Array, "..."]
    scale: Shaped[Array, "..."]
    tensor_scale: Float[Array, "..."] | None
    tile: tuple[int | None, ...] = dataclasses.field(metadata={"static": True})

    def float_scale(self) -> Float[Array, "..."]:
        """Returns the float32 scale of each tile, including `tensor_scale` if there is one."""
        scale = self.scale.astype(jnp.float32)
        return scale if self.tensor_scale is None else scale * self.tensor_scale


def quantize(
    x: Float[Array, "..."],
    fmt: FormatLike,
    tile: TileLike,
    *,
    contract_axis: int = -1,
    scale: str | ScaleRule = "fp32",
    amax: Float[Array, "..."] | None = None,
    rounding: str = "nearest",
    key: Shaped[Array, "..."] | None = None,
) -> Quantized:
    """Quantizes `x` to format `fmt` with one scale per tile.

    Args:
      x: an array of any shape with at least one axis, in a float dtype.
      fmt: a key of `FORMATS`, a `Format` or its dtype, for the values.
      tile: how many elements share a scale: a `Tile`, a key of `TILES`, or (free, contract).
      contract_axis: the axis that the GEMM will contract.
      scale: a key of `SCALES`, `Pow2(margin)` or `Constant(value)`.
      amax: the amax to compute the scale from instead of x's own, broadcast to the scale's shape
        (delayed scaling: the maximum of a history).
      rounding, key: as in `cast`.

    Returns:
      A `Quantized`. A scale is NaN where the tile's own amax or the given amax is not finite, and
      where a traced amax is negative.

    Raises:
      TypeError: for arguments of other types, and arrays that are not of a float dtype of 16 or
        more bits.
      ValueError: for an unknown name, an axis out of range, a missing or an unused key, and an amax
        that is negative or does not broadcast to the scales.

    Example:
      >>> x = jnp.array([[1.0, 2.0, 448.0], [0.5, 1.0, 3.5]])
      >>> fp8jax.quantize(x, "e4m3", "tensor").scale
      Array([[1.]], dtype=float32)
      >>> q = fp8jax.quantize(x, "e4m3", fp8jax.ROW)
      >>> q.scale
      Array([[1.       ],
             [0.0078125]], dtype=float32)
      >>> q.values
      Array([[1, 2, 448],
             [64, 128, 448]], dtype=float8_e4m3fn)
    """
    check_float("x", x)
    check_rounding(as_format(fmt), rounding, key)
    if amax is not None:
        axes = as_tile(tile).per_axis(x.ndim, contract_axis)
        grid = tuple(n for n, _ in tile_grid(x.shape, axes))
        amax = _checked_amax(amax, grid)
    return quantize_unchecked(
        x, fmt, tile, contract_axis=contract_axis, scale=scale, amax=amax, key=key
    )


def _checked_amax(amax: Any, grid: tuple[int, ...]) -> jax.Array:
    """Returns an amax that broadcasts to `grid`; negative entries raise, NaN replaces traced ones.

    Raises TypeError for an amax that is not an array of floats.
    """
    check_float("amax", amax)
    try:
        fits = np.broadcast_shapes(amax.shape, grid) == grid
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"amax has shape {amax.shape}, which does not broadcast to the shape {grid} of the"
            " scales: give one amax per tile, or a scalar"
        )
    if isinstance(amax, jax.core.Tracer) or not getattr(amax, "is_fully_addressable", True):
        return nan_unless(amax >= 0, amax)
    values = np.asarray(amax, np.float32)
    if (values < 0).any():
        raise ValueError(f"amax must be max|x|, which is not negative, got {values.min()}")
    return amax


class Rotation(NamedTuple):
    """How x is transformed (hadamard.py) and cast: by XLA, or by kernels (kernels/rotate.py).

    Attributes:
      block_amax: (x, size, axis) -> max|x'| of each block of `size` elements along the axis.
      codes: (x, size, axis, reciprocals [..., blocks, ...], format, key or None) -> codes of x'.
    """

    block_amax: Callable[..., Float[Array, "..."]]
    codes: Callable[..., Shaped[Array, "..."]]


def _block_amax(x: jax.Array, size: int, axis: int) -> jax.Array:
    return functools.reduce(larger, hadamard_parts(x, size, axis=axis))


def _rotated_codes(
    x: jax.Array, size: int, axis: int, reciprocal: jax.Array, fmt: Format, key: Any
) -> jax.Array:
    # Out of a copy that only XLA takes for another array: it transforms x again, instead of writing
    # the transformed numbers of `_block_amax` in float32 and reading them twice.
    x, reciprocal = lax.optimization_barrier((x, reciprocal))
    parts = hadamard_parts(x, size, axis=axis)
    noise: Sequence[jax.Array | None] = [None] * size
    if key is not None:
        shape = list(parts[0].shape)
        shape[axis] *= size
        noise = [draws(key, at) for at in split(places(tuple(shape)), size, axis)]
    codes = [
        cast_unchecked(part * reciprocal, fmt, each)
        for part, each in zip(parts, noise, strict=True)
    ]
    return joined(codes, axis)


ROTATION = Rotation(_block_amax, _rotated_codes)


def quantize_unchecked(
    x: Float[Array, "..."],
    fmt: FormatLike,
    tile: TileLike,
    *,
    contract_axis: int = -1,
    scale: str | ScaleRule = "fp32",
    amax: Float[Array, "..."] | None = None,
    key: Shaped[Array, "..."] | None = None,
    hadamard: int = 1,
    rotation: Rotation = ROTATION,
) -> Quantized:
    """`quantize` for callers whose x and amax are right: it adds no operation that checks them.

    With `hadamard` above 1 it transforms x before (hadamard.py), along the contracting axis, which
    it pads with zeros to whole blocks. With a key it rounds stochastically.
    """
    fmt, rule = as_format(fmt), as_scale_rule(scale)
    axes = as_tile(tile).per_axis(x.ndim, contract_axis)
    along = contract_axis % x.ndim
    if hadamard > 1 and (axes[along] or hadamard) % hadamard:
        x, hadamard = joined(hadamard_parts(x, hadamard, axis=along), along), 1
    # In arrays with one element for each block of the transform, tiles have fewer elements.
    blocks, magnitudes = list(axes), x
    if hadamard > 1:
        magnitudes = rotation.block_amax(x, hadamard, along)
        tile_along = axes[along]
        blocks[along] = None if tile_along is None else tile_along // hadamard
    own = tile_amax(magnitudes, tuple(blocks))
    source = own if amax is None else jnp.broadcast_to(amax.astype(jnp.float32), own.shape)
    clean, tensor_scale = rule(source, fmt)
    # The values use the scale before x's own amax is checked: a delayed cast must not wait for the
    # reduction that computes that amax.
    finite = jnp.isfinite(own) & jnp.isfinite(source)
    reciprocal = 1.0 / Quantized(clean, clean, tensor_scale, axes).float_scale()
    reciprocal = spread(reciprocal, tuple(blocks), magnitudes.shape)
    if hadamard > 1:
        values = rotation.codes(x, hadamard, along, reciprocal, fmt, key)
    else:
        noise = None if key is None else draws(key, places(x.shape))
        values = cast_unchecked(x.astype(jnp.float32) * reciprocal, fmt, noise)
    checked = nan_unless(finite, clean)
    return Quantized(values, checked, tensor_scale, axes)


def larger(one: jax.Array, other: jax.Array) -> jax.Array:
    """Returns the larger magnitude of two float32 numbers; NaN if one is NaN (tiles.py)."""
    return lax.bitcast_convert_type(jnp.maximum(_magnitude(one), _magnitude(other)), jnp.float32)


def _magnitude(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint32) & 0x7FFFFFFF


def dequantize(q: Quantized, dtype=jnp.float32) -> Float[Array, "..."]:
    """Returns values * scale in `dtype`, with the shape of the values.

    With a tensor scale, a code times the scale of its tile is exact; so the number is rounded once.

    Args:
      q: what `fp8jax.quantize` returned.
      dtype: of the result, a float dtype of 16 or more bits. The product is computed in float32.

    Returns:
      An array with the shape of q.values.

    Raises:
      TypeError: for a q that is not `Quantized`, and for another dtype.

    Example:
      >>> x = jnp.array([[0.3, 448.0], [0.0009, 3.5]])
      >>> fp8jax.dequantize(fp8jax.quantize(x, "e4m3", fp8jax.TENSOR))  # 0.0009 underflows
      Array([[3.125e-01, 4.480e+02],
             [0.000e+00, 3.500e+00]], dtype=float32)
      >>> fp8jax.dequantize(fp8jax.quantize(x, "e4m3", fp8jax.ROW))
      Array([[3.1250000e-01, 4.4800000e+02],
             [9.1552734e-04, 3.5000000e+00]], dtype=float32)
    """
    if not isinstance(q, Quantized):
        raise TypeError(
            f"expected the Quantized that fp8jax.quantize returns, got {type(q).__name__}"
            f" {brief(q)}"
        )
    check_result_dtype("dtype", dtype)
    scale = spread(q.scale.astype(jnp.float32), q.tile, q.values.shape)
    numbers = q.values.astype(jnp.float32) * scale
    if q.tensor_scale is not None:
        numbers = numbers * q.tensor_scale
    return numbers.astype(dtype)
