"""Rejects steps whose loss or gradients are not finite, on the device.

The compiled step computes `is_finite` and applies `select_if`: a rejected step leaves the whole
training state unchanged. spikes.py also rejects steps whose loss is a spike. What happens to a
rejected step is decided on the host (ladder.py).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

ACCEPTED, SPIKE, NON_FINITE = range(3)  # the verdicts on a step


def is_finite(loss: Float[Array, ""], grad_norm: Float[Array, ""]) -> Bool[Array, ""]:
    """Whether a step's loss and gradients are finite.

    Args:
      loss: the loss of the step.
      grad_norm: the norm over all gradients, which is not finite if any gradient is not.
    """
    return jnp.isfinite(loss) & jnp.isfinite(grad_norm)


def select_if(accept: Bool[Array, ""], new: Any, old: Any) -> Any:
    """Returns the pytree `new` if `accept` is true, else `old`, bit for bit.

    Each leaf is selected, not multiplied by 0 or 1, because 0 * NaN is NaN.
    """
    return jax.tree.map(lambda n, o: jnp.where(accept, n, o), new, old)
