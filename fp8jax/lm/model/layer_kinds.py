"""What layers of unlike kinds differ in: which keys a query sees, and how heads are rotated.

Where all layers are of one kind, each computes it from the config. Layers of several kinds share
one compiled loop, so that theirs are arrays with a leading axis of layers, which the loop scans.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fp8jax.lm.model.config import ModelConfig
from fp8jax.lm.model.rope import frequencies

_EVERY = 2**30  # a window that hides nothing


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerKind:
    """A kind of layer, or with a leading axis those of all layers. (No tuple: those are layers.)

    Attributes:
      window: keys that a query sees, its own included; None for all.
      frequencies: of rotary positions, float32 [h]; None for none.
      magnitude: the factor of cos and sin; None for 1.
    """

    window: Any
    frequencies: Any
    magnitude: Any


def kind_of(config: ModelConfig, letter: str) -> LayerKind:
    """Returns the kind of the layers with a letter of `LAYER_KINDS`."""
    c, window = config, config.window if letter == "w" else None
    if letter == "n" or c.learned_positions:
        return LayerKind(window, None, None)
    size = c.rotary_dim or c.head_dim
    if letter == "w" and c.window_rope_theta:
        return LayerKind(window, frequencies(c.window_rope_theta, size), None)
    magnitude = 1.0 if c.rope_scaling is None else c.rope_scaling.magnitude
    turns = frequencies(c.rope_theta, size, c.rope_scaling)
    return LayerKind(window, turns, None if magnitude == 1.0 else magnitude)


def kinds_of_layers(config: ModelConfig) -> LayerKind | None:
    """Returns the kinds of all layers, with a leading axis; None if they are all the same.

    What no layer has stays None. Otherwise no window is one that hides nothing, and no positions
    are frequencies of 0, which turn by no angle.
    """
    letters = config.layer_kinds
    if len(set(letters)) == 1:
        return None
    no_turns = jnp.zeros((config.rotary_dim or config.head_dim) // 2)
    without = LayerKind(jnp.int32(_EVERY), no_turns, jnp.float32(1.0))
    kinds = {letter: kind_of(config, letter) for letter in set(letters)}

    def stacked(field: str) -> Any:
        nothing = getattr(without, field)
        of_kind = {letter: getattr(kind, field) for letter, kind in kinds.items()}
        if all(part is None for part in of_kind.values()):
            return None
        of_layer = [nothing if of_kind[each] is None else of_kind[each] for each in letters]
        return jnp.stack([jnp.asarray(part, nothing.dtype) for part in of_layer])

    return LayerKind(*(stacked(field.name) for field in dataclasses.fields(LayerKind)))
