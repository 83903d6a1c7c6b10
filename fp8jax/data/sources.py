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

import contextlib
import dataclasses
import glob
import io
import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

import pyarrow as pa
import pyarrow.parquet as pq
from absl import logging

from fp8jax.lookup import lookup

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


BATCH = 1024  # records that are read at a time where a format allows it


_FIELD = re.compile(r"(?P<rest>.*)#(?P<field>[A-Za-z_][\w.-]*)", re.DOTALL)


@dataclasses.dataclass(kw_only=True)
class Tally:
    """What reading a source leaves beside its documents; readers count in it as they go.

    Attributes:
      not_utf8: files that were skipped since they are not UTF-8.
      no_text: records that were skipped: null, or bytes that are not UTF-8.
      too_short: documents that were skipped by who asked for them.
      bytes_read: of the files, compressed as they are; for showing progress.
    """

    not_utf8: int = 0
    no_text: int = 0
    too_short: int = 0
    bytes_read: int = 0


@runtime_checkable
class Reader(Protocol):
    """How to come by the documents of one source.

    Attributes:
      label: what distinguishes the source from others of its kind where it was given no name.
      reads: what decides the documents beside the contents of the files, such as a field's name.
    """

    @property
    def label(self) -> str: ...

    @property
    def reads(self) -> tuple[str, ...]: ...

    def files(self) -> Sequence[Path]:
        """The files, in order, whose contents decide the documents. May be slow."""
        ...

    def documents(self, tally: Tally) -> Iterator[str]:
        """The documents, always in the same order; what is skipped is counted in `tally`.

        Raises:
          ValueError: the files are not what the kind expects; the message names the file.
        """
        ...


# Files of bytes, which may be compressed.


class _CountedFile(io.FileIO):
    """Counts what is read of a file while it is being read."""

    def __init__(self, path: Path, tally: Tally):
        super().__init__(path, "rb")
        self._tally = tally

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        self._tally.bytes_read += count or 0
        return count

    def readall(self) -> bytes:
        content = super().readall()
        self._tally.bytes_read += len(content)
        return content


@contextlib.contextmanager
def _opened(path: Path, tally: Tally) -> Iterator[BinaryIO]:
    """The file's bytes, decompressed."""
    with io.BufferedReader(_CountedFile(path, tally)) as file:
        if path.suffix not in COMPRESSIONS:
            yield file
            return
        compression = COMPRESSIONS[path.suffix]
        try:
            # pyarrow takes an empty file for an empty text; no compressor writes one.
            if not path.stat().st_size:
                raise OSError("it is empty")
            with io.BufferedReader(pa.CompressedInputStream(file, compression)) as stream:
                yield stream
        except OSError as error:
            raise ValueError(f"{path}: damaged or not {compression} data: {error}") from error


def _is_utf8(path: Path) -> bool:
    """Whether the whole file decodes, read in pieces: a file need not fit into memory."""
    with _opened(path, Tally()) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        try:
            while text.read(2**20):
                pass
        except UnicodeDecodeError:
            return False
        finally:
            text.detach()  # the file is closed by who opened it
    return True


def _utf8_files(paths: Sequence[Path], tally: Tally) -> Iterator[tuple[Path, BinaryIO]]:
    """The files, open, without those that are not UTF-8: they are named and counted."""
    for path in paths:
        if _is_utf8(path):
            with _opened(path, tally) as file:
                yield path, file
        else:
            logging.warning("skipping %s: it is not UTF-8", path)
            tally.not_utf8 += 1
            tally.bytes_read += path.stat().st_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextFiles:
    """A file is one document; line ends stay as they are."""

    label: str
    paths: tuple[Path, ...]
    reads: tuple[str, ...] = ()

    def files(self) -> Sequence[Path]:
        return self.paths

    def documents(self, tally: Tally) -> Iterator[str]:
        for _, file in _utf8_files(self.paths, tally):
            yield file.read().decode("utf-8")


@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonLines:
    """A line is one document, the string at `field`. A line without one is an error."""

    label: str
    paths: tuple[Path, ...]
    field: str

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.field,)

    def files(self) -> Sequence[Path]:
        return self.paths

    def documents(self, tally: Tally) -> Iterator[str]:
        # Lines end with \n only: U+2028 and \r may be part of a text.
        for path, file in _utf8_files(self.paths, tally):
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield self._text(line, f"{path}, line {number}")

    def _text(self, line: bytes, place: str) -> str:
        try:
            text = json.loads(line.decode("utf-8"))[self.field]
            text.encode("utf-8")  # JSON can spell lone surrogates, which are not text
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(
                f'{place}: expected {{"{self.field}": "…"}}, got '
                f"{line[:80]!r} ({type(error).__name__}: {error})"
            ) from error
        return text


# Records: Parquet and TensorFlow datasets.


def _decoded(records: Sequence[bytes | None], tally: Tally) -> Iterator[str]:
    """The texts of records; those that are null or not UTF-8 are counted instead."""
    for record in records:
        try:
            text = None if record is None else record.decode("utf-8")
        except UnicodeDecodeError:
            text = None
        if text is None:
            tally.no_text += 1
        else:
            yield text


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParquetFiles:
    """A row is one document, the string in `column`. Nulls are skipped and counted."""

    label: str
    paths: tuple[Path, ...]
    column: str

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.column,)

    def files(self) -> Sequence[Path]:
        return self.paths

    def documents(self, tally: Tally) -> Iterator[str]:
        for path in self.paths:
            size, before, rows = path.stat().st_size, tally.bytes_read, 0
            with path.open("rb") as file:
                try:
                    table = pq.ParquetFile(file)
                    self._require_text(path, table.schema_arrow)
                    for batch in table.iter_batches(BATCH, columns=[self.column]):
                        rows += len(batch)
                        tally.bytes_read = before + size * rows // table.metadata.num_rows
                        # As bytes: Arrow does not check that its strings are UTF-8.
                        values = batch.column(0)
                        if pa.types.is_dictionary(values.type):
                            values = values.dictionary_decode()
                        yield from _decoded(values.cast(pa.large_binary()).to_pylist(), tally)
                except (OSError, pa.ArrowInvalid) as error:
                    raise ValueError(f"{path}: damaged or not Parquet: {error}") from error
            tally.bytes_read = before + size

    def _require_text(self, path: Path, schema: pa.Schema) -> None:
        types = {field.name: field.type for field in schema}
        there = ", ".join(f"{name} ({kind})" for name, kind in types.items())
        if self.column not in types:
            raise ValueError(f"{path}: no column {self.column!r}. There are: {there}")
        found = types[self.column]
        value = found.value_type if pa.types.is_dictionary(found) else found
        if not (pa.types.is_string(value) or pa.types.is_large_string(value)):
            raise ValueError(
                f"{path}: column {self.column!r} is {found}, not string. There are: {there}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorFlowDataset:
    """An example is one document, the text feature `field`; those not UTF-8 are counted.

    `split` is one of tfds, slices such as train[:10%] included. "" is all of them, by name: which
    document validates is decided by its text, as everywhere. A dataset is read, never prepared:
    that may need TensorFlow, which must not come into a process that trains.
    """

    name: str
    split: str
    field: str

    @property
    def label(self) -> str:
        return f"{self.name}@{self.split}"

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.split, self.field)

    def files(self) -> Sequence[Path]:
        builder = self._builder()
        parts = [builder.info.splits[split] for split in self._splits(builder)]
        return [Path(i.filename) for part in parts for i in part.file_instructions]

    def documents(self, tally: Tally) -> Iterator[str]:
        import tensorflow_datasets as tfds

        builder = self._builder()
        before, size = tally.bytes_read, sum(path.stat().st_size for path in self.files())
        # Only this feature is decoded: others may be images. (PartialDecoding needs TensorFlow.)
        parser = tfds.features.FeaturesDict({self.field: builder.info.features[self.field]})
        raw = tfds.decode.DeserializeMethod.RAW_BYTES
        splits = self._splits(builder)
        examples = [builder.as_data_source(split, deserialize_method=raw) for split in splits]
        total, done = sum(map(len, examples)), 0
        for source in examples:
            for first in range(0, len(source), BATCH):
                batch = source.__getitems__(range(first, min(first + BATCH, len(source))))
                texts = [parser.deserialize_example_np(example)[self.field] for example in batch]
                yield from _decoded(texts, tally)
                done += len(batch)
                tally.bytes_read = before + size * done // total

    def _splits(self, builder: Any) -> list[str]:
        return [self.split] if self.split else sorted(builder.info.splits)

    def _builder(self) -> Any:
        """The tfds builder of the dataset, prepared and checked."""
        import tensorflow_datasets as tfds  # takes a while, and other sources do not need it

        try:
            builder = tfds.builder(self.name)
        except tfds.core.registered.DatasetNotFoundError as error:
            # Its own message lists some hundred names.
            folders = ", ".join(map(str, tfds.core.utils.file_utils.list_data_dirs()))
            raise ValueError(
                f"unknown TensorFlow dataset {self.name!r}: neither does tensorflow_datasets know "
                f"how to prepare it nor was it prepared in {folders} (TFDS_DATA_DIR)"
            ) from error
        except AssertionError as error:  # a version that does not exist
            raise ValueError(str(error)) from error
        if not builder.is_prepared():
            raise ValueError(
                f"{self.name} was not prepared in {builder.data_path}: run `tfds build "
                f"{self.name} --file_format=array_record`, or set TFDS_DATA_DIR to where it is"
            )
        features = dict(builder.info.features)
        there = ", ".join(f"{name} ({type(f).__name__})" for name, f in features.items())
        if self.field not in features:
            raise ValueError(f"{self.name}: no feature {self.field!r}. There are: {there}")
        feature = features[self.field]
        if feature.shape != () or feature.np_dtype not in (object, str, bytes):
            raise ValueError(f"{self.name}: feature {self.field!r} is no text. There are: {there}")
        try:
            for split in self._splits(builder):
                builder.as_data_source(split)
        except NotImplementedError as error:
            raise ValueError(
                f"{self.name} was prepared in {builder.data_path} as "
                f"{builder.info.file_format.value}, which cannot be read without TensorFlow: "
                "prepare it with file_format=array_record, in another folder or after deleting that"
            ) from error
        return builder


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
