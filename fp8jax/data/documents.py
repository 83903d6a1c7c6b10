"""TODO docstring."""

import hashlib
from collections.abc import Iterator

from fp8jax.data.readers import Tally
from fp8jax.data.sources import Source, parse_sources

MIN_DOCUMENT_BYTES = 16  # shorter ones (empty files, stubs) are skipped and counted


SPLITS = ("train", "valid")


# Documents.


def require_fraction(valid_fraction: float) -> None:
    if not 0 < valid_fraction < 1:
        raise ValueError(f"valid_fraction must be between 0 and 1, got {valid_fraction}")


def split_of(text: bytes, valid_fraction: float) -> str:
    """The split of a document, which its own text alone decides."""
    hashed = int.from_bytes(hashlib.sha256(text).digest()[:8], "big")
    return "valid" if hashed < valid_fraction * 2**64 else "train"


def read_documents(source: Source, tally: Tally) -> Iterator[tuple[str, bytes]]:
    """The documents of a source, as text and in UTF-8; what is skipped is counted."""
    for text in source.reader.documents(tally):
        raw = text.encode("utf-8")
        if len(raw) < MIN_DOCUMENT_BYTES:
            tally.too_short += 1
        else:
            yield text, raw


def training_documents(data: str, valid_fraction: float) -> Iterator[str]:
    """The documents that train, of all sources in order: the same ones that a corpus would hold.

    For training a tokenizer, which must not see what validates. Weights change nothing here.

    Args:
      data: sources, see `parse_sources`.
      valid_fraction: share of the documents, between 0 and 1, that validate and are left out.

    Raises:
      ValueError: at the call, a bad spec or number; on the way, a file that cannot be read.
    """
    require_fraction(valid_fraction)
    sources = parse_sources(data)

    def documents() -> Iterator[str]:
        for source in sources:
            for text, raw in read_documents(source, Tally()):
                if split_of(raw, valid_fraction) == "train":
                    yield text

    return documents()
