"""Lowered kernels: one for equal calls, kept in files, and the same values as the kernel's own."""

import functools
import gc
import shutil
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.kernels import lowered, mesh_call, partition
from fp8jax.kernels.lowered import as_kernel, shapes_of
from fp8jax.kernels.swiglu import SWIGLU
from fp8jax.lm.flash.partition import flash_forward
from fp8jax.numerics.formats import FORMATS
from fp8jax.numerics.scales import Pow2
from tests.support.interpreter import needs_pallas


def cast(x, scale, *, both=True, margin=1):
    """Stands for a kernel: some results may be missing, and keys need not be texts."""
    scaled = x * scale
    return {1: scaled, 2: scaled.T if both else None, 3: (jnp.max(x) * margin,)}


X, SCALE = np.arange(12, dtype=np.float32).reshape(3, 4), np.float32(0.5)
SHAPES = shapes_of((X, SCALE))


@pytest.fixture(autouse=True)
def no_folder():
    """Nothing that was lowered in earlier processes."""
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def exported(monkeypatch):
    """The functions that JAX has lowered."""
    found, export = [], jax.export.export
    monkeypatch.setattr(
        jax.export, "export", lambda f, **named: found.append(f) or export(f, **named)
    )
    return found


@pytest.fixture
def folder(no_folder, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    return tmp_path


@pytest.fixture
def new_process(monkeypatch):
    """Call it to forget what this process has lowered."""

    def forget():
        monkeypatch.setattr(lowered, "_exported", type(lowered._exported)())
        monkeypatch.setattr(lowered, "_compiling", ThreadPoolExecutor(1, "kernel"))
        lowered._describe_partial.cache_clear()

    forget()
    return forget


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("both", [True, False])
def test_a_lowered_function_returns_what_it_does(new_process, both):
    f = functools.partial(cast, both=both)
    assert_same(jax.jit(as_kernel(f, SHAPES).call)(X, SCALE), f(X, SCALE))


def test_another_process_reads_what_one_has_lowered(new_process, folder, exported):
    def call():
        return jax.jit(as_kernel(functools.partial(cast), SHAPES).call)(X, SCALE)

    first = call()
    (file,) = folder.glob("fp8jax_kernel_*")
    new_process()
    assert_same(call(), first)
    assert len(exported) == 1
    file.write_bytes(file.read_bytes()[:-1])
    new_process()
    assert_same(call(), first)
    assert len(exported) == 2  # what is damaged is lowered again
    new_process()
    call()
    assert len(exported) == 2


def test_sources_versions_and_devices_change_the_file(new_process, folder, monkeypatch, tmp_path):
    def files() -> int:
        new_process()
        lowered.hash_sources.cache_clear()
        assert as_kernel(functools.partial(cast), SHAPES, (tmp_path / "more",)).exported
        return len(list(folder.glob("fp8jax_kernel_*")))

    package = Path(lowered.__file__).parents[1]
    for name in ("kernels", "numerics"):
        shutil.copytree(package / name, tmp_path / name)
    shutil.copy(package / "hidden_jax.py", tmp_path)
    (tmp_path / "more").mkdir()
    assert files() == files() == 1
    monkeypatch.setattr(lowered, "__file__", str(tmp_path / "kernels" / "lowered.py"))
    assert files() == 1  # the same sources elsewhere
    for name in ("kernels/quantize.py", "numerics/scales.py", "hidden_jax.py", "more/flash.py"):
        with open(tmp_path / name, "a") as file:
            file.write("# another line\n")
    changes = [
        lambda: None,
        lambda: monkeypatch.setattr(jax, "__version__", "0.0.1"),
        lambda: monkeypatch.setattr(lowered.jaxlib, "__version__", "0.0.1"),
        lambda: monkeypatch.setattr(lowered.hardware, "device_kind", lambda: "NVIDIA H300"),
    ]
    for number, change in enumerate(changes, start=2):
        change()
        assert files() == number
    lowered.hash_sources.cache_clear()


def test_equal_calls_are_lowered_once_and_others_are_not(new_process, exported):
    calls = [
        (functools.partial(cast, margin=1), SHAPES),
        (functools.partial(cast, margin=2), SHAPES),
        (functools.partial(cast, margin=1), shapes_of((X[:2], SCALE))),
        (functools.partial(cast, margin=1), shapes_of((X.astype(np.int8), SCALE))),
        # Equal to 1, but another program.
        (functools.partial(cast, margin=1.0), shapes_of((X.astype(np.int8), SCALE))),
    ]
    kept = [as_kernel(*call) for call in calls]
    assert not exported
    first = [kernel.exported for kernel in kept]
    assert len(exported) == len(set(kept)) == 5
    for one, call in zip(first, calls, strict=True):
        assert one is as_kernel(*call).exported
    assert len(exported) == 5
    # A closure has no name to be known by. Its jaxpr is the same.
    assert as_kernel(lambda x, scale: cast(x, scale), SHAPES).exported is first[0]


def test_a_kernel_is_lowered_for_programs_and_kept_as_long_as_one_has_it(new_process, exported):
    kernel = as_kernel(functools.partial(cast), SHAPES)
    traced = jax.jit(kernel.call).trace(X, SCALE)
    jax.eval_shape(kernel.call, X, SCALE)
    del kernel
    assert not exported  # a trace alone lowers nothing
    program = traced.lower()
    gc.collect()
    assert len(exported) == len(lowered._exported) == 1
    del traced, program
    exported.clear()
    lowered._compiling.shutdown()  # waits for the thread that compiles the kernel
    jax.clear_caches()
    gc.collect()
    assert len(lowered._exported) == 0


def test_a_thread_compiles_what_was_lowered_and_nothing_that_was_read(new_process, folder):
    compiled = []

    def listen(event, *_, **__):
        if event.endswith("backend_compile_duration"):
            compiled.append(threading.current_thread().name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    for threads in ({"kernel_0"}, set()):
        new_process()
        compiled.clear()
        assert as_kernel(functools.partial(cast), SHAPES).exported
        lowered._compiling.shutdown()
        assert set(compiled) == threads
    jax.monitoring.unregister_event_duration_listener(listen)


def test_what_a_kernel_cannot_be_compiled_for_is_the_programs_to_say(new_process, monkeypatch):
    """As where a program is compiled for a device that this process does not have."""
    monkeypatch.setattr(lowered.hardware, "platform", lambda: "gpu")
    text = as_kernel(functools.partial(cast), SHAPES).exported.mlir_module()
    lowered._compiling.shutdown()
    assert "stablehlo" in text


def test_what_has_effects_is_not_lowered_for_others():
    """Such as the interpreter of kernels, whose callbacks no other program can have."""

    def f(x):
        jax.debug.callback(lambda x: None, x)
        return x + 1

    x = jnp.ones(2)
    assert as_kernel(f, shapes_of((x,))) is None
    known = {}
    np.testing.assert_array_equal(mesh_call._on_shards(known, (), f, x), [2, 2])
    assert list(known.values()) == [None]


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Programs take this for a GPU. They run here, so their kernels are lowered for here."""
    platform, lower = lowered.hardware.platform, lowered._lower

    def here(kernel):
        with monkeypatch.context() as patch:
            patch.setattr(lowered.hardware, "platform", platform)
            return lower(kernel)

    monkeypatch.setattr(lowered, "_lower", here)
    monkeypatch.setattr(lowered.hardware, "platform", lambda: "gpu")


def run(x, scale):
    return mesh_call._on_one_device((), cast, x, scale)


def test_on_a_cpu_nothing_is_lowered_for_others(new_process, exported):
    assert_same(jax.jit(run)(X, SCALE), cast(X, SCALE))
    assert not exported


def test_on_a_gpu_programs_call_the_lowered_form_and_arrays_the_kernel(
    new_process, exported, on_a_gpu
):
    want = cast(X, SCALE)
    assert_same(run(X, SCALE), want)
    assert not exported
    assert_same(jax.jit(run)(X, SCALE), want)
    assert_same(jax.jit(run)(X, 0.5), want)  # a scalar that is no array
    assert_same(jax.jit(lambda x: run(x, 0.5))(X), want)
    assert len(exported) == 1


def test_a_batch_calls_the_batched_kernel(new_process, exported, on_a_gpu):
    """As without a lowered form: Pallas makes one launch of it."""
    batch = np.stack([X, X + 1])
    mapped = jax.vmap(lambda x: run(x, SCALE))
    got = jax.jit(mapped)(batch)
    assert_same(got, jax.vmap(lambda x: cast(x, SCALE))(batch))
    assert "while" not in jax.jit(mapped).lower(batch).as_text()
    assert not exported


def test_a_trace_can_be_evaluated(new_process, on_a_gpu):
    """JAX evaluates the trace of a `jax.checkpoint` that no `jit` is around."""
    assert_same(jax.checkpoint(run)(X, SCALE), cast(X, SCALE))
    with jax.disable_jit():
        assert_same(jax.checkpoint(run)(X, SCALE), cast(X, SCALE))


def test_what_is_lowered_is_what_was_traced(new_process, folder, exported):
    """The file of a kernel has what its key says, wherever it is lowered."""

    def product(x, y):
        return jnp.dot(x, y)

    shapes = shapes_of((X, X.T))
    with jax.default_matmul_precision("highest"):
        high = as_kernel(functools.partial(product), shapes)
    low = as_kernel(functools.partial(product), shapes)
    assert high.key != low.key
    texts = [kernel.exported.mlir_module() for kernel in (high, low)]
    assert ["HIGHEST" in text for text in texts] == [True, False]
    new_process()
    with jax.default_matmul_precision("highest"):
        read = as_kernel(functools.partial(product), shapes).exported
    assert "HIGHEST" in read.mlir_module() and len(exported) == 2


def test_a_kernel_keeps_no_tracer_that_it_was_made_with(new_process, on_a_gpu):
    """Such as closures that look at whether there is a scale."""
    kept = []

    def f(x, scale):
        kept.append(weakref.ref(scale))
        return mesh_call._on_one_device((), lambda x: x if scale is None else 2 * x, x)

    traced = jax.jit(f).trace(X, SCALE)
    gc.collect()
    assert kept[0]() is None and traced


def attention(x):
    shape = 1, 128, 1, 1, 64
    q, begin = x[:, :64].reshape(shape), jnp.zeros((1, 128), jnp.int32)
    return flash_forward(q, q[..., 0, :], q[..., 0, :], begin, scale=0.125)


def casts(x):
    scale = jnp.float32(1)
    return partition.cast_produced(SWIGLU, (x, x), (scale,), (FORMATS["e4m3"],), ((-1, -2),))


def tiles(x):
    return partition.tiles_produced(SWIGLU, (x, x), FORMATS["e4m3"], Pow2(), ((-1,),))


@needs_pallas
@pytest.mark.parametrize("call", [attention, casts, tiles])
def test_a_kernel_of_another_program_is_not_traced_again(call, new_process, on_a_gpu, monkeypatch):
    monkeypatch.setattr(lowered.hardware, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(lowered.hardware, "cuda_version", lambda: 13_000)
    traced, make_jaxpr = [], jax.make_jaxpr
    monkeypatch.setattr(
        jax, "make_jaxpr", lambda f, **named: traced.append(f) or make_jaxpr(f, **named)
    )
    x = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16)
    jax.eval_shape(lambda x: call(x), x)
    assert len(traced) == 1
    jax.eval_shape(lambda x: call(x), x)
    assert len(traced) == 1
