"""An NVIDIA H200 to compile for, without one, through JAX's CUDA plugin.

The plugin needs neither a GPU nor a driver for that. What it compiles cannot run here, and nothing
is autotuned; but ptxas assembles the kernels, and says how many registers did not suffice.
"""

import contextlib
import functools
import importlib.util
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import pytest
from jax._src import compilation_cache
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from fp8jax.kernels import requirements

_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


def _missing() -> str | None:
    """Returns why nothing can be compiled for an H200 here, or None if it can."""
    if importlib.util.find_spec("jax_plugins") is None or not any(
        map(importlib.util.find_spec, _PLUGINS)
    ):
        return "needs JAX's CUDA plugin, as in: pip install 'jax[cuda13]'"
    return requirements.jax_too_old()


needs_plugin = pytest.mark.skipif(_missing() is not None, reason=str(_missing()))

# XLA's description of a GPU, as a text proto: the limits of compute capability 9.0 and NVIDIA's
# figures for an H200 SXM. XLA's fusions depend on it, kernels on capability and cores only.
CORES = 132
_TARGET = f"""
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
gpu_device_info {{
  name: "NVIDIA H200"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }}
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0"
  core_count: {CORES}
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_address_bits: 64
  device_memory_size: 150120000000
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_interconnect_info {{ active_links: 18 }}
}}
"""


@functools.cache
def devices(count: int = 1) -> tuple[Any, ...]:
    """Returns so many H200s of one host, to compile for."""
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="h200", topology=f"1x1x{count}", target_config=_TARGET
    )
    return tuple(topology.devices)


@contextlib.contextmanager
def default(count: int = 1) -> Iterator[tuple[Any, ...]]:
    """The library takes H200s for the devices of this process; yields them."""
    given = list(devices(count))
    with (
        mock.patch.object(jax, "devices", lambda *_: given),
        mock.patch.object(jax, "local_devices", lambda *_: given),
        mock.patch.object(jax, "default_backend", lambda: "gpu"),
        # What was compiled without a client cannot be read back without one.
        mock.patch.object(compilation_cache, "is_cache_used", lambda *_: False),
    ):
        yield tuple(given)


def compiled(f: Any, *shapes: Any, options: dict[str, Any] | None = None) -> Any:
    """Returns f compiled for one H200, its kernels with the tunings that ship.

    Args:
      f: a function of arrays.
      *shapes: trees of shapes and dtypes, one for each argument.
      options: compiler options.
    """
    sharding = SingleDeviceSharding(devices()[0])
    given = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes
    )
    with default():
        return jax.jit(f, compiler_options=options).trace(*given).lower().compile()


def spilled(report: str) -> list[int]:
    """Returns the bytes of registers that each kernel stores to local memory, of each thread.

    Args:
      report: what ptxas prints, verbosely, where MOSAIC_GPU_DUMP_PTXAS is 1 in the environment.
    """
    return [int(size) for size in re.findall(r"stack frame, (\d+) bytes spill stores", report)]
