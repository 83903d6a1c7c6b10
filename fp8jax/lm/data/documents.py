"""Documents, and their split into training and validation.

The hash of a document's own text decides whether it trains or validates. So adding a document never
moves another one to the other split, and two copies of a document are always in the same split,
unless one of them is cut:

A source with too few documents, such as one big text file, has all of them in one split. Then, and
only then, each of its documents is cut into pieces, which are documents from there on. Within
`PIECE_SIZES`, their size is chosen so that about `HELD_OUT` pieces validate. Pieces end at the end
of a line or word where there is one in their second half.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from absl import logging

from fp8jax.lm.data.files import Tally
from fp8jax.lm.data.readers import Source

MIN_DOCUMENT_BYTES = 16  # shorter documents (empty files, stubs) are skipped and counted

SPLITS = ("train", "valid")

HELD_OUT = 16  # pieces of a cut source that validate, on average: none with a probability of e^-16
PIECE_SIZES = (256, 16_384)  # least and largest size of a piece, in characters


def require_fraction(valid_fraction: float) -> None:
    """Raises ValueError unless the fraction is between 0 and 1."""
    if not 0 < valid_fraction < 1:
        raise ValueError(f"valid_fraction must be between 0 and 1, got {valid_fraction}")


def split_of(text: bytes, valid_fraction: float) -> str:
    """Returns the split of a document, "train" or "valid", from the hash of its UTF-8 text."""
    hashed = int.from_bytes(hashlib.sha256(text).digest()[:8], "big")
    return "valid" if hashed < valid_fraction * 2**64 else "train"


def _read_documents(source: Source, tally: Tally) -> Iterator[tuple[str, bytes]]:
    """Yields the documents of a source as (text, UTF-8 bytes); counts what it skips in `tally`."""
    for text in source.reader.documents(tally):
        raw = text.encode("utf-8")
        if len(raw) < MIN_DOCUMENT_BYTES:
            tally.too_short += 1
        else:
            yield text, raw


def read_documents(
    source: Source, tally: Tally, valid_fraction: float
) -> Iterator[tuple[str, bytes, str]]:
    """Yields the documents of a source, or their pieces, as (text, UTF-8 bytes, split).

    `tally` gets counts of what was skipped, and the size of the pieces if documents were cut.
    """
    documents = _read_documents(source, tally)
    first: list[tuple[str, bytes, str]] = []  # until both splits have one
    for text, raw in documents:
        first.append((text, raw, split_of(raw, valid_fraction)))
        if len({split for _, _, split in (first[0], first[-1])}) == len(SPLITS):
            break
    else:
        if first:
            texts = [text for text, _, _ in first]
            tally.piece_size = _piece_size(sum(map(len, texts)), valid_fraction)
            pieces = (piece for text in texts for piece in cut(text, tally.piece_size))
            yield from _split(((piece, piece.encode("utf-8")) for piece in pieces), valid_fraction)
        return
    yield from first
    yield from _split(documents, valid_fraction)


def _split(
    documents: Iterable[tuple[str, bytes]], valid_fraction: float
) -> Iterator[tuple[str, bytes, str]]:
    for text, raw in documents:
        yield text, raw, split_of(raw, valid_fraction)


def _piece_size(characters: int, valid_fraction: float) -> int:
    """Returns the size of the pieces of a source of so many characters."""
    least, largest = PIECE_SIZES
    return min(max(int(characters * valid_fraction / HELD_OUT), least), largest)


def cut(text: str, size: int) -> Iterator[str]:
    """Yields the pieces of a text, of `size` characters or fewer; together they are the text.

    Each ends after the last newline of its second half, else after the last space there, else after
    `size` characters. A rest too short for a document of its own stays with the last piece.
    """
    begin = 0
    while len(text) - begin >= size + MIN_DOCUMENT_BYTES:
        half, full = begin + size // 2, begin + size
        newline, space = text.rfind("\n", half, full) + 1, text.rfind(" ", half, full) + 1
        end = newline or space or full
        yield text[begin:end]
        begin = end
    yield text[begin:]


def log_skipped(name: str, count: int, first: Sequence[tuple[Path | None, str]]) -> None:
    """Logs a warning with the first bad records of the source `name`, if there are any."""
    if count:
        named = "; ".join(f"{path or ''}{rest}" for path, rest in first)
        more = f"; and {count - len(first):,} more" if first and count > len(first) else ""
        logging.warning("source %r: bad records skipped: %s: %s%s", name, f"{count:,}", named, more)
