"""GNMR: layers whose gradients grow run in higher precision for a while (arXiv 2606.00539).

With n the gradient norm of a layer b at step t, the mean A of all before, and a queue of the last
`window` ratios:

    ratio         r = n / (A + eps), 1 at the first step
    acceleration  d = r / (mean of the queue + eps), 1 until the queue is full
    R             max(r / alpha, d / beta)

Layers with R > 1, and those still locked, are candidates; the `most` with the largest R run the
high recipe in the next step. A layer with R > 1 stays locked for `lock` steps after it; one that is
not promoted is not locked. alpha may have two stages, as the paper's 1.5 for the first 2.5% of the
run and 1.1 after.

`random` is the control of an experiment: that share of the layers in each step, drawn instead.

The mean is over the whole run, as in the paper: large gradients of the beginning stay in it, and
blunt the signal later. A step that was rejected changes nothing here either.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

_EPS = 1e-12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gnmr:
    """Settings of the controller.

    Attributes:
      alpha: thresholds of the ratio: one, or two of which the first holds at the beginning.
      beta: threshold of the acceleration.
      first_steps: with two thresholds, steps of the first.
      most: layers that may be promoted at a time.
      lock: steps that a promotion outlasts its cause.
      window: ratios in the queue.
      random: share of the layers' steps that are promoted by chance, None for by their gradients.
    """

    alpha: tuple[float, ...]
    beta: float
    first_steps: int
    most: int
    lock: int
    window: int
    random: float | None = None

    def __post_init__(self):
        if not 1 <= len(self.alpha) <= 2 or not all(a > 0 for a in self.alpha):
            raise ValueError(f"gnmr_alpha={self.alpha}: one or two positive thresholds")
        if not self.beta > 0:
            raise ValueError(f"gnmr_beta={self.beta} must be positive")
        for name, least in (("most", 1), ("lock", 0), ("window", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"gnmr_{name}={getattr(self, name)} must be at least {least}")
        if self.random is not None and not 0 <= self.random <= 1:
            raise ValueError(f"gnmr_random={self.random} does not lie in [0, 1]")

    def init(self, n_layers: int) -> dict[str, Array]:
        """What `observe` remembers, before the first step.

        Raises ValueError where more layers may be promoted than there are.
        """
        if self.most > n_layers:
            raise ValueError(f"gnmr_most={self.most} is more than the {n_layers} layers")
        zeros = jnp.zeros(n_layers, jnp.float32)
        return {
            "steps": jnp.zeros((), jnp.int32), "mean": zeros, "lock": zeros.astype(jnp.int32),
            "ratios": jnp.zeros((self.window, n_layers), jnp.float32),
            "promoted": jnp.zeros(n_layers, bool),
        }  # fmt: skip


def update_gnmr(
    config: Gnmr,
    seen: dict[str, Array],
    norms: Float[Array, " layers"],
    key: Shaped[Array, "..."],
) -> dict[str, Array]:
    """After a step with these gradient norms: what to remember, `promoted` for the next step.

    The run's key is for promotions by chance.
    """
    steps, mean, ratios = seen["steps"], seen["mean"], seen["ratios"]
    ratio = jnp.where(steps == 0, 1.0, norms / (mean + _EPS))
    full = steps >= config.window
    acceleration = jnp.where(full, ratio / (jnp.mean(ratios, axis=0) + _EPS), 1.0)
    alpha = jnp.where(steps < config.first_steps, config.alpha[0], config.alpha[-1])
    score = jnp.maximum(ratio / alpha, acceleration / config.beta)
    candidate = (score > 1) | (seen["lock"] > 0)
    ranked = jnp.where(candidate, score, -jnp.inf)
    place = jnp.argsort(jnp.argsort(-ranked))  # 0 for the largest
    promoted = candidate & (place < config.most)
    if config.random is not None:
        key = jax.random.fold_in(jax.random.fold_in(key, 1), steps)
        promoted = jax.random.bernoulli(key, config.random, norms.shape)
    lock = jnp.where(score > 1, config.lock, jnp.maximum(seen["lock"] - 1, 0))
    return {
        "steps": steps + 1,
        "mean": mean + (norms - mean) / (steps + 1),
        "lock": jnp.where(promoted, lock, 0),
        "ratios": ratios.at[steps % config.window].set(ratio),
        "promoted": promoted,
    }
