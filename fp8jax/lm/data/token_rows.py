"""A user's own rows of tokens: any data set whose element i is an array of seq_len + 1 token ids.

A `grain.MapDataset` is one, and so is a list or an array. Row i reads element i: its first seq_len
ids are the inputs, the last seq_len their targets, and all of it is one document. Order, epochs and
resuming are those of other sources: the position in the data is a number, so that a resumed run
goes on with the next row.

The source `rows:MODULE:OBJECT` (lm/sources.py) names such a data set of the user's own code, or a
function of seq_len that returns one.
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from fp8jax.lm.data.documents import SPLITS
from fp8jax.lm.data.files import Tally
from fp8jax.lm.data.rows import Row, empty_row
from fp8jax.lookup import brief, own_object

OWN = "own"  # the source's name where a caller gives the data, and what config.data says of it

_HASHED = 256  # rows that the fingerprint reads, evenly spread
_MOST_ROWS = 2**40


@runtime_checkable
class TokenData(Protocol):
    """A data set with random access: `grain.MapDataset`, a list or an array."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@dataclasses.dataclass(frozen=True)
class OwnRows:
    """The reader of the source kind `rows`: it has rows of tokens, and no documents.

    Attributes:
      reference: MODULE:OBJECT, of the user's own code.
    """

    reference: str

    @property
    def label(self) -> str:
        return self.reference.rpartition(":")[2]

    @property
    def reads(self) -> tuple[str, ...]:
        return ()

    def files(self) -> Sequence[Path]:
        return ()

    def documents(self, tally: Tally) -> Iterator[str]:
        raise ValueError(f"rows:{self.reference} has rows of tokens, which are no text")

    def data(self, seq_len: int) -> TokenData:
        """Returns the data set.

        Raises ValueError if there is no such object, or if it has no length or no index.
        """
        found = own_object("rows", self.reference)
        data = found(seq_len) if callable(found) else found
        if not isinstance(data, TokenData):
            raise ValueError(
                f"rows:{self.reference} is {brief(data)}: expected rows, which have a length and an"
                " index, or a function of seq_len that returns them"
            )
        return data


@dataclasses.dataclass(frozen=True)
class TokenRows:
    """Elements `begin` to `end` of a data set as rows (data/rows.py).

    Raises:
      ValueError: in `rows[i]`, if the element is no array of seq_len + 1 ids below `vocab_size`.
      IndexError: in `rows[i]`, unless 0 <= i < len(rows).
    """

    data: TokenData
    begin: int
    end: int
    seq_len: int
    vocab_size: int

    def __len__(self) -> int:
        return self.end - self.begin

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)} does not exist")
        ids = self.ids(index)
        row = empty_row(self.seq_len)
        row["tokens"][:], row["targets"][:] = ids[:-1], ids[1:]
        row["segments"][:], row["weights"][:] = 1, 1
        row["positions"][:] = np.arange(self.seq_len)
        return row

    def ids(self, index: int) -> np.ndarray:
        """Returns the ids [seq_len + 1] of a row, checked."""
        place = f"element {self.begin + index} of the data"
        element = self.data[self.begin + index]
        ids = np.asarray(element)
        if ids.shape != (self.seq_len + 1,) or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(
                f"{place} is {brief(element)}, and no array of seq_len + 1 = {self.seq_len + 1}"
                " token ids"
            )
        if not 0 <= ids.min() <= ids.max() < self.vocab_size:
            raise ValueError(
                f"{place} has ids from {ids.min()} to {ids.max()}, but the tokenizer has"
                f" {self.vocab_size}: set config.tokenizer to the one that made them"
            )
        return ids


@dataclasses.dataclass(frozen=True)
class TokenStats:
    """Counts of a user's own rows."""

    name: str
    rows: dict[str, int]
    seq_len: int

    def heading(self, width: int) -> str:
        return f"{'source':{width}}  split{'rows':>16}{'tokens':>16}   share"

    def table(self, width: int, share: float) -> list[str]:
        lines = []
        for split in SPLITS:
            counts = (self.rows[split], self.rows[split] * self.seq_len)
            line = f"{self.name:{width}}  {split}" + "".join(f"{n:16,}" for n in counts)
            lines.append(line + (f"{share:8.2%}" if split == "train" else ""))
        return lines

    def brief(self) -> str:
        return f"{self.rows['train']:,} rows of the user's own; {self.rows['valid']:,} held out"


def split_rows(
    data: TokenData, *, seq_len: int, valid_fraction: float, vocab_size: int
) -> tuple[dict[str, TokenRows], str]:
    """Returns the rows of each split, of which the last ones validate, and their fingerprint.

    Args:
      data: element i is an array [seq_len + 1] of token ids.
      seq_len: inputs in a row.
      valid_fraction: the share of the elements that validate, at the end; at least one.
      vocab_size: ids are below it.

    Raises:
      ValueError: there are fewer than two elements, or no end of them, or an element that was read
        for the fingerprint, one of 256, is not as it should be.
    """
    count = len(data)
    if not 2 <= count < _MOST_ROWS:
        raise ValueError(f"the data has {count} elements: give at least two, and no endless ones")
    held_out = min(max(round(valid_fraction * count), 1), count - 1)
    cut = count - held_out
    rows = {
        "train": TokenRows(data, 0, cut, seq_len, vocab_size),
        "valid": TokenRows(data, cut, count, seq_len, vocab_size),
    }
    digest = hashlib.sha256(f"{count} {seq_len}".encode())
    whole = TokenRows(data, 0, count, seq_len, vocab_size)
    for index in np.unique(np.linspace(0, count - 1, min(count, _HASHED)).astype(int)):
        digest.update(whole.ids(int(index)).astype("<i8").tobytes())
    return rows, digest.hexdigest()
