"""From one policy of a precision schedule to the next: what becomes of the amax histories.

Weights, optimizer state and data position go on bit for bit. A history goes on where both policies
have one for the same module and operand. Every other history begins empty, and the first step under
the new policy seeds it.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from fp8jax.lm.model.transformer import Transformer
from fp8jax.lm.training.step import TrainState


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by path, such as "layers/mlp/up/x_amax_history"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def carried_histories(
    before: Transformer, old: TrainState, after: Transformer, new: TrainState
) -> frozenset[str]:
    """Names of the histories that go on when the policy of `before` gives way to that of `after`.

    A history goes on if both states have it, in the same shape. One leaf holds the histories of all
    layers of a module. If `after` quantizes a layer that `before` left in high precision, the leaf
    holds nothing valid for that layer, and all histories of layers begin empty.

    Args:
      old, new: the abstract states of both stages.
    """
    shapes = {name: leaf.shape for name, leaf in leaves_by_path(old.histories).items()}
    more_layers = not _quantized_layers(after) <= _quantized_layers(before)
    return frozenset(
        name
        for name, leaf in leaves_by_path(new.histories).items()
        if name in shapes and shapes[name] == leaf.shape
        if not (more_layers and name.startswith("layers/"))
    )


def _quantized_layers(model: Transformer) -> set[int]:
    first, last = model.resolved_policy.exempt(model.config.n_layers)
    return set(range(first, model.config.n_layers - last))


def enter_policy(state: TrainState, abstract: TrainState, carried: frozenset[str]) -> TrainState:
    """`state` with the histories of `abstract`: the same arrays for those in `carried`, else zeros.

    Every other leaf is the same array as before. Nothing is copied or compiled.
    """
    old = leaves_by_path(state.histories)

    def history(name: str, leaf: Any) -> Array:
        if name in carried:
            return old[name]
        zeros = np.zeros(leaf.shape, leaf.dtype)
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: zeros[index])

    leaves = [history(name, leaf) for name, leaf in leaves_by_path(abstract.histories).items()]
    histories = jax.tree.unflatten(jax.tree.structure(abstract.histories), leaves)
    return dataclasses.replace(state, histories=histories)
