"""Clipping, and the formats to which clipped gradients are rounded before the optimizer.

    float32  not rounded
    e5m2     E5M2 without a scale, to nearest: StoSignSGD's paper (arXiv 2604.15416)

The rounding comes after clipping, right before the momentum. So no gradient overflows: a clipped
one is at most `clip_norm`, and E5M2 ends at 57344. Elements below 2^-17 = 7.6e-6 become zero. NaN
stays NaN, and an infinite gradient has become NaN in the clipping, so neither is hidden.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from fp8jax.numerics.formats import FORMATS, Format, cast

GRADIENTS: dict[str, Format | None] = {"float32": None, "e5m2": FORMATS["e5m2"]}


def clip_and_round(max_norm: float, fmt: Format | None) -> optax.GradientTransformation:
    """Returns the clipping of gradients by their global norm, followed by rounding to a format.

    The state is that of `optax.clip_by_global_norm`, so that a checkpoint loads with either format.

    Args:
      max_norm: the largest global norm.
      fmt: an entry of `GRADIENTS`; None rounds nothing.

    Raises:
      ValueError: a clipped gradient may be beyond the format's largest number and would saturate.
    """
    clip = optax.clip_by_global_norm(max_norm)
    if fmt is None:
        return clip
    if max_norm > fmt.max:
        raise ValueError(
            f"clip_norm={max_norm} lets gradients pass that gradients={fmt.name!r} would saturate "
            f"at {fmt.max}: reduce clip_norm"
        )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        clipped, state = clip.update(updates, state, params)
        # The barrier keeps XLA from dropping a conversion to a narrower type and back.
        codes = lax.optimization_barrier(jax.tree.map(lambda g: cast(g, fmt), clipped))
        return jax.tree.map(lambda code: code.astype(jnp.float32), codes), state

    return optax.GradientTransformation(clip.init, update)
