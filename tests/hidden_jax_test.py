"""What JAX does not make public does what hidden_jax.py says, on each version that CI has."""

import gc
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compilation_cache, compiler, distributed, xla_bridge
from jax.experimental import custom_partitioning
from jax.experimental.mosaic.gpu import core as mosaic
from jax.sharding import NamedSharding, PartitionSpec

from fp8jax import hidden_jax


def test_whether_backends_have_started(monkeypatch):
    jax.devices()
    assert hidden_jax.backends_are_initialized()
    monkeypatch.setattr(xla_bridge, "_backends", {})
    assert not hidden_jax.backends_are_initialized()


def test_jax_has_a_callback_for_a_coordinator_that_has_gone():
    """What it does then is tried by tests/experiments/process_faults_test.py."""
    make = distributed._jax.get_distributed_runtime_client
    with hidden_jax.without_dumps():
        quiet = distributed._jax.get_distributed_runtime_client
        assert quiet is not make
        assert quiet("localhost:1", 0, init_timeout=1)  # it takes the argument, and connects later
    assert distributed._jax.get_distributed_runtime_client is make


# Traces -------------------------------------------------------------------------------------------


def test_the_trace_of_a_tracer_and_computing_in_it():
    """A product in the trace of a scan's constant stands before the loop."""

    def f(x):
        assert hidden_jax.is_of_current_trace(x)

        def body(carry, _):
            assert not hidden_jax.is_of_current_trace(x) and hidden_jax.is_of_current_trace(carry)
            with hidden_jax.in_trace_of(x):
                product = jnp.sin(x)
            return carry + product, None

        return jax.lax.scan(body, x, None, length=3)[0]

    outside = [str(eqn.primitive) for eqn in jax.make_jaxpr(f)(1.0).eqns]
    assert outside == ["sin", "scan"]
    assert jax.jit(f)(1.0) == pytest.approx(1 + 3 * np.sin(1), rel=1e-6)


def test_whether_a_derivative_runs_at_once():
    found = []

    def f(x):
        found.append(hidden_jax.is_eager(x))
        return x * x

    jax.grad(f)(1.0)
    jax.jit(jax.grad(f))(1.0)
    jax.jit(f)(1.0)
    assert found == [True, False, False]


def test_which_tracers_keep_their_operands():
    found = {}

    def f(name):
        def look(x):
            y = x + 1
            found[name] = hidden_jax.refers_to_operands(y)
            return y

        return look

    jax.jit(f("jit"))(1.0)
    jax.vmap(f("vmap"))(jnp.ones(2))
    jax.grad(f("grad"))(1.0)
    assert found == {"jit": True, "vmap": False, "grad": False}


def test_what_vmap_maps_inside_of_grad():
    """The weight w is the gradient's; x is mapped inside of it, or outside, or not at all."""
    found = []

    def loss(w, x):
        found.append(hidden_jax.is_mapped_inside(x, w))
        return jnp.sum(w * x)

    xs = jnp.ones((2, 3))
    jax.grad(lambda w: jnp.sum(jax.vmap(lambda x: loss(w, x))(xs)))(1.0)
    jax.vmap(lambda x: jax.grad(loss)(1.0, x))(xs)
    jax.grad(loss)(1.0, xs)
    assert found == [True, False, False]
    assert not hidden_jax.is_mapped_inside(xs, xs)


def test_values_of_tracers_go_with_them():
    values = hidden_jax.OfTracers()

    def f(x):
        y = x + 1
        assert values.find(x) is values.find(y) is None
        values.keep(x, "x")
        values.keep(y, "y")
        values.keep(x, "again")
        assert (values.find(x), values.find(y)) == ("again", "y") and values.ids() == {id(x), id(y)}
        return x * y

    jax.jit(f)(2.0)
    gc.collect()
    assert not values.ids()


# Programs and the compilation cache ---------------------------------------------------------------


def doubled(x):
    return jnp.full(x.shape, 2.0) * x


def test_a_function_for_shards_is_lowered_without_the_mesh():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    x = jax.ShapeDtypeStruct((4,), jnp.float32)
    with jax.set_mesh(mesh):
        told = jax.export.export(jax.jit(doubled))(x).mlir_module()
        with hidden_jax.lowering_for_shards():
            untold = jax.export.export(jax.jit(doubled))(x).mlir_module()
    assert ("sdy." in told, "sdy." in untold) == (True, False)


def half(x):
    return x / 2


def partitioned():
    """A lowered program on two devices that asks how to partition a function of this file."""
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    halved = custom_partitioning.custom_partitioning(half)
    halved.def_partition(
        partition=partition, infer_sharding_from_operands=None, sharding_rule="i -> i"
    )
    x = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    return jax.jit(halved).lower(x)


def partition(mesh, operands, results):
    raise AssertionError("nothing is compiled")


def test_keys_of_programs_that_ask_how_to_partition(monkeypatch):
    """Two equal ones have different addresses, without which they have one key."""
    monkeypatch.setattr(compilation_cache, "is_cache_used", lambda backend: True)
    kept = [partitioned() for _ in range(2)]
    for lowered in kept:
        assert hidden_jax.partitioned_functions(lowered.compiler_ir()) == [partition]
    plain = jax.jit(half).lower(jnp.ones(4)).compiler_ir()
    assert hidden_jax.partitioned_functions(plain) == []

    def key(lowered, wanted):
        with hidden_jax.without_addresses(wanted):
            return hidden_jax.jax_cache_key(
                compiler.get_compile_options(num_replicas=1, num_partitions=2),
                backend=types.SimpleNamespace(platform="gpu", platform_version=""),
                devices=np.array(jax.devices()[:2]),
                computation=lowered.compiler_ir(),
            )

    assert key(kept[0], True) == key(kept[1], True) != key(kept[1], False)


@pytest.fixture
def stored(tmp_path):
    """A folder in which JAX stores every program."""
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: jax.config.values[name] for name in names}
    for name, value in zip(names, (str(tmp_path), 0.0, -1), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_a_program_is_not_stored(stored):
    x = jax.ShapeDtypeStruct((4,), jnp.float32)
    with hidden_jax.storing_no_program():
        jax.jit(doubled).lower(x).compile()
    assert list(stored.glob("*-cache")) == []
    jax.jit(half).lower(x).compile()
    assert len(list(stored.glob("*-cache"))) == 1


def test_kernels_are_changed_once(monkeypatch):
    seen = []
    monkeypatch.setattr(mosaic, "_run_serde_pass", lambda module, **options: f"{module} {options}")
    change = seen.append
    hidden_jax.change_kernels(change)
    first = mosaic._run_serde_pass
    hidden_jax.change_kernels(change)
    assert mosaic._run_serde_pass is first
    assert first("module", serialize=True) == "module {'serialize': True}"
    assert seen == ["module {'serialize': True}"]


# Processes ----------------------------------------------------------------------------------------
#
# tests/device/processes_test.py runs a coordinator with two clients.


def test_a_process_by_itself_has_no_client():
    known = hidden_jax.processes()
    assert (known.process_id, known.num_processes, known.client) == (0, 1, None)


def test_a_cluster_is_detected(monkeypatch):
    assert hidden_jax.detect_cluster(None) == (None, None, None)
    variables = dict(JOB_ID="1", STEP_NODELIST="a", NTASKS="2", PROCID="1", LOCALID="1")
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert hidden_jax.detect_cluster(None) == ("a:61441", 2, 1)
