"""FP8 products on Hopper's matrix unit with a scale for each row of both operands.

    y[m, n] = sa[m] * sb[n] * sum over k    a[m, k] b[n, k]

Codes have K last, E4M3 or, one of the two, E5M2: wgmma takes a type for each operand. The scales
are constant along K, so they are multiplied into the finished sums, in float32 and before the one
rounding to the result's dtype. The alternative, `lax.dot_general` and a product after it, rounds
twice and reads and writes the result once more: XLA folds only a scalar into the GEMM.

The whole of K is summed in the matrix unit, as in cuBLAS's fast accumulation: 14 bits, without the
promotion that scales along K bring with them (block_gemm.py). Nothing but the tensor core then
works
during the loop:

  * The accumulator stays where wgmma adds, so a warpgroup has registers for 64 x 256 of it (128 a
    thread). Wide tiles matter: each block of K reads (64 W + tile_n) * 128 bytes for
    64 W * tile_n * 128 products.
  * The product of block c + 1 is issued before that of block c is awaited. So the slot of a block
    is given back one block late, and the unit has work while a warpgroup waits for the next.
  * Two blocks of threads, a cluster, share each tile of b, which is the larger: 3%.
  * Scales are read while the last product of a tile runs: those of rows and of the first columns
    stored, the others each one store ahead. All columns' at once do not fit the registers.

The tiles, the copying warpgroup and the stores are those of block_gemm.py.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from fp8jax.kernels.block_gemm import (
    ROWS,
    Shape,
    TuningConfig,
    give_back,
    launch_product,
    next_slot,
    over_tiles,
    result_memory,
    result_of,
    shared,
    slots_given_back,
    write,
)
from fp8jax.kernels.hopper import BLOCK, load, scoped, swizzled
from fp8jax.kernels.requirements import require

CODES = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2))


TUNING = TuningConfig(tile_n=256, along_n=True, band=16, cluster=2)


_BUFFERS = 2  # of each warpgroup's result: one is filled while the other is stored


def _check(a: Array, b: Array, sa: Array, sb: Array, out_dtype: Any) -> None:
    """Raises ValueError for operands that do not fit together or that the kernel does not take."""
    given = f"a {a.dtype}{a.shape}, b {b.dtype}{b.shape}, sa {sa.shape}, sb {sb.shape}"
    matrices = a.ndim == b.ndim == 2 and a.size and b.size
    if not matrices or a.shape[1] != b.shape[1] or a.shape[1] % BLOCK:
        raise ValueError(f"expected a [M, K] and b [N, K] with K whole blocks of 128, got {given}")
    if a.dtype not in CODES or b.dtype not in CODES:
        raise ValueError(f"the kernel multiplies float8_e4m3fn and float8_e5m2 codes, got {given}")
    if a.dtype == b.dtype == CODES[1]:
        raise ValueError(f"one of the operands is float8_e4m3fn, got {given}")
    if sa.shape != a.shape[:1] or sb.shape != b.shape[:1]:
        raise ValueError(f"scales are [M] and [N], got {given}")
    if sa.dtype != jnp.float32 or sb.dtype != jnp.float32:
        raise ValueError(f"scales are float32, got {sa.dtype} and {sb.dtype}")
    if a.shape[0] % 8 or b.shape[0] % 64:
        raise ValueError(f"M is a multiple of 8 and N of 64, got {given}")
    if jnp.dtype(out_dtype) not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"results are bfloat16 or float32, got {out_dtype}")


@functools.partial(jax.jit, static_argnames=("out_dtype", "tuning"))
def row_scaled_matmul(
    a: Float[Array, "M K"],
    b: Float[Array, "N K"],
    sa: Float[Array, " M"],
    sb: Float[Array, " N"],
    out_dtype: Any = jnp.bfloat16,
    tuning: TuningConfig | None = None,
) -> Float[Array, "M N"]:
    """The product of the module's docstring.

    Args:
      a, b: float8_e4m3fn codes; one of them may be float8_e5m2.
      sa, sb: float32.
      out_dtype: bfloat16 or float32.
      tuning: how it is cut; None takes `TUNING`.

    Raises:
      ValueError: operands that do not fit or that the kernel does not take, with what was given.
      NotImplementedError: another device or jax.
    """
    require()
    _check(a, b, sa, sb, out_dtype)
    tuning = TUNING if tuning is None else tuning
    shape = Shape(a.shape[0], a.shape[1], b.shape[0], True, jnp.dtype(out_dtype), tuning)
    # Unlike TMA, loads to registers do not stop at the end: tiles read whole.
    sa = jnp.pad(sa, (0, shape.tiles[0] * tuning.cluster * shape.tile_m - shape.m))
    sb = jnp.pad(sb, (0, shape.tiles[1] * tuning.tile_n - shape.n))
    return launch_product(shape, _matmul, a, b, sa, sb)


def _matmul(shape: Shape, a_g, b_g, sa_g, sb_g, y_g) -> None:
    t = shape.tuning

    def codes(rows: int, like: Any) -> Any:
        transforms = swizzled(like.dtype, BLOCK)
        return plgpu.SMEM((t.stages, rows, BLOCK), like.dtype, transforms=transforms)

    @scoped(
        a_s=codes(shape.tile_m, a_g),
        b_s=codes(t.tile_n, b_g),
        y_s=result_memory(shape, _BUFFERS),
        full=plgpu.Barrier(num_arrivals=2, num_barriers=t.stages),
        empty=slots_given_back(t),
        collective_axes="warpgroup",
    )
    def _(a_s, b_s, y_s, full, empty):
        def fetch(c, s, rows, columns):
            block = pl.ds(c * BLOCK, BLOCK)
            plgpu.copy_gmem_to_smem(a_g.at[rows, block], a_s.at[s], full.at[s])
            plgpu.copy_gmem_to_smem(b_g.at[columns, block], b_s.at[s], full.at[s], **shared(t))

        def multiply(warpgroup, count, position):
            mine = pl.ds(warpgroup * ROWS, ROWS)

            def tile(i, slot):
                m, n = position(i)
                rows, columns = _scales(shape, sa_g, sb_g, m, n, warpgroup)

                def product(accumulator):
                    end = _add_blocks(shape, accumulator, a_s.at[:, mine], b_s, slot, full, empty)
                    of_rows, of_columns = rows(), columns(0)
                    sums = plgpu.wgmma_accumulator_load(accumulator, wait_n=0)
                    give_back(t, empty.at[_previous(end, t.stages)])
                    return sums, of_rows, of_columns, end

                accumulator = plgpu.ACC((ROWS, t.tile_n), jnp.float32)
                sums, of_rows, first, slot = pl.run_scoped(product, accumulator)
                ahead = [first]

                def piece(at):
                    part = sums[:, at : at + shape.out_columns]
                    of_columns = ahead.pop()
                    if at + shape.out_columns < t.tile_n:
                        ahead.append(columns(at + shape.out_columns))
                    part = part * lax.broadcast_in_dim(of_rows, part.shape, (0,))
                    return part * lax.broadcast_in_dim(of_columns, part.shape, (1,))

                write(shape, piece, y_s.at[warpgroup], result_of(shape, y_g, m, n, warpgroup))
                return slot

            lax.fori_loop(0, count, tile, jnp.int32(0))

        over_tiles(shape, empty, fetch, multiply)


def _previous(slot, stages: int):
    return jnp.where(slot == 0, jnp.int32(stages - 1), slot - 1)


def _add_blocks(shape: Shape, accumulator, a_s, b_s, slot, full, empty):
    """Issues the products of all blocks of K, the first of which is in `slot`, and awaits all but
    the last, whose slot is not given back yet. Returns the slot after it."""
    stages, unroll = shape.tuning.stages, shape.unroll
    static = unroll % stages == 0

    def some(j, slot):
        for u in range(unroll):
            s = u % stages if static else slot
            before = (u - 1) % stages if static else _previous(slot, stages)
            plgpu.barrier_wait(full.at[s])
            plgpu.wgmma(accumulator, a_s.at[s], b_s.at[s].transpose((1, 0)))
            plgpu.wgmma_wait(1)

            @pl.when((j > 0) | (u > 0))
            def _(before=before):
                give_back(shape.tuning, empty.at[before])

            slot = slot if static else next_slot(slot, stages)
        return slot

    return lax.fori_loop(0, shape.blocks // unroll, some, slot)


def _scales(shape: Shape, sa_g, sb_g, m, n, warpgroup) -> tuple[Callable, Callable]:
    """Loads for a warpgroup's part of tile (m, n): those of its rows, and those of the
    out_columns columns from the given one on."""
    layout = plgpu.Layout.WGMMA

    def rows():
        begin = m * shape.tile_m + warpgroup * ROWS
        return load(sa_g.at[pl.ds(begin, ROWS)], layout.reduce(1), optimized=False)

    def columns(at):
        those = pl.ds(n * shape.tuning.tile_n + at, shape.out_columns)
        return load(sb_g.at[those], layout.reduce(0), optimized=False)

    return rows, columns
