"""Optimizers and learning-rate schedules by name, as optax transformations.

Master weights, gradients and moments are float32. What comes before the update, clipping by the
global norm, and after it, decoupled weight decay, is the same for all. Amax histories never get
here: they are not parameters.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax

from fp8jax.names import lookup


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
      b1, b2, eps: Adam's.
      clip_norm: largest global norm of the gradients.
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


def _adamw(c: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Loshchilov and Hutter, arXiv 1711.05101, with float32 moments."""
    return optax.adamw(
        schedule, b1=c.b1, b2=c.b2, eps=c.eps, weight_decay=c.weight_decay, mask=is_matrix
    )


OPTIMIZERS: dict[str, Callable[[OptimizerConfig, optax.Schedule], optax.GradientTransformation]] = {
    "adamw": _adamw
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
      ValueError: an unknown optimizer or schedule, or phases that do not fit into the run.
    """
    make = lookup("optimizer", config.name, OPTIMIZERS)
    counted_from_one = lookup("schedule", config.schedule, SCHEDULES)(config)

    def schedule(count):
        return counted_from_one(count + 1)

    clip = optax.clip_by_global_norm(config.clip_norm)
    return optax.chain(clip, make(config, schedule)), schedule
