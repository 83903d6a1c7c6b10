"""Optimizers and learning-rate schedules by name, as optax transformations.

Master weights, gradients and the arithmetic are float32; moments are kept between the steps as
moments.py has it. What comes before the update, clipping by the global norm, and after it,
decoupled weight decay and the learning rate, is the same for all. Amax histories never get here:
they are not parameters.

StoSignSGD (arXiv 2604.15416, algorithm 3) takes the sign of the momentum m after a uniform noise of
the size of its largest magnitude so far, element by element:

    m <- b1 m + (1 - b1) g  (g at first)      G <- max(G, |m|)      u = sign(m + G n),  n in [-1, 1)

so that the mean of u is m / G: a sign without bias. Its second version (algorithm 11) lets G shrink
by 0.99995 a step. `sign_adamw` converts Adam in the same way (algorithm 4), with sqrt(v) + eps in
the place of G. The noise comes from the seed, the step and the leaf: the same on every mesh.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from fp8jax.lookup import lookup
from fp8jax.optim.moments import MOMENTS, stored


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """What an optimizer is made of.

    Attributes:
      name: a key of `OPTIMIZERS`.
      learning_rate: at the end of the warm-up.
      schedule: a key of `SCHEDULES`.
      warmup_steps: of linear growth.
      num_steps: of the whole run.
      decay_fraction: share of the run that the last phase of "wsd" takes.
      final_fraction: learning rate at the end, as a share of the largest.
      weight_decay: per step and unit of learning rate, on matrices only.
      b1, b2, eps: Adam's; Lion has the two decays, StoSignSGD the first.
      clip_norm: largest global norm of the gradients.
      moments: a key of `MOMENTS`, how moments are kept.
      seed: of noise and of stochastic rounding.
    """

    name: str
    learning_rate: float
    schedule: str
    warmup_steps: int
    num_steps: int
    decay_fraction: float
    final_fraction: float
    weight_decay: float
    b1: float
    b2: float
    eps: float
    clip_norm: float
    moments: str
    seed: int

    def __post_init__(self):
        if not 0 <= self.warmup_steps < self.num_steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} does not lie in [0, num_steps={self.num_steps})"
                ": a shorter run needs a shorter warm-up"
            )
        for name in ("decay_fraction", "final_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} does not lie in [0, 1]")
        if not (self.learning_rate > 0 and self.clip_norm > 0):
            raise ValueError(
                f"must be positive: learning_rate={self.learning_rate}, clip_norm={self.clip_norm}"
            )


def _cosine(c: OptimizerConfig) -> optax.Schedule:
    """Linear warm-up, then a half cosine down to final_fraction at the last step."""
    return optax.schedules.warmup_cosine_decay_schedule(
        init_value=0.0, peak_value=c.learning_rate, warmup_steps=c.warmup_steps,
        decay_steps=c.num_steps, end_value=c.final_fraction * c.learning_rate,
    )  # fmt: skip


def _wsd(c: OptimizerConfig) -> optax.Schedule:
    """Warm-up, stable, then a half cosine over the last decay_fraction of the run (InfiR2's)."""
    decay = round(c.decay_fraction * c.num_steps)
    begin = c.num_steps - decay
    if begin < c.warmup_steps:
        raise ValueError(
            f"wsd: the decay over the last {decay} of {c.num_steps} steps begins within the "
            f"{c.warmup_steps} warm-up steps"
        )
    return optax.schedules.join_schedules(
        [
            optax.schedules.linear_schedule(0.0, c.learning_rate, max(c.warmup_steps, 1)),
            optax.schedules.constant_schedule(c.learning_rate),
            optax.schedules.cosine_decay_schedule(
                c.learning_rate, max(decay, 1), alpha=c.final_fraction
            ),
        ],
        boundaries=[c.warmup_steps, begin],
    )


SCHEDULES: dict[str, Callable[[OptimizerConfig], optax.Schedule]] = {
    "cosine": _cosine,
    "wsd": _wsd,
}


class StoSignState(NamedTuple):
    """The state of `scale_by_stosign`: finished steps, momentum, and the bound G on it."""

    step: Int[Array, ""]
    mu: Any
    bound: Any


def _stochastic_sign(mean: Any, bound: Any, key: Array) -> Any:
    """sign(mean + bound n) of each leaf, n uniform in [-1, 1)."""
    leaves, treedef = jax.tree.flatten(mean)
    keys = [jax.random.fold_in(key, i) for i in range(len(leaves))]
    noise = [jax.random.uniform(k, m.shape, minval=-1.0) for k, m in zip(keys, leaves, strict=True)]
    return jax.tree.map(
        lambda m, g, n: jnp.sign(m + g * n), mean, bound, jax.tree.unflatten(treedef, noise)
    )  # fmt: skip


def scale_by_stosign(b1: float, decay: float, seed: int) -> optax.GradientTransformation:
    """StoSignSGD: signs whose mean is the momentum over its largest magnitude.

    Args:
      b1: decay of the momentum.
      decay: of the bound, 1 in the first version.
      seed: of the noise.
    """

    def init(params: Any) -> StoSignState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return StoSignState(jnp.zeros((), jnp.int32), zeros, zeros)

    def update(updates: Any, state: StoSignState, params: Any = None):
        b = jnp.where(state.step == 0, 0.0, b1)
        mu = jax.tree.map(lambda m, g: b * m + (1 - b) * g, state.mu, updates)
        bound = jax.tree.map(lambda g, m: jnp.maximum(decay * g, jnp.abs(m)), state.bound, mu)
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        signs = _stochastic_sign(mu, bound, key)
        return signs, StoSignState(state.step + 1, mu, bound)

    return optax.GradientTransformation(init, update)


def scale_by_sign_adam(b1: float, b2: float, eps: float, seed: int) -> optax.GradientTransformation:
    """Adam with its update m / (sqrt(v) + eps) turned into signs with that mean, up to where it
    exceeds 1."""
    adam = optax.scale_by_adam(b1, b2, eps)

    def update(updates: Any, state: optax.ScaleByAdamState, params: Any = None):
        _, new = adam.update(updates, state, params)
        mean = optax.tree.bias_correction(new.mu, b1, new.count)
        bound = optax.tree.bias_correction(new.nu, b2, new.count)
        bound = jax.tree.map(lambda v: jnp.sqrt(v) + eps, bound)
        key = jax.random.fold_in(jax.random.key(seed), state.count)
        return _stochastic_sign(mean, bound, key), new

    return optax.GradientTransformation(adam.init, update)


# name -> (what turns gradients into an update, its moments and which of them are second ones)
Core = tuple[optax.GradientTransformation, dict[str, bool]]


_STOSIGN = dict(mu=False, bound=False)


_ADAM = dict(mu=False, nu=True)


OPTIMIZERS: dict[str, Callable[[OptimizerConfig], Core]] = {
    "adamw": lambda c: (optax.scale_by_adam(c.b1, c.b2, c.eps), _ADAM),
    "lion": lambda c: (optax.scale_by_lion(c.b1, c.b2), dict(mu=False)),
    "stosignsgd": lambda c: (scale_by_stosign(c.b1, 1.0, c.seed), _STOSIGN),
    "stosignsgd_v2": lambda c: (scale_by_stosign(c.b1, 0.99995, c.seed), _STOSIGN),
    "sign_adamw": lambda c: (scale_by_sign_adam(c.b1, c.b2, c.eps, c.seed), _ADAM),
}


MATRICES = ("['kernel']", "['embedding']", "['position_embedding']")


def is_matrix(params: Any) -> Any:
    """Which leaves weight decay applies to: kernels and embeddings, not norms and biases.

    By name: a norm of stacked layers has two axes as well.
    """

    def named_so(path, _) -> bool:
        return any(str(key) in MATRICES for key in path)

    return jax.tree_util.tree_map_with_path(named_so, params)


def make_optimizer(
    config: OptimizerConfig,
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """The optimizer, clipping included, and its schedule (finished steps -> learning rate).

    The first of w warm-up steps has 1 / w of the learning rate, not zero, and the last step of the
    run the final one.

    Raises:
      ValueError: an unknown optimizer, moment format or schedule, or phases that do not fit into
        the run.
    """
    core, moments = lookup("optimizer", config.name, OPTIMIZERS)(config)
    fmt = lookup("moment format", config.moments, MOMENTS)
    counted_from_one = lookup("schedule", config.schedule, SCHEDULES)(config)

    def schedule(count):
        return counted_from_one(count + 1)

    # Nested as optax.adamw is: checkpoints of either fit the other.
    update = optax.chain(
        stored(core, fmt, moments=moments, seed=config.seed),
        optax.add_decayed_weights(config.weight_decay, is_matrix),
        optax.scale_by_learning_rate(schedule),
    )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), update), schedule
