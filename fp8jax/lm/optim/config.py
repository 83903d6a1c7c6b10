"""The settings of an optimizer and of its learning-rate schedule."""

import dataclasses
import math

import numpy as np
from ml_collections import ConfigDict

_TINY, _HUGE = 2.0**-126, (2 - 2**-23) * 2.0**127  # the normal numbers of float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The settings of an optimizer; `make_optimizer` builds the optimizer from them.

    Attributes:
      name: a key of `OPTIMIZERS`.
      learning_rate: the largest learning rate, reached at the end of the warm-up.
      schedule: a key of `SCHEDULES`.
      warmup_steps: steps over which the learning rate grows linearly; see `warmup`.
      warmup_fraction: those steps as a fraction of the run, in [0, 1]; None for `warmup_steps`.
      num_steps: steps of the whole run.
      decay_fraction: fraction of the run over which the schedule "wsd" decays, in [0, 1].
      final_fraction: final learning rate divided by the largest one, in [0, 1].
      weight_decay: decoupled weight decay, scaled by the learning rate; applies to matrices only.
      b1, b2: Adam's decay rates of the first and second moments, in [0, 1). Lion uses both with its
        own meaning; StoSignSGD and signum use b1 only. Beside Muon they are those of Adam.
      eps: added to the square root of Adam's second moment.
      clip_norm: the gradients are scaled down to this global norm where theirs is larger; infinity
        never scales.
      gradients: a key of `GRADIENTS`, the format to which clipped gradients are rounded.
      moments: a key of `MOMENTS`, the format in which moments are stored between steps.
      reset: a recipe by whose cast kernels are reset that oscillate (oscillation.py); "" for none.
      reset_from: the share of the run, in [0, 1), from which on they are.
      seed: seeds the noise of stochastic signs and of stochastic rounding.

    Raises:
      ValueError: a field is out of its range.

    Example:
      >>> from fp8jax.lm.optim.config import OptimizerConfig
      >>> config = OptimizerConfig.from_config(fp8jax.base_config())
      >>> config.name, config.warmup, config.num_steps
      ('adamw', 20, 300)
    """

    name: str
    learning_rate: float
    schedule: str
    warmup_steps: int
    warmup_fraction: float | None
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
    reset: str
    reset_from: float
    seed: int

    def __post_init__(self):
        if self.num_steps < 1:
            raise ValueError(f"num_steps={self.num_steps} must be at least 1")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps={self.warmup_steps} is negative")
        if self.warmup_fraction is not None and not 0 <= self.warmup_fraction <= 1:
            raise ValueError(f"warmup_fraction={self.warmup_fraction} does not lie in [0, 1]")
        if self.schedule == "decay" and self.asked_warmup:
            raise ValueError(
                f"schedule=decay begins at the learning rate and has no warm-up of "
                f"{self.asked_warmup} steps: set warmup_steps=0 and no warmup_fraction"
            )
        # Each comparison is false for NaN.
        if not 0 <= self.reset_from < 1:
            raise ValueError(f"reset_from={self.reset_from} does not lie in [0, 1)")
        for name in ("decay_fraction", "final_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} does not lie in [0, 1]")
        for name in ("b1", "b2"):
            if not 0 <= np.float32(getattr(self, name)) < 1:
                raise ValueError(f"{name}={getattr(self, name)} does not lie in [0, 1), as float32")
        for name in ("learning_rate", "eps"):
            if not _TINY <= getattr(self, name) <= _HUGE:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be positive and finite, as a normal float32"
                )
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay={self.weight_decay} must be finite and not negative")
        if not self.clip_norm > 0:
            raise ValueError(f"clip_norm={self.clip_norm} must be positive")

    @property
    def decay_steps(self) -> int:
        """Steps of the decay that ends the schedule "wsd"; 0 for other schedules."""
        return round(self.decay_fraction * self.num_steps) if self.schedule == "wsd" else 0

    @property
    def asked_warmup(self) -> int:
        """Steps of the warm-up that the fields ask for."""
        if self.warmup_fraction is None:
            return self.warmup_steps
        return round(self.warmup_fraction * self.num_steps)

    @property
    def warmup(self) -> int:
        """Steps of the warm-up, those asked for, or a tenth of the run where those do not fit.

        They fit if they end before the last step, and before the decay if there is one. A tenth is
        at most what fits. So a short run for a look needs no other warm-up.
        """
        longest = min(self.num_steps - 1, self.num_steps - self.decay_steps)
        asked = self.asked_warmup
        return asked if asked <= longest else min(self.num_steps // 10, longest)

    @classmethod
    def from_config(cls, config: ConfigDict) -> "OptimizerConfig":
        """Returns the optimizer settings of a run's config (fp8jax.base_config).

        Its fields are the keys of `config.optimizer`, but for `num_steps` and `seed`.
        """
        fields = {field.name for field in dataclasses.fields(cls)} - {"num_steps", "seed"}
        group = {name: config.optimizer[name] for name in fields}
        return cls(num_steps=config.num_steps, seed=config.seed, **group)
