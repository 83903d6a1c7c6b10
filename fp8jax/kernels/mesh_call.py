"""Calls a kernel on a mesh: on each device's shards of its operands.

XLA cannot look inside a kernel. By default it would gather the operands, and run the whole kernel
on every device. Under `jit`, shardings are propagated after tracing. So each kernel declares the
letters of its dimensions, through which Shardy propagates shardings. Then it is asked how to shard
its operands, given the propagated shardings (`_sharded_over`). The answer for each dimension:

  * It is sharded over the mesh axes that it is sharded over in the source. A GEMM's k is sharded if
    both operands are sharded along k, as in wgrad, whose k is the tokens. If only one is, such as a
    parameter under FSDP, that one is all-gathered, as codes of one byte.

`shard_map` was rejected: it needs shardings as arguments, when they have not been propagated yet.
Without a mesh, and on one device, the kernel is called directly.

XLA asks for the function of the shards for each call: for each layer of an unrolled stack anew. JAX
then traces and lowers what it gets. So it gets calls of kernels that were lowered before
(`_lowered`), or a training step would lower 15 kernels 336 times.
"""

import functools
import hashlib
import math
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np
from jax.custom_batching import sequential_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from fp8jax import hidden_jax
from fp8jax.device import hardware
from fp8jax.kernels.hopper import BLOCK

Shards = dict[str, tuple[str, ...]]  # letter -> the mesh axes that it is sharded over
Run = Callable[..., Any]  # run(f, *operands) calls the Hopper kernel f

TILES = {"m": BLOCK, "k": BLOCK}

# Lowered kernels by the hash of what they compute, as long as a program that calls them is kept.
_lowered: weakref.WeakValueDictionary[bytes, jax.export.Exported] = weakref.WeakValueDictionary()
_lowering = threading.Lock()  # programs are compiled in threads
_MOSAIC = jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")


@functools.cache
def _sources(*others: Path) -> str:
    """Returns a hash of the source files that decide what runs on a shard, in `others`, too."""
    package, found = Path(__file__).parents[1], hashlib.sha256(jax.__version__.encode())
    for folder in (package / "kernels", package / "numerics", *others):
        for file in sorted(folder.glob("*.py")):
            found.update(hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()


def _marks(
    call: Callable[..., Any], operands: Any, code: tuple[Path, ...], *rules: Any
) -> tuple[np.uint32, ...]:
    """Returns scalars that tell this partitioned kernel from others, in every process.

    JAX's compilation cache compares the texts of programs. In that text a partitioned kernel is
    only the address of a Python object. Python reuses addresses, and another process has others:
    device/xla.py leaves them out. So these scalars are more operands of the kernel. They hash what
    it computes, how it is partitioned, and what neither shows, such as kernels of parts of a sum.
    """
    text = f"{jax.make_jaxpr(call)(*operands)} {rules} {_sources(*code)}"
    return tuple(np.frombuffer(hashlib.sha256(text.encode()).digest()[:8], np.uint32))


def _directly(f: Callable[..., Any], *operands: Any) -> Any:
    return f(*operands)


def _lowered_once(f: Callable[..., Any], shapes: list[Any]) -> jax.export.Exported | None:
    """Returns f, lowered, for operands of these shapes; None if it has effects, as interpreters do.

    Equal kernels of equal shapes are lowered once in a process, while a program has them.
    """
    closed = jax.make_jaxpr(f)(*shapes)
    if closed.effects:
        return None
    text = f"{closed} {[np.asarray(x).tobytes() for x in closed.consts]} {hardware.device_kind()}"
    key = hashlib.sha256(text.encode()).digest()
    platform = "cuda" if hardware.platform() == "gpu" else hardware.platform()
    with _lowering:
        found = _lowered[key] if key in _lowered else None
        if found is None:
            with hidden_jax.lowering_for_shards():
                export = jax.export.export(
                    jax.jit(f), platforms=[platform], disabled_checks=[_MOSAIC]
                )
                found = _lowered[key] = export(*shapes)
    return found


def _run_lowered(known: dict[Any, Any], f: Callable[..., Any], *operands: Any) -> Any:
    """Calls f, lowered; `known` keeps that for each shape of the operands."""
    shapes = tuple((x.shape, x.dtype) for x in operands)
    if shapes not in known:
        known[shapes] = _lowered_once(f, [jax.ShapeDtypeStruct(*shape) for shape in shapes])
    lowered = known[shapes]
    return f(*operands) if lowered is None else lowered.call(*operands)


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
    call = kernel(dict.fromkeys(multiples, ()), _directly)
    if mesh.empty or mesh.size == 1:
        return call(*operands)
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
        of_shards = kernel(shards, functools.partial(_run_lowered, known))

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
