"""Measured gains of FP8 over BF16: a table of times by recipe kind and size, and its interpolation.

`h200_gains.json` holds times in microseconds of one linear alone: forward, the gradients of input
and weight, and the quantization of x and g from bfloat16 and of w from float32. Each is the time of
the fastest backend, beside the time in BF16 from the same process. experiments/bench/size_gains.py
measures the table.

The gain of a recipe is t_bf16 / t. Between the measured sizes, the logarithm of a time is taken as
linear in the logarithms of M, K and N. Any power law is interpolated exactly, and so are both
extremes: a time in proportion to the work, and a time of launches only. The logarithm of the gain
is then linear, too, since both times belong to the same sizes. Outside the table the nearest edge
is used. That overestimates the gain of smaller sizes, and `Gain.beyond` marks it.

A linear and its transpose run the same three GEMMs with forward and input gradient exchanged, so
the table holds only K <= N.

A formula from the peak rates was rejected: it needs as many fitted constants as the table has
columns, and cannot know what a launch costs.
"""

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
from fp8jax.numerics.scales import E8M0, SCALES, Delayed, Fp32, Pow2

COLUMNS = ("recipe kind", "m", "k", "n", "bf16_us", "us")


KINDS = {  # kind -> the recipe that was measured
    "delayed": "fp8_delayed",
    "current": "fp8_current",
    "block": "fp8_block",
    "row": "fp8_rowwise",
}


Shape = tuple[int, int, int]  # (M, K, N): tokens, inputs, outputs


def timing_kind(recipe: Recipe) -> str | None:
    """Returns the key of `KINDS` whose recipe takes as long as this one; None if there is none."""
    plain = recipe.map(_timed)
    return next((k for k, name in KINDS.items() if RECIPES[name].map(_timed) == plain), None)


def _timed(operand: str, cast: Cast) -> Cast:
    """Returns the cast with every setting that costs no time replaced by one common value.

    These settings are the rule of a float32 scale, which entries of an amax history count, and the
    FP8 format of a gradient where the GEMMs take either format.
    """
    if cast.delayed:
        cast = dataclasses.replace(cast, scale=Delayed(HISTORY))
    elif isinstance(cast.rule, Fp32 | Pow2) or cast.rule == E8M0():
        cast = dataclasses.replace(cast, scale=SCALES["fp32"])
    if operand.endswith("_g") and cast.format.bits == 8 and cast.tile.contract is None:
        cast = dataclasses.replace(cast, format=E5M2)
    return cast


class Gain(NamedTuple):
    """Time in BF16 over time in the recipe, and whether the size lies outside the table."""

    value: float
    beyond: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """Measured gains.

    Attributes:
      device: the device on which they were measured.
      gains: key of `KINDS` -> (M, K, N) with K <= N -> log2 of the gain.

    Raises:
      ValueError: an unknown kind, or a kind whose shapes are not a full grid.
    """

    device: str
    gains: Mapping[str, Mapping[Shape, float]]

    def __post_init__(self):
        for name, points in self.gains.items():
            lookup("kind of recipe", name, KINDS)
            rows, sides = _axes(points)
            if wrong := sorted(set(grid(rows, sides)) ^ points.keys()):
                raise ValueError(
                    f"the shapes of {name!r} must be a full grid of M and K <= N; missing or"
                    f" not on the grid: {wrong}"
                )

    def gain(self, recipe: Recipe, shape: Shape) -> Gain | None:
        """Returns the gain of a linear of shape (M, K, N) in a recipe; None if it is unknown."""
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
    """Returns every (M, K, N) with M from `rows` and K <= N from `sides`, which must ascend."""
    pairs = itertools.combinations_with_replacement(sides, 2)
    return [(m, k, n) for m, (k, n) in itertools.product(rows, pairs)]


def _axes(points: Iterable[Shape]) -> tuple[list[int], list[int]]:
    """Returns the measured values of M, and the measured values of K and N, both ascending."""
    shapes = list(points)
    return sorted({m for m, _, _ in shapes}), sorted({side for p in shapes for side in p[1:]})


def _around(size: int, known: Sequence[int]) -> list[tuple[int, float]]:
    """Returns the one or two measured sizes that enclose `size`, with their weights.

    A size outside the measured range has the nearest measured one.
    """
    size = min(max(size, known[0]), known[-1])
    above = bisect.bisect_left(known, size)
    if known[above] == size:
        return [(size, 1.0)]
    low, high = known[above - 1], known[above]
    share = math.log(size / low) / math.log(high / low)
    return [(low, 1 - share), (high, share)]


def parse_table(text: str) -> Table:
    """Returns the table in the text of a file like `h200_gains.json`.

    Raises:
      ValueError: other columns, an unknown kind, or a kind whose shapes are not a full grid.
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
    """Returns the table that is installed with the library."""
    return parse_table(
        importlib.resources.files("fp8jax.analysis").joinpath("h200_gains.json").read_text("utf-8")
    )
