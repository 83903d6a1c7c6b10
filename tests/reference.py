"""Plain NumPy and ml_dtypes: what the library's quantisers and products are tested against.

Written for being obviously right, tile by tile, and independent of fp8jax but for the names of
its scale rules and casts.
"""

import itertools

import ml_dtypes
import numpy as np

from fp8jax.recipe import Cast
from fp8jax.scaling import E8M0, Constant, Fp32, NvFp4, Pow2, Tile

DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}
MAX = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}


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
            size = None if tile.free is None else 1
        sizes.append(length if size is None else size)
    starts = [range(0, length, size) for length, size in zip(shape, sizes, strict=True)]
    for corner in itertools.product(*starts):
        index = tuple(c // s for c, s in zip(corner, sizes, strict=True))
        yield index, tuple(slice(c, c + s) for c, s in zip(corner, sizes, strict=True))


def saturating_cast(x: np.ndarray, fmt: str) -> np.ndarray:
    return np.clip(x, -MAX[fmt], MAX[fmt]).astype(np.float32).astype(DTYPES[fmt])


def pow2_scale(amax: np.float32, fmt: str, margin: int = 0) -> np.float32:
    """The smallest power of two s with amax <= MAX * s, times 2^margin; by search, in float64."""
    if amax == 0:
        return np.float32(1)
    k = next(k for k in range(-200, 200) if float(amax) <= MAX[fmt] * 2.0**k)
    return np.float32(2.0 ** min(126, max(-126, k + margin)))


def scale_of(rule, amax: np.float32, fmt: str, tensor_amax: np.float32):
    """(scale as stored, tensor scale or None) of one tile."""
    one = np.float32(1)
    if isinstance(rule, Constant):
        return np.float32(rule.value), None
    if isinstance(rule, Fp32):
        return one if amax == 0 else amax * (one / np.float32(MAX[fmt])), None
    if isinstance(rule, Pow2):
        return one if amax == 0 else pow2_scale(amax, fmt, rule.margin), None
    if isinstance(rule, E8M0):
        return pow2_scale(amax, fmt).astype(DTYPES["e8m0"]), None
    if isinstance(rule, NvFp4):
        tensor = one if tensor_amax == 0 else tensor_amax * (one / np.float32(6 * 448))
        tile = amax * (one / np.float32(6)) * (one / tensor)
        tile = one if amax == 0 else max(tile, np.float32(2.0**-9))
        return saturating_cast(tile, "e4m3"), tensor
    raise AssertionError(rule)


def quantize(x: np.ndarray, fmt: str, tile: Tile, contract_axis: int, rule, amax=None):
    """(values, float32 scale spread over the elements, scales by tile index)."""
    x = np.asarray(x, np.float32)
    values = np.zeros(x.shape, DTYPES[fmt])
    spread = np.zeros(x.shape, np.float32)
    scales = {}
    for index, where in tiles(x.shape, tile, contract_axis):
        own = np.float32(np.abs(x[where]).max()) if amax is None else np.float32(amax)
        scale, tensor = scale_of(rule, own, fmt, np.abs(x).max())
        whole = np.float32(scale) if tensor is None else np.float32(np.float32(scale) * tensor)
        values[where] = saturating_cast(x[where] * np.float32(np.float32(1) / whole), fmt)
        spread[where] = whole
        scales[index] = scale
    return values, spread, scales


def apply_cast(x: np.ndarray, cast: Cast | None, contract_axis: int, amax=None) -> np.ndarray:
    """x as a product sees it, in float64."""
    if cast is None:
        return np.asarray(x, np.float64)
    values, spread, _ = quantize(
        x, cast.format.name, cast.tile, contract_axis, cast.scale, amax
    )  # fmt: skip
    return values.astype(np.float64) * spread.astype(np.float64)


def pinned(rng, shape, cast: Cast | None, contract_axis: int) -> np.ndarray:
    """Random numbers that `cast` represents exactly: every tile's amax is max * 2^k, with k
    varying from tile to tile, so that every scale is the power of two 2^k."""
    if cast is None:
        return rng.integers(-3, 4, shape).astype(np.float32)
    top = MAX[cast.format.name]
    unit = {"e4m3": 1.0, "e5m2": 128.0, "e2m1": 0.5}[cast.format.name]
    x = rng.integers(-3, 4, shape).astype(np.float32) * np.float32(unit)
    for _, where in tiles(shape, cast.tile, contract_axis):
        block = x[where]
        position = tuple(rng.integers(0, n) for n in block.shape)
        block[position] = top * rng.choice([-1, 1])
        # Exponents differ between tiles where there are several; a delayed amax is for the tensor.
        x[where] = block * np.float32(2.0 ** rng.integers(-1, 2))
    return x
