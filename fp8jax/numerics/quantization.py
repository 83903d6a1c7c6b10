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
from jaxtyping import Array, Float, Shaped, UInt32

from fp8jax.lookup import brief
from fp8jax.numerics.formats import (
    FORMATS,
    Format,
    FormatLike,
    as_format,
    cast_unchecked,
    check_float,
    check_holds_values,
    check_result_dtype,
    check_rounding,
    draws,
    nan_unless,
    places,
    rounded,
)
from fp8jax.numerics.hadamard import hadamard_parts, joined, split, whole_hadamard
from fp8jax.numerics.scales import (
    Eden,
    FourOverSix,
    Mse,
    Outer128,
    ScaleRule,
    as_scale_rule,
    refuse_tile,
)
from fp8jax.numerics.tiles import Tile, TileLike, as_tile, spread, tile_amax, tile_grid, tile_sum


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

    Its derivative is zero: a GEMM that trains is `dot_general`.

    Args:
      x: an array of any shape with at least one axis, in a float dtype; float64 is rounded to
        float32 first.
      fmt: a key of `FORMATS`, a `Format` or its dtype, for the values; a signed one.
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
    check_holds_values(as_format(fmt))
    check_rounding(as_format(fmt), rounding, key)
    refuse_tile(as_scale_rule(scale), as_tile(tile), hadamard=1)
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

    In all of them `signs` is a word of new signs or None, and `tile` how many of the elements of a
    transform share a scale, all of them or half of them.

    Attributes:
      tile_amax: (x, size, axis, tile, signs) -> max|x'| of each `tile` elements along the axis.
      codes: (x, size, axis, reciprocals of the scales [..., tiles, ...], format, key or None,
        signs) -> codes of x'.
      errors: (x, size, axis, reciprocals, format, signs) -> the sum of `squared_error` over each
        block of `size` elements, of one tile.
      codes_and_lengths: (x, size, axis, reciprocals, format, signs) -> codes to nearest, and the
        `lengths` summed over each block of `size` elements.

    Without the last two, signs are None and a tile has all elements of a block (`_source`).
    """

    tile_amax: Callable[..., Float[Array, "..."]]
    codes: Callable[..., Shaped[Array, "..."]]
    errors: Callable[..., Float[Array, "..."]] | None = None
    codes_and_lengths: Callable[..., tuple[Shaped[Array, "..."], jax.Array, jax.Array]] | None = (
        None
    )


def _tile_amax(x: jax.Array, size: int, axis: int, tile: int, signs: None) -> jax.Array:
    return functools.reduce(larger, hadamard_parts(x, size, axis=axis))


def _rotated_codes(
    x: jax.Array, size: int, axis: int, reciprocal: jax.Array, fmt: Format, key: Any, signs: None
) -> jax.Array:
    # Out of a copy that only XLA takes for another array: it transforms x again, instead of writing
    # the transformed numbers of `_tile_amax` in float32 and reading them twice.
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


ROTATION = Rotation(_tile_amax, _rotated_codes)


# Sums of the errors of a tile ---------------------------------------------------------------------

# All are sums of small integers in float32, and so exact: whatever the order of additions and
# whether products are fused with them, a tile gets the same scale on every device.


def squared_error(scaled: Float[Array, "..."], fmt: Format) -> Float[Array, "..."]:
    """Returns the squared error of rounding to nearest, in units of 2^-16: integers up to 2^20.

    Args:
      scaled: x / scale, in float32.
    """
    limit = np.float32(4 * fmt.max)
    clipped = jnp.minimum(jnp.maximum(scaled, -limit), limit)
    clipped = jnp.where(clipped != clipped, 0.0, clipped)
    error = lax.round((clipped - rounded(clipped, fmt, None)) * 256.0, _EVEN)
    error = jnp.minimum(jnp.maximum(error, -1023.0), 1023.0)
    return error * error


def lengths(
    scaled: Float[Array, "..."], fmt: Format
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Returns y * y and y * q of numbers y whose codes to nearest are q, in units of 2^-12.

    Args:
      scaled: y, that is x / scale in float32, which counts in units of 2^-6, up to 448 of them.
    """
    clipped = jnp.minimum(jnp.maximum(scaled, -7.0), 7.0)
    clipped = jnp.where(clipped != clipped, 0.0, clipped)
    units = lax.round(clipped * 64.0, _EVEN)
    return units * units, units * (rounded(scaled, fmt, None) * 64.0)


_EVEN = lax.RoundingMethod.TO_NEAREST_EVEN


# Quantizing ---------------------------------------------------------------------------------------


class _Source(NamedTuple):
    """An array to be quantized, its transform, and its tiles.

    Attributes:
      x: the array; transformed already, with `hadamard` 1, if tiles do not fit the transform.
      fmt: the format of its codes.
      axes: the size of a tile along each axis.
      along: the contracting axis.
      hadamard, signs: the transform, as in `quantize_unchecked`.
      block: the size of the transform, also of one that is done.
      in_block: how many elements of a block of the transform share a scale.
      rotation: what transforms and casts.
    """

    x: jax.Array
    fmt: Format
    axes: tuple[int | None, ...]
    along: int
    hadamard: int
    signs: jax.Array | None
    block: int
    in_block: int
    rotation: Rotation

    @property
    def blocks(self) -> tuple[int | None, ...]:
        """The size of a tile in arrays with one element for each `in_block` of the transform."""
        tile, blocks = self.axes[self.along], list(self.axes)
        blocks[self.along] = None if tile is None else tile // self.in_block
        return tuple(blocks)

    @property
    def grid(self) -> tuple[int, ...]:
        """The shape of those arrays."""
        shape = list(self.x.shape)
        if self.hadamard > 1:
            blocks = -(-shape[self.along] // self.hadamard)
            shape[self.along] = blocks * (self.hadamard // self.in_block)
        return tuple(shape)

    def amax(self) -> jax.Array:
        """Returns the amax of each tile."""
        magnitudes = self.x
        if self.hadamard > 1:
            magnitudes = self.rotation.tile_amax(
                self.x, self.hadamard, self.along, self.in_block, self.signs
            )
        return tile_amax(magnitudes, self.blocks)

    def reciprocals(self, scale: jax.Array, tensor_scale: jax.Array | None) -> jax.Array:
        """Returns the reciprocal of each tile's scale, spread over `grid`."""
        each = 1.0 / Quantized(scale, scale, tensor_scale, self.axes).float_scale()
        return spread(each, self.blocks, self.grid)

    def codes(self, reciprocal: jax.Array, key: Any) -> jax.Array:
        if self.hadamard > 1:
            return self.rotation.codes(
                self.x, self.hadamard, self.along, reciprocal, self.fmt, key, self.signs
            )
        noise = None if key is None else draws(key, places(self.x.shape))
        return cast_unchecked(self.x.astype(jnp.float32) * reciprocal, self.fmt, noise)

    def codes_and_lengths(self, reciprocal: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the codes to nearest, and the `lengths` of each block of the transform."""
        if self.rotation.codes_and_lengths is not None:
            return self.rotation.codes_and_lengths(
                self.x, self.block, self.along, reciprocal, self.fmt, self.signs
            )
        scaled, block = self.x.astype(jnp.float32) * reciprocal, [1] * self.x.ndim
        block[self.along] = self.block
        squares, products = (tile_sum(each, tuple(block)) for each in lengths(scaled, self.fmt))
        return cast_unchecked(scaled, self.fmt), squares, products

    def errors(self, reciprocal: jax.Array) -> jax.Array:
        """Returns the `squared_error` of each tile, summed."""
        if self.hadamard > 1:
            assert self.rotation.errors is not None  # `_source`
            error = self.rotation.errors(
                self.x, self.hadamard, self.along, reciprocal, self.fmt, self.signs
            )
        else:
            error = squared_error(self.x.astype(jnp.float32) * reciprocal, self.fmt)
        return tile_sum(error, self.blocks)


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
    signs: UInt32[Array, ""] | None = None,
    rotation: Rotation = ROTATION,
) -> Quantized:
    """`quantize` for callers whose x and amax are right: it adds no operation that checks them.

    With `hadamard` above 1 it transforms x before (hadamard.py), along the contracting axis, which
    it pads with zeros to whole blocks, with new signs if `signs` are given. With a key it rounds
    stochastically: the codes, or the scales of the rule `Eden`.
    """
    fmt, rule = as_format(fmt), as_scale_rule(scale)
    array = _source(x, fmt, rule, as_tile(tile), contract_axis, hadamard, signs, rotation)
    own = array.amax()
    source = own if amax is None else jnp.broadcast_to(amax.astype(jnp.float32), own.shape)
    clean, tensor_scale = _scales(array, rule, source)
    # The values use the scale before x's own amax is checked: a delayed cast must not wait for the
    # reduction that computes that amax.
    finite = jnp.isfinite(own) & jnp.isfinite(source)
    reciprocal = array.reciprocals(clean, tensor_scale)
    if isinstance(rule, Eden):
        values, squares, products = array.codes_and_lengths(reciprocal)
        clean = _lengthened(array, clean, squares, products, key)
    else:
        values = array.codes(reciprocal, key)
    checked = nan_unless(finite, clean)
    return Quantized(values, checked, tensor_scale, array.axes)


def _source(
    x: jax.Array,
    fmt: Format,
    rule: ScaleRule,
    tile: Tile,
    contract_axis: int,
    hadamard: int,
    signs: Any,
    rotation: Rotation,
) -> _Source:
    axes = tile.per_axis(x.ndim, contract_axis)
    along = contract_axis % x.ndim
    tile_along, block = axes[along], hadamard
    in_block = block
    if rotation.errors is None and (signs is not None or isinstance(rule, FourOverSix)):
        # One array: the parts of hadamard.py, twice or 32 of them, take XLA long to compile.
        if hadamard > 1:
            x = lax.optimization_barrier(whole_hadamard(x, block, signs, axis=along))
        hadamard = in_block = 1
    elif isinstance(rule, Eden):
        assert tile_along is not None  # `refuse_tile`
        in_block = tile_along
    elif hadamard > 1 and (tile_along or hadamard) % hadamard:
        x = joined(hadamard_parts(x, hadamard, axis=along), along)
        hadamard = in_block = 1
    return _Source(x, fmt, axes, along, hadamard, signs, block, in_block, rotation)


def _scales(
    source: _Source, rule: ScaleRule, amax: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the scales of the tiles, as they are stored, and that of the tensor if there is one.

    Args:
      amax: of each tile.
    """
    if isinstance(rule, Outer128):
        group = [1] * amax.ndim
        tile = source.axes[source.along]
        assert tile is not None  # `refuse_tile`
        group[source.along] = rule.along // tile
        outer = spread(tile_amax(amax, tuple(group)), tuple(group), amax.shape)
        return rule.within(amax, outer, source.fmt), None
    if isinstance(rule, Mse):
        return _least_squares(source, rule, amax), None
    scale, tensor_scale = rule(amax, source.fmt)
    if not isinstance(rule, FourOverSix):
        return scale, tensor_scale
    assert tensor_scale is not None
    four = rule.four(amax, tensor_scale)
    six_error, four_error = (
        source.errors(source.reciprocals(each, tensor_scale)) * jnp.square(each.astype(jnp.float32))
        for each in (scale, four)
    )
    return jnp.where(four_error < six_error, four, scale), tensor_scale


def _least_squares(source: _Source, rule: Mse, amax: jax.Array) -> jax.Array:
    """Returns the scale of the whole array with the least squared error, the larger of equals."""
    x, best, least = source.x.astype(jnp.float32), None, None
    for binades in range(rule.lower + 1):
        scale = rule.at(amax, source.fmt, binades)
        # In units of the amax, so that no square underflows.
        error = x - rounded(x * (1.0 / scale), source.fmt, None) * scale
        total = jnp.sum(jnp.square(error * (1.0 / jnp.where(amax == 0, 1.0, amax))))
        better = True if least is None else total < least
        best = scale if best is None else jnp.where(better, scale, best)
        least = total if least is None else jnp.minimum(total, least)
    assert best is not None
    return rule.with_margin(best, amax)


def _lengthened(
    source: _Source, scale: jax.Array, squares: jax.Array, products: jax.Array, key: Any
) -> jax.Array:
    """Returns the scales of `Eden`, times <y, y> / <y, q> of their block, rounded to e4m3."""
    none = products == 0
    factor = jnp.where(none, 1.0, squares / jnp.where(none, 1.0, products))
    tile = source.axes[source.along]
    assert tile is not None  # `refuse_tile`
    factor = jnp.repeat(factor, source.block // tile, axis=source.along)
    noise = None if key is None else draws(key, places(scale.shape))
    return cast_unchecked(scale.astype(jnp.float32) * factor, FORMATS["e4m3"], noise)


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
      ValueError: for a stack of several, as of `jax.vmap`.

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
    if q.values.ndim != len(q.tile):
        raise ValueError(
            f"the values have {q.values.ndim} axes and their tile {len(q.tile)}: a stack that"
            " jax.vmap made goes through jax.vmap(fp8jax.dequantize)"
        )
    scale = spread(q.scale.astype(jnp.float32), q.tile, q.values.shape)
    numbers = q.values.astype(jnp.float32) * scale
    if q.tensor_scale is not None:
        numbers = numbers * q.tensor_scale
    return numbers.astype(dtype)
