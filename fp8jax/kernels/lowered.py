"""Kernels in the form that XLA compiles: each lowered once, for all programs that call it.

Mosaic GPU lowers a kernel in Python, in about half a second. A training step calls 15 kernels, from
hundreds of places. So each is lowered by itself (`jax.export`), and programs call that form, whose
text is the one that a program would have had. The form is kept as long as a program has it, and in
a file beside the programs that JAX's compilation cache keeps: the next process lowers none.

XLA compiles the kernels of a program one after another, after all else. So a thread compiles each
as soon as it is lowered; XLA finds in the process what was compiled there. A process that reads
lowered kernels most likely reads its programs, too, compiled kernels included: it compiles none.

Its key hashes the kernel's jaxpr, the kind of the device, the versions of JAX, and the sources
that decide what the jaxpr does not show. A trace only makes the key, since many traces become no
program, such as those that ask for shapes.
"""

import dataclasses
import functools
import hashlib
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.export
import jaxlib
import numpy as np
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.typing import ArrayLike

from fp8jax import hidden_jax
from fp8jax.device import cache_files, hardware

Shapes = tuple[tuple[tuple[int, ...], np.dtype], ...]  # (shape, dtype) of each operand

# Lowered kernels by their key, as long as a program that calls them is kept.
_exported: weakref.WeakValueDictionary[str, jax.export.Exported] = weakref.WeakValueDictionary()
_lowering = threading.Lock()  # programs are lowered and compiled in threads
_compiling = ThreadPoolExecutor(8, "kernel")  # its threads start when there is work
_MOSAIC = jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A function of arrays of some shapes, which is lowered when a program needs it.

    Attributes:
      key: a hash of what it computes.
      jaxpr: what it computes; its results are leaves.
      results: what it returns, a tree of shapes and dtypes.
    """

    key: str
    jaxpr: ClosedJaxpr = dataclasses.field(compare=False, repr=False)
    results: Any = dataclasses.field(compare=False)

    def call(self, *operands: ArrayLike) -> Any:
        """Calls the lowered form."""
        leaves = _kernel.bind(*operands, kernel=self)
        return jax.tree.unflatten(jax.tree.structure(self.results), leaves)

    def trace(self, *operands: ArrayLike) -> Any:
        """Does what the function does, as a part of the program that is traced."""
        leaves = jaxpr_as_fun(self.jaxpr)(*operands)
        return jax.tree.unflatten(jax.tree.structure(self.results), leaves)

    @functools.cached_property
    def exported(self) -> jax.export.Exported:
        """The lowered function of the leaves."""
        with _lowering:
            found = _exported.get(self.key)
            if found is None:
                found = _exported[self.key] = _read(self) or _lower(self)
        return found


_kernel = Primitive("lowered_kernel")
_kernel.multiple_results = True


@_kernel.def_abstract_eval
def _results(*_: Any, kernel: Kernel) -> list[Any]:
    leaves = jax.tree.leaves(kernel.results)
    return [jax.core.ShapedArray(leaf.shape, leaf.dtype) for leaf in leaves]


@_kernel.def_impl  # where JAX evaluates a trace, as it does with an eager jax.checkpoint
def _call(*operands: ArrayLike, kernel: Kernel) -> tuple[jax.Array, ...]:
    return kernel.exported.call(*operands)


mlir.register_lowering(_kernel, mlir.lower_fun(_call, multiple_results=True))


@functools.cache
def hash_sources(*others: Path) -> str:
    """Returns a hash of the source files that decide what a kernel does, in `others`, too."""
    package, found = Path(__file__).parents[1], hashlib.sha256(jax.__version__.encode())
    found.update(jaxlib.__version__.encode())
    files = [package / "hidden_jax.py"]
    for folder in (package / "kernels", package / "numerics", *others):
        files += sorted(folder.glob("*.py"))
    for file in files:
        found.update(hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()


def shapes_of(operands: Any) -> Shapes:
    return tuple((x.shape, x.dtype) for x in operands)


def as_kernel(f: Callable[..., Any], shapes: Shapes, code: tuple[Path, ...] = ()) -> Kernel | None:
    """Returns f for operands of these shapes; None if it has effects, as interpreters do.

    Args:
      f: a function of arrays; its results are a tree of arrays. What a `functools.partial` is
        given must be hashable.
      shapes: of the operands.
      code: folders other than `kernels` and `numerics` that hold sources of f.
    """
    # What a trace depends on besides.
    config: Any = jax.config
    options = config.jax_enable_x64, config.jax_default_matmul_precision
    described = _describe(f, shapes, (hardware.device_kind(), *options))
    if described is None:
        return None
    digest, closed, results = described
    key = hashlib.sha256(f"{digest} {hash_sources(*code)}".encode()).hexdigest()
    return Kernel(key, closed, results)


def _read(kernel: Kernel) -> jax.export.Exported | None:
    kept = cache_files.read(_file(kernel))
    return None if kept is None else jax.export.deserialize(bytearray(kept))


def _lower(kernel: Kernel) -> jax.export.Exported:
    platform = "cuda" if hardware.platform() == "gpu" else hardware.platform()
    run = jaxpr_as_fun(kernel.jaxpr)

    def leaves(*operands):
        return tuple(run(*operands))

    with hidden_jax.lowering_for_shards():
        export = jax.export.export(jax.jit(leaves), platforms=[platform], disabled_checks=[_MOSAIC])
        found = export(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in kernel.jaxpr.in_avals))
    # What it raises is not asked for: the program that calls the kernel raises it, too.
    _compiling.submit(_compile, found)
    if cache_files.folder() is not None:
        cache_files.write(_file(kernel), bytes(found.serialize()))
    return found


def _compile(kernel: jax.export.Exported) -> None:
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in kernel.in_avals]
    with hidden_jax.storing_no_program():
        jax.jit(kernel.call).lower(*shapes).compile()


def _file(kernel: Kernel) -> str:
    return f"fp8jax_kernel_{kernel.key}"


Described = tuple[str, ClosedJaxpr, Any] | None


def _describe(f: Callable[..., Any], shapes: Shapes, context: Any) -> Described:
    """Returns a hash of f's jaxpr, it, and the shapes of its results; None if it has effects."""
    if isinstance(f, functools.partial) and "<locals>" not in f.func.__qualname__:
        # The same function of a module, given the same: its jaxpr was seen before.
        named = tuple((name, type(value), value) for name, value in f.keywords.items())
        return _describe_partial(f.func, f.args, named, shapes, context)
    structs = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    with hidden_jax.lowering_for_shards():
        closed, results = jax.make_jaxpr(f, return_shape=True)(*structs)
    if closed.effects:
        return None
    text = f"{closed} {[np.asarray(x).tobytes() for x in closed.consts]} {context}"
    return hashlib.sha256(text.encode()).hexdigest(), closed, results


@functools.lru_cache(maxsize=256)
def _describe_partial(
    function: Callable[..., Any], given: Any, named: Any, shapes: Shapes, context: Any
) -> Described:
    keywords = {name: value for name, _, value in named}
    return _describe(lambda *operands: function(*given, *operands, **keywords), shapes, context)
