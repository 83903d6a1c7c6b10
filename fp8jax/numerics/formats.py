"""Number formats of eight and four bits, and the one cast into them.

A code of a format with m mantissa bits, exponent bias b and raw exponent E stands for

    (-1)^s * 2^(E - b) * (1 + M / 2^m)      E > 0   (normal)
    (-1)^s * 2^(1 - b) * (M / 2^m)          E = 0   (subnormal)

| name | layout | bias | largest | smallest normal | smallest | inf | NaN            |
|------|--------|------|---------|-----------------|----------|-----|----------------|
| e4m3 | s4.3   | 7    | 448     | 2^-6            | 2^-9     | no  | one (S1111111) |
| e5m2 | s5.2   | 15   | 57344   | 2^-14           | 2^-16    | yes | yes            |
| e2m1 | s2.1   | 1    | 6       | 2^0             | 2^-1     | no  | no             |
| e8m0 | 8.0    | 127  | 2^127   | 2^-127          | 2^-127   | no  | one (0xFF)     |

(OCP OFP8 and OCP Microscaling v1.0.) e8m0 holds powers of two only and has neither sign nor
zero: it is a format for scales, not for values. Relative spacing is at most 2^-m, so rounding to
nearest is off by at most u = 2^-(m+1) relative in the normal range: e4m3 2^-4, e5m2 2^-3,
e2m1 2^-2.

Saturation. A plain ``astype`` turns 1e4 into NaN (e4m3) or an infinity (e5m2): one outlier would
destroy a product. `cast` clips first, so that 1e4 becomes 448. That hides an overflow, hence the
companion rule in scaling.py: where the source itself is not finite, the *scale* becomes NaN.

Stochastic rounding rounds x between its neighbors lo <= x <= hi up with probability
(x - lo) / (hi - lo), so that its expectation is x. The alternative that was rejected, adding
uniform noise to the bits below the mantissa, is biased among the subnormals, where the spacing is
no longer a fixed number of bits.

`cast` and the kernels are the only places of the library that convert to these dtypes.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from fp8jax.lookup import lookup, unknown


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """A number format.

    Attributes:
      name: key in `FORMATS`.
      dtype: the JAX dtype that stores it.
      bits: storage of one element.
      mantissa: explicit mantissa bits m.
      min_exponent: log2 of the smallest normal; below it the spacing is constant.
      max: the largest finite magnitude.
      signed: whether negative numbers exist.
      has_nan: whether a NaN can be stored. Where it cannot, a NaN casts to zero and the scale has
        to carry it.
    """

    name: str
    dtype: jnp.dtype
    bits: int
    mantissa: int
    min_exponent: int
    max: float
    signed: bool = True
    has_nan: bool = True

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of rounding a normal number to nearest."""
        return 2.0 ** -(self.mantissa + 1)

    @property
    def tiny(self) -> float:
        """The smallest positive number (subnormal where the format has subnormals)."""
        return 2.0 ** (self.min_exponent - self.mantissa)


# np.dtype objects, not scalar types: `jnp.float8_e4m3fn` equals its dtype but hashes differently,
# which would make two equal recipes compile twice.
FORMATS = {
    f.name: f
    for f in (
        Format(
            name="e4m3", dtype=jnp.dtype(jnp.float8_e4m3fn), bits=8, mantissa=3, min_exponent=-6,
            max=448.0,
        ),
        Format(
            name="e5m2", dtype=jnp.dtype(jnp.float8_e5m2), bits=8, mantissa=2, min_exponent=-14,
            max=57344.0,
        ),
        Format(
            name="e2m1", dtype=jnp.dtype(jnp.float4_e2m1fn), bits=4, mantissa=1, min_exponent=0,
            max=6.0, has_nan=False,
        ),
        Format(
            name="e8m0", dtype=jnp.dtype(jnp.float8_e8m0fnu), bits=8, mantissa=0,
            min_exponent=-127, max=2.0**127, signed=False,
        ),
    )
}  # fmt: skip


ROUNDINGS = ("nearest", "stochastic")


def as_format(fmt: str | Format) -> Format:
    """`fmt`, resolved if it is a name. Raises ValueError for an unknown one."""
    return fmt if isinstance(fmt, Format) else lookup("format", fmt, FORMATS)


def cast(
    x: Float[Array, "..."],
    fmt: str | Format,
    *,
    rounding: str = "nearest",
    key: Shaped[Array, "..."] | None = None,
) -> Shaped[Array, "..."]:
    """`x` in format `fmt`, saturating at its largest magnitude.

    Args:
      x: values of any shape in a float dtype. float64 is rounded to float32 first.
      fmt: a key of `FORMATS` or a `Format`.
      rounding: "nearest" (ties to even) or "stochastic" (unbiased, needs `key`).
      key: a PRNG key, for stochastic rounding only.

    Returns:
      An array of x's shape and the format's dtype. NaN stays NaN where the format has one and
      becomes zero in e2m1; infinities saturate like any large number; in e8m0, which has neither
      sign nor zero, zero and negative numbers become NaN.

    Raises:
      ValueError: for an unknown format or rounding, a missing or an unused key, and for
        stochastic rounding to e8m0.
    """
    fmt = as_format(fmt)
    if rounding not in ROUNDINGS:
        raise unknown("rounding", rounding, ROUNDINGS)
    if (key is not None) != (rounding == "stochastic"):
        raise ValueError(f"{rounding=} takes {'a' if key is None else 'no'} key, got {key=}")
    # Every format is a subset of float32, and from float32 there is one rounding, not two.
    x = x.astype(jnp.float32)
    if not fmt.signed:
        if rounding == "stochastic":
            raise ValueError(f"{fmt.name} is a format for scales: round it to nearest or up")
        # In integers: float arithmetic would flush 2^-127, a float32 subnormal, to zero.
        raw = lax.bitcast_convert_type(x, jnp.uint32)
        over = (raw > 0x7F000000) & (raw <= 0x7F800000)  # above 2^127, up to infinity
        raw = jnp.where(over, jnp.uint32(0x7F000000), raw)
        return lax.bitcast_convert_type(raw, jnp.float32).astype(fmt.dtype)
    x = jnp.clip(x, -fmt.max, fmt.max)
    if not fmt.has_nan:
        x = jnp.where(jnp.isnan(x), 0.0, x)
    if key is not None:
        x = _round_stochastically(x, fmt, key)
    return x.astype(fmt.dtype)


def _round_stochastically(x: jax.Array, fmt: Format, key: jax.Array) -> jax.Array:
    """float32 `x` within ±fmt.max to a neighbor in `fmt`, still as float32. Exact arithmetic."""
    binade = jnp.maximum(power_of_two_below(x), 2.0**fmt.min_exponent)
    spacing = binade * 2.0**-fmt.mantissa
    steps = x / spacing  # a power of two: no rounding
    below = jnp.floor(steps)
    up = jax.random.uniform(key, x.shape) < steps - below  # both sides exact to 2^-23
    return (below + up) * spacing


def power_of_two_below(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """2^floor(log2|x|) of float32 `x`, exactly: its exponent bits (0 for 0, NaN for NaN)."""
    bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0x7F800000)
    return jnp.where(jnp.isnan(x), jnp.nan, lax.bitcast_convert_type(bits, jnp.float32))
