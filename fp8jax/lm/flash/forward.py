"""The forward of flash attention (attention.py): y, and each query's sum of exponentials.

Legend: B rows, T positions, N query heads, K key and value heads, H head size.

For each block of keys, a warpgroup multiplies q k^T, takes exponentials, and multiplies them by v.
While one warpgroup takes exponentials, the other one multiplies: they take turns at a barrier.
"""

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from fp8jax.kernels.hopper import load, scoped
from fp8jax.lm.flash import tiles
from fp8jax.lm.flash.tiles import (
    BY_ROW,
    GROUPS,
    LEAST,
    ROWS,
    Problem,
    QueryTile,
    Tuning,
    filled,
    run_groups,
    spread,
)

TUNING = Tuning(block=128, stages=2, registers=232)


def forward(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    begin_BT: Int[Array, "B T"],
    scale: float,
    tuning: Tuning = TUNING,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
    """Returns y, and lse2: log2 of each query's sum of 2^(scale q k^T log2 e).

    Args:
      q_BTNH, k_BTKH, v_BTKH: bfloat16 or float16; T is a multiple of 128, H is 64 or 128.
      begin_BT: the first position of each position's document.
      scale: of the scores.
      tuning: the kernel's.
    """
    p = Problem.of(q_BTNH, k_BTKH, scale, tuning)

    def body(q_g, k_g, v_g, begin_g, y_g, lse_g):
        tile = QueryTile(p, begin_g)

        @scoped(
            q_s=p.memory(ROWS, GROUPS),
            k_s=p.memory(tuning.block, tuning.stages),
            v_s=p.memory(tuning.block, tuning.stages),
            lse_s=plgpu.SMEM((GROUPS, ROWS), jnp.float32),
            q_full=plgpu.Barrier(num_barriers=GROUPS),
            k_full=p.full(),
            v_full=p.full(),
            k_empty=p.empty(),
            v_empty=p.empty(),
            turn=plgpu.Barrier(num_arrivals=GROUPS),
            collective_axes="group",
        )
        def _(**shared):
            keys = tile.stream(k_g, shared["k_s"], shared["k_full"], shared["k_empty"])
            values = tile.stream(v_g, shared["v_s"], shared["v_full"], shared["v_empty"])

            def multiply(group):
                _Forward(tile, group, **shared).run(q_g, y_g, lse_g)

            run_groups(p, tile.last - tile.first, (keys, values), multiply)

    return p.launch(
        body,
        q_BTNH,
        k_BTKH,
        v_BTKH,
        begin_BT,
        heads=p.heads,
        out=(p.like(q_BTNH), p.by_query()),
    )


@dataclasses.dataclass(frozen=True)
class _Forward:
    """What a multiplying warpgroup does.

    Attributes:
      tile: the tile of both warpgroups.
      group: this warpgroup.
      q_s: the queries, and at last the results.
      k_s, v_s: the slots of keys and values.
      lse_s: the results lse2.
      q_full, k_full, v_full: barriers: the data has arrived.
      k_empty, v_empty: barriers: the slot has been read.
      turn: where the warpgroups take turns.
    """

    tile: QueryTile
    group: Any
    q_s: Any
    k_s: Any
    v_s: Any
    lse_s: Any
    q_full: Any
    k_full: Any
    v_full: Any
    k_empty: Any
    v_empty: Any
    turn: Any

    @property
    def p(self) -> Problem:
        return self.tile.p

    @property
    def base(self) -> Any:
        """The warpgroup's first query."""
        return (self.tile.tile * GROUPS + self.group) * ROWS

    def run(self, q_g, y_g, lse_g) -> None:
        tile, group, rows = self.tile, self.group, pl.ds(self.base, ROWS)
        q_w, lse_w = self.q_s.at[group], self.lse_s.at[group]
        plgpu.copy_gmem_to_smem(q_g.at[tile.row, rows, tile.head], q_w, self.q_full.at[group])
        begin = load(tile.begin_g.at[tile.row, rows], BY_ROW, optimized=False)
        plgpu.barrier_wait(self.k_full.at[0])
        plgpu.barrier_wait(self.q_full.at[group])
        pl.when(group == 1)(self._take_turns)
        sums = (
            filled((ROWS, self.p.head_dim), plgpu.Layout.WGMMA),
            filled((ROWS,), BY_ROW, LEAST),
            filled((ROWS,), BY_ROW),
        )
        for start, stop, begins, diagonal in tile.parts(self.base):
            hide = functools.partial(
                tile.hide, base=self.base, begin=begin, begins=begins, diagonal=diagonal
            )
            sums = lax.fori_loop(start, stop, functools.partial(self._add_block, hide), sums)
        y, largest, total = sums
        pl.when(group == 0)(self._take_turns)
        q_w[...] = (y * spread(1 / total, y.shape)).astype(self.p.dtype)
        lse_w[...] = largest + jnp.log(total) * math.log2(math.e)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_w, y_g.at[tile.row, rows, tile.head])
        plgpu.copy_smem_to_gmem(lse_w, lse_g.at[tile.row, tile.head, rows])
        plgpu.wait_smem_to_gmem(0)

    def _take_turns(self) -> None:
        plgpu.barrier_arrive(self.turn)
        plgpu.barrier_wait(self.turn)

    def _add_block(self, hide, c, sums):
        """Adds block `c` of keys to (y, the largest exponent so far, the sum relative to it)."""
        y, largest, total = sums
        i = c - self.tile.first
        slot = self.p.slot(i)

        def scores(s):
            plgpu.wgmma(s, self.q_s.at[self.group], self.k_s.at[slot].transpose((1, 0)))
            self._take_turns()
            return s[...]

        s = pl.run_scoped(scores, plgpu.ACC(self.p.scores, jnp.float32))
        plgpu.barrier_arrive(self.k_empty.at[slot])
        s = hide(s, c)
        larger = jnp.maximum(largest, jnp.max(s, axis=1) * self.p.to_base2)
        shrink = jnp.exp2(largest - larger)
        e = jnp.exp2(s * self.p.to_base2 - spread(larger, s.shape))
        y *= spread(shrink, y.shape)
        total = total * shrink + jnp.sum(e, axis=1)
        e = e.astype(self.p.dtype)
        # All of this before the turn ends; the compiler would move some of it behind.
        y, total, larger, e = lax.optimization_barrier((y, total, larger, e))
        plgpu.barrier_arrive(self.turn)
        plgpu.barrier_wait(self.v_full.at[slot])
        plgpu.barrier_wait(self.turn)

        def await_next_keys():
            @pl.when(c + 1 < self.tile.last)
            def _():
                plgpu.barrier_wait(self.k_full.at[self.p.slot(i + 1)])

        y = tiles.plus_product(y, e, self.v_s.at[slot], await_next_keys)
        plgpu.barrier_arrive(self.v_empty.at[slot])
        return y, larger, total
