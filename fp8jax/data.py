"""Real text in, rows of tokens of one fixed length out, the same ones every time.

From text to rows. A source is a list of files, a file is one or more documents, and a document of
n tokens becomes n + 2: BOS, the tokens, EOS. Whether it trains or validates is decided by the
hash of its own text, so that adding a document never moves another one, and a duplicate never
sits on both sides. The documents of one source and split, end to end, are a stream of T tokens.
Row i of seq_len S reads the S + 1 tokens [i*S, i*S + S]: the first S are inputs, the last S
their targets. With S = 4 and the documents "ab" and "c" (^ is BOS, $ is EOS):

    stream      ^ a b $ ^ c $           T = 7, hence ceil((T - 1) / S) = 2 rows

    row 0       tokens    ^ a b $       row 1       tokens    ^ c $ .
                targets   a b $ ^                   targets   c $ . .
                segments  1 1 1 1                   segments  1 1 1 0
                positions 0 1 2 3                   positions 0 1 2 0
                weights   1 1 1 0                   weights   1 1 0 0

`segments` number the documents of a row from 1, 0 is padding: attention must not look across
them. `positions` restart with every segment, also with one that goes on from the row before,
whose beginning this row cannot see. `weights` are 1 where the target belongs to the input's own
document: nothing is learnt from guessing which document comes next. Rows overlap by one token, so
every token but the very last of a stream is an input exactly once, and every step within a
document a weighted target exactly once. Only the last row of a stream is ever padded.

Cutting a stream wastes nothing, and row i needs neither the rows before it nor a state. What it
costs against packing whole documents is context: one that a row's end cuts goes on without it.

From rows to batches. Global position g of a run is a row chosen by (seed, g) alone, through
Grain's random-access shuffle, which goes over all rows once an epoch and draws a new order for
the next. Batch b holds positions b*B to b*B + B - 1, of which each process reads its slice.
Resuming is therefore arithmetic (start at step * B), exact with any number of processes; no
iterator state is saved. (Grain's own checkpoints are tied to the number of processes.)

Streams are tokenised once into flat little-endian files, uint16 or uint32 tokens and the int64
offset of each document, under a hash of everything that they depend on; seq_len is not part of
it. Rows are read from them through memory maps.
"""

import bisect
import contextlib
import dataclasses
import glob
import hashlib
import itertools
import json
import os
import re
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol, runtime_checkable

import grain
import numpy as np
from absl import logging
from jaxtyping import Int64, UInt
from tqdm import tqdm

from fp8jax.names import lookup
from fp8jax.text import Tokenizer

MIN_DOCUMENT_BYTES = 16  # shorter ones (empty files, stubs) are skipped and counted
FORMAT_VERSION = 1  # of the cached files; raise it whenever the same text would give other streams
MANIFEST = "manifest.json"
SPLITS = ("train", "valid")

Row = dict[str, np.ndarray]


# Sources: a spec string to files, a file to documents.


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceKind:
    """How to come by documents: the `files` that the argument of a spec ("" without one) means, in
    order, and the `documents` of an open file, which was checked to be UTF-8.
    """

    files: Callable[[str], list[Path]]
    documents: Callable[[BinaryIO], Iterator[str]]


def _stdlib_files(argument: str) -> list[Path]:
    """The .py files of the running Python's standard library, without its tests."""
    if argument:
        raise ValueError(f"source python_stdlib takes no argument, got {argument!r}")
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = [name for name in folders if name not in skipped]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files, key=Path.as_posix)


def _glob_files(argument: str) -> list[Path]:
    """The files that a glob pattern (** allowed) matches, by name."""
    matches = {Path(name) for name in glob.glob(os.path.expanduser(argument), recursive=True)}
    return sorted((path for path in matches if path.is_file()), key=Path.as_posix)


def _whole_file(file: BinaryIO) -> Iterator[str]:
    """The file is one document; line ends stay as they are."""
    yield file.read().decode("utf-8")


def _json_lines(file: BinaryIO) -> Iterator[str]:
    """The "text" of each line. Lines end with \\n only: U+2028 and \\r may be part of a text."""
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line.decode("utf-8"))["text"]
            text.encode("utf-8")  # JSON can spell lone surrogates, which are not text
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(
                f'{file.name}, line {number}: expected {{"text": "…"}}, got '
                f"{line[:80]!r} ({type(error).__name__}: {error})"
            ) from error
        yield text


SOURCES = {
    "python_stdlib": SourceKind(files=_stdlib_files, documents=_whole_file),
    "text": SourceKind(files=_glob_files, documents=_whole_file),
    "jsonl": SourceKind(files=_glob_files, documents=_json_lines),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A source, resolved: its name in reports, its key in `SOURCES`, and its files in order."""

    name: str
    kind: str
    files: list[Path]


def _parse_source(spec: str) -> Source:
    """One `[NAME=]KIND[:ARGUMENT]`."""
    head, _, argument = spec.partition(":")
    name, equals, kind = head.rpartition("=")
    source_kind = lookup("source", kind, SOURCES)
    if not equals:
        stem = re.sub(r"[^A-Za-z0-9._-]+", "_", Path(argument).stem).strip("_.-")
        name = f"{kind}-{stem}" if stem else kind
    elif not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise ValueError(
            f"source name {name!r} in {spec!r}: only letters, digits, '_', '-' and '.', since it "
            "names files and metrics"
        )
    files = source_kind.files(argument)
    if not files:
        raise ValueError(f"no file matches {argument!r}, the argument of the source {spec!r}")
    return Source(name=name, kind=kind, files=files)


def parse_sources(data: str) -> list[Source]:
    """Resolves the config key `data`: `[NAME=]KIND[:ARGUMENT]`, several separated by commas.

    Kinds are the keys of `SOURCES`: `python_stdlib`, `text:GLOB` (a file is a document) and
    `jsonl:GLOB` (a line `{"text": …}` is a document). Without NAME a source is called by its kind
    and the stem of its glob: `jsonl:/data/books-*.jsonl` is `jsonl-books`.

    Raises:
      ValueError: an unknown kind, a glob that matches nothing, a name twice or not fit for a file.
    """
    sources = [_parse_source(spec.strip()) for spec in data.split(",")]
    names = [source.name for source in sources]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two sources are called {twice} in {data!r}: use NAME=text:GLOB")
    return sources


# Streams: documents to cached token files.


def _zeros() -> dict[str, int]:
    return dict.fromkeys(SPLITS, 0)


@dataclasses.dataclass(kw_only=True)
class SourceStats:
    """What became of one source: `not_utf8` files and `too_short` documents were skipped.

    The dicts say what "train" and "valid" hold: bytes of UTF-8 text; tokens with BOS and EOS.
    """

    name: str
    files: int
    not_utf8: int = 0
    too_short: int = 0
    documents: dict[str, int] = dataclasses.field(default_factory=_zeros)
    bytes: dict[str, int] = dataclasses.field(default_factory=_zeros)
    tokens: dict[str, int] = dataclasses.field(default_factory=_zeros)

    def skipped(self) -> str:
        """The files and documents left out, in words."""
        return (
            f"skipped {self.not_utf8} of {self.files} files (not UTF-8) and {self.too_short} "
            f"documents under {MIN_DOCUMENT_BYTES} bytes"
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


def _token_dtype(tokenizer: Tokenizer) -> np.dtype:
    return np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")


def _path(folder: Path, name: str, split: str, part: str) -> Path:
    return folder / f"{name}.{split}.{part}"


def _is_utf8(path: Path) -> bool:
    """Whether the whole file decodes, read in pieces: a file need not fit into memory."""
    with path.open(encoding="utf-8", newline="") as file:
        try:
            while file.read(2**20):
                pass
        except UnicodeDecodeError:
            return False
    return True


def _split(text: bytes, valid_fraction: float) -> str:
    """The split of a document, which its own text alone decides."""
    hashed = int.from_bytes(hashlib.sha256(text).digest()[:8], "big")
    return "valid" if hashed < valid_fraction * 2**64 else "train"


def _read_documents(source: Source, bar: tqdm, stats: SourceStats) -> Iterator[bytes]:
    """The documents of a source as UTF-8; those that are skipped go into `stats`."""
    for path in source.files:
        if not _is_utf8(path):
            logging.warning("skipping %s: it is not UTF-8", path)
            stats.not_utf8 += 1
            bar.update(path.stat().st_size)
            continue
        with path.open("rb") as file:
            done = 0
            for text in SOURCES[source.kind].documents(file):
                raw = text.encode("utf-8")
                if len(raw) < MIN_DOCUMENT_BYTES:
                    stats.too_short += 1
                else:
                    yield raw
                bar.update(file.tell() - done)
                done = file.tell()


def _write_source(
    folder: Path, source: Source, tokenizer: Tokenizer, fraction: float, bar: tqdm
) -> SourceStats:
    """Tokenises all documents of a source into the streams of its splits."""
    stats = SourceStats(name=source.name, files=len(source.files))
    dtype = _token_dtype(tokenizer)
    with contextlib.ExitStack() as stack:
        files = {
            (split, part): stack.enter_context(_path(folder, source.name, split, part).open("wb"))
            for split in SPLITS
            for part in ("tokens", "starts")
        }
        for raw in _read_documents(source, bar, stats):
            split = _split(raw, fraction)
            ids = tokenizer.encode(raw.decode("utf-8"))
            ids = np.concatenate([[tokenizer.bos], ids, [tokenizer.eos]]).astype(dtype)
            files[split, "tokens"].write(ids.tobytes())
            files[split, "starts"].write(np.array([stats.tokens[split]], "<i8").tobytes())
            stats.documents[split] += 1
            stats.bytes[split] += len(raw)
            stats.tokens[split] += len(ids)
    return stats


def _fingerprint(sources: list[Source], tokenizer: Tokenizer, valid_fraction: float) -> str:
    """SHA-256 over everything that the streams depend on, the contents of all files included.

    Not over where the files lie: a corpus that moved is the same corpus. Not over dates either,
    which an edit may keep and a copy may change.
    """
    digests = []
    for path in itertools.chain(*(source.files for source in sources)):
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    parts = {
        "version": [FORMAT_VERSION, MIN_DOCUMENT_BYTES, tokenizer.fingerprint],
        "valid_fraction": valid_fraction,
        "sources": [[source.name, source.kind, len(source.files)] for source in sources],
        "files": digests,
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
    folder: Path, sources: list[Source], tokenizer: Tokenizer, fraction: float
) -> list[SourceStats]:
    """Tokenises everything into a scratch folder and moves it into place in one step."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    total = sum(path.stat().st_size for source in sources for path in source.files)
    # Whatever ends the build early, Ctrl-C included, takes the scratch folder with it.
    with tempfile.TemporaryDirectory(prefix=".building-", dir=folder.parent) as scratch:
        new = Path(scratch, "corpus")
        new.mkdir()
        # On stderr, and disable=None: not at all where that is no terminal.
        with tqdm(total=total, unit="B", unit_scale=True, desc="tokenising", disable=None) as bar:
            stats = [_write_source(new, source, tokenizer, fraction, bar) for source in sources]
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


# Rows: streams to fixed-length examples.


class PackedRows:
    """All rows of some streams, in order; see the module's docstring for what a row is.

    A row is a dict of arrays [seq_len]: `tokens`, `targets`, `segments` and `positions`, int32,
    and `weights`, float32. Padding is 0 in all of them.

    Rows of the first stream come first, and none spans two. `rows[i]` raises IndexError unless
    0 <= i < len(rows); a `seq_len` below 1 is a ValueError.
    """

    def __init__(self, streams: Sequence[TokenStream], *, seq_len: int):
        if seq_len < 1:
            raise ValueError(f"seq_len must be at least 1, got {seq_len}")
        self.seq_len = seq_len
        self._streams = tuple(streams)
        self._ends = list(itertools.accumulate(stream.num_rows(seq_len) for stream in streams))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        which = bisect.bisect_right(self._ends, index)
        before = self._ends[which - 1] if which else 0
        return _row(self._streams[which], index - before, self.seq_len)


def _row(stream: TokenStream, index: int, seq_len: int) -> Row:
    """Row `index` of a stream."""
    first = index * seq_len
    window = stream.tokens[first : first + seq_len + 1].astype(np.int32)
    # Offsets in the window, beyond 0, where a document begins.
    lo = np.searchsorted(stream.starts, first, side="right")
    hi = np.searchsorted(stream.starts, first + len(window), side="left")
    begins = np.append(0, stream.starts[lo:hi] - first)
    document = np.searchsorted(begins, np.arange(len(window)), side="right") - 1

    inputs = min(len(window), seq_len)  # all of a short window, its last token included
    steps = len(window) - 1  # pairs of an input and its target
    row = {k: np.zeros(seq_len, np.int32) for k in ("tokens", "targets", "segments", "positions")}
    row["weights"] = np.zeros(seq_len, np.float32)
    row["tokens"][:inputs] = window[:inputs]
    row["targets"][:steps] = window[1:]
    row["segments"][:inputs] = document[:inputs] + 1
    row["positions"][:inputs] = np.arange(inputs) - begins[document[:inputs]]
    row["weights"][:steps] = document[1:] == document[:-1]
    return row


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """Packed text, ready to be batched.

    Attributes:
      train: the training rows of all sources under one index, sources in the order of the spec.
      valid: the validation rows of each source, by its name.
      stats: what became of each source.
      fingerprint: hex digest; equal for equal token streams, whatever the seq_len. A resumed run
        compares it: other data under the same step would go unnoticed.
    """

    train: PackedRows
    valid: dict[str, PackedRows]
    stats: list[SourceStats]
    fingerprint: str

    def summary(self) -> str:
        """A small table: documents, bytes and tokens by source and split, and what was skipped."""
        width = max(len(stats.name) for stats in self.stats)
        lines = [f"{'source':{width}}  split{'documents':>16}{'bytes':>16}{'tokens':>16}"]
        for stats in self.stats:
            for split in SPLITS:
                counts = (stats.documents[split], stats.bytes[split], stats.tokens[split])
                lines.append(f"{stats.name:{width}}  {split}" + "".join(f"{n:16,}" for n in counts))
            lines.append(f"{'':{width}}  {stats.skipped()}")
        return "\n".join(lines)


def _require_rows(stats: SourceStats, seq_len: int, valid_fraction: float) -> None:
    """Refuses a source of which a split does not fill a single row."""
    for split in SPLITS:
        if stats.tokens[split] < seq_len + 1:
            raise ValueError(
                f"source {stats.name!r}: its {split} split is less than one row of {seq_len=} plus "
                f"one. It has {stats.documents[split]} of {sum(stats.documents.values())} documents"
                f" and {stats.tokens[split]} of {sum(stats.tokens.values())} tokens, with "
                f"{valid_fraction=}; {stats.skipped()}"
            )


def build_corpus(
    data: str,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    valid_fraction: float,
    cache_dir: str | os.PathLike[str],
) -> Corpus:
    """Tokenises the sources named in `data`, or finds them tokenised, and packs them into rows.

    Args:
      data: sources, see `parse_sources`.
      valid_fraction: share of the documents, between 0 and 1, that validate.
      cache_dir: folder for the token files; made if need be. All files are read and hashed at
        each call, so that an edit is never missed.

    Raises:
      ValueError: a bad spec (see `parse_sources`), a line of JSON without a text (with its file and
        number), a source of which either split does not fill one row, or a bad number.
    """
    if not 0 < valid_fraction < 1:
        raise ValueError(f"valid_fraction must be between 0 and 1, got {valid_fraction}")
    sources = parse_sources(data)
    fingerprint = _fingerprint(sources, tokenizer, valid_fraction)
    folder = Path(cache_dir).expanduser() / f"corpus-{fingerprint[:16]}"
    stats = _read_cache(folder)
    if stats is None:
        stats = _build_cache(folder, sources, tokenizer, valid_fraction)
    for source_stats in stats:
        _require_rows(source_stats, seq_len, valid_fraction)

    def stream(name: str, split: str) -> TokenStream:
        return TokenStream(
            tokens=np.memmap(_path(folder, name, split, "tokens"), _token_dtype(tokenizer), "r"),
            starts=np.memmap(_path(folder, name, split, "starts"), "<i8", "r"),
        )

    names = [source.name for source in sources]
    return Corpus(
        train=PackedRows([stream(name, "train") for name in names], seq_len=seq_len),
        valid={name: PackedRows([stream(name, "valid")], seq_len=seq_len) for name in names},
        stats=stats,
        fingerprint=fingerprint,
    )


# Batches: rows to what a process feeds its devices.


@runtime_checkable
class Rows(Protocol):
    """What can be batched: `PackedRows`, or a list of rows with the same keys and shapes."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Row: ...


def _stack(rows: list[Row]) -> Row:
    return {key: np.stack([row[key] for row in rows]) for key in rows[0]}


def _local_slice(
    rows: Rows, batch_size: int, process_index: int, process_count: int
) -> tuple[int, int]:
    """Which places of a global batch this process reads: the first one, and how many."""
    if len(rows) == 0:
        raise ValueError("no rows to batch")
    if not 0 <= process_index < process_count:
        raise ValueError(f"{process_index=} must be in [0, {process_count=})")
    if batch_size < 1 or batch_size % process_count:
        raise ValueError(f"{batch_size=} must be a positive multiple of {process_count=}")
    local = batch_size // process_count
    return process_index * local, local


def train_batches(
    rows: Rows,
    *,
    seed: int,
    batch_size: int,
    start_row: int = 0,
    process_index: int = 0,
    process_count: int = 1,
) -> grain.DatasetIterator[Row]:
    """This process's share of an endless run over `rows`, shuffled anew each epoch.

    Equivalent to, for a fixed endless sequence `order` that depends on `seed` and `len(rows)`::

        local = batch_size // process_count
        for b in itertools.count():
            first = start_row + b * batch_size + process_index * local
            yield stack(rows[order[first + j]] for j in range(local))

    Each pass of len(rows) positions holds every row once. `start_row=k * batch_size` thus resumes
    after k batches, with any batch_size and process_count from there on.

    Returns:
      An iterator of dicts of arrays [batch_size // process_count, seq_len]. `close()` ends its
      two threads, which read a few batches ahead; so do dropping it and leaving the program.

    Raises:
      ValueError: no rows, a batch_size that process_count does not divide, a seed outside
        [0, 2^32), a negative start_row, or a process_index that is not below process_count.
    """
    offset, local = _local_slice(rows, batch_size, process_index, process_count)
    if start_row < 0:
        raise ValueError(f"start_row must not be negative, got {start_row}")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be in [0, 2^32), got {seed}")
    # The shuffle permutes indices, not rows, so that only what is asked for is read.
    order = grain.MapDataset.range(len(rows)).seed(seed).shuffle().repeat()
    order[0]  # grain sets up its statistics on first use, which is not safe in two threads at once

    def batch(index: int) -> Row:
        first = start_row + index * batch_size + offset
        return _stack([rows[int(order[first + j])] for j in range(local)])

    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
    return iter(grain.MapDataset.range(sys.maxsize).map(batch).to_iter_dataset(options))


def valid_batches(
    rows: Rows,
    *,
    batch_size: int,
    max_batches: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[Row]:
    """This process's share of the rows, once and in order.

    The last batch is filled up with rows of zeros (segments and weights too), so that all batches
    have one shape and all processes the same number of them.

    Returns:
      An iterator of dicts of arrays [batch_size // process_count, seq_len]: ceil(rows /
      batch_size) of them, or the first `max_batches`.

    Raises:
      ValueError: as `train_batches`, or max_batches below 1.
    """
    offset, local = _local_slice(rows, batch_size, process_index, process_count)
    if max_batches is not None and max_batches < 1:
        raise ValueError(f"max_batches must be at least 1 or None, got {max_batches}")
    padding = {key: np.zeros_like(value) for key, value in rows[0].items()}

    def batch(index: int) -> Row:
        first = index * batch_size + offset
        return _stack([rows[i] if i < len(rows) else padding for i in range(first, first + local)])

    count = -(-len(rows) // batch_size)
    return map(batch, range(count if max_batches is None else min(count, max_batches)))
