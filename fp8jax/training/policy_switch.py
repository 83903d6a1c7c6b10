"""TODO docstring."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from fp8jax.model.transformer import Transformer
from fp8jax.numerics.policy_options import as_policy
from fp8jax.training.step import TrainState

# Another policy -----------------------------------------------------------------------------------


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths, such as "layers/mlp/up/x_amax_history"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def kept_histories(
    before: Transformer, old: TrainState, after: Transformer, new: TrainState
) -> frozenset[str]:
    """Names of the histories that a change from one policy to another keeps, from the models and
    their abstract states: those that both have of a module and operand, in the same shape.

    One leaf holds all layers of a module. Where some of them were in high precision before and are
    not now, what it holds of them says nothing, and it begins anew.
    """
    shapes = {name: leaf.shape for name, leaf in leaves_by_path(old.histories).items()}
    grown = not _quantized_layers(after) <= _quantized_layers(before)
    return frozenset(
        name
        for name, leaf in leaves_by_path(new.histories).items()
        if name in shapes and shapes[name] == leaf.shape
        if not (grown and name.startswith("layers/"))
    )


def _quantized_layers(model: Transformer) -> set[int]:
    first, last = as_policy(model.policy).exempt(model.config.n_layers)
    return set(range(first, model.config.n_layers - last))


def enter_policy(state: TrainState, abstract: TrainState, kept: frozenset[str]) -> TrainState:
    """`state` with the histories of `abstract`: those named in `kept` are the same arrays, the
    others zeros. All else is the same arrays too; nothing is copied or compiled."""
    old = leaves_by_path(state.histories)

    def history(name: str, leaf: Any) -> Array:
        if name in kept:
            return old[name]
        zeros = np.zeros(leaf.shape, leaf.dtype)
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: zeros[index])

    leaves = [history(name, leaf) for name, leaf in leaves_by_path(abstract.histories).items()]
    histories = jax.tree.unflatten(jax.tree.structure(abstract.histories), leaves)
    return dataclasses.replace(state, histories=histories)
