"""The formats in which optimizer moments are stored between steps.

    float32       as optax stores them
    bf16          rounded to nearest
    fp8           E4M3 with one power-of-two scale (one byte) for each group along the last axis
    fp8_coat      E4M3 after COAT's dynamic range expansion (arXiv 2410.19313)
    fp8_unscaled  E4M3 without a scale: the momentum in StoSignSGD's paper (arXiv 2604.15416)
    int8          int8 with one float32 scale for each group of 2048: 8-bit Muon (arXiv 2509.23106)

StoSignSGD's largest magnitudes decay by 0.005% a step, which the roundings of bf16, fp8_coat and
fp8_unscaled would undo: beside those they stay float32 (stosign.py).

fp8. Where there is no gradient, a second moment with b2 = 0.95 shrinks by 5% a step, while
neighboring E4M3 values are 6 to 12% apart: rounded to nearest it would never decay. So rounding is
stochastic, with a key from the run's seed, the step and the leaf, and the mean over many steps is
right. A first moment that underflows becomes zero. A second moment that underflows becomes the
smallest E4M3 number instead, unless it is exactly zero, since the update divides by its square
root: an element whose gradients are below 1/480 of the largest in its group moves less than it
should. Storing square roots of second moments (half the binades, twice the rounding error) was
tried first and did worse (docs/results/moments.md).

fp8_coat. Let M and m be the largest and smallest magnitudes of a group, and s0 their geometric
mean. Then

    y = sign(x) (|x| / s0)^k      k = floor(16 log2(448^2 / 2) / log2(M / m)) / 16

stretches (k > 1) or compresses (k < 1) the group to the range of E4M3, and y is scaled by
(M / s0)^k / 448. As M / m approaches 1, k would grow without bound, so it is limited to 16. Zeros
are stored exactly and are ignored when m is computed. In the paper a zero makes m = 1e-30, which
leaves the other elements no precision (its authors' kernel ignores most zeros, too). The three
numbers of a group are stored in bfloat16, there in float32.

int8. x = code * scale with scale = max|x| / 127, to nearest. Evenly spaced numbers suit the
momentum of Muon, of which only the matrix as a whole matters. Most second moments would be zero:
they stay float32 beside Muon, and other optimizers that have some refuse it. So they do with
fp8_unscaled, in which AdamW diverged (docs/results/moments.md), and with bf16 and fp8_coat where
b2 is so large that a second moment would hardly decay.

Groups lie along the last axis: 128 elements of an axis that no mesh shards (int8: 2048), and 32 of
an axis that a mesh may shard (COAT and int8, which store more per group: 64). So no group crosses a
shard, and a checkpoint fits every mesh. That takes 1.01 to 1.03 bytes an element, COAT 1.05 to
1.10, int8 1.00 to 1.07. A last axis shorter than a group has one scale for all of it.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from fp8jax.numerics.formats import FORMATS, cast
from fp8jax.numerics.quantization import Quantized, dequantize, quantize
from fp8jax.numerics.tiles import Tile, spread, tile_amax

E4M3 = FORMATS["e4m3"]
# The largest exponent k of fp8_coat: up to here bfloat16 represents multiples of 1/16 exactly.
_MAX_POWER = 16.0
# log2 of the dynamic range to which fp8_coat stretches a group.
_RANGE = math.log2(E4M3.max**2 / 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MomentFormat:
    """A format for storing a moment.

    Attributes:
      name: a key of `MOMENTS`.
      encode: (float32 array, group size, random key) -> a pytree of arrays.
      decode: the inverse; returns float32.
      group: number of elements that share a scale along an axis that no mesh shards.
      cut_group: the same for an axis that a mesh may shard.
      second_moments: whether it holds second moments, too.
      positive: a second moment that would underflow becomes the smallest positive code instead.
      decays: a number that shrinks by far less than its rounding in each step still shrinks as
        fast in the mean: nothing is rounded, or rounding is stochastic.
    """

    name: str
    encode: Callable[[Float[Array, "..."], int, Shaped[Array, ""]], Any]
    decode: Callable[[Any], Float[Array, "..."]]
    group: int = 128
    cut_group: int = 32
    second_moments: bool = True
    positive: bool = False
    decays: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupedMoment:
    """A moment stored in groups along its last axis.

    Boxed with logical axis names if the parameter was.

    Attributes:
      values: E4M3 codes [..., K]; of "int8" int8.
      shared: arrays [..., ceil(K / group)], one entry for each group: the scale in "fp8" and
        "int8"; scale, power k and center s0 in "fp8_coat".
      group: number of elements in a group.
    """

    values: Any
    shared: tuple[Any, ...]
    group: int = dataclasses.field(metadata={"static": True})


def _scaled(x, group: int, key) -> GroupedMoment:
    """Encodes "fp8"."""
    q = quantize(x, E4M3, Tile(1, group), scale="e8m0", rounding="stochastic", key=key)
    return GroupedMoment(q.values, (q.scale,), group)


def _unscaled(e: GroupedMoment) -> jax.Array:
    """Decodes "fp8"."""
    (scale,) = e.shared
    return dequantize(Quantized(e.values, scale, None, _tile(e.values, e.group)))


def _tile(x: jax.Array, group: int) -> tuple[int, ...]:
    """The shape of a group, with as many axes as x."""
    return (1,) * (x.ndim - 1) + (group,)


def _expanded(x, group: int, key) -> GroupedMoment:
    """Encodes "fp8_coat": expands the dynamic range of each group, then scales and casts it."""
    tiles = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % group)])
    tiles = jnp.abs(tiles).reshape(*x.shape[:-1], -1, group)
    largest = jnp.max(tiles, axis=-1)
    smallest = jnp.min(jnp.where(tiles > 0, tiles, jnp.inf), axis=-1)
    empty = largest == 0
    log2_largest, log2_smallest = (jnp.log2(jnp.where(empty, 1.0, m)) for m in (largest, smallest))
    power = jnp.floor(16 * _RANGE / jnp.maximum(log2_largest - log2_smallest, 1e-3)) / 16
    power = jnp.clip(power, 1 / 16, _MAX_POWER).astype(jnp.bfloat16)
    center = jnp.exp2((log2_largest + log2_smallest) / 2).astype(jnp.bfloat16)
    k, s0 = power.astype(jnp.float32), center.astype(jnp.float32)
    scale = (jnp.exp2(k * (log2_largest - jnp.log2(s0))) / E4M3.max).astype(jnp.bfloat16)
    parts = (part.astype(jnp.float32) for part in (scale, power, center))
    scale_each, k, s0 = (spread(part, _tile(x, group), x.shape) for part in parts)
    y = (jnp.abs(x) / s0) ** k
    codes = cast(jnp.sign(x) * y / scale_each, E4M3)
    return GroupedMoment(codes, (scale, power, center), group)


def _contracted(e: GroupedMoment) -> jax.Array:
    """Decodes "fp8_coat"."""
    parts, tile = (part.astype(jnp.float32) for part in e.shared), _tile(e.values, e.group)
    scale, k, s0 = (spread(part, tile, e.values.shape) for part in parts)
    y = e.values.astype(jnp.float32)
    return jnp.sign(y) * (jnp.abs(y) * scale) ** (1 / k) * s0


def _linear(x, group: int, key) -> GroupedMoment:
    """Encodes "int8"."""
    amax = tile_amax(x, _tile(x, group))
    scale = jnp.where(amax == 0, 1.0, amax / 127.0)
    codes = jnp.round(x / spread(scale, _tile(x, group), x.shape))
    return GroupedMoment(codes.astype(jnp.int8), (scale,), group)


def _from_linear(e: GroupedMoment) -> jax.Array:
    """Decodes "int8"."""
    (scale,), tile = e.shared, _tile(e.values, e.group)
    return e.values.astype(jnp.float32) * spread(scale, tile, e.values.shape)


def _to_float32(x: Shaped[Array, "..."]) -> Float[Array, "..."]:
    """Returns x in float32. Decodes the formats that are plain casts."""
    return x.astype(jnp.float32)


_FORMATS = (
    MomentFormat(name="float32", encode=lambda x, group, key: x, decode=_to_float32, decays=True),
    MomentFormat(
        name="bf16", encode=lambda x, group, key: x.astype(jnp.bfloat16), decode=_to_float32
    ),
    MomentFormat(name="fp8", encode=_scaled, decode=_unscaled, positive=True, decays=True),
    MomentFormat(name="fp8_coat", encode=_expanded, decode=_contracted, cut_group=64),
    MomentFormat(
        name="fp8_unscaled",
        encode=lambda x, group, key: cast(x, E4M3),
        decode=_to_float32,
        second_moments=False,
    ),
    MomentFormat(
        name="int8",
        encode=_linear,
        decode=_from_linear,
        group=2048,
        cut_group=64,
        second_moments=False,
    ),
)
MOMENTS = {fmt.name: fmt for fmt in _FORMATS}
