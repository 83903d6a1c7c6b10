"""Plain NumPy and ml_dtypes: what the library's quantizers and products are tested against.

Written for being obviously right, tile by tile, and independent of fp8jax but for the names of
its scale rules and casts. Only the words of random keys come from JAX.
"""

import itertools
import math
from typing import NamedTuple

import jax
import ml_dtypes
import numpy as np

from fp8jax.numerics.recipe import Cast
from fp8jax.numerics.scales import (
    E8M0,
    Bias,
    Constant,
    Eden,
    FourOverSix,
    Fp32,
    Mse,
    NvFp4,
    Outer128,
    Pow2,
    Unbiased,
    UnbiasedOuter128,
)
from fp8jax.numerics.tiles import Tile

DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}
MAX = {"e4m3": 448.0, "e5m2": 57344.0, "e4m3fnuz": 240.0, "e5m2fnuz": 57344.0, "e3m2": 28.0}
MAX |= {"e2m1": 6.0}
KEY_ORDER = ["fwd_x", "fwd_w", "dgrad_g", "dgrad_w", "wgrad_x", "wgrad_g"]
SIGNS = {"dgrad": 13, "wgrad": 14}
# Rule -> how much larger than needed its scales are, and the largest scale of a tile.
NVFP4 = {
    NvFp4: (1, 448),
    Unbiased: (17 / 16, 448),
    FourOverSix: (1, 256),
    Outer128: (1, 448),
    UnbiasedOuter128: (17 / 16, 448),
    Eden: (17 / 16 * 0.93, 255.99),
}


def tiles(shape, tile: Tile, contract_axis: int):
    """(index of the tile, slices of its elements) for every tile."""
    contract_axis %= len(shape)
    others = [a for a in range(len(shape)) if a != contract_axis]
    sizes = []
    for axis, length in enumerate(shape):
        if axis == contract_axis:
            size = tile.contract
        elif axis == others[-1]:
            size = tile.free
        else:
            size = None if tile.free is tile.contract is None else 1
        sizes.append(length if size is None else size)
    starts = [range(0, length, size) for length, size in zip(shape, sizes, strict=True)]
    for corner in itertools.product(*starts):
        index = tuple(c // s for c, s in zip(corner, sizes, strict=True))
        yield index, tuple(slice(c, c + s) for c, s in zip(corner, sizes, strict=True))


# Rounding -----------------------------------------------------------------------------------------


def saturating_cast(x: np.ndarray, fmt: str) -> np.ndarray:
    return stored(np.clip(x, -MAX[fmt], MAX[fmt]).astype(np.float32), fmt)


def stored(x: np.ndarray, fmt: str) -> np.ndarray:
    """The format's nearest numbers of float32 `x`; those of e3m2 as e4m3, which has them all."""
    codes = x.astype(DTYPES[fmt])
    return codes.astype(np.float32).astype(DTYPES["e4m3"]) if fmt == "e3m2" else codes


def finite_values(fmt: str) -> np.ndarray:
    """Every finite number of a format in float64, ascending, zero once and positive."""
    bits = 4 if fmt == "e2m1" else 6 if fmt == "e3m2" else 8
    values = np.arange(2**bits, dtype=np.uint8).view(DTYPES[fmt]).astype(np.float64)
    return np.unique(values[np.isfinite(values)] + 0.0)


def stochastic_cast(x: np.ndarray, fmt: str, draws: np.ndarray) -> np.ndarray:
    """Up to the next number of the format where draw < (x - lo) / (hi - lo), else down."""
    table = finite_values(fmt)
    x = np.clip(np.asarray(x, np.float32).astype(np.float64), table[0], table[-1])
    above = np.searchsorted(table, x, side="right").clip(1, len(table) - 1)
    lo, hi = table[above - 1], table[above]
    return stored(np.where(draws < (x - lo) / (hi - lo), hi, lo).astype(np.float32), fmt)


def mixed(bits: np.ndarray, word) -> np.ndarray:
    """A permutation of 32 bits, in uint64: Chris Wellons' triple32, with a word in it."""
    bits = (bits ^ bits >> 17) * 0xED5AD4BB % 2**32 ^ word
    bits = (bits ^ bits >> 11) * 0xAC4C1B51 % 2**32
    bits = (bits ^ bits >> 15) * 0x31848BAB % 2**32
    return bits ^ bits >> 14


def words_of(key) -> np.ndarray:
    """The words of a key of JAX, or the words that `folded` returned."""
    if not isinstance(key, np.ndarray):
        key = jax.random.key_data(key)
    return np.asarray(key).astype(np.uint64)


def folded(key, *numbers: int) -> np.ndarray:
    """The words of the key of a cast: those of the model's key, mixed with each number in turn."""
    words = words_of(key)
    for number in numbers:
        which = np.array([(i + 1) * 0x85EBCA6B % 2**32 for i in range(words.size)], np.uint64)
        words = mixed(words ^ np.uint64(number * 0x9E3779B9 % 2**32), which)
    return words


def draws(key, shape) -> np.ndarray:
    """The random numbers of stochastic rounding: odd multiples of 2^-17, one for each element.

    A 32-bit hash of each pair of neighboring elements, in row-major order, and of the key's first
    and last word; its lower half is for the first of the two, its upper half for the second.
    """
    words = words_of(key)
    place = np.arange(math.prod(shape), dtype=np.uint64)
    h = mixed(place // 2 ^ words[0], words[-1])
    half = np.where(place % 2 == 1, h >> 16, h % 2**16)
    return ((half.astype(np.float32) + np.float32(0.5)) / np.float32(2**16)).reshape(shape)


def uniform(key, name: str, shape) -> np.ndarray:
    """The draws of the cast of that name, such as "dgrad_g", under the key of the product."""
    return draws(folded(key, KEY_ORDER.index(name)), shape)


# Scales -------------------------------------------------------------------------------------------


def pow2_scale(amax: np.float32, fmt: str, margin: int = 0) -> np.float32:
    """The smallest power of two s with amax <= MAX * s, times 2^margin; by search, in float64."""
    if amax == 0:
        return np.float32(1)
    k = next(k for k in range(-200, 200) if float(amax) <= MAX[fmt] * 2.0**k)
    return np.float32(2.0 ** min(126, max(-126, k + margin)))


def floor_scale(amax: np.float32, fmt: str) -> np.float32:
    """OCP Microscaling v1.0: 2^(floor(log2(amax)) - exponent of the format's largest number)."""
    if amax == 0:
        return np.float32(1)
    # math.frexp's mantissa lies in [0.5, 1): one more than the exponent meant here, on both sides.
    k = math.frexp(float(amax))[1] - math.frexp(MAX[fmt])[1]
    return np.float32(2.0 ** min(126, max(-126, k)))


def scale_of(rule, amax: np.float32, fmt: str, tensor_amax: np.float32):
    """(scale as stored, tensor scale or None) of one tile."""
    one, smallest = np.float32(1), np.float32(2.0**-126)
    if isinstance(rule, Constant):
        return np.float32(rule.value), None
    if isinstance(rule, Fp32):
        scale = amax * (one / np.float32(MAX[fmt])) * np.float32(2.0**rule.margin)
        return one if amax == 0 else max(scale, smallest), None
    if isinstance(rule, Bias):
        bias = min(31, max(-31, -int(np.log2(pow2_scale(amax, fmt)))))
        bias = min(31, max(-31, bias - rule.margin))
        return one if amax == 0 else np.float32(2.0**-bias), None
    if isinstance(rule, Pow2):
        return one if amax == 0 else pow2_scale(amax, fmt, rule.margin), None
    if isinstance(rule, E8M0):
        scale = floor_scale(amax, fmt) if rule.floor else pow2_scale(amax, fmt)
        return scale.astype(DTYPES["e8m0"]), None
    if isinstance(rule, Outer128):
        outer = tensor_amax * (one / np.float32(6 / NVFP4[type(rule)][0]))
        outer = pow2_scale(np.float32(outer), "e4m3")
        scale = np.float32(nvfp4_tile(rule, amax, outer)) * outer
        return one if amax == 0 else max(scale, smallest), None
    if isinstance(rule, NvFp4):
        headroom, bound = NVFP4[type(rule)]
        tensor = tensor_amax * (one / np.float32(6 / headroom * bound))
        tensor = one if tensor_amax == 0 else max(tensor, smallest)
        return nvfp4_tile(rule, amax, tensor), tensor
    raise AssertionError(rule)


def nvfp4_tile(rule, amax: np.float32, outer: np.float32, largest: float = 6.0):
    """The e4m3 scale of one tile, beside an outer scale."""
    one = np.float32(1)
    tile = amax * (one / np.float32(largest / NVFP4[type(rule)][0])) * (one / outer)
    return saturating_cast(one if amax == 0 else max(tile, np.float32(2.0**-9)), "e4m3")


def error_units(scaled: np.ndarray) -> int:
    """The squared error of rounding numbers to e2m1, each to the nearest 2^-8 before: exact."""
    scaled = np.clip(scaled, np.float32(-24), np.float32(24))
    error = (scaled - saturating_cast(scaled, "e2m1").astype(np.float32)) * np.float32(256)
    return int((np.clip(np.rint(error), -1023, 1023).astype(np.int64) ** 2).sum())


def four_over_six(rule, x: np.ndarray, tensor: np.float32):
    """The one of two e4m3 scales of a tile under which it has the smaller error; the larger code
    where both have the same."""
    amax, errors = np.float32(np.abs(x).max()), []
    scales = [nvfp4_tile(rule, amax, tensor, largest) for largest in (6.0, 4.0)]
    for scale in scales:
        scaled = x * (np.float32(1) / (np.float32(scale) * tensor))
        errors.append(np.float32(error_units(scaled)) * np.float32(scale) ** 2)
    return scales[int(errors[1] < errors[0])]


def least_squares(x: np.ndarray, amax: np.float32, fmt: str, margin: int) -> np.float32:
    """Of the power of two of the amax and the three below, that of the least squared error."""
    if amax == 0:
        return np.float32(1)
    bias, found = -int(np.log2(pow2_scale(amax, fmt))), []
    for each in range(bias, bias + 4):
        scale = np.float32(2.0 ** -min(31, max(-31, each)))
        again = saturating_cast(x / scale, fmt).astype(np.float64) * scale
        found.append((np.square(again - x).sum(), float(scale)))
    scale = min(found, key=lambda pair: pair[0])[1]
    return np.float32(min(2.0**31, max(2.0**-31, scale * 2.0**margin)))


def lengthened(scales: np.ndarray, scaled: np.ndarray, axis: int, draws) -> np.ndarray:
    """The scales of `Eden`, times <y, y> / <y, q> of each 32 elements along the axis, to e4m3."""
    y = np.moveaxis(scaled, axis, 0)
    y = y.reshape(-1, 32, *y.shape[1:])
    q = saturating_cast(y, "e2m1").astype(np.float64)
    units = np.rint(np.clip(y, np.float32(-7), np.float32(7)) * np.float32(64)).astype(np.float64)
    squares = (units * units).sum(1).astype(np.float32)
    products = (units * q * 64).sum(1).astype(np.float32)
    factor = np.ones_like(squares)
    np.divide(squares, products, out=factor, where=products != 0)
    longer = scales * np.moveaxis(np.repeat(factor, 2, axis=0), 0, axis)
    if draws is None:
        return saturating_cast(longer, "e4m3")
    return stochastic_cast(longer, "e4m3", draws)


def quantize(
    x: np.ndarray, fmt: str, tile: Tile, contract_axis: int, rule, amax=None, *, draws=None
):
    """(values, float32 scale spread over the elements, scales by tile index); rounded to nearest,
    or with `draws`, uniform numbers of x's shape, stochastically."""
    return quantize_parts(x, fmt, tile, contract_axis, rule, amax, draws=draws)[:3]


class Parts(NamedTuple):
    """What `quantize` returns, and its scales in two: x ≈ values * of_tiles * tensor."""

    values: np.ndarray
    spread: np.ndarray
    scales: dict
    of_tiles: np.ndarray
    tensor: np.float32


def quantize_parts(
    x: np.ndarray, fmt: str, tile: Tile, contract_axis: int, rule, amax=None, *, draws=None
) -> Parts:
    """Of `Eden`, x is the transformed array, and the draws are those of the scales."""
    x = np.asarray(x, np.float32)
    of_tiles, outer, scales = np.ones(x.shape, np.float32), np.float32(1), {}
    outermost = np.abs(x).max(initial=0)
    for index, where in tiles(x.shape, tile, contract_axis):
        own = np.float32(np.abs(x[where]).max()) if amax is None else np.float32(amax)
        if isinstance(rule, Outer128):
            outermost = np.abs(x[around(where, contract_axis, 128)]).max()
        scales[index], tensor = scale_of(rule, own, fmt, outermost)
        if isinstance(rule, Mse):
            scales[index] = least_squares(x, own, fmt, rule.margin)
        if isinstance(rule, FourOverSix):
            scales[index] = four_over_six(rule, x[where], tensor)
        of_tiles[where], outer = np.float32(scales[index]), outer if tensor is None else tensor
    scaled = x * (np.float32(1) / (of_tiles * outer))
    if isinstance(rule, Eden):
        values = saturating_cast(scaled, fmt)
        grid = np.zeros([max(i) + 1 for i in zip(*scales, strict=True)], np.float32)
        for index, scale in scales.items():
            grid[index] = np.float32(scale)
        corrected = lengthened(grid, scaled, contract_axis, draws)
        for index, where in tiles(x.shape, tile, contract_axis):
            scales[index], of_tiles[where] = corrected[index], np.float32(corrected[index])
    else:
        values = (
            saturating_cast(scaled, fmt) if draws is None else stochastic_cast(scaled, fmt, draws)
        )
    return Parts(values, of_tiles * outer, scales, of_tiles, outer)


def around(where, axis: int, size: int):
    """The slices of the `size` elements along the axis of which these are a part."""
    start = where[axis].start // size * size
    parts = list(where)
    parts[axis] = slice(start, start + size)
    return tuple(parts)


# The random Hadamard transform --------------------------------------------------------------------


def bits_of_pi(n: int) -> list[int]:
    """The first n bits of pi's fraction, by Machin's formula in integers."""
    unit = 1 << (n + 32)

    def arctan_of_reciprocal(k: int) -> int:
        total, power, i = 0, unit // k, 0
        while power:
            total += (-1) ** i * (power // (2 * i + 1))
            power, i = power // k**2, i + 1
        return total

    pi = 16 * arctan_of_reciprocal(5) - 4 * arctan_of_reciprocal(239)
    fraction = (pi - 3 * unit) >> 32
    return [fraction >> (n - 1 - i) & 1 for i in range(n)]


def hadamard_matrix(size: int) -> np.ndarray:
    """diag(signs) H / sqrt(size) in float64, H being Sylvester's matrix: x' = x times this."""
    h = np.ones((1, 1))
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    signs = np.array([-1.0 if bit else 1.0 for bit in bits_of_pi(size)])
    return signs[:, None] * h / np.sqrt(size)


def hadamard(x: np.ndarray, size: int, axis: int = -1, word: int = 0) -> np.ndarray:
    """x' in float32, filled up with zeros to whole blocks: sums and differences of the elements
    1, 2, 4, ... apart, each rounded, then one product with 1 / sqrt(size). The bits of the word
    flip signs, too."""
    x = np.moveaxis(np.asarray(x, np.float32), axis, 0)
    out = np.zeros((-(-len(x) // size) * size, *x.shape[1:]), np.float32)
    out[: len(x)] = x
    signs = bits_of_pi(size)
    for i in range(len(out)):
        if signs[i % size] != int(word) >> i % size & 1:
            out[i] = -out[i]
    half = 1
    while half < size:
        for i in range(len(out)):
            if not i & half:
                a, b = out[i].copy(), out[i + half].copy()
                out[i], out[i + half] = a + b, a - b
        half *= 2
    return np.moveaxis(out * np.float32(1 / np.sqrt(size)), 0, axis)


# Operands of products -----------------------------------------------------------------------------


def rotated(x: np.ndarray, cast: Cast | None, contract_axis: int, word: int = 0) -> np.ndarray:
    """x, rotated (and filled up with zeros) if the cast rotates."""
    if cast is None or cast.hadamard == 1:
        return np.asarray(x)
    return hadamard(x, cast.hadamard, contract_axis, word)


def signs_of(key, name: str) -> int:
    """The word of the signs that the cast of that name draws."""
    return int(folded(key, SIGNS[name.partition("_")[0]])[0])


def apply_cast(
    x: np.ndarray,
    cast: Cast | None,
    contract_axis: int,
    amax=None,
    *,
    key=None,
    name=None,
    forward: Cast | None = None,
) -> np.ndarray:
    """x as a product sees it, exact in float64. A cast that rotates gives the rotated operand, to
    be multiplied with another one; a stochastic one needs the product's key and its own name. One
    that requantizes needs the cast of the forward, which contracts the other axis."""
    if cast is None:
        return np.asarray(x, np.float64)
    outer = np.float32(1)
    if cast.requantizes and forward is not None:
        axis = {"x": -1, "w": -2}[name[-1]]
        q = quantize_parts(x, forward.format.name, forward.tile, axis, forward.rule)
        x, outer = q.values.astype(np.float32) * q.of_tiles, q.tensor
    # Where signs are drawn, the contracting axis comes first.
    turned = cast.redrawn and contract_axis == -1
    if turned:
        x, contract_axis = np.swapaxes(x, -1, -2), -2
    x = rotated(x, cast, contract_axis, signs_of(key, name) if cast.redrawn else 0)
    draws = None
    if cast.rounding == "stochastic":
        shape = list(x.shape)
        if isinstance(cast.rule, Eden):
            shape[contract_axis] //= cast.tile.contract
        draws = uniform(key, name, tuple(shape))
    q = quantize_parts(x, cast.format.name, cast.tile, contract_axis, cast.rule, amax, draws=draws)
    # Two scales of tensors are one, rounded once.
    tensor = float(np.float32(q.tensor) * np.float32(outer))
    seen = q.values.astype(np.float64) * q.of_tiles.astype(np.float64) * tensor
    return np.swapaxes(seen, -1, -2) if turned else seen


# The smallest step of the numbers -3 to 3 times this, all of which the format holds.
_STEP = {"e4m3": 1.0, "e5m2": 128.0, "e4m3fnuz": 1.0, "e5m2fnuz": 128.0, "e3m2": 0.5, "e2m1": 0.5}


def unit(cast: Cast | None) -> float:
    """What the `pinned` operand is a multiple of as the product sees it (rotated, if it is)."""
    if cast is None:
        return 1.0
    if isinstance(cast.rule, Constant):
        return _STEP[cast.format.name] * cast.rule.value
    return _STEP[cast.format.name] / 2


def pinned(rng, shape, cast: Cast | None, contract_axis: int) -> np.ndarray:
    """Random numbers that `cast` represents exactly, and bfloat16 as well.

    Every tile's amax is that of a power-of-two scale, which varies from tile to tile; under NVFP4
    one tile has 448 * 2^-7 (or another bound), the largest that a tensor scale of 2^-7 allows. For
    a cast that rotates, these are the rotated numbers, and their exact inverse rotation is
    returned, ending in zeros where a block would not be whole.
    """
    if cast is None:
        return rng.integers(-3, 4, shape).astype(np.float32)
    if cast.hadamard > 1:
        return _pinned_and_rotated(rng, shape, cast, contract_axis)
    constant = isinstance(cast.rule, Constant)
    top = MAX[cast.format.name] * 2.0 ** -getattr(cast.rule, "margin", 0)
    x = rng.integers(-3, 4, shape).astype(np.float32) * np.float32(_STEP[cast.format.name])
    assert np.abs(x).max(initial=0) <= top and top in finite_values(cast.format.name)
    # Exponents differ between tiles where there are several; a delayed amax is for the tensor.
    where_all = [where for _, where in tiles(shape, cast.tile, contract_axis)]
    scales = [cast.rule.value if constant else 2.0 ** rng.integers(-1, 2) for _ in where_all]
    if isinstance(cast.rule, NvFp4):
        scales[rng.integers(len(scales))] = NVFP4[type(cast.rule)][1] * 2.0**-7
    for where, scale in zip(where_all, scales, strict=True):
        block = x[where]
        position = tuple(rng.integers(0, n) for n in block.shape)
        block[position] = top * rng.choice([-1, 1])
        x[where] = block * np.float32(scale)
    return x


def _pinned_and_rotated(rng, shape, cast: Cast, contract_axis: int) -> np.ndarray:
    """At most four numbers a block, one of them the tile's amax, so that their sums are exact."""
    size = cast.hadamard
    contract_axis %= len(shape)
    length = shape[contract_axis]
    blocks = length // size
    plain = Cast(format=cast.format, tile=cast.tile, scale=cast.rule)
    whole = [blocks * size if a == contract_axis else n for a, n in enumerate(shape)]
    x = np.moveaxis(pinned(rng, whole, plain, contract_axis), contract_axis, -1)
    x = x.reshape(*x.shape[:-1], blocks, size)
    order = np.argsort(-np.abs(x) * (1 + rng.random(x.shape) * 1e-3), axis=-1)
    np.put_along_axis(x, order[..., 4:], 0, axis=-1)
    x = (x.astype(np.float64) @ hadamard_matrix(size).T).reshape(*x.shape[:-2], blocks * size)
    out = np.zeros([*x.shape[:-1], length], np.float32)
    out[..., : blocks * size] = x
    assert (out[..., : blocks * size] == x).all()
    return np.moveaxis(out, -1, contract_axis)
