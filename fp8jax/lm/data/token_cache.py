"""Tokenizes documents into streams of tokens, cached on disk.

A document of n tokens becomes n + 2: BOS, the tokens, EOS. A stream is all documents of one source
and split, end to end (documents.py has the splits).

Each stream is tokenized once and stored as two flat little-endian files: the tokens as uint16 or
uint32, and the offset of each document as int64. The folder is named by a hash of everything on
which the streams depend. The length of rows and the weights of sources are not part of it, so both
can change without tokenizing again.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int64, UInt
from tqdm import tqdm

from fp8jax.lm.data.bad_examples import BAD_EXAMPLES
from fp8jax.lm.data.byte_tokenizer import Tokenizer
from fp8jax.lm.data.cache_folder import Stats, read_or_build
from fp8jax.lm.data.digests import digests
from fp8jax.lm.data.documents import (
    MIN_DOCUMENT_BYTES,
    SPLITS,
    log_skipped,
    read_documents,
    require_fraction,
)
from fp8jax.lm.data.files import Tally
from fp8jax.lm.data.readers import Source
from fp8jax.lm.data.urls import size_of

# Version of the cached files; raise it whenever the same text would give other streams.
FORMAT_VERSION = 1

_BATCH_CHARACTERS = 2**22

Document = tuple[str, bytes, str]  # text, its UTF-8 bytes, split


def _zeros() -> dict[str, int]:
    return dict.fromkeys(SPLITS, 0)


@dataclasses.dataclass(kw_only=True)
class SourceStats:
    """Counts of one source.

    Attributes:
      name: the source's name.
      files: its files, skipped ones included.
      not_utf8: files that are one document, skipped because they are not UTF-8.
      too_short: documents skipped because they are too short.
      no_text: other records that were skipped, because they are bad.
      first: the first bad records and files: the number of the file, -1 for none, and the rest of
        the message.
      piece_size: characters of the pieces into which documents were cut (documents.py); 0 if they
        were not.
      documents: documents of each split, "train" and "valid".
      bytes: bytes of UTF-8 text of each split.
      tokens: tokens of each split, BOS and EOS included.
    """

    name: str
    files: int
    not_utf8: int = 0
    too_short: int = 0
    no_text: int = 0
    first: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    piece_size: int = 0
    documents: dict[str, int] = dataclasses.field(default_factory=_zeros)
    bytes: dict[str, int] = dataclasses.field(default_factory=_zeros)
    tokens: dict[str, int] = dataclasses.field(default_factory=_zeros)

    def skipped(self) -> str:
        """Returns a sentence that says how many files, documents and records were skipped."""
        records = f", and {self.no_text} records without text" if self.no_text else ""
        return (
            f"skipped {self.not_utf8} of {self.files} files (not UTF-8) and {self.too_short} "
            f"documents under {MIN_DOCUMENT_BYTES} bytes{records}"
        )

    def bad(self, files: Sequence[Path]) -> list[tuple[Path | None, str]]:
        """Returns the first bad records in files that now have these paths."""
        return [(files[number] if number >= 0 else None, rest) for number, rest in self.first]

    def heading(self, width: int) -> str:
        """Returns the head of the table, with a first column of `width` characters."""
        return f"{'source':{width}}  split{'documents':>16}{'bytes':>16}{'tokens':>16}   share"

    def table(self, width: int, share: float) -> list[str]:
        """Returns the lines of the table; `share` is that of the training rows."""
        lines = []
        for split in SPLITS:
            counts = (self.documents[split], self.bytes[split], self.tokens[split])
            line = f"{self.name:{width}}  {split}" + "".join(f"{n:16,}" for n in counts)
            lines.append(line + (f"{share:8.2%}" if split == "train" else ""))
        lines.append(f"{'':{width}}  {self.skipped()}")
        if self.piece_size:
            lines.append(
                f"{'':{width}}  its documents were too few to hold any out: they are cut into "
                f"pieces of up to {self.piece_size:,} characters"
            )
        return lines

    def brief(self) -> str:
        """Returns the counts in a line, for the console."""
        short = f"; {self.too_short:,} left out, under {MIN_DOCUMENT_BYTES} bytes"
        return (
            f"{self.documents['train']:,} documents, {self.tokens['train']:,} tokens;"
            f" {self.documents['valid']:,} held out, {self.tokens['valid']:,} tokens"
            f"{short if self.too_short else ''}"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class TokenStream:
    """Documents end to end.

    Attributes:
      tokens: all tokens. Each document is BOS, its tokens, EOS.
      starts: offset of each document in `tokens`; strictly increasing, the first one is 0.
    """

    tokens: UInt[np.ndarray, " tokens"]
    starts: Int64[np.ndarray, " documents"]

    def num_rows(self, seq_len: int) -> int:
        """Returns how many rows of `seq_len` inputs cover the stream."""
        return -(-(len(self.tokens) - 1) // seq_len)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenizedSources:
    """The streams of some sources.

    Attributes:
      streams: by split, "train" or "valid", and by the source's name, in the order of the spec.
      stats: counts of each source.
      fingerprint: hex digest; equal for equal streams.
    """

    streams: dict[str, dict[str, TokenStream]]
    stats: list[SourceStats]
    fingerprint: str


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
    """Returns the narrowest type of a file of ids."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")


def _path(folder: Path, name: str, split: str, part: str) -> Path:
    """The file of one part, "tokens" or "starts", of a stream."""
    return folder / f"{name}.{split}.{part}"


def _write_source(
    folder: Path,
    source: Source,
    files: Sequence[Path],
    tokenizer: Tokenizer,
    fraction: float,
    answer: Callable[[str], None],
) -> SourceStats:
    """Tokenizes all documents of a source, and writes the streams of both splits."""
    stats, tally = SourceStats(name=source.name, files=len(files)), Tally(answer=answer)
    dtype = token_dtype(tokenizer)
    with contextlib.ExitStack() as stack:
        outputs = {
            (split, part): stack.enter_context(_path(folder, source.name, split, part).open("wb"))
            for split in SPLITS
            for part in ("tokens", "starts")
        }
        # disable=None shows the bar only if stderr is a terminal.
        total = sum(map(size_of, files))
        bar = tqdm(total=total, unit="B", unit_scale=True, desc=source.name, disable=None)
        stack.enter_context(bar)
        for documents in _batches(read_documents(source, tally, fraction)):
            each = tokenizer.encode_batch([text for text, _, _ in documents])
            for ids, (_, raw, split) in zip(each, documents, strict=True):
                ids = np.concatenate([[tokenizer.bos], ids, [tokenizer.eos]]).astype(dtype)
                outputs[split, "tokens"].write(ids.tobytes())
                outputs[split, "starts"].write(np.array([stats.tokens[split]], "<i8").tobytes())
                stats.documents[split] += 1
                stats.bytes[split] += len(raw)
                stats.tokens[split] += len(ids)
            bar.update(tally.bytes_read - bar.n)
    stats.not_utf8, stats.no_text = tally.not_utf8, tally.no_text
    stats.too_short, stats.piece_size = tally.too_short, tally.piece_size
    numbers = {path: number for number, path in enumerate(files)}
    stats.first = [(-1 if path is None else numbers[path], rest) for path, rest in tally.first]
    return stats


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yields documents in order, in batches that keep many cores busy and take little memory."""
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document[0])
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _fingerprint(
    sources: list[Source],
    files: list[Sequence[Path]],
    tokenizer: Tokenizer,
    valid_fraction: float,
    cache_dir: str | os.PathLike[str],
) -> str:
    """Returns the SHA-256 of everything on which the streams depend.

    That includes the contents of all files. It does not include their folders, since a corpus that
    moved is the same corpus; nor their dates, which an edit may keep and a copy may change; nor the
    weights of the sources.
    """

    parts = {
        "version": [FORMAT_VERSION, MIN_DOCUMENT_BYTES, tokenizer.fingerprint],
        "valid_fraction": valid_fraction,
        "sources": [[source.name, source.kind, *source.reader.reads] for source in sources],
        "files": digests(files, cache_dir),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _require_present(cached: Stats) -> None:
    """Raises ValueError if the cache is of a version that made other streams of the same files.

    One did not cut documents into pieces; one skipped whole files for a bad record.
    """
    for stats in cached:
        if "first" not in stats and (stats["not_utf8"] or stats["no_text"]):
            raise ValueError(f"its source {stats['name']} lacks files with a bad record")
        if "piece_size" not in stats and 0 in stats["documents"].values():
            raise ValueError(f"its source {stats['name']} was not cut, and has an empty split")
        SourceStats(**stats)  # a TypeError for other fields


def tokenize_sources(
    sources: list[Source],
    tokenizer: Tokenizer,
    *,
    valid_fraction: float,
    cache_dir: str | os.PathLike[str],
    answer: Callable[[str], None] = BAD_EXAMPLES["error"],
) -> TokenizedSources:
    """Tokenizes the sources, or reads their streams from the cache.

    Args:
      sources: the sources, from `parse_sources`.
      tokenizer: encodes the documents.
      valid_fraction: fraction of the documents, between 0 and 1, that validate.
      cache_dir: folder of the token files; created if it does not exist. Hashes of the files are
        kept there, and a call reads those files that have changed.
      answer: of `BAD_EXAMPLES`; called with what is wrong with a record. If it returns, the record
        is skipped, and the log names the first ones.

    Raises:
      ValueError: a file cannot be read (see `Reader.documents`), `valid_fraction` is not between 0
        and 1, or what `answer` raises.
    """
    require_fraction(valid_fraction)
    files = [source.reader.files() for source in sources]
    fingerprint = _fingerprint(sources, files, tokenizer, valid_fraction, cache_dir)
    folder = Path(cache_dir).expanduser() / f"corpus-{fingerprint[:16]}"

    def write(new: Path) -> Stats:
        return [
            dataclasses.asdict(_write_source(new, source, paths, tokenizer, valid_fraction, answer))
            for source, paths in zip(sources, files, strict=True)
        ]

    stats = [SourceStats(**each) for each in read_or_build(folder, write, _require_present)]
    for each, paths in zip(stats, files, strict=True):
        first = each.bad(paths)
        for path, rest in first:  # which another run may have skipped
            answer(f"{path or ''}{rest}")
        log_skipped(each.name, each.not_utf8 + each.no_text, first)

    def stream(name: str, split: str) -> TokenStream:
        tokens, starts = (_path(folder, name, split, part) for part in ("tokens", "starts"))
        return TokenStream(
            tokens=map_array(tokens, token_dtype(tokenizer)),
            starts=map_array(starts, np.dtype("<i8")),
        )

    names = [source.name for source in sources]
    return TokenizedSources(
        streams={split: {name: stream(name, split) for name in names} for split in SPLITS},
        stats=stats,
        fingerprint=fingerprint,
    )


def map_array(path: Path, dtype: np.dtype) -> np.ndarray:
    """Maps a file of numbers into memory. An empty file cannot be mapped: it is an empty array."""
    if not path.stat().st_size:
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, "r")
