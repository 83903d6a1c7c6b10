"""TODO docstring."""

import bisect
import dataclasses
import functools
import importlib.resources
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fp8jax.lookup import lookup
from fp8jax.numerics.recipe import Cast, Recipe
from fp8jax.numerics.recipes import E5M2, HISTORY, RECIPES
from fp8jax.numerics.scales import E8M0, SCALES, Fp32, Pow2

COLUMNS = ("recipe kind", "m", "k", "n", "bf16_us", "us")


KINDS = {  # kind -> the recipe that was measured
    "delayed": "fp8_delayed",
    "current": "fp8_current",
    "block": "fp8_block",
    "row": "fp8_rowwise",
}


Shape = tuple[int, int, int]


def timing_kind(recipe: Recipe) -> str | None:
    """The key of `KINDS` that takes as long as this recipe, None where none was measured."""
    plain = recipe.map(_timed)
    return next((k for k, name in KINDS.items() if RECIPES[name].map(_timed) == plain), None)


def _timed(operand: str, cast: Cast) -> Cast:
    """The cast with one value for what takes no time: rules of float32 scales, which entries of a
    history count, and the FP8 format of gradients where products take either."""
    if isinstance(cast.scale, Fp32 | Pow2) or cast.scale == E8M0():
        cast = dataclasses.replace(cast, scale=SCALES["fp32"])
    if cast.delayed:
        cast = dataclasses.replace(cast, history=HISTORY, amax="max")
    if operand.endswith("_g") and cast.format.bits == 8 and cast.tile.contract is None:
        cast = dataclasses.replace(cast, format=E5M2)
    return cast


# The table ----------------------------------------------------------------------------------------


class Gain(NamedTuple):
    """Time in BF16 over time in the recipe, and whether the size lies beyond the table."""

    value: float
    beyond: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """Measured gains.

    Attributes:
      device: on which.
      gains: key of `KINDS` -> (M, K, N) with K <= N -> log2 of the gain.
    """

    device: str
    gains: Mapping[str, Mapping[Shape, float]]

    def __post_init__(self):
        for name, points in self.gains.items():
            lookup("kind of recipe", name, KINDS)
            rows, sides = _axes(points)
            if wrong := sorted(set(grid(rows, sides)) ^ points.keys()):
                raise ValueError(f"the gains of {name!r} are no full grid of M and K <= N: {wrong}")

    def gain(self, recipe: Recipe, shape: Shape) -> Gain | None:
        """That of a linear of so many (tokens, inputs, outputs); None where nothing is known."""
        name = timing_kind(recipe)
        if name is None or name not in self.gains:
            return None
        points = self.gains[name]
        rows, sides = _axes(points)
        axes, log2 = (rows, sides, sides), 0.0
        for corner in itertools.product(*map(_around, shape, axes)):
            (m, k, n), shares = zip(*corner, strict=True)
            log2 += math.prod(shares) * points[m, min(k, n), max(k, n)]
        beyond = any(
            not known[0] <= size <= known[-1] for size, known in zip(shape, axes, strict=True)
        )
        return Gain(2.0**log2, beyond)


def grid(rows: Iterable[int], sides: Iterable[int]) -> list[Shape]:
    """Every (M, K, N) with M of `rows`, and K <= N of `sides`, which ascend."""
    pairs = itertools.combinations_with_replacement(sides, 2)
    return [(m, k, n) for m, (k, n) in itertools.product(rows, pairs)]


def _axes(points: Iterable[Shape]) -> tuple[list[int], list[int]]:
    """The measured M, and the measured K and N."""
    shapes = list(points)
    return sorted({m for m, _, _ in shapes}), sorted({side for p in shapes for side in p[1:]})


def _around(size: int, known: Sequence[int]) -> list[tuple[int, float]]:
    """The one or two measured sizes around `size`, or the edge, and their shares in it."""
    size = min(max(size, known[0]), known[-1])
    above = bisect.bisect_left(known, size)
    if known[above] == size:
        return [(size, 1.0)]
    low, high = known[above - 1], known[above]
    share = math.log(size / low) / math.log(high / low)
    return [(low, 1 - share), (high, share)]


def parse_table(text: str) -> Table:
    """The table of such a file as `h200_gains.json`.

    Raises:
      ValueError: other columns, an unknown kind, or one whose points are no full grid.
    """
    found = json.loads(text)
    if tuple(found["columns"]) != COLUMNS:
        raise ValueError(f"expected the columns {COLUMNS}, got {found['columns']}")
    gains: dict[str, dict[Shape, float]] = {}
    for name, m, k, n, bf16, us in found["rows"]:
        gains.setdefault(name, {})[m, k, n] = math.log2(bf16 / us)
    return Table(device=found["device"], gains=gains)


@functools.cache
def shipped_table() -> Table:
    """The table that is installed with the library."""
    return parse_table(
        importlib.resources.files("fp8jax.analysis").joinpath("h200_gains.json").read_text("utf-8")
    )
