"""Rows of a table, with a gradient in float32 that has the same bits twice.

The gradient of a look-up adds the cotangents of all positions that read one row. JAX writes it as a
scatter-add in the dtype of what was looked up. In bfloat16, with its 8 bits, the sum for a frequent
token stops growing after some hundred terms: here sums are float32. And GPUs scatter with atomic
additions, in whatever order their threads arrive, so that two runs of one program differ, in the
sixth digit of the loss by step 20. On an H200, for 16,384 positions (docs/log.md):

    table            scatter-add   one-hot product   XLA's deterministic scatter   sorted, here
    151936 x 1536    0.5 ms        15 ms             18 ms                         1.2 ms
    128256 x 4096    0.9 ms        29 ms             54 ms                         2.3 ms

Sorted: positions are brought into the order of their ids (stable, so that ties have an order too),
equal ids are then neighbors, and a segmented sum by doubling adds them: after pass k an entry
holds the sum of the up to 2^k entries of its id that end with it. The last one of each run is
written to its row; no two are written to the same. CPUs and TPUs scatter in one fixed order; there
the sum is a scatter-add.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from fp8jax.device import hardware
from fp8jax.device.mesh import batch_axes, constrain


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def look_up(
    table_VD: Float[Array, "V D"], ids_BL: Int[Array, "B L"], rows: str, dtype: Any
) -> Float[Array, "B L D"]:
    """table_VD[ids_BL] in `dtype`; the gradient of the table is summed in float32.

    Args:
      rows: logical name of the table's first axis, see `fp8jax.sharding.RULES`.
    """
    # Gathered over fsdp before the look-up, in `dtype`: otherwise XLA would shard its result like
    # the table and then move all of it.
    return jnp.take(constrain(table_VD.astype(dtype), rows, "residual"), ids_BL, axis=0)


def _look_up_fwd(table_VD, ids_BL, rows, dtype):
    # Of the table only its shape and dtype go to the backward.
    return look_up(table_VD, ids_BL, rows, dtype), (ids_BL, table_VD[:, :0])


def _look_up_bwd(rows, dtype, kept, g_BLD):
    ids_BL, empty_V0 = kept
    return sum_by_id(ids_BL, g_BLD, empty_V0.shape[0]).astype(empty_V0.dtype), None


look_up.defvjp(_look_up_fwd, _look_up_bwd)


def sum_by_id(
    ids_BL: Int[Array, "B L"], g_BLD: Float[Array, "B L D"], num_rows: int
) -> Float[Array, "V D"]:
    """float32 [num_rows, D]: row v is the sum of g_BLD where ids_BL is v; the same bits each time.

    On a mesh of GPUs each device sorts its own part of the batch, and the sums are added.
    """
    if hardware.platform() != "gpu":
        return jnp.zeros((num_rows, g_BLD.shape[-1])).at[ids_BL].add(g_BLD.astype(jnp.float32))
    sums = functools.partial(_sum_by_id, num_rows=num_rows)
    axes = batch_axes(ids_BL.shape[0])
    if not axes:
        return sums(ids_BL, g_BLD)
    over_batch = PartitionSpec(axes)
    return jax.shard_map(
        lambda ids, g: lax.psum(sums(ids, g), axes),
        in_specs=(over_batch, over_batch), out_specs=PartitionSpec(),
    )(ids_BL, g_BLD)  # fmt: skip


def _sum_by_id(ids_BL, g_BLD, num_rows: int):
    ids_T, g_TD = ids_BL.reshape(-1), g_BLD.reshape(-1, g_BLD.shape[-1])
    order_T = jnp.argsort(ids_T, stable=True)
    ids_T, sums_TD = ids_T[order_T], g_TD[order_T].astype(jnp.float32)
    step = 1
    while step < len(ids_T):
        same_T = jnp.pad(ids_T[step:] == ids_T[:-step], (step, 0))
        before_TD = jnp.pad(sums_TD[:-step], ((step, 0), (0, 0)))
        sums_TD += jnp.where(same_T[:, None], before_TD, 0)
        step *= 2
    last_T = jnp.append(ids_T[1:] != ids_T[:-1], True)
    # Where a run goes on, a row that does not exist: dropped. unique_indices lets XLA write without
    # atomics; the dropped ones are made unique as well.
    rows_T = jnp.where(last_T, ids_T, num_rows + jnp.arange(len(ids_T)))
    table_VD = jnp.zeros((num_rows, sums_TD.shape[1]), jnp.float32)
    return table_VD.at[rows_T].set(sums_TD, mode="drop", unique_indices=True)
