"""Quantized arrays: `quantize` brings a tensor into a narrow format, `dequantize` back.

    x ≈ values * scale,      values = cast(x * (1 / scale))

The values are multiplied by the reciprocal, which is computed once per tile. For x / scale, XLA
uses that multiplication for some shapes and not for others, and the values would depend on it.

With delayed scaling, the scale comes from a history of amaxes (linear/amax_history.py) instead of
the tensor itself, so the cast does not wait for a reduction over the whole tensor. A finite value
above every amax of the history saturates silently. An infinity or a NaN must not, so `quantize`
also computes the tensor's own amax, in parallel with the cast, and returns a NaN scale where that
amax is not finite. The result of the GEMM is then NaN, and the training step is rejected.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from fp8jax.numerics.formats import Format, as_format, cast
from fp8jax.numerics.scales import ScaleRule, as_scale_rule
from fp8jax.numerics.tiles import Tile, spread, tile_amax


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
    """

    values: Shaped[Array, "..."]
    scale: Shaped[Array, "..."]
    tensor_scale: Float[Array, ""] | None
    tile: tuple[int | None, ...] = dataclasses.field(metadata={"static": True})

    def float_scale(self) -> Float[Array, "..."]:
        """Return the float32 scale of each tile, including `tensor_scale` if there is one."""
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
    """Quantize `x` to format `fmt` with one scale per tile.

    Args:
      x: an array of any shape with at least one axis, in a float dtype.
      fmt: a key of `FORMATS`, or a `Format`, for the values.
      tile: how many elements share a scale.
      contract_axis: the axis that the GEMM will contract.
      scale: a key of `SCALES`, `Pow2(margin)` or `Constant(value)`.
      amax: the amax to compute the scale from instead of x's own, broadcast to the scale's shape
        (delayed scaling: the maximum of a history).
      rounding, key: as in `cast`.

    Returns:
      A `Quantized`. A scale is NaN where the tile's own amax or the given amax is not finite.

    Raises:
      ValueError: for an unknown name, an axis out of range, a missing or an unused key.
    """
    fmt, rule = as_format(fmt), as_scale_rule(scale)
    axes = tile.per_axis(x.ndim, contract_axis)
    own = tile_amax(x, axes)
    source = own if amax is None else jnp.broadcast_to(amax.astype(jnp.float32), own.shape)
    clean, tensor_scale = rule(source, fmt)
    # The values use the scale before x's own amax is checked: a delayed cast must not wait for the
    # reduction that computes that amax.
    finite = jnp.isfinite(own) & jnp.isfinite(source)
    reciprocal = 1.0 / Quantized(clean, clean, tensor_scale, axes).float_scale()
    scaled = x.astype(jnp.float32) * spread(reciprocal, axes, x.shape)
    values = cast(scaled, fmt, rounding=rounding, key=key)
    checked = jnp.where(finite, clean, jnp.array(jnp.nan, clean.dtype))
    return Quantized(values, checked, tensor_scale, axes)


def dequantize(q: Quantized, dtype=jnp.float32) -> Float[Array, "..."]:
    """Return values * scale in `dtype`, with the shape of the values.

    The barrier preserves the rounding. Without it XLA may replace float32 -> float8 -> bfloat16 by
    float32 -> bfloat16 (`xla_allow_excess_precision`, on by default on GPUs), and silently skip the
    emulation of the format.
    """
    values = lax.optimization_barrier(q.values).astype(jnp.float32)
    return (values * spread(q.float_scale(), q.tile, q.values.shape)).astype(dtype)
