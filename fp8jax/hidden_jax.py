"""What this library uses of JAX that JAX does not make public, each with its reason.

No other file imports `jax._src`, or tells tracers apart by their id. tests/hidden_jax_test.py shows
of each function here that it does what it says; CI runs it on the oldest and the newest version of
JAX.
"""

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from jax._src import clusters, compiler, core, custom_partitioning, distributed
from jax._src.config import (
    export_ignore_forward_compatibility,
    persistent_cache_min_compile_time_secs,
    remove_custom_partitioning_ptr_from_cache_key,
)
from jax._src.interpreters import batching, partial_eval
from jax._src.lib.mlir import ir
from jax._src.mesh import empty_abstract_mesh, empty_concrete_mesh, use_abstract_mesh
from jax._src.sharding_impls import _internal_use_concrete_mesh

T = TypeVar("T")


# Devices ------------------------------------------------------------------------------------------


def backends_are_initialized() -> bool:
    """Whether XLA has already read its flags. False if this version of JAX does not tell.

    Every public function that could answer this starts the backends.
    """
    try:
        from jax._src.xla_bridge import backends_are_initialized as initialized
    except ImportError:
        return False
    return initialized()


# Processes ----------------------------------------------------------------------------------------


def processes() -> Any:
    """Returns what JAX knows of the processes of a run: who this one is, and the client of a store.

    `multihost_utils` has barriers and collectives, but not the coordinator's store of texts, which
    works without a device. And `jax.process_index` starts the backends, which must not happen
    before all processes have joined. Of the result, `process_id`, `num_processes`, `client`
    and `coordinator_address` are used.
    """
    return distributed.global_state


@contextlib.contextmanager
def without_dumps() -> Iterator[None]:
    """`jax.distributed.initialize` inside leaves out a dump of the stack once the coordinator goes.

    JAX's client then calls back, by default a function of C++ that dumps the stack and aborts, and
    `initialize` has no argument for another. jaxlib fails to call one of Python's, which aborts in
    two lines; device/aborts.py holds the abort.
    """
    make = distributed._jax.get_distributed_runtime_client
    quiet = functools.partial(make, missed_heartbeat_callback=lambda *_: None)
    distributed._jax.get_distributed_runtime_client = quiet
    try:
        yield
    finally:
        distributed._jax.get_distributed_runtime_client = make


def detect_cluster(method: str | None) -> tuple[str | None, int | None, int | None]:
    """Returns coordinator, number of processes and index, as JAX finds them in a cluster.

    `jax.distributed.initialize` detects them, too, but waits for the others in the same call.
    """
    address, number, process, _ = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, [], method, initialization_timeout=300
    )
    return address, number, process


# Traces -------------------------------------------------------------------------------------------
#
# Histories of several uses combine by maximum if all uses share one conversion, made in the trace
# that the history comes from (gemm/histories/shared_leaf.py). JAX has no public way to ask which
# trace an array comes from, or to compute in an outer one.


def is_of_current_trace(tracer: Any) -> bool:
    """Whether operations on the tracer alone would be recorded by the innermost transformation."""
    return core.trace_ctx.trace is tracer._trace


def in_trace_of(tracer: Any) -> contextlib.AbstractContextManager[Any]:
    """Operations inside are recorded by the transformation that the tracer comes from."""
    return core.set_current_trace(tracer._trace)


def is_eager(tracer: Any) -> bool:
    """Whether operations on the tracer run at once, because no `jit` is around it."""
    return hasattr(tracer, "primal") and not isinstance(tracer.primal, core.Tracer)


def refers_to_operands(tracer: Any) -> bool:
    """Whether the tracer, a line of a program, keeps the tracers that it was computed from."""
    return isinstance(tracer, partial_eval.DynamicJaxprTracer | partial_eval.JaxprTracer)


def is_mapped_inside(x: Any, other: Any) -> bool:
    """Whether `jax.vmap`, inside of the `jax.grad` that `other` comes from, maps x."""
    if not (isinstance(x, batching.BatchTracer) and isinstance(other, core.Tracer)):
        return False
    trace = x._trace
    while hasattr(trace, "parent_trace"):
        trace = trace.parent_trace
        if trace is other._trace and not isinstance(trace, partial_eval.DynamicJaxprTrace):
            return True
    return False


class OfTracers(Generic[T]):
    """A value for each of some tracers, as long as the tracer lives.

    Tracers compare like arrays, so they are no keys of dictionaries: their ids are.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Callable[[], Any], T]] = {}

    def ids(self) -> set[int]:
        """Returns the ids of the tracers that have a value."""
        return set(self._kept)

    def find(self, tracer: Any) -> T | None:
        """Returns the tracer's value, or None."""
        if id(tracer) not in self._kept:
            return None
        of, value = self._kept[id(tracer)]
        return value if of() is tracer else None

    def keep(self, tracer: Any, value: T) -> None:
        """Gives the tracer a value, which must not refer to it."""
        key, kept = id(tracer), self._kept
        kept[key] = weakref.ref(tracer, lambda _: kept.pop(key, None)), value


# Programs and the compilation cache ---------------------------------------------------------------


@contextlib.contextmanager
def lowering_for_shards() -> Iterator[None]:
    """`jax.export` inside lowers a function for a program that XLA has already partitioned.

    Nothing is written to a file, so the text is that of this version of JAX. And under the mesh of
    `jax.set_mesh`, JAX would say how the function's scalars are sharded, which means nothing there.
    """
    with (
        export_ignore_forward_compatibility(True),
        _internal_use_concrete_mesh(empty_concrete_mesh),
        use_abstract_mesh(empty_abstract_mesh),
    ):
        yield


jax_cache_key = compiler._get_cache_key  # JAX's own


def set_cache_key(key: Callable[..., str | None]) -> None:
    """JAX's compilation cache has programs under this key from now on, and none whose key is None.

    JAX offers no public way to leave a program out, or the addresses of only some functions.
    """
    compiler._get_cache_key = key  # type: ignore[assignment]


def storing_no_program() -> contextlib.AbstractContextManager[Any]:
    """What this thread compiles inside is not written to JAX's compilation cache.

    JAX's public option is one for the whole process.
    """
    return persistent_cache_min_compile_time_secs(math.inf)


def without_addresses(wanted: bool) -> contextlib.AbstractContextManager[Any]:
    """JAX's cache keys leave out the addresses of partitioned functions, as a user may set, too."""
    users = remove_custom_partitioning_ptr_from_cache_key.value
    return remove_custom_partitioning_ptr_from_cache_key(users or wanted)


def partitioned_functions(computation: Any) -> list[Callable[..., Any]]:
    """Returns what XLA asks how to partition the functions of a lowered program."""
    found = []

    def look(op: Any) -> Any:
        attributes = op.attributes
        if "call_target_name" in attributes:
            if attributes["call_target_name"].value == "CustomSPMDPartitioning":
                found.append(attributes["backend_config"].value)
        return ir.WalkResult.ADVANCE

    computation.operation.walk(look)
    callbacks = custom_partitioning._sharding_callbacks
    return [callbacks[key.encode()].partition for key in found]


def change_kernels(change: Callable[[Any], None]) -> None:
    """Calls `change` with the module of each Mosaic GPU kernel that is lowered from now on.

    JAX has no public way to change the text of a kernel.
    """
    from jax.experimental.mosaic.gpu import core as mosaic

    serialize = mosaic._run_serde_pass
    if getattr(serialize, "change", None) is change:
        return

    def changed(module: Any, **options: Any) -> Any:
        module = serialize(module, **options)
        change(module)
        return module

    changed.change = change  # type: ignore[attr-defined]
    mosaic._run_serde_pass = changed
