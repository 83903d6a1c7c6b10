"""What the kernels of flash attention share: tiles, slots, masks, and the copying warpgroup.

Legend: B rows, T positions, N query heads, K key and value heads, H head size. attention.py
explains the kernels.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from fp8jax.kernels.hopper import launch, swizzled

ROWS = 64  # of a warpgroup's tile, as many as `wgmma` multiplies
GROUPS = 2  # multiplying warpgroups
TILE = ROWS * GROUPS

BY_ROW = plgpu.Layout.WGMMA.reduce(1)  # one number for each row of a tile in registers
BY_COLUMN = plgpu.Layout.WGMMA.reduce(0)

# A hidden score, and the least maximum of a query's scores so far (in base 2). While a query has
# seen no key, 2^(HIDDEN - LEAST) is 0; with minus infinity for both, it would be NaN.
HIDDEN, LEAST = -1e30, -1e25

_COPY_REGISTERS = 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """How a kernel is laid out.

    Attributes:
      block: keys of a block; queries in the kernel of dk and dv.
      stages: slots for blocks in shared memory.
      registers: of each thread of a multiplying warpgroup.
    """

    block: int
    stages: int
    registers: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """The sizes of a kernel's operands, and its tuning.

    Attributes:
      batch, length, heads, key_heads, head_dim: B, T, N, K and H.
      dtype: of q, k, v, y and their gradients.
      scale: of the scores.
      tuning: the kernel's.
    """

    batch: int
    length: int
    heads: int
    key_heads: int
    head_dim: int
    dtype: Any
    scale: float
    tuning: Tuning

    @classmethod
    def of(cls, q_BTNH: jax.Array, k_BTKH: jax.Array, scale: float, tuning: Tuning) -> "Problem":
        batch, length, heads, head_dim = q_BTNH.shape
        return cls(
            batch=batch,
            length=length,
            heads=heads,
            key_heads=k_BTKH.shape[2],
            head_dim=head_dim,
            dtype=q_BTNH.dtype,
            scale=scale,
            tuning=tuning,
        )

    @property
    def tiles(self) -> int:
        """Tiles of a row."""
        return self.length // TILE

    @property
    def heads_of_key(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.key_heads

    @property
    def to_base2(self) -> float:
        """The factor from q k^T to exponents of 2."""
        return self.scale * math.log2(math.e)

    @property
    def scores(self) -> tuple[int, int]:
        """The shape of a warpgroup's scores against one block."""
        return ROWS, self.tuning.block

    def memory(self, rows: int, *lead: int) -> Any:
        """Shared memory for [*lead, rows, H]."""
        transforms = swizzled(self.dtype, self.head_dim)
        return plgpu.SMEM((*lead, rows, self.head_dim), self.dtype, transforms=transforms)

    def full(self, arrivals: int = 1) -> Any:
        """A barrier for each slot, which completes when so many copies have arrived."""
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=self.tuning.stages)

    def empty(self) -> Any:
        """A barrier for each slot, which completes when all warpgroups have read it."""
        return self.full(GROUPS)

    def slot(self, i: Any) -> Any:
        """The slot of block `i` of a tile."""
        return lax.rem(i, jnp.int32(self.tuning.stages))

    def like(self, x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, self.dtype)

    def by_query(self) -> jax.ShapeDtypeStruct:
        """One float32 number a query, [B, N, T]."""
        return jax.ShapeDtypeStruct((self.batch, self.heads, self.length), jnp.float32)

    def launch(self, body: Callable[..., None], *operands: jax.Array, heads: int, out: Any) -> Any:
        """Runs `body` for each (head, tile, row), with two multiplying warpgroups and a third."""
        return launch(
            body,
            *operands,
            approximate=True,
            out=out,
            grid=(heads, self.tiles, self.batch),
            grid_names=("head", "tile", "row"),
            num_threads=GROUPS + 1,
            thread_name="group",
        )


@dataclasses.dataclass(frozen=True)
class Stream:
    """Blocks that the copying warpgroup brings to the slots.

    Attributes:
      pieces: (block, slot) -> pairs of a source in global and a target in shared memory.
      full, empty: the barriers of the slots.
    """

    pieces: Callable[[Any, Any], list[tuple[Any, Any]]]
    full: Any
    empty: Any


def run_groups(
    p: Problem, count: Any, streams: tuple[Stream, ...], multiply: Callable[[Any], None]
) -> None:
    """One warpgroup copies `count` blocks of each stream, the others run `multiply(group)`."""
    group = lax.axis_index("group")

    @pl.when(group == GROUPS)
    def copy():
        plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")

        @pl.loop(0, count)
        def _(i):
            slot = p.slot(i)
            for stream in streams:

                @pl.when(i >= p.tuning.stages)
                def _(stream=stream):
                    plgpu.barrier_wait(stream.empty.at[slot])

                for source, target in stream.pieces(i, slot):
                    plgpu.copy_gmem_to_smem(source, target, stream.full.at[slot])

        @pl.loop(0, lax.min(count, p.tuning.stages))
        def _(slot):  # the last reads, so that every barrier ends as it began
            for stream in streams:
                plgpu.barrier_wait(stream.empty.at[slot])

    @pl.when(group < GROUPS)
    def _():
        plgpu.set_max_registers(p.tuning.registers, action="increase")
        multiply(group)


@dataclasses.dataclass(frozen=True)
class QueryTile:
    """A tile of queries, and which blocks of keys it sees.

    Attributes:
      p: the sizes.
      begin_g: the first position of each position's document, [B, T] in global memory.
    """

    p: Problem
    begin_g: Any

    @property
    def row(self) -> Any:
        return lax.axis_index("row")

    @property
    def head(self) -> Any:
        return lax.axis_index("head")

    @property
    def key_head(self) -> Any:
        return lax.div(self.head, self.p.heads_of_key)

    @property
    def tile(self) -> Any:
        return self.p.tiles - 1 - lax.axis_index("tile")  # those with most keys first

    @property
    def first(self) -> Any:
        """The first block of keys."""
        return lax.div(self.begin_g[self.row, self.tile * TILE], self.p.tuning.block)

    @property
    def last(self) -> Any:
        """The block behind the last one."""
        return ceil_div((self.tile + 1) * TILE, self.p.tuning.block)

    def keys(self, i: Any) -> tuple[Any, Any, Any]:
        """The index of the tile's block `i` in k and v."""
        block = self.p.tuning.block
        return self.row, pl.ds((self.first + i) * block, block), self.key_head

    def stream(self, source_g: Any, target_s: Any, full: Any, empty: Any) -> Stream:
        """The tile's blocks of keys or values."""
        return Stream(lambda i, slot: [(source_g.at[self.keys(i)], target_s.at[slot])], full, empty)

    def parts(self, base: Any) -> tuple[tuple[Any, Any, bool, bool], ...]:
        """Splits the blocks of the warpgroup whose first query is at `base`.

        Returns:
          (from, to, whether documents begin there, whether they are on the diagonal) of each part.
        """
        begin_last = self.begin_g[self.row, base + ROWS - 1]
        diagonal = lax.div(base, self.p.tuning.block)
        visible = lax.min(ceil_div(begin_last, self.p.tuning.block), diagonal)
        return (
            (self.first, visible, True, False),
            (visible, diagonal, False, False),
            (diagonal, self.last, True, True),
        )

    def hide(self, s, c: Any, base: Any, begin, *, begins: bool, diagonal: bool):
        """Returns the scores against block `c`, with `HIDDEN` where a query does not see a key."""
        keys = positions(s.shape, 1) + c * self.p.tuning.block
        if diagonal:
            s = jnp.where(positions(s.shape, 0) + base >= keys, s, HIDDEN)
        if begins:
            s = jnp.where(keys >= spread(begin, s.shape), s, HIDDEN)
        return s


def ceil_div(x: Any, y: int) -> Any:
    return lax.div(x + (y - 1), y)


def positions(shape: tuple[int, ...], axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


def spread(x: jax.Array, shape: tuple[int, ...], axis: int = 0) -> jax.Array:
    """Returns `x`, one number for each index of `axis`, as an array of that shape."""
    return lax.broadcast_in_dim(x, shape, [axis])


def filled(shape: tuple[int, ...], layout: Any, value: float = 0.0) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


# Two products whose left operand lies in registers. Pallas' interpreter has none such: the tests
# replace both functions (tests/support/interpreter.py).


def add_product(accumulator: Any, left: jax.Array, right: Any) -> None:
    """Starts accumulator += left @ right."""
    plgpu.wgmma(accumulator, left, right)


def plus_product(y: jax.Array, left: jax.Array, right: Any, meanwhile: Callable[[], None]):
    """Returns y + left @ right, and calls `meanwhile` before it waits for the product."""

    def run(accumulator):
        plgpu.wgmma(accumulator, left, right)
        meanwhile()

    return pl.run_state(run)(plgpu.ACC.init(y))
