"""The Hadamard transform and the cast that follows it, in kernels of which each reads x once.

Legend: M rows, K columns; the transform mixes H rows, the tokens that a weight gradient contracts.

XLA makes one kernel of the transform and the cast, too, but computes all H numbers of a block for
each of them: the loads of one block are H * H instead of H, and the program of an `nvfp4` training
step compiles for minutes. Here a thread holds all H rows of a block in registers, of a few columns
next to each other; no thread needs another one's numbers.

    rotated_amax     the largest magnitude of each block of H transformed rows, in each column
    rotated_codes    codes of the transformed numbers, from the reciprocal of each tile's scale

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
from fp8jax.numerics.hadamard import butterflies
from fp8jax.numerics.quantization import larger

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


def _over_blocks(x: Any, size: int, operands: tuple[Array, ...], out: list[Any], block) -> Any:
    """Runs a kernel with one warpgroup for each block of rows and 128, 256 or 512 columns.

    Args:
      x: the source [M, K].
      size: rows of a block.
      operands: further operands.
      out: ShapeDtypeStructs of the results.
      block: block(i, columns, layout, parts, *references) processes block i of rows: `columns`
        slices the columns, and `parts` are the transformed rows, float32 in registers of `layout`.
    """
    each = _columns_each(x.shape[1])
    width = each * BLOCK
    layout = plgpu.Layout.WG_STRIDED((width,), each)

    def body(x_g, *references):
        i, columns = lax.axis_index("m"), pl.ds(lax.axis_index("k") * width, width)
        rows = []
        for row in range(size):
            numbers = load(x_g.at[i * size + row, columns], layout, optimized=False)
            rows.append(numbers.astype(jnp.float32))
        block(i, columns, layout, butterflies(rows), *references)

    grid = (x.shape[0] // size, x.shape[1] // width)
    return launch(body, x, *operands, out=tuple(out), grid=grid, grid_names=("m", "k"))


@functools.partial(jax.jit, static_argnames="size")
def rotated_amax(x: Float[Array, "M K"], size: int) -> Float[Array, "blocks K"]:
    """Returns float32 max|x'| of each block of `size` rows in each column, NaN for a NaN in it.

    Args:
      x: bfloat16 or float32; M is a multiple of `size`, K of 128.
      size: how many rows the transform mixes, one of `SIZES`.

    Raises:
      ValueError: the kernel does not support the array or the size.
      NotImplementedError: the kernels cannot run here.
    """
    _check(x, size)

    def block(i, columns, layout, parts, amax_g):
        amax_g[i, columns] = functools.reduce(larger, parts)

    shape = jax.ShapeDtypeStruct((x.shape[0] // size, x.shape[1]), jnp.float32)
    (amax,) = _over_blocks(x, size, (), [shape], block)
    return amax


@functools.partial(jax.jit, static_argnames=("fmt", "size", "columns"))
def rotated_codes(
    x: Float[Array, "M K"],
    reciprocal: Float[Array, "blocks K"],
    fmt: Format,
    size: int,
    words: UInt32[Array, "4"] | None = None,
    columns: int | None = None,
) -> Shaped[Array, "M K"]:
    """Returns the codes of x' times the reciprocals.

    Args:
      x, size: as in `rotated_amax`.
      reciprocal: float32, one row for each block.
      fmt: e2m1, whose codes are stored in e4m3, or e4m3.
      words: for stochastic rounding: two words of the key (`key_words`), and where this array
        begins in the array whose places `draws` counts, row and column.
      columns: of that array; None for K.

    Raises:
      ValueError: the kernel does not support the operands.
      NotImplementedError: the kernels cannot run here.
    """
    _check(x, size)
    (m, k), length = x.shape, np.uint32(x.shape[1] if columns is None else columns)
    if fmt.name not in ("e2m1", "e4m3") or reciprocal.shape != (m // size, k):
        given = f"{fmt.name}, {reciprocal.shape}"
        raise ValueError(f"expected e2m1 or e4m3, and reciprocals of {x.shape}, got {given}")
    stochastic = words is not None

    def block(i, columns, layout, parts, reciprocal_g, *references):
        codes_g = references[-1]
        scale = load(reciprocal_g.at[i, columns], layout, optimized=False)
        if stochastic:
            words_g = references[0]
            first, second, row, column = (words_g[n] for n in range(4))
            column = column + columns.start.astype(jnp.uint32)
            along = lax.broadcasted_iota(jnp.uint32, scale.shape, 0)
            along = plgpu.layout_cast(along, layout) + column

        # One row at a time, by way of shared memory, where a thread finds what it has written: the
        # program of all rows would be 16 times as long, and need twice as many registers.
        @scoped(scaled_s=plgpu.SMEM((size, *scale.shape), jnp.float32))
        def _(scaled_s):
            for n, part in enumerate(parts):
                scaled_s[n, :] = part * scale

            def cast(n, _):
                noise = None
                if stochastic:
                    at = (row + (i * size + n).astype(jnp.uint32)) * length + along
                    noise = drawn(first, second, at)
                scaled = load(scaled_s.at[n], layout)
                codes_g[i * size + n, columns] = rounded(scaled, fmt, noise).astype(dtype)

            lax.fori_loop(0, size, cast, None)

    dtype = stored(fmt)
    operands = (reciprocal,) if words is None else (reciprocal, words)
    (codes,) = _over_blocks(x, size, operands, [jax.ShapeDtypeStruct((m, k), dtype)], block)
    return codes
