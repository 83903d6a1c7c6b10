"""Where the Hopper kernels run: which device, which JAX. Imports no Pallas, so asking is cheap."""

import jax

from fp8jax.device.hardware import Device, device

HOPPER = (9, 0)  # compute capability
OLDEST_JAX = (0, 11)  # the first whose Pallas has what the kernels use


def refuses(here: Device) -> str | None:
    """Why the kernels cannot run on such a device, or None."""
    if here.capability != HOPPER:
        return f"the kernels are for Hopper (compute capability 9.0), got {here.kind}"
    return None


def jax_too_old() -> str | None:
    """Why this JAX cannot compile the kernels, or None."""
    if jax.__version_info__ < OLDEST_JAX:
        return f"the kernels need the Pallas of jax 0.11 or later, got jax {jax.__version__}"
    return None


def require() -> None:
    """Raises NotImplementedError where the kernels cannot run."""
    reason = jax_too_old() or refuses(device())
    if reason is not None:
        raise NotImplementedError(reason)
