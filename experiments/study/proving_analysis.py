"""What the proving ground's ledger says, as tables of pages; verdicts are parity_analysis.py's.

Written before a result was known. An arm is worse or better than another where the t-interval of
the mean gap leaves zero out, and within the margin where the whole interval does. No intervals are
corrected for their number: of those whose gap is zero, one in twenty leaves zero out by chance.
"""

import statistics
from collections.abc import Iterable, Sequence

from experiments.markdown import markdown_table, replace_between
from experiments.study.intervals import CONFIDENCE
from experiments.study.parity_analysis import Verdict, compare
from experiments.study.parity_ledger import Line, comparable
from experiments.study.parity_plan import BASELINE
from experiments.study.plots import group_of
from experiments.study.proving_plan import ARMS, COMPARISONS, LATE, MARGIN, PLANS, RUN, SUMS


def lines_of(lines: Sequence[Line], setting: str) -> list[Line]:
    """Returns the lines of a setting.

    Raises:
      ValueError: there are none, or they are of several texts: give a ledger of one.
    """
    data = sorted({line.data for line in lines if line.setting == setting})
    if len(data) != 1:
        raise ValueError(f"lines of setting {setting} must be of one text, and are of {data}")
    return comparable(lines, setting, data[0])


def fill_page(page: str, lines: Sequence[Line]) -> str:
    """Returns the page with those tables filled that it has a place for.

    Args:
      page: with <!-- table: proving NAME --> and <!-- end --> around a table.
      lines: `lines_of`.

    Raises:
      ValueError: the page has a place for none.
    """
    made = page
    for name, text in tables(lines).items():
        made = (
            replace_between(made, f"<!-- table: proving {name} -->", "<!-- end -->", text) or made
        )
    if "<!-- table: proving " not in made:
        raise ValueError(f"the page has no place for any of {', '.join(tables(lines))}")
    return made


def tables(lines: Sequence[Line]) -> dict[str, str]:
    """Returns the Markdown of each table by its name: those of the plans, and the comparisons."""
    made = {name: _plan_table(lines, name) for name in PLANS}
    return made | {"comparisons": _comparison_table(lines), "sum": _sum_table(lines)}


def verdicts(lines: Sequence[Line], pairs: Iterable[tuple[str, str]]) -> list[Verdict]:
    """Returns a verdict for each pair (arm, what it is compared with) that any seed has."""
    found = [compare(lines, arm, RUN, base, MARGIN) for arm, base in pairs]
    return [verdict for verdict in found if verdict is not None]


def control_failures(lines: Sequence[Line]) -> list[str]:
    """Returns the controls that are not shown to be worse than BF16; a ledger without is good."""
    pairs = [(name, BASELINE) for name, arm in ARMS.items() if arm.control]
    return [
        f"{verdict.arm} is not shown to be worse than BF16: the proving ground detects nothing"
        for verdict in verdicts(lines, pairs)
        if not verdict.text().startswith(("worse", "not finite"))
    ]


def late_gaps(lines: Sequence[Line]) -> dict[str, list[float]]:
    """Returns what each policy costs in the last fifth of a BF16 run, the least first.

    The key is FORMAT/POLICY, with the narrowest format that the policy casts to. The value has for
    each seed the loss above BF16's in percent of it.

    Raises:
      ValueError: the lines have no such run.
    """
    policies = {arm: policy for policy, arm in LATE.items()}
    found = verdicts(lines, [(arm, BASELINE) for arm in policies])
    if not found:
        raise ValueError(f"the ledger has none of the arms {', '.join(policies)}")
    return {
        f"{group_of(policies[verdict.arm])}/{policies[verdict.arm]}": list(verdict.gaps.values())
        for verdict in sorted(found, key=_mean)
    }


def _plan_table(lines: Sequence[Line], plan: str) -> str:
    """Returns the rows of a plan's arms against BF16, the best mean first."""
    base = {line.seed: line.loss for line in lines if line.arm == BASELINE}
    names = [arm.name for arm in PLANS[plan].arms if arm.name != BASELINE]
    found = verdicts(lines, [(name, BASELINE) for name in names])
    found.sort(key=lambda verdict: (bool(verdict.stopped), _mean(verdict)))
    rows = [[f"`{BASELINE}`", _losses(base), "", "", "", ""]]
    for verdict in found:
        own = {line.seed: line.loss for line in lines if line.arm == verdict.arm}
        rows.append([_name(verdict.arm), _losses(own), *_cells(verdict)])
    header = ["precision", f"loss of seeds {', '.join(map(str, sorted(base)))}", "against BF16, %"]
    return markdown_table([*header, *_INTERVAL], rows)


def _comparison_table(lines: Sequence[Line]) -> str:
    rows = [
        [_name(verdict.arm), f"`{verdict.base}`", *_cells(verdict)]
        for verdict in verdicts(lines, COMPARISONS)
    ]
    return markdown_table(["precision", "beside", "gap, %", *_INTERVAL], rows)


_INTERVAL = (f"{CONFIDENCE:.0%} interval", "degrees of freedom", "verdict")


def sum_of_casts(lines: Sequence[Line], whole: str) -> dict[int, float]:
    """Returns by seed the gaps of a recipe's casts alone, added up, less the gap of all of them.

    Percent of BF16's loss, for the seeds that have all of these runs. Effects of casts add up where
    the interval of its mean holds zero.
    """
    loss = {(line.arm, line.seed): line.loss for line in lines if line.loss is not None}
    alone = [arm.name for arm in SUMS[whole]]
    names = [BASELINE, whole, *alone]
    found = {}
    for seed in sorted({seed for _, seed in loss}):
        if all((name, seed) in loss for name in names):
            gap = {name: 100 * (loss[name, seed] / loss[BASELINE, seed] - 1) for name in names}
            found[seed] = sum(gap[name] for name in alone) - gap[whole]
    return found


def _sum_table(lines: Sequence[Line]) -> str:
    rows = []
    for whole in SUMS:
        if gaps := sum_of_casts(lines, whole):
            verdict = Verdict(arm=whole, fork=RUN.name, tokens=RUN.tokens, gaps=gaps)
            each = " ".join(f"{gap:+.2f}" for gap in gaps.values())
            rows.append([f"`{whole}`", each, *_cells(verdict)[:3]])
    header = ["its casts alone, less all of them", "of each seed, %", "mean, %", *_INTERVAL[:2]]
    return markdown_table(header, rows)


def _cells(verdict: Verdict) -> list[str]:
    mean = f"{_mean(verdict):+.2f}" if verdict.gaps else "–"
    if verdict.interval is None:
        return [mean, "–", "–", verdict.text()]
    interval = f"[{verdict.interval.low:+.2f}, {verdict.interval.high:+.2f}]"
    return [mean, interval, str(verdict.interval.degrees_of_freedom), verdict.text()]


def _name(arm: str) -> str:
    return f"`{arm}`, control" if ARMS[arm].control else f"`{arm}`"


def _mean(verdict: Verdict) -> float:
    return statistics.fmean(verdict.gaps.values()) if verdict.gaps else float("inf")


def _losses(losses: dict[int, float | None]) -> str:
    texts = ["not finite" if loss is None else f"{loss:.4f}" for _, loss in sorted(losses.items())]
    return " ".join(texts)
