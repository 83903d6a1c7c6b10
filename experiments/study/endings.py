"""What decays from one trunk in BF16 cost, recipe by recipe (--plan=branches_recipes), to draw."""

import statistics
from collections.abc import Sequence

from experiments.study.parity_analysis import Verdict
from experiments.study.parity_plan import ARMS, BASELINE, NULL
from experiments.study.plots import group_of

FAR = 5.0  # percent of BF16's loss: beside what costs more, nothing else would be seen


def by_recipe(found: Sequence[Verdict]) -> tuple[dict[str, list[float]], list[str]]:
    """Returns the gaps of each seed, the least mean first, and the arms that are left out.

    The key is FORMAT/ARM, with the narrowest format that the arm casts to and without the trunk's
    name. Left out are arms of one seed, and those whose mean is above FAR.

    Args:
      found: arms that do not decay from the trunk of `bf16` have no part in it.

    Raises:
      ValueError: there is no such arm, or there are several forks, which are other endings.
    """
    ends = [verdict for verdict in found if ARMS[verdict.arm].trunk is not None and verdict.gaps]
    if not ends:
        raise ValueError("the ledger has no decay from the trunk of bf16: train a plan of branches")
    if len(forks := dict.fromkeys(verdict.fork for verdict in ends)) > 1:
        raise ValueError(
            f"the ledger has the forks {', '.join(forks)}: `parity_curves` draws what has several"
        )
    means = {verdict.arm: statistics.fmean(verdict.gaps.values()) for verdict in ends}
    ends.sort(key=lambda verdict: means[verdict.arm])
    drawn = [verdict for verdict in ends if len(verdict.gaps) > 1 and means[verdict.arm] <= FAR]
    gaps = {_label(verdict.arm): list(verdict.gaps.values()) for verdict in drawn}
    return gaps, [verdict.arm for verdict in ends if verdict not in drawn]


def _label(arm: str) -> str:
    name = arm.removeprefix(f"{BASELINE}_then_")
    shown = "the null" if name == NULL else name
    return f"{group_of(ARMS[arm].precision)}/{shown}"
