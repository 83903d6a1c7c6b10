"""What the hardware supports: native FP8 GEMMs, peak FLOP/s, memory.

All functions except `peak_flops` ask JAX for its devices, which starts JAX's backends. In a
multi-host run, call them after `jax.distributed.initialize`.
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.extend
import numpy as np

# Dense BF16 peak in FLOP/s per device, from the vendors' data sheets: without sparsity, at boost
# clock and full power. (The T4 has no BF16: its figure is for FP16.) `peak_flops` tries the names
# in this order and matches whole words only: "A1000" does not match "A100", and the more specific
# of two names comes first.
_PEAK_BF16_FLOPS = {
    "T4": 65e12,
    "L4": 121e12,
    "L40S": 362e12,
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "TPU v4 lite": 138e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
}


def platform() -> str:
    """Returns JAX's default backend: "cpu", "gpu" or "tpu"."""
    return jax.default_backend()


@dataclasses.dataclass(frozen=True)
class Device:
    """The properties of a device that decide which GEMMs it runs natively.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      kind: the vendor's name, such as "NVIDIA H200" or "TPU v5 lite".
      capability: the compute capability of an NVIDIA GPU, such as (9, 0) for Hopper; None for all
        other devices.
    """

    platform: str
    kind: str
    capability: tuple[int, int] | None = None

    @property
    def fp8(self) -> bool:
        """Whether this library can use the device's FP8 matrix unit.

        True for NVIDIA GPUs of compute capability 8.9 (Ada), 9.0 (Hopper) and later. False for
        other GPUs, TPUs and CPUs: XLA accepts float8 operands there, but may convert them to a
        wider type before the GEMM. (By its data sheet TPU v7 has FP8 units. We have not verified
        that XLA uses them.)
        """
        return self.capability is not None and self.capability >= (8, 9)

    @property
    def block_scaled(self) -> bool:
        """Whether cuDNN has block-scaled MXFP8 and NVFP4 GEMMs here (data-center Blackwell)."""
        return self.capability is not None and self.capability[0] == 10


# The devices that tables of recipes list, with or without such a device at hand.
DEVICES = (
    Device("gpu", "T4", (7, 5)),
    Device("gpu", "A100", (8, 0)),
    Device("gpu", "L4", (8, 9)),
    Device("gpu", "H100, H200", (9, 0)),
    Device("gpu", "B200", (10, 0)),
    Device("tpu", "TPU v4, v5e, v5p, v6e, v7"),
    Device("cpu", "CPU"),
)


def device_kind() -> str:
    """Returns the vendor's name of the default device: "NVIDIA H200", "TPU v5 lite", "cpu"."""
    return jax.local_devices()[0].device_kind


def compute_capability() -> tuple[int, int] | None:
    """Returns the compute capability of the default device, or None if it is no NVIDIA GPU."""
    if platform() != "gpu":
        return None
    # CUDA reports "9.0"; ROCm reports, for example, "gfx942".
    version = re.fullmatch(r"(\d+)\.(\d+)", str(jax.local_devices()[0].compute_capability))
    return None if version is None else (int(version[1]), int(version[2]))


def cuda_version() -> int | None:
    """Returns the version of CUDA that JAX uses, 13000 for 13.0; None without CUDA."""
    version = re.search(r"\bcuda (\d+)", jax.extend.backend.get_backend().platform_version)
    return None if version is None else int(version[1])


def device() -> Device:
    """Describes the default device of this process."""
    return Device(platform(), device_kind(), compute_capability())


def peak_flops(kind: str) -> float | None:
    """Returns the dense BF16 peak of one device in FLOP/s, for model FLOPs utilization (MFU).

    Args:
      kind: a device kind as `device_kind()` returns it.

    Returns:
      The vendor's figure, or None if the device is not in the table (CPUs are not).
    """
    for name, flops in _PEAK_BF16_FLOPS.items():
        if re.search(rf"\b{name}\b", kind, re.IGNORECASE):
            return flops
    return None


def memory_limit(devices: Iterable[jax.Device]) -> int | None:
    """Returns the bytes that JAX may use of each of these devices of this process: the least.

    None if one does not say (CPUs do not), or is not there but compiled for.
    """
    try:
        stats = [device.memory_stats() for device in devices]
    except jax.errors.JaxRuntimeError:  # of `jax.experimental.topologies`
        return None
    known = [stat["bytes_limit"] for stat in stats if stat is not None and "bytes_limit" in stat]
    return min(known) if known and len(known) == len(stats) else None


def wake(devices: Sequence[jax.Device]) -> None:
    """Makes an array on each of these devices of this process in a thread, without waiting.

    An H200's first array waits two seconds for the memory that JAX takes of it
    (docs/results/mesh_compile.md). Meanwhile programs can be traced and files read. If it fails,
    the next use of the device fails likewise.
    """

    def make(device: jax.Device) -> None:
        jax.device_put(np.zeros(()), device).block_until_ready()

    pool = ThreadPoolExecutor(len(devices), "device")
    for device in devices:
        pool.submit(make, device)
    pool.shutdown(wait=False)  # the threads end with their work


def peak_memory() -> int | None:
    """Returns the peak memory use of the default device since the process started, in bytes.

    None if the device does not report it (CPUs do not).
    """
    stats = jax.local_devices()[0].memory_stats()
    return None if stats is None else stats["peak_bytes_in_use"]
