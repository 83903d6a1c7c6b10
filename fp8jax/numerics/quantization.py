"""TODO docstring."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from fp8jax.numerics.formats import Format, as_format, cast
from fp8jax.numerics.scales import ScaleRule, as_scale_rule
from fp8jax.numerics.tiles import Tile, spread, tile_amax

# Quantized arrays ---------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """x ≈ values * scale, spread over its tiles (* tensor_scale where there is one).

    The following hold:
      * values has x's shape and the format's dtype;
      * scale has x's rank and ceil(dim / tile) entries an axis (1 where the tile is None);
      * scale is float32, or float8_e8m0fnu for "e8m0", or float8_e4m3fn for "nvfp4";
      * tensor_scale is a float32 scalar for "nvfp4", else None;
      * tile is static and has one entry an axis: shapes alone do not determine it.
    """

    values: Shaped[Array, "..."]
    scale: Shaped[Array, "..."]
    tensor_scale: Float[Array, ""] | None
    tile: tuple[int | None, ...] = dataclasses.field(metadata={"static": True})

    def float_scale(self) -> Float[Array, "..."]:
        """The whole scale, one float32 a tile."""
        scale = self.scale.astype(jnp.float32)
        return scale if self.tensor_scale is None else scale * self.tensor_scale


def quantize(
    x: Float[Array, "..."],
    fmt: str | Format,
    tile: Tile,
    *,
    contract_axis: int = -1,
    scale: str | ScaleRule = "fp32",
    amax: Float[Array, "..."] | None = None,
    rounding: str = "nearest",
    key: Shaped[Array, "..."] | None = None,
) -> Quantized:
    """`x` in format `fmt`, one scale a tile.

    Args:
      x: an array of any shape with at least one axis, in a float dtype.
      fmt: a key of `FORMATS`, or a `Format`, for the values.
      tile: how many elements share a scale.
      contract_axis: the axis that the product will contract.
      scale: a key of `SCALES`, `Pow2(margin)` or `Constant(value)`.
      amax: where the scale comes from instead of x's own amaxes, broadcast to the scale's shape
        (delayed scaling: the maximum of a history).
      rounding, key: as in `cast`.

    Returns:
      A `Quantized`. A scale is NaN where the tile's own amax, or the given one, is not finite.

    Raises:
      ValueError: unknown names, an axis out of range, a key that is missing or not used.
    """
    fmt, rule = as_format(fmt), as_scale_rule(scale)
    axes = tile.per_axis(x.ndim, contract_axis)
    own = tile_amax(x, axes)
    source = own if amax is None else jnp.broadcast_to(amax.astype(jnp.float32), own.shape)
    clean, tensor_scale = rule(source, fmt)
    # The values are cast with the scale as the rule gave it; the check of x's own amax joins
    # only afterwards, so that a delayed cast does not wait for that reduction.
    finite = jnp.isfinite(own) & jnp.isfinite(source)
    reciprocal = 1.0 / Quantized(clean, clean, tensor_scale, axes).float_scale()
    scaled = x.astype(jnp.float32) * spread(reciprocal, axes, x.shape)
    values = cast(scaled, fmt, rounding=rounding, key=key)
    checked = jnp.where(finite, clean, jnp.array(jnp.nan, clean.dtype))
    return Quantized(values, checked, tensor_scale, axes)


def dequantize(q: Quantized, dtype=jnp.float32) -> Float[Array, "..."]:
    """values * scale in `dtype`, with the shape of the values.

    The barrier keeps the rounding: XLA may otherwise collapse float32 -> float8 -> bfloat16 into
    float32 -> bfloat16 (`xla_allow_excess_precision`, on by default on GPUs), and the emulation
    of a format would silently not happen.
    """
    values = lax.optimization_barrier(q.values).astype(jnp.float32)
    return (values * spread(q.float_scale(), q.tile, q.values.shape)).astype(dtype)
