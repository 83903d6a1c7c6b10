"""TODO docstring."""

import dataclasses


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
