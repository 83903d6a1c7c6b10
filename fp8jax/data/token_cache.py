"""Documents in, streams of tokens out, cached on disk.

A document of n tokens becomes n + 2: BOS, the tokens, EOS. Whether it trains or validates is
decided by the hash of its own text, so that adding a document never moves another one, and a
duplicate never sits on both sides. The documents of one source and split, end to end, are a
stream.

Streams are tokenized once into flat little-endian files, uint16 or uint32 tokens and the int64
offset of each document, under a hash of everything that they depend on. Neither the length of
rows nor the weights of sources are part of it: both may change without tokenizing again.
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
    split_of,
)
from fp8jax.data.readers import Tally
from fp8jax.data.sources import Source

FORMAT_VERSION = 1  # of the cached files; raise it whenever the same text would give other streams


MANIFEST = "manifest.json"


def _zeros() -> dict[str, int]:
    return dict.fromkeys(SPLITS, 0)


@dataclasses.dataclass(kw_only=True)
class SourceStats:
    """What became of one source: `not_utf8` files, `too_short` documents and records with
    `no_text` (null, or bytes that are not UTF-8) were skipped.

    The dicts say what "train" and "valid" hold: bytes of UTF-8 text; tokens with BOS and EOS.
    """

    name: str
    files: int
    not_utf8: int = 0
    too_short: int = 0
    no_text: int = 0
    documents: dict[str, int] = dataclasses.field(default_factory=_zeros)
    bytes: dict[str, int] = dataclasses.field(default_factory=_zeros)
    tokens: dict[str, int] = dataclasses.field(default_factory=_zeros)

    def skipped(self) -> str:
        """The files, documents and records left out, in words."""
        records = f", and {self.no_text} records without text" if self.no_text else ""
        return (
            f"skipped {self.not_utf8} of {self.files} files (not UTF-8) and {self.too_short} "
            f"documents under {MIN_DOCUMENT_BYTES} bytes{records}"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class TokenStream:
    """Documents end to end.

    Invariants: `starts` ascends strictly, begins with 0, and each document (up to the next start
    or the end of `tokens`) is BOS, its tokens, EOS.
    """

    tokens: UInt[np.ndarray, " tokens"]
    starts: Int64[np.ndarray, " documents"]

    def num_rows(self, seq_len: int) -> int:
        """How many rows of `seq_len` inputs cover the stream."""
        return -(-(len(self.tokens) - 1) // seq_len)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenizedSources:
    """The streams of some sources.

    Attributes:
      streams: by split, "train" or "valid", and by the source's name, in the order of the spec.
      stats: what became of each source.
      fingerprint: hex digest; equal for equal streams.
    """

    streams: dict[str, dict[str, TokenStream]]
    stats: list[SourceStats]
    fingerprint: str


# Streams: documents to cached token files.


def _token_dtype(tokenizer: Tokenizer) -> np.dtype:
    return np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")


def _path(folder: Path, name: str, split: str, part: str) -> Path:
    return folder / f"{name}.{split}.{part}"


def _write_source(
    folder: Path,
    source: Source,
    files: Sequence[Path],
    tokenizer: Tokenizer,
    fraction: float,
) -> SourceStats:
    """Tokenizes all documents of a source into the streams of its splits."""
    stats, tally = SourceStats(name=source.name, files=len(files)), Tally()
    dtype = _token_dtype(tokenizer)
    with contextlib.ExitStack() as stack:
        outputs = {
            (split, part): stack.enter_context(_path(folder, source.name, split, part).open("wb"))
            for split in SPLITS
            for part in ("tokens", "starts")
        }
        # On stderr, and disable=None: not at all where that is no terminal.
        total = sum(path.stat().st_size for path in files)
        bar = tqdm(total=total, unit="B", unit_scale=True, desc=source.name, disable=None)
        stack.enter_context(bar)
        for text, raw in read_documents(source, tally):
            split = split_of(raw, fraction)
            ids = tokenizer.encode(text)
            ids = np.concatenate([[tokenizer.bos], ids, [tokenizer.eos]]).astype(dtype)
            outputs[split, "tokens"].write(ids.tobytes())
            outputs[split, "starts"].write(np.array([stats.tokens[split]], "<i8").tobytes())
            stats.documents[split] += 1
            stats.bytes[split] += len(raw)
            stats.tokens[split] += len(ids)
            bar.update(tally.bytes_read - bar.n)
    stats.not_utf8, stats.no_text = tally.not_utf8, tally.no_text
    stats.too_short = tally.too_short
    return stats


def _fingerprint(
    sources: list[Source],
    files: list[Sequence[Path]],
    tokenizer: Tokenizer,
    valid_fraction: float,
) -> str:
    """SHA-256 over everything that the streams depend on, the contents of all files included.

    Not over where the files lie: a corpus that moved is the same corpus. Not over dates either,
    which an edit may keep and a copy may change. Nor over weights.
    """

    def digest(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    parts = {
        "version": [FORMAT_VERSION, MIN_DOCUMENT_BYTES, tokenizer.fingerprint],
        "valid_fraction": valid_fraction,
        "sources": [[source.name, source.kind, *source.reader.reads] for source in sources],
        # How a file is compressed is in its ending only.
        "files": [[[path.suffix, digest(path)] for path in paths] for paths in files],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _read_cache(folder: Path) -> list[SourceStats] | None:
    """The statistics of a whole cache; None where there is none or, with a warning, a damaged."""
    if not folder.exists():
        return None
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in manifest["files"]}
        if sizes != manifest["files"]:
            raise ValueError(f"sizes are {sizes}, expected {manifest['files']}")
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
    """Tokenizes everything into a scratch folder and moves it into place in one step."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Whatever ends the build early, Ctrl-C included, takes the scratch folder with it.
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
            # Either another process was faster, and its bytes are the same, or what lies there is
            # damaged and leaves together with the scratch folder.
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
    """Tokenizes the sources, or finds them tokenized.

    Args:
      valid_fraction: share of the documents, between 0 and 1, that validate.
      cache_dir: folder for the token files; made if need be. All files are read and hashed at
        each call, so that an edit is never missed.

    Raises:
      ValueError: a file that cannot be read (see `Reader.documents`), or a bad `valid_fraction`.
    """
    require_fraction(valid_fraction)
    files = [source.reader.files() for source in sources]
    fingerprint = _fingerprint(sources, files, tokenizer, valid_fraction)
    folder = Path(cache_dir).expanduser() / f"corpus-{fingerprint[:16]}"
    stats = _read_cache(folder)
    if stats is None:
        stats = _build_cache(folder, sources, files, tokenizer, valid_fraction)
    empty = np.zeros(0, np.int64)

    def array(name: str, split: str, part: str, dtype: np.dtype) -> np.ndarray:
        path = _path(folder, name, split, part)
        # An empty file cannot be mapped.
        return np.memmap(path, dtype, "r") if path.stat().st_size else empty.astype(dtype)

    def stream(name: str, split: str) -> TokenStream:
        return TokenStream(
            tokens=array(name, split, "tokens", _token_dtype(tokenizer)),
            starts=array(name, split, "starts", np.dtype("<i8")),
        )

    names = [source.name for source in sources]
    return TokenizedSources(
        streams={split: {name: stream(name, split) for name in names} for split in SPLITS},
        stats=stats,
        fingerprint=fingerprint,
    )
