"""GNMR: runs what has growing gradients in higher precision for a while (arXiv 2606.00539).

A unit is a layer or a single linear, the paper's operator. For each unit and step let n be the norm
of its gradients, A the mean of its norms over all earlier steps, and let a queue hold its last
`window` ratios:

    ratio         r = n / (A + eps), 1 at the first step
    acceleration  d = r / (mean of the queue + eps), 1 until the queue is full
    score         R = max(r / alpha, d / beta)

Candidates are the units with R > 1 and those that are still locked. The `most` candidates with the
largest R are promoted: they run the high-precision recipe in the next step. A promoted unit with
R > 1 is locked for the next `lock_steps`; a unit that is not promoted is not locked. alpha may
have two stages, such as the paper's 1.5 for the first 2.5% of the run and 1.1 afterwards.

`random` is the control of an experiment: each step promotes units at random instead, with that
probability each.

The mean is over the whole run, as in the paper: the large gradients of the beginning stay in it and
lower the ratios later. A rejected step does not change this state either.
"""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

_EPS = 1e-12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gnmr:
    """The controller: a `Promoter` (lm/model/promotion.py).

    Attributes:
      alpha: one threshold of the ratio, or two: the first for the first steps of a run, the second
        afterwards.
      beta: the threshold of the acceleration.
      first: the share of a run that uses the first of two alphas.
      most: the largest number of units that are promoted at a time.
      precision: the policy of promoted units, without delayed scaling.
      lock_steps: how many steps a unit stays a candidate after its score was above 1.
      window: the number of ratios in the queue.
      unit: what is promoted as a whole, "layer" or "linear".
      random: the probability that a step promotes a unit at random; None promotes units by their
        gradients.
    """

    alpha: tuple[float, ...]
    beta: float
    first: float
    most: int
    lock_steps: int
    window: int
    precision: str
    unit: Literal["layer", "linear"] = "layer"
    random: float | None = None

    def __post_init__(self):
        numbers = all(isinstance(a, int | float) for a in self.alpha)
        if not numbers or not 1 <= len(self.alpha) <= 2 or not all(a > 0 for a in self.alpha):
            raise ValueError(f"gnmr.alpha={self.alpha} must be one or two positive thresholds")
        if not self.beta > 0:
            raise ValueError(f"gnmr.beta={self.beta} must be positive")
        if not 0 <= self.first <= 1:
            raise ValueError(f"gnmr.first={self.first} does not lie in [0, 1]")
        for name, least in (("most", 1), ("lock_steps", 0), ("window", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"gnmr.{name}={getattr(self, name)} must be at least {least}")
        if self.unit not in ("layer", "linear"):
            raise ValueError(f"gnmr.unit={self.unit!r} is neither layer nor linear")
        if self.random is not None and not 0 <= self.random <= 1:
            raise ValueError(f"gnmr.random={self.random} must lie in [0, 1]")

    @classmethod
    def from_config(cls, group: Any) -> "Gnmr | None":
        """Returns the controller of the config's group `gnmr`; None where `alpha` is empty."""
        # Without thresholds, GNMR is off, but its other numbers are checked.
        gnmr = cls(**{**group, "alpha": tuple(group.alpha) or (1.0,)})
        if group.alpha:
            return gnmr
        if group.random is not None:
            raise ValueError(f"gnmr.random={group.random} needs a gnmr.alpha: GNMR is off")
        return None

    def numbers(self, num_steps: int) -> Int[Array, ""]:
        """Returns how many steps of a run use the first of two alphas."""
        return jnp.asarray(round(self.first * num_steps), jnp.int32)

    def init(self, shape: tuple[int, ...]) -> dict[str, Array]:
        """Returns the state before the first `update`.

        Args:
          shape: (layers,), or (layers, linears).

        Raises:
          ValueError: `most` is greater than the number of units.
        """
        if self.most > math.prod(shape):
            raise ValueError(
                f"gnmr.most={self.most} is more than the model's {math.prod(shape)} {self.unit}s"
            )
        zeros = jnp.zeros(shape, jnp.float32)
        return {
            "steps": jnp.zeros((), jnp.int32),
            "mean": zeros,
            "lock": zeros.astype(jnp.int32),
            "ratios": jnp.zeros((self.window, *shape), jnp.float32),
            "promoted": jnp.zeros(shape, bool),
        }

    def update(
        self,
        seen: dict[str, Array],
        norms: Float[Array, "layers *linears"],
        key: Shaped[Array, "..."],
        first_steps: Int[Array, ""],
    ) -> dict[str, Array]:
        """Returns the state after a step; its `promoted` are the units to promote in the next.

        Args:
          seen: the state that `init` or the last `update` returned.
          norms: the norm of the gradients of each unit in this step.
          key: the run's PRNG key, for random promotions.
          first_steps: how many steps use the first of two alphas. It is an input, since it depends
            on the length of the run, which is no constant of a training step.
        """
        steps, mean, ratios = seen["steps"], seen["mean"], seen["ratios"]
        ratio = jnp.where(steps == 0, 1.0, norms / (mean + _EPS))
        full = steps >= self.window
        acceleration = jnp.where(full, ratio / (jnp.mean(ratios, axis=0) + _EPS), 1.0)
        alpha = jnp.where(steps < first_steps, self.alpha[0], self.alpha[-1])
        score = jnp.maximum(ratio / alpha, acceleration / self.beta)
        candidate = (score > 1) | (seen["lock"] > 0)
        ranked = jnp.where(candidate, score, -jnp.inf).ravel()
        rank = jnp.argsort(jnp.argsort(-ranked))  # 0 for the largest score
        promoted = candidate & (rank.reshape(candidate.shape) < self.most)
        if self.random is not None:
            key = jax.random.fold_in(jax.random.fold_in(key, 1), steps)
            promoted = jax.random.bernoulli(key, self.random, norms.shape)
        lock = jnp.where(score > 1, self.lock_steps, jnp.maximum(seen["lock"] - 1, 0))
        return {
            "steps": steps + 1,
            "mean": mean + (norms - mean) / (steps + 1),
            "lock": jnp.where(promoted, lock, 0),
            "ratios": ratios.at[steps % self.window].set(ratio),
            "promoted": promoted,
        }
