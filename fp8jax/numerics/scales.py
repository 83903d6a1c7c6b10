"""TODO docstring."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8jax.lookup import unknown
from fp8jax.numerics.formats import FORMATS, Format, cast, power_of_two_below

# Scales and their reciprocals stay normal float32 numbers: XLA flushes subnormals to zero on some
# backends, and a scale of zero would turn a tiny tensor into infinities.
MIN_SCALE = 2.0**-126


MAX_SCALE = 2.0**126


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
