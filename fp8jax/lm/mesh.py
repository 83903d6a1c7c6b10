"""The device mesh, and which array axis is sharded over which mesh axis.

A mesh has three axes:

    data      shards the batch; parameters are replicated
    fsdp      shards the batch, and every parameter along one of its axes
    tensor    shards heads and hidden units

Model code gives the axes of its arrays logical names. `RULES` is the only table that maps those
names to mesh axes. The rest is `jit` with `NamedSharding`, and XLA's sharding propagation.
"""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from fp8jax.lookup import lookup, unknown

AXES = ("data", "fsdp", "tensor")

# Logical axis -> mesh axes. A name that is not a key here is a mistake in the model and raises.
RULES: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "length": None,
    "embed": "fsdp",  # of parameters
    "residual": None,  # of activations
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "norm": None,
    "positions": None,
    "layers": None,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshAxes:
    """The number of devices along each mesh axis. One may be -1: it takes all remaining devices."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1


MESHES: dict[str, MeshAxes] = {
    "data": MeshAxes(data=-1),
    "fsdp": MeshAxes(fsdp=-1),
    "tensor": MeshAxes(tensor=-1),
}


def mesh_axes(name: str, overrides: dict[str, int | None]) -> MeshAxes:
    """Returns the entry `name` of `MESHES`, with sizes replaced by those of `overrides`.

    Args:
      overrides: mesh axis -> its size; None leaves the entry's size.

    Raises:
      ValueError: an unknown name or mesh axis.
    """
    preset = lookup("mesh", name, MESHES)
    for axis in overrides:
        if axis not in AXES:
            raise unknown("mesh axis", axis, AXES)
    given = {axis: size for axis, size in overrides.items() if size is not None}
    return dataclasses.replace(preset, **given)


def make_mesh(axes: MeshAxes, devices: Any = None) -> Mesh:
    """Returns the mesh of all devices, or of the given ones.

    Over several nodes (GPUs) or slices (TPUs), `data` crosses them first, then `fsdp`, and `tensor`
    only where nothing else is left: so what exchanges most stays on the fast links.

    Raises:
      ValueError: a size is not valid, or their product is not the number of devices. The message
        has the nearest mesh that fits.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = [getattr(axes, name) for name in AXES]
    known = int(np.prod([size for size in sizes if size != -1]))
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ValueError(f"mesh axes must be positive; at most one may be -1: {axes}")
    if -1 in sizes and len(devices) % known == 0:
        sizes[sizes.index(-1)] = len(devices) // known
    if int(np.prod(sizes)) != len(devices):
        raise ValueError(
            f"a mesh of {_shape(sizes)} does not fit {len(devices)} devices: the product of its"
            " axes must be the number of devices; the nearest that fits is"
            f" {_shape(_nearest(sizes, len(devices)))}"
        )
    # Since jax 0.10 the default is Explicit axes, which make shardings a part of types.
    types = (AxisType.Auto,) * len(AXES)
    if (nodes := len({_node(device) for device in devices})) == 1:
        return jax.make_mesh(sizes, AXES, axis_types=types, devices=devices)
    return Mesh(_over_nodes(sizes, nodes, devices), AXES, axis_types=types)


def _shape(sizes: Sequence[int]) -> str:
    named = zip(AXES, sizes, strict=True)
    return " x ".join(f"{name}={'the rest' if size == -1 else size}" for name, size in named)


def _nearest(sizes: Sequence[int], devices: int) -> tuple[int, ...]:
    """Returns the sizes whose product is `devices` that differ by the smallest factors.

    Of equally near ones, that which changes `tensor` least, and then `fsdp`: their sizes depend on
    the model. A size of -1 may become anything.
    """
    divisors = [size for size in range(1, devices + 1) if devices % size == 0]

    def distance(found: tuple[int, ...]) -> tuple[float, ...]:
        each = [
            0.0 if a == -1 else abs(math.log2(b / a)) for a, b in zip(sizes, found, strict=True)
        ]
        return (round(sum(each), 6), *reversed(each))

    whole = ((data, fsdp) for data in divisors for fsdp in divisors if devices % (data * fsdp) == 0)
    return min(((d, f, devices // (d * f)) for d, f in whole), key=distance)


def _node(device: Any) -> int:
    """Returns the node of a GPU or the slice of a TPU, as JAX numbers them; 0 where it does not."""
    return int(getattr(device, "slice_index", 0))


def _over_nodes(sizes: Sequence[int], nodes: int, devices: Sequence[Any]) -> np.ndarray:
    """Returns the devices in the shape `sizes`, for several nodes with equally many devices.

    Raises:
      ValueError: the nodes have different numbers of devices.
    """
    here = collections.Counter(map(_node, devices))
    if len(set(here.values())) > 1:
        raise ValueError(
            f"the nodes have different numbers of devices: {dict(sorted(here.items()))}"
        )
    left, crossing = nodes, []
    for size in sizes:
        crossing.append(math.gcd(size, left))
        left //= crossing[-1]
    within = [size // across for size, across in zip(sizes, crossing, strict=True)]
    return mesh_utils.create_hybrid_device_mesh(
        within, crossing, devices, allow_split_physical_axes=True
    )


def spec(*names: str | None) -> PartitionSpec:
    """Returns the mesh axes of an array whose axes have these logical names (None: not sharded).

    Raises:
      ValueError: a logical name that is not in `RULES`.
    """
    for name in names:
        if name is not None and name not in RULES:
            raise unknown("logical axis", name, RULES)
    return PartitionSpec(*(None if name is None else RULES[name] for name in names))


def weight_specs(*names: str | None) -> tuple[PartitionSpec, PartitionSpec]:
    """Returns `spec` of a weight, and where a GEMM reads it: whole along what shards the batch."""
    batch, parts = set(_names(RULES["batch"])), spec(*names)
    return parts, PartitionSpec(
        *(None if batch.intersection(_names(axis)) else axis for axis in parts)
    )


def constrain(x: Shaped[Array, "..."], *names: str | None) -> Shaped[Array, "..."]:
    """Returns `x` sharded as `RULES` says over the mesh of `jax.set_mesh`.

    An axis whose size is not a multiple of its mesh axis is not sharded. Without a mesh `x` is
    returned as it is.

    Args:
      names: the logical name of each axis of `x`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, _partition(mesh, x.shape, names))


def local_shape(shape: tuple[int, ...], *names: str | None) -> tuple[int, ...]:
    """Returns the shape that each device has of an array of this shape after `constrain`."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return shape
    axes = _partition(mesh, shape, names)
    return tuple(size // _size(mesh, axis) for size, axis in zip(shape, axes, strict=True))


def _partition(mesh: Any, shape: tuple[int, ...], names: tuple[str | None, ...]) -> PartitionSpec:
    """Returns what `RULES` says of the axes whose size is a multiple of their mesh axis."""
    axes = zip(shape, spec(*names), strict=True)
    return PartitionSpec(*(axis if size % _size(mesh, axis) == 0 else None for size, axis in axes))


def _size(mesh: Any, axis: str | tuple[str, ...] | None) -> int:
    """Returns the number of devices along a mesh axis, or along several together."""
    return int(np.prod([mesh.shape[name] for name in _names(axis)]))


def _names(axis: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns an entry of `RULES` as a tuple of mesh axes."""
    if axis is None:
        return ()
    return (axis,) if isinstance(axis, str) else axis


def batch_axes(size: int) -> tuple[str, ...]:
    """Returns the mesh axes that shard a batch of `size` rows under the mesh of `jax.set_mesh`.

    Returns () without a mesh, with a single device along those axes, and if `size` is not a
    multiple of their devices.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = RULES["batch"]
    if mesh.empty or _size(mesh, axes) == 1 or size % _size(mesh, axes):
        return ()
    return _names(axes)


def tree_shardings(boxed: Any, mesh: Mesh) -> Any:
    """Returns the NamedSharding of each leaf of a tree.

    Args:
      boxed: a pytree of arrays or ShapeDtypeStructs. Leaves in a `flax.linen.Partitioned` box are
        sharded by the box's logical axis names. Leaves without a box, such as amax histories and
        counters, and those with other axes than the names', are replicated.
      mesh: the mesh to shard over.

    Raises:
      ValueError: the size of a sharded axis is not a multiple of its mesh axis.
    """

    def leaf_sharding(path, leaf) -> NamedSharding:
        if not isinstance(leaf, nn.Partitioned):
            return NamedSharding(mesh, PartitionSpec())
        # Adafactor's state has the names of a parameter, and sums over some of its axes, or (1,).
        if leaf.value.ndim != len(leaf.names) or leaf.value.shape == (1,):
            return NamedSharding(mesh, PartitionSpec())
        partition = spec(*leaf.names)
        for size, axis, name in zip(leaf.value.shape, partition, leaf.names, strict=True):
            if size % _size(mesh, axis):
                where = jax.tree_util.keystr(path, simple=True, separator="/")
                raise ValueError(
                    f"{where}: axis {name!r} has size {size}, which is not a multiple of the mesh"
                    f" axis {axis}, {_size(mesh, axis)} devices"
                )
        return NamedSharding(mesh, partition)

    return jax.tree_util.tree_map_with_path(
        leaf_sharding, boxed, is_leaf=lambda leaf: isinstance(leaf, nn.Partitioned)
    )


def check_batch(batch_size: int, grad_accum: int, mesh: Mesh) -> int:
    """Returns how many rows of the batch each device gets in each microbatch.

    Raises:
      ValueError: the batch does not divide evenly into microbatches and devices.
    """
    devices = _size(mesh, RULES["batch"])
    if grad_accum < 1 or batch_size % (grad_accum * devices):
        raise ValueError(
            f"batch_size={batch_size} must be a multiple of {grad_accum=} microbatches x "
            f"{devices} devices (data x fsdp), and grad_accum at least 1"
        )
    return batch_size // (grad_accum * devices)
