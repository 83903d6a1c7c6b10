"""Describes how a checkpoint differs from a run: in its config, or in its arrays."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

_MISSING = "(missing)"  # unlike any value, whose repr would be quoted
_MOST = 10  # differences in an error message


def config_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Lists the differences between two nested dicts.

    A tuple counts as equal to the list that JSON turns it into.

    Returns:
      Sorted lines `a.b: old -> new`, with `(missing)` on the side that lacks the key.
    """
    flat_old, flat_new = _flat(old), _flat(new)
    lines = []
    for key in sorted(flat_old.keys() | flat_new.keys()):
        before = flat_old[key] if key in flat_old else _MISSING
        after = flat_new[key] if key in flat_new else _MISSING
        if before != after:
            lines.append(f"{key}: {before} -> {after}")
    return lines


def changed_values(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """Returns dotted key -> repr of the value in `new`, for each key whose value differs."""
    flat_old, flat_new = _flat(old), _flat(new)
    return {k: v for k, v in flat_new.items() if k not in flat_old or flat_old[k] != v}


def listed(differences: Sequence[str]) -> str:
    """Returns the first differences on one line, and how many more there are."""
    more = f"; and {len(differences) - _MOST} more" if len(differences) > _MOST else ""
    return "; ".join(differences[:_MOST]) + more


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Returns dotted key -> repr of the leaf. An empty dict is a leaf."""
    flat: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = repr(_as_json(value))
    return flat


def _as_json(value: Any) -> Any:
    """Returns `value` with tuples as lists."""
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    return value


def tree_structure(tree: Any) -> dict[str, str]:
    """Returns the dtype and shape of each leaf by its path: {"params/w": "float32[2,3]"}.

    Raises:
      TypeError: the tree is a bare leaf, or a leaf is not an array.
    """
    structure = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if not keys:
            raise TypeError(f"Orbax cannot save a bare leaf, put it into a dict: {leaf!r}")
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise TypeError(f"{path} is not an array: {leaf!r}")
        structure[path] = f"{leaf.dtype}{list(leaf.shape)}".replace(" ", "")
    return structure


def abstract_leaf(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape, dtype and sharding of an array.

    Raises:
      ValueError: the leaf has no sharding.
    """
    if getattr(leaf, "sharding", None) is None:
        raise ValueError(f"{leaf!r} has no sharding: set one, so that it can be restored there")
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def require_same_structure(
    path: Path, saved: Mapping[str, Mapping[str, str]], abstract: Mapping[str, Any]
) -> None:
    """Checks that a checkpoint holds the arrays of a run. (Orbax would cast other dtypes silently.)

    Args:
      path: the directory of the step, for the message.
      saved: the `tree_structure` of each saved pytree, by name.
      abstract: the run's pytrees, by name.

    Raises:
      ValueError: the arrays differ. The message lists the differences, as `listed` does.
    """
    for name, tree in abstract.items():
        if name not in saved and not tree_structure(tree):
            continue  # a part that came later, and that this run does not have
        if name not in saved:
            raise ValueError(f"{path} holds no {name!r}, only {sorted(saved)}")
        if lines := config_difference(saved[name], tree_structure(tree)):
            raise ValueError(
                f"{path}: its {name!r} differs from this run's (checkpoint -> run): {listed(lines)}"
            )
