"""Layers that run in another policy than the model's for a while, without recompiling.

A model takes a `Promotion` and asks no more: its flags lie on the device, and each linear has both
recipes (gemm/promotable.py). A `Promoter` decides which layers they are, in each training step.
"""

import dataclasses
import functools
from typing import Any, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Float, Shaped

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


@runtime_checkable
class Promoter(Protocol):
    """Decides in each training step which layers run in another policy in the next one."""

    @property
    def precision(self) -> str:
        """The policy of promoted layers, without delayed scaling."""

    def numbers(self, num_steps: int) -> Array:
        """Returns what `update` needs of the length of a run, which is no constant of a step."""

    def init(self, n_layers: int) -> dict[str, Array]:
        """Returns the state before the first step; its `promoted` is bool [layers]."""

    def update(
        self,
        seen: dict[str, Array],
        norms: Float[Array, " layers"],
        key: Shaped[Array, "..."],
        numbers: Array,
    ) -> dict[str, Array]:
        """Returns the next state from the norms of the layers' gradients, and the run's key."""
