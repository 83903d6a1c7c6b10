"""Batches of rows, and the device arrays that a process feeds to its devices.

Batch b holds the positions b*B to b*B + B - 1 after the first of the run (mixture.py); each process
reads those that its devices hold: its share. Processes that an axis `tensor` spans hold the same.
"""

import contextlib
import queue
import sys
import threading
import weakref
from collections.abc import Iterator

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array

from fp8jax.lm.data.mixture import Mixture, Position
from fp8jax.lm.data.rows import Row, Rows

Batch = dict[str, Array]  # tokens, targets, segments, positions, weights: [B, L] each


def _stack(rows: list[Row]) -> Row:
    return {key: np.stack([row[key] for row in rows]) for key in rows[0]}


def share_of_rows(sharding: NamedSharding, batch_size: int) -> tuple[int, int]:
    """Returns (index, count): this process holds the index-th of count equal parts of each batch.

    Args:
      sharding: of a batch, [B, L].
      batch_size: rows in a global batch.

    Raises:
      ValueError: the rows of this process's devices are no such part, as on a mesh whose devices
        are in an order of one's own.
    """
    held = sharding.addressable_devices_indices_map((batch_size, 1)).values()
    spans = sorted({rows.indices(batch_size)[:2] for index in held if index for rows in index[:1]})
    first, end = spans[0][0], spans[-1][1]
    rows = sum(end - begin for begin, end in spans)
    if rows != end - first or first % rows or batch_size % rows:
        raise ValueError(
            f"the devices of this process must hold one of several equal parts of a batch of"
            f" {batch_size} rows, and hold rows {spans}: order the mesh's devices by process"
        )
    return first // rows, batch_size // rows


def _local_slice(batch_size: int, process_index: int, process_count: int) -> tuple[int, int]:
    """Returns which rows of a global batch this process reads: the first one, and how many."""
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
    num_epochs: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> grain.DatasetIterator[Row]:
    """Returns this process's share of endless batches; each source is reshuffled every epoch.

    Equivalent to::

        read = mixture.reader(position, seed=seed, num_epochs=num_epochs)
        local = batch_size // process_count
        for b in itertools.count():
            first = b * batch_size + process_index * local
            yield stack(read(first + j) for j in range(local))

    After k batches the run is at `position.advanced(k * batch_size)`. It can continue from there
    with any batch_size and process_count.

    Args:
      mixture: the training rows.
      seed: of the shuffles.
      batch_size: rows in a global batch.
      position: where to begin, from `mixture.start`; None is the beginning of a run.
      num_epochs: epochs after which a source gives empty rows; None for endless ones.
      process_index: which share of each batch, from 0 (`share_of_rows`); the number of this
        process where no axis of the mesh but the batch's spans several.
      process_count: into how many shares a batch is divided.

    Returns:
      An iterator of dicts of arrays [batch_size // process_count, seq_len]. Two threads read a few
      batches ahead. They end with `close()`, when the iterator is deleted, or with the program.

    Raises:
      ValueError: process_count does not divide batch_size, the seed is not in [0, 2^32), the
        position belongs to another mixture, or process_index is not below process_count.
    """
    offset, local = _local_slice(batch_size, process_index, process_count)
    position = mixture.start() if position is None else position
    read = mixture.reader(position, seed=seed, num_epochs=num_epochs)

    def batch(index: int) -> Row:
        first = index * batch_size + offset
        return _stack([read(first + j) for j in range(local)])

    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
    return iter(grain.MapDataset.range(sys.maxsize).map(batch).to_iter_dataset(options))


_Fetched = queue.Queue[tuple[Row | None, BaseException | None]]


class TimedIterator(Iterator[Row]):
    """Iterates over `items`, and raises TimeoutError if an item takes longer than `timeout`."""

    def __init__(self, items: Iterator[Row], timeout: float):
        """Starts a thread that fetches one item ahead; `timeout` is in seconds.

        It ends, and lets go of `items`, with `close()` or when this iterator is deleted.
        """
        self._timeout = timeout
        self._queue: _Fetched = queue.Queue(maxsize=1)
        unread = threading.Event()
        threading.Thread(target=_fetch, args=(items, self._queue, unread), daemon=True).start()
        self.close = weakref.finalize(self, _leave, self._queue, unread)
        self.close.atexit = False  # the thread is a daemon

    def __next__(self) -> Row:
        """Returns the next item; raises TimeoutError if it is late, or what the iterator raised."""
        try:
            item, error = self._queue.get(timeout=self._timeout)
        except queue.Empty:
            raise TimeoutError(
                f"no batch came within {self._timeout:g} s: the data source has stalled, or "
                "data_timeout is too short for it"
            ) from None
        if error is not None:
            raise error
        assert item is not None
        return item


def _fetch(items: Iterator[Row], fetched: _Fetched, unread: threading.Event) -> None:
    """Puts the items, then what ends them, into a queue until nobody reads it any more."""
    try:
        for item in items:
            fetched.put((item, None))
            if unread.is_set():
                return
        raise StopIteration
    except BaseException as error:  # __next__ raises it, also StopIteration
        fetched.put((None, error))


def _leave(fetched: _Fetched, unread: threading.Event) -> None:
    """Ends the thread of `_fetch`, which may wait for room in the queue."""
    unread.set()  # first, so that a thread that finds room sees it
    with contextlib.suppress(queue.Empty):
        fetched.get_nowait()


def valid_batches(
    rows: Rows,
    *,
    batch_size: int,
    max_batches: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[Row]:
    """Returns this process's share of the rows, in batches, once and in order.

    The last batch is padded with rows of zeros (segments and weights too), so that all batches have
    the same shape and all processes the same number of batches.

    Args:
      rows: the rows of one source.
      batch_size: rows in a global batch.
      max_batches: return only the first ones; None returns all.
      process_index, process_count: as in `train_batches`.

    Returns:
      An iterator of dicts of arrays [batch_size // process_count, seq_len]: ceil(rows /
      batch_size) of them, or the first `max_batches`.

    Raises:
      ValueError: there are no rows, process_count does not divide batch_size, process_index is not
        below process_count, or max_batches is less than 1.
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
    """Returns the global batch, of which this process contributes its rows."""
    return {
        name: jax.make_array_from_process_local_data(sharding, rows) for name, rows in batch.items()
    }
