"""TODO docstring."""

import contextlib
import dataclasses
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

import pyarrow as pa
import pyarrow.parquet as pq
from absl import logging

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


BATCH = 1024  # records that are read at a time where a format allows it


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
def open_counted(path: Path, tally: Tally) -> Iterator[BinaryIO]:
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
    with open_counted(path, Tally()) as file:
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
            with open_counted(path, tally) as file:
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
