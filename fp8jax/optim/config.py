"""The settings of an optimizer and of its learning-rate schedule."""

import dataclasses

from ml_collections import ConfigDict


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The settings of an optimizer; `make_optimizer` builds the optimizer from them.

    Attributes:
      name: a key of `OPTIMIZERS`.
      learning_rate: the largest learning rate, reached at the end of the warm-up.
      schedule: a key of `SCHEDULES`.
      warmup_steps: steps over which the learning rate grows linearly.
      num_steps: steps of the whole run.
      decay_fraction: fraction of the run over which the schedule "wsd" decays, in [0, 1].
      final_fraction: final learning rate divided by the largest one, in [0, 1].
      weight_decay: decoupled weight decay, scaled by the learning rate; applies to matrices only.
      b1, b2: Adam's decay rates of the first and second moments. Lion uses both with its own
        meaning; StoSignSGD and signum use b1 only.
      eps: added to the square root of Adam's second moment.
      clip_norm: the gradients are scaled down to this global norm where theirs is larger.
      gradients: a key of `GRADIENTS`, the format to which clipped gradients are rounded.
      moments: a key of `MOMENTS`, the format in which moments are stored between steps.
      seed: seeds the noise of stochastic signs and of stochastic rounding.

    Raises:
      ValueError: a field is out of its range, or the warm-up is not shorter than the run.
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
    gradients: str
    moments: str
    seed: int

    def __post_init__(self):
        if not 0 <= self.warmup_steps < self.num_steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} does not lie in [0, num_steps={self.num_steps})"
                ": shorten the warm-up or lengthen the run"
            )
        for name in ("decay_fraction", "final_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} does not lie in [0, 1]")
        if not (self.learning_rate > 0 and self.clip_norm > 0):
            raise ValueError(
                f"learning_rate={self.learning_rate} and clip_norm={self.clip_norm} must both be "
                "positive"
            )

    @classmethod
    def from_config(cls, config: ConfigDict) -> "OptimizerConfig":
        """Returns the optimizer settings of a run's config (configs/base.py).

        `name` is `config.optimizer`; every other field has the same name in the config.
        """
        fields = {field.name for field in dataclasses.fields(cls)} - {"name"}
        return cls(name=config.optimizer, **{name: config[name] for name in fields})
