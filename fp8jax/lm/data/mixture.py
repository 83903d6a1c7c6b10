"""Mixes the rows of several sources in fixed proportions, in an order that can be computed.

Proportions. The weights of the sources, as the smallest whole numbers p_s with the same ratios, are
the numbers of rows of each source in a cycle of C = sum(p_s) positions. Without weights, p_s is
proportional to the number of rows of source s. Row k of the p_s rows has the time (k + 0.5) / p_s
within the cycle; the cycle is sorted by time, with ties in the order of the sources. So every
stretch of a run has the right proportions, not only the whole run. With 2 rows of a to 1 of b:

    position g            0    1    2    3    4    5    6
    time in the cycle     1/4  1/2  3/4  1/4  1/2  3/4  1/4
    source                a    b    a    a    b    a    a
    rows of it so far     0    0    1    2    1    3    4

The last line is arithmetic. With q, r = divmod(g, C), source s = source[r] has given q * p_s +
rank[r] rows before position g. So `grain.MapDataset.select_from_datasets` mixes the sources, with
`_Selection` as its map; each source is a Grain dataset, whose random-access shuffle goes through
all its rows once in each of its epochs, in a new order every epoch.

So the row at position g depends only on the seed, the weights and g. A run can resume at any
position with any batch size and number of processes, no iterator state is saved, and the number of
rows that each source has given is known exactly. Drawing sources at random was rejected: it would
know these numbers only after a replay. So was the order of grain.MapDataset.mix, which begins each
source at its first row. `Position` has these numbers: when weights or sources change in mid-run,
each source continues with its own next row.

Epochs. Row k of a source belongs to its epoch k // R, where R is its number of rows. Without
weights, all sources end their epochs together, every sum(R) positions. A run of E epochs takes
E * R rows of each source. Where a source would begin its epoch E, counted from 0, `reader` gives
empty rows, which fill up the last batch. Conversations are packed anew in each epoch, into as many
rows (chat/packing.py).
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import grain
import numpy as np

from fp8jax.lm.data.rows import DealtRows, Row, Rows

MAX_CYCLE = 2**26  # positions in a cycle; its tables take 12 bytes for each


@dataclasses.dataclass(frozen=True, kw_only=True)
class Position:
    """How far a run has read its data; all that a checkpoint saves of it.

    A schedule is a set of sources with their proportions. Under a schedule, position g reads row
    `base[s] + q * p_s + rank[r]` of source s (see the module's docstring). When weights or sources
    change, a new schedule begins at position 0, and `base` becomes the number of rows that each
    source has given until then. So within an epoch no row of a source comes twice and none is left
    out, as long as the source has as many rows as before: with another number of rows, their order
    changes too.

    Attributes:
      schedule: number of rows of each source in a cycle, in the order of the spec.
      base: number of rows that each source had given when the schedule began. The sources are in
        the order in which they first appeared in the run, since a source's place decides the order
        of its rows. Removed sources stay, so that a source that returns continues where it was.
      rows: number of positions read under the schedule.
    """

    schedule: dict[str, int]
    base: dict[str, int]
    rows: int

    def advanced(self, rows: int) -> "Position":
        """Returns the position after `rows` more rows. Raises ValueError for a negative number."""
        if rows < 0:
            raise ValueError(f"rows must not be negative, got {rows}")
        return dataclasses.replace(self, rows=self.rows + rows)

    def to_json(self) -> dict[str, Any]:
        """Returns the position as JSON, for a checkpoint.

        Dicts become lists of pairs, since some writers sort the keys of a dict.
        """
        return {
            "schedule": [list(pair) for pair in self.schedule.items()],
            "base": [list(pair) for pair in self.base.items()],
            "rows": self.rows,
        }

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "Position":
        """The inverse of `to_json`. Raises ValueError for what `to_json` does not write."""
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
    """Returns the smallest whole numbers in the ratios of the weights, or of the rows without."""
    ratios = [Fraction(len(r)) if weights is None else weights[name] for name, r in rows.items()]
    whole = math.lcm(*(ratio.denominator for ratio in ratios))
    numbers = [int(ratio * whole) for ratio in ratios]
    return [number // math.gcd(*numbers) for number in numbers]


class _Cycle:
    """The tables of a schedule's cycle, int32 [C], with one entry for each position.

    `source` is the place of the position's source in the schedule, `rank` the number of earlier
    positions in the cycle with the same source.
    """

    def __init__(self, schedule: Mapping[str, int]):
        length = sum(schedule.values())
        if length > MAX_CYCLE:
            raise ValueError(
                f"a cycle of the mixture takes {length:,} rows, {dict(schedule)}, more than the "
                f"limit of {MAX_CYCLE:,}: use weights with few digits, such as 0.7*"
            )
        self.schedule = dict(schedule)
        self.length = length
        proportions = list(schedule.values())
        # float64 sorts the times exactly: equal fractions are rounded to equal floats, and others
        # are at least 1 / (2 p_s p_t) >= 2^-51 apart, more than the spacing of floats below 1.
        times = np.concatenate([(np.arange(p) + 0.5) / p for p in proportions])
        order = np.argsort(times, kind="stable")
        self.source = np.repeat(np.arange(len(proportions), dtype=np.int32), proportions)[order]
        self.rank = np.concatenate([np.arange(p, dtype=np.int32) for p in proportions])[order]
        # For each source, its positions in the cycle.
        self._places = {
            name: np.flatnonzero(self.source == number).astype(np.int32)
            for number, name in enumerate(schedule)
        }

    def counts(self, rows: int) -> dict[str, int]:
        """Returns how many of the first `rows` positions belong to each source."""
        cycles, place = divmod(rows, self.length)
        return {
            name: cycles * self.schedule[name] + int(np.searchsorted(places, place))
            for name, places in self._places.items()
        }


class _Selection(grain.transforms.DatasetSelectionMap):
    """Grain's map from n to (source, its row) for the n-th row after a position of a schedule."""

    def __init__(self, cycle: _Cycle, position: Position):
        self._cycle = cycle
        self._first = position.rows
        self._base = [position.base[name] for name in cycle.schedule]
        self._proportions = list(cycle.schedule.values())

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> tuple[int, int]:
        cycles, place = divmod(self._first + index, self._cycle.length)
        source = int(self._cycle.source[place])
        earlier = cycles * self._proportions[source] + int(self._cycle.rank[place])
        return source, self._base[source] + earlier


def _total(counts: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
    """Adds two dicts by name. `counts` has all the names, and the result has their order."""
    return {name: n + (more[name] if name in more else 0) for name, n in counts.items()}


class Mixture:
    """The training rows of several sources in fixed proportions; see the module's docstring.

    `len(mixture)` is the number of rows of all sources together.

    Attributes:
      rows: the rows of each source, by its name, in the order of the spec.
      schedule: number of rows of each source in a cycle.

    Raises:
      ValueError: there is no source, a source has no rows, a weight is not positive, or the weights
        need a cycle of more than `MAX_CYCLE` positions.
    """

    def __init__(self, rows: Mapping[str, Rows], weights: Mapping[str, Fraction] | None = None):
        if not rows:
            raise ValueError("no rows to batch")
        empty = [name for name, source in rows.items() if not len(source)]
        if empty:
            raise ValueError(f"no rows to batch in {', '.join(empty)}")
        if weights is not None and (weights.keys() != rows.keys() or min(weights.values()) <= 0):
            shown = {name: str(weight) for name, weight in weights.items()}
            raise ValueError(f"expected a positive weight for each of {[*rows]}, got {shown}")
        self.rows = dict(rows)
        self.schedule = dict(zip(rows, _proportions(rows, weights), strict=True))
        self._cycle = _Cycle(self.schedule)

    def __len__(self) -> int:
        return sum(map(len, self.rows.values()))

    def start(self, saved: dict[str, Any] | None = None) -> Position:
        """Returns the position at which a run begins, or continues from a saved one.

        If sources and weights are those of the saved position, the run continues as if it had not
        been interrupted. Otherwise a new schedule begins, in which each source continues with its
        own next row.

        Args:
          saved: a result of `Position.to_json`, or None for a new run.

        Raises:
          ValueError: `saved` is not a result of `Position.to_json`.
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
        """Returns how many rows each source has given in the whole run, `rows` after `position`.

        Sources that were removed during the run are included. The sum of the values is the number
        of rows that the run has read.

        Raises:
          ValueError: the position belongs to another schedule, or `rows` is negative.
        """
        self._require_own(position)
        return _total(position.base, self._cycle.counts(position.advanced(rows).rows))

    def reader(
        self, position: Position, *, seed: int, num_epochs: int | None = None
    ) -> Callable[[int], Row]:
        """Returns a function from n >= 0 to the row that a run reads n rows after `position`.

        The function is thread-safe.

        Args:
          seed: of all shuffles.
          num_epochs: the epochs after which a source gives empty rows; None for endless ones.

        Raises:
          ValueError: the position belongs to another schedule, or the seed is not in [0, 2^32).
        """
        self._require_own(position)
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed must be in [0, 2^32), got {seed}")
        places = {name: number for number, name in enumerate(position.base)}
        datasets = [
            _dataset(rows, seed, places[name], num_epochs) for name, rows in self.rows.items()
        ]
        mixed = grain.MapDataset.select_from_datasets(datasets, _Selection(self._cycle, position))
        mixed[0]  # Grain initializes its statistics on first use, which is not thread-safe
        return mixed.__getitem__

    def _require_own(self, position: Position) -> None:
        if list(position.schedule.items()) != list(self.schedule.items()):
            raise ValueError(
                f"the position belongs to the schedule {position.schedule}, not to this mixture's, "
                f"{self.schedule}: convert it with mixture.start(position.to_json())"
            )


def _dataset(rows: Rows, seed: int, place: int, num_epochs: int | None) -> grain.MapDataset[Row]:
    """Returns the endless rows of a source: epoch after epoch, each with a new shuffle.

    The run's first source (place 0) uses the seed itself; each later source has a seed of its own.
    """
    count = len(rows)
    padding = {key: np.zeros_like(value) for key, value in rows[0].items()}

    @functools.lru_cache(maxsize=4)  # two epochs meet in a batch, and two threads read batches
    def epoch(number: int) -> Rows:
        return rows.epoch(number, (seed, place)) if isinstance(rows, DealtRows) else rows

    def read(k: int, index: int) -> Row:
        number = k // count
        if num_epochs is not None and number >= num_epochs:
            return padding
        return epoch(number)[int(index)]

    own = int(np.random.SeedSequence([seed, place]).generate_state(1)[0]) if place else seed
    # Permutes indices instead of rows, so that only the rows of a batch are read.
    return grain.MapDataset.range(count).seed(own).shuffle().repeat().map_with_index(read)
