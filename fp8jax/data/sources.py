"""A spec string in, documents out: where text comes from, and in which file formats.

The config key `data` names sources, separated by commas, each as `[NAME=][WEIGHT*]KIND[:ARGUMENT]`:

    books=0.7*jsonl:/data/books-*.jsonl.zst#body,code=0.3*python_stdlib

NAME appears in reports and metrics; without one a source is called by its kind and the stem of its
argument (`jsonl-books`). WEIGHT is the source's share of the training rows, relative to the others
(loader.py); either all sources have one or none. The kinds are the keys of `SOURCES`:

    python_stdlib               the .py files of the running Python's standard library
    text:GLOB                   a file is a document
    jsonl:GLOB[#FIELD]          a line {"FIELD": "…"} is a document
    parquet:GLOB[#COLUMN]       a row is a document
    tfds:NAME[@SPLIT][#FIELD]   an example of a TensorFlow dataset is a document

FIELD and COLUMN are `text` unless named. Files of `text` and `jsonl` that end in .gz or .zst are
decompressed as they are read. What follows the last # is a field if it looks like a name: letters,
digits, _, - and ., of which the first is a letter or _.

A kind is one function, from the ARGUMENT ("" without one) to a `Reader`. It is called where the
config is read, so it may look for files but must not read any.
"""

import dataclasses
import glob
import os
import re
import sysconfig
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

from fp8jax.data.readers import (
    COMPRESSIONS,
    JsonLines,
    ParquetFiles,
    Reader,
    TensorFlowDataset,
    TextFiles,
)
from fp8jax.lookup import lookup

_FIELD = re.compile(r"(?P<rest>.*)#(?P<field>[A-Za-z_][\w.-]*)", re.DOTALL)


# The kinds.


def _found(pattern: str) -> tuple[Path, ...]:
    """The files that a glob pattern (** allowed) matches, by name."""
    matches = {Path(name) for name in glob.glob(os.path.expanduser(pattern), recursive=True)}
    paths = sorted((path for path in matches if path.is_file()), key=Path.as_posix)
    if not paths:
        raise ValueError(f"no file matches {pattern!r}")
    return tuple(paths)


def _stem(pattern: str) -> str:
    """books-*.jsonl.zst -> books-*"""
    path = Path(pattern)
    return path.with_suffix("").stem if path.suffix in COMPRESSIONS else path.stem


def _with_field(argument: str) -> tuple[str, str]:
    """The argument without its #FIELD, and the field."""
    match = _FIELD.fullmatch(argument)
    return (match["rest"], match["field"]) if match else (argument, "text")


def _python_stdlib(argument: str) -> Reader:
    """The .py files of the running Python's standard library, without its tests."""
    if argument:
        raise ValueError(f"source python_stdlib takes no argument, got {argument!r}")
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = [name for name in folders if name not in skipped]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return TextFiles(label="", paths=tuple(sorted(files, key=Path.as_posix)))


def _text(argument: str) -> Reader:
    return TextFiles(label=_stem(argument), paths=_found(argument))


def _jsonl(argument: str) -> Reader:
    pattern, field = _with_field(argument)
    return JsonLines(label=_stem(pattern), paths=_found(pattern), field=field)


def _parquet(argument: str) -> Reader:
    pattern, column = _with_field(argument)
    return ParquetFiles(label=_stem(pattern), paths=_found(pattern), column=column)


def _tfds(argument: str) -> Reader:
    dataset, field = _with_field(argument)
    name, at, split = dataset.partition("@")
    if not name or (at and not split):
        raise ValueError(f"expected NAME[@SPLIT][#FIELD], got {argument!r}")
    return TensorFlowDataset(name=name, split=split, field=field)


SOURCES: dict[str, Callable[[str], Reader]] = {
    "python_stdlib": _python_stdlib,
    "text": _text,
    "jsonl": _jsonl,
    "parquet": _parquet,
    "tfds": _tfds,
}


# Specs.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A source, resolved: its name in reports, its key in `SOURCES`, its reader, and its weight."""

    name: str
    kind: str
    weight: Fraction | None
    reader: Reader


def _weight(text: str, spec: str) -> Fraction:
    """The decimal, exactly: 0.7 is 7/10."""
    number = Fraction(text) if re.fullmatch(r"[0-9]+(\.[0-9]+)?|\.[0-9]+", text) else Fraction(0)
    if not number:
        raise ValueError(f"weight {text!r} in {spec!r}: expected a positive decimal such as 0.7")
    return number


def _parse_source(spec: str) -> Source:
    """One `[NAME=][WEIGHT*]KIND[:ARGUMENT]`."""
    head, _, argument = spec.partition(":")
    name, equals, weighted = head.rpartition("=")
    weight, times, kind = weighted.rpartition("*")
    resolve = lookup("source", kind, SOURCES)
    number = _weight(weight, spec) if times else None
    if equals and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise ValueError(
            f"source name {name!r} in {spec!r}: only letters, digits, '_', '-' and '.', since it "
            "names files and metrics"
        )
    try:
        reader = resolve(argument)
    except ValueError as error:
        raise ValueError(f"{error}, the argument of the source {spec!r}") from error
    if not equals:
        label = re.sub(r"[^A-Za-z0-9._-]+", "_", reader.label).strip("_.-")
        name = f"{kind}-{label}" if label else kind
    return Source(name=name, kind=kind, weight=number, reader=reader)


def parse_sources(data: str) -> list[Source]:
    """Resolves the config key `data`: see the module's docstring. Looks for files, reads none.

    Raises:
      ValueError: an unknown kind, a glob that matches nothing, a name twice or not fit for a file,
        a weight that is no positive decimal, or weights for some of the sources only.
    """
    sources = [_parse_source(spec.strip()) for spec in data.split(",")]
    names = [source.name for source in sources]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two sources are called {twice} in {data!r}: use NAME=text:GLOB")
    bare = [source.name for source in sources if source.weight is None]
    if bare and len(bare) < len(sources):
        weighted = [name for name in names if name not in bare]
        raise ValueError(
            f"{', '.join(weighted)} with a weight and {', '.join(bare)} without in {data!r}: give "
            "one to all sources, as in NAME=0.7*text:GLOB, or to none"
        )
    return sources
