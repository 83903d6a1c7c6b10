"""Rows of tokens of one fixed length, mixed from several sources, the same ones every time.

From streams to rows. Row i of seq_len S reads the S + 1 tokens [i*S, i*S + S] of a stream of T
(token_cache.py): the first S are inputs, the last S their targets. With S = 4 and the documents
"ab"
and "c" (^ is BOS, $ is EOS):

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

From rows to a mixture. The weights of the sources, as the smallest whole numbers p_s with the same
ratios, are their rows in a cycle of C = sum(p_s) positions; without weights each source has p_s
in proportion to its rows. Row k of the p_s comes at time (k + 0.5) / p_s of the cycle, ties in the
order of the sources, so that every stretch of a run has the right proportions, not only its
whole. With 2 rows of a to 1 of b:

    position g            0    1    2    3    4    5    6
    time in the cycle     1/4  1/2  3/4  1/4  1/2  3/4  1/4
    source                a    b    a    a    b    a    a
    rows of it so far     0    0    1    2    1    3    4

The last line is arithmetic: with q, r = divmod(g, C), source s = source[r] has given q * p_s +
rank[r] rows, and that number picks a row through Grain's random-access shuffle, which goes over
all rows of s once an epoch of s and draws a new order for the next.

So the row at position g depends on seed, weights and g alone. A run resumes at any position with
any batch size and number of processes, no iterator state is saved, and how many rows each source
has given is known exactly. A random draw of sources would know it only by replaying, and
grain.MapDataset.mix has no closed form for its counts, which `Position` needs: when weights or
sources change in mid-run, each source goes on with its own next row.

From a mixture to batches. Batch b holds positions b*B to b*B + B - 1 beyond the first, of which
each process reads its slice.
"""

import dataclasses
import math
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any, Protocol, runtime_checkable

import grain
import numpy as np

from fp8jax.data.sources import parse_sources
from fp8jax.data.token_cache import SPLITS, SourceStats, TokenStream, tokenise
from fp8jax.data.tokenizers import Tokenizer

MAX_CYCLE = 2**26  # positions; the table takes 12 bytes each


Row = dict[str, np.ndarray]


# Rows: streams to fixed-length examples.


@runtime_checkable
class Rows(Protocol):
    """What can be batched: `PackedRows`, or a list of rows with the same keys and shapes."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Row: ...


class PackedRows:
    """All rows of a stream, in order; see the module's docstring for what a row is.

    A row is a dict of arrays [seq_len]: `tokens`, `targets`, `segments` and `positions`, int32,
    and `weights`, float32. Padding is 0 in all of them.

    `rows[i]` raises IndexError unless 0 <= i < len(rows); a `seq_len` below 1 is a ValueError.
    """

    def __init__(self, stream: TokenStream, *, seq_len: int):
        if seq_len < 1:
            raise ValueError(f"seq_len must be at least 1, got {seq_len}")
        self.seq_len = seq_len
        self._stream = stream
        self._len = stream.num_rows(seq_len)

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return _row(self._stream, index, self.seq_len)


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


# Mixtures: which row a position of a run reads.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Position:
    """How far a run has read: all there is to save of its data.

    A schedule is a set of sources with their proportions. Under it, position g reads row
    `base[s] + q * p_s + rank[r]` of source s (see the module's docstring). When weights or sources
    change, a new schedule begins at position 0, and `base` takes up what each source has given
    until then: none of its rows comes twice in an epoch, and none is left out. That holds as long
    as the source has as many rows as before; with other ones its order is another, too.

    Attributes:
      schedule: each source's rows in a cycle, in the order of the spec.
      base: rows that each source had given when the schedule began, in the order in which the
        sources first appeared in the run: the place decides the order of a source's rows. Sources
        that were dropped stay, so that one that comes back goes on where it was.
      rows: positions read under the schedule.
    """

    schedule: dict[str, int]
    base: dict[str, int]
    rows: int

    def advanced(self, rows: int) -> "Position":
        """The position `rows` further on. Raises ValueError for a negative number."""
        if rows < 0:
            raise ValueError(f"rows must not be negative, got {rows}")
        return dataclasses.replace(self, rows=self.rows + rows)

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint. Lists of pairs, since some writers sort the keys of a dict."""
        return {
            "schedule": [list(pair) for pair in self.schedule.items()],
            "base": [list(pair) for pair in self.base.items()],
            "rows": self.rows,
        }

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "Position":
        """The inverse of `to_json`. Raises ValueError for anything that it did not write."""
        try:
            schedule, base, rows = dict(saved["schedule"]), dict(saved["base"]), saved["rows"]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a position of the data: {saved!r}") from error
        whole = all(type(n) is int for n in (rows, *schedule.values(), *base.values()))
        if (
            not whole
            or min([rows, *base.values()]) < 0
            or min(schedule.values(), default=0) < 1
            or not schedule.keys() <= base.keys()
        ):
            raise ValueError(f"not a position of the data: {saved!r}")
        return cls(schedule=schedule, base=base, rows=rows)


def _proportions(rows: Mapping[str, Rows], weights: Mapping[str, Fraction] | None) -> list[int]:
    """The smallest whole numbers in the ratios of the weights, or else of the rows."""
    ratios = [Fraction(len(r)) if weights is None else weights[name] for name, r in rows.items()]
    whole = math.lcm(*(ratio.denominator for ratio in ratios))
    numbers = [int(ratio * whole) for ratio in ratios]
    return [number // math.gcd(*numbers) for number in numbers]


class _Cycle:
    """The table of a schedule's cycle: `source` (its place in the schedule) and `rank` among the
    rows of that source, int32 [C], for each position.
    """

    def __init__(self, schedule: Mapping[str, int]):
        length = sum(schedule.values())
        if length > MAX_CYCLE:
            raise ValueError(
                f"a cycle of the mixture takes {length:,} rows, {dict(schedule)}, and at most "
                f"{MAX_CYCLE:,} are tabulated: give weights of few digits, such as 0.7*"
            )
        self.schedule = dict(schedule)
        self.length = length
        proportions = list(schedule.values())
        # Exact in float64: division rounds equal fractions alike, and different ones are at least
        # 1 / (2 p_s p_t) >= 2^-51 apart, which is more than the spacing of floats below 1.
        times = np.concatenate([(np.arange(p) + 0.5) / p for p in proportions])
        deal = np.argsort(times, kind="stable")
        self.source = np.repeat(np.arange(len(proportions), dtype=np.int32), proportions)[deal]
        self.rank = np.concatenate([np.arange(p, dtype=np.int32) for p in proportions])[deal]
        self._places = {
            name: np.flatnonzero(self.source == number).astype(np.int32)
            for number, name in enumerate(schedule)
        }

    def counts(self, rows: int) -> dict[str, int]:
        """How many of the first `rows` positions each source has."""
        cycles, place = divmod(rows, self.length)
        return {
            name: cycles * self.schedule[name] + int(np.searchsorted(places, place))
            for name, places in self._places.items()
        }


def _total(counts: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
    """The sum by name, in the order of `counts`, which has all names."""
    return {name: n + (more[name] if name in more else 0) for name, n in counts.items()}


class Mixture:
    """The training rows of several sources, dealt in fixed proportions: see the module's docstring.

    Attributes:
      rows: each source's rows, by its name, in the order of the spec.
      schedule: each source's rows in a cycle.

    `len(mixture)` is the rows of all sources together.

    Raises:
      ValueError: no source, a source without rows, a weight that is not positive, or weights whose
        cycle is too long to be tabulated.
    """

    def __init__(self, rows: Mapping[str, Rows], weights: Mapping[str, Fraction] | None = None):
        empty = [name for name, source in rows.items() if not len(source)]
        if empty or not rows:
            raise ValueError(f"no rows to batch{' in ' if empty else ''}{', '.join(empty)}")
        if weights is not None and (weights.keys() != rows.keys() or min(weights.values()) <= 0):
            shown = {name: str(weight) for name, weight in weights.items()}
            raise ValueError(f"expected a positive weight for each of {[*rows]}, got {shown}")
        self.rows = dict(rows)
        self.schedule = dict(zip(rows, _proportions(rows, weights), strict=True))
        self._cycle = _Cycle(self.schedule)

    def __len__(self) -> int:
        return sum(map(len, self.rows.values()))

    def start(self, saved: dict[str, Any] | None = None) -> Position:
        """Where a run begins, or goes on from the `to_json` of its position.

        If sources and weights are the same, it goes on as it would have; otherwise a new schedule
        begins, in which each source that is still there goes on with its own next row.

        Raises:
          ValueError: `saved` is not what `Position.to_json` gave.
        """
        if saved is None:
            return Position(schedule=self.schedule, base=dict.fromkeys(self.rows, 0), rows=0)
        position = Position.from_json(saved)
        if list(position.schedule.items()) == list(self.schedule.items()):
            return position
        before = _total(position.base, _Cycle(position.schedule).counts(position.rows))
        fresh = {name: 0 for name in self.rows if name not in before}
        return Position(schedule=self.schedule, base=before | fresh, rows=0)

    def counts(self, position: Position, rows: int = 0) -> dict[str, int]:
        """How many rows each source of the run, dropped ones included, has given in all, `rows`
        further on than `position`. Their sum is the rows that the run has read.

        Raises:
          ValueError: a position of another schedule, or negative `rows`.
        """
        self._require_own(position)
        return _total(position.base, self._cycle.counts(position.advanced(rows).rows))

    def reader(self, position: Position, *, seed: int) -> Callable[[int], Row]:
        """A function from n >= 0 to the row that a run with this seed reads n rows after
        `position`. Safe in several threads.

        Raises:
          ValueError: a position of another schedule, or a seed outside [0, 2^32).
        """
        self._require_own(position)
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed must be in [0, 2^32), got {seed}")
        places = {name: number for number, name in enumerate(position.base)}
        sources = [
            (rows, _order(len(rows), seed, places[name]), position.base[name], self.schedule[name])
            for name, rows in self.rows.items()
        ]

        def read(n: int) -> Row:
            cycles, place = divmod(position.rows + n, self._cycle.length)
            rows, order, base, proportion = sources[self._cycle.source[place]]
            return rows[int(order[base + cycles * proportion + int(self._cycle.rank[place])])]

        return read

    def _require_own(self, position: Position) -> None:
        if list(position.schedule.items()) != list(self.schedule.items()):
            raise ValueError(
                f"the position belongs to the schedule {position.schedule}, not to this mixture's, "
                f"{self.schedule}: take mixture.start(position.to_json())"
            )


def _order(count: int, seed: int, place: int) -> grain.MapDataset[int]:
    """An endless order of `count` rows: epoch after epoch, each shuffled anew.

    The run's first source takes the seed itself, later ones each their own.
    """
    if place:
        seed = int(np.random.SeedSequence([seed, place]).generate_state(1)[0])
    # Indices are permuted, not rows, so that only what is asked for is read.
    order = grain.MapDataset.range(count).seed(seed).shuffle().repeat()
    order[0]  # grain sets up its statistics on first use, which is not safe in two threads at once
    return order


# Corpora: text to rows.


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """Packed text, ready to be batched.

    Attributes:
      train: the training rows of all sources, mixed by their weights.
      valid: the validation rows of each source, by its name.
      stats: what became of each source.
      fingerprint: hex digest; equal for equal token streams, whatever seq_len and weights. A
        resumed run compares it: other data under the same step would go unnoticed.
    """

    train: Mixture
    valid: dict[str, PackedRows]
    stats: list[SourceStats]
    fingerprint: str

    def summary(self) -> str:
        """A small table: documents, bytes and tokens by source and split, each source's share of
        the training rows, and what was skipped.
        """
        width = max(len(stats.name) for stats in self.stats)
        lines = [f"{'source':{width}}  split{'documents':>16}{'bytes':>16}{'tokens':>16}   share"]
        cycle = sum(self.train.schedule.values())
        for stats in self.stats:
            for split in SPLITS:
                counts = (stats.documents[split], stats.bytes[split], stats.tokens[split])
                line = f"{stats.name:{width}}  {split}" + "".join(f"{n:16,}" for n in counts)
                share = self.train.schedule[stats.name] / cycle
                lines.append(line + (f"{share:8.2%}" if split == "train" else ""))
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
      data: sources and their weights, see sources.py.
      valid_fraction: share of the documents, between 0 and 1, that validate.
      cache_dir: folder for the token files; made if need be. All files are read and hashed at
        each call, so that an edit is never missed.

    Raises:
      ValueError: a bad spec (see `parse_sources`), a file that cannot be read (with its name and,
        in JSON lines, the line), a source of which either split does not fill one row, or a bad
        number.
    """
    sources = parse_sources(data)
    tokenised = tokenise(sources, tokenizer, valid_fraction=valid_fraction, cache_dir=cache_dir)
    for stats in tokenised.stats:
        _require_rows(stats, seq_len, valid_fraction)
    packed = {
        split: {name: PackedRows(stream, seq_len=seq_len) for name, stream in streams.items()}
        for split, streams in tokenised.streams.items()
    }
    # Sources have weights all or not at all.
    weights = {source.name: source.weight for source in sources if source.weight is not None}
    return Corpus(
        train=Mixture(packed["train"], weights or None),
        valid=packed["valid"],
        stats=tokenised.stats,
        fingerprint=tokenised.fingerprint,
    )


# Batches: rows to what a process feeds its devices.


def _stack(rows: list[Row]) -> Row:
    return {key: np.stack([row[key] for row in rows]) for key in rows[0]}


def _local_slice(batch_size: int, process_index: int, process_count: int) -> tuple[int, int]:
    """Which places of a global batch this process reads: the first one, and how many."""
    if not 0 <= process_index < process_count:
        raise ValueError(f"{process_index=} must be in [0, {process_count=})")
    if batch_size < 1 or batch_size % process_count:
        raise ValueError(f"{batch_size=} must be a positive multiple of {process_count=}")
    local = batch_size // process_count
    return process_index * local, local


def train_batches(
    mixture: Mixture,
    *,
    seed: int,
    batch_size: int,
    position: Position | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> grain.DatasetIterator[Row]:
    """This process's share of an endless run over `mixture`, each source shuffled anew each epoch.

    Equivalent to::

        read = mixture.reader(position, seed=seed)
        local = batch_size // process_count
        for b in itertools.count():
            first = b * batch_size + process_index * local
            yield stack(read(first + j) for j in range(local))

    After k batches the run is at `position.advanced(k * batch_size)`, and goes on from there with
    any batch_size and process_count.

    Args:
      position: where to begin, from `mixture.start`; None is the beginning of a run.

    Returns:
      An iterator of dicts of arrays [batch_size // process_count, seq_len]. `close()` ends its
      two threads, which read a few batches ahead; so do dropping it and leaving the program.

    Raises:
      ValueError: a batch_size that process_count does not divide, a seed outside [0, 2^32), a
        position of another mixture, or a process_index that is not below process_count.
    """
    offset, local = _local_slice(batch_size, process_index, process_count)
    read = mixture.reader(mixture.start() if position is None else position, seed=seed)

    def batch(index: int) -> Row:
        first = index * batch_size + offset
        return _stack([read(first + j) for j in range(local)])

    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
    return iter(grain.MapDataset.range(sys.maxsize).map(batch).to_iter_dataset(options))


class Impatient(Iterator[Row]):
    """The items of an iterator, each waited for so many seconds at most."""

    def __init__(self, items: Iterator[Row], timeout: float):
        """`timeout` in seconds. A thread of its own fetches an item ahead."""
        self._timeout = timeout
        self._queue: queue.Queue[tuple[Row | None, BaseException | None]] = queue.Queue(maxsize=1)
        threading.Thread(target=self._fetch, args=(items,), daemon=True).start()

    def _fetch(self, items: Iterator[Row]) -> None:
        try:
            for item in items:
                self._queue.put((item, None))
            raise StopIteration
        except BaseException as error:  # all of it is the business of who takes the items
            self._queue.put((None, error))

    def __next__(self) -> Row:
        """Raises TimeoutError where the next item takes longer, and what the iterator raises."""
        try:
            item, error = self._queue.get(timeout=self._timeout)
        except queue.Empty:
            raise TimeoutError(
                f"no batch came within {self._timeout:g} s: the data source stalls, or"
                " data_timeout is too short for it"
            ) from None
        if error is not None:
            raise error
        assert item is not None
        return item


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
      ValueError: no rows, bad numbers as in `train_batches`, or max_batches below 1.
    """
    offset, local = _local_slice(batch_size, process_index, process_count)
    if len(rows) == 0:
        raise ValueError("no rows to batch")
    if max_batches is not None and max_batches < 1:
        raise ValueError(f"max_batches must be at least 1 or None, got {max_batches}")
    padding = {key: np.zeros_like(value) for key, value in rows[0].items()}

    def batch(index: int) -> Row:
        first = index * batch_size + offset
        return _stack([rows[i] if i < len(rows) else padding for i in range(first, first + local)])

    count = -(-len(rows) // batch_size)
    return map(batch, range(count if max_batches is None else min(count, max_batches)))
