"""What the ledger of the study decides: gaps to BF16, pair by pair, with t-intervals.

Written before the first run. For each arm and fork:

    gap         100 (loss / BF16's loss - 1), of the same seed, fork, held-out rows, code and card,
                and of the same trunk where forks of several arms share one
    interval    of the mean gap over seeds: Student's t, 95%, one degree of freedom less than seeds
    differs     the interval leaves zero out, or training stopped in at least one seed
    equivalent  the whole interval lies within MARGIN of zero
    one seed    has no interval, and decides nothing

An arm may differ and be equivalent: a small gap that is known well. Neither means: not decided.

The null, BF16 computed another way, is treated as an arm: what its gaps scatter by is what any
change of program does. About one in twenty of its intervals leaves zero out by chance. The controls
are known to be worse; if one of them does not differ where it has two seeds or more, the study
shows nothing.
"""

import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from experiments.markdown import markdown_table
from experiments.study.intervals import CONFIDENCE, Interval, t_interval
from experiments.study.parity_ledger import Line
from experiments.study.parity_plan import ALL_FORKS, ARMS, BASELINE, NULL, Fork

MARGIN = 0.2  # percent of BF16's loss, to either side; fixed before the first run

_PAIRED = ("setting", "data", "rows", "card", "code")  # what both members of a pair have in common
_BRANCHES = {arm.name for arm in ARMS.values() if arm.trunk is not None}  # also the trunk


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is known of one arm at one fork.

    Attributes:
      gaps: percent of the base's loss, by seed.
      stopped: seeds in which training was not finite, or BF16's pair would be.
      base: the arm that it is compared with.
      margin: percent of the base's loss within which they are equivalent.
    """

    arm: str
    fork: str
    tokens: int
    gaps: dict[int, float]
    stopped: tuple[int, ...] = ()
    base: str = BASELINE
    margin: float = MARGIN

    @property
    def interval(self) -> Interval | None:
        return t_interval(list(self.gaps.values())) if len(self.gaps) > 1 else None

    @property
    def differs(self) -> bool:
        if self.stopped:
            return True
        return self.interval is not None and not self.interval.low <= 0 <= self.interval.high

    @property
    def equivalent(self) -> bool:
        if self.stopped or self.interval is None:
            return False
        return -self.margin <= self.interval.low and self.interval.high <= self.margin

    def text(self) -> str:
        """Returns the verdict in words."""
        if self.stopped:
            return f"not finite in {len(self.stopped)} of {len(self.stopped) + len(self.gaps)}"
        if self.interval is None:
            return "one seed"
        within = f"within {self.margin}%" if self.equivalent else ""
        apart = ("worse" if self.interval.low > 0 else "better") if self.differs else ""
        return ", ".join(filter(None, (apart, within))) or "not decided"


def verdicts(lines: Sequence[Line]) -> list[Verdict]:
    """Returns a verdict for each arm but the baseline, and each fork, of which there are pairs.

    Args:
      lines: of one setting and one set of data.

    Raises:
      ValueError: there are no lines; or the two members of a pair were not run alike, and the
        message says in what.
    """
    if not lines:
        raise ValueError("the ledger has no run of this setting and this text")
    each = [(arm, fork) for arm in ARMS if arm != BASELINE for fork in ALL_FORKS]
    found = [compare(lines, arm, fork) for arm, fork in each]
    return [verdict for verdict in found if verdict is not None]


def compare(
    lines: Sequence[Line], arm: str, fork: Fork, base: str = BASELINE, margin: float = MARGIN
) -> Verdict | None:
    """Returns what is known of an arm beside another; None if no seed has both.

    Raises:
      ValueError: as `verdicts`.
    """
    pairs = _pairs(lines, arm, fork.name, base)
    if not pairs:
        return None
    gaps = {
        line.seed: 100 * (line.loss / other.loss - 1)
        for other, line in pairs
        if line.loss is not None and other.loss is not None
    }
    return Verdict(
        arm=arm,
        fork=fork.name,
        tokens=fork.tokens,
        gaps=gaps,
        stopped=tuple(line.seed for _, line in pairs if line.stopped),
        base=base,
        margin=margin,
    )


def _pairs(lines: Sequence[Line], arm: str, fork: str, base: str) -> list[tuple[Line, Line]]:
    """Returns (the base's line, the arm's line) of each seed that has both, by seed."""
    pairs = []
    for line in lines:
        if (line.arm, line.fork) != (arm, fork):
            continue
        for other in lines:
            if (other.arm, other.fork, other.seed) == (base, fork, line.seed) and not other.stopped:
                _require_alike(other, line)
                pairs.append((other, line))
    return sorted(pairs, key=lambda pair: pair[1].seed)


def _require_alike(base: Line, line: Line) -> None:
    for field in (*_PAIRED, "trunk") if line.arm in _BRANCHES else _PAIRED:
        before, after = getattr(base, field), getattr(line, field)
        if before != after and not (field == "rows" and line.stopped):
            raise ValueError(
                f"{line.arm}, seed {line.seed}, {line.fork}: {field} is {after}, and {before} in"
                f" {base.arm}: they are no pair"
            )


def control_failures(found: Sequence[Verdict]) -> list[str]:
    """Returns the controls that have two seeds or more and do not differ; a study without is good.

    Each is judged at its longest fork.
    """
    last = {verdict.arm: verdict for verdict in found if len(verdict.gaps) > 1 or verdict.stopped}
    return [
        f"{name} does not differ from BF16 at {verdict.fork}: the study detects nothing"
        for name, verdict in last.items()
        if ARMS[name].control and not verdict.differs
    ]


# Results ------------------------------------------------------------------------------------------


def table(found: Sequence[Verdict]) -> str:
    """Returns the Markdown table of all verdicts."""
    rows = []
    for verdict in found:
        interval, freedom = "–", "–"
        if verdict.interval is not None:
            interval = f"[{verdict.interval.low:+.3f}, {verdict.interval.high:+.3f}]"
            freedom = str(verdict.interval.degrees_of_freedom)
        seeds = ", ".join(f"{gap:+.3f}" for gap in verdict.gaps.values())
        mean = f"{_mean(verdict):+.3f}" if verdict.gaps else "–"
        name = f"`{verdict.arm}`{_role(verdict.arm)}"
        rows.append([name, verdict.fork, seeds, mean, interval, freedom, verdict.text()])
    header = ["arm", "tokens", "gap of each seed, %", "mean", f"{CONFIDENCE:.0%} interval"]
    return markdown_table([*header, "degrees of freedom", "verdict"], rows)


def _role(arm: str) -> str:
    if arm == NULL:
        return ", the null"
    return ", control" if ARMS[arm].control else ""


def _mean(verdict: Verdict) -> float:
    return statistics.fmean(verdict.gaps.values())  # the same digits in Python 3.11 and 3.12


def numbers(found: Sequence[Verdict]) -> dict[str, dict]:
    """Returns the numbers of docs/parity.json: each arm at its longest fork, in percent.

    `gap_low` and `gap_high` are null for one seed.
    """
    result: dict[str, dict] = {}
    for verdict in {each.arm: each for each in found if each.gaps}.values():
        interval, arm = verdict.interval, verdict.arm
        seeds = {"seeds": list(verdict.gaps.values())}
        result[f"gap/{arm}"] = {"value": _mean(verdict), "unit": "% of BF16's loss"} | seeds
        result[f"gap_low/{arm}"] = {"value": None if interval is None else interval.low}
        result[f"gap_high/{arm}"] = {"value": None if interval is None else interval.high}
        result[f"seeds/{arm}"] = {"value": len(verdict.gaps)}
        result[f"tokens/{arm}"] = {"value": verdict.tokens}
    return result


def write_json(path: Path, found: Sequence[Verdict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(numbers(found), indent=1) + "\n", encoding="utf-8")
