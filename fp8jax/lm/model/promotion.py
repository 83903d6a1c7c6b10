"""Layers that run in another policy than the model's for a while, without recompiling.

A model takes a `Promotion` and asks no more: its flags lie on the device, and each linear has both
recipes (gemm/promotable.py). Who decides makes one: lm/stability/gnmr.py, in a training step.
"""

import dataclasses
import functools
from typing import Any

import jax

from fp8jax.numerics.policy import Policy


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("layers",), meta_fields=("policy",)
)
@dataclasses.dataclass(frozen=True)
class Promotion:
    """Which layers run in another policy.

    Attributes:
      policy: of these layers, without histories.
      layers: bool [layers]; bool [] for one layer.
    """

    policy: Policy
    layers: Any  # JAX makes promotions of placeholders, too

    def __getitem__(self, index: Any) -> "Promotion":
        """Returns the promotion of one layer, or of a slice of them."""
        return Promotion(self.policy, self.layers[index])
