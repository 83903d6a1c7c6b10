"""Table look-up with a gradient that is summed in float32 and is the same in every run.

The gradient of a look-up sums the cotangents of all positions that read the same row. JAX writes it
as a scatter-add in the dtype of the looked-up rows. That has two faults. In bfloat16, with its 8
significant bits, the sum for a frequent token stops growing after some hundred terms; here the sums
are float32. And GPUs scatter with atomic additions in the order in which their threads arrive, so
two runs of one program differ, in the sixth digit of the loss by step 20. Times on an H200 for
16,384 positions (docs/results/determinism.md):

    table            scatter-add   one-hot GEMM      XLA's deterministic scatter   sorted, here
    151936 x 1536    0.5 ms        15 ms             18 ms                         1.2 ms
    128256 x 4096    0.9 ms        29 ms             54 ms                         2.3 ms

"Sorted" sorts the positions by id (stable, so that equal ids have a fixed order too). Equal ids are
then neighbors, and a segmented sum by doubling adds them: after pass k, each entry holds the sum of
up to 2^k entries of its id, itself the last of them. The last entry of each run of equal ids is
then written to its row; no two entries are written to the same row. CPUs and TPUs scatter in one
fixed order, so there the sum is a scatter-add.
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
    """Returns table_VD[ids_BL] in `dtype`; the gradient of the table is summed in float32.

    Args:
      rows: logical name of the table's first axis, a key of `RULES` (device/mesh.py).
    """
    # The second constraint gathers the table over fsdp before the look-up. Otherwise XLA would
    # shard the result like the table and then move all of it. With the second alone, XLA would
    # gather first and then cast, and so move float32 numbers.
    cast_VD = constrain(table_VD.astype(dtype), rows, "embed")
    return jnp.take(constrain(cast_VD, rows, "residual"), ids_BL, axis=0)


def _look_up_fwd(table_VD, ids_BL, rows, dtype):
    # The backward needs only the table's number of rows and its dtype: an empty slice has both.
    return look_up(table_VD, ids_BL, rows, dtype), (ids_BL, table_VD[:, :0])


def _look_up_bwd(rows, dtype, residuals, g_BLD):
    ids_BL, empty_V0 = residuals
    return sum_by_id(ids_BL, g_BLD, empty_V0.shape[0]).astype(empty_V0.dtype), None


look_up.defvjp(_look_up_fwd, _look_up_bwd)


def sum_by_id(
    ids_BL: Int[Array, "B L"], g_BLD: Float[Array, "B L D"], num_rows: int
) -> Float[Array, "V D"]:
    """Returns float32 [num_rows, D]: row v sums g_BLD over the positions where ids_BL is v.

    The result has the same bits in every run. On a mesh of GPUs, each device sorts its own part of
    the batch, and the sums of the devices are added.
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
    """Computes `sum_by_id` on one device, by sorting. T counts the B * L positions."""
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
    # An entry that is not the last of its run gets a row that does not exist, so the write is
    # dropped. unique_indices lets XLA write without atomics; the dropped rows are unique as well.
    rows_T = jnp.where(last_T, ids_T, num_rows + jnp.arange(len(ids_T)))
    table_VD = jnp.zeros((num_rows, sums_TD.shape[1]), jnp.float32)
    return table_VD.at[rows_T].set(sums_TD, mode="drop", unique_indices=True)
