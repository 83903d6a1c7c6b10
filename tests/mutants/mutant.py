"""What a mutant is, where its symbol stands in the library, and how it is planted.

A mutant names a symbol, not a file, so that moving files breaks none: `Recipe._check_accumulation`
is a method, `self_seeded` a function at the top of some file. Where several files define the same
name, the stem of the file comes before it: `jsonl:_parse`.
"""

import ast
import functools
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Of the mutants of the list. `past` and `planted` are faults that once were, and the ten of
# docs/results/test_suite.md.
KINDS = (
    "sign",
    "comparison",
    "off by one",
    "dropped call",
    "swapped arguments",
    "dtype",
    "axis",
    "key",
)
LIBRARY = "fp8jax"

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
      symbol: the function, method or class that it changes; unique in the library.
      kind: one of KINDS, `planted` or `past`.
      before: a text that occurs once in the symbol's source.
      after: what takes its place.
      why: what the fault was, for `planted` and `past`.
    """

    symbol: str
    kind: str
    before: str
    after: str
    why: str = ""

    @property
    def name(self) -> str:
        """Symbol, kind and the changed texts: equal names are equal mutants."""
        return f"{self.symbol} | {self.kind} | {self.before} -> {self.after}"


@dataclass(frozen=True)
class Place:
    """Where a symbol stands: a file, relative to the root, and its lines from `first` to `last`."""

    path: str
    first: int
    last: int


class StaleMutant(ValueError):
    """A mutant that no longer fits the library."""


@functools.cache
def _sources(root: Path) -> dict[str, str]:
    """path -> text of each file of the library."""
    files = sorted((root / LIBRARY).rglob("*.py"))
    return {path.relative_to(root).as_posix(): path.read_text("utf-8") for path in files}


@functools.cache
def _tree(root: Path, path: str) -> ast.Module:
    return ast.parse(_sources(root)[path])


def _definitions(node: ast.AST, names: list[str]) -> Iterator[Definition]:
    """The definitions of a qualified name below a module or a class."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition) and child.name == names[0]:
            if len(names) == 1:
                yield child
            else:
                yield from _definitions(child, names[1:])


@functools.cache
def places(root: Path, symbol: str) -> tuple[Place, ...]:
    """All places that define a symbol."""
    stem, _, name = symbol.rpartition(":")
    names = name.split(".")
    spelled = re.compile(
        rf"^[ \t]*(?:async +def|def|class) +{re.escape(names[-1])}\b", re.MULTILINE
    )
    found = []
    for path, text in _sources(root).items():
        if (stem and Path(path).stem != stem) or not spelled.search(text):
            continue
        for node in _definitions(_tree(root, path), names):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            assert node.end_lineno is not None
            found.append(Place(path, first, node.end_lineno))
    return tuple(found)


def place(root: Path, mutant: Mutant) -> Place:
    """The one place of a mutant's symbol; raises StaleMutant if there is none or another."""
    found = places(root, mutant.symbol)
    if len(found) != 1:
        where = ", ".join(f"{each.path}:{each.first}" for each in found) or "nowhere"
        raise StaleMutant(
            f"mutant {mutant.name!r}: {mutant.symbol} is defined {where}; name a symbol that is "
            "defined once, where needed with the stem of its file before it, as in jsonl:_parse"
        )
    return found[0]


def planted(root: Path, mutant: Mutant) -> tuple[str, str]:
    """The file that a mutant changes, relative to the root, and its text with the fault."""
    at = place(root, mutant)
    lines = _sources(root)[at.path].splitlines(keepends=True)
    before = "".join(lines[at.first - 1 : at.last])
    count = before.count(mutant.before)
    if count != 1:
        raise StaleMutant(
            f"mutant {mutant.name!r}: {mutant.before!r} occurs {count} times in {mutant.symbol} "
            f"({at.path}:{at.first}), not once"
        )
    after = before.replace(mutant.before, mutant.after)
    return at.path, "".join([*lines[: at.first - 1], after, *lines[at.last :]])


def check(root: Path, mutant: Mutant) -> None:
    """Raises StaleMutant for a mutant that does not fit, does not compile, or changes nothing."""
    path, text = planted(root, mutant)
    at = place(root, mutant)
    lines = _sources(root)[path].splitlines(keepends=True)
    shift = len(text.splitlines()) - len(lines)
    before = textwrap.dedent("".join(lines[at.first - 1 : at.last]))
    after = textwrap.dedent("".join(text.splitlines(keepends=True)[at.first - 1 : at.last + shift]))
    try:
        compile(after, path, "exec")
    except SyntaxError as error:
        raise StaleMutant(f"mutant {mutant.name!r} does not compile: {error}") from error
    if ast.dump(ast.parse(before)) == ast.dump(ast.parse(after)):
        raise StaleMutant(f"mutant {mutant.name!r} changes nothing")
