"""Readers of the file formats: text files, JSON lines, Parquet, and TensorFlow datasets.

Each reader yields the documents of one source, always in the same order. A bad record costs that
record, or stops the program, as the answer in the `Tally` says (bad_examples.py).
pyarrow and tensorflow_datasets are imported by the readers that need them.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

from absl import logging

from fp8jax.lm.data.files import Tally, open_counted, parse_line, read_lines
from fp8jax.lm.data.urls import size_of

BLANK = "blank"  # the separator of text files that stands for blank lines

LARGEST = 2**26  # bytes of a document of a text file that is not cut
_PIECE = 2**16  # bytes of its pieces
_CHUNK = 2**20

BATCH = 1024  # records read at a time, where a format allows it


@runtime_checkable
class Reader(Protocol):
    """Reads the documents of one source.

    Attributes:
      label: names the source among others of its kind if the spec gives it no name.
      reads: settings on which the documents depend besides the contents of the files, such as the
        name of a field.
    """

    @property
    def label(self) -> str: ...

    @property
    def reads(self) -> tuple[str, ...]: ...

    def files(self) -> Sequence[Path]:
        """Returns the files, in order, on whose contents the documents depend. May be slow."""
        ...

    def documents(self, tally: Tally) -> Iterator[str]:
        """Yields the documents, always in the same order; counts what it skips in `tally`.

        Raises:
          ValueError: a file does not have the format of the kind, or a record is bad and the
            tally's answer raises; the message names the file, and of a record its place there.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A source that a run reads.

    Attributes:
      name: its name in reports and metrics.
      kind: its key in `SOURCES` (lm/sources.py).
      weight: its weight, or None if no source has one.
      reader: reads its documents.
    """

    name: str
    kind: str
    weight: Fraction | None
    reader: Reader


def _documents(file: BinaryIO, separator: str) -> Iterator[tuple[bytes, bool]]:
    """Yields the parts of a file between separators, and whether each is cut from a longer one.

    Parts of more than `LARGEST` bytes are cut, so that they need not fit into memory.
    """
    between = separator.encode("utf-8")
    rest, cutting = b"", False
    while chunk := file.read(_CHUNK):
        rest += chunk
        *whole, rest = rest.split(between) if between else [rest]
        for part in whole:
            yield from _cut(part) if cutting else [(part, False)]
            cutting = False
        if len(rest) > LARGEST:
            cutting = True
            *pieces, (rest, _) = _cut(rest)
            yield from pieces
    yield from _cut(rest) if cutting else [(rest, False)]


def _paragraphs(file: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """Yields what stands between blank lines, as `_documents` does."""
    lines: list[bytes] = []
    size, cutting, begins = 0, False, True
    while line := file.readline(_CHUNK):
        whole, begins = begins and line.endswith(b"\n"), line.endswith(b"\n")
        if whole and not line.decode("utf-8", "replace").strip():
            if lines:
                yield from _cut(b"".join(lines)) if cutting else [(b"".join(lines), False)]
            lines, size, cutting = [], 0, False
            continue
        lines.append(line)
        size += len(line)
        if size > LARGEST:
            cutting = True
            *pieces, (rest, _) = _cut(b"".join(lines))
            yield from pieces
            lines, size = [rest], len(rest)
    if lines:
        yield from _cut(b"".join(lines)) if cutting else [(b"".join(lines), False)]


def _cut(text: bytes) -> Iterator[tuple[bytes, bool]]:
    """Yields pieces of a text, of at most `_PIECE` bytes, that end lines, words or characters."""
    begin = 0
    while len(text) - begin > _PIECE:
        half, end = begin + _PIECE // 2, begin + _PIECE
        end = (text.rfind(b"\n", half, end) + 1) or (text.rfind(b" ", half, end) + 1) or end
        while end > half and text[end] & 0xC0 == 0x80:  # within a character
            end -= 1
        yield text[begin:end], True
        begin = end
    yield text[begin:], True


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextFiles:
    """Each file is a document, or has several; line ends are not changed.

    Between two documents of a file is `separator`. "blank" stands for one or more blank lines, ""
    for none: a file is a document. Documents that are not UTF-8 are bad records, and those of more
    than `LARGEST` bytes are cut.
    """

    label: str
    paths: tuple[Path, ...]
    separator: str = ""

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.separator,) if self.separator else ()

    def files(self) -> Sequence[Path]:
        return self.paths

    def documents(self, tally: Tally) -> Iterator[str]:
        for path in self.paths:
            with open_counted(path, tally) as file:
                if self.separator == BLANK:
                    parts = _paragraphs(file)
                else:
                    parts = _documents(file, self.separator)
                for number, (part, is_cut) in enumerate(parts, start=1):
                    try:
                        text = part.decode("utf-8")
                    except UnicodeDecodeError as error:
                        if self.separator or is_cut:
                            tally.skip_record(path, f", document {number}: not UTF-8: {error}")
                        else:
                            tally.skip_file(path, f": it is not UTF-8: {error}")
                        continue
                    if is_cut and number == 1:
                        logging.warning("%s: documents over %d MiB are cut", path, LARGEST >> 20)
                    yield text


@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonLines:
    """Each line is a JSON object whose string at `field` is a document; blank lines are skipped.

    A line without such a string is a bad record.
    """

    label: str
    paths: tuple[Path, ...]
    field: str

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.field,)

    def files(self) -> Sequence[Path]:
        return self.paths

    def documents(self, tally: Tally) -> Iterator[str]:
        for path in self.paths:
            for number, line in read_lines(path, tally):
                try:
                    text = self._text(line)
                except ValueError as error:
                    tally.skip_record(path, f", line {number}: {error}")
                else:
                    yield text

    def _once(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Returns a JSON object; ValueError if the field is there twice: one would be lost."""
        made = dict(pairs)
        if len(made) < len(pairs) and [name for name, _ in pairs].count(self.field) > 1:
            raise ValueError(f"{self.field!r} comes twice")
        return made

    def _text(self, line: bytes) -> str:
        """Returns the document of a line; ValueError if it has none."""
        try:
            text = parse_line(line, object_pairs_hook=self._once)[self.field]
            text.encode("utf-8")  # JSON can encode lone surrogates, which are not text
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(
                f'expected {{"{self.field}": "…"}}, got '
                f"{line[:80]!r} ({type(error).__name__}: {error})"
            ) from error
        return text


def _decoded(
    records: Iterable[tuple[bytes | None, int]], tally: Tally, path: Path | None, what: str
) -> Iterator[str]:
    """Yields the records as text; those that are null or not UTF-8 are bad.

    Args:
      records: with their numbers, from 1.
      what: begins the place of a record within `path`, such as ", row".
    """
    for record, number in records:
        try:
            text = None if record is None else record.decode("utf-8")
            error = "it is null"
        except UnicodeDecodeError as found:
            text, error = None, f"it is not UTF-8: {found}"
        if text is None:
            tally.skip_record(path, f"{what} {number}: {error}")
        else:
            yield text


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParquetFiles:
    """Each row is a document, the string in `column`. Nulls are bad records."""

    label: str
    paths: tuple[Path, ...]
    column: str

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.column,)

    def files(self) -> Sequence[Path]:
        return self.paths

    def documents(self, tally: Tally) -> Iterator[str]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        for path in self.paths:
            size, before, rows = size_of(path), tally.bytes_read, 0
            with path.open("rb") as file:
                try:
                    table = pq.ParquetFile(file)
                    self._require_text(path, table.schema_arrow)
                    for batch in table.iter_batches(BATCH, columns=[self.column]):
                        first, rows = rows + 1, rows + len(batch)
                        tally.bytes_read = before + size * rows // table.metadata.num_rows
                        # Read as bytes, since Arrow does not check that its strings are UTF-8.
                        values = batch.column(0)
                        if pa.types.is_dictionary(values.type):
                            values = values.dictionary_decode()
                        texts = values.cast(pa.large_binary()).to_pylist()
                        yield from _decoded(zip(texts, count(first)), tally, path, ", row")
                except (OSError, pa.ArrowInvalid) as error:
                    raise ValueError(f"{path}: damaged or not Parquet: {error}") from error
            tally.bytes_read = before + size

    def _require_text(self, path: Path, schema: Any) -> None:
        """Raises ValueError unless the Arrow schema has the column and its type is string."""
        import pyarrow as pa

        types = {field.name: field.type for field in schema}
        columns = ", ".join(f"{field.name} ({field.type})" for field in schema)
        if self.column not in types:
            raise ValueError(f"{path}: no column {self.column!r}. There are: {columns}")
        if [field.name for field in schema].count(self.column) > 1:
            raise ValueError(f"{path}: column {self.column!r} comes twice. There are: {columns}")
        column_type = types[self.column]
        is_dictionary = pa.types.is_dictionary(column_type)
        value = column_type.value_type if is_dictionary else column_type
        kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
        if not any(is_kind(value) for is_kind in kinds):
            raise ValueError(
                f"{path}: column {self.column!r} is {column_type}, not string. There are: {columns}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorFlowDataset:
    """Each example is a document, its text feature `field`; those not UTF-8 are bad.

    `split` is a split of the dataset, or a slice such as train[:10%]. "" reads all splits in the
    order of their names; as for every source, a document's own text decides whether it trains or
    validates. The dataset must have been prepared before: preparing it may need TensorFlow, which
    must not be loaded into a process that trains.
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
        # Decode only this feature, since others may be images. PartialDecoding of tfds would need
        # TensorFlow.
        parser = tfds.features.FeaturesDict({self.field: builder.info.features[self.field]})
        raw = tfds.decode.DeserializeMethod.RAW_BYTES
        splits = self._splits(builder)
        examples = [builder.as_data_source(split, deserialize_method=raw) for split in splits]
        total, done = sum(map(len, examples)), 0
        for source in examples:
            for first in range(0, len(source), BATCH):
                batch = source.__getitems__(range(first, min(first + BATCH, len(source))))
                texts = [parser.deserialize_example_np(example)[self.field] for example in batch]
                numbered = zip(texts, count(done + 1))
                yield from _decoded(numbered, tally, None, f"{self.label}, example")
                done += len(batch)
                tally.bytes_read = before + size * done // total

    def _splits(self, builder: Any) -> list[str]:
        return [self.split] if self.split else sorted(builder.info.splits)

    def _builder(self) -> Any:
        """Returns the tfds builder of the dataset; checks that the dataset can be read.

        Raises:
          ValueError: the dataset is unknown, not prepared, or prepared in a format that only
            TensorFlow reads; or it has no text feature `field`.
        """
        import tensorflow_datasets as tfds  # slow to import, and other sources do not need it

        try:
            builder = tfds.builder(self.name)
        except tfds.core.registered.DatasetNotFoundError as error:
            # The message of tfds lists some hundred names.
            folders = ", ".join(map(str, tfds.core.utils.file_utils.list_data_dirs()))
            raise ValueError(
                f"unknown TensorFlow dataset {self.name!r}: tensorflow_datasets does not have it, "
                f"and no prepared one lies in {folders} (TFDS_DATA_DIR)"
            ) from error
        except AssertionError as error:  # the version does not exist
            raise ValueError(str(error)) from error
        if not builder.is_prepared():
            raise ValueError(
                f"{self.name} was not prepared in {builder.data_path}: run `tfds build "
                f"{self.name} --file_format=array_record`, or set TFDS_DATA_DIR to where it is"
            )
        self._require_text(builder)
        self._require_readable(builder)
        return builder

    def _require_text(self, builder: Any) -> None:
        """Raises ValueError unless the dataset has the feature and it is a text."""
        features = dict(builder.info.features)
        shown = ", ".join(f"{name} ({type(f).__name__})" for name, f in features.items())
        if self.field not in features:
            raise ValueError(f"{self.name}: no feature {self.field!r}. There are: {shown}")
        feature = features[self.field]
        if feature.shape != () or feature.np_dtype not in (object, str, bytes):
            raise ValueError(
                f"{self.name}: feature {self.field!r} is not a text. There are: {shown}"
            )

    def _require_readable(self, builder: Any) -> None:
        """Raises ValueError if the files of the dataset can only be read with TensorFlow."""
        try:
            for split in self._splits(builder):
                builder.as_data_source(split)
        except NotImplementedError as error:
            raise ValueError(
                f"{self.name} was prepared in {builder.data_path} as "
                f"{builder.info.file_format.value}, which cannot be read without TensorFlow: "
                "prepare it with file_format=array_record, in another folder or after deleting "
                "this one"
            ) from error
