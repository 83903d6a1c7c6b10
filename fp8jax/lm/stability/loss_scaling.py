"""Loss scaling: the backward pass computes gradients of S times the loss (arXiv 1710.03740).

The gradients of activations are S times as large then, so that a format with a bounded exponent
loses fewer small ones. Weight gradients are divided by S in float32, before anything reads them. S
is a power of two: where nothing underflows or saturates, every bit stays the same.

BF16 and casts with a scale of their own follow any S. It matters for a constant scale
(`fp8_cscale`) and for biases that are clipped (`fp8_amax:margin=3`), as in Graphcore's FP16.

A dynamic S begins at 2^16. If gradients are not finite although the loss is, the step is left out
and S is halved: an overflow, which is no bad step (bad_steps.py), and climbs no ladder. After
`window` accepted steps without one, S is doubled, up to 2^24. At S = 1 there is nothing left to
halve: gradients that are not finite are a bad step then, and always with a static S.

Steps that are rejected for another reason, such as a spike, leave S and the count as they are.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fp8jax.lm.stability.bad_steps import is_finite

_FIRST, _LARGEST = 2.0**16, 2.0**24


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScaling:
    """A static or dynamic loss scale.

    Attributes:
      static: the scale; None for a dynamic one.
      window: accepted steps after which a dynamic scale is doubled.
    """

    static: float | None
    window: int

    @classmethod
    def parse(cls, text: str, window: int) -> "LossScaling | None":
        """Reads "none", a power of two in digits, or "dynamic". None for no scaling, or by 1.

        Raises:
          ValueError: anything else, or a window below 1.
        """
        if window < 1:
            raise ValueError(f"optimizer.loss_scale_window={window} must be at least 1")
        if text == "dynamic":
            return cls(static=None, window=window)
        scale = 1 if text == "none" else int(text) if text.isdecimal() else 0
        if scale.bit_count() != 1 or scale > _LARGEST:
            raise ValueError(
                f"optimizer.loss_scale={text!r} is neither none, dynamic, nor a power of two up to"
                f" {_LARGEST:.0f}"
            )
        return None if scale == 1 else cls(static=float(scale), window=window)

    def init(self) -> dict[str, Array]:
        """Returns the state before the first step; {} of a static scale."""
        if self.static is not None:
            return {}
        return {"scale": jnp.full((), _FIRST, jnp.float32), "good": jnp.zeros((), jnp.int32)}

    def scale(self, seen: dict[str, Array]) -> Any:
        """Returns S of the next step, of the state that `init` or the last `update` returned."""
        return seen["scale"] if self.static is None else self.static

    def overflows(
        self, seen: dict[str, Array], loss: Float[Array, ""], grad_norm: Float[Array, ""]
    ) -> Bool[Array, ""]:
        """Whether a step is left out because a dynamic S was too large.

        Args:
          seen: the state before the step.
          loss: the loss of the step, not scaled.
          grad_norm: the norm over all gradients, after the division.
        """
        return jnp.isfinite(loss) & ~is_finite(loss, grad_norm) & (seen["scale"] > 1)

    def update(
        self, seen: dict[str, Array], overflow: Bool[Array, ""], accepted: Bool[Array, ""]
    ) -> dict[str, Array]:
        """Returns the state after a step that overflowed, was accepted, or neither."""
        scale, good = seen["scale"], seen["good"] + accepted
        full = good >= self.window
        doubled = jnp.where(full, jnp.minimum(2 * scale, _LARGEST), scale)
        return {
            "scale": jnp.where(overflow, scale / 2, doubled),
            "good": jnp.where(overflow | full, 0, good),
        }
