"""Block-scaled FP8 products on Hopper's matrix unit.

Legend: M rows of a, N rows of b, K the contracted axis, c = 0 … K / 128 - 1 its blocks.

    y[m, n] = sum over c    sa[c, m] * sb[c, n] * sum over k in c    a[m, k] b[n, k]

a and b are E4M3 codes with K last, as `wgmma` takes them. sb has one entry for each 128 rows of b
(blocks of 128 x 128: weights, in the forward and input-gradient products), or one for each row
(tiles of 1 x 128: both operands of a weight gradient).

Hopper's matrix unit adds FP8 products with 14 bits (arXiv 2412.19437, 3.3.2). So the sum over a
block starts from zero, and is then scaled and added to float32 registers, "promoted": every 128
products, as the scales ask for anyway.

One block of threads runs on each core and goes through output tiles of 64 * W rows and `tile_n`
columns: W warpgroups that multiply 64 rows each, and one that only copies (TMA), `stages` blocks
of K ahead, also across tiles. What is measured and decided:

  * The loop over K is written out for all stages, so that addresses are constants. With slots
    computed by remainders, products waited for address arithmetic: a tenth slower.
  * Scales of b's blocks are read one round ahead: where they are used, each block of K would wait
    for the L2 cache. Those of a round lie side by side, which is one load and few registers.
  * Between the end of a product and the next stand nothing but its multiplications: scales of rows
    were read while it ran, and what it awaits came before. That was worth 8%.
  * While one warpgroup promotes, the others multiply: three of 64 x 128 for the forward and the
    input gradient, two of 64 x 160 for the weight gradient, which has two multiplications an
    element more to do, and scales by columns to load.
  * The alternative, promoting a block beside the warpgroup's own next product in 64 registers more,
    is as fast with two warpgroups on a cool chip, and at the power limit, where a chip that trains
    is, 5 to 10% slower. (A wait for the next slot must stand between the two then: ptxas moves
    arithmetic over a wait for products, but not over a branch.)
  * Warpgroups that take turns, wider tiles, fewer barriers and clusters gained nothing here
    (docs/log.md). row_gemm.py gains by clusters: it has no other work between its products.

Rows and columns beyond M and N, multiples of 8 and 64, are neither read nor written (TMA fills with
zeros and clips); K is whole blocks. The product of row_gemm.py goes through its tiles alike.
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


ROWS = 64  # of a warpgroup's product


WGMMA = plgpu.Layout.WGMMA


_PEER = "peer"  # the axis of a cluster


_REGISTERS = 65536 // 128  # of a core, for each thread of one warpgroup


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuningConfig:
    """How a product is cut.

    Attributes:
      warpgroups: that multiply; a tile has 64 rows for each.
      tile_n: columns of a tile, which meets at most two blocks of b.
      stages: blocks of K in shared memory at a time.
      band: tiles that neighboring cores take along one axis before the next (L2 cache).
      along_n: whether bands lie along N instead of M.
      copy_registers: registers a thread that the copying warpgroup keeps.
      cluster: blocks of threads whose tiles lie below one another. They share a tile of b, of which
        each copies a part for all (multicast).
    """

    warpgroups: int = 2
    tile_n: int = 128
    stages: int = 4
    band: int = 8
    along_n: bool = False
    copy_registers: int = 40
    cluster: int = 1

    def __post_init__(self):
        if self.tile_n not in (32, 64, 96, 128, 160, 192, 256):  # 224 may meet three blocks of b
            raise ValueError(f"tile_n is 32, 64, 96, 128, 160, 192 or 256, got {self.tile_n}")
        if not 1 <= self.warpgroups <= 3 or self.stages < 2 or min(self.band, self.cluster) < 1:
            raise ValueError(f"a tuning has 1 to 3 warpgroups, 2 stages or more: {self}")

    @property
    def registers(self) -> int:
        """Registers a thread of the multiplying warpgroups."""
        free = _REGISTERS - self.copy_registers
        return min(free // self.warpgroups // 8 * 8, 240 if self.warpgroups < 3 else 160)


def _check(a: Array, b: Array, sa: Array, sb: Array, out_dtype: Any) -> None:
    """Raises ValueError for operands that do not fit together or that the kernel does not take."""
    given = f"a {a.dtype}{a.shape}, b {b.dtype}{b.shape}, sa {sa.shape}, sb {sb.shape}"
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1] or a.shape[1] % BLOCK:
        raise ValueError(f"expected a [M, K] and b [N, K] with K whole blocks of 128, got {given}")
    if a.dtype != E4M3 or b.dtype != E4M3:
        raise ValueError(f"the kernel multiplies float8_e4m3fn codes, got {given}")
    blocks, rows = a.shape[1] // BLOCK, b.shape[0]
    if sa.shape != (blocks, a.shape[0]) or sb.shape[0] != blocks:
        raise ValueError(f"scales are [K / 128, …], got {given}")
    if sb.shape[1] not in (rows, -(-rows // BLOCK)):
        raise ValueError(f"sb has an entry for each row of b or for 128 of them, got {given}")
    if sa.dtype != jnp.float32 or sb.dtype != jnp.float32:
        raise ValueError(f"scales are float32, got {sa.dtype} and {sb.dtype}")
    if a.shape[0] % 8 or rows % 64:
        raise ValueError(f"M is a multiple of 8 and N of 64, got {given}")
    if jnp.dtype(out_dtype) not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"results are bfloat16 or float32, got {out_dtype}")


@functools.partial(jax.jit, static_argnames=("out_dtype", "tuning"))
def block_scaled_matmul(
    a: Float[Array, "M K"],
    b: Float[Array, "N K"],
    sa: Float[Array, "blocks M"],
    sb: Float[Array, "blocks columns"],
    out_dtype: Any = jnp.bfloat16,
    tuning: TuningConfig | None = None,
) -> Float[Array, "M N"]:
    """The product of the module's docstring.

    Args:
      a, b: float8_e4m3fn codes.
      sa: float32 [K / 128, M].
      sb: float32 [K / 128, ceil(N / 128)], or [K / 128, N] for a scale for each row of b.
      out_dtype: bfloat16 or float32.
      tuning: how it is cut; None takes `tuned`.

    Raises:
      ValueError: operands that do not fit or that the kernel does not take, with what was given.
      NotImplementedError: another device or jax.
    """
    require()
    _check(a, b, sa, sb, out_dtype)
    by_row = sb.shape[1] == b.shape[0]
    tuning = tuned(a.shape[0], b.shape[0], by_row) if tuning is None else tuning
    shape = Shape(a.shape[0], a.shape[1], b.shape[0], by_row, jnp.dtype(out_dtype), tuning)
    if not by_row:
        # A tile that reaches past the last block reads one more. With K last those of a round lie
        # side by side, which saves registers for their addresses.
        sb = jnp.pad(sb, ((0, 0), (0, int(shape.groups > 1)))).T
    return launch_product(shape, _matmul, a, b, sa, sb)


@dataclasses.dataclass(frozen=True)
class Shape:
    """A product and how it is cut; `by_row` is whether each row of b has its own scale."""

    m: int
    k: int
    n: int
    by_row: bool
    out_dtype: jnp.dtype
    tuning: TuningConfig

    @property
    def tile_m(self) -> int:
        return ROWS * self.tuning.warpgroups

    @property
    def blocks(self) -> int:
        return self.k // BLOCK

    @property
    def unroll(self) -> int:
        """Blocks of K written out in the loop: all stages, where K allows it."""
        return next(u for u in (self.tuning.stages, 2, 1) if self.blocks % u == 0)

    @property
    def tiles(self) -> tuple[int, int]:
        """Of the result: along M those of a whole cluster, along N."""
        rows = self.tile_m * self.tuning.cluster
        return -(-self.m // rows), -(-self.n // self.tuning.tile_n)

    @property
    def group(self) -> int:
        """Columns of a tile that share a scale of b wherever the tile begins."""
        tile_n = self.tuning.tile_n
        return tile_n if self.by_row else next(g for g in (128, 64, 32) if tile_n % g == 0)

    @property
    def groups(self) -> int:
        return self.tuning.tile_n // self.group

    @property
    def out_columns(self) -> int:
        """Columns stored at a time: up to 128 bytes, within a group."""
        return math.gcd(128 // self.out_dtype.itemsize, self.group)


def launch_product(shape: Shape, body: Callable[..., None], *operands: jax.Array) -> jax.Array:
    """`body(shape, references to the operands and the result)` on every core, by so many
    warpgroups as multiply, and the one that copies."""
    t = shape.tuning
    cluster: dict[str, Any] = dict(cluster=(t.cluster,), cluster_names=(_PEER,))
    return launch(
        functools.partial(body, shape), *operands,
        out=jax.ShapeDtypeStruct((shape.m, shape.n), shape.out_dtype),
        grid=(num_cores() // t.cluster,), grid_names=("core",), num_threads=t.warpgroups + 1,
        thread_name="warpgroup", **(cluster if t.cluster > 1 else {}),
    )  # fmt: skip


def slots_given_back(tuning: TuningConfig) -> Any:
    """Barriers at which a slot is free again: all who read it have said so, in a cluster all its
    blocks of threads, since what one copies for others overwrites their slot."""
    arrivals, slots = tuning.warpgroups, tuning.stages
    if tuning.cluster == 1:
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=slots)
    return plgpu.ClusterBarrier(collective_axes=(_PEER,), num_arrivals=arrivals, num_barriers=slots)


def shared(tuning: TuningConfig) -> dict[str, Any]:
    """How a copy is made that a cluster shares."""
    return dict(collective_axes=_PEER) if tuning.cluster > 1 else {}


def give_back(tuning: TuningConfig, slot: Any) -> None:
    """This warpgroup has read what is in a slot. In a cluster one of its threads says so for all,
    which have to be there; else each arrives by itself."""
    if tuning.cluster > 1:
        plgpu.commit_smem()
    plgpu.barrier_arrive(slot)


def result_memory(shape: Shape, buffers: int) -> Any:
    """Shared memory through which each warpgroup stores its result."""
    size = (shape.tuning.warpgroups, buffers, ROWS, shape.out_columns)
    return plgpu.SMEM(
        size, shape.out_dtype, transforms=swizzled(shape.out_dtype, shape.out_columns)
    )


def over_tiles(
    shape: Shape, empty, fetch: Callable[..., None], multiply: Callable[..., None]
) -> None:
    """This core's tiles: one warpgroup copies, the others multiply.

    `fetch(c, slot, rows, columns)` begins the copies of block c of K to a slot that is free;
    `multiply(warpgroup, count, position)` uses them, position(i) being the i-th tile of this core.
    """
    t = shape.tuning
    warpgroup, core = lax.axis_index("warpgroup"), lax.axis_index("core")
    cores = num_cores() // t.cluster
    count = lax.div(shape.tiles[0] * shape.tiles[1] - core + cores - 1, jnp.int32(cores))

    def position(i):
        """(row, column) of the i-th tile of this core, in tiles."""
        m, n = plgpu.planar_snake(core + i * cores, shape.tiles, int(t.along_n), t.band)
        return (m if t.cluster == 1 else m * t.cluster + lax.axis_index(_PEER)), n

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
            mine = pl.ds(warpgroup * ROWS, ROWS)
            of_mine = _Multiplier(shape, a_s, b_s, sa_s, sb_s, sb_g, full, scaled, empty, mine)

            def store(m, n, sums):
                def piece(at):
                    group, begin = divmod(at, shape.group)
                    return sums[group][:, begin : begin + shape.out_columns]

                write(shape, piece, y_s.at[warpgroup], result_of(shape, y_g, m, n, warpgroup))

            _multiply(of_mine, count, position, store)

        over_tiles(shape, empty, fetch, multiply)


def next_slot(slot, stages: int):
    return jnp.where(slot == stages - 1, jnp.int32(0), slot + 1)


def _copy(shape: Shape, count, position, fetch: Callable[..., None], empty) -> None:
    """All tiles' operands to shared memory, as slots become free."""
    stages, unroll = shape.tuning.stages, shape.unroll
    static = unroll % stages == 0

    def tile(i, slot):
        m, n = position(i)
        rows = pl.ds(m * shape.tile_m, shape.tile_m)
        columns = pl.ds(n * shape.tuning.tile_n, shape.tuning.tile_n)

        def copy(c, s):
            @pl.when(i * shape.blocks + c >= stages)  # before, slots are free
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
    # Nobody leaves before the last slots are read: their barriers live in this shared memory.
    for u in range(stages):

        @pl.when(count * shape.blocks >= stages - u)
        def _(s=u if static else slot):
            plgpu.barrier_wait(empty.at[s])

        slot = slot if static else next_slot(slot, stages)


@dataclasses.dataclass(frozen=True)
class _Multiplier:
    """One multiplying warpgroup: the operands in shared memory, and the barriers of their slots."""

    shape: Shape
    a_s: Any
    b_s: Any
    sa_s: Any
    sb_s: Any
    sb_g: Any
    full: Any
    scaled: Any
    empty: Any
    rows: Any  # of a tile

    def scales_of_b(self, c, first) -> tuple[jax.Array, ...]:
        """The scales of the one or two blocks of b from `first` on, for block c of K."""
        if self.shape.by_row:
            return ()
        return tuple(self.sb_g[first + j, c] for j in range(1 if self.shape.groups == 1 else 2))

    def factors(self, slot, sa, of_b, offset) -> list[tuple[jax.Array, ...]]:
        """What a block's sums are multiplied by, for each group of columns; the tile begins
        `offset` columns after a block of b."""
        wide = (ROWS, self.shape.group)
        if self.shape.by_row:
            sb = load(self.sb_s.at[slot], WGMMA.reduce(0), optimized=False)
            of_rows = lax.broadcast_in_dim(sa, wide, (0,))
            return [(of_rows, lax.broadcast_in_dim(sb, wide, (1,)))]
        products = [sa * scale for scale in of_b]
        begins = [offset + g * self.shape.group for g in range(self.shape.groups)]
        if self.shape.groups > 1:
            products = [jnp.where(begin < BLOCK, *products) for begin in begins]
        return [(lax.broadcast_in_dim(scale, wide, (0,)),) for scale in products]

    def add_blocks(self, slots, of_b, offset, sums) -> tuple[jax.Array, ...]:
        """`sums`, of each group of columns, plus the blocks of K in `slots`. While one is
        multiplied, its scales of rows are read and the next is awaited."""
        group = self.shape.group

        def product(accumulator, slot, scales, following):
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
            run = functools.partial(product, slot=slot, scales=scales, following=following)
            accumulator = plgpu.ACC((ROWS, self.shape.tuning.tile_n), jnp.float32)
            part, factors = pl.run_scoped(run, accumulator)
            parts = (part[:, g * group : (g + 1) * group] for g in range(self.shape.groups))
            scaled = map(functools.partial(functools.reduce, jnp.multiply), factors, parts)
            sums = tuple(map(jnp.add, sums, scaled))
        return sums


def _multiply(multiplier: _Multiplier, count, position, store) -> None:
    """One warpgroup's rows of all tiles; `store(m, n, sums)` takes those of tile (m, n)."""
    shape = multiplier.shape
    stages, unroll = shape.tuning.stages, shape.unroll
    static = unroll % stages == 0

    def tile(i, slot):
        m, n = position(i)
        first = lax.div(n * shape.tuning.tile_n, jnp.int32(BLOCK))
        offset = lax.rem(n * shape.tuning.tile_n, jnp.int32(BLOCK))

        def some(j, carry):
            sums, slot, of_b = carry
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
    """A warpgroup's part of tile (m, n) of the result."""
    rows = pl.ds(m * shape.tile_m + warpgroup * ROWS, ROWS)
    return y_g.at[rows, pl.ds(n * shape.tuning.tile_n, shape.tuning.tile_n)]


def write(shape: Shape, piece: Callable[[int], jax.Array], y_s, y_g) -> None:
    """A warpgroup's part of the result through shared memory, in turns through its buffers;
    piece(at) is float32 [64, out_columns], the columns from `at` on."""
    width, buffers = shape.out_columns, y_s.shape[0]
    for i, at in enumerate(range(0, shape.tuning.tile_n, width)):
        values = piece(at).astype(shape.out_dtype)
        plgpu.wait_smem_to_gmem(buffers - 1 if i else 0, wait_read_only=True)
        buffer = y_s.at[i % buffers]
        buffer[...] = values
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, y_g.at[:, pl.ds(at, width)])


# (cut, TFLOP/s of large products), from sweeps on an H200 at its power limit, where a chip that
# trains is (docs/log.md). The first of each is the fastest.
_BY_BLOCK = (
    (
        TuningConfig(warpgroups=3, copy_registers=24, along_n=True, band=16),
        1137.0,
    ),
    (TuningConfig(), 1065.0),
)


_BY_ROW = ((TuningConfig(tile_n=160), 885.0), (TuningConfig(along_n=True, band=16), 855.0))


def tuned(m: int, n: int, by_row: bool) -> TuningConfig:
    """The cut that is done first with M x N, b having scales by row or by block. Cores without a
    tile in the last round wait for the others."""

    def time(cut: tuple[TuningConfig, float]) -> float:
        t, rate = cut
        tile_m = ROWS * t.warpgroups
        tiles = -(-m // tile_m) * -(-n // t.tile_n)
        return -(-tiles // num_cores()) * tile_m * t.tile_n / rate

    return min(_BY_ROW if by_row else _BY_BLOCK, key=time)[0]
