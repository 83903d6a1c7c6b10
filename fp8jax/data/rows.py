"""TODO docstring."""

from typing import Protocol, runtime_checkable

import numpy as np

from fp8jax.data.token_cache import TokenStream

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
