"""The FP8 GEMM with one scale per row of both operands, on Hopper's matrix unit.

    y[m, n] = sa[m] * sb[n] * sum over k    a[m, k] b[n, k]

Codes have K last. They are E4M3, but one of the operands may be E5M2: `wgmma` accepts a different
type for each. The scales are constant along K, so they multiply the finished sums, in float32,
before these are rounded once to the dtype of the result. The alternative is `lax.dot_general`
followed by a multiplication. It rounds twice, and reads and writes the result once more, because
XLA folds only a scalar into the GEMM.

The matrix unit sums over the whole of K with 14 bits, as in cuBLAS's fast accumulation. There is no
promotion, which scales along K require (block_gemm.py). So only the matrix unit works during the
loop over K:

  * The accumulator stays in the registers that `wgmma` adds to, so a warpgroup has enough registers
    for 64 x 256 sums (128 per thread). Wide tiles matter: each block of K reads
    (64 W + tile_n) * 128 bytes for 64 W * tile_n * 128 multiplications.
  * The `wgmma` of block c + 1 is issued before that of block c is awaited, so the matrix unit has
    work while a warpgroup waits for the next slot. Each slot is given back one block late.
  * A cluster of two thread blocks shares each tile of b, the larger operand. That gains 3%.
  * Scales are loaded while the last `wgmma` of a tile runs: the row scales and those of the first
    columns to store. The other column scales are loaded one store ahead. Registers cannot hold the
    scales of all columns at once.

block_gemm.py has the code for the tiles, the copying warpgroup and the stores.
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
    check_operands,
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
from fp8jax.kernels.hopper import load, num_cores, scoped, swizzled
from fp8jax.kernels.requirements import require

CODES = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2))

TUNING = TuningConfig(tile_n=256, along_n=True, band=16, cluster=2)

DEPTH = 64  # elements of K in a slot of bfloat16: 128 bytes, as of 128 codes

_BUFFERS = 2  # for each warpgroup's result: one is filled while the other is stored


_check = functools.partial(check_operands, dtypes=CODES, scales_along_k=False)


@functools.partial(jax.jit, static_argnames=("out_dtype", "tuning"))
def row_scaled_matmul(
    a: Float[Array, "M K"],
    b: Float[Array, "N K"],
    sa: Float[Array, " M"],
    sb: Float[Array, " N"],
    out_dtype: Any = jnp.bfloat16,
    tuning: TuningConfig | None = None,
) -> Float[Array, "M N"]:
    """Returns the GEMM of the module docstring.

    Args:
      a, b: float8_e4m3fn codes; one of them may be float8_e5m2. M is a multiple of 8, N of 64, K of
        128.
      sa, sb: float32 scales of the rows of a and b.
      out_dtype: bfloat16 or float32.
      tuning: the tuning parameters; None uses `TUNING`.

    Raises:
      ValueError: the kernel does not support the operands, or they do not fit together.
      NotImplementedError: the kernels cannot run here.
    """
    require()
    _check(a, b, sa, sb, out_dtype)
    tuning = TUNING if tuning is None else tuning
    shape = Shape(a.shape[0], a.shape[1], b.shape[0], True, jnp.dtype(out_dtype), tuning)
    # Loads to registers read the scales of whole tiles. Unlike TMA they do not stop at the end of
    # an array, so the scales are padded to whole tiles.
    sa = jnp.pad(sa, (0, shape.tiles[0] * tuning.cluster * shape.tile_m - shape.m))
    sb = jnp.pad(sb, (0, shape.tiles[1] * tuning.tile_n - shape.n))
    return launch_product(shape, _matmul, a, b, sa, sb)


@functools.partial(jax.jit, static_argnames=("axes", "out_dtype", "tuning"))
def scaled_matmul(
    a: Float[Array, "..."],
    b: Float[Array, "..."],
    scale: Float[Array, ""],
    axes: tuple[int, int],
    out_dtype: Any = jnp.bfloat16,
    tuning: TuningConfig | None = None,
) -> Float[Array, "M N"]:
    """Returns scale * a b, with sums in float32 that are rounded once.

    cuBLAS's GEMM of bfloat16 operands, as XLA calls it, takes no scale that is computed. XLA then
    writes the sums in float32, and reads them again to multiply.

    Args:
      a, b: bfloat16 matrices.
      scale: float32.
      axes: the contracting axis of each, -1 or -2. K and N are multiples of 64, M of 8.
      out_dtype: bfloat16 or float32.
      tuning: the tuning parameters; None uses `TUNING`.

    Raises:
      ValueError: the kernel does not support the operands, or they do not fit together.
      NotImplementedError: the kernels cannot run here.
    """
    require()
    (m, k), (n, k_of_b) = (
        x.shape if axis == -1 else x.shape[::-1] for x, axis in zip((a, b), axes, strict=True)
    )
    if a.dtype != jnp.bfloat16 or b.dtype != jnp.bfloat16 or k != k_of_b:
        raise ValueError(f"expected bfloat16 matrices of one K, got {a}, {b} and {axes=}")
    if min(m, k, n) == 0 or m % 8 or n % 64 or k % DEPTH:
        raise ValueError(f"M must be a multiple of 8, N and K of 64, got M={m}, K={k}, N={n}")
    tuning = TUNING if tuning is None else tuning
    shape = Shape(
        m,
        k,
        n,
        True,
        jnp.dtype(out_dtype),
        tuning,
        depth=DEPTH,
        k_first=(axes[0] == -2, axes[1] == -2),
    )
    sa = jnp.broadcast_to(scale, (shape.tiles[0] * tuning.cluster * shape.tile_m,))
    return launch_product(shape, _matmul, a, b, sa, jnp.ones(shape.tiles[1] * tuning.tile_n))


def fits_scaled(m: int, k: int, n: int) -> bool:
    """Whether `scaled_matmul` takes matrices of these sizes, and has tiles for half of the SMs."""
    if not (min(m, k, n) > 0 and m % 8 == 0 and n % 64 == 0 and k % DEPTH == 0):
        return False
    rows = ROWS * TUNING.warpgroups
    return 2 * -(-m // rows) * -(-n // TUNING.tile_n) >= num_cores()


def _matmul(shape: Shape, a_g, b_g, sa_g, sb_g, y_g) -> None:
    """The kernel. Suffixes: _g references to global memory, _s to shared memory."""
    t = shape.tuning

    def slots(rows: int, like: Any, k_first: bool) -> Any:
        size = (shape.depth, rows) if k_first else (rows, shape.depth)
        transforms = swizzled(like.dtype, size[1])
        return plgpu.SMEM((t.stages, *size), like.dtype, transforms=transforms)

    @scoped(
        a_s=slots(shape.tile_m, a_g, shape.k_first[0]),
        b_s=slots(t.tile_n, b_g, shape.k_first[1]),
        y_s=result_memory(shape, _BUFFERS),
        full=plgpu.Barrier(num_arrivals=2, num_barriers=t.stages),
        empty=slots_given_back(t),
        collective_axes="warpgroup",
    )
    def _(a_s, b_s, y_s, full, empty):
        def fetch(c, s, rows, columns):
            block = pl.ds(c * shape.depth, shape.depth)
            of_a, of_b = (
                (block, of) if first else (of, block)
                for of, first in zip((rows, columns), shape.k_first, strict=True)
            )
            plgpu.copy_gmem_to_smem(a_g.at[of_a], a_s.at[s], full.at[s])
            plgpu.copy_gmem_to_smem(b_g.at[of_b], b_s.at[s], full.at[s], **shared(t))

        def multiply(warpgroup, count, position):
            mine = pl.ds(warpgroup * ROWS, ROWS)

            def tile(i, slot):
                m, n = position(i)
                rows, columns = _scales(shape, sa_g, sb_g, m, n, warpgroup)

                def multiply_tile(accumulator):
                    of_mine = a_s.at[:, :, mine] if shape.k_first[0] else a_s.at[:, mine]
                    end = _add_blocks(shape, accumulator, of_mine, b_s, slot, full, empty)
                    of_rows, of_columns = rows(), columns(0)
                    sums = plgpu.wgmma_accumulator_load(accumulator, wait_n=0)
                    give_back(t, empty.at[_previous(end, t.stages)])
                    return sums, of_rows, of_columns, end

                accumulator = plgpu.ACC((ROWS, t.tile_n), jnp.float32)
                sums, of_rows, first, slot = pl.run_scoped(multiply_tile, accumulator)
                ahead = [first]  # the column scales of the next store

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
    """Returns the slot before `slot`, which wraps around."""
    return jnp.where(slot == 0, jnp.int32(stages - 1), slot - 1)


def _add_blocks(shape: Shape, accumulator, a_s, b_s, slot, full, empty):
    """Issues the `wgmma`s of all blocks of K of a tile, and awaits all but the last.

    The slot of the last block is not given back yet.

    Args:
      shape: the GEMM.
      accumulator: the sums.
      a_s, b_s: the slots of the codes; a_s only with this warpgroup's rows.
      slot: the slot of the first block.
      full, empty: the barriers of each slot: codes have arrived, the slot has been read.

    Returns:
      The slot after that of the last block.
    """
    stages, unroll = shape.tuning.stages, shape.unroll
    static = unroll % stages == 0

    def some(j, slot):
        for u in range(unroll):
            s = u % stages if static else slot
            before = (u - 1) % stages if static else _previous(slot, stages)
            plgpu.barrier_wait(full.at[s])
            left, right = a_s.at[s], b_s.at[s]
            left = left.transpose((1, 0)) if shape.k_first[0] else left
            plgpu.wgmma(accumulator, left, right if shape.k_first[1] else right.transpose((1, 0)))
            plgpu.wgmma_wait(1)

            @pl.when((j > 0) | (u > 0))
            def _(before=before):
                give_back(shape.tuning, empty.at[before])

            slot = slot if static else next_slot(slot, stages)
        return slot

    return lax.fori_loop(0, shape.blocks // unroll, some, slot)


def _scales(shape: Shape, sa_g, sb_g, m, n, warpgroup) -> tuple[Callable, Callable]:
    """Returns functions that load the scales of a warpgroup's part of tile (m, n).

    Returns:
      (rows, columns): rows() loads the row scales; columns(at) loads those of `out_columns` columns
      from column `at` of the tile on.
    """
    layout = plgpu.Layout.WGMMA

    def rows():
        begin = m * shape.tile_m + warpgroup * ROWS
        return load(sa_g.at[pl.ds(begin, ROWS)], layout.reduce(1), optimized=False)

    def columns(at):
        those = pl.ds(n * shape.tuning.tile_n + at, shape.out_columns)
        return load(sb_g.at[those], layout.reduce(0), optimized=False)

    return rows, columns
