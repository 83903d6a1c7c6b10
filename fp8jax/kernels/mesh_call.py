"""Calls a kernel on a mesh: on each device's shards of its operands.

XLA cannot look inside a kernel. By default it would gather the operands, and run the whole kernel
on every device. Under `jit`, shardings are propagated after tracing. So each kernel declares the
letters of its dimensions, through which Shardy propagates shardings. Then it is asked how to shard
its operands, given the propagated shardings (`_sharded_over`). The answer for each dimension:

  * It is sharded over the mesh axes that it is sharded over in the source. A GEMM's k is sharded if
    both operands are sharded along k, as in wgrad, whose k is the tokens. If only one is, such as a
    parameter under FSDP, that one is all-gathered, as codes of one byte.

`shard_map` was rejected: it needs shardings as arguments, when they have not been propagated yet.
Without a mesh, and on one device, nothing is declared.

XLA asks for the function of the shards for each call: for each layer of an unrolled stack anew. JAX
then traces and lowers what it gets. So it gets calls of kernels that were lowered before
(lowered.py), or a training step would lower 15 kernels 336 times.
"""

import functools
import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap, sequential_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from fp8jax.device import hardware
from fp8jax.kernels.hopper import BLOCK
from fp8jax.kernels.lowered import as_kernel, hash_sources, shapes_of

Shards = dict[str, tuple[str, ...]]  # letter -> the mesh axes that it is sharded over
Run = Callable[..., Any]  # run(f, *operands) calls the Hopper kernel f

TILES = {"m": BLOCK, "k": BLOCK}


def _marks(
    call: Callable[..., Any], operands: Any, code: tuple[Path, ...], *rules: Any
) -> tuple[np.uint32, ...]:
    """Returns scalars that tell this partitioned kernel from others, in every process.

    JAX's compilation cache compares the texts of programs. In that text a partitioned kernel is
    only the address of a Python object. Python reuses addresses, and another process has others:
    device/xla.py leaves them out. So these scalars are more operands of the kernel. They hash what
    it computes, how it is partitioned, and what neither shows, such as kernels of parts of a sum.
    """
    text = f"{jax.make_jaxpr(call)(*operands)} {rules} {hash_sources(*code)}"
    return tuple(np.frombuffer(hashlib.sha256(text.encode()).digest()[:8], np.uint32))


def _directly(f: Callable[..., Any], *operands: Any) -> Any:
    return f(*operands)


def _on_one_device(code: tuple[Path, ...], f: Callable[..., Any], *operands: Any) -> Any:
    """Calls f; its lowered form in a program for a GPU."""
    if hardware.platform() != "gpu" or not any(isinstance(x, jax.core.Tracer) for x in operands):
        return f(*operands)
    given = tuple(map(jnp.asarray, operands))
    kernel = as_kernel(f, shapes_of(given), code)
    if kernel is None:
        return f(*operands)
    call = custom_vmap(kernel.call)

    @call.def_vmap
    def batched(_: int, mapped: list[bool], *given: jax.Array) -> tuple[Any, Any]:
        axes = tuple(0 if each else None for each in mapped)
        results = jax.vmap(kernel.trace, in_axes=axes)(*given)
        return results, jax.tree.map(lambda _: True, results)

    return call(*given)


def _on_shards(
    known: dict[Any, Any], code: tuple[Path, ...], f: Callable[..., Any], *operands: Any
) -> Any:
    """Calls f, lowered; `known` keeps that for each shape of the operands."""
    shapes = shapes_of(operands)
    if shapes not in known:
        known[shapes] = as_kernel(f, shapes, code)
    kernel = known[shapes]
    return f(*operands) if kernel is None else kernel.call(*operands)


def _mesh_axes(array: Any, dimension: int) -> tuple[str, ...]:
    """Returns the mesh axes that a dimension of a ShapeDtypeStruct is sharded over."""
    entry = array.sharding.spec[dimension]
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _devices(mesh: Any, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _sharded_over(
    mesh: Any, sources: list[tuple[str, Any]], multiples: dict[str, int], ragged: bool
) -> Shards:
    """Decides which mesh axes each letter is sharded over.

    A letter is not sharded if the sources disagree, if its shards would not be multiples of its
    number, or if a letter before it is already sharded over one of its mesh axes.

    Args:
      mesh: the mesh.
      sources: (letters, ShapeDtypeStruct) of each source.
      multiples: letter -> the number that the size of a shard must be a multiple of.
      ragged: whether shards of any equal sizes are taken, too.
    """
    shards: Shards = {}
    for letter, multiple in multiples.items():
        places = [(array, of.index(letter)) for of, array in sources if letter in of]
        first, dimension = places[0]
        axes = _mesh_axes(first, dimension)
        multiple = 1 if ragged else multiple
        fits = first.shape[dimension] % (multiple * _devices(mesh, axes)) == 0
        agree = all(_mesh_axes(*place) == axes for place in places)
        taken = any(set(axes) & set(others) for others in shards.values())
        shards[letter] = axes if fits and agree and not taken else ()
    return shards


def _sharding(mesh: Any, shards: Shards, letters: str, array: Any) -> NamedSharding:
    """Returns the sharding of an operand or result. Dimensions that do not divide are whole."""
    spec = []
    for letter, size in zip(letters, array.shape, strict=True):
        axes = shards[letter]
        spec.append(axes if size % _devices(mesh, axes) == 0 else ())
    return NamedSharding(mesh, PartitionSpec(*spec))


def call_on_mesh(
    kernel: Callable[[Shards, Run], Callable[..., Any]],
    operands: tuple[jax.Array, ...],
    letters: tuple[str, ...],
    results: tuple[str, ...],
    multiples: dict[str, int],
    sources: int = 1,
    ragged: bool = False,
    code: tuple[Path, ...] = (),
) -> Any:
    """Calls a kernel on the operands or, on a mesh, on their shards.

    Args:
      kernel: kernel(shards, run) returns the function of the operands' shards, which calls the
        Hopper kernel once, through run(f, *operands).
      operands: the arrays.
      letters: the letters of each operand; "" is a scalar.
      results: the letters of each leaf of the result.
      multiples: letter -> the number that the size of a shard must be a multiple of. A mesh axis
        goes to the first letter that it shards.
      sources: the shardings of the first so many operands decide; the other operands follow.
      ragged: whether the function takes shards that are not such multiples. Then a dimension of a
        result, such as blocks of rows, is whole on each device if it does not divide among them.
      code: other folders than this one that hold sources of the kernel.
    """
    mesh = jax.sharding.get_abstract_mesh()
    whole: Shards = dict.fromkeys(multiples, ())
    if mesh.empty or mesh.size == 1:
        return kernel(whole, functools.partial(_on_one_device, code))(*operands)
    call = kernel(whole, _directly)
    marks = _marks(call, operands, code, letters, results, multiples, sources, ragged)
    letters = (*letters, *[""] * len(marks))
    lowered: dict[Any, dict[Any, Any]] = {}  # for each way to shard it

    def partition(mesh, given, wanted):
        named = list(zip(letters, given, strict=True))
        shards = _sharded_over(mesh, named[:sources], multiples, ragged)
        leaves, tree = jax.tree.flatten(wanted)
        out = [_sharding(mesh, shards, *each) for each in zip(results, leaves, strict=True)]
        arguments = tuple(_sharding(mesh, shards, *each) for each in named)
        known = lowered.setdefault(tuple(shards.items()), {})
        of_shards = kernel(shards, functools.partial(_on_shards, known, code))

        def unmarked(*given):
            return of_shards(*given[: -len(marks)])

        return mesh, unmarked, jax.tree.unflatten(tree, out), arguments

    partitioned = custom_partitioning(lambda *given: call(*given[: -len(marks)]))
    partitioned.def_partition(
        partition,
        sharding_rule=" -> ".join(", ".join(map(" ".join, of)) for of in (letters, results)),
        reduction_factors=tuple(letter for letter in multiples if letter not in "".join(results)),
    )
    # vmap runs the kernel for one element after another. That is slow, but vmap is only used to
    # initialize a model's layers, where the results are dropped.
    return sequential_vmap(lambda *given: partitioned(*given))(*operands, *marks)


def each_shard(f: Callable[..., Any]) -> Callable[[Shards, Run], Callable[..., Any]]:
    """Returns the kernel that calls f on each shard, without a word to other devices."""
    return lambda shards, run: functools.partial(run, f)
