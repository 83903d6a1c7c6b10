"""TODO docstring."""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped


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


def tile_grid(shape: tuple[int, ...], tile: tuple[int | None, ...]) -> list[tuple[int, int]]:
    """(number of tiles, elements a tile) for each axis."""
    return [(1, d) if t is None else (-(-d // t), t) for d, t in zip(shape, tile, strict=True)]


def tile_amax(x: Float[Array, "..."], tile: tuple[int | None, ...]) -> Float[Array, "..."]:
    """float32 max|x| of each tile, with the rank of `x`; NaN where a tile holds a NaN.

    The maximum is taken over bit patterns, which order like the numbers, NaN above infinity above
    all else: XLA's floating-point maximum loses a NaN on CPUs (`xla_cpu_enable_fast_min_max`).
    """
    grid = tile_grid(x.shape, tile)
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
    for axis, (n, t) in enumerate(tile_grid(shape, tile)):
        if n > 1 and t > 1:
            # Without total_repeat_length, which makes it a gather with indices from a cumsum.
            scale = lax.slice_in_dim(jnp.repeat(scale, t, axis=axis), 0, shape[axis], axis=axis)
    return scale
