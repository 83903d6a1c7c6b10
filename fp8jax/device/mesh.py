"""The mesh, and which array axis lies along which mesh axis.

A mesh has three axes: `data` (the batch; parameters are copies), `fsdp` (the batch, and every
parameter cut along one axis) and `tensor` (heads and hidden units). Model code names the axes of
its arrays logically; `RULES` is the one table from those names to mesh axes. Everything else is
`jit` with `NamedSharding`, and XLA's propagation.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from fp8jax.lookup import lookup, unknown

AXES = ("data", "fsdp", "tensor")


# Logical axis -> mesh axes. What is not a key here is a mistake in the model and raises.
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
    """Devices along each mesh axis; at most one is -1, which takes what the others leave."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1


MESHES: dict[str, MeshAxes] = {
    "data": MeshAxes(data=-1),
    "fsdp": MeshAxes(fsdp=-1),
    "tensor": MeshAxes(tensor=-1),
}


def mesh_axes(name: str, overrides: dict[str, int | None]) -> MeshAxes:
    """The entry `name` of `MESHES` with each given (not None) axis of `overrides` in its place."""
    preset = lookup("mesh", name, MESHES)
    for axis in overrides:
        if axis not in AXES:
            raise unknown("mesh axis", axis, AXES)
    given = {axis: size for axis, size in overrides.items() if size is not None}
    return dataclasses.replace(preset, **given)


def make_mesh(axes: MeshAxes, devices: Any = None) -> Mesh:
    """The mesh of all devices (or of those given).

    Raises:
      ValueError: sizes that do not multiply to the number of devices, with the numbers.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = [getattr(axes, name) for name in AXES]
    known = int(np.prod([size for size in sizes if size != -1]))
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ValueError(f"mesh axes are positive, and at most one is -1: {axes}")
    if -1 in sizes and len(devices) % known == 0:
        sizes[sizes.index(-1)] = len(devices) // known
    if int(np.prod(sizes)) != len(devices):
        shape = " x ".join(f"{n}={s}" for n, s in zip(AXES, sizes, strict=True))
        raise ValueError(f"a mesh of {shape} does not divide {len(devices)} devices")
    # Auto: from jax 0.10 on, make_mesh would give axes whose shardings are part of types.
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def spec(*names: str | None) -> PartitionSpec:
    """The mesh axes of an array whose axes have these logical names (None: not sharded)."""
    for name in names:
        if name is not None and name not in RULES:
            raise unknown("logical axis", name, RULES)
    return PartitionSpec(*(None if name is None else RULES[name] for name in names))


def constrain(x: Shaped[Array, "..."], *names: str | None) -> Shaped[Array, "..."]:
    """`x` with its axes sharded as `RULES` say, under the mesh of `jax.set_mesh`; `x` without one.

    Axes that the mesh does not divide stay whole.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    axes = [
        axis if x.shape[i] % _size(mesh, axis) == 0 else None for i, axis in enumerate(spec(*names))
    ]
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*axes))


def _size(mesh: Any, axis: str | tuple[str, ...] | None) -> int:
    """Devices along a mesh axis, or along several."""
    names = () if axis is None else (axis,) if isinstance(axis, str) else axis
    return int(np.prod([mesh.shape[name] for name in names]))


def batch_axes(size: int) -> tuple[str, ...]:
    """The mesh axes over which a batch of `size` rows is cut under the mesh of `jax.set_mesh`; ()
    without a mesh, for a single device, and where they do not divide it."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = RULES["batch"]
    if mesh.empty or _size(mesh, axes) == 1 or size % _size(mesh, axes):
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def tree_shardings(boxed: Any, mesh: Mesh) -> Any:
    """NamedShardings for a tree of (abstract) arrays boxed with logical axis names.

    Leaves without a box, such as amax histories and counters, are replicated.

    Raises:
      ValueError: a sharded dimension that the mesh does not divide; names the leaf and the numbers.
    """

    def leaf_sharding(path, leaf) -> NamedSharding:
        if not isinstance(leaf, nn.Partitioned):
            return NamedSharding(mesh, PartitionSpec())
        partition = spec(*leaf.names)
        for size, axis, name in zip(leaf.value.shape, partition, leaf.names, strict=True):
            if size % _size(mesh, axis):
                where = jax.tree_util.keystr(path, simple=True, separator="/")
                raise ValueError(
                    f"{where}: its axis {name!r} of {size} does not divide by the {axis} axis of"
                    f" the mesh, {_size(mesh, axis)} devices"
                )
        return NamedSharding(mesh, partition)

    return jax.tree_util.tree_map_with_path(
        leaf_sharding, boxed, is_leaf=lambda leaf: isinstance(leaf, nn.Partitioned)
    )


def check_batch(batch_size: int, grad_accum: int, mesh: Mesh) -> int:
    """Rows of a device and microbatch. Raises ValueError where a microbatch does not divide over
    the mesh's batch axes."""
    devices = _size(mesh, RULES["batch"])
    if grad_accum < 1 or batch_size % (grad_accum * devices):
        raise ValueError(
            f"batch_size={batch_size} does not divide into {grad_accum=} microbatches over "
            f"{devices} devices (data x fsdp)"
        )
    return batch_size // (grad_accum * devices)
