"""TODO docstring."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import grain
import numpy as np

from fp8jax.data.rows import Row, Rows

MAX_CYCLE = 2**26  # positions; the table takes 12 bytes each


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
