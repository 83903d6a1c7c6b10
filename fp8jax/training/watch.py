"""TODO docstring."""

import numpy as np
from absl import logging

from fp8jax.records.metrics import Metrics
from fp8jax.stability.swiglu_growth import GROWTHS, growing


class LayerWatch:
    """Writes events about layers: which are promoted (GNMR), and whose SwiGLU outputs grow."""

    def __init__(self, metrics: Metrics, amaxes: list[list[float]]):
        self._metrics = metrics
        self._promoted: list[int] = []
        self.amaxes = amaxes  # of the last validations, [validations, layers]

    def promoted(self, step: int, flags: np.ndarray) -> int:
        """How many layers ran in the high precision; an event where others did than before."""
        layers = [int(layer) for layer in flags.nonzero()[0]]
        if layers != self._promoted:
            self._metrics.event(step, "promotion", layers=layers)
        self._promoted = layers
        return len(layers)

    def validated(self, step: int, amaxes: list[float]) -> None:
        """Warns of layers that grow; and again when they have grown as much once more."""
        self.amaxes = [*self.amaxes[-GROWTHS:], amaxes]
        if layers := growing(self.amaxes):
            seen = {layer: [round(each[layer], 3) for each in self.amaxes] for layer in layers}
            self._metrics.event(step, "swiglu_grows", amaxes=seen)
            logging.warning(
                "the SwiGLU outputs of layers %s have grown at each of %d validations; scales of"
                " whole tensors lose the small ones then: model_overrides.mlp=smooth_swiglu, finer"
                " scales or more weight decay help (arXiv 2409.12517)", layers, GROWTHS,
            )  # fmt: skip
            self.amaxes = []
