"""What the machine can do, and what XLA must be told before JAX starts.

`import fp8jax` calls `set_xla_flags`; a program that trains or generates calls
`set_compilation_cache` once, after `jax.distributed.initialize` where there is one, because asking
which platform this is starts JAX's backends.
"""

import dataclasses
import re

import jax

# Dense BF16 peak, FLOP/s a device, from the vendors' data sheets: without sparsity, at boost clock
# and full power (T4: FP16, it has no BF16). Words are matched whole and in this order, so that
# "A1000" is no A100 and the first, more special name wins. What is not listed has no peak.
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
    """The default backend: "cpu", "gpu" or "tpu". Starts JAX's backends."""
    return jax.default_backend()


@dataclasses.dataclass(frozen=True)
class Device:
    """What decides which products run natively.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      kind: the vendor's name, such as "NVIDIA H200" or "TPU v5 lite".
      capability: the compute capability of an NVIDIA GPU, such as (9, 0) for Hopper; else None.
    """

    platform: str
    kind: str
    capability: tuple[int, int] | None = None

    @property
    def fp8(self) -> bool:
        """Whether it multiplies float8 matrices in hardware, as far as this library uses it.

        True for NVIDIA GPUs of compute capability 8.9 (Ada), 9.0 (Hopper) and later. False for
        other GPUs, TPUs and CPUs: there XLA may accept float8 operands, but widens them before the
        product. (TPU v7 has FP8 units by its data sheet; that XLA uses them was not seen.)
        """
        return self.capability is not None and self.capability >= (8, 9)

    @property
    def block_scaled(self) -> bool:
        """Whether cuDNN multiplies MXFP8 and NVFP4 with their scales: data-center Blackwell."""
        return self.capability is not None and self.capability[0] == 10


# For tables: what a recipe would run on.
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
    """The vendor's name of the default device, e.g. "NVIDIA H200", "TPU v5 lite" or "cpu"."""
    return jax.local_devices()[0].device_kind


def compute_capability() -> tuple[int, int] | None:
    """That of the default device, e.g. (9, 0) for Hopper; None where it is no NVIDIA GPU."""
    if platform() != "gpu":
        return None
    # "9.0" on CUDA; ROCm says e.g. "gfx942".
    version = re.fullmatch(r"(\d+)\.(\d+)", str(jax.local_devices()[0].compute_capability))
    return None if version is None else (int(version[1]), int(version[2]))


def device() -> Device:
    """The default device of this process. Starts JAX's backends."""
    return Device(platform(), device_kind(), compute_capability())


def peak_flops(kind: str) -> float | None:
    """The dense BF16 peak of one device in FLOP/s, for model FLOPs utilization.

    Args:
      kind: a device kind, as `device_kind()` returns it.

    Returns:
      The vendor's figure, or None where the table has none (every CPU).
    """
    for name, flops in _PEAK_BF16_FLOPS.items():
        if re.search(rf"\b{name}\b", kind, re.IGNORECASE):
            return flops
    return None


def peak_memory() -> int | None:
    """The most bytes in use on the default device since the start; None where it does not say."""
    stats = jax.local_devices()[0].memory_stats()
    return None if stats is None else stats["peak_bytes_in_use"]
