"""Packs whole examples into rows, and gives each epoch a permutation of its own.

An example of n tokens takes n - 1 places of a row: all tokens but the last are inputs, all but the
first are targets. `weights` is 1 where the target is the assistant's. With two examples of 4 and 3
tokens, in which the assistant wrote the tokens in capitals, and seq_len 6:

    tokens    u v A   w X   .
    targets   v A B   X Y   .
    weights   0 1 1   1 1   0
    segments  1 1 1   2 2   0
    positions 0 1 2   0 1   0

Attention does not look across segments, positions restart, and no target lies in another example.
So an example has the loss that it has in a row of its own.

**Rows have slots, and an epoch fills them.** If each epoch packed its permutation anew, the number
of rows would change from epoch to epoch. Then the number of steps, and the examples that come next
in a resumed run, would be known only by packing all epochs before. So sizes are packed, once, and
not examples. A row is a set of slots, each of some size; an epoch deals the examples of a size to
the slots of this size, in a random order, and the mixture shuffles the rows (data/mixture.py).
With examples a, b, c, d and e of the sizes 3, 2, 2, 1 and 1, and seq_len 4:

    slots     row 0: 3 1    row 1: 2 2    row 2: 1
    epoch 0   row 0: a d    row 1: c b    row 2: e
    epoch 1   row 0: a e    row 1: b c    row 2: d

So every example comes exactly once in an epoch, every epoch has the same number of rows R, and row
number k of a source lies in its epoch k // R. No state is saved, and any epoch can be computed by
itself. Examples that share a row change from epoch to epoch as far as sizes are shared. For that,
sizes above 128 are rounded up, by less than a 64th (`slot_sizes`). The places lost to this lie at
the end of a row.

**Slots are packed best-fit decreasing**: the largest first, each into the fullest row that has room
for it. This takes at most 11/9 of the least possible number of rows, and hardly more than it if
many examples are short; data.txt shows which share of all places is filled.
"""

import bisect
import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64, Integer

from fp8jax.lm.chat.examples import Examples
from fp8jax.lm.data.rows import Row, empty_row


def slot_sizes(sizes: Integer[np.ndarray, " n"], seq_len: int) -> Int64[np.ndarray, " n"]:
    """Returns the sizes of the slots for examples of these sizes: rounded up, `seq_len` at most.

    Up to 128 they are the sizes; above, there are 64 sizes between two powers of two.
    """
    octaves = np.frexp(np.maximum(sizes - 1, 0).astype(np.float64))[1]  # size <= 2**octave
    step = 2 ** np.maximum(octaves - 7, 0).astype(np.int64)
    return np.minimum(-(-sizes // step) * step, seq_len)


def pack(slots: Sequence[int], seq_len: int) -> Int64[np.ndarray, " n"]:
    """Returns the row of each slot, from 0: best-fit, in the order given, the largest slot first.

    Raises:
      ValueError: the slots do not decrease, or one is not in [1, seq_len].
    """
    if any(a < b for a, b in zip(slots, slots[1:], strict=False)):
        raise ValueError("slots must be sorted, the largest first")
    if slots and not 1 <= slots[-1] <= slots[0] <= seq_len:
        raise ValueError(f"slots of {slots[-1]} to {slots[0]} do not fit into rows of {seq_len}")
    rows_with: dict[int, list[int]] = {}  # free places -> rows
    free: list[int] = []  # the keys of rows_with, sorted
    row_of, count = [], 0
    for slot in slots:
        at = bisect.bisect_left(free, slot)
        if at == len(free):
            row, left, count = count, seq_len, count + 1
        else:
            left = free[at]
            row = rows_with[left].pop()
            if not rows_with[left]:
                del rows_with[left], free[at]
        row_of.append(row)
        if left > slot:
            if left - slot not in rows_with:
                bisect.insort(free, left - slot)
                rows_with[left - slot] = []
            rows_with[left - slot].append(row)
    return np.array(row_of, np.int64)


class ExampleRows:
    """All rows of an epoch; see the module's docstring.

    Rows are those of data/rows.py. `rows[i]` are those in which the examples of a size have their
    own order, for validation; `rows.epoch(…)` shuffles them.

    Raises:
      ValueError: there are no examples, or one is longer than a row.
      IndexError: in `rows[i]`, unless 0 <= i < len(rows).
    """

    def __init__(self, examples: Examples, *, seq_len: int):
        if not len(examples):
            raise ValueError("no examples to pack")
        if (most := examples.lengths.max() - 1) > seq_len:
            raise ValueError(f"an example takes {most} places, more than a row of {seq_len=}")
        self.examples, self.seq_len = examples, seq_len
        self._slots = slot_sizes(examples.lengths - 1, seq_len)
        self._in_order = np.argsort(-self._slots, kind="stable")
        row_of = pack((-np.sort(-self._slots)).tolist(), seq_len)
        self._by_row = np.argsort(row_of, kind="stable")  # the slots of row 0, of row 1, …
        self._bounds = np.searchsorted(row_of[self._by_row], np.arange(row_of.max() + 2))

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, index: int) -> Row:
        return self.row_of(self.members(index))

    def epoch(self, number: int, seed: Sequence[int]) -> "Epoch":
        """Returns the rows of an epoch, which depend on its number and the seed only."""
        # NumPy keeps the raw numbers of its generators the same, but not what it makes of them.
        raw = np.random.PCG64(np.random.SeedSequence([*seed, number])).random_raw(len(self._slots))
        return Epoch(rows=self, dealt=np.lexsort((raw, -self._slots)))

    def fill(self) -> float:
        """Returns the share of all places that hold a token."""
        return float(np.sum(self.examples.lengths - 1) / (len(self) * self.seq_len))

    def members(self, index: int) -> list[int]:
        """Returns which examples a row holds, in order."""
        return self.members_of(index, self._in_order)

    def members_of(self, index: int, dealt: Int64[np.ndarray, " n"]) -> list[int]:
        """Returns which examples a row holds, given the example of each slot."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)} does not exist")
        return dealt[self._by_row[self._bounds[index] : self._bounds[index + 1]]].tolist()

    def row_of(self, members: Sequence[int]) -> Row:
        """Returns the row that holds these examples, in this order."""
        row, begin = empty_row(self.seq_len), 0
        for segment, member in enumerate(members, start=1):
            ids, supervised = self.examples[member]
            place = slice(begin, begin + len(ids) - 1)
            row["tokens"][place] = ids[:-1]
            row["targets"][place] = ids[1:]
            row["weights"][place] = supervised[1:]
            row["segments"][place] = segment
            row["positions"][place] = np.arange(len(ids) - 1)
            begin = place.stop
        return row


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Epoch:
    """The rows of one epoch.

    Attributes:
      rows: where slots lie.
      dealt: the example of each slot, the largest slot first.
    """

    rows: ExampleRows
    dealt: Int64[np.ndarray, " n"]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows.row_of(self.members(index))

    def members(self, index: int) -> list[int]:
        """Returns which examples a row holds, in order."""
        return self.rows.members_of(index, self.dealt)
