"""Events about layers over many steps: promotions, and SwiGLU outputs that grow."""

from typing import Any

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

    def __init__(self, metrics: Metrics, amaxes: list[list[float]]):
        self._metrics = metrics
        self._promoted: list[int] = []
        self.amaxes = amaxes

    def stepped(self, step: int, numbers: dict[str, Any]) -> dict[str, float]:
        """The scalars of a step; writes an event if other layers were promoted than before.

        Args:
          numbers: what the step has returned. `promoted`, bool [layers], becomes their number.
        """
        if "promoted" in numbers:
            layers = [int(layer) for layer in numbers["promoted"].nonzero()[0]]
            if layers != self._promoted:
                self._metrics.event(step, Event.PROMOTION, layers=layers)
            self._promoted = layers
            numbers = numbers | {"promoted": len(layers)}
        return {name: float(value) for name, value in numbers.items()}

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
