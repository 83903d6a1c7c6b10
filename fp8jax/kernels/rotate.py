"""The Hadamard transform and the cast that follows it, in kernels of which each reads x once.

Legend: M rows, K columns; the transform mixes H rows, the tokens that a weight gradient contracts.

XLA makes one kernel of the transform and the cast, too, but computes all H numbers of a block for
each of them: the loads of one block are H * H instead of H, and the program of an `nvfp4` training
step compiles for minutes. Here a thread holds all H rows of a block in registers, of a few columns
next to each other; no thread needs another one's numbers.

    rotated_amax       the largest magnitude of each block of H transformed rows, in each column
    rotated_codes      codes of the transformed numbers, from the reciprocal of each tile's scale
    rotated_errors     the squared errors of such codes, summed over each block in each column
    rotated_lengths    codes to nearest, and the lengths of each block that Quartet II compares

In between, XLA turns amaxes into scales, as for every other cast: they are few, and may depend on
the amax of the whole tensor. The kernels call the functions of numerics/hadamard.py and
numerics/formats.py, so that codes have the same bits everywhere. E2M1 codes are stored as E4M3
codes, which have all their values.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Shaped, UInt32

from fp8jax.kernels.hopper import BLOCK, launch, load, scoped, stored
from fp8jax.numerics.formats import Format, drawn, rounded
from fp8jax.numerics.hadamard import butterflies, sign_of
from fp8jax.numerics.quantization import larger, lengths, squared_error

SIZES = (2, 4, 8, 16, 32)  # more rows than that do not fit a thread's registers


def _check(x: Array, size: int) -> None:
    """Raises ValueError for a source that the kernels do not support."""
    if size not in SIZES:
        raise ValueError(f"the kernel transforms 2, 4, 8, 16 or 32 rows, got {size}")
    if x.ndim != 2 or not x.size or x.shape[0] % size or x.shape[1] % BLOCK:
        raise ValueError(
            f"the kernel needs whole blocks of {size} rows and {BLOCK} columns, got {x.shape}"
        )
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"the kernel needs a bfloat16 or float32 array, got {x.dtype}")


def _columns_each(columns: int) -> int:
    """Returns how many neighboring columns a thread holds."""
    return next(n for n in (4, 2, 1) if columns % (n * BLOCK) == 0)


def _over_blocks(
    x: Any, size: int, signs: Any, operands: tuple[Array, ...], out: list[Any], block
) -> Any:
    """Runs a kernel with one warpgroup for each block of rows and 128, 256 or 512 columns.

    Args:
      x: the source [M, K].
      size: rows of a block.
      signs: the word of new signs, or None.
      operands: further operands.
      out: ShapeDtypeStructs of the results.
      block: block(i, columns, layout, parts, *references) processes block i of rows: `columns`
        slices the columns, and `parts` are the transformed rows, float32 in registers of `layout`.
    """
    each = _columns_each(x.shape[1])
    width = each * BLOCK
    layout = plgpu.Layout.WG_STRIDED((width,), each)
    words = () if signs is None else (signs.reshape(1),)

    def body(x_g, *references):
        i, columns = lax.axis_index("m"), pl.ds(lax.axis_index("k") * width, width)
        rows = []
        for row in range(size):
            numbers = load(x_g.at[i * size + row, columns], layout, optimized=False)
            rows.append(numbers.astype(jnp.float32))
        if words:
            word = references[0][0]
            rows = [numbers * sign_of(word, row) for row, numbers in enumerate(rows)]
        block(i, columns, layout, butterflies(rows), *references[len(words) :])

    grid = (x.shape[0] // size, x.shape[1] // width)
    return launch(body, x, *words, *operands, out=tuple(out), grid=grid, grid_names=("m", "k"))


def _of_block(i: Any, tiles: int, tile: int) -> Any:
    """Returns the row of that tile of block i, in arrays with a row for each tile."""
    return i if tiles == 1 else i * tiles + tile


def _scales(i, columns, layout, reciprocal_g, tiles: int, rows: int) -> list[jax.Array]:
    """Returns for each row of block i the reciprocal of the scale of its tile."""
    scales = [
        load(reciprocal_g.at[_of_block(i, tiles, tile), columns], layout, optimized=False)
        for tile in range(tiles)
    ]
    return [scales[n * tiles // rows] for n in range(rows)]


def _one_by_one(
    parts: list[jax.Array], scales: list[jax.Array], layout, of_row, carry: Any = None
) -> Any:
    """Runs carry = of_row(n, read, carry) for each row, and returns the last carry.

    read() is part n * scale n. One row at a time, by way of shared memory, where a thread finds
    what it has written: the program of all rows would be 16 times as long, and need twice as many
    registers.
    """

    @scoped(scaled_s=plgpu.SMEM((len(parts), *parts[0].shape), jnp.float32))
    def result(scaled_s):
        for n, (part, scale) in enumerate(zip(parts, scales, strict=True)):
            scaled_s[n, :] = part * scale

        def step(n, carry):
            return of_row(n, lambda: load(scaled_s.at[n], layout), carry)

        return lax.fori_loop(0, len(parts), step, carry)

    return result


def _zeros(like: jax.Array, layout) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(like.shape, jnp.float32), layout)


@functools.partial(jax.jit, static_argnames=("size", "tile"))
def rotated_amax(
    x: Float[Array, "M K"],
    size: int,
    tile: int | None = None,
    signs: UInt32[Array, ""] | None = None,
) -> Float[Array, "tiles K"]:
    """Returns float32 max|x'| of each tile of a block in each column, NaN for a NaN in it.

    Args:
      x: bfloat16 or float32; M is a multiple of `size`, K of 128.
      size: how many rows the transform mixes, one of `SIZES`.
      tile: how many of them share a scale; None for all.
      signs: the word of new signs (`whole_hadamard`), or None.

    Raises:
      ValueError: the kernel does not support the array or the size.
      NotImplementedError: the kernels cannot run here.
    """
    _check(x, size)
    tile = size if tile is None else tile
    tiles = size // tile

    def block(i, columns, layout, parts, amax_g):
        for n in range(tiles):
            amax_g[_of_block(i, tiles, n), columns] = functools.reduce(
                larger, parts[n * tile : (n + 1) * tile]
            )

    shape = jax.ShapeDtypeStruct((x.shape[0] // tile, x.shape[1]), jnp.float32)
    (amax,) = _over_blocks(x, size, signs, (), [shape], block)
    return amax


def _check_codes(x: Array, reciprocal: Array, fmt: Format, size: int, tiles: int) -> None:
    """Raises ValueError for operands that the kernels which cast do not support."""
    _check(x, size)
    (m, k), expected = x.shape, (x.shape[0] // size * tiles, x.shape[1])
    if fmt.name not in ("e2m1", "e4m3") or reciprocal.shape != expected:
        given = f"{fmt.name}, {reciprocal.shape}"
        raise ValueError(f"expected e2m1 or e4m3, and reciprocals of {(m, k)}, got {given}")


@functools.partial(jax.jit, static_argnames=("fmt", "size", "columns"))
def rotated_codes(
    x: Float[Array, "M K"],
    reciprocal: Float[Array, "blocks K"],
    fmt: Format,
    size: int,
    words: UInt32[Array, "4"] | None = None,
    columns: int | None = None,
    signs: UInt32[Array, ""] | None = None,
) -> Shaped[Array, "M K"]:
    """Returns the codes of x' times the reciprocals.

    Args:
      x, size, signs: as in `rotated_amax`.
      reciprocal: float32, one row for each block.
      fmt: e2m1, whose codes are stored in e4m3, or e4m3.
      words: for stochastic rounding: two words of the key (`key_words`), and where this array
        begins in the array whose places `draws` counts, row and column.
      columns: of that array; None for K.

    Raises:
      ValueError: the kernel does not support the operands.
      NotImplementedError: the kernels cannot run here.
    """
    _check_codes(x, reciprocal, fmt, size, 1)
    length = np.uint32(x.shape[1] if columns is None else columns)
    stochastic = words is not None

    def block(i, columns, layout, parts, reciprocal_g, *references):
        codes_g = references[-1]
        scales = _scales(i, columns, layout, reciprocal_g, 1, size)
        if stochastic:
            words_g = references[0]
            first, second, row, column = (words_g[n] for n in range(4))
            column = column + columns.start.astype(jnp.uint32)
            along = lax.broadcasted_iota(jnp.uint32, scales[0].shape, 0)
            along = plgpu.layout_cast(along, layout) + column

        def cast(n, read, _):
            noise = None
            if stochastic:
                at = (row + (i * size + n).astype(jnp.uint32)) * length + along
                noise = drawn(first, second, at)
            codes_g[i * size + n, columns] = rounded(read(), fmt, noise).astype(dtype)

        _one_by_one(parts, scales, layout, cast)

    dtype = stored(fmt)
    operands = (reciprocal,) if words is None else (reciprocal, words)
    shape = jax.ShapeDtypeStruct(x.shape, dtype)
    (codes,) = _over_blocks(x, size, signs, operands, [shape], block)
    return codes


@functools.partial(jax.jit, static_argnames=("fmt", "size"))
def rotated_errors(
    x: Float[Array, "M K"], reciprocal: Float[Array, "blocks K"], fmt: Format, size: int
) -> Float[Array, "blocks K"]:
    """Returns the sum of `squared_error` of x' times the reciprocals over each block in a column.

    Args and errors are those of `rotated_codes`.
    """
    _check_codes(x, reciprocal, fmt, size, 1)

    def block(i, columns, layout, parts, reciprocal_g, errors_g):
        errors_g[i, columns] = _one_by_one(
            parts,
            _scales(i, columns, layout, reciprocal_g, 1, size),
            layout,
            lambda n, read, total: total + squared_error(read(), fmt),
            _zeros(parts[0], layout),
        )

    shape = jax.ShapeDtypeStruct(reciprocal.shape, jnp.float32)
    (errors,) = _over_blocks(x, size, None, (reciprocal,), [shape], block)
    return errors


@functools.partial(jax.jit, static_argnames=("fmt", "size"))
def rotated_lengths(
    x: Float[Array, "M K"],
    reciprocal: Float[Array, "tiles K"],
    fmt: Format,
    size: int,
    signs: UInt32[Array, ""] | None = None,
) -> tuple[Shaped[Array, "M K"], Float[Array, "blocks K"], Float[Array, "blocks K"]]:
    """Returns the codes to nearest of x' times the reciprocals, and the sums of their `lengths`.

    The sums are over each block in a column. `reciprocal` has one row for each of the tiles of a
    block; other args and errors are those of `rotated_codes`.
    """
    tiles = reciprocal.shape[0] * size // x.shape[0] if x.ndim == 2 and x.size else 1
    _check_codes(x, reciprocal, fmt, size, tiles)
    dtype = stored(fmt)

    def block(i, columns, layout, parts, reciprocal_g, codes_g, squares_g, products_g):
        def cast(n, read, sums):
            scaled = read()
            codes_g[i * size + n, columns] = rounded(scaled, fmt, None).astype(dtype)
            more = lengths(scaled, fmt)
            return tuple(total + one for total, one in zip(sums, more, strict=True))

        scales = _scales(i, columns, layout, reciprocal_g, tiles, size)
        zeros = _zeros(parts[0], layout)
        squares, products = _one_by_one(parts, scales, layout, cast, (zeros, zeros))
        squares_g[i, columns], products_g[i, columns] = squares, products

    sums = jax.ShapeDtypeStruct((x.shape[0] // size, x.shape[1]), jnp.float32)
    shapes = [jax.ShapeDtypeStruct(x.shape, dtype), sums, sums]
    codes, squares, products = _over_blocks(x, size, signs, (reciprocal,), shapes, block)
    return codes, squares, products
