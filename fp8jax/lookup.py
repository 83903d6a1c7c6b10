"""Looks up objects by name. The error for an unknown name suggests similar names."""

import difflib
import importlib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

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


def own_object(kind: str, reference: str) -> Any:
    """Returns what MODULE:OBJECT names: an object of the user's own code, which is imported.

    Args:
      kind: what it should be, such as "optimizer"; only for the error message.
      reference: such as "my_recipes:tile64"; the module is found as `import` finds it.

    Raises:
      ValueError: there is no such module, or it has no such object; similar names are suggested.
    """
    module_name, _, name = reference.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and lacks one that it imports
        raise ValueError(
            f"{kind} {reference!r}: Python finds no module {error.name!r}. Start the command in the"
            " folder that has it, or install it"
        ) from None
    if not hasattr(module, name):
        raise unknown(f"{kind} of module {module_name!r}:", name, public_names(module))
    return getattr(module, name)


def public_names(module: Any) -> list[str]:
    """Returns the names of a module without an underscore."""
    return [name for name in vars(module) if not name.startswith("_")]


def unknown(kind: str, name: object, known: Iterable[object]) -> ValueError:
    """Returns the error for an unknown name. It suggests similar names and lists all known ones.

    Those that the name begins come first, in their own order: for 'fp8' fp8_delayed, not mxfp8.
    """
    names = [str(k) for k in known]
    begun = [n for n in names if len(str(name)) > 2 and n.startswith(str(name))]
    close = difflib.get_close_matches(str(name), names, n=3, cutoff=0.5)
    similar = list(dict.fromkeys([*begun, *close]))[:3]
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
