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
document: nothing is learned from guessing which document comes next. Rows overlap by one token, so
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

import queue
import sys
import threading
from collections.abc import Iterator

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array

from fp8jax.data.mixture import Mixture, Position
from fp8jax.data.rows import Row, Rows

# Batches: rows to what a process feeds its devices.

Batch = dict[str, Array]  # tokens, targets, segments, positions, weights: [B, L] each


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


class TimedIterator(Iterator[Row]):
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


def to_devices(batch: Row, sharding: NamedSharding) -> Batch:
    """This process's rows as its part of the global batch."""
    return {
        name: jax.make_array_from_process_local_data(sharding, rows) for name, rows in batch.items()
    }
