"""Names to objects, once, at the door: with an error that names the near ones that exist."""

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")


def lookup(kind: str, name: str, table: Mapping[str, T]) -> T:
    """`table[name]`; raises ValueError for an unknown name, saying of what `kind` it should be."""
    if name not in table:
        raise unknown(kind, name, table)
    return table[name]


def unknown(kind: str, name: object, known: Iterable[object]) -> ValueError:
    """The error for a name that does not exist: names the near ones, and all there are."""
    names = [str(k) for k in known]
    near = difflib.get_close_matches(str(name), names, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
    return ValueError(f"unknown {kind} {name!r}{hint} There are: {', '.join(names)}")
