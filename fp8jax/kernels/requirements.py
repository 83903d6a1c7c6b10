"""Which devices and versions of JAX can run the Hopper kernels. Imports no Pallas: it is cheap."""

import jax

from fp8jax.device import hardware
from fp8jax.device.hardware import Device

HOPPER = (9, 0)  # compute capability
OLDEST_JAX = (0, 11)  # the first version whose Pallas has what the kernels use


def refuses(here: Device) -> str | None:
    """Returns why the kernels cannot run on this device, or None if they can."""
    if here.capability != HOPPER:
        return f"the kernels are for Hopper (compute capability 9.0), got {here.kind}"
    return None


def jax_too_old() -> str | None:
    """Returns why this version of JAX cannot compile the kernels, or None if it can."""
    if jax.__version_info__ < OLDEST_JAX:
        return f"the kernels need the Pallas of jax 0.11 or later, got jax {jax.__version__}"
    return None


def refuses_here() -> str | None:
    """Returns why the kernels cannot run in this process, or None if they can."""
    return jax_too_old() or refuses(hardware.device())


def faulty_ptxas() -> str | None:
    """Returns why causal kernels cannot be compiled with this CUDA, or None if they can."""
    version = hardware.cuda_version()
    if version is not None and 12_080 <= version < 12_091:
        # JAX refuses its own causal kernels of this kind there.
        return f"it needs another CUDA than {version}: ptxas of 12.8 to 12.9.0 is faulty"
    return None


def require() -> None:
    """Raises NotImplementedError if the kernels cannot run here."""
    reason = refuses_here()
    if reason is not None:
        raise NotImplementedError(reason)
