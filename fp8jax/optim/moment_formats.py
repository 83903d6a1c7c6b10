"""TODO docstring."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from fp8jax.numerics.formats import FORMATS, cast
from fp8jax.numerics.quantization import Quantized, dequantize, quantize
from fp8jax.numerics.tiles import Tile, spread

E4M3 = FORMATS["e4m3"]


_MOST_POWER = 16.0  # bfloat16 holds the sixteenths up to here


_RANGE = math.log2(E4M3.max**2 / 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MomentFormat:
    """How a moment is kept.

    Attributes:
      name: a key of `MOMENTS`.
      encode: float32 array, elements a group, key -> a tree of arrays.
      decode: back to float32.
      group: elements that share a scale along an axis that no mesh cuts.
      cut_group: the same where a mesh may cut it.
      positive: whether a second moment that would underflow becomes the smallest code instead.
    """

    name: str
    encode: Callable[[Float[Array, "..."], int, Shaped[Array, ""]], Any]
    decode: Callable[[Any], Float[Array, "..."]]
    group: int = 128
    cut_group: int = 32
    positive: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupedMoment:
    """Codes [..., K], and arrays [..., ceil(K / group)] of what the groups along K share; boxed
    with axis names if the parameter was."""

    values: Any
    shared: tuple[Any, ...]
    group: int = dataclasses.field(metadata={"static": True})


def _scaled(x, group: int, key) -> GroupedMoment:
    q = quantize(x, E4M3, Tile(1, group), scale="e8m0", rounding="stochastic", key=key)
    return GroupedMoment(q.values, (q.scale,), group)


def _unscaled(e: GroupedMoment) -> jax.Array:
    (scale,) = e.shared
    return dequantize(Quantized(e.values, scale, None, _tile(e.values, e.group)))


def _tile(x: jax.Array, group: int) -> tuple[int, ...]:
    return (1,) * (x.ndim - 1) + (group,)


def _expanded(x, group: int, key) -> GroupedMoment:
    tiles = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % group)])
    tiles = jnp.abs(tiles).reshape(*x.shape[:-1], -1, group)
    most = jnp.max(tiles, axis=-1)
    least = jnp.min(jnp.where(tiles > 0, tiles, jnp.inf), axis=-1)
    empty = most == 0
    most, least = (jnp.log2(jnp.where(empty, 1.0, m)) for m in (most, least))
    power = jnp.floor(16 * _RANGE / jnp.maximum(most - least, 1e-3)) / 16
    power = jnp.clip(power, 1 / 16, _MOST_POWER).astype(jnp.bfloat16)
    center = jnp.exp2((most + least) / 2).astype(jnp.bfloat16)
    k, s0 = power.astype(jnp.float32), center.astype(jnp.float32)
    scale = (jnp.exp2(k * (most - jnp.log2(s0))) / E4M3.max).astype(jnp.bfloat16)
    parts = (part.astype(jnp.float32) for part in (scale, power, center))
    scale_each, k, s0 = (spread(part, _tile(x, group), x.shape) for part in parts)
    y = (jnp.abs(x) / s0) ** k
    codes = cast(jnp.sign(x) * y / scale_each, E4M3)
    return GroupedMoment(codes, (scale, power, center), group)


def _contracted(e: GroupedMoment) -> jax.Array:
    parts, tile = (part.astype(jnp.float32) for part in e.shared), _tile(e.values, e.group)
    scale, k, s0 = (spread(part, tile, e.values.shape) for part in parts)
    y = e.values.astype(jnp.float32)
    return jnp.sign(y) * (jnp.abs(y) * scale) ** (1 / k) * s0


def from_float32(x: Shaped[Array, "..."]) -> Float[Array, "..."]:
    return x.astype(jnp.float32)


MOMENTS = {
    f.name: f
    for f in (
        MomentFormat(name="float32", encode=lambda x, group, key: x, decode=from_float32),
        MomentFormat(
            name="bf16", encode=lambda x, group, key: x.astype(jnp.bfloat16), decode=from_float32
        ),
        MomentFormat(name="fp8", encode=_scaled, decode=_unscaled, positive=True),
        MomentFormat(name="fp8_coat", encode=_expanded, decode=_contracted, cut_group=64),
        MomentFormat(
            name="fp8_unscaled", encode=lambda x, group, key: cast(x, E4M3), decode=from_float32
        ),
    )
}
