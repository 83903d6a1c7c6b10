"""How the cost of a recipe grows: with the tokens of a run, and with the part of it that it trains.

Both give panel -> what trained -> x -> for each seed, the loss above BF16's in percent of it.
"""

from collections.abc import Sequence

from experiments.study import proving_analysis
from experiments.study.parity_analysis import Verdict
from experiments.study.parity_ledger import Line
from experiments.study.parity_plan import ARMS, BASELINE
from experiments.study.plots import group_of
from experiments.study.proving_plan import GROWN

Curves = dict[str, dict[str, dict[int, list[float]]]]


def by_tokens(found: Sequence[Verdict]) -> Curves:
    """Returns what each arm costs by the tokens of its runs; what has one seed is left out.

    Raises:
      ValueError: nothing has two seeds.
    """
    curves: Curves = {}
    for verdict in found:
        if verdict.interval is None:
            continue
        of_panel = curves.setdefault(_panel(ARMS[verdict.arm].precision), {})
        points = of_panel.setdefault(verdict.arm.removeprefix(f"{BASELINE}_then_"), {})
        points[verdict.tokens] = list(verdict.gaps.values())
    if not curves:
        raise ValueError("no interval to draw: no arm has two seeds")
    return curves


def by_steps(lines: Sequence[Line]) -> Curves:
    """Returns what each policy of `--plan=late_growth` costs by its steps at the end of a run.

    Raises:
      ValueError: a run is missing.
    """
    curves: Curves = {}
    for policy, arms in GROWN.items():
        found = proving_analysis.verdicts(lines, [(arm.name, BASELINE) for arm in arms.values()])
        if len(found) < len(arms):
            raise ValueError(f"the ledger lacks endings of {policy}: train --plan=late_growth")
        points = zip(arms, found, strict=True)
        curves.setdefault(group_of(policy), {})[policy] = {
            steps: list(verdict.gaps.values()) for steps, verdict in points
        }
    return curves


def _panel(policy: str) -> str:
    return "FP4" if group_of(policy) == "FP4" else "FP8, and BF16 computed another way"
