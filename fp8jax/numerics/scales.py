"""Scale rules: which scale an amax gives.

The library has one convention:

    x ≈ values * scale,      values = cast(x * (1 / scale)),      scale = rule(amax, format)

where amax = max|x| over the elements that share the scale. (Some libraries store the reciprocal
under the same name. This one never does.)

With M the largest number of the format, the rules are

    fp32        amax / M, to within one unit in the last place; Fp32(m) multiplies that by 2^m
    pow2        2^ceil(log2(amax / M)): never saturates, and dividing by it never rounds
    Pow2(m)     2^(ceil(log2(amax / M)) + m)
    bias        Pow2 as in Graphcore's code: the bias -log2(scale) is within 31, also less a margin
    mse         of powers of two from Pow2's down, the one with the least squared error
    e8m0        pow2, stored in one byte as float8_e8m0fnu (UE8M0)
    e8m0_floor  2^(floor(log2(amax)) - floor(log2(M))), as in OCP Microscaling: uses one binade more
                of the format where e8m0 rounds up, but saturates numbers above M * scale
    nvfp4       an e4m3 scale per tile, times a float32 scale for the tensor
    Constant    a given number

Variants of nvfp4, each with its sources in its class:

    unbiased    scales are 17/16 as large, so that no maximum is clipped
    4over6      of two scales, which bring the amax to 6 or to 4, the one with the smaller error
    outer128    the outer scale is that of 1 x 128 elements, not of the tensor; outer128_unbiased
    eden        the scales also undo what rounding to nearest takes from the length of a vector

and `Delayed` gives a rule the tensor's past amaxes instead of its current one.

An amax of zero gives the scale 1. Powers of two are computed from the bits of the float32: log2 and
exp2 are off by one binade at exact powers of two on some backends.
"""

import dataclasses
import numbers

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8jax.lookup import Table, brief, unknown
from fp8jax.numerics.formats import FORMATS, Format, cast, power_of_two_below
from fp8jax.numerics.tiles import TENSOR, Tile

# Scales and their reciprocals must be normal float32 numbers: XLA flushes subnormals to zero on
# some backends, and a scale of zero would turn a tiny tensor into infinities.
MIN_SCALE = 2.0**-126
MAX_SCALE = 2.0**126


def _over(amax: jax.Array, largest: float) -> jax.Array:
    """Returns amax / largest, computed as amax times the float32 reciprocal of `largest`.

    Unlike a division, this gives the same bits on every device. It is exact for amax =
    largest * 2^k in all formats of this library.
    """
    return amax * (np.float32(1) / np.float32(largest))


def _nonzero(amax: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns `scale`, at least MIN_SCALE, and 1 where the amax is zero."""
    return jnp.where(amax == 0, 1.0, jnp.maximum(scale, MIN_SCALE))


def _check_margin(rule: str, margin: object) -> None:
    if type(margin) is not int:
        raise TypeError(f"{rule}(margin) takes an int number of binades, got {brief(margin)}")
    if abs(margin) > 126:
        raise ValueError(f"{rule}(margin) takes -126 to 126 binades, got {margin}")


@dataclasses.dataclass(frozen=True)
class Fp32:
    """scale = amax / max * 2^margin; margin 0 uses the whole range of the format."""

    margin: int = 0
    power_of_two = False

    def __post_init__(self):
        _check_margin("Fp32", self.margin)

    def __call__(self, amax: jax.Array, fmt: Format) -> tuple[jax.Array, None]:
        scale = _over(amax, fmt.max) * 2.0**self.margin
        if self.margin > 0:  # others are below MAX_SCALE for every finite amax
            scale = jnp.where(jnp.isfinite(amax), jnp.minimum(scale, MAX_SCALE), scale)
        return _nonzero(amax, scale), None


@dataclasses.dataclass(frozen=True)
class Pow2:
    """The scale rule 2^(ceil(log2(amax / max)) + margin), exactly.

    Multiplying by such a scale never rounds. An amax of 0 gives 1.

    Attributes:
      margin: binades between the amax and the largest number of the format, -126 to 126. With 0
        nothing saturates.

    Raises:
      TypeError: for a margin that is not an int.
      ValueError: for a margin out of range.

    Example:
      >>> x = jnp.array([3.0, -1.5])
      >>> fp8jax.quantize(x, "e4m3", "tensor", scale=fp8jax.Pow2()).scale.item()  # 2^-7 > 3 / 448
      0.0078125
      >>> fp8jax.quantize(x, "e4m3", "tensor", scale=fp8jax.Pow2(margin=3)).scale.item()
      0.0625
    """

    margin: int = 0
    power_of_two = True

    def __post_init__(self):
        _check_margin("Pow2", self.margin)

    def __call__(self, amax: jax.Array, fmt: Format) -> tuple[jax.Array, None]:
        return _nonzero(amax, _power_of_two(self._exponent(amax, fmt) + self.margin, 126)), None

    def _exponent(self, amax: jax.Array, fmt: Format) -> jax.Array:
        """Returns ceil(log2(amax / max))."""
        # As an integer, a float32 bit pattern is 2^23 * exponent + mantissa. The difference of two
        # patterns, divided by 2^23 and rounded up, is the difference of the exponents, plus one if
        # amax has the larger mantissa. That is ceil(log2(amax / max)).
        bits = lax.bitcast_convert_type(amax.astype(jnp.float32), jnp.int32)
        of_max = int(np.float32(fmt.max).view(np.int32))
        return (bits - of_max + (1 << 23) - 1) >> 23


def _power_of_two(exponent: jax.Array, limit: int) -> jax.Array:
    """Returns 2^exponent, the exponent being at most `limit` in size: 126 at most, since the
    reciprocal must be normal, too."""
    exponent = jnp.clip(exponent, -limit, limit)
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Bias(Pow2):
    """`Pow2` as in the code of Graphcore's authors (popxl-addons, `fp8_amax_scale`).

    Their bias is -log2(scale): floor(log2(max / amax)), between -31 and 31; of gradients that less
    a margin of 3, between -31 and 31 again. (Of an amax of 0 theirs is 31.)
    """

    def __call__(self, amax: jax.Array, fmt: Format) -> tuple[jax.Array, None]:
        exponent = jnp.clip(self._exponent(amax, fmt), -31, 31)
        return _nonzero(amax, _power_of_two(exponent + self.margin, 31)), None


@dataclasses.dataclass(frozen=True)
class Mse(Bias):
    """`Bias`, or up to three binades less: what has the least squared error over the tensor.

    A smaller scale saturates the largest numbers and keeps more of the smallest. Graphcore's
    `fp8_mse_scale` compares all biases by a histogram of binades; here a scale is only compared
    with larger ones that it could gain from, by the errors of the casts themselves. These are sums
    in float32: of two that differ by less than their rounding either may be chosen, by the order of
    the sum. The margin is subtracted from the bias that was chosen.
    """

    lower = 3

    def at(self, amax: jax.Array, fmt: Format, binades: int) -> jax.Array:
        """Returns the scale, without the margin, that is so many binades below that of `Bias`."""
        exponent = jnp.clip(self._exponent(amax, fmt), -31, 31)
        return _nonzero(amax, _power_of_two(exponent - binades, 31))

    def with_margin(self, scale: jax.Array, amax: jax.Array) -> jax.Array:
        """Returns a scale of `at`, with the margin."""
        largest, smallest = 2.0**31, 2.0**-31
        shifted = jnp.clip(scale * np.float32(2.0**self.margin), smallest, largest)
        return jnp.where(amax == 0, 1.0, shifted)


@dataclasses.dataclass(frozen=True)
class E8M0:
    """`Pow2()`, stored as float8_e8m0fnu. With `floor`, exponents are rounded down, not up."""

    floor: bool = False
    power_of_two = True

    def __call__(self, amax: jax.Array, fmt: Format) -> tuple[jax.Array, None]:
        if self.floor:  # for a power of two, ceil(log2(a / M)) is log2(a) - floor(log2(M))
            amax = power_of_two_below(amax.astype(jnp.float32))
        return cast(Pow2()(amax, fmt)[0], "e8m0"), None


@dataclasses.dataclass(frozen=True)
class NvFp4:
    """Two scales: tensor = amax / (448 * max), and tile = e4m3(amax of the tile / max / tensor).

    The tile's scale is at least the smallest e4m3 number, where rounding would give zero. The
    values of a tile far below the tensor's amax then round to zero, and nothing divides by zero.

    Where e4m3 rounds a tile's scale down, by up to 1/17, its largest values lie beyond 6 and are
    clipped, to nearest and stochastically: the mean of a rounded maximum is 0.989 of it on average
    and 0.942 at least, that of the projection on x, <E q, x> / <x, x>, 0.9965 (normal data).

    Class attributes, which the variants change:
      headroom: the factor by which all scales are larger than the amax needs.
      bound: the largest scale of a tile.
    """

    power_of_two = False
    headroom = 1.0
    bound = 448.0

    def __call__(self, amax: jax.Array, fmt: Format) -> tuple[jax.Array, jax.Array | None]:
        tensor_amax = jnp.max(amax, initial=0)
        tensor = _nonzero(tensor_amax, _over(tensor_amax, self._largest(fmt) * self.bound))
        return self.of_tiles(amax, tensor, self._largest(fmt)), tensor

    def _largest(self, fmt: Format) -> float:
        """The number to which scales bring an amax."""
        return fmt.max / self.headroom

    def of_tiles(self, amax: jax.Array, outer: jax.Array, largest: float) -> jax.Array:
        """Returns the e4m3 scales that bring each amax to `largest`, beside an outer scale."""
        e4m3 = FORMATS["e4m3"]
        tile = jnp.maximum(_over(amax, largest) * (1.0 / outer), e4m3.tiny)
        return cast(jnp.where(amax == 0, 1.0, tile), e4m3)


@dataclasses.dataclass(frozen=True)
class Unbiased(NvFp4):
    """`NvFp4` with scales 17/16 as large: stochastic rounding is unbiased, maxima included.

    e4m3 rounds a scale down by at most 1/17, so that no value exceeds 6. (Only of tiles that are
    2^-15 of the tensor, whose scales are subnormal, it may be more.) Quartet II (arXiv 2601.22813)
    and fouroversix (`stochastic_unbiased`) use the factor.
    """

    headroom = 17 / 16


@dataclasses.dataclass(frozen=True)
class FourOverSix(NvFp4):
    """Of two scales of a tile, which bring its amax to 6 and to 4, the one with the smaller error.

    Between 4 and 6 e2m1 has no number, and a tile whose values lie there is off by less if its
    amax is 4 (arXiv 2512.02010). The tile's scale reaches 256 for 6, so that it is at most 384 for
    4. Errors are sums of squares, of integers: `scaled_error`.
    """

    bound = 256.0

    def four(self, amax: jax.Array, tensor: jax.Array) -> jax.Array:
        """Returns the scales that bring each amax to 4, beside the tensor's scale."""
        return self.of_tiles(amax, tensor, 4.0)


@dataclasses.dataclass(frozen=True)
class Outer128(NvFp4):
    """A power-of-two scale for each 1 x 128, times an e4m3 scale per tile (arXiv 2510.27527).

    In TetraJet-v2 the outer scale is amax / (448 * max) of its elements in float32. Here it is
    that, rounded up to a power of two: a code times both scales then has six bits, and bfloat16
    holds it. Both scales are stored as their product, in float32.
    """

    along = 128  # elements along the contracting axis

    def within(self, amax: jax.Array, outer_amax: jax.Array, fmt: Format) -> jax.Array:
        """Returns the product of both scales of each tile, from its amax and that of its 128."""
        largest = self._largest(fmt)
        # Pow2 compares with the format's largest number; e4m3's is the largest of a tile's scale.
        outer, _ = Pow2()(_over(outer_amax, largest), FORMATS["e4m3"])
        scale = self.of_tiles(amax, outer, largest).astype(jnp.float32) * outer
        return jnp.where(amax == 0, 1.0, jnp.maximum(scale, MIN_SCALE))


@dataclasses.dataclass(frozen=True)
class UnbiasedOuter128(Outer128):
    """`Outer128` with scales 17/16 as large, as `Unbiased` is `NvFp4`."""

    headroom = 17 / 16


@dataclasses.dataclass(frozen=True)
class Eden(NvFp4):
    """The scales of MS-EDEN, for the rotated operands of Quartet II's backward (arXiv 2601.22813).

    Codes are rounded to nearest, from scales with the `headroom` of the authors' code, at which
    the error is small. Rounding takes from the length of the rotated vector y of a transform: with
    its codes q, both in units of the scale, the scale of its tiles is multiplied by <y, y> / <y, q>
    and rounded to e4m3 stochastically. So the mean of the projection on y is right. The bound
    leaves room for that factor.
    """

    headroom = 17 / 16 * 0.93
    bound = 255.99


@dataclasses.dataclass(frozen=True)
class Constant:
    """The scale rule that gives every tensor the same scale (Graphcore's FP8-CSCALE: 2^-bias).

    Attributes:
      value: the scale, x ≈ values * value, from 2^-126 to 2^126.

    Raises:
      TypeError: for a value that is not a real number.
      ValueError: for a value out of range.

    Example:
      >>> x = jnp.array([3.0, 100.0])
      >>> q = fp8jax.quantize(x, "e4m3", "tensor", scale=fp8jax.Constant(2**-6))
      >>> fp8jax.dequantize(q)  # 448 * 2^-6 is the largest magnitude
      Array([3., 7.], dtype=float32)
    """

    value: float

    def __post_init__(self):
        if not isinstance(self.value, numbers.Real) or isinstance(self.value, bool):
            raise TypeError(f"a constant scale must be a number, got {brief(self.value)}")
        if not MIN_SCALE <= self.value <= MAX_SCALE:
            raise ValueError(f"a constant scale must be between 2^-126 and 2^126, got {self.value}")

    @property
    def power_of_two(self) -> bool:
        return bool(np.frexp(self.value)[0] == 0.5)

    def __call__(self, amax: jax.Array, fmt: Format) -> tuple[jax.Array, None]:
        return jnp.full_like(amax, self.value), None


ScaleRule = Fp32 | Pow2 | E8M0 | NvFp4 | Constant


def refuse_tile(rule: ScaleRule, tile: Tile, *, hadamard: int) -> None:
    """Raises ValueError for a tile, or a size of the transform, that the rule cannot have."""
    size, along = (tile.free or 0) * (tile.contract or 0), tile.contract
    if isinstance(rule, FourOverSix) and not 0 < size <= 256:
        raise ValueError(f"scale rule 4over6 compares tiles of up to 256 elements, got {tile}")
    if isinstance(rule, Mse) and (tile != TENSOR or hadamard > 1):
        raise ValueError(f"scale rule mse needs tile=TENSOR and no transform, got {tile}")
    if isinstance(rule, Outer128) and (along is None or rule.along % along):
        raise ValueError(
            f"scale rule outer128 needs a tile that divides {rule.along} elements, got {tile}"
        )
    if isinstance(rule, Eden):
        if tile.free != 1 or along is None or hadamard % along or not along < hadamard <= 32:
            raise ValueError(
                "scale rule eden needs tiles of 1 x n, and a Hadamard transform of more than n,"
                f" and at most 32, elements; got {tile} and hadamard={hadamard}"
            )


AMAXES = ("max", "newest")


@dataclasses.dataclass(frozen=True)
class Delayed:
    """Delayed scaling: the scale that a rule gives the amaxes of the last steps.

    Attributes:
      history: how many steps the amax history holds.
      amax: which of its amaxes sets the scale: "max" or "newest".
      rule: `Fp32(margin)`, `Pow2(margin)` or `E8M0()`, or its key in `SCALES`.

    Raises:
      TypeError: for fields of another type.
      ValueError: for a history without steps, an unknown name, and a rule that needs the tensor
        itself or no amax.

    Example:
      >>> e5m2 = fp8jax.FORMATS["e5m2"]
      >>> fp8jax.Cast(format=e5m2, scale=fp8jax.Delayed(history=4, amax="newest"))
      Cast(e5m2 tensor fp32 delayed, newest of 4)
      >>> fp8jax.Delayed(history=4, rule=fp8jax.Constant(2.0))
      Traceback (most recent call last):
          ...
      ValueError: rule=Constant(value=2.0) of delayed scaling: take one of the tensor's amax alone,
      such as Fp32
    """

    history: int
    amax: str = "max"
    rule: ScaleRule = Fp32()

    def __post_init__(self):
        object.__setattr__(self, "rule", as_scale_rule(self.rule))
        if type(self.history) is not int:
            raise TypeError(f"history must be an int, got {brief(self.history)}")
        if self.history < 1:
            raise ValueError(f"history={self.history}: delayed scaling needs at least one amax")
        if self.amax not in AMAXES:
            raise unknown("amax of a history", self.amax, AMAXES)
        if isinstance(self.rule, Constant | NvFp4 | Mse):
            raise ValueError(
                f"rule={self.rule} of delayed scaling: take one of the tensor's amax alone, such as"
                " Fp32"
            )


_ALL: dict[str, ScaleRule] = {
    "fp32": Fp32(),
    "pow2": Pow2(),
    "bias": Bias(),
    "mse": Mse(),
    "e8m0": E8M0(),
    "e8m0_floor": E8M0(floor=True),
    "nvfp4": NvFp4(),
    "unbiased": Unbiased(),
    "4over6": FourOverSix(),
    "outer128": Outer128(),
    "outer128_unbiased": UnbiasedOuter128(),
    "eden": Eden(),
}
SCALES: Table[ScaleRule] = Table("scale rule", _ALL)


def as_scale_rule(rule: str | ScaleRule) -> ScaleRule:
    """Returns `rule`, or the scale rule of that name.

    Raises ValueError for an unknown name, TypeError for what is neither a rule nor a name.
    """
    if isinstance(rule, ScaleRule):
        return rule
    if isinstance(rule, Delayed):
        raise TypeError(f"expected a scale rule, got {rule}: only a Cast has amax histories")
    if not isinstance(rule, str):
        raise TypeError(
            f"expected a scale rule or its name ({', '.join(SCALES)}), got {brief(rule)}: a fixed"
            " scale is Constant(value)"
        )
    if rule not in SCALES:
        raise ValueError(f"{unknown('scale rule', rule, SCALES)}, or a rule such as Pow2(margin=1)")
    return SCALES[rule]
