"""The backward of flash attention (attention.py): dq by tiles of queries, dk and dv of keys.

Legend: B rows, T positions, N query heads, K key and value heads, H head size.

dk and dv sum over the query heads that share the key head, in registers, one head after the other.
The kernel of dk and dv holds scores with keys as rows: then p and ds are the left operands of its
products, and `wgmma` takes left operands from registers.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from fp8jax.kernels.hopper import load, scoped
from fp8jax.lm.flash import tiles
from fp8jax.lm.flash.tiles import (
    BY_COLUMN,
    BY_ROW,
    GROUPS,
    HIDDEN,
    ROWS,
    TILE,
    Problem,
    QueryTile,
    Stream,
    Tuning,
    ceil_div,
    positions,
    run_groups,
    spread,
)

TUNING_Q = Tuning(block=64, stages=2, registers=232)
TUNING_KV = Tuning(block=64, stages=2, registers=240)


# Gradient of queries ------------------------------------------------------------------------------


def gradient_q(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    y_BTNH: Float[Array, "B T N H"],
    dy_BTNH: Float[Array, "B T N H"],
    lse_BNT: Float[Array, "B N T"],
    begin_BT: Int[Array, "B T"],
    scale: float,
    tuning: Tuning = TUNING_Q,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
    """Returns dq, and delta: the sum over H of y dy.

    Args:
      q_BTNH, k_BTKH, v_BTKH, begin_BT, scale: as in the forward.
      y_BTNH, lse_BNT: the forward's results.
      dy_BTNH: the gradient of y.
      tuning: the kernel's.
    """
    p = Problem.of(q_BTNH, k_BTKH, scale, tuning)

    def body(q_g, k_g, v_g, y_g, dy_g, lse_g, begin_g, dq_g, delta_g):
        tile = QueryTile(p, begin_g)

        @scoped(
            q_s=p.memory(ROWS, GROUPS),
            y_s=p.memory(ROWS, GROUPS),
            dy_s=p.memory(ROWS, GROUPS),
            k_s=p.memory(tuning.block, tuning.stages),
            v_s=p.memory(tuning.block, tuning.stages),
            delta_s=plgpu.SMEM((GROUPS, ROWS), jnp.float32),
            q_full=plgpu.Barrier(num_arrivals=3, num_barriers=GROUPS),
            k_full=p.full(),
            v_full=p.full(),
            k_empty=p.empty(),
            v_empty=p.empty(),
            collective_axes="group",
        )
        def _(**shared):
            keys = tile.stream(k_g, shared["k_s"], shared["k_full"], shared["k_empty"])
            values = tile.stream(v_g, shared["v_s"], shared["v_full"], shared["v_empty"])

            def multiply(group):
                _GradientQ(tile, group, **shared).run(q_g, y_g, dy_g, lse_g, dq_g, delta_g)

            run_groups(p, tile.last - tile.first, (values, keys), multiply)

    return p.launch(
        body,
        q_BTNH,
        k_BTKH,
        v_BTKH,
        y_BTNH,
        dy_BTNH,
        lse_BNT,
        begin_BT,
        heads=p.heads,
        out=(p.like(q_BTNH), p.by_query()),
    )


@dataclasses.dataclass(frozen=True)
class _GradientQ:
    """What a multiplying warpgroup does in the kernel of dq.

    Attributes:
      tile: the tile of both warpgroups.
      group: this warpgroup.
      q_s, y_s, dy_s: the tile's rows; q_s at last holds dq.
      k_s, v_s: the slots of keys and values.
      delta_s: the results delta.
      q_full, k_full, v_full: barriers: the data has arrived.
      k_empty, v_empty: barriers: the slot has been read.
    """

    tile: QueryTile
    group: Any
    q_s: Any
    y_s: Any
    dy_s: Any
    k_s: Any
    v_s: Any
    delta_s: Any
    q_full: Any
    k_full: Any
    v_full: Any
    k_empty: Any
    v_empty: Any

    @property
    def p(self) -> Problem:
        return self.tile.p

    @property
    def base(self) -> Any:
        """The warpgroup's first query."""
        return (self.tile.tile * GROUPS + self.group) * ROWS

    def run(self, q_g, y_g, dy_g, lse_g, dq_g, delta_g) -> None:
        tile, group, rows = self.tile, self.group, pl.ds(self.base, ROWS)
        q_w, y_w, dy_w = self.q_s.at[group], self.y_s.at[group], self.dy_s.at[group]
        for source, target in ((q_g, q_w), (y_g, y_w), (dy_g, dy_w)):
            at = (tile.row, rows, tile.head)
            plgpu.copy_gmem_to_smem(source.at[at], target, self.q_full.at[group])
        begin = load(tile.begin_g.at[tile.row, rows], BY_ROW, optimized=False)
        lse = load(lse_g.at[tile.row, tile.head, rows], BY_ROW, optimized=False)
        plgpu.barrier_wait(self.q_full.at[group])
        y, dy = (load(x, plgpu.Layout.WGMMA).astype(jnp.float32) for x in (y_w, dy_w))
        delta = jnp.sum(y * dy, axis=1)
        self.delta_s[group] = delta

        def over_blocks(dq):
            for start, stop, begins, diagonal in tile.parts(self.base):
                hide = functools.partial(
                    tile.hide, base=self.base, begin=begin, begins=begins, diagonal=diagonal
                )

                @pl.loop(start, stop)
                def _(c, hide=hide):
                    self._add_block(hide, c, lse, delta, dq)

            return dq[...]

        dq = pl.run_scoped(over_blocks, plgpu.ACC((ROWS, self.p.head_dim), jnp.float32))
        q_w[...] = (dq * self.p.scale).astype(self.p.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_w, dq_g.at[tile.row, rows, tile.head])
        plgpu.copy_smem_to_gmem(self.delta_s.at[group], delta_g.at[tile.row, tile.head, rows])
        plgpu.wait_smem_to_gmem(0)

    def _add_block(self, hide, c, lse, delta, dq) -> None:
        """Adds ds k of block `c` of keys to the sums `dq`."""
        slot = self.p.slot(c - self.tile.first)
        plgpu.barrier_wait(self.v_full.at[slot])

        def products(dp, s):
            plgpu.wgmma(dp, self.dy_s.at[self.group], self.v_s.at[slot].transpose((1, 0)))
            plgpu.barrier_wait(self.k_full.at[slot])
            plgpu.wgmma(s, self.q_s.at[self.group], self.k_s.at[slot].transpose((1, 0)))
            plgpu.wgmma_wait(1)
            plgpu.barrier_arrive(self.v_empty.at[slot])
            return dp[...], s[...]

        accumulator = plgpu.ACC(self.p.scores, jnp.float32)
        dp, s = pl.run_scoped(products, accumulator, accumulator)
        p = jnp.exp2(hide(s, c) * self.p.to_base2 - spread(lse, s.shape))
        ds = (p * (dp - spread(delta, s.shape))).astype(self.p.dtype)
        tiles.add_product(dq, ds, self.k_s.at[slot])
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(self.k_empty.at[slot])


# Gradients of keys and values ---------------------------------------------------------------------


def gradient_kv(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    dy_BTNH: Float[Array, "B T N H"],
    lse_BNT: Float[Array, "B N T"],
    delta_BNT: Float[Array, "B N T"],
    end_BT: Int[Array, "B T"],
    scale: float,
    tuning: Tuning = TUNING_KV,
) -> tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]]:
    """Returns dk and dv.

    Args:
      q_BTNH, k_BTKH, v_BTKH, dy_BTNH, lse_BNT, scale: as in `gradient_q`.
      delta_BNT: of `gradient_q`.
      end_BT: the position behind the last one of each position's document.
      tuning: the kernel's.
    """
    p = Problem.of(q_BTNH, k_BTKH, scale, tuning)

    def body(q_g, k_g, v_g, dy_g, lse_g, delta_g, end_g, dk_g, dv_g):
        tile = _KeyTile(p, end_g)

        @scoped(
            k_s=p.memory(ROWS, GROUPS), v_s=p.memory(ROWS, GROUPS),
            q_s=p.memory(tuning.block, tuning.stages),
            dy_s=p.memory(tuning.block, tuning.stages),
            lse_s=plgpu.SMEM((tuning.stages, tuning.block), jnp.float32),
            delta_s=plgpu.SMEM((tuning.stages, tuning.block), jnp.float32),
            k_full=plgpu.Barrier(num_arrivals=2, num_barriers=GROUPS),
            q_full=p.full(2), dy_full=p.full(2), q_empty=p.empty(), dy_empty=p.empty(),
            collective_axes="group",
        )  # fmt: skip
        def _(**shared):
            queries = Stream(
                tile.pieces(q_g, shared["q_s"], lse_g, shared["lse_s"]),
                shared["q_full"], shared["q_empty"],
            )  # fmt: skip
            gradients = Stream(
                tile.pieces(dy_g, shared["dy_s"], delta_g, shared["delta_s"]),
                shared["dy_full"], shared["dy_empty"],
            )  # fmt: skip

            def multiply(group):
                _GradientKV(tile, group, **shared).run(k_g, v_g, dk_g, dv_g)

            count = (tile.last - tile.first) * p.heads_of_key
            run_groups(p, count, (queries, gradients), multiply)

    return p.launch(
        body, q_BTNH, k_BTKH, v_BTKH, dy_BTNH, lse_BNT, delta_BNT, end_BT, heads=p.key_heads,
        out=(p.like(k_BTKH), p.like(v_BTKH)),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _KeyTile:
    """A tile of keys, and which blocks of queries see it.

    Attributes:
      p: the sizes.
      end_g: the position behind the last one of each position's document, [B, T] in global memory.
    """

    p: Problem
    end_g: Any

    @property
    def row(self) -> Any:
        return lax.axis_index("row")

    @property
    def key_head(self) -> Any:
        return lax.axis_index("head")

    @property
    def tile(self) -> Any:
        return lax.axis_index("tile")  # the first ones are seen by most queries

    @property
    def first(self) -> Any:
        """The first block of queries."""
        return lax.div(self.tile * TILE, self.p.tuning.block)

    @property
    def last(self) -> Any:
        """The block behind the last one."""
        return ceil_div(self.end_g[self.row, (self.tile + 1) * TILE - 1], self.p.tuning.block)

    def queries(self, i: Any) -> tuple[Any, Any]:
        """The positions and the head of step `i`: all heads of a block, then the next block."""
        block = self.p.tuning.block
        head = self.key_head * self.p.heads_of_key + lax.rem(i, self.p.heads_of_key)
        return pl.ds(self.first_query(i), block), head

    def pieces(self, wide_g, wide_s, narrow_g, narrow_s) -> Any:
        """The pieces of a `Stream` of [B, T, N, H] and of the numbers [B, N, T] beside it."""

        def of(i, slot):
            rows, head = self.queries(i)
            return [
                (wide_g.at[self.row, rows, head], wide_s.at[slot]),
                (narrow_g.at[self.row, head, rows], narrow_s.at[slot]),
            ]

        return of

    def first_query(self, i: Any) -> Any:
        return (self.first + lax.div(i, self.p.heads_of_key)) * self.p.tuning.block

    def parts(self, base: Any) -> tuple[tuple[Any, Any, bool], ...]:
        """Splits the steps of the warpgroup whose first key is at `base`.

        Returns:
          (from, to, whether some query does not see some key) of each part.
        """
        block = self.p.tuning.block
        below = lax.min(ceil_div(base + ROWS, block), self.last)
        inside = lax.max(lax.div(self.end_g[self.row, base], block), below)
        inside = lax.min(inside, self.last)
        bounds = [(c - self.first) * self.p.heads_of_key for c in (below, inside, self.last)]
        return (0, bounds[0], True), (bounds[0], bounds[1], False), (bounds[1], bounds[2], True)


@dataclasses.dataclass(frozen=True)
class _GradientKV:
    """What a multiplying warpgroup does in the kernel of dk and dv.

    Attributes:
      tile: the tile of both warpgroups.
      group: this warpgroup.
      k_s, v_s: the tile's rows, at last dk and dv.
      q_s, dy_s, lse_s, delta_s: the slots of queries, their gradients and numbers.
      k_full, q_full, dy_full: barriers: the data has arrived.
      q_empty, dy_empty: barriers: the slot has been read.
    """

    tile: _KeyTile
    group: Any
    k_s: Any
    v_s: Any
    q_s: Any
    dy_s: Any
    lse_s: Any
    delta_s: Any
    k_full: Any
    q_full: Any
    dy_full: Any
    q_empty: Any
    dy_empty: Any

    @property
    def p(self) -> Problem:
        return self.tile.p

    @property
    def base(self) -> Any:
        """The warpgroup's first key."""
        return (self.tile.tile * GROUPS + self.group) * ROWS

    def run(self, k_g, v_g, dk_g, dv_g) -> None:
        tile, group = self.tile, self.group
        at = (tile.row, pl.ds(self.base, ROWS), tile.key_head)
        k_w, v_w = self.k_s.at[group], self.v_s.at[group]
        plgpu.copy_gmem_to_smem(k_g.at[at], k_w, self.k_full.at[group])
        plgpu.copy_gmem_to_smem(v_g.at[at], v_w, self.k_full.at[group])
        end = load(tile.end_g.at[tile.row, pl.ds(self.base, ROWS)], BY_ROW, optimized=False)
        plgpu.barrier_wait(self.k_full.at[group])

        def over_blocks(dk, dv):
            for start, stop, masked in tile.parts(self.base):

                @pl.loop(start, stop)
                def _(i, masked=masked):
                    self._add_block(i, end if masked else None, dk, dv)

            return dk[...], dv[...]

        accumulator = plgpu.ACC((ROWS, self.p.head_dim), jnp.float32)
        dk, dv = pl.run_scoped(over_blocks, accumulator, accumulator)
        k_w[...] = (dk * self.p.scale).astype(self.p.dtype)
        v_w[...] = dv.astype(self.p.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(k_w, dk_g.at[at])
        plgpu.copy_smem_to_gmem(v_w, dv_g.at[at])
        plgpu.wait_smem_to_gmem(0)

    def _hide(self, s, i, end):
        """Returns the scores of step `i`, [keys, queries], `HIDDEN` where a key is not seen."""
        queries = positions(s.shape, 1) + self.tile.first_query(i)
        s = jnp.where(queries >= positions(s.shape, 0) + self.base, s, HIDDEN)
        return jnp.where(queries < spread(end, s.shape), s, HIDDEN)

    def _add_block(self, i, end: jax.Array | None, dk, dv) -> None:
        """Adds step `i` to the sums; `end` is None where all queries see all keys."""
        slot = self.p.slot(i)
        plgpu.barrier_wait(self.q_full.at[slot])

        def scores(s):
            plgpu.wgmma(s, self.k_s.at[self.group], self.q_s.at[slot].transpose((1, 0)))
            return s[...]

        s = pl.run_scoped(scores, plgpu.ACC(self.p.scores, jnp.float32))
        lse = load(self.lse_s.at[slot], BY_COLUMN)
        if end is not None:
            s = self._hide(s, i, end)
        p = jnp.exp2(s * self.p.to_base2 - spread(lse, s.shape, 1))
        plgpu.barrier_wait(self.dy_full.at[slot])

        def products(dp):
            plgpu.wgmma(dp, self.v_s.at[self.group], self.dy_s.at[slot].transpose((1, 0)))
            tiles.add_product(dv, p.astype(self.p.dtype), self.dy_s.at[slot])
            return plgpu.wgmma_accumulator_load(dp, wait_n=1)

        dp = pl.run_scoped(products, plgpu.ACC(self.p.scores, jnp.float32))
        # Only now: registers are scarce, and `lse` is not needed any more.
        delta = load(self.delta_s.at[slot], BY_COLUMN)
        ds = (p * (dp - spread(delta, s.shape, 1))).astype(self.p.dtype)
        tiles.add_product(dk, ds, self.q_s.at[slot])
        plgpu.wgmma_wait(1)
        plgpu.barrier_arrive(self.dy_empty.at[slot])
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(self.q_empty.at[slot])
