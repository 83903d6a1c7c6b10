"""Weights that devices gather as codes, in place of the numbers that GEMMs multiply.

Under FSDP each device has a part of a weight, quantizes it, and gathers the rest before the GEMM.
XLA gathers what the GEMM reads. A GEMM that multiplies codes gets them as codes of one byte. The
emulation multiplies codes times scales: 16 bits an element, or 32 with a float32 scale for each
tile. So codes and scales are made whole before they are multiplied with each other. The numbers are
the same: each is the product of one code and one scale, on whichever device.

It takes two constraints. With the second alone, XLA would make the weight whole before it is cast,
since that cast is done element by element.

Codes of four bits stay as they are: not every device can send half a byte.
"""

import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

T = TypeVar("T")


Specs = tuple[PartitionSpec, PartitionSpec]  # of an array in parts, and where a GEMM reads it


def gathered(codes: T, specs: Specs) -> T:
    """Returns a tree of codes and scales, made in parts and gathered as `specs` say.

    Leaves with another number of axes than a spec stay as they are, and so do all inside
    `shard_map`. An axis whose size is not a multiple of its devices is whole on each.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or mesh.manual_axes:
        return codes

    def placed(x: jax.Array) -> jax.Array:
        if x.ndim != len(specs[0]) or jnp.dtype(x.dtype).name.startswith("float4"):
            return x
        for spec in specs:
            axes = zip(x.shape, spec, strict=True)
            fitting = (axis if size % _devices(mesh, axis) == 0 else None for size, axis in axes)
            x = lax.with_sharding_constraint(x, PartitionSpec(*fitting))
        return x

    result: T = jax.tree.map(placed, codes)
    return result


def _devices(mesh: Any, axis: str | tuple[str, ...] | None) -> int:
    """Returns the number of devices along an entry of a PartitionSpec."""
    names = () if axis is None else (axis,) if isinstance(axis, str) else axis
    return math.prod(mesh.shape[name] for name in names)
