"""Layers, or single linears, that run in another policy for a while, without recompiling.

A model takes a `Promotion` and asks no more: its flags lie on the device, and each linear has both
recipes (gemm/promotable.py). A `Promoter` decides which they are, in each training step.
"""

import dataclasses
import functools
from typing import Any, Literal, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Float, Shaped

from fp8jax.lm.model.config import ModelConfig
from fp8jax.numerics.policy import Policy


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("flags",), meta_fields=("policy", "linears")
)
@dataclasses.dataclass(frozen=True)
class Promotion:
    """Which layers or linears run in another policy.

    Attributes:
      policy: of what is promoted, without histories.
      flags: bool [layers], or [layers, linears]; without `layers` for one layer.
      linears: the paths of the linears that have a flag each, () where a layer has one.
    """

    policy: Policy
    flags: Any  # JAX makes promotions of placeholders, too
    linears: tuple[str, ...] = ()

    def __getitem__(self, index: Any) -> "Promotion":
        """Returns the promotion of one layer, or of a slice of them."""
        return dataclasses.replace(self, flags=self.flags[index])

    def of(self, path: str) -> Any:
        """Returns the flags of the linear at `path`: bool [layers], or [] for one layer."""
        return self.flags[..., self.linears.index(path)] if self.linears else self.flags


@runtime_checkable
class Promoter(Protocol):
    """Decides in each training step what runs in another policy in the next one."""

    @property
    def precision(self) -> str:
        """The policy of what is promoted, without delayed scaling."""

    @property
    def unit(self) -> Literal["layer", "linear"]:
        """What is promoted as a whole."""

    def numbers(self, num_steps: int) -> Array:
        """Returns what `update` needs of the length of a run, which is no constant of a step."""

    def init(self, shape: tuple[int, ...]) -> dict[str, Array]:
        """Returns the state before the first step; its `promoted` is bool of this shape.

        Args:
          shape: (layers,) or (layers, linears).
        """

    def update(
        self,
        seen: dict[str, Array],
        norms: Float[Array, "layers *linears"],
        key: Shaped[Array, "..."],
        numbers: Array,
    ) -> dict[str, Array]:
        """Returns the next state from the norms of the units' gradients, and the run's key."""


def promoted_linears(promoter: Promoter | None, c: ModelConfig) -> tuple[str, ...]:
    """Returns the paths of the linears that are promoted one by one, () where none is."""
    if promoter is None or promoter.unit == "layer":
        return ()
    return tuple(path for path in c.linears if path.startswith("layers/"))
