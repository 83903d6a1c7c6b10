"""Programs that a test process compiles: each once, and without XLA's optimization of machine code.

Tests build the same training step again and again: each `build` makes new jitted functions, and
JAX's cache on disk holds no program of several CPU devices (fp8jax/device/xla.py). Here a program
is compiled once in a process: its key is its StableHLO without locations, its devices and its
options. Marks of a test (pyproject.toml) change that:

    optimized               compiled as users compile it: stored bits
    optimized_too           so where the environment variable FP8JAX_TEST_OPTIMIZED is set, as
                            `.ci/run --all` does: tests that compare bits of different programs,
                            text of HLO, or bytes of memory
    counts_compilations     compiled whenever JAX asks for it

What others compile in 689 s of processor time, XLA's own pipeline takes 1,073 s for
(docs/results/test_suite.md). Without its optimization the same sums are rounded in the order that
the HLO says, by the same instructions in every program.

JAX makes an MLIR context for each program that it lowers. Here those of the main thread share one.

A program that calls back into Python, or that Python partitions, is always compiled: its text has
the address of a Python object, and Python reuses addresses.
"""

import gc
import hashlib
import io
import os
import threading
import time
from pathlib import Path
from typing import Any

import jax
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir, passmanager

_ADDRESSES = (b"CustomSPMDPartitioning", b"callback")

_jax_compile = compiler.compile_or_get_cached
_jax_context = mlir.make_ir_context
_shared: list[tuple[ir.Context, int]] = []  # the main thread's, and how many may still have it
_compiling: list[bool] = []
_PROGRAMS_OF_A_CONTEXT = 100  # a context keeps the constants of its programs
_programs: dict[bytes, Any] = {}
_seconds = [0.0]
_MOST_MAPS = 25_000
# No pass for speed, and fusions by LLVM alone instead of by a pipeline of MLIR each. Later versions
# of jaxlib have no choice of the emitters.
_CHEAP = [("xla_llvm_disable_expensive_passes", True)]
if jax.__version_info__ < (0, 11):
    _CHEAP.append(("xla_cpu_use_fusion_emitters", False))
_AS_USERS = {"optimized"} | ({"optimized_too"} if "FP8JAX_TEST_OPTIMIZED" in os.environ else set())
_marks: frozenset[str] = frozenset()  # of the test that runs


def begin_test(marks: frozenset[str]) -> None:
    """Has programs compile as a test with these marks wants them, from here on."""
    global _marks
    if bool(_marks & _AS_USERS) != bool(marks & _AS_USERS):
        jax.clear_caches()  # functions that tests of the other kind have compiled
    _marks = marks


def end_file() -> None:
    """Forgets all programs if this process is near the number of memory maps that Linux allows.

    A training step has some 150, a small program 8; Linux allows 65,530, and beyond that LLVM
    crashes. Files share programs with each other less than tests of one file do.
    """
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _MOST_MAPS:
        _programs.clear()
        jax.clear_caches()
        gc.collect()


def seconds() -> float:
    """Processor seconds that this process has compiled so far."""
    return _seconds[0]


def _compile(*arguments: Any) -> Any:
    begin = time.process_time()
    # XLA may call Python back to partition a program. What that lowers crashes in its context.
    _compiling.append(True)
    try:
        return _jax_compile(*arguments)
    finally:
        _compiling.pop()
        _seconds[0] += time.process_time() - begin


def _bytes_without_locations(computation: ir.Module) -> bytes:
    with computation.context:
        # In no other module: this one may be compiled while another is lowered.
        module = computation.operation.clone(ip=False)
        passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(module)
        text = io.BytesIO()
        module.write_bytecode(file=text)
    return text.getvalue()


def _compile_once(
    backend: Any, computation: ir.Module, devices: Any, compile_options: Any, *rest: Any
) -> Any:
    """JAX's `compile_or_get_cached` with a memory."""
    if backend.platform != "cpu":
        return _compile(backend, computation, devices, compile_options, *rest)
    if not _marks & _AS_USERS:
        debug_options = compile_options.executable_build_options.debug_options
        debug_options.xla_backend_optimization_level = 0
        compile_options.env_option_overrides += _CHEAP
    if "counts_compilations" in _marks:
        return _compile(backend, computation, devices, compile_options, *rest)
    text = _bytes_without_locations(computation)
    if any(address in text for address in _ADDRESSES):
        return _compile(backend, computation, devices, compile_options, *rest)
    key = hashlib.sha256(text)
    key.update(compile_options.SerializeAsString())
    key.update(repr([device.id for device in devices.flatten()]).encode())
    if key.digest() not in _programs:
        _programs[key.digest()] = _compile(backend, computation, devices, compile_options, *rest)
    return _programs[key.digest()]


def _shared_context() -> ir.Context:
    """JAX's `make_ir_context`, of which every call loads all dialects: 2.3 ms for each program."""
    if _compiling or threading.current_thread() is not threading.main_thread():
        return _jax_context()
    # While another is lowered, into which JAX 0.10 would copy this one.
    if ir.Context.current is not None:
        return _jax_context()
    if not _shared or _shared[-1][1] == 0:
        _shared[:] = [(_jax_context(), _PROGRAMS_OF_A_CONTEXT)]
    ((context, left),) = _shared
    _shared[:] = [(context, left - 1)]
    return context


def install() -> None:
    compiler.compile_or_get_cached = _compile_once  # type: ignore[assignment]
    mlir.make_ir_context = _shared_context
