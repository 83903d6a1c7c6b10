"""Looks up objects by name. The error for an unknown name suggests similar names."""

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")


class UnknownNameError(KeyError, ValueError):
    """A name that a `Table` does not have."""

    def __str__(self) -> str:  # KeyError's own would put quotes around the message
        return str(self.args[0])


class Table(dict[str, T]):
    """A dict of named objects, whose error for an unknown name suggests similar names."""

    def __init__(self, kind: str, entries: Iterable[tuple[str, T]] | Mapping[str, T]):
        super().__init__(entries)
        self.kind = kind

    def __missing__(self, name: str) -> T:
        raise UnknownNameError(str(unknown(self.kind, name, self)))


def lookup(kind: str, name: str, table: Mapping[str, T]) -> T:
    """Returns `table[name]`.

    Args:
      kind: what `name` should be the name of, such as "mesh"; only for the error message.

    Raises:
      ValueError: the table has no such name. The message suggests similar names and lists all.
    """
    if not isinstance(name, str) or name not in table:
        raise unknown(kind, name, table)
    return table[name]


def unknown(kind: str, name: object, known: Iterable[object]) -> ValueError:
    """Returns the error for an unknown name. It suggests similar names and lists all known ones."""
    names = [str(k) for k in known]
    similar = difflib.get_close_matches(str(name), names, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(map(repr, similar))}?" if similar else "."
    return ValueError(f"unknown {kind} {brief(name)}{hint} There are: {', '.join(names)}")


def brief(value: object) -> str:
    """Returns a value on one line of at most 60 characters, for error messages.

    Of an array it shows dtype and shape alone: its values may be on another host.
    """
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape and hasattr(value, "dtype"):
        return f"{value.dtype}{list(shape)}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
