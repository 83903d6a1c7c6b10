"""The kill table, and what follows: which expensive test functions may leave the default."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.mutant import Mutant
from tests.mutants.runs import WANTED, Outcome

TABLE = Path(__file__).with_name("kills.json")


def read_table() -> dict[str, dict]:
    """A mutant's name -> {"killed_by", "tried", "left", "seconds"}, of the default's tests.

    `tried` is the number of test functions that were run, `left` that of covering ones that were
    not. A mutant is finished when WANTED functions kill it or none is left.

    `outside` is what tests outside the default said: {"killed_by", "tried", "left"}, where `tried`
    has names. Mutants have it that fewer than WANTED functions of the default kill.
    """
    return json.loads(TABLE.read_text("utf-8")) if TABLE.exists() else {}


def finished(entry: Mapping) -> bool:
    return len(entry["killed_by"]) >= WANTED or entry["left"] == 0


def write_entry(mutant: Mutant, outcome: Outcome, left: int) -> None:
    entry = {
        "killed_by": dict(sorted(outcome.killed_by.items())),
        "tried": len(outcome.tried),
        "left": left,
        "seconds": round(outcome.seconds, 1),
    }
    table = read_table()
    old = table[mutant.name] if mutant.name in table else {}
    if "outside" in old and len(entry["killed_by"]) < WANTED:
        entry["outside"] = old["outside"]
    _write({**table, mutant.name: entry})


def write_outside(mutant: Mutant, outcome: Outcome, left: int) -> None:
    table = read_table()
    table[mutant.name]["outside"] = {
        "killed_by": dict(sorted(outcome.killed_by.items())),
        "tried": sorted(outcome.tried),
        "left": left,
    }
    _write(table)


def _write(table: dict[str, dict]) -> None:
    TABLE.write_text(
        json.dumps(table, indent=1, sort_keys=True, ensure_ascii=False) + "\n", "utf-8"
    )


@dataclass(frozen=True)
class Choice:
    """Which of the expensive test functions stay in the default.

    Attributes:
      stay: test function -> the names of the mutants for which it is needed.
      leave: the others.
    """

    stay: dict[str, list[str]]
    leave: list[str]


def choose(table: Mapping[str, dict], seconds: Mapping[str, float], over: float) -> Choice:
    """Greedy weighted set cover: an expensive function leaves if each mutant that it kills is
    killed by two that stay, or by all that kill it at all.

    Args:
      over: a function that takes more than these processor seconds is expensive.
    """
    expensive = {name for name, cost in seconds.items() if cost > over}
    missing: dict[str, int] = {}
    for name, entry in table.items():
        killers = set(entry["killed_by"])
        missing[name] = min(WANTED, len(killers)) - min(WANTED, len(killers - expensive))
    stay: dict[str, list[str]] = {}
    while any(missing.values()):
        wanted: dict[str, list[str]] = {}
        for name, count in missing.items():
            for killer in table[name]["killed_by"]:
                if count and killer in expensive and killer not in stay:
                    wanted.setdefault(killer, []).append(name)
        best = max(sorted(wanted), key=lambda killer: len(wanted[killer]) / seconds[killer])
        stay[best] = wanted[best]
        for name in wanted[best]:
            missing[name] -= 1
    return Choice(stay, sorted(expensive - set(stay)))


@dataclass(frozen=True)
class Figures:
    """Names of mutants.

    Attributes:
      killed, default, two: those killed at all, by the default, by two functions of it.
      survived: those that nothing kills.
      rule: killed by tests outside the default, but not by two functions of it, as they must be.
      unknown: neither killed by two, nor run against all tests outside that enter their symbols.
    """

    killed: list[str]
    default: list[str]
    two: list[str]
    survived: list[str]
    rule: list[str]
    unknown: list[str]


def figures(table: Mapping[str, dict], default: set[str]) -> Figures:
    """Counts the mutants of a table.

    Args:
      default: the test functions of the default tier.
    """
    by = {name: set(entry["killed_by"]) & default for name, entry in table.items()}
    outside = {
        name: entry["outside"]
        for name, entry in table.items()
        if "outside" in entry and len(by[name]) < WANTED
    }
    killed_outside = {name for name, said in outside.items() if said["killed_by"]}
    judged = {name for name, said in outside.items() if said["killed_by"] or said["left"] == 0}
    return Figures(
        killed=[name for name in table if table[name]["killed_by"] or name in killed_outside],
        default=[name for name, killers in by.items() if killers],
        two=[name for name, killers in by.items() if len(killers) >= WANTED],
        survived=[
            name for name in table if not table[name]["killed_by"] and name not in killed_outside
        ],
        rule=[name for name in table if name in killed_outside],
        unknown=[name for name in table if len(by[name]) < WANTED and name not in judged],
    )
