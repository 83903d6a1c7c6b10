"""Tiles: which elements of an array share one scale, and the amax of each tile.

`Tile(free, contract)` says how many elements share a scale along the free (non-contracting) axis
and along the contracting axis of a GEMM. None means the whole axis:

    TENSOR   (None, None)  one scale per tensor             MX32     (1, 32)    OCP Microscaling
    ROW      (1, None)     one scale per token or channel   NV16     (1, 16)    NVFP4
    TOKEN    (None, 1)     one scale per token, in wgrad    NV16x16  (16, 16)   NVFP4 weights
    TILE128  (1, 128)      activations, DeepSeek-V3
    BLOCK128 (128, 128)    weights, DeepSeek-V3

wgrad contracts the tokens. So ROW is there one scale per channel over all tokens, and TOKEN is one
scale per token. The latter changes along the contracting axis and cannot multiply the result: only
the backend `emulated` applies it.

An array of scales or amaxes has the rank of the values, and ceil(dim / tile) entries along each
axis. Tiles at the edge are padded with zeros, which never raise an amax.
"""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from fp8jax.lookup import Table, brief, lookup


@dataclasses.dataclass(frozen=True)
class Tile:
    """How many elements share a scale along the free and the contracting axis of a GEMM.

    Attributes:
      free: elements along the free axis, the last one that is not contracted; None for all.
      contract: elements along the contracting axis; None for all.

    Raises:
      TypeError: for sizes that are neither ints nor None.
      ValueError: for sizes below 1.

    Example:
      >>> fp8jax.Tile(1, 64)
      Tile(free=1, contract=64)
      >>> fp8jax.quantize(jnp.ones((4, 256)), "e4m3", fp8jax.Tile(1, 64)).scale.shape
      (4, 4)
      >>> print(fp8jax.Tile(1, 128))
      tile128
    """

    free: int | None
    contract: int | None

    def __post_init__(self):
        for size in (self.free, self.contract):
            if size is None:
                continue
            if type(size) is not int:
                raise TypeError(
                    "a tile's sizes must be ints, or None for the whole axis, got"
                    f" ({brief(self.free)}, {brief(self.contract)})"
                )
            if size < 1:
                raise ValueError(
                    "a tile must hold at least one element along an axis (None: the whole axis),"
                    f" got ({self.free}, {self.contract})"
                )

    def __str__(self) -> str:
        """The tile's key in `TILES`, or its sizes."""
        sizes = ["all" if size is None else str(size) for size in (self.free, self.contract)]
        return next((name for name, tile in TILES.items() if tile == self), " x ".join(sizes))

    def per_axis(self, ndim: int, contract_axis: int) -> tuple[int | None, ...]:
        """Returns the tile's size along each of `ndim` axes.

        The free axis is the last axis that is not contracted. The remaining axes (batch axes) have
        size None if the tile is the whole tensor, else size 1. Raises ValueError for an axis out of
        range.
        """
        contract_axis = check_axis("contract_axis", contract_axis, ndim) % ndim
        sizes = [None if self == TENSOR else 1] * ndim
        sizes[contract_axis] = self.contract
        others = [axis for axis in range(ndim) if axis != contract_axis]
        if others:
            sizes[others[-1]] = self.free
        return tuple(sizes)


def check_axis(name: str, axis: Any, ndim: int) -> int:
    """Returns `axis` as an int; raises TypeError for others, ValueError for one out of range."""
    try:
        index = operator.index(axis)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {brief(axis)}") from None
    if not -ndim <= index < ndim:
        allowed = f"allowed are {-ndim} to {ndim - 1}" if ndim else "a scalar has no axis"
        raise ValueError(f"{name}={index} is out of range for an array with {ndim=}: {allowed}")
    return index


TENSOR = Tile(None, None)
"""One scale for the whole tensor.

Example:
  >>> fp8jax.quantize(jnp.ones((256, 512)), "e4m3", fp8jax.TENSOR).scale.shape
  (1, 1)
"""
ROW = Tile(1, None)
"""One scale for each row along the contracting axis, such as a token of x or a channel of w.

Example:
  >>> fp8jax.quantize(jnp.ones((256, 512)), "e4m3", fp8jax.ROW).scale.shape
  (256, 1)
"""
TOKEN = Tile(None, 1)
TILE128 = Tile(1, 128)
"""1 x 128 elements, the tiles of activations and gradients in DeepSeek-V3 (arXiv 2412.19437).

Example:
  >>> fp8jax.quantize(jnp.ones((256, 512)), "e4m3", fp8jax.TILE128).scale.shape
  (256, 4)
"""
BLOCK128 = Tile(128, 128)
"""128 x 128 elements, the blocks of weights in DeepSeek-V3 (arXiv 2412.19437).

Example:
  >>> fp8jax.quantize(jnp.ones((256, 512)), "e4m3", fp8jax.BLOCK128).scale.shape
  (2, 4)
"""
MX32 = Tile(1, 32)
"""1 x 32 elements, the tiles of MXFP8 and MXFP4 (OCP Microscaling v1.0).

Example:
  >>> q = fp8jax.quantize(jnp.ones((256, 512)), "e4m3", fp8jax.MX32, scale="e8m0")
  >>> q.scale.shape, q.scale.dtype.name
  ((256, 16), 'float8_e8m0fnu')
"""
NV16 = Tile(1, 16)
"""1 x 16 elements, the tiles of activations and gradients in NVFP4 (arXiv 2509.25149).

Example:
  >>> q = fp8jax.quantize(jnp.ones((256, 512)), "e2m1", fp8jax.NV16, scale="nvfp4")
  >>> q.scale.shape, q.scale.dtype.name, q.tensor_scale.shape
  ((256, 32), 'float8_e4m3fn', ())
"""
NV16x16 = Tile(16, 16)
"""16 x 16 elements, the blocks of weights in NVFP4 (arXiv 2509.25149).

Example:
  >>> fp8jax.quantize(jnp.ones((256, 512)), "e2m1", fp8jax.NV16x16, scale="nvfp4").scale.shape
  (16, 32)
"""

TILES: Table[Tile] = Table(
    "tile",
    {
        "tensor": TENSOR,
        "row": ROW,
        "token": TOKEN,
        "tile128": TILE128,
        "block128": BLOCK128,
        "mx32": MX32,
        "nv16": NV16,
        "nv16x16": NV16x16,
    },
)


TileLike = str | Tile | Sequence[int | None]  # a name, a tile, or (free, contract)


def as_tile(tile: TileLike) -> Tile:
    """Returns `tile`, or the tile of that name, or of (free, contract).

    Raises ValueError for an unknown name, TypeError for anything else.
    """
    if isinstance(tile, Tile):
        return tile
    if isinstance(tile, str):
        return lookup("tile", tile, TILES)
    sizes = tuple(tile) if isinstance(tile, tuple | list) else ()
    if len(sizes) != 2 or not all(s is None or type(s) is int for s in sizes):
        raise TypeError(
            "expected a Tile, its name or (free, contract) of ints or None, such as (1, 128), got"
            f" {brief(tile)}"
        )
    return Tile(*sizes)


def tile_grid(shape: tuple[int, ...], tile: tuple[int | None, ...]) -> list[tuple[int, int]]:
    """Returns (number of tiles, elements per tile) for each axis."""
    return [(1, d) if t is None else (-(-d // t), t) for d, t in zip(shape, tile, strict=True)]


def tile_amax(x: Float[Array, "..."], tile: tuple[int | None, ...]) -> Float[Array, "..."]:
    """Returns float32 max|x| of each tile, with the rank of `x`; NaN where a tile contains NaN.

    The maximum is computed over the bit patterns without the sign. They sort like the magnitudes,
    with NaN above infinity. XLA's floating-point maximum can lose a NaN on CPUs
    (`xla_cpu_enable_fast_min_max`).
    """
    grid = tile_grid(x.shape, tile)
    padding = [(0, n * t - d) for d, (n, t) in zip(x.shape, grid, strict=True)]
    if any(after for _, after in padding):
        x = jnp.pad(x, padding)
    magnitude = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) & 0x7FFFFFFF
    tiles = magnitude.reshape([size for pair in grid for size in pair])
    largest = jnp.max(tiles, axis=tuple(range(1, 2 * x.ndim, 2)), initial=0)
    return lax.bitcast_convert_type(largest, jnp.float32)


def tile_sum(x: Float[Array, "..."], tile: tuple[int | None, ...]) -> Float[Array, "..."]:
    """Returns the sum of each tile of whole numbers, exact below 2^32, with the rank of `x`."""
    grid = tile_grid(x.shape, tile)
    x = jnp.pad(x, [(0, n * t - d) for d, (n, t) in zip(x.shape, grid, strict=True)])
    tiles = x.astype(jnp.uint32).reshape([size for pair in grid for size in pair])
    return jnp.sum(tiles, axis=tuple(range(1, 2 * x.ndim, 2)), dtype=jnp.uint32).astype(jnp.float32)


def joint_amax(arrays: Sequence[Float[Array, "..."]]) -> Float[Array, ""]:
    """Returns float32 max|x| over several arrays; NaN if one of them contains NaN."""
    return tensor_amax(jnp.stack([tensor_amax(x) for x in arrays]))


def tensor_amax(x: Float[Array, "..."]) -> Float[Array, ""]:
    """Returns float32 max|x| of the whole array; NaN if it contains NaN."""
    return tile_amax(x, (None,) * x.ndim).reshape(())


def spread(
    scale: Shaped[Array, "..."], tile: tuple[int | None, ...], shape: tuple[int, ...]
) -> Shaped[Array, "..."]:
    """Repeats each tile's scale over its elements, so that the result broadcasts against `shape`.

    An axis with a single tile keeps length 1.
    """
    for axis, (n, t) in enumerate(tile_grid(shape, tile)):
        # A symbolic number of tiles may be one; repeating it is right, too.
        if (not isinstance(n, int) or n > 1) and t > 1:
            # Not with total_repeat_length: that compiles to a gather with indices from a cumsum.
            scale = lax.slice_in_dim(jnp.repeat(scale, t, axis=axis), 0, shape[axis], axis=axis)
    return scale
