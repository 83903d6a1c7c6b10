"""Cuts a stream of tokens into rows of a fixed length.

Row i of seq_len S reads the S + 1 tokens [i*S, i*S + S] of a stream of T tokens (token_cache.py):
the first S are the inputs, the last S their targets. With S = 4 and the documents "ab" and "c" (^
is BOS, $ is EOS):

    stream      ^ a b $ ^ c $           T = 7, hence ceil((T - 1) / S) = 2 rows

    row 0       tokens    ^ a b $       row 1       tokens    ^ c $ .
                targets   a b $ ^                   targets   c $ . .
                segments  1 1 1 1                   segments  1 1 1 0
                positions 0 1 2 3                   positions 0 1 2 0
                weights   1 1 1 0                   weights   1 1 0 0

`segments` numbers the documents of a row from 1, and 0 is padding; attention must not look across
segments. `positions` restarts with every segment. That includes a segment that continues a document
from the row before, since this row cannot see its beginning. `weights` is 1 where the target is in
the same document as the input: guessing which document comes next is not trained. Rows overlap by
one token. So every token except the last of a stream is an input exactly once, and every step
within a document has a weighted target exactly once. Only the last row of a stream is padded.

Cutting a stream wastes no tokens, and row i can be read without the rows before it and without any
state. Its cost, compared with packing whole documents, is context: a document that is cut by the
end of a row continues in the next row without what came before. Conversations are never cut this
way: chat/packing.py has their rows.

Without document masking, a row is one segment from its first token to its last, as if it held one
long document: attention looks across documents, positions count through, and the first token of the
next document is a trained target like any other. So row 0 above has the positions 0 1 2 3 and the
weights 1 1 1 1. Tokens and targets are the same. This is how the scripts of InfiR2
(arXiv 2509.22536) train: they reset nothing at the borders of documents.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from fp8jax.lm.data.token_cache import TokenStream

Row = dict[str, np.ndarray]


@runtime_checkable
class Rows(Protocol):
    """Rows that can be batched: `PackedRows`, or a list of rows with the same keys and shapes."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Row: ...


@runtime_checkable
class DealtRows(Rows, Protocol):
    """Rows whose contents change from epoch to epoch, but not their number: `ExampleRows`."""

    def epoch(self, number: int, seed: Sequence[int], /) -> Rows:
        """Returns the rows of an epoch, which depend on its number, from 0, and the seed only."""
        ...


def empty_row(seq_len: int) -> Row:
    """Returns a row of padding."""
    row = {k: np.zeros(seq_len, np.int32) for k in ("tokens", "targets", "segments", "positions")}
    return row | {"weights": np.zeros(seq_len, np.float32)}


class PackedRows:
    """All rows of a stream, in order; see the module's docstring.

    A row is a dict of arrays [seq_len]: `tokens`, `targets`, `segments` and `positions` are int32,
    `weights` is float32. Padding is 0 in all of them.

    Args:
      stream: the documents' tokens.
      seq_len: inputs in a row.
      document_masking: whether documents are kept apart; see the module's docstring.

    Raises:
      ValueError: `seq_len` is less than 1.
      IndexError: in `rows[i]`, unless 0 <= i < len(rows).
    """

    def __init__(self, stream: TokenStream, *, seq_len: int, document_masking: bool = True):
        if seq_len < 1:
            raise ValueError(f"seq_len must be at least 1, got {seq_len}")
        self.seq_len = seq_len
        self._stream = stream
        self._masking = document_masking
        self._len = stream.num_rows(seq_len)

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)} does not exist")
        return _row(self._stream, index, self.seq_len, self._masking)


def _row(stream: TokenStream, index: int, seq_len: int, masking: bool) -> Row:
    """Returns row `index` of a stream; without masking, all of it is one document."""
    first = index * seq_len
    window = stream.tokens[first : first + seq_len + 1].astype(np.int32)
    # The offsets in the window at which a document begins, and 0.
    lo = np.searchsorted(stream.starts, first, side="right")
    hi = np.searchsorted(stream.starts, first + len(window), side="left")
    begins = np.append(0, stream.starts[lo:hi] - first) if masking else np.zeros(1, np.int64)
    document = np.searchsorted(begins, np.arange(len(window)), side="right") - 1

    inputs = min(len(window), seq_len)  # a short window, the last, uses all its tokens as inputs
    steps = len(window) - 1  # number of inputs that have a target
    row = empty_row(seq_len)
    row["tokens"][:inputs] = window[:inputs]
    row["targets"][:steps] = window[1:]
    row["segments"][:inputs] = document[:inputs] + 1
    row["positions"][:inputs] = np.arange(inputs) - begins[document[:inputs]]
    row["weights"][:steps] = document[1:] == document[:-1]
    return row
