"""Readers of the file formats: text files, JSON lines, Parquet, and TensorFlow datasets.

Each reader yields the documents of one source, always in the same order, and counts what it skips.
pyarrow and tensorflow_datasets are imported by the readers that need them.
"""

import contextlib
import dataclasses
import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

from absl import logging

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


BLANK = "blank"  # the separator of text files that stands for blank lines
_BLANK_LINES = re.compile(r"(?<=\n)(?:[^\S\n]*\n)+")

BATCH = 1024  # records read at a time, where a format allows it


@dataclasses.dataclass(kw_only=True)
class Tally:
    """Counts of what a reader skipped and read; the reader updates them while it reads.

    Attributes:
      not_utf8: files skipped because they are not UTF-8.
      no_text: records skipped because they are null, or bytes that are not UTF-8.
      too_short: documents skipped by `read_documents` because they are too short.
      bytes_read: bytes read from the files, before decompression; for showing progress.
      piece_size: characters of the pieces into which `read_documents` cut documents; 0 if it did
        not.
    """

    not_utf8: int = 0
    no_text: int = 0
    too_short: int = 0
    bytes_read: int = 0
    piece_size: int = 0


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
          ValueError: a file does not have the format of the kind; the message names the file.
        """
        ...


class _CountedFile(io.FileIO):
    """A file that counts the bytes read from it in a `Tally`."""

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
def open_counted(path: Path, tally: Tally) -> Iterator[BinaryIO]:
    """Opens a file, decompressed if its name ends in one of `COMPRESSIONS`.

    Raises:
      ValueError: the file is not compressed in the way that its name says, or damaged.
    """
    with io.BufferedReader(_CountedFile(path, tally)) as file:
        if path.suffix not in COMPRESSIONS:
            yield file
            return
        import pyarrow as pa

        compression = COMPRESSIONS[path.suffix]
        try:
            # pyarrow reads an empty file as an empty text, but no compressor writes an empty file.
            if not path.stat().st_size:
                raise OSError("it is empty")
            with io.BufferedReader(pa.CompressedInputStream(file, compression)) as stream:
                yield stream
        except OSError as error:
            raise ValueError(f"{path}: damaged or not {compression} data: {error}") from error


def _is_utf8(path: Path) -> bool:
    """Whether the whole file is UTF-8. Reads it in pieces, since it may not fit into memory."""
    with open_counted(path, Tally()) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        try:
            while text.read(2**20):
                pass
        except UnicodeDecodeError:
            return False
        finally:
            text.detach()  # so that `text` does not close the file, which open_counted does
    return True


def _utf8_files(paths: Sequence[Path], tally: Tally) -> Iterator[tuple[Path, BinaryIO]]:
    """Opens the files one after the other; logs, counts and skips those that are not UTF-8."""
    for path in paths:
        if _is_utf8(path):
            with open_counted(path, tally) as file:
                yield path, file
        else:
            logging.warning("skipping %s: it is not UTF-8", path)
            tally.not_utf8 += 1
            tally.bytes_read += path.stat().st_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextFiles:
    """Each file is a document, or has several; line ends are not changed.

    Between two documents of a file is `separator`. "blank" stands for one or more blank lines, ""
    for none: a file is a document.
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
        for _, file in _utf8_files(self.paths, tally):
            text = file.read().decode("utf-8")
            if not self.separator:
                yield text
            elif self.separator == BLANK:
                yield from _BLANK_LINES.split(text)
            else:
                yield from text.split(self.separator)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonLines:
    """Each line is a JSON object whose string at `field` is a document; blank lines are skipped.

    A line without such a string is an error.
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
        # Iterating over bytes splits at \n only; U+2028 and \r may be part of a text.
        for path, file in _utf8_files(self.paths, tally):
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield self._text(line, f"{path}, line {number}")

    def _text(self, line: bytes, place: str) -> str:
        """Returns the document of a line; `place` names the line in errors."""
        try:
            text = json.loads(line.decode("utf-8"))[self.field]
            text.encode("utf-8")  # JSON can encode lone surrogates, which are not text
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(
                f'{place}: expected {{"{self.field}": "…"}}, got '
                f"{line[:80]!r} ({type(error).__name__}: {error})"
            ) from error
        return text


def _decoded(records: Sequence[bytes | None], tally: Tally) -> Iterator[str]:
    """Yields the records as text; counts and skips those that are null or not UTF-8."""
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
    """Each row is a document, the string in `column`. Nulls are skipped and counted."""

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
            size, before, rows = path.stat().st_size, tally.bytes_read, 0
            with path.open("rb") as file:
                try:
                    table = pq.ParquetFile(file)
                    self._require_text(path, table.schema_arrow)
                    for batch in table.iter_batches(BATCH, columns=[self.column]):
                        rows += len(batch)
                        tally.bytes_read = before + size * rows // table.metadata.num_rows
                        # Read as bytes, since Arrow does not check that its strings are UTF-8.
                        values = batch.column(0)
                        if pa.types.is_dictionary(values.type):
                            values = values.dictionary_decode()
                        yield from _decoded(values.cast(pa.large_binary()).to_pylist(), tally)
                except (OSError, pa.ArrowInvalid) as error:
                    raise ValueError(f"{path}: damaged or not Parquet: {error}") from error
            tally.bytes_read = before + size

    def _require_text(self, path: Path, schema: Any) -> None:
        """Raises ValueError unless the Arrow schema has the column and its type is string."""
        import pyarrow as pa

        types = {field.name: field.type for field in schema}
        columns = ", ".join(f"{name} ({kind})" for name, kind in types.items())
        if self.column not in types:
            raise ValueError(f"{path}: no column {self.column!r}. There are: {columns}")
        column_type = types[self.column]
        is_dictionary = pa.types.is_dictionary(column_type)
        value = column_type.value_type if is_dictionary else column_type
        if not (pa.types.is_string(value) or pa.types.is_large_string(value)):
            raise ValueError(
                f"{path}: column {self.column!r} is {column_type}, not string. There are: {columns}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorFlowDataset:
    """Each example is a document, its text feature `field`; those not UTF-8 are counted.

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
                yield from _decoded(texts, tally)
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
