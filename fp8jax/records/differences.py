"""TODO docstring."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax


def config_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Says where two nested dicts differ.

    Returns:
      Sorted lines `a.b: old -> new`, with `(missing)` for a key that only one side has. A tuple
      equals the list that JSON makes of it.
    """
    flat_old, flat_new = _flat(old), _flat(new)
    return [
        f"{key}: {flat_old[key] if key in flat_old else '(missing)'}"
        f" -> {flat_new[key] if key in flat_new else '(missing)'}"
        for key in sorted(flat_old.keys() | flat_new.keys())
        if key not in flat_old or key not in flat_new or flat_old[key] != flat_new[key]
    ]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Each leaf's repr by its dotted key; an empty dict is a leaf."""
    flat: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = repr(_as_json(value))
    return flat


def _as_json(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    return value


def tree_structure(tree: Any) -> dict[str, str]:
    """Each leaf's path with its dtype and shape, e.g. {"params/w": "float32[2,3]"}."""
    structure = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if not keys:
            raise TypeError(f"Orbax takes no bare leaf: put it into a dict: {leaf!r}")
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise TypeError(f"{path} is no array: {leaf!r}")
        structure[path] = f"{leaf.dtype}{list(leaf.shape)}".replace(" ", "")
    return structure


def abstract_leaf(leaf: Any) -> jax.ShapeDtypeStruct:
    if getattr(leaf, "sharding", None) is None:
        raise ValueError(f"{leaf!r} has no sharding: say where it is to go")
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def require_same_structure(
    path: Path, saved: Mapping[str, Mapping[str, str]], abstract: Mapping[str, Any]
) -> None:
    """Raises a ValueError that says what differs; Orbax would cast dtypes in silence."""
    for name, tree in abstract.items():
        if name not in saved:
            raise ValueError(f"{path} holds no {name!r}, only {sorted(saved)}")
        lines = config_difference(saved[name], tree_structure(tree))
        if lines:
            more = [f"… and {len(lines) - 20} more"] if len(lines) > 20 else []
            raise ValueError(
                f"{path} holds another {name!r} than this run's (checkpoint -> run):\n  "
                + "\n  ".join(lines[:20] + more)
            )
