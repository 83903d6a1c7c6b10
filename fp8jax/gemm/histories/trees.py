"""Checks of trees of variables and gradients, on structure and shapes alone.

JAX and optax report two trees of different structure by their whole structures. These checks name
the leaves that differ, by paths such as "params/mlp/kernel".
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fp8jax.gemm.histories.amax_history import HISTORIES
from fp8jax.lookup import brief


def shapes_of(tree: Any) -> dict[str, tuple[int, ...]]:
    """Returns path -> shape of each leaf of a tree."""
    return {_path(path): jnp.shape(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}


def mapping_like(tree: Mapping[str, Any], entries: dict[str, Any]) -> Any:
    """Returns a mapping of the type of `tree`, such as flax's FrozenDict, with other entries."""
    kind: Any = type(tree)
    if isinstance(tree, defaultdict):
        return kind(tree.default_factory, entries)
    return kind(entries)


def structured_like(tree: Any, other: Any) -> Any:
    """Returns `other`, whose leaves have the paths of those of `tree`, with mappings of its types.

    Gradients may be in dicts where the variables are in FrozenDicts.
    """
    structure: Any = jax.tree.structure(tree)
    if jax.tree.structure(other) == structure:
        return other
    leaves = {_path(path): leaf for path, leaf in jax.tree.leaves_with_path(other)}
    return structure.unflatten([leaves[_path(path)] for path, _ in jax.tree.leaves_with_path(tree)])


def _path(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def check_no_nnx(name: Any) -> None:
    """Raises TypeError for the name of a history outside of their collection, as NNX has it."""
    if str(name).endswith("_amax_history"):
        raise TypeError(
            f"{name!r} is not in the collection {HISTORIES!r}, as histories of an NNX model: use"
            " fp8jax.nnx.update, fp8jax.nnx.merge or fp8jax.nnx.seed"
        )


def check_no_histories_inside(tree: Any) -> None:
    """Raises TypeError if a tree that is no dict has histories.

    Such as a list, a TrainState or an NNX model.
    """
    for path, _ in jax.tree.leaves_with_path(tree):
        if any(getattr(key, "key", None) == HISTORIES for key in path):
            raise TypeError(
                f"histories must be in dicts of dicts, got them inside a {type(tree).__name__}:"
                " pass flax's variables {'params': ..., '" + HISTORIES + "': ...}"
            )
        for key in path:
            check_no_nnx(getattr(key, "key", getattr(key, "name", None)))


def check_same_leaves(what: str, ours: Any, theirs: Any, remedy: str) -> None:
    """Raises ValueError unless both trees have leaves of the same paths and shapes.

    Args:
      what: what the two trees are, in the plural.
      remedy: what to do.
    """
    first, second = shapes_of(ours), shapes_of(theirs)
    differing = sorted(first.keys() ^ second.keys())
    if differing:
        path = differing[0]
        where = "the first" if path in first else "the second"
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        raise ValueError(f"{what} differ: only {where} have {path!r}{more}; {remedy}")
    for path, shape in first.items():
        if shape != second[path]:
            raise ValueError(
                f"{what} differ: {path!r} has shape {shape} in the first and {second[path]} in the"
                f" second; {remedy}"
            )


def check_leading_axis(tree: Any, axes: int) -> None:
    """Raises ValueError for a leaf with fewer than `axes` axes, of which the first is stacked."""
    for path, shape in shapes_of(tree).items():
        if len(shape) < axes:
            raise ValueError(
                f"{path!r} has shape {shape} and no leading axis of microbatches: stack the"
                " gradients, or use fp8jax.histories.merge"
            )


def check_branch(rest: Any, name: str) -> None:
    """Raises KeyError if the tree, without its histories, lacks the branch of some of them."""
    if not (hasattr(rest, "keys") and name in rest):
        raise KeyError(
            f"the tree has no {name!r}, which the histories have: pass both results of"
            " fp8jax.histories.split"
        )


def check_optimizer(optimizer: Any) -> None:
    """Raises TypeError for what is not an optax optimizer."""
    if not (callable(getattr(optimizer, "init", None)) and hasattr(optimizer, "update")):
        raise TypeError(
            f"optimizer must be an optax optimizer, such as optax.adamw(1e-3), got"
            f" {brief(optimizer)}"
        )


def check_extra(optimizer: Any, extra: Mapping[str, Any]) -> None:
    """Raises TypeError for extra arguments of an optimizer that takes none."""
    takes_none = isinstance(optimizer, optax.GradientTransformation) and not isinstance(
        optimizer, optax.GradientTransformationExtraArgs
    )
    if extra and takes_none:
        raise TypeError(
            f"the optimizer takes gradients, state and parameters alone: drop {', '.join(extra)}"
        )


def require_state_of(optimizer: Any, params: Any, state: Any) -> None:
    """Raises ValueError if the state is not one of this optimizer and these parameters."""

    def described(tree: Any) -> tuple[str, Any]:
        return str(jax.tree.structure(tree)), shapes_of(tree)

    if described(jax.eval_shape(optimizer.init, params)) != described(state):
        raise ValueError(
            "the state is of another optimizer or of other variables: take it from"
            " fp8jax.init_update(optimizer, variables) with these two, or from their last update"
        ) from None


def check_loss(result: Any, has_aux: bool) -> Any:
    """Returns the loss in what a loss function has returned.

    Raises TypeError unless that is a scalar, or (scalar, anything) with `has_aux`.
    """
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(f"with has_aux, loss must return (scalar, anything), got {brief(result)}")
    loss = result[0] if has_aux else result
    if not isinstance(loss, int | float) and getattr(loss, "shape", None) != ():
        hint = "; set has_aux=True" if isinstance(loss, tuple) else ""
        raise TypeError(f"loss must return a scalar, got {brief(loss)}{hint}")
    return loss
