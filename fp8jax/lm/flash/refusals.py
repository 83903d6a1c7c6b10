"""Which queries the kernels of flash attention take, and where. Imports no Pallas: it is cheap."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fp8jax.kernels import requirements

_LARGEST_HEAD = 128  # a larger one would need more registers than a warpgroup has


def refuses(q_BTNH: Array | jax.ShapeDtypeStruct) -> str | None:
    """Returns why the kernels cannot run these queries on this device, or None."""
    reason = requirements.refuses_here() or requirements.faulty_ptxas()
    if reason is not None:
        return reason
    if q_BTNH.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it needs bfloat16 or float16, got {q_BTNH.dtype}"
    if q_BTNH.shape[3] > _LARGEST_HEAD:
        return f"it needs a head_dim up to {_LARGEST_HEAD}, got {q_BTNH.shape[3]}"
    return None
