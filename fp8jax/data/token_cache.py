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
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from absl import logging
from jaxtyping import Int64, UInt
from tqdm import tqdm

from fp8jax.data.byte_tokenizer import Tokenizer
from fp8jax.data.documents import (
    MIN_DOCUMENT_BYTES,
    SPLITS,
    read_documents,
    require_fraction,
)
from fp8jax.data.readers import Tally
from fp8jax.data.sources import Source

# Version of the cached files; raise it whenever the same text would give other streams.
FORMAT_VERSION = 1

MANIFEST = "manifest.json"


def _zeros() -> dict[str, int]:
    return dict.fromkeys(SPLITS, 0)


@dataclasses.dataclass(kw_only=True)
class SourceStats:
    """Counts of one source.

    Attributes:
      name: the source's name.
      files: its files, skipped ones included.
      not_utf8: files skipped because they are not UTF-8.
      too_short: documents skipped because they are too short.
      no_text: records skipped because they are null, or bytes that are not UTF-8.
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


def _token_dtype(tokenizer: Tokenizer) -> np.dtype:
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
) -> SourceStats:
    """Tokenizes all documents of a source, and writes the streams of both splits."""
    stats, tally = SourceStats(name=source.name, files=len(files)), Tally()
    dtype = _token_dtype(tokenizer)
    with contextlib.ExitStack() as stack:
        outputs = {
            (split, part): stack.enter_context(_path(folder, source.name, split, part).open("wb"))
            for split in SPLITS
            for part in ("tokens", "starts")
        }
        # disable=None shows the bar only if stderr is a terminal.
        total = sum(path.stat().st_size for path in files)
        bar = tqdm(total=total, unit="B", unit_scale=True, desc=source.name, disable=None)
        stack.enter_context(bar)
        for text, raw, split in read_documents(source, tally, fraction):
            ids = tokenizer.encode(text)
            ids = np.concatenate([[tokenizer.bos], ids, [tokenizer.eos]]).astype(dtype)
            outputs[split, "tokens"].write(ids.tobytes())
            outputs[split, "starts"].write(np.array([stats.tokens[split]], "<i8").tobytes())
            stats.documents[split] += 1
            stats.bytes[split] += len(raw)
            stats.tokens[split] += len(ids)
            bar.update(tally.bytes_read - bar.n)
    stats.not_utf8, stats.no_text = tally.not_utf8, tally.no_text
    stats.too_short, stats.piece_size = tally.too_short, tally.piece_size
    return stats


def _fingerprint(
    sources: list[Source],
    files: list[Sequence[Path]],
    tokenizer: Tokenizer,
    valid_fraction: float,
) -> str:
    """Returns the SHA-256 of everything on which the streams depend.

    That includes the contents of all files. It does not include their folders, since a corpus that
    moved is the same corpus; nor their dates, which an edit may keep and a copy may change; nor the
    weights of the sources.
    """

    def digest(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    parts = {
        "version": [FORMAT_VERSION, MIN_DOCUMENT_BYTES, tokenizer.fingerprint],
        "valid_fraction": valid_fraction,
        "sources": [[source.name, source.kind, *source.reader.reads] for source in sources],
        # The suffix decides how a file is decompressed.
        "files": [[[path.suffix, digest(path)] for path in paths] for paths in files],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _read_cache(folder: Path) -> list[SourceStats] | None:
    """Returns the statistics of a cache, or None if there is no cache or it is damaged.

    A damaged cache is logged as a warning.
    """
    if not folder.exists():
        return None
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in manifest["files"]}
        if sizes != manifest["files"]:
            raise ValueError(f"sizes are {sizes}, expected {manifest['files']}")
        for stats in manifest["stats"]:
            if "piece_size" not in stats and 0 in stats["documents"].values():
                raise ValueError(f"its source {stats['name']} was not cut, and has an empty split")
        return [SourceStats(**stats) for stats in manifest["stats"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        logging.warning("the token cache %s is damaged and will be rebuilt: %s", folder, error)
        return None


def _build_cache(
    folder: Path,
    sources: list[Source],
    files: list[Sequence[Path]],
    tokenizer: Tokenizer,
    fraction: float,
) -> list[SourceStats]:
    """Tokenizes everything into a scratch folder, then renames it to `folder` in one step."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    # If anything ends the build early, Ctrl-C included, the scratch folder is deleted.
    with tempfile.TemporaryDirectory(prefix=".building-", dir=folder.parent) as scratch:
        new = Path(scratch, "corpus")
        new.mkdir()
        stats = [
            _write_source(new, source, paths, tokenizer, fraction)
            for source, paths in zip(sources, files, strict=True)
        ]
        manifest = {
            "files": {path.name: path.stat().st_size for path in sorted(new.iterdir())},
            "stats": [dataclasses.asdict(s) for s in stats],
        }
        (new / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        try:
            os.rename(new, folder)
        except OSError:
            # `folder` exists. Either another process was faster, and its files are the same, or
            # they are damaged: then they move to the scratch folder and are deleted with it.
            if _read_cache(folder) is None:
                os.rename(folder, Path(scratch, "damaged"))
                os.rename(new, folder)
    return stats


def tokenize_sources(
    sources: list[Source],
    tokenizer: Tokenizer,
    *,
    valid_fraction: float,
    cache_dir: str | os.PathLike[str],
) -> TokenizedSources:
    """Tokenizes the sources, or reads their streams from the cache.

    Args:
      sources: the sources, from `parse_sources`.
      tokenizer: encodes the documents.
      valid_fraction: fraction of the documents, between 0 and 1, that validate.
      cache_dir: folder of the token files; created if it does not exist. Every call reads and
        hashes all files, so that an edit is never missed.

    Raises:
      ValueError: a file cannot be read (see `Reader.documents`), or `valid_fraction` is not between
        0 and 1.
    """
    require_fraction(valid_fraction)
    files = [source.reader.files() for source in sources]
    fingerprint = _fingerprint(sources, files, tokenizer, valid_fraction)
    folder = Path(cache_dir).expanduser() / f"corpus-{fingerprint[:16]}"
    stats = _read_cache(folder)
    if stats is None:
        stats = _build_cache(folder, sources, files, tokenizer, valid_fraction)

    def stream(name: str, split: str) -> TokenStream:
        tokens, starts = (_path(folder, name, split, part) for part in ("tokens", "starts"))
        return TokenStream(
            tokens=_map_array(tokens, _token_dtype(tokenizer)),
            starts=_map_array(starts, np.dtype("<i8")),
        )

    names = [source.name for source in sources]
    return TokenizedSources(
        streams={split: {name: stream(name, split) for name in names} for split in SPLITS},
        stats=stats,
        fingerprint=fingerprint,
    )


def _map_array(path: Path, dtype: np.dtype) -> np.ndarray:
    """Maps a file of numbers into memory. An empty file cannot be mapped: it is an empty array."""
    if not path.stat().st_size:
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, "r")
