"""Events about layers over many steps: promotions, and SwiGLU outputs that grow."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import logging

from fp8jax.lm.records.events import Event
from fp8jax.lm.records.metrics import Metrics
from fp8jax.lm.stability.swiglu_growth import GROWTHS, growing


class LayerWatch:
    """Writes an event when the promoted layers change, and when SwiGLU outputs keep growing.

    Attributes:
      amaxes: [validations, layers], largest SwiGLU outputs of the last validations; a checkpoint
        carries them.
    """

    def __init__(self, metrics: Metrics, amaxes: list[list[float]], linears: Sequence[str]):
        """Begins to watch.

        Args:
          linears: the paths of the linears that are promoted one by one, empty where layers are.
        """
        self._metrics, self._linears = metrics, linears
        self._promoted: list[int] | list[str] = []
        self.amaxes = amaxes

    def stepped(self, step: int, numbers: dict[str, Any]) -> dict[str, float]:
        """The scalars of a step; writes an event if others were promoted than before.

        Args:
          numbers: what the step has returned. `promoted`, bool [layers] or [layers, linears],
            becomes their number.
        """
        if "promoted" in numbers:
            promoted = self._names(numbers["promoted"])
            if promoted != self._promoted:
                kind = "linears" if self._linears else "layers"
                self._metrics.event(step, Event.PROMOTION, **{kind: promoted})
            self._promoted = promoted
            numbers = numbers | {"promoted": len(promoted)}
        return {name: float(value) for name, value in numbers.items()}

    def _names(self, promoted: np.ndarray) -> list[int] | list[str]:
        """Numbers of layers; or names such as "3/mlp/down" of linears."""
        if not self._linears:
            return [int(layer) for layer in promoted.nonzero()[0]]
        names = [path.removeprefix("layers/") for path in self._linears]
        return [f"{layer}/{names[place]}" for layer, place in np.argwhere(promoted)]

    def validated(self, step: int, amaxes: list[float]) -> None:
        """Warns of layers that grow. After a warning the count starts again."""
        self.amaxes = [*self.amaxes[-GROWTHS:], amaxes]
        if layers := growing(self.amaxes):
            values = {layer: [round(each[layer], 3) for each in self.amaxes] for layer in layers}
            self._metrics.event(step, Event.SWIGLU_GROWS, amaxes=values)
            logging.warning(
                "the SwiGLU outputs of layers %s grew at each of the last %d validations. A scale"
                " of the whole tensor then loses its small values. model_overrides.mlp="
                "smooth_swiglu, finer scales or more weight decay help (arXiv 2409.12517)",
                layers,
                GROWTHS,
            )
            self.amaxes = []
