"""Means over a few seeds, with Student's t-intervals: what a pipeline's seeds can decide.

A mean of three seeds has two degrees of freedom, so its 95% interval is 4.3 standard errors wide to
either side, not 2. An interval is that of the mean over other seeds, of the same data, model and
settings.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.markdown import markdown_table

CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A mean, and half of the width of its interval."""

    mean: float
    half_width: float
    degrees_of_freedom: int

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width


def t_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Returns the interval that contains the mean of such values with this confidence.

    Raises:
      ValueError: fewer than two values, which show no scatter.
    """
    if len(values) < 2:
        raise ValueError(f"an interval needs two values or more, got {list(values)}")
    freedom = len(values) - 1
    error = statistics.stdev(values) / math.sqrt(len(values))
    return Interval(statistics.fmean(values), t_quantile(confidence, freedom) * error, freedom)


def t_quantile(confidence: float, degrees_of_freedom: int) -> float:
    """Returns the t within which Student's distribution has `confidence`, on both sides of zero."""
    # tan(angle) = t / sqrt(degrees of freedom) takes all t to a range that can be halved.
    low, high = 0.0, math.pi / 2
    while (angle := (low + high) / 2) not in (low, high):
        if _central_probability(angle, degrees_of_freedom) < confidence:
            low = angle
        else:
            high = angle
    return math.sqrt(degrees_of_freedom) * math.tan(angle)


def _central_probability(angle: float, degrees_of_freedom: int) -> float:
    """Returns the probability of |t| <= sqrt(degrees of freedom) tan(angle).

    A finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4).
    """
    odd = degrees_of_freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for power in range(1 + odd, degrees_of_freedom, 2):
        total += term
        term *= math.cos(angle) ** 2 * power / (power + 1)
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total


# The seeds of a pipeline --------------------------------------------------------------------------


def seed_differences(numbers: Mapping[str, Mapping], run: str = "") -> dict[str, list[float]]:
    """Returns what each seed of a pipeline says of each precision, beside BF16 of the same seed.

    Args:
      numbers: a pipeline's figures.json.
      run: the part of the names in front of `loss_gap/` and `accuracy/`, without its slash.

    Returns:
      `loss_gap/RECIPE/STAGE` -> for each seed, the loss above BF16's in percent of it;
      `accuracy/TASK/RECIPE` -> for each seed, BF16's accuracy minus this one in points.

    Raises:
      ValueError: there are no such numbers.
    """
    prefix = f"{run}/" if run else ""
    found = {}
    for name, number in numbers.items():
        kind, _, rest = name.removeprefix(prefix).partition("/")
        if not name.startswith(prefix) or "seeds" not in number:
            continue
        if kind == "loss_gap":
            found[f"{kind}/{rest}"] = [100 * gap for gap in number["seeds"]]
        elif kind == "accuracy" and not rest.endswith("/bf16"):
            base = numbers[f"{prefix}{kind}/{rest.partition('/')[0]}/bf16"]["seeds"]
            pairs = zip(base, number["seeds"], strict=True)
            found[f"{kind}/{rest}"] = [100 * (before - after) for before, after in pairs]
    if not found:
        raise ValueError(f"no `{prefix}loss_gap/` and no `{prefix}accuracy/` with seeds")
    return found


def interval_table(differences: Mapping[str, Sequence[float]]) -> str:
    """Returns the Markdown table of `seed_differences`."""
    rows = []
    for name, values in differences.items():
        said = ["one seed", "–"]
        if len(values) > 1:
            interval = t_interval(values)
            said = [f"[{interval.low:+.2f}, {interval.high:+.2f}]"]
            said.append(str(interval.degrees_of_freedom))
        mean = f"{statistics.fmean(values):+.3f}"
        rows.append([f"`{name}`", ", ".join(f"{v:+.2f}" for v in values), mean, *said])
    header = ["", "seeds", "mean", f"{CONFIDENCE:.0%} interval", "degrees of freedom"]
    return markdown_table(header, rows)


def read_numbers(path: Path) -> dict[str, dict]:
    return json.loads(path.read_text(encoding="utf-8"))
