"""What each cast of a recipe costs at the end of a run in BF16, and whether the costs add up.

The measures were chosen before a result was known. For the runs of `--plan=branches_casts`, seed by
seed, in percent of BF16's loss:

    alone      the gap of an ending with this cast alone
    gained     the gap of the whole recipe, less that of the recipe without this cast
    the sum    the gaps of all casts alone, added up, less that of the whole recipe

Shares are percent of the whole recipe's gap. Where costs add up, a cast gains what it costs alone,
and 95 of 100 intervals of the sum hold zero; a wide one may hold it where they do not. No interval
is corrected for their number.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from experiments.markdown import markdown_table
from experiments.study.intervals import t_interval
from experiments.study.parity_analysis import compare
from experiments.study.parity_ledger import Line
from experiments.study.parity_plan import CASTS_OF, PLANS, then

Gaps = Mapping[int, float]  # by seed, percent of BF16's loss

(_FORK,) = PLANS["branches_casts"].forks
_PARTS = {arm.name for arm in PLANS["branches_casts"].arms if ":" in arm.name}
_HEADER = (
    "recipe",
    "cast",
    "alone, %",
    "of the whole, %",
    "gained without it, %",
    "of the whole, %",
)


@dataclasses.dataclass(frozen=True)
class Costs:
    """What a recipe costs, and what is left of it; all of the same seeds.

    Attributes:
      whole: the gap of the recipe.
      alone: cast -> the gap of the cast alone.
      without: cast -> the gap of the recipe without it.
    """

    whole: Gaps
    alone: Mapping[str, Gaps]
    without: Mapping[str, Gaps]


def costs(lines: Sequence[Line]) -> dict[str, Costs]:
    """Returns the costs of each recipe of `CASTS_OF`.

    Args:
      lines: of one setting, one text and one code.

    Raises:
      ValueError: a seed lacks a run, or training stopped in it; the message names the arm.
    """
    # Other plans have whole recipes of other seeds.
    chosen = {line.seed for line in lines if line.arm in _PARTS}
    lines = [line for line in lines if line.seed in chosen]
    found = {}
    for recipe, casts in CASTS_OF.items():
        whole = _gaps(lines, recipe)
        found[recipe] = Costs(
            whole=whole,
            alone={cast: _gaps(lines, f"{recipe}:only={cast}", whole) for cast in casts},
            without={cast: _gaps(lines, f"{recipe}:{cast}=bf16", whole) for cast in casts},
        )
    return found


def table(lines: Sequence[Line]) -> str:
    """Returns the Markdown table of both recipes: means and 95% intervals.

    Args, errors: as `costs`.
    """
    rows = []
    for recipe, found in costs(lines).items():
        for cast, alone in found.alone.items():
            gained = {seed: found.whole[seed] - gap for seed, gap in found.without[cast].items()}
            cells = *_cells(alone, found.whole), *_cells(gained, found.whole)
            rows.append([f"`{recipe}`", f"`{cast}`", *cells])
        excess = {
            seed: sum(gaps[seed] for gaps in found.alone.values()) - gap
            for seed, gap in found.whole.items()
        }
        rows.append([f"`{recipe}`", "the sum, less all", *_cells(excess, found.whole), "", ""])
    return markdown_table(list(_HEADER), rows)


def by_cast(lines: Sequence[Line]) -> dict[str, list[float]]:
    """Returns the gaps of each seed, for a figure: RECIPE/what is cast, the recipe's own first.

    Args, errors: as `costs`.
    """
    drawn = {}
    for recipe, found in costs(lines).items():
        drawn[f"{recipe}/all casts"] = list(found.whole.values())
        drawn |= {
            f"{recipe}/{cast} alone": list(gaps.values()) for cast, gaps in found.alone.items()
        }
        drawn |= {
            f"{recipe}/all but {cast}": list(gaps.values()) for cast, gaps in found.without.items()
        }
    return drawn


def _gaps(lines: Sequence[Line], policy: str, whole: Gaps | None = None) -> Gaps:
    """Returns the gaps of an ending to BF16; of the seeds that the whole recipe has."""
    arm = then(policy)
    found = compare(lines, arm, _FORK)
    if found is None or found.stopped:
        raise ValueError(
            f"{arm} has no gap, or training stopped in a seed: train --plan=branches_casts"
        )
    if whole is not None and found.gaps.keys() != whole.keys():
        raise ValueError(f"{arm} has seeds {sorted(found.gaps)}, and the whole {sorted(whole)}")
    return found.gaps


def _cells(part: Gaps, whole: Gaps) -> tuple[str, str]:
    """Returns a cost, and its share of the whole's."""
    shares = [100 * gap / whole[seed] for seed, gap in part.items()]
    return _shown(part.values(), 2), _shown(shares, 0)


def _shown(values: Collection[float], digits: int) -> str:
    found = t_interval(list(values))
    low, high = f"{found.low:+.{digits}f}", f"{found.high:+.{digits}f}"
    return f"{found.mean:+.{digits}f} [{low}, {high}]"
