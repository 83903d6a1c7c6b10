"""The 8-, 6- and 4-bit number formats, and `cast`, which converts arrays to them.

In a format with m mantissa bits and exponent bias b, a code with sign bit s, exponent field E and
mantissa field M has the value

    (-1)^s * 2^(E - b) * (1 + M / 2^m)      E > 0   (normal)
    (-1)^s * 2^(1 - b) * (M / 2^m)          E = 0   (subnormal)

| name     | layout | bias | largest | smallest normal | smallest | inf | NaN            |
|----------|--------|------|---------|-----------------|----------|-----|----------------|
| e4m3     | s4.3   | 7    | 448     | 2^-6            | 2^-9     | no  | one (S1111111) |
| e5m2     | s5.2   | 15   | 57344   | 2^-14           | 2^-16    | yes | yes            |
| e4m3fnuz | s4.3   | 8    | 240     | 2^-7            | 2^-10    | no  | one (10000000) |
| e5m2fnuz | s5.2   | 16   | 57344   | 2^-15           | 2^-17    | no  | one (10000000) |
| e3m2     | s3.2   | 3    | 28      | 2^-2            | 2^-4     | no  | no             |
| e2m1     | s2.1   | 1    | 6       | 2^0             | 2^-1     | no  | no             |
| e8m0     | 8.0    | 127  | 2^127   | 2^-127          | 2^-127   | no  | one (0xFF)     |

(Sources: OCP OFP8 and OCP Microscaling v1.0; the fnuz formats, which have neither infinities nor a
negative zero, arXiv 2206.02915.) e8m0 represents only powers of two and has neither a sign nor a
zero: it stores scales, not values. XLA has no type for e3m2: its numbers are stored as those of
e4m3, which has them all, so that an array takes 8 bits an element. The relative spacing of normal
numbers is at most 2^-m, so rounding to nearest has a relative error of at most u = 2^-(m+1): 2^-4
with three mantissa bits, 2^-3 with two, 2^-2 with one.

Saturation. A plain ``astype`` turns 1e4 into NaN (e4m3) or an infinity (e5m2), and a single outlier
would destroy the result of a GEMM. `cast` clips first, so 1e4 becomes 448 in e4m3. Clipping hides
an overflow, so `quantize` (quantization.py) sets the *scale* to NaN where the source itself is not
finite.

Rounding is arithmetic on float32 numbers, and the conversion that follows is exact. XLA may leave
out a conversion to a narrow dtype and back (`xla_allow_excess_precision`, on by default on GPUs).
Here that changes no number, since the arithmetic has rounded before.

Stochastic rounding rounds x, which lies between its neighbors lo <= x <= hi, up with probability
(x - lo) / (hi - lo), to the nearest 2^-16 of it: the expected result is x to within 2^-17 of the
spacing, and exact numbers stay. Adding uniform noise to the bits below the mantissa was rejected:
it is biased for subnormals, where the spacing is not a fixed number of bits. The noise is a hash of
an element's place in its array (`draws`). JAX's own random numbers cost more than all the rest of a
cast.

Only `cast` and the kernels convert arrays to these dtypes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Shaped, UInt32

from fp8jax.lookup import Table, brief, lookup, unknown


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """The properties of a number format.

    Attributes:
      name: the format's key in `FORMATS`.
      dtype: the JAX dtype of its arrays, for e3m2 that of e4m3.
      bits: bits per element of the format.
      mantissa: the number m of explicit mantissa bits.
      min_exponent: log2 of the smallest normal number; below it the spacing is constant.
      max: the largest finite magnitude.
      signed: whether the format has negative numbers.
      has_nan: whether the format can store NaN. If not, `cast` turns NaN into zero, and the scale
        has to be NaN instead.
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
        """The largest relative error of rounding a normal number to nearest, 2^-(m+1)."""
        return 2.0 ** -(self.mantissa + 1)

    @property
    def tiny(self) -> float:
        """The smallest positive number (subnormal where the format has subnormals)."""
        return 2.0 ** (self.min_exponent - self.mantissa)


# np.dtype objects, not scalar types: `jnp.float8_e4m3fn` equals its dtype but has another hash, so
# two equal recipes would compile twice.
_ALL = (
    Format(
        name="e4m3",
        dtype=jnp.dtype(jnp.float8_e4m3fn),
        bits=8,
        mantissa=3,
        min_exponent=-6,
        max=448.0,
    ),
    Format(
        name="e5m2",
        dtype=jnp.dtype(jnp.float8_e5m2),
        bits=8,
        mantissa=2,
        min_exponent=-14,
        max=57344.0,
    ),
    Format(
        name="e4m3fnuz",
        dtype=jnp.dtype(jnp.float8_e4m3fnuz),
        bits=8,
        mantissa=3,
        min_exponent=-7,
        max=240.0,
    ),
    Format(
        name="e5m2fnuz",
        dtype=jnp.dtype(jnp.float8_e5m2fnuz),
        bits=8,
        mantissa=2,
        min_exponent=-15,
        max=57344.0,
    ),
    Format(
        name="e3m2",
        dtype=jnp.dtype(jnp.float8_e4m3fn),
        bits=6,
        mantissa=2,
        min_exponent=-2,
        max=28.0,
        has_nan=False,
    ),
    Format(
        name="e2m1",
        dtype=jnp.dtype(jnp.float4_e2m1fn),
        bits=4,
        mantissa=1,
        min_exponent=0,
        max=6.0,
        has_nan=False,
    ),
    Format(
        name="e8m0",
        dtype=jnp.dtype(jnp.float8_e8m0fnu),
        bits=8,
        mantissa=0,
        min_exponent=-127,
        max=2.0**127,
        signed=False,
    ),
)
FORMATS: Table[Format] = Table("format", {fmt.name: fmt for fmt in _ALL})
"""The number formats by name, of 8, 6 or 4 bits; e8m0 is for scales.

`max` is the largest finite magnitude, `tiny` the smallest positive number, and `unit_roundoff` the
largest relative error of rounding a normal number to nearest. An unknown name raises ValueError
with similar names.

Example:
  >>> list(fp8jax.FORMATS)
  ['e4m3', 'e5m2', 'e4m3fnuz', 'e5m2fnuz', 'e3m2', 'e2m1', 'e8m0']
  >>> e4m3 = fp8jax.FORMATS["e4m3"]
  >>> e4m3.max, e4m3.tiny, e4m3.unit_roundoff
  (448.0, 0.001953125, 0.0625)
  >>> fp8jax.FORMATS["e4m4"]
  Traceback (most recent call last):
      ...
  fp8jax.lookup.UnknownNameError: unknown format 'e4m4'; did you mean 'e4m3' or ...
"""


ROUNDINGS = ("nearest", "stochastic")


FormatLike = str | Format | np.dtype | type  # a name, a format, or its dtype


def as_format(fmt: FormatLike) -> Format:
    """Returns `fmt`, or the format of that name or dtype (`jnp.float8_e4m3fn`).

    Raises ValueError for an unknown name, TypeError for anything else and for other dtypes.
    """
    if isinstance(fmt, Format):
        return fmt
    if isinstance(fmt, str):
        return lookup("format", fmt, FORMATS)
    dtypes = {known.dtype: known for known in FORMATS.values() if known.name != "e3m2"}
    if isinstance(fmt, np.dtype | type) or hasattr(fmt, "dtype"):
        try:
            return dtypes[jnp.dtype(fmt)]
        except (KeyError, TypeError):
            pass
    raise TypeError(
        f"expected a format, its dtype or its name ({', '.join(FORMATS)}), got {brief(fmt)}"
    )


def check_float(name: str, x) -> None:
    """Raises TypeError unless `x` is an array of a real float dtype of 16 or more bits."""
    if not (hasattr(x, "dtype") and hasattr(x, "shape")):
        raise TypeError(
            f"{name} must be an array, got {type(x).__name__} {brief(x)}: convert it with"
            " jnp.asarray"
        )
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize < 2:
        raise TypeError(f"{name} must be float32, bfloat16 or float16, got {x.dtype}")


def check_result_dtype(name: str, dtype: Any) -> None:
    """Raises TypeError unless `dtype` is a real float dtype of 16 or more bits."""
    try:
        resolved = jnp.dtype(dtype)
    except TypeError:
        raise TypeError(
            f"{name} must be float32, bfloat16 or float16, got {brief(dtype)}"
        ) from None
    check_float(name, jax.ShapeDtypeStruct((), resolved))


def check_key(key: Any) -> None:
    """Raises TypeError unless `key` is one PRNG key: of `jax.random.key`, or raw uint32 [n]."""
    if hasattr(key, "dtype") and hasattr(key, "shape"):
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ():
            return
        if key.dtype == jnp.uint32 and len(key.shape) == 1:
            return
        got = f"an array of {key.dtype}{list(key.shape)}"
    else:
        got = f"{type(key).__name__} {brief(key)}"
    raise TypeError(f"key must be one PRNG key, such as jax.random.key(0), got {got}")


def check_holds_values(fmt: Format) -> None:
    """Raises ValueError for a format of scales alone."""
    if not fmt.signed:
        raise ValueError(f"{fmt.name} holds scales, not values: use a signed format")


def check_rounding(fmt: Format, rounding: Any, key: Any) -> None:
    """Raises ValueError for an unknown rounding, and for a key that is missing or unused.

    Also for stochastic rounding to a format for scales; TypeError as `check_key`.
    """
    if rounding not in ROUNDINGS:
        raise unknown("rounding", rounding, ROUNDINGS)
    if (key is not None) != (rounding == "stochastic"):
        takes = "a key, such as jax.random.key(0)" if key is None else "no key"
        raise ValueError(f"{rounding=} takes {takes}, got key={brief(key)}")
    if key is not None:
        check_key(key)
        if not fmt.signed:
            raise ValueError(f"{fmt.name} is a format for scales: use rounding='nearest'")


def cast(
    x: Float[Array, "..."],
    fmt: FormatLike,
    *,
    rounding: str = "nearest",
    key: Shaped[Array, "..."] | None = None,
) -> Shaped[Array, "..."]:
    """Converts `x` to format `fmt`, clipping at the format's largest magnitude.

    Args:
      x: an array of any shape in a float dtype. float64 is rounded to float32 first.
      fmt: a key of `FORMATS`, a `Format` or its dtype.
      rounding: "nearest" (ties to even) or "stochastic" (unbiased; needs `key`).
      key: a PRNG key, for stochastic rounding only.

    Returns:
      An array with x's shape and the format's dtype. NaN stays NaN if the format has NaN, and
      becomes zero in e3m2 and e2m1. Infinities saturate like any large number. In e8m0, which has
      neither sign nor zero, zero and negative numbers become NaN.

    Raises:
      TypeError: for an x that is not an array of a float dtype of 16 or more bits.
      ValueError: for an unknown format or rounding, a missing or an unused key, and for
        stochastic rounding to e8m0.

    Example:
      >>> x = jnp.array([0.3, 1000.0, 1e-6])
      >>> fp8jax.cast(x, "e4m3")
      Array([0.3125, 448, 0], dtype=float8_e4m3fn)
      >>> fp8jax.cast(x, jnp.float8_e5m2)
      Array([0.3125, 1024, 0], dtype=float8_e5m2)
    """
    check_float("x", x)
    fmt = as_format(fmt)
    check_rounding(fmt, rounding, key)
    return cast_unchecked(x, fmt, None if key is None else draws(key, places(x.shape)))


def cast_unchecked(
    x: Float[Array, "..."], fmt: Format, noise: Float[Array, "..."] | None = None
) -> Shaped[Array, "..."]:
    """`cast`, to nearest or, with `noise` in (0, 1) of x's shape (`draws`), stochastically."""
    # float32 contains every format exactly, so converting from float32 rounds once, not twice.
    x = x.astype(jnp.float32)
    if not fmt.signed:
        # On the bits: float arithmetic would flush 2^-127, a float32 subnormal, to zero.
        raw = lax.bitcast_convert_type(x, jnp.uint32)
        over = (raw > 0x7F000000) & (raw <= 0x7F800000)  # above 2^127, up to infinity
        raw = jnp.where(over, jnp.uint32(0x7F000000), raw)
        return lax.bitcast_convert_type(raw, jnp.float32).astype(fmt.dtype)
    return rounded(x, fmt, noise).astype(fmt.dtype)


def rounded(
    x: Float[Array, "..."], fmt: Format, noise: Float[Array, "..."] | None
) -> Float[Array, "..."]:
    """Returns the numbers of the codes in float32, as `cast_unchecked` of a float32 `x`."""
    x = jnp.minimum(jnp.maximum(x, -fmt.max), fmt.max)
    if not fmt.has_nan:
        x = jnp.where(x != x, 0.0, x)
    exponent = lax.bitcast_convert_type(x, jnp.uint32) & np.uint32(0x7F800000)
    exponent = jnp.maximum(exponent, np.uint32((fmt.min_exponent + 127) << 23))
    exponent = exponent - np.uint32(fmt.mantissa << 23)
    spacing = lax.bitcast_convert_type(exponent, jnp.float32)  # 2^k; large for a NaN
    # 2^-k has the exponent field 254 less that of 2^k; the products are exact.
    inverse = lax.bitcast_convert_type(np.uint32(254 << 23) - exponent, jnp.float32)
    steps = x * inverse
    nearest = lax.round(steps, lax.RoundingMethod.TO_NEAREST_EVEN)
    if noise is None:
        return nearest * spacing
    below = jnp.where(nearest > steps, nearest - 1.0, nearest)  # the kernels have no floor
    return jnp.where(noise < steps - below, below + 1.0, below) * spacing


def places(shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """Returns the place of each element of an array, in row-major order, modulo 2^32."""
    total, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        # A symbolic size (jax.export) is not a number yet.
        known = isinstance(stride, int)
        step = np.uint32(stride % 2**32) if known else jnp.asarray(stride).astype(jnp.uint32)
        total = total + lax.broadcasted_iota(jnp.uint32, shape, axis) * step
        stride *= shape[axis]
    return total


def draws(key: Shaped[Array, "..."], at: UInt32[Array, "..."]) -> Float[Array, "..."]:
    """Returns a number for each place, uniform over the 2^16 odd multiples of 2^-17 below 1.

    One 32-bit hash of the key's first and last word serves two neighboring places: its lower half
    the even one, its upper half the odd one. Its rounds and constants are those of Chris Wellons'
    `triple32`; with the two rounds of his `lowbias32`, draws 768 places apart had a correlation of
    -0.4%. Within one key a hash is a permutation of 32 bits, so that all 2^16 numbers are equally
    frequent. Draws repeat after 2^32 places.
    """
    return drawn(*key_words(key), at)


def key_words(key: Shaped[Array, "..."]) -> tuple[UInt32[Array, ""], UInt32[Array, ""]]:
    """Returns the first and the last word of a key."""
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    words = key.reshape(-1)
    return words[0], words[-1]


def drawn(
    first: UInt32[Array, ""], last: UInt32[Array, ""], at: UInt32[Array, "..."]
) -> Float[Array, "..."]:
    """`draws` for these words of a key."""
    bits = _mixed((at >> 1) ^ first, last)
    half = jnp.where((at & 1) == 1, bits >> 16, bits & np.uint32(0xFFFF))
    return (half.astype(jnp.float32) + 0.5) * 2.0**-16


def folded(key: Shaped[Array, "..."], number: Any) -> Shaped[Array, "..."]:
    """Returns another key of the same kind for each number, for `draws`.

    What `jax.random.fold_in` does, in the operations of one draw: a training step derives 22 keys
    in each layer, and the hashes of JAX's keys took most of the time to compile it.
    """
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    words = jax.random.key_data(key) if typed else key
    which = np.arange(1, words.size + 1, dtype=np.uint32) * np.uint32(0x85EBCA6B)
    mixed = _mixed(words ^ jnp.asarray(number).astype(jnp.uint32) * np.uint32(0x9E3779B9), which)
    return jax.random.wrap_key_data(mixed, impl=jax.random.key_impl(key)) if typed else mixed


def _mixed(bits: UInt32[Array, "..."], word: Any) -> UInt32[Array, "..."]:
    """Returns a permutation of 32 bits, a different one for each word."""
    bits = ((bits ^ (bits >> 17)) * np.uint32(0xED5AD4BB)) ^ word
    bits = (bits ^ (bits >> 11)) * np.uint32(0xAC4C1B51)
    bits = (bits ^ (bits >> 15)) * np.uint32(0x31848BAB)
    return bits ^ (bits >> 14)


def power_of_two_below(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns 2^floor(log2|x|) of float32 `x`, exact: its exponent bits (0 for 0, NaN for NaN)."""
    bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0x7F800000)
    return nan_unless(~jnp.isnan(x), lax.bitcast_convert_type(bits, jnp.float32))


def nan_unless(sound: Bool[Array, "..."], x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Returns x where it is `sound`, else NaN.

    The bits are selected. A constant NaN would be the result of an operation in each program, which
    `jax_debug_nans` would take for the cause of whatever goes wrong.
    """
    nan = np.array(np.nan, x.dtype)
    unsigned = np.dtype(f"uint{8 * nan.itemsize}")
    bits = jnp.where(sound, lax.bitcast_convert_type(x, unsigned), nan.view(unsigned))
    return lax.bitcast_convert_type(bits, x.dtype)
