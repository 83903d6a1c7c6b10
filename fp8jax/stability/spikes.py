"""TODO docstring."""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fp8jax.stability.bad_steps import ACCEPTED, NON_FINITE, SPIKE, is_finite, select_if

_NORMAL = 1.4826  # standard deviations of a normal distribution, from its MAD


_SLACK = 1 / 50  # of the median: no spike below


# Spikes -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpikeDetector:
    """Settings of `judge`.

    Attributes:
      window: accepted losses that a new one is compared with, at least 8.
      deviations: how many standard deviations above their median are a spike, positive.
    """

    window: int
    deviations: float

    def __post_init__(self):
        if self.window < 8:
            raise ValueError(f"spike_window={self.window} must be at least 8, or None")
        if not self.deviations > 0:  # NaN is not
            raise ValueError(f"spike_deviations={self.deviations} must be positive")

    def init(self) -> dict[str, Array]:
        """What `judge` remembers, before the first step."""
        return {"losses": jnp.full(self.window, jnp.nan), "accepted": jnp.zeros((), jnp.int32)}


def judge(
    detector: SpikeDetector,
    seen: Mapping[str, Array],
    loss: Float[Array, ""],
    grad_norm: Float[Array, ""],
) -> tuple[Int[Array, ""], dict[str, Array]]:
    """ACCEPTED, SPIKE or NON_FINITE, and what to remember: `seen` itself unless accepted."""
    losses, accepted = seen["losses"], seen["accepted"]
    median = jnp.nanmedian(losses)
    mad = jnp.nanmedian(jnp.abs(losses - median))
    limit = median + jnp.maximum(detector.deviations * _NORMAL * mad, _SLACK * jnp.abs(median))
    spike = (accepted >= detector.window // 2) & (loss > limit)
    verdict = jnp.where(is_finite(loss, grad_norm), jnp.where(spike, SPIKE, ACCEPTED), NON_FINITE)
    kept = {
        "losses": losses.at[accepted % detector.window].set(loss), "accepted": accepted + 1
    }  # fmt: skip
    return verdict, select_if(verdict == ACCEPTED, kept, dict(seen))
