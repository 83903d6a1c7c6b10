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
from jax.typing import ArrayLike

from fp8jax.numerics.formats import FORMATS, Format, cast

GRADIENTS: dict[str, Format | None] = {"float32": None, "e5m2": FORMATS["e5m2"]}


def refuse_saturation(clip_norm: float, fmt: Format | None) -> None:
    """Raises ValueError if a gradient that is clipped to `clip_norm` may saturate in the format."""
    if fmt is not None and clip_norm > fmt.max:
        raise ValueError(
            f"clip_norm={clip_norm} lets gradients pass that gradients={fmt.name!r} would saturate "
            f"at {fmt.max}: reduce clip_norm"
        )


def clip_and_round(fmt: Format | None) -> optax.GradientTransformationExtraArgs:
    """Returns the clipping of gradients by their global norm, followed by rounding to a format.

    Its update takes the largest norm as `clip_norm`. The state is that of
    `optax.clip_by_global_norm`, so that a checkpoint loads with either format.

    Args:
      fmt: an entry of `GRADIENTS`; None rounds nothing.
    """

    def update(
        updates: Any, state: Any, params: Any = None, *, clip_norm: ArrayLike, **_: Any
    ) -> tuple[Any, Any]:
        clipped, state = optax.clip_by_global_norm(clip_norm).update(updates, state, params)
        if fmt is None:
            return clipped, state
        # The barrier keeps XLA from dropping a conversion to a narrower type and back.
        codes = lax.optimization_barrier(jax.tree.map(lambda g: cast(g, fmt), clipped))
        return jax.tree.map(lambda code: code.astype(jnp.float32), codes), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
