"""TODO docstring."""

import hashlib
import os
import platform as host
import warnings

import jax
from jax.experimental.compilation_cache import compilation_cache

from fp8jax.device.hardware import platform

_NO_TRITON_GEMM = "--xla_gpu_enable_triton_gemm=false"


# JAX's own threshold of one second leaves out the many small programs of a run, which add up.
_CACHE_MIN_COMPILE_SECONDS = 0.5


def set_xla_flags() -> None:
    """Adds to `XLA_FLAGS` what FP8 needs; a value that the user gave for the flag stays.

    The one flag turns Triton GEMMs off on GPUs: with XLA's default, a training step with delayed
    scaling was not compiled after two minutes on an H200, without them in three seconds. XLA reads
    the variable once, when JAX's backends start. Where that has happened on a GPU, or where
    `XLA_FLAGS` names a file of flags, which is not edited, the flag cannot be set any more and a
    RuntimeWarning says what to do.
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
            f"XLA_FLAGS names a file, {flags.strip()}: add {_NO_TRITON_GEMM} to it, or FP8 "
            "programs may compile for minutes on a GPU.",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    if _backends_are_initialized() and jax.default_backend() == "gpu":
        warnings.warn(
            f"JAX had started before fp8jax was imported, so {_NO_TRITON_GEMM} has no effect and "
            "FP8 programs may compile for minutes. Import fp8jax before the first use of a device, "
            f"or start Python with XLA_FLAGS={_NO_TRITON_GEMM}.",
            RuntimeWarning,
            stacklevel=2,
        )
    # Set it in any case: processes that this one starts inherit it.
    os.environ["XLA_FLAGS"] = f"{flags} {_NO_TRITON_GEMM}".strip()


def allocate_nothing() -> None:
    """Has JAX compile without taking memory of a GPU, for a dry run; what the user set stays.

    JAX would take most of the GPU as its backends start, and the autotuner scratch space for each
    GEMM that it times (3.2 GiB for lm_125m). Without it the programs are slower, and their memory
    is the same to the byte (docs/log.md). Call it before JAX starts.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    flags = os.environ["XLA_FLAGS"] if "XLA_FLAGS" in os.environ else ""
    if "xla_gpu_autotune_level" not in flags and (not flags or flags.lstrip().startswith("-")):
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_autotune_level=0".strip()


def _backends_are_initialized() -> bool:
    """Whether XLA has read its flags; False where this JAX does not say."""
    try:
        # JAX 0.10 to 0.12 has no public question that does not itself start the backends.
        from jax._src.xla_bridge import backends_are_initialized
    except ImportError:
        return False
    return backends_are_initialized()


def folds_scales() -> bool:
    """Whether XLA multiplies a GEMM's result by a scalar in float32 where bfloat16 is written.

    So on GPUs, unless `xla_allow_excess_precision=false` was set: then the scalar is rounded.
    """
    flags = os.environ["XLA_FLAGS"] if "XLA_FLAGS" in os.environ else ""
    return platform() == "gpu" and "xla_allow_excess_precision=false" not in flags.lower()


def compiler_options() -> dict[str, bool]:
    """What the library's own programs are compiled with, as `jax.jit(compiler_options=…)`.

    On CPUs every bfloat16 rounding that the program asks for takes place. By default XLA skips
    those between operations that it fuses, and it fuses otherwise for another number of devices:
    the first loss of a per-tensor recipe then moved by 2e-5, through one bit of one amax. On GPUs
    the default stays: it is what lets a GEMM's epilogue take the scale in float32 (linear/dot.py).
    """
    return {"xla_allow_excess_precision": False} if platform() == "cpu" else {}


def set_compilation_cache(directory: str | None = None) -> str | None:
    """Keeps compiled programs on disk, so that a restarted run does not compile again.

    Call it after `jax.distributed.initialize`; it starts JAX's backends.

    Args:
      directory: where to. None takes what the user set in JAX (`JAX_COMPILATION_CACHE_DIR` or
        `jax_compilation_cache_dir`), else `fp8jax/xla` under `$XDG_CACHE_HOME` or `~/.cache`.

    Returns:
      The directory in use, or None where the user turned JAX's cache off
      (`JAX_ENABLE_COMPILATION_CACHE=false`).
    """
    if not jax.config.values["jax_enable_compilation_cache"]:
        return None
    users = jax.config.values["jax_compilation_cache_dir"]
    if directory is None and users:
        return users
    if directory is None:
        base = os.environ["XDG_CACHE_HOME"] if "XDG_CACHE_HOME" in os.environ else ""
        directory = os.path.join(base or os.path.expanduser("~/.cache"), "fp8jax", "xla")
    directory = os.path.abspath(directory)
    if platform() == "cpu":
        # JAX's key for a CPU program holds neither the core count nor, for certain, the instruction
        # set: from a home directory shared by unlike machines it would load a program whose numbers
        # differ from its own, or which ends in SIGILL.
        directory = os.path.join(directory, host_fingerprint())
    os.makedirs(directory, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _CACHE_MIN_COMPILE_SECONDS)
    # JAX looks at the directory once, at its first compilation: have it look again.
    compilation_cache.reset_cache()
    return directory


def host_fingerprint() -> str:
    """Names what a CPU program depends on: architecture, usable cores, instruction set."""
    features = host.processor()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            features = "".join(
                line for line in dict.fromkeys(file) if line.startswith(("flags", "Features"))
            )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    digest = hashlib.sha256(features.encode()).hexdigest()[:12]
    return f"cpu-{host.machine()}-{cores}-{digest}"
