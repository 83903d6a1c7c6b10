"""Documents, and their split into training and validation.

The hash of a document's own text decides whether it trains or validates. So adding a document never
moves another one to the other split, and two copies of a document are always in the same split.
"""

import hashlib
from collections.abc import Iterator

from fp8jax.data.readers import Tally
from fp8jax.data.sources import Source, parse_sources

MIN_DOCUMENT_BYTES = 16  # shorter documents (empty files, stubs) are skipped and counted

SPLITS = ("train", "valid")


def require_fraction(valid_fraction: float) -> None:
    """Raises ValueError unless the fraction is between 0 and 1."""
    if not 0 < valid_fraction < 1:
        raise ValueError(f"valid_fraction must be between 0 and 1, got {valid_fraction}")


def split_of(text: bytes, valid_fraction: float) -> str:
    """Returns the split of a document, "train" or "valid", from the hash of its UTF-8 text."""
    hashed = int.from_bytes(hashlib.sha256(text).digest()[:8], "big")
    return "valid" if hashed < valid_fraction * 2**64 else "train"


def read_documents(source: Source, tally: Tally) -> Iterator[tuple[str, bytes]]:
    """Yields the documents of a source as (text, UTF-8 bytes); counts what it skips in `tally`."""
    for text in source.reader.documents(tally):
        raw = text.encode("utf-8")
        if len(raw) < MIN_DOCUMENT_BYTES:
            tally.too_short += 1
        else:
            yield text, raw


def training_documents(data: str, valid_fraction: float) -> Iterator[str]:
    """Returns an iterator over the training documents of all sources, in order.

    They are the documents of a corpus's training split. A tokenizer is trained on them, since it
    must not see validation text. Weights have no effect here.

    Args:
      data: sources, see `parse_sources`.
      valid_fraction: fraction of the documents, between 0 and 1, that validate and are left out.

    Raises:
      ValueError: at the call, if the spec or the fraction is wrong; during iteration, if a file
        cannot be read.
    """
    require_fraction(valid_fraction)
    sources = parse_sources(data)

    def documents() -> Iterator[str]:
        for source in sources:
            for text, raw in read_documents(source, Tally()):
                if split_of(raw, valid_fraction) == "train":
                    yield text

    return documents()
