"""Detects loss spikes on the device, by the median of the last accepted losses.

Let m be the median of the last accepted losses and d the median of their distances from m (the
median absolute deviation, MAD). A loss is a spike if it is greater than

    m + max(deviations * 1.4826 d, m / 50)

1.4826 d estimates the standard deviation of a normal distribution. m / 50 keeps losses that hardly
differ from counting as spikes.

Mean and standard deviation were rejected: one outlier among 64 losses raises both, and hides the
next outlier. A rejected loss, finite or not, never enters the window, so neither a NaN nor a spike
that lasts many steps moves the threshold. The price: if the loss rises for good (because the data
changed), every step is rejected until the budget of the ladder is spent, and the run stops and says
so. Early in a run the detector misses small spikes: a window over a fast decline has a large d. No
loss is judged before half a window has been accepted.
"""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fp8jax.lm.stability.bad_steps import ACCEPTED, NON_FINITE, SPIKE, is_finite, select_if

_NORMAL = 1.4826  # standard deviation of a normal distribution divided by its MAD
_SLACK = 1 / 50  # a loss less than this share above the median is never a spike


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpikeDetector:
    """Settings of `judge`.

    Attributes:
      window: the number of accepted losses that a new loss is compared with; at least 8.
      deviations: a loss this many estimated standard deviations above the median is a spike;
        positive.
    """

    window: int
    deviations: float

    def __post_init__(self):
        if self.window < 8:
            raise ValueError(
                f"recovery.spike_window={self.window} must be at least 8, or None to turn the"
                " detector off"
            )
        if not self.deviations > 0:  # also refuses NaN
            raise ValueError(f"recovery.spike_deviations={self.deviations} must be positive")

    def init(self) -> dict[str, Array]:
        """Returns the initial state of `judge`: an empty window."""
        return {"losses": jnp.full(self.window, jnp.inf), "accepted": jnp.zeros((), jnp.int32)}


def _median(values: Float[Array, " window"], count: Int[Array, ""]) -> Float[Array, ""]:
    """Returns the median of the `count` least values; 0 of none."""
    ordered = jnp.sort(values)
    middle = 0.5 * ordered[(count - 1) // 2] + 0.5 * ordered[count // 2]
    return jnp.where(count > 0, middle, 0.0)


def judge(
    detector: SpikeDetector,
    seen: Mapping[str, Array],
    loss: Float[Array, ""],
    grad_norm: Float[Array, ""],
) -> tuple[Int[Array, ""], dict[str, Array]]:
    """Returns the verdict on a step and the detector's next state.

    Args:
      detector: the settings.
      seen: the state that `detector.init` or the last `judge` returned.
      loss: the loss of the step.
      grad_norm: the norm over all its gradients.

    Returns:
      (ACCEPTED, SPIKE or NON_FINITE; the next state, which is `seen` unless the step is accepted).
    """
    losses, accepted = seen["losses"], seen["accepted"]
    count = jnp.minimum(accepted, detector.window)
    median = _median(losses, count)
    mad = _median(jnp.abs(losses - median), count)
    limit = median + jnp.maximum(detector.deviations * _NORMAL * mad, _SLACK * jnp.abs(median))
    spike = (accepted >= detector.window // 2) & (loss > limit)
    verdict = jnp.where(is_finite(loss, grad_norm), jnp.where(spike, SPIKE, ACCEPTED), NON_FINITE)
    with_loss = {
        "losses": losses.at[accepted % detector.window].set(loss),
        "accepted": accepted + 1,
    }
    return verdict, select_if(verdict == ACCEPTED, with_loss, dict(seen))
