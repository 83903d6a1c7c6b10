"""What XLA must be told: its flags, compiler options and the compilation cache.

`import fp8jax` calls `set_xla_flags` and `launch_in_order`, since XLA and CUDA read their variables
when JAX's backends start. A program that trains or generates calls `set_compilation_cache` once. In
a multi-host run that call must come after `jax.distributed.initialize`, because it asks JAX for the
platform and so starts the backends.
"""

import hashlib
import os
import platform as host
import warnings
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from fp8jax import hidden_jax
from fp8jax.device.hardware import platform

_NO_TRITON_GEMM = "--xla_gpu_enable_triton_gemm=false"

# JAX's default is 1 s. It would skip the many small programs of a run, whose compile times add up.
_CACHE_MIN_COMPILE_SECONDS = 0.5


def set_xla_flags() -> None:
    """Turns Triton GEMMs off on GPUs through `XLA_FLAGS`, unless the user set that flag.

    With XLA's default (Triton GEMMs on), compiling a training step with delayed scaling on an H200
    took more than two minutes; without them it took three seconds.

    XLA reads `XLA_FLAGS` once, when JAX's backends start. Two cases give a RuntimeWarning that says
    what to do: the backends have already started on a GPU, so the flag has no effect in this
    process; or `XLA_FLAGS` names a file of flags, which this function does not edit.
    """
    name = _NO_TRITON_GEMM.split("=")[0]
    flags = os.environ["XLA_FLAGS"] if "XLA_FLAGS" in os.environ else ""
    in_file = bool(flags.strip()) and not flags.lstrip().startswith("-")
    if in_file and os.path.exists(flags.strip()):
        with open(flags.strip()) as file:
            named = file.read().split()
    else:
        named = flags.split()
    if any(flag.split("=")[0] == name for flag in named):
        return
    if in_file:
        warnings.warn(
            f"XLA_FLAGS names a file, {flags.strip()}. Add {_NO_TRITON_GEMM} to that file: without "
            "it, compiling FP8 programs for a GPU may take minutes.",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    if hidden_jax.backends_are_initialized() and jax.default_backend() == "gpu":
        warnings.warn(
            f"JAX used a device before fp8jax was imported, so {_NO_TRITON_GEMM} has no effect and "
            "compiling FP8 programs may take minutes. Import fp8jax before the first use of a "
            f"device, or start Python with XLA_FLAGS={_NO_TRITON_GEMM}.",
            RuntimeWarning,
            stacklevel=2,
        )
    # Set it even if it is too late for this process: child processes inherit it.
    os.environ["XLA_FLAGS"] = f"{flags} {_NO_TRITON_GEMM}".strip()


def launch_in_order() -> None:
    """Lets a GPU begin kernels in the order of their launch, unless the user said otherwise.

    Sets `CUDA_DEVICE_MAX_CONNECTIONS=1`, which CUDA reads when it starts. With CUDA's 8 queues a
    GEMM that is launched after a collective may begin before it and hold every SM, so that the
    collective waits for its end. With one queue, steps of Llama 3 8B on four H200s take 0.93 of the
    time, and steps on one GPU as long as before (docs/results/mesh_compile.md).
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def allocate_nothing() -> None:
    """Lets JAX compile without allocating GPU memory, for a dry run. Call it before JAX starts.

    By default JAX allocates most of the GPU's memory when its backends start, and XLA's autotuner
    allocates scratch space for each GEMM that it times (3.2 GiB for lm_125m). This function turns
    both off, unless the user set the variables. Programs compiled without autotuning run more
    slowly, but need the same memory to the byte (docs/results/steps_and_memory.md).
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    flags = os.environ["XLA_FLAGS"] if "XLA_FLAGS" in os.environ else ""
    if "xla_gpu_autotune_level" not in flags and (not flags or flags.lstrip().startswith("-")):
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_autotune_level=0".strip()


def folds_scales() -> bool:
    """Whether XLA folds a scalar multiplication after a GEMM into the GEMM, in float32.

    XLA does so on GPUs: the bfloat16 result is rounded once, after the multiplication. With
    `xla_allow_excess_precision=false` the scalar is rounded to bfloat16 instead.
    """
    flags = os.environ["XLA_FLAGS"] if "XLA_FLAGS" in os.environ else ""
    return platform() == "gpu" and "xla_allow_excess_precision=false" not in flags.lower()


def program_bytes(program: Any) -> int:
    """Bytes that XLA allocates on each device for one call of a compiled program, with arguments.

    `peak_memory_in_bytes` is not that: XLA allocates all temporaries as one block, which is larger
    than the temporaries alive at any one time; and on CPUs the figure leaves them out.
    """
    memory = program.memory_analysis()
    allocated = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return allocated + memory.temp_size_in_bytes - memory.alias_size_in_bytes


def compiler_options(
    *, weights_only: bool = False, layer_loop: bool = True
) -> dict[str, bool | int]:
    """Returns the options for `jax.jit(compiler_options=…)` of the library's own programs.

    On CPUs they make XLA execute every bfloat16 rounding of the program. By default XLA skips the
    roundings between operations that it fuses, and which operations it fuses depends on the number
    of devices: with it, the first loss of a per-tensor recipe changed by 2e-5, through one bit of
    one amax. On GPUs the default stays, since it lets a GEMM's epilogue apply the scale in float32
    (`folds_scales`).

    On GPUs they turn two of XLA's optimizations off (docs/results/xla_findings.md):

    - It merges small GEMMs with a common operand. Their scales differ, so they are not folded into
      the merged FP8 GEMM, but rounded to bfloat16.
    - In a loop over layers it fuses a GEMM with the write of its result to where the backward reads
      it, and runs the GEMM a second time for its other users. Without a loop the same optimization
      ("dynamic slice fusion") lets a GEMM write its result to where it is needed, and stays on.

    Args:
      weights_only: whether the program multiplies weights in a narrow format with activations in
        bfloat16 (gemm/backends/weights_only.py). On GPUs, XLA may then use Triton for GEMMs.
      layer_loop: whether the program may contain a loop over layers.
    """
    if platform() == "cpu":
        return {"xla_allow_excess_precision": False}
    if platform() == "gpu":
        options = {
            "xla_gpu_dot_merger_threshold_mb": 0,
            "xla_gpu_enable_dynamic_slice_fusion": not layer_loop,
        }
        return options | ({"xla_gpu_enable_triton_gemm": True} if weights_only else {})
    return {}


def set_compilation_cache(directory: str | None = None) -> str | None:
    """Stores compiled programs on disk, so that a restarted run does not compile them again.

    Starts JAX's backends: call it after `jax.distributed.initialize`. On CPUs, only programs of one
    device are stored and read; on GPUs also those of a mesh (`replace_cache_keys`).

    Args:
      directory: where to store them. None uses the directory that the user set in JAX
        (`JAX_COMPILATION_CACHE_DIR` or `jax_compilation_cache_dir`), or else `fp8jax/xla` under
        `$XDG_CACHE_HOME` or `~/.cache`. On CPUs a subdirectory per kind of host is added, except to
        a directory that the user set in JAX.

    Returns:
      The directory in use, or None if the user turned JAX's cache off
      (`JAX_ENABLE_COMPILATION_CACHE=false`), or, with a warning, if our directory cannot be made.
    """
    if not jax.config.values["jax_enable_compilation_cache"]:
        return None
    replace_cache_keys()
    users = jax.config.values["jax_compilation_cache_dir"]
    if directory is None and users:
        return users
    if directory is None:
        base = os.environ["XDG_CACHE_HOME"] if "XDG_CACHE_HOME" in os.environ else ""
        directory = os.path.join(base or os.path.expanduser("~/.cache"), "fp8jax", "xla")
    directory = os.path.abspath(directory)
    if platform() == "cpu":
        # JAX's cache key of a CPU program does not contain the number of cores, and does not
        # reliably contain the instruction set. Where different machines share a home directory,
        # one could load the other's program and get different numbers or a SIGILL.
        directory = os.path.join(directory, host_fingerprint())
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError as error:
        warnings.warn(
            f"compiled programs are not stored, so that each run compiles anew: {error}. Set"
            " JAX_COMPILATION_CACHE_DIR to a folder that can be written",
            stacklevel=2,
        )
        return None
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _CACHE_MIN_COMPILE_SECONDS)
    # JAX reads the setting once, at its first compilation. The reset makes it read it again.
    compilation_cache.reset_cache()
    return directory


def replace_cache_keys() -> None:
    """Changes the keys under which JAX's cache has programs of several devices.

    On CPUs they have none, so that JAX compiles them always, with or without a cache directory.
    XLA runs the thunks (operations) of a CPU program as soon as their operands are there. In a
    program that was just compiled, all collectives share one resource, which makes every device
    run them in the same order. XLA stores that resource once for each sequence of thunks. So in a
    program that was read from the cache, a collective inside of a loop, branch or call is not
    ordered with those outside, and devices wait for each other in different collectives until XLA
    aborts the process. JAX offers no public way to leave some programs out.

    On other devices, this library's partitioned kernels are in the key without the addresses of
    Python objects, which another process does not have. The key stays safe: the program has a hash
    of each kernel and of what decides its partitioning (kernels/mesh_call.py). JAX's option does
    the same for all partitioned functions. A program with a function of somebody else, which has no
    such hash, keeps its addresses.
    """
    hidden_jax.set_cache_key(_cache_key)


def _cache_key(
    options: Any, *, backend: Any, devices: np.ndarray, computation: Any, **named: Any
) -> str | None:
    """Returns JAX's key of a program, or None for a program that JAX is not to cache."""
    if backend.platform == "cpu" and devices.size > 1:
        return None
    asked = hidden_jax.partitioned_functions(computation)
    ours = all(function.__module__.startswith("fp8jax.") for function in asked)
    with hidden_jax.without_addresses(ours):
        return hidden_jax.jax_cache_key(
            options, backend=backend, devices=devices, computation=computation, **named
        )


def host_fingerprint() -> str:
    """Returns a name for what a CPU program depends on: architecture, cores, instruction set."""
    features = host.processor()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            features = "".join(
                line for line in dict.fromkeys(file) if line.startswith(("flags", "Features"))
            )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    digest = hashlib.sha256(features.encode()).hexdigest()[:12]
    return f"cpu-{host.machine()}-{cores}-{digest}"
