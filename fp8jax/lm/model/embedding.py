"""Table look-up with a gradient that is summed in float32 and is the same in every run.

The gradient of a look-up sums the cotangents of all positions that read the same row. JAX writes it
as a scatter-add in the dtype of the looked-up rows. That has two faults. In bfloat16, with its 8
significant bits, the sum for a frequent token stops growing after some hundred terms; here the sums
are float32. And GPUs scatter with atomic additions in the order in which their threads arrive, so
two runs of one program differ, in the sixth digit of the loss by step 20. Times on an H200 for
16,384 positions (docs/results/determinism.md):

    table            scatter-add   one-hot GEMM      XLA's deterministic scatter   sorted, here
    151936 x 1536    0.4 ms        15 ms             18 ms                         0.7 ms
    128256 x 4096    0.8 ms        29 ms             54 ms                         1.5 ms

"Sorted" sorts the positions by id (stable, so that equal ids have a fixed order too). Equal ids are
then neighbors: runs. The positions are cut into blocks of 128, and a GEMM with ones and zeros adds
up each run within a block; its products are exact, its sums float32. A run that goes on in later
blocks has a sum in each, which a segmented sum by doubling adds: after pass k, each block holds the
sum of up to 2^k blocks of its last id. The sum of each run is then written to its row; no two are
written to the same row. CPUs and TPUs scatter in one fixed order, so there it is a scatter-add.

A NaN or infinity in a gradient makes the sums of its whole block NaN.

Where fsdp shards the columns of a table that has more rows than all these devices have positions,
the table stays where it is: each device looks up its columns for the positions of all, and an
all-to-all brings each position's columns together. The gradient goes back in the same way. For a
vocabulary of 151,936 and 16,384 positions on each of two devices, that moves 50 MB instead of 700.
Each device then sorts the positions of all, which is why there must not be more of them.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from fp8jax.device import hardware
from fp8jax.lm.mesh import batch_axes, constrain, local_shape, spec

BLOCK = 128  # positions whose sums one GEMM computes


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def look_up(
    table_VD: Float[Array, "V D"], ids_BL: Int[Array, "B L"], rows: str, dtype: Any
) -> Float[Array, "B L D"]:
    """Returns table_VD[ids_BL] in `dtype`; the gradient of the table is summed in float32.

    Args:
      rows: logical name of the table's first axis, a key of `RULES` (lm/mesh.py).
    """
    if _moves_results(table_VD.shape, ids_BL.shape, rows):
        columns, batch = spec("residual", "embed"), spec("batch")
        return jax.shard_map(
            functools.partial(_look_up_columns, dtype=dtype),
            in_specs=(columns, batch),
            out_specs=batch,
        )(table_VD, ids_BL)
    # The second constraint gathers the table over fsdp before the look-up. With it alone, XLA
    # would gather first and then cast, and so move float32 numbers.
    cast_VD = constrain(table_VD.astype(dtype), rows, "embed")
    return jnp.take(constrain(cast_VD, rows, "residual"), ids_BL, axis=0)


def _look_up_fwd(table_VD, ids_BL, rows, dtype):
    # The backward needs only the table's number of rows and its dtype: an empty slice has both.
    return look_up(table_VD, ids_BL, rows, dtype), (ids_BL, table_VD[:, :0])


def _look_up_bwd(rows, dtype, residuals, g_BLD):
    ids_BL, empty_V0 = residuals
    num_rows = empty_V0.shape[0]
    if _moves_results((num_rows, g_BLD.shape[-1]), ids_BL.shape, rows):
        columns, batch = spec("residual", "embed"), spec("batch")
        sums_VD = jax.shard_map(
            functools.partial(_sum_columns, num_rows=num_rows),
            in_specs=(batch, batch),
            out_specs=columns,
        )(ids_BL, g_BLD)
    else:
        sums_VD = sum_by_id(ids_BL, g_BLD, num_rows)
    return sums_VD.astype(empty_V0.dtype), None


look_up.defvjp(_look_up_fwd, _look_up_bwd)


def _moves_results(table_shape: tuple[int, ...], ids_shape: tuple[int, ...], rows: str) -> bool:
    """Whether devices of fsdp exchange what they look up, and not the table and its gradient.

    The table must be sharded over its columns alone, and have more rows than positions are
    exchanged.
    """
    num_rows, columns = local_shape(table_shape, rows, "embed")
    devices = table_shape[1] // columns
    positions = devices * math.prod(local_shape(ids_shape, "batch", "length"))
    by_columns = num_rows == table_shape[0] and devices > 1
    return by_columns and bool(batch_axes(ids_shape[0])) and positions < num_rows


def _look_up_columns(table_Vd, ids_bL, dtype: Any):
    """Looks up, on one device of fsdp, its d columns for the rows of all; returns all of b's."""
    ids_cL = lax.all_gather(ids_bL, "fsdp", axis=0, tiled=True)
    x_cLd = jnp.take(table_Vd, ids_cL, axis=0).astype(dtype)
    return lax.all_to_all(x_cLd, "fsdp", split_axis=0, concat_axis=2, tiled=True)


def _sum_columns(ids_bL, g_bLD, num_rows: int):
    """Returns the sums of the columns of one device of fsdp, over the rows of all devices."""
    ids_cL = lax.all_gather(ids_bL, "fsdp", axis=0, tiled=True)
    g_cLd = lax.all_to_all(g_bLD, "fsdp", split_axis=2, concat_axis=0, tiled=True)
    return lax.psum(_sum_here(ids_cL, g_cLd, num_rows), "data")


def sum_by_id(
    ids_BL: Int[Array, "B L"], g_BLD: Float[Array, "B L D"], num_rows: int
) -> Float[Array, "V D"]:
    """Returns float32 [num_rows, D]: row v sums g_BLD over the positions where ids_BL is v.

    The result has the same bits in every run. On a mesh of GPUs, each device sorts its own part of
    the batch, and the sums of the devices are added.
    """
    axes = batch_axes(ids_BL.shape[0])
    if hardware.platform() != "gpu" or not axes:
        return _sum_here(ids_BL, g_BLD, num_rows)
    over_batch = PartitionSpec(axes)
    return jax.shard_map(
        lambda ids, g: lax.psum(_sum_sorted(ids, g, num_rows), axes),
        in_specs=(over_batch, over_batch),
        out_specs=PartitionSpec(),
    )(ids_BL, g_BLD)


def _sum_here(ids_BL, g_BLD, num_rows: int):
    """Computes `sum_by_id` as the platform does it best, over the arrays that are given."""
    if hardware.platform() == "gpu":
        return _sum_sorted(ids_BL, g_BLD, num_rows)
    return jnp.zeros((num_rows, g_BLD.shape[-1])).at[ids_BL].add(g_BLD.astype(jnp.float32))


def _sum_sorted(ids_BL, g_BLD, num_rows: int):
    """Computes `sum_by_id` on one device, by sorting.

    T counts the B * L positions, C their blocks, R the positions of a block, and S the runs of
    equal ids in a block.
    """
    ids_T, g_TD = ids_BL.reshape(-1), g_BLD.reshape(-1, g_BLD.shape[-1])
    padding = -len(ids_T) % BLOCK
    ids_T = jnp.pad(ids_T, (0, padding), constant_values=num_rows)  # a row that does not exist
    order_T = jnp.argsort(ids_T, stable=True)
    ids_CR = ids_T[order_T].reshape(-1, BLOCK)
    g_CRD = g_TD.at[order_T].get(mode="fill", fill_value=0).reshape(-1, BLOCK, g_TD.shape[1])
    runs_CR = jnp.cumsum(jnp.diff(ids_CR, axis=1, prepend=ids_CR[:, :1]) != 0, axis=1)
    in_run_CSR = runs_CR[:, None, :] == jnp.arange(BLOCK)[None, :, None]
    sums_CSD = jnp.einsum(
        "CSR,CRD->CSD",
        in_run_CSR.astype(g_TD.dtype),
        g_CRD,
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST,
    )
    first_C, last_C, count_C = ids_CR[:, 0], ids_CR[:, -1], runs_CR[:, -1]
    sums_CSD = sums_CSD.at[1:, 0].add(_sums_before(first_C, last_C, count_C, sums_CSD))
    # A run ends in its block, unless it is the last one there and the next block goes on with it.
    goes_on_C = jnp.append(first_C[1:] == last_C[:-1], False)
    ends_CS = jnp.arange(BLOCK)[None] < (count_C + ~goes_on_C)[:, None]
    ids_CS = jnp.max(jnp.where(in_run_CSR, ids_CR[:, None, :], 0), axis=2)
    # What is no end of a run gets a row that does not exist, so the write is dropped.
    # unique_indices lets XLA write without atomics; the dropped rows are unique as well.
    nowhere_CS = num_rows + 1 + jnp.arange(ids_CS.size).reshape(ids_CS.shape)
    rows_CS = jnp.where(ends_CS, ids_CS, nowhere_CS)
    table_VD = jnp.zeros((num_rows, g_TD.shape[1]), jnp.float32)
    return table_VD.at[rows_CS].set(sums_CSD, mode="drop", unique_indices=True)


def _sums_before(first_C, last_C, count_C, sums_CSD):
    """Returns what the run at the begin of each block but the first has summed in blocks before."""
    sums_CD = jnp.take_along_axis(sums_CSD, count_C[:, None, None], axis=1)[:, 0]
    step = 1
    while step < len(last_C):
        same_C = jnp.pad(last_C[step:] == last_C[:-step], (step, 0))
        before_CD = jnp.pad(sums_CD[:-step], ((step, 0), (0, 0)))
        sums_CD += jnp.where(same_C[:, None], before_CD, 0)
        step *= 2
    return jnp.where((first_C[1:] == last_C[:-1])[:, None], sums_CD[:-1], 0)
