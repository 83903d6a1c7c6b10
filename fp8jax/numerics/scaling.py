"""Scales: how a tensor is brought into the range of a narrow format, and back.

One convention throughout:

    x ≈ values * scale,      values = cast(x * (1 / scale)),      scale = rule(amax, format)

where amax = max|x| over the elements that share a scale. (Some libraries store the reciprocal
and call it by the same name; nothing here does.) The reciprocal is taken once a tile, on purpose:
XLA rewrites x / scale into that product for some shapes and not for others, and the codes would
depend on it.

Granularity is two numbers. `Tile(free, contract)` says how many elements along the
non-contracting and along the contracting dimension of a product share a scale; None is the whole
axis:

    TENSOR   (None, None)  one scale for all            BLOCK128 (128, 128)  weights, DeepSeek-V3
    ROW      (1, None)     one a token or channel       MX32     (1, 32)     OCP Microscaling
    TILE128  (1, 128)      activations, DeepSeek-V3     NV16     (1, 16)     NVFP4
                                                        NV16x16  (16, 16)    NVFP4 weights

The scale has the rank of the values and ceil(dim / tile) entries an axis. A tile at the edge is
padded with zeros, which never raise an amax.

Scale rules turn an amax into that scale, M being the largest number of the format:

    fp32        amax / M, to within a unit in the last place; Fp32(m): times 2^m
    pow2        2^ceil(log2(amax / M)): never saturates, and dividing by it never rounds
    Pow2(m)     2^(ceil(log2(amax / M)) + m): Graphcore's bias is b = -log2(scale), m their margin
    e8m0        pow2, stored in one byte as float8_e8m0fnu (UE8M0)
    e8m0_floor  2^(floor(log2(amax)) - floor(log2(M))), as OCP Microscaling has it: one binade more
                is in use where e8m0 rounds up, but numbers above M * scale saturate
    nvfp4       an e4m3 scale a tile under a float32 scale for the tensor
    Constant    a given number

An amax of zero gives scale 1. Powers of two are found on the bits of the float32, not with
log2 and exp2, which are off by one binade at exact powers on some backends.

The scale of a delayed tensor comes from a history of amaxes instead of the tensor itself, so
that the cast need not wait for a reduction over all of it. A value above every amax in the
history saturates, silently; an infinity or a NaN must not. So `quantize` looks at the tensor's own
amax too, beside the cast and not before it, and makes the returned scale NaN where that is not
finite: the product becomes NaN and the non-finite gate sees it.

A random Hadamard transform mixes n elements along the contraction before the cast: with the
n x n matrix H of entries +-1, H H^T = n I, and random signs d,

    x' = x diag(d) H / sqrt(n),       x' y'^T = x y^T

so that it cancels in a product of two operands, while an outlier is spread over n elements that
share a scale. The signs are fixed (the first bits of pi), as in NVFP4: fresh ones gain nothing.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Shaped

from fp8jax.lookup import unknown
from fp8jax.numerics.formats import FORMATS, Format, as_format, cast, power_of_two_below

# Scales and their reciprocals stay normal float32 numbers: XLA flushes subnormals to zero on some
# backends, and a scale of zero would turn a tiny tensor into infinities.
MIN_SCALE = 2.0**-126


MAX_SCALE = 2.0**126


@dataclasses.dataclass(frozen=True)
class Tile:
    """How many elements along the free and the contracting axis share a scale (None: all)."""

    free: int | None
    contract: int | None

    def __post_init__(self):
        for size in (self.free, self.contract):
            if size is not None and size < 1:
                raise ValueError(f"a tile has at least one element, got {self}")

    def per_axis(self, ndim: int, contract_axis: int) -> tuple[int | None, ...]:
        """One entry an axis. The free axis is the last one that does not contract; every other
        axis has one scale for all if `free` is None, else one each."""
        if not -ndim <= contract_axis < ndim:
            raise ValueError(f"{contract_axis=} is out of range for {ndim=}")
        contract_axis %= ndim
        sizes = [None if self.free is None else 1] * ndim
        sizes[contract_axis] = self.contract
        others = [axis for axis in range(ndim) if axis != contract_axis]
        if others:
            sizes[others[-1]] = self.free
        return tuple(sizes)


TENSOR = Tile(None, None)


ROW = Tile(1, None)


TILE128 = Tile(1, 128)


BLOCK128 = Tile(128, 128)


MX32 = Tile(1, 32)


NV16 = Tile(1, 16)


NV16x16 = Tile(16, 16)


def _grid(shape: tuple[int, ...], tile: tuple[int | None, ...]) -> list[tuple[int, int]]:
    """(number of tiles, elements a tile) for each axis."""
    return [(1, d) if t is None else (-(-d // t), t) for d, t in zip(shape, tile, strict=True)]


def tile_amax(x: Float[Array, "..."], tile: tuple[int | None, ...]) -> Float[Array, "..."]:
    """float32 max|x| of each tile, with the rank of `x`; NaN where a tile holds a NaN.

    The maximum is taken over bit patterns, which order like the numbers, NaN above infinity above
    all else: XLA's floating-point maximum loses a NaN on CPUs (`xla_cpu_enable_fast_min_max`).
    """
    grid = _grid(x.shape, tile)
    padding = [(0, n * t - d) for d, (n, t) in zip(x.shape, grid, strict=True)]
    if any(after for _, after in padding):
        x = jnp.pad(x, padding)
    magnitude = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) & 0x7FFFFFFF
    tiles = magnitude.reshape([size for pair in grid for size in pair])
    largest = jnp.max(tiles, axis=tuple(range(1, 2 * x.ndim, 2)), initial=0)
    return lax.bitcast_convert_type(largest, jnp.float32)


def tensor_amax(x: Float[Array, "..."]) -> Float[Array, ""]:
    """float32 max|x|; NaN if there is a NaN."""
    return tile_amax(x, (None,) * x.ndim).reshape(())


def spread(
    scale: Shaped[Array, "..."], tile: tuple[int | None, ...], shape: tuple[int, ...]
) -> Shaped[Array, "..."]:
    """One entry a tile of such an array, spread to one an element; 1 stays where it broadcasts."""
    for axis, (n, t) in enumerate(_grid(shape, tile)):
        if n > 1 and t > 1:
            # Without total_repeat_length, which makes it a gather with indices from a cumsum.
            scale = lax.slice_in_dim(jnp.repeat(scale, t, axis=axis), 0, shape[axis], axis=axis)
    return scale


# Scale rules --------------------------------------------------------------------------------------


def _over(amax: jax.Array, largest: float) -> jax.Array:
    """amax / largest as a product with the float32 reciprocal of the constant: the same bits on
    every device, which a division is not, and exact at largest * 2^k for all formats here."""
    return amax * (np.float32(1) / np.float32(largest))


def _nonzero(amax: jax.Array, scale: jax.Array) -> jax.Array:
    return jnp.where(amax == 0, 1.0, jnp.maximum(scale, MIN_SCALE))


@dataclasses.dataclass(frozen=True)
class Fp32:
    """scale = amax / max * 2^margin: at margin 0 the whole range of the format is used."""

    margin: int = 0
    power_of_two = False

    def __call__(self, amax: jax.Array, fmt: Format) -> tuple[jax.Array, None]:
        return _nonzero(amax, _over(amax, fmt.max) * 2.0**self.margin), None


@dataclasses.dataclass(frozen=True)
class Pow2:
    """scale = 2^(ceil(log2(amax / max)) + margin), exactly."""

    margin: int = 0
    power_of_two = True

    def __call__(self, amax: jax.Array, fmt: Format) -> tuple[jax.Array, None]:
        # As integers, float32 bit patterns are 2^23 * exponent + mantissa. So the difference of
        # two, divided by 2^23 and rounded up, is the exponent difference, plus one if the mantissa
        # of amax is the larger: the ceiling wanted.
        bits = lax.bitcast_convert_type(amax.astype(jnp.float32), jnp.int32)
        of_max = int(np.float32(fmt.max).view(np.int32))
        exponent = ((bits - of_max + (1 << 23) - 1) >> 23) + self.margin
        exponent = jnp.clip(exponent, -126, 126)  # its reciprocal has to be normal, too
        scale = lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
        return _nonzero(amax, scale), None


@dataclasses.dataclass(frozen=True)
class E8M0:
    """`Pow2()` stored as float8_e8m0fnu; with `floor`, the exponents rounded down instead."""

    floor: bool = False
    power_of_two = True

    def __call__(self, amax: jax.Array, fmt: Format) -> tuple[jax.Array, None]:
        if self.floor:  # for a power of two, ceil(log2(a / M)) is log2(a) - floor(log2(M))
            amax = power_of_two_below(amax.astype(jnp.float32))
        return cast(Pow2()(amax, fmt)[0], "e8m0"), None


@dataclasses.dataclass(frozen=True)
class NvFp4:
    """Two levels: tensor = amax / (448 * max), tile = e4m3(amax of the tile / max / tensor).

    The tile's scale is clamped to the smallest e4m3 number instead of rounding to zero: a tile far
    below the tensor's amax then flushes to zero through its values, and nothing divides by zero.
    """

    power_of_two = False

    def __call__(self, amax: jax.Array, fmt: Format) -> tuple[jax.Array, jax.Array]:
        e4m3 = FORMATS["e4m3"]
        tensor_amax = jnp.max(amax, initial=0)
        tensor = _nonzero(tensor_amax, _over(tensor_amax, fmt.max * e4m3.max))
        tile = jnp.maximum(_over(amax, fmt.max) * (1.0 / tensor), e4m3.tiny)
        return cast(jnp.where(amax == 0, 1.0, tile), e4m3), tensor


@dataclasses.dataclass(frozen=True)
class Constant:
    """scale = value, whatever the tensor (Graphcore's FP8-CSCALE: value = 2^-bias)."""

    value: float

    def __post_init__(self):
        if not MIN_SCALE <= self.value <= MAX_SCALE:
            raise ValueError(f"a constant scale is between 2^-126 and 2^126, got {self.value}")

    @property
    def power_of_two(self) -> bool:
        return bool(np.frexp(self.value)[0] == 0.5)

    def __call__(self, amax: jax.Array, fmt: Format) -> tuple[jax.Array, None]:
        return jnp.full_like(amax, self.value), None


ScaleRule = Fp32 | Pow2 | E8M0 | NvFp4 | Constant


SCALES: dict[str, ScaleRule] = {
    "fp32": Fp32(), "pow2": Pow2(), "e8m0": E8M0(), "e8m0_floor": E8M0(floor=True),
    "nvfp4": NvFp4(),
}  # fmt: skip


def as_scale_rule(rule: str | ScaleRule) -> ScaleRule:
    """`rule`, resolved if it is a name. Raises ValueError for an unknown one."""
    if not isinstance(rule, str):
        return rule
    if rule not in SCALES:
        raise unknown("scale rule", rule, [*SCALES, "Pow2(margin)", "Constant(value)"])
    return SCALES[rule]


# Quantised arrays ---------------------------------------------------------------------------------


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


# The random Hadamard transform --------------------------------------------------------------------

_SIGNS = 0x243F6A8885A308D313198A2E03707344  # the first 128 bits of pi's fraction


def check_hadamard(size: int) -> None:
    """Raises ValueError for a size that has no transform here."""
    if size not in (1, 2, 4, 8, 16, 32, 64, 128):
        raise ValueError(f"a Hadamard transform mixes 2, 4, ... 128 elements (1: none), got {size}")


def hadamard(x: Float[Array, "..."], size: int, *, axis: int = -1) -> Float[Array, "..."]:
    """float32 `x` rotated in blocks of `size` along `axis`, which is filled up with zeros to whole
    blocks. Sums of pairs, in log2(size) rounds: the same bits on every device.

    Raises ValueError for a size that is no power of two up to 128.
    """
    check_hadamard(size)
    x = jnp.moveaxis(x.astype(jnp.float32), axis, -1)
    *others, length = x.shape
    blocks = -(-length // size)
    x = jnp.pad(x, [(0, 0)] * len(others) + [(0, blocks * size - length)])
    signs = np.array([1 - 2 * (_SIGNS >> (127 - i) & 1) for i in range(size)], np.float32)
    x = x.reshape(*others, blocks, size) * signs.reshape((1,) * x.ndim + (-1,))
    half = 1
    while half < size:
        x = x.reshape(*others, blocks, size // (2 * half), 2, half)
        x = jnp.stack([x[..., 0, :] + x[..., 1, :], x[..., 0, :] - x[..., 1, :]], axis=-2)
        half *= 2
    x = x.reshape(*others, blocks * size) * np.float32(size**-0.5)
    return jnp.moveaxis(x, -1, axis)


# Amax histories -----------------------------------------------------------------------------------


def record_amax(history: Float[Array, " H"], amax: Float[Array, ""]) -> Float[Array, " H"]:
    """The next history: rolled by one, slot 0 this step's amax, or the old slot 0 where that is
    not finite."""
    newest = jnp.where(jnp.isfinite(amax), amax, history[0])
    return jnp.roll(history, 1).at[0].set(newest)


def merge_history(old: Float[Array, "*L H"], new: Float[Array, "*L H"]) -> Float[Array, "*L H"]:
    """`new` where it recorded anything, else `old`, each history (last axis) by itself.

    A product that did not run leaves a cotangent of zeros (never traced) or of -inf (the branch
    not taken, under a max-combining dtype): neither is a history. A history that would become all
    zeros is kept as well, since a tensor of zeros is served by any scale.
    """
    received = jnp.any(new > 0, axis=-1, keepdims=True) & jnp.all(
        jnp.isfinite(new), axis=-1, keepdims=True
    )
    return jnp.where(received, new, old)
