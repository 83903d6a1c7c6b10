"""What keeps a bad step from doing harm: pure functions that run inside the compiled step."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def is_finite(loss: Float[Array, ""], grad_norm: Float[Array, ""]) -> Bool[Array, ""]:
    """Whether a step may be applied. The norm is over all gradients: one NaN among them shows."""
    return jnp.isfinite(loss) & jnp.isfinite(grad_norm)


def gate(accept: Bool[Array, ""], new: Any, old: Any) -> Any:
    """`new` if accepted, else `old`, leaf by leaf and bit for bit.

    Selected, never multiplied: 0 * NaN is NaN.
    """
    return jax.tree.map(lambda n, o: jnp.where(accept, n, o), new, old)
