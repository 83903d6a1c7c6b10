"""The FP8 GEMM with block scales, on Hopper's matrix unit.

Legend: M rows of a, N rows of b, K the contracting axis, c = 0 … K / 128 - 1 its blocks.

    y[m, n] = sum over c    sa[c, m] * sb[c, n] * sum over k in c    a[m, k] b[n, k]

a and b are E4M3 codes with K last, as `wgmma` needs them. sb has one entry per 128 rows of b
(blocks of 128 x 128: weights, in forward and dgrad), or one per row of b (tiles of 1 x 128: both
operands of wgrad).

Hopper's matrix unit accumulates FP8 products with only 14 bits (arXiv 2412.19437, 3.3.2). So the
sum over each block starts from zero; it is then scaled and added to float32 registers. This is
called promotion. It happens every 128 elements of K, which is what the scales require anyway.

One thread block runs on each streaming multiprocessor (SM, `core` in the code) and iterates over
output tiles of 64 * W rows and `tile_n` columns. W warpgroups multiply 64 rows each. One more
warpgroup only copies (TMA): it stays up to `stages` blocks of K ahead, also across tiles. Measured
results that shaped the kernel:

  * The loop over K is unrolled for all stages, so that addresses are constants. When slots were
    computed as remainders, `wgmma` waited for address arithmetic, and the kernel was a tenth
    slower.
  * Scales of b's blocks are loaded one iteration of the loop ahead. If they were loaded where they
    are used, each block of K would wait for the L2 cache. Those of one iteration are adjacent in
    memory, which takes one load and few registers.
  * Only the scale multiplications run between two `wgmma`s. Row scales are loaded while the first
    one runs, and the wait for the slot of the second comes before the first ends. This gained 8%.
  * While one warpgroup promotes, the others multiply. Forward and dgrad use three warpgroups of
    64 x 128. Wgrad uses two of 64 x 160, because it has two more multiplications per element and
    has to load column scales.
  * The alternative was to promote one block while the same warpgroup's next `wgmma` runs, with 64
    more registers. With two warpgroups it is as fast on a cool chip, but 5 to 10% slower at the
    power limit, where a training chip runs. (It needs a wait for the next slot between the two:
    ptxas moves arithmetic across a wait for `wgmma`, but not across a branch.)
  * Warpgroups that take turns, wider tiles, fewer barriers and clusters gained nothing here
    (docs/results/hopper_kernels.md). row_gemm.py gains from clusters, because it does nothing else
    between `wgmma`s.

M must be a multiple of 8, N of 64, and K of 128. Tiles may extend beyond M and N: TMA fills those
parts with zeros when it reads, and clips them when it writes. The GEMM of row_gemm.py iterates over
its tiles in the same way.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from fp8jax.kernels.hopper import BLOCK, launch, load, num_cores, scoped, swizzled
from fp8jax.kernels.requirements import require

E4M3 = jnp.dtype(jnp.float8_e4m3fn)
ROWS = 64  # rows that one warpgroup multiplies
WGMMA = plgpu.Layout.WGMMA

_PEER = "peer"  # the name of the cluster's axis
_REGISTERS = 65536 // 128  # registers of an SM, divided by the threads of one warpgroup


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuningConfig:
    """The tuning parameters of a GEMM.

    Attributes:
      warpgroups: the number of warpgroups that multiply. A tile has 64 rows for each.
      tile_n: the columns of a tile. A tile may overlap at most two blocks of b.
      stages: the number of slots: blocks of K in shared memory at a time.
      band: SMs process this many tiles along one axis before they advance along the other, so that
        they share operands in the L2 cache.
      along_n: whether bands lie along N instead of M.
      copy_registers: registers per thread of the copying warpgroup.
      cluster: the number of thread blocks in a cluster. Their tiles are adjacent along M, so they
        need the same tile of b; each copies a part of it for all (multicast).
    """

    warpgroups: int = 2
    tile_n: int = 128
    stages: int = 4
    band: int = 8
    along_n: bool = False
    copy_registers: int = 40
    cluster: int = 1

    def __post_init__(self):
        if self.tile_n not in (32, 64, 96, 128, 160, 192, 256):  # 224 may overlap 3 blocks of b
            raise ValueError(f"tile_n must be 32, 64, 96, 128, 160, 192 or 256, got {self.tile_n}")
        if not 1 <= self.warpgroups <= 3 or self.stages < 2 or min(self.band, self.cluster) < 1:
            raise ValueError(
                "a tuning must have 1 to 3 warpgroups, 2 stages or more, and a band and cluster of"
                f" at least 1: {self}"
            )

    @property
    def registers(self) -> int:
        """Registers per thread of the warpgroups that multiply."""
        free = _REGISTERS - self.copy_registers
        return min(free // self.warpgroups // 8 * 8, 240 if self.warpgroups < 3 else 160)


def check_operands(
    a: Array,
    b: Array,
    sa: Array,
    sb: Array,
    out_dtype: Any,
    *,
    dtypes: tuple[jnp.dtype, ...],
    scales_along_k: bool,
) -> None:
    """Checks the operands of a GEMM kernel.

    Args:
      a, b, sa, sb, out_dtype: as in `block_scaled_matmul`.
      dtypes: the dtypes of codes that the kernel multiplies. At least one operand must be E4M3.
      scales_along_k: whether there is a scale per block of K, or only per row of each operand.

    Raises:
      ValueError: the kernel does not support the operands, or they do not fit together.
    """
    given = f"a {a.dtype}{a.shape}, b {b.dtype}{b.shape}, sa {sa.shape}, sb {sb.shape}"
    matrices = a.ndim == b.ndim == 2 and a.size and b.size
    if not matrices or a.shape[1] != b.shape[1] or a.shape[1] % BLOCK:
        raise ValueError(
            f"expected non-empty a [M, K] and b [N, K] with K whole blocks of 128, got {given}"
        )
    if a.dtype not in dtypes or b.dtype not in dtypes:
        names = " or ".join(dtype.name for dtype in dtypes)
        raise ValueError(f"a and b must be {names} codes, got {given}")
    if E4M3 not in (a.dtype, b.dtype):
        raise ValueError(f"at least one of a and b must be float8_e4m3fn, got {given}")
    (m, k), n = a.shape, b.shape[0]
    if scales_along_k:
        expected = "[K / 128, M] and [K / 128, N] or [K / 128, ceil(N / 128)]"
        columns = (n, -(-n // BLOCK))
        fits = sa.shape == (k // BLOCK, m) and sb.shape in [(k // BLOCK, c) for c in columns]
    else:
        expected = "[M] and [N]"
        fits = sa.shape == (m,) and sb.shape == (n,)
    if not fits:
        raise ValueError(f"sa and sb must be {expected}, got {given}")
    if sa.dtype != jnp.float32 or sb.dtype != jnp.float32:
        raise ValueError(f"scales must be float32, got {sa.dtype} and {sb.dtype}")
    if m % 8 or n % 64:
        raise ValueError(f"M must be a multiple of 8 and N of 64, got {given}")
    if jnp.dtype(out_dtype) not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"out_dtype must be bfloat16 or float32, got {out_dtype}")


_check = functools.partial(check_operands, dtypes=(E4M3,), scales_along_k=True)


@functools.partial(jax.jit, static_argnames=("out_dtype", "tuning"))
def block_scaled_matmul(
    a: Float[Array, "M K"],
    b: Float[Array, "N K"],
    sa: Float[Array, "blocks M"],
    sb: Float[Array, "blocks columns"],
    out_dtype: Any = jnp.bfloat16,
    tuning: TuningConfig | None = None,
) -> Float[Array, "M N"]:
    """Returns the GEMM of the module docstring.

    Args:
      a, b: float8_e4m3fn codes. M is a multiple of 8, N of 64, K of 128.
      sa: float32 [K / 128, M].
      sb: float32 [K / 128, ceil(N / 128)], or [K / 128, N] for one scale per row of b.
      out_dtype: bfloat16 or float32.
      tuning: the tuning parameters; None uses `tuned`.

    Raises:
      ValueError: the kernel does not support the operands, or they do not fit together.
      NotImplementedError: the kernels cannot run here.
    """
    require()
    _check(a, b, sa, sb, out_dtype)
    by_row = sb.shape[1] == b.shape[0]
    tuning = tuned(a.shape[0], b.shape[0], by_row) if tuning is None else tuning
    shape = Shape(a.shape[0], a.shape[1], b.shape[0], by_row, jnp.dtype(out_dtype), tuning)
    if not by_row:
        # Pad for the last tile, which may read one scale past the end. Transpose to K last, so that
        # the scales of one loop iteration are adjacent: their addresses need fewer registers.
        sb = jnp.pad(sb, ((0, 0), (0, int(shape.groups > 1)))).T
    return launch_product(shape, _matmul, a, b, sa, sb)


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes and tuning of a GEMM.

    Attributes:
      by_row: whether each row of b has its own scale.
      depth: the elements of K in a slot.
      k_first: whether the arrays of a and of b have K as their first axis.
    """

    m: int
    k: int
    n: int
    by_row: bool
    out_dtype: jnp.dtype
    tuning: TuningConfig
    depth: int = BLOCK
    k_first: tuple[bool, bool] = (False, False)

    @property
    def tile_m(self) -> int:
        return ROWS * self.tuning.warpgroups

    @property
    def blocks(self) -> int:
        return self.k // self.depth

    @property
    def unroll(self) -> int:
        """Blocks of K per loop iteration: `stages` if that divides their number."""
        return next(u for u in (self.tuning.stages, 2, 1) if self.blocks % u == 0)

    @property
    def tiles(self) -> tuple[int, int]:
        """The numbers of tiles of the result along M and N. A cluster counts as one along M."""
        rows = self.tile_m * self.tuning.cluster
        return -(-self.m // rows), -(-self.n // self.tuning.tile_n)

    @property
    def group(self) -> int:
        """Columns of a tile that are in the same block of b, wherever the tile begins."""
        if self.by_row:
            return self.tuning.tile_n
        return next(g for g in (128, 64, 32) if self.tuning.tile_n % g == 0)

    @property
    def groups(self) -> int:
        return self.tuning.tile_n // self.group

    @property
    def out_columns(self) -> int:
        """Columns that are stored at a time: up to 128 bytes, within a group."""
        return math.gcd(128 // self.out_dtype.itemsize, self.group)


def launch_product(shape: Shape, body: Callable[..., None], *operands: jax.Array) -> jax.Array:
    """Runs a GEMM kernel with one thread block per SM, and returns its result.

    Args:
      shape: the GEMM.
      body: body(shape, *references) with references to the operands and the result. It runs in each
        warpgroup: those that multiply, and the last one, which copies.
      *operands: the operands of the kernel.
    """
    t = shape.tuning
    cluster: dict[str, Any] = {}
    if t.cluster > 1:
        cluster = dict(cluster=(t.cluster,), cluster_names=(_PEER,))
    return launch(
        functools.partial(body, shape),
        *operands,
        out=jax.ShapeDtypeStruct((shape.m, shape.n), shape.out_dtype),
        grid=(num_cores() // t.cluster,),
        grid_names=("core",),
        num_threads=t.warpgroups + 1,
        thread_name="warpgroup",
        **cluster,
    )


def slots_given_back(tuning: TuningConfig) -> Any:
    """Allocates one barrier per slot; it completes when all warpgroups have read the slot.

    In a cluster it waits for the warpgroups of all thread blocks, because a multicast copy
    overwrites the slot in each of them.
    """
    arrivals, slots = tuning.warpgroups, tuning.stages
    if tuning.cluster == 1:
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=slots)
    return plgpu.ClusterBarrier(collective_axes=(_PEER,), num_arrivals=arrivals, num_barriers=slots)


def shared(tuning: TuningConfig) -> dict[str, Any]:
    """Returns the arguments of a copy that make it a multicast to the cluster, if there is one."""
    return dict(collective_axes=_PEER) if tuning.cluster > 1 else {}


def give_back(tuning: TuningConfig, slot: Any) -> None:
    """Signals that this warpgroup has read a slot.

    Args:
      tuning: the tuning parameters.
      slot: the slot's barrier. In a cluster one thread arrives for the whole warpgroup, so all
        threads synchronize first; else each thread arrives by itself.
    """
    if tuning.cluster > 1:
        plgpu.commit_smem()
    plgpu.barrier_arrive(slot)


def result_memory(shape: Shape, buffers: int) -> Any:
    """Allocates the shared memory through which each warpgroup stores its part of the result."""
    size = (shape.tuning.warpgroups, buffers, ROWS, shape.out_columns)
    return plgpu.SMEM(
        size, shape.out_dtype, transforms=swizzled(shape.out_dtype, shape.out_columns)
    )


def over_tiles(
    shape: Shape, empty, fetch: Callable[..., None], multiply: Callable[..., None]
) -> None:
    """Processes all tiles of this SM: one warpgroup copies, the others multiply.

    Args:
      shape: the GEMM.
      empty: the barriers of `slots_given_back`.
      fetch: fetch(c, slot, rows, columns) starts the copies of block c of K to a free slot.
      multiply: multiply(warpgroup, count, position) consumes them for all `count` tiles of this SM;
        position(i) is the (row, column) of the i-th tile.
    """
    t = shape.tuning
    warpgroup, core = lax.axis_index("warpgroup"), lax.axis_index("core")
    cores = num_cores() // t.cluster
    count = lax.div(shape.tiles[0] * shape.tiles[1] - core + cores - 1, jnp.int32(cores))

    def position(i):
        """Returns the (row, column) of the i-th tile of this SM, in tiles."""
        m, n = plgpu.planar_snake(core + i * cores, shape.tiles, int(t.along_n), t.band)
        if t.cluster > 1:
            m = m * t.cluster + lax.axis_index(_PEER)
        return m, n

    @pl.when(warpgroup == t.warpgroups)
    def _():
        plgpu.set_max_registers(t.copy_registers, action="decrease")
        _copy(shape, count, position, fetch, empty)

    @pl.when(warpgroup < t.warpgroups)
    def _():
        plgpu.set_max_registers(t.registers, action="increase")
        multiply(warpgroup, count, position)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _matmul(shape: Shape, a_g, b_g, sa_g, sb_g, y_g) -> None:
    """The kernel. Suffixes: _g references to global memory, _s to shared memory."""
    t = shape.tuning
    codes = swizzled(E4M3, BLOCK)

    @scoped(
        a_s=plgpu.SMEM((t.stages, shape.tile_m, BLOCK), E4M3, transforms=codes),
        b_s=plgpu.SMEM((t.stages, t.tile_n, BLOCK), E4M3, transforms=codes),
        sa_s=plgpu.SMEM((t.stages, shape.tile_m), jnp.float32),
        sb_s=plgpu.SMEM((t.stages, t.tile_n if shape.by_row else 1), jnp.float32),
        y_s=result_memory(shape, buffers=1),
        full=plgpu.Barrier(num_arrivals=2, num_barriers=t.stages),
        scaled=plgpu.Barrier(num_arrivals=1 + shape.by_row, num_barriers=t.stages),
        empty=slots_given_back(t),
        collective_axes="warpgroup",
    )
    def _(a_s, b_s, sa_s, sb_s, y_s, full, scaled, empty):
        def fetch(c, s, rows, columns):
            block = pl.ds(c * BLOCK, BLOCK)
            plgpu.copy_gmem_to_smem(a_g.at[rows, block], a_s.at[s], full.at[s])
            plgpu.copy_gmem_to_smem(b_g.at[columns, block], b_s.at[s], full.at[s], **shared(t))
            plgpu.copy_gmem_to_smem(sa_g.at[c, rows], sa_s.at[s], scaled.at[s])
            if shape.by_row:
                plgpu.copy_gmem_to_smem(sb_g.at[c, columns], sb_s.at[s], scaled.at[s])

        def multiply(warpgroup, count, position):
            rows = pl.ds(warpgroup * ROWS, ROWS)
            multiplier = _Multiplier(shape, a_s, b_s, sa_s, sb_s, sb_g, full, scaled, empty, rows)

            def store(m, n, sums):
                def piece(at):
                    group, begin = divmod(at, shape.group)
                    return sums[group][:, begin : begin + shape.out_columns]

                write(shape, piece, y_s.at[warpgroup], result_of(shape, y_g, m, n, warpgroup))

            _multiply(multiplier, count, position, store)

        over_tiles(shape, empty, fetch, multiply)


def next_slot(slot, stages: int):
    """Returns the slot after `slot`, which wraps around."""
    return jnp.where(slot == stages - 1, jnp.int32(0), slot + 1)


def _copy(shape: Shape, count, position, fetch: Callable[..., None], empty) -> None:
    """Copies the operands of all tiles to shared memory, as slots become free.

    The arguments are those of `over_tiles`, and of the function `multiply` there.
    """
    stages, unroll = shape.tuning.stages, shape.unroll
    static = unroll % stages == 0

    def tile(i, slot):
        m, n = position(i)
        rows = pl.ds(m * shape.tile_m, shape.tile_m)
        columns = pl.ds(n * shape.tuning.tile_n, shape.tuning.tile_n)

        def copy(c, s):
            @pl.when(i * shape.blocks + c >= stages)  # the first copies find free slots
            def _():
                plgpu.barrier_wait(empty.at[s])

            fetch(c, s, rows, columns)

        def some(j, slot):
            for u in range(unroll):
                copy(j * unroll + u, u % stages if static else slot)
                slot = slot if static else next_slot(slot, stages)
            return slot

        return lax.fori_loop(0, shape.blocks // unroll, some, slot)

    slot = lax.fori_loop(0, count, tile, jnp.int32(0))
    # Wait until the last slots are read: their barriers live in this thread block's shared memory.
    for u in range(stages):

        @pl.when(count * shape.blocks >= stages - u)
        def _(s=u if static else slot):
            plgpu.barrier_wait(empty.at[s])

        slot = slot if static else next_slot(slot, stages)


@dataclasses.dataclass(frozen=True)
class _Multiplier:
    """One warpgroup that multiplies.

    Attributes:
      shape: the GEMM.
      a_s, b_s, sa_s, sb_s: the slots of codes and scales in shared memory.
      sb_g: the scales of b in global memory.
      full, scaled, empty: the barriers of each slot: codes have arrived, scales have arrived, the
        slot has been read.
      rows: the rows of a tile that this warpgroup multiplies.
    """

    shape: Shape
    a_s: Any
    b_s: Any
    sa_s: Any
    sb_s: Any
    sb_g: Any
    full: Any
    scaled: Any
    empty: Any
    rows: Any

    def scales_of_b(self, c, first) -> tuple[jax.Array, ...]:
        """Returns the scales of the one or two blocks of b from `first` on, for block c of K."""
        if self.shape.by_row:
            return ()
        return tuple(self.sb_g[first + j, c] for j in range(1 if self.shape.groups == 1 else 2))

    def factors(self, slot, sa, of_b, offset) -> list[tuple[jax.Array, ...]]:
        """Returns the factors of the sums over one block of K, for each group of columns.

        Args:
          slot: the slot of the block.
          sa: the scales of this warpgroup's rows.
          of_b: the scales of `scales_of_b`.
          offset: the tile begins this many columns after the beginning of a block of b.
        """
        wide = (ROWS, self.shape.group)
        if self.shape.by_row:
            sb = load(self.sb_s.at[slot], WGMMA.reduce(0), optimized=False)
            of_rows = lax.broadcast_in_dim(sa, wide, (0,))
            return [(of_rows, lax.broadcast_in_dim(sb, wide, (1,)))]
        scales = [sa * scale for scale in of_b]
        begins = [offset + g * self.shape.group for g in range(self.shape.groups)]
        if self.shape.groups > 1:
            scales = [jnp.where(begin < BLOCK, *scales) for begin in begins]
        return [(lax.broadcast_in_dim(scale, wide, (0,)),) for scale in scales]

    def add_blocks(self, slots, of_b, offset, sums) -> tuple[jax.Array, ...]:
        """Adds the blocks of K in `slots` to `sums`, and returns the new sums.

        While a block is multiplied, its row scales are loaded and the copy of the next block is
        awaited.

        Args:
          slots: the slots of consecutive blocks of K.
          of_b: the scales of `scales_of_b` for each of them.
          offset: as in `factors`.
          sums: float32, for each group of columns.
        """
        group = self.shape.group

        def multiply_block(accumulator, slot, scales, following):
            b_T = self.b_s.at[slot].transpose((1, 0))
            plgpu.wgmma(accumulator, self.a_s.at[slot, self.rows], b_T)
            plgpu.barrier_wait(self.scaled.at[slot])
            sa = load(self.sa_s.at[slot, self.rows], WGMMA.reduce(1), optimized=False)
            if following is not None:
                plgpu.barrier_wait(self.full.at[following])
            part = plgpu.wgmma_accumulator_load(accumulator, wait_n=0)
            factors = self.factors(slot, sa, scales, offset)
            give_back(self.shape.tuning, self.empty.at[slot])
            return part, factors

        plgpu.barrier_wait(self.full.at[slots[0]])
        for slot, following, scales in zip(slots, [*slots[1:], None], of_b, strict=True):
            run = functools.partial(multiply_block, slot=slot, scales=scales, following=following)
            accumulator = plgpu.ACC((ROWS, self.shape.tuning.tile_n), jnp.float32)
            part, factors = pl.run_scoped(run, accumulator)
            parts = (part[:, g * group : (g + 1) * group] for g in range(self.shape.groups))
            scaled = map(functools.partial(functools.reduce, jnp.multiply), factors, parts)
            sums = tuple(map(jnp.add, sums, scaled))
        return sums


def _multiply(multiplier: _Multiplier, count, position, store) -> None:
    """Multiplies one warpgroup's rows of all tiles.

    Args:
      multiplier: the warpgroup.
      count, position: as in `over_tiles`.
      store: store(m, n, sums) stores the sums of tile (m, n).
    """
    shape = multiplier.shape
    stages, unroll = shape.tuning.stages, shape.unroll
    static = unroll % stages == 0

    def tile(i, slot):
        m, n = position(i)
        first = lax.div(n * shape.tuning.tile_n, jnp.int32(BLOCK))
        offset = lax.rem(n * shape.tuning.tile_n, jnp.int32(BLOCK))

        def some(j, carry):
            sums, slot, of_b = carry
            # The first block of the next iteration. The last iteration reads its own scales again.
            following = lax.min(j + 1, jnp.int32(shape.blocks // unroll - 1)) * unroll
            ahead = [multiplier.scales_of_b(following + u, first) for u in range(unroll)]
            slots = []
            for u in range(unroll):
                slots.append(u % stages if static else slot)
                slot = slot if static else next_slot(slot, stages)
            return multiplier.add_blocks(slots, of_b, offset, sums), slot, tuple(ahead)

        zeros = jnp.zeros((ROWS, shape.group), jnp.float32)
        sums = (plgpu.layout_cast(zeros, WGMMA),) * shape.groups
        at_first = tuple(multiplier.scales_of_b(jnp.int32(u), first) for u in range(unroll))
        carry = (sums, slot, at_first)
        sums, slot, _ = lax.fori_loop(0, shape.blocks // unroll, some, carry)
        store(m, n, sums)
        return slot

    lax.fori_loop(0, count, tile, jnp.int32(0))


def result_of(shape: Shape, y_g, m, n, warpgroup):
    """Returns the reference to a warpgroup's part of tile (m, n) of the result."""
    rows = pl.ds(m * shape.tile_m + warpgroup * ROWS, ROWS)
    return y_g.at[rows, pl.ds(n * shape.tuning.tile_n, shape.tuning.tile_n)]


def write(shape: Shape, piece: Callable[[int], jax.Array], y_s, y_g) -> None:
    """Stores a warpgroup's part of a tile through shared memory, with alternating buffers.

    Args:
      shape: the GEMM.
      piece: piece(at) returns the columns from `at` on: float32 [64, out_columns].
      y_s: the warpgroup's buffers, of `result_memory`.
      y_g: the reference of `result_of`.
    """
    width, buffers = shape.out_columns, y_s.shape[0]
    for i, at in enumerate(range(0, shape.tuning.tile_n, width)):
        values = piece(at).astype(shape.out_dtype)
        plgpu.wait_smem_to_gmem(buffers - 1 if i else 0, wait_read_only=True)
        buffer = y_s.at[i % buffers]
        buffer[...] = values
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, y_g.at[:, pl.ds(at, width)])


# (tuning, TFLOP/s of large GEMMs), from sweeps on an H200 at its power limit, where a training chip
# runs (docs/results/hopper_kernels.md). The first of each is the fastest.
_BY_BLOCK = (
    (
        TuningConfig(warpgroups=3, copy_registers=24, along_n=True, band=16),
        1137.0,
    ),
    (TuningConfig(), 1065.0),
)


_BY_ROW = ((TuningConfig(tile_n=160), 885.0), (TuningConfig(along_n=True, band=16), 855.0))


def tuned(m: int, n: int, by_row: bool) -> TuningConfig:
    """Returns the tuning that should finish an M x N result first.

    The estimate includes the idle time of SMs that have no tile in the last round.

    Args:
      m, n: the size of the result.
      by_row: whether b has scales per row, or per block.
    """

    def time(tuning_and_rate: tuple[TuningConfig, float]) -> float:
        t, rate = tuning_and_rate
        tile_m = ROWS * t.warpgroups
        tiles = -(-m // tile_m) * -(-n // t.tile_n)
        return -(-tiles // num_cores()) * tile_m * t.tile_n / rate

    return min(_BY_ROW if by_row else _BY_BLOCK, key=time)[0]
