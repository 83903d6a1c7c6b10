"""Files of other people as streams of UTF-8: decompressed, transcoded, without a byte order mark.

What a file holds decides how it is read, and its name only where the content does not tell: a gzip
file may have another name. Nothing is read as a whole, so memory does not depend on the size of a
file. Lines have a largest size.
"""

import bz2
import codecs
import contextlib
import dataclasses
import io
import json
import lzma
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from fp8jax.lm.data.urls import is_url, size_of

# Endings of names, and what they promise.
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bzip2", ".xz": "xz"}

LONGEST_LINE = 2**27  # bytes

_CHUNK = 2**18
_NAMED = 3  # bad records of a source that are remembered

_TAR, _TAR_AT = (b"ustar\0", b"ustar  \0"), 257  # what tells an archive, and where

# How files begin.
_BEGINNINGS = (
    ("gzip", re.compile(rb"\x1f\x8b\x08")),
    ("zstd", re.compile(rb"\x28\xb5\x2f\xfd")),
    ("bzip2", re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)")),
    ("xz", re.compile(rb"\xfd7zXZ\x00")),
)
_MARKS = (  # those of UTF-32 begin as those of UTF-16 do
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
BYTE_ORDER_MARKS = tuple(mark for mark, _ in _MARKS)


def refuse_record(message: str) -> None:
    """Raises ValueError."""
    raise ValueError(message)


@dataclasses.dataclass(kw_only=True)
class Tally:
    """Counts of what a reader skipped and read; the reader updates them while it reads.

    Attributes:
      answer: of `BAD_EXAMPLES`: called with what is wrong with a record, and where; it raises, or
        the record is skipped.
      not_utf8: files that are one document, skipped because they are not UTF-8.
      no_text: other records that were skipped.
      first: the first records and files that were skipped: the path, and the rest of the message.
      too_short: documents skipped by `read_documents` because they are too short.
      bytes_read: bytes read from the files, before decompression; for showing progress.
      piece_size: characters of the pieces into which `read_documents` cut documents; 0 if it did
        not.
    """

    answer: Callable[[str], None] = refuse_record
    not_utf8: int = 0
    no_text: int = 0
    first: list[tuple[Path | None, str]] = dataclasses.field(default_factory=list)
    too_short: int = 0
    bytes_read: int = 0
    piece_size: int = 0

    def skip_record(self, path: Path | None, rest: str) -> None:
        """Answers to a bad record: raises, or counts it. Its place is `path` and begins `rest`."""
        self._skip(path, rest)
        self.no_text += 1

    def skip_file(self, path: Path, rest: str) -> None:
        """Answers to a file that is one document, and is bad."""
        self._skip(path, rest)
        self.not_utf8 += 1

    def _skip(self, path: Path | None, rest: str) -> None:
        self.answer(f"{path or ''}{rest}")
        if len(self.first) < _NAMED:
            self.first.append((path, rest))


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


class _CountedUrl(io.RawIOBase):
    """A file of an object store, as `_CountedFile`."""

    def __init__(self, path: Path, tally: Tally):
        self._file, self._tally = path.open("rb"), tally

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        given = self._file.read(len(buffer))
        buffer[: len(given)] = given
        self._tally.bytes_read += len(given)
        return len(given)

    def close(self) -> None:
        self._file.close()
        super().close()


class _Source(io.RawIOBase):
    """Bytes that `more` makes, in pieces of any size; b"" is the end."""

    def __init__(self, more: Callable[[], bytes]):
        self._more, self._rest = more, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._rest:
            self._rest = memoryview(self._more())
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


@contextlib.contextmanager
def open_counted(path: Path, tally: Tally, *, is_json: bool = False) -> Iterator[BinaryIO]:
    """Opens a file, decompressed, as UTF-8 without a byte order mark; not all of it need be UTF-8.

    Args:
      is_json: whether it begins with JSON, which tells UTF-16 without a mark.

    Raises:
      ValueError: the file is not compressed in the way that its name says, or damaged.
    """
    counted = _CountedUrl(path, tally) if is_url(path) else _CountedFile(path, tally)
    with io.BufferedReader(counted) as file:
        compression = _compression(path, file.peek(16))
        if compression is None:
            yield _as_utf8(path, file, is_json)
            return
        try:
            # pyarrow reads an empty file as an empty text, but no compressor writes an empty file.
            if not size_of(path):
                raise OSError("it is empty")
            with _decompressed(file, compression) as stream:
                yield _as_utf8(path, stream, is_json)
        except OSError as error:
            raise ValueError(f"{path}: damaged or not {compression} data: {error}") from error


def _compression(path: Path, head: bytes) -> str | None:
    for name, beginning in _BEGINNINGS:
        if beginning.match(head):
            return name
    return COMPRESSIONS[path.suffix] if path.suffix in COMPRESSIONS else None


def _decompressed(file: BinaryIO, compression: str) -> BinaryIO:
    """Returns what a compressed file holds, as a stream; reading it raises OSError for damage."""
    if compression in ("gzip", "zstd"):
        import pyarrow as pa

        return io.BufferedReader(pa.CompressedInputStream(file, compression))
    make = bz2.BZ2Decompressor if compression == "bzip2" else lzma.LZMADecompressor
    decompressor: Any = make()

    def more() -> bytes:
        """Returns some bytes of the streams that stand one after the other in the file."""
        nonlocal decompressor
        while True:
            given = b""
            if decompressor.eof:
                given = decompressor.unused_data or file.read(_CHUNK)
                if not given:
                    return b""
                decompressor = make()
            elif decompressor.needs_input:
                given = file.read(_CHUNK)
                if not given:
                    raise OSError("it ends within a stream")
            try:
                made = decompressor.decompress(given, _CHUNK)
            except lzma.LZMAError as error:
                raise OSError(str(error)) from error
            if made:
                return made

    return io.BufferedReader(_Source(more))


def _as_utf8(path: Path, stream: BinaryIO, is_json: bool) -> BinaryIO:
    """Returns a stream without its byte order mark; UTF-16 and UTF-32 become UTF-8."""
    assert isinstance(stream, io.BufferedReader)
    if stream.peek(_TAR_AT + 8)[_TAR_AT:].startswith(_TAR):
        raise ValueError(f"{path}: it is a tar archive: unpack its files")
    head = stream.peek(4)[:4]
    encoding: str = json.detect_encoding(head) if is_json else "utf-8"
    for mark, name in _MARKS:
        if head.startswith(mark):
            encoding = name
            break
    if encoding.startswith("utf-8"):
        if head.startswith(codecs.BOM_UTF8):
            stream.read(len(codecs.BOM_UTF8))
        return stream
    decoder = codecs.getincrementaldecoder(encoding)()

    def more() -> bytes:
        while chunk := stream.read(_CHUNK):
            if text := _decode(chunk, final=False):
                return text
        return _decode(b"", final=True)

    def _decode(chunk: bytes, *, final: bool) -> bytes:
        try:
            return decoder.decode(chunk, final).encode("utf-8")
        except UnicodeError as error:
            raise ValueError(f"{path}: damaged or not {encoding.upper()}: {error}") from error

    return io.BufferedReader(_Source(more))


def read_lines(path: Path, tally: Tally) -> Iterator[tuple[int, bytes]]:
    """Yields the lines of a file of JSON lines with their numbers, without those that are blank.

    Lines end at \\n only; U+2028 and \\r may be part of a text. Of a line that is longer than
    `LONGEST_LINE`, one byte more than that is yielded.
    """
    with open_counted(path, tally, is_json=True) as file:
        number = 0
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            rest = line
            while len(rest) > LONGEST_LINE and not rest.endswith(b"\n"):
                rest = file.readline(LONGEST_LINE + 1)
            if line.strip():
                yield number, line


def parse_line(line: bytes, **options: Any) -> Any:
    """Returns the JSON of a line from `read_lines`; `options` are those of `json.loads`.

    Raises:
      ValueError: the line is too long, not UTF-8, not JSON, or has too many levels.
    """
    if len(line) > LONGEST_LINE:
        raise ValueError(f"it is longer than {LONGEST_LINE:,} bytes")
    try:  # a line may have a byte order mark, where files were put together
        return json.loads(line.decode("utf-8-sig"), **options)
    except RecursionError as error:
        raise ValueError(str(error)) from error
