"""Faults that are planted in the library, and the tests that find them.

    python -m tests.mutants record [FILE…]        # which test functions enter which functions
    python -m tests.mutants run [--at-most S]     # plants each mutant, runs what covers it
    … record --outside; … run --outside           # the same with tests outside the default
    python -m tests.mutants check                 # tries again what the table says
    python -m tests.mutants report [--over S]     # what the default finds, and what may leave it

`record` needs Python 3.12. Its record is build/mutants/record.json, which git ignores; a test
function that is recorded again replaces its entry. `run` goes on where it was stopped: a mutant
that two test functions killed, or that all covering ones have let live, is not run again. Its
results are tests/mutants/kills.json. `--outside` takes the tests that are `full` or `extended`:
which of them kill a mutant that fewer than two functions of the default kill. Both work in a copy
of the tree, in one process, and take what a test function costs from tests/seconds.json.

`check` names the functions of the table that do not find their mutant, or fail without it, too; a
skipped one finds nothing.

The mutants are in library.py, planted.py and past.py; docs/results/mutants.md has the results.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path

from tests.mutants import copies, runs, table
from tests.mutants.library import LIBRARY_MUTANTS
from tests.mutants.mutant import Mutant
from tests.mutants.past import PAST
from tests.mutants.planted import PLANTED
from tests.mutants.recorder import function_of
from tests.support import ROOT

SECONDS = ROOT / "tests" / "seconds.json"
UNKNOWN_S = 10.0  # of a function that JAX 0.10 skips
TRIED = runs.BUILD / "tried.json"  # a mutant's name -> the test functions that were run


def recorded_seconds(path: Path) -> dict[str, float]:
    """test function -> processor seconds."""
    return json.loads(path.read_text("utf-8"))


def cost_of(name: str, seconds: dict[str, float]) -> float:
    return seconds[name] if name in seconds else UNKNOWN_S


def record(args: argparse.Namespace) -> None:
    if sys.version_info < (3, 12):
        sys.exit("record needs Python 3.12, which has sys.monitoring")
    tier = runs.OUTSIDE if args.outside else runs.DEFAULT
    chosen: set[str] = set()
    if args.at_most is not None:
        seconds = recorded_seconds(args.seconds)
        chosen = {name for name, cost in seconds.items() if args.over < cost <= args.at_most}
        if args.new:
            chosen -= set(runs.read_record(tier))
        args.files = args.files or sorted({name.partition("::")[0] for name in chosen})
    copies.preload()
    runs.record(tier, args.files, chosen)


def run(args: argparse.Namespace) -> None:
    known = runs.read_record(runs.OUTSIDE if args.outside else runs.DEFAULT)
    seconds = recorded_seconds(args.seconds)
    copies.preload()
    tried = json.loads(TRIED.read_text("utf-8")) if TRIED.exists() else {}
    with copies.copied_tree() as copy:
        for mutant in [*LIBRARY_MUTANTS, *PLANTED, *PAST]:
            if not any(text in mutant.name for text in args.only):
                continue
            if args.again and mutant.name in tried:
                tried[mutant.name] = [name for name in tried[mutant.name] if name not in args.again]
            if args.outside:
                run_outside(copy, mutant, known, args)
            else:
                run_one(copy, mutant, known, seconds, tried, args)


def run_one(
    copy: Path, mutant: Mutant, known: dict, seconds: dict, tried: dict, args: argparse.Namespace
) -> None:
    """Runs what is left of a mutant, unless it is finished, and writes what came of it."""
    entries = table.read_table()
    old = entries[mutant.name] if mutant.name in entries else None
    if old is not None and len(old["killed_by"]) >= runs.WANTED:
        return
    outcome = runs.Outcome(
        killed_by={} if old is None else dict(old["killed_by"]),
        tried=tried[mutant.name] if mutant.name in tried else [],
        seconds=0.0 if old is None else old["seconds"],
    )
    tests = runs.covering(known, mutant, seconds, outcome.killed_by)
    cheap = [test for test in tests if test.seconds <= args.at_most]
    if args.tests:
        cheap = [runs.Covering(name, cost_of(name, seconds)) for name in args.tests]
    if not {test.name for test in cheap} - set(outcome.tried) and (
        tests or args.at_most < math.inf
    ):
        return
    runs.run(copy, runs.DEFAULT, mutant, cheap, outcome, args.limit)
    left = len({test.name for test in tests} - set(outcome.tried))
    table.write_entry(mutant, outcome, left)
    tried[mutant.name] = outcome.tried
    TRIED.write_text(json.dumps(tried, indent=0), "utf-8")
    say(mutant, outcome, left)


def run_outside(copy: Path, mutant: Mutant, known: dict, args: argparse.Namespace) -> None:
    """Runs what is left outside the default, unless two functions of the default kill a mutant."""
    entries = table.read_table()
    if mutant.name not in entries or len(entries[mutant.name]["killed_by"]) >= runs.WANTED:
        return
    entry = entries[mutant.name]
    old = entry["outside"] if "outside" in entry else {"killed_by": {}, "tried": []}
    outcome = runs.Outcome(dict(old["killed_by"]), list(old["tried"]), 0.0)
    # What a function's cases outside take, the record knows; seconds.json has those of the default.
    tests = runs.covering(known, mutant, {})
    cheap = [test for test in tests if test.seconds <= args.at_most]
    runs.run(copy, runs.OUTSIDE, mutant, cheap, outcome, args.limit)
    left = len({test.name for test in tests} - set(outcome.tried))
    table.write_outside(mutant, outcome, left)
    say(mutant, outcome, left)


def say(mutant: Mutant, outcome: runs.Outcome, left: int) -> None:
    print(
        f"{time.strftime('%H:%M:%S')} {len(outcome.killed_by)} killed, {len(outcome.tried)} tried, "
        f"{left} left, {outcome.seconds:.0f} s: {mutant.name!r}",
        flush=True,
    )


def check(args: argparse.Namespace) -> None:
    entries, seconds = table.read_table(), recorded_seconds(args.seconds)
    copies.preload()
    with copies.copied_tree() as copy:
        for mutant in [*LIBRARY_MUTANTS, *PLANTED, *PAST]:
            if mutant.name not in entries or not any(text in mutant.name for text in args.only):
                continue
            tests = [
                runs.Covering(name, cost_of(name, seconds))
                for name in entries[mutant.name]["killed_by"]
            ]
            found = runs.finders(copy, runs.DEFAULT, mutant, tests) if tests else {}
            wrong = [test.name for test in tests if test.name not in found]
            print(f"{len(found)} of {len(tests)}: {mutant.name!r}", *wrong, sep="\n  ", flush=True)


def default_functions() -> set[str]:
    """The test functions that plain `pytest` runs."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "--collect-only", "-q", "--no-header"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {function_of(line) for line in listed.splitlines() if "::" in line}


def report(args: argparse.Namespace) -> None:
    entries, seconds = table.read_table(), recorded_seconds(args.seconds)
    found = table.figures(entries, default_functions())
    total, killed = len(entries), len(found.killed)
    print(
        f"{total} mutants, {killed} killed, {len(found.default)} by the default, "
        f"{len(found.two)} by two functions of it"
    )
    print(
        f"Outside the default a test kills {len(found.rule)} of the other "
        f"{total - len(found.two)}, and {len(found.unknown)} were not run against all that could"
    )
    for title, names in (
        ("Killed, but not by the default", sorted(set(found.killed) - set(found.default))),
        ("Killed outside the default, but not by two functions of it", found.rule),
        ("Not run against all tests outside the default", found.unknown),
        ("Survived", found.survived),
    ):
        print(f"\n{title}:")
        for name in names:
            entry = entries[name]
            print(f"  {name!r} ({entry['tried']} tried, {entry['left']} left)")
    choice = table.choose(entries, seconds, args.over)
    print(f"\nOf the functions that take more than {args.over:g} s, these must stay:")
    for name, needed in sorted(choice.stay.items()):
        print(f"  {name} ({seconds[name]:.1f} s): {len(needed)} mutants, such as {needed[0]!r}")
    saved = sum(seconds[name] for name in choice.leave)
    print(f"\nThese {len(choice.leave)} may leave, {saved:.0f} s:")
    for name in choice.leave:
        print(f"  {name} ({seconds[name]:.1f} s)")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=Path, default=SECONDS, help="the table of seconds")
    commands = parser.add_subparsers(required=True)
    tier = argparse.ArgumentParser(add_help=False)
    tier.add_argument("--outside", action="store_true", help="tests outside the default")
    chosen = argparse.ArgumentParser(add_help=False)
    chosen.add_argument(
        "--only",
        nargs="*",
        default=[""],
        metavar="TEXT",
        help="mutants with one of these in the name",
    )
    each = commands.add_parser("record", parents=[tier], help="record what test functions enter")
    each.add_argument("files", nargs="*", metavar="FILE")
    each.add_argument("--at-most", type=float, help="only functions of so many seconds")
    each.add_argument("--over", type=float, default=0.0, help="and of more than these")
    each.add_argument("--new", action="store_true", help="and that are not recorded yet")
    each.set_defaults(command=record)
    each = commands.add_parser(
        "run", parents=[chosen, tier], help="plant mutants and run what covers them"
    )
    each.add_argument("--at-most", type=float, default=math.inf, help="seconds of a function")
    each.add_argument(
        "--again",
        nargs="*",
        metavar="TEST",
        help="test functions to try again, as they have changed",
    )
    each.add_argument("--tests", nargs="*", metavar="TEST", help="test functions to run, no others")
    each.add_argument("--limit", type=float, default=1800.0, help="processor seconds for a mutant")
    each.set_defaults(command=run)
    each = commands.add_parser("check", parents=[chosen], help="try again what the table says")
    each.set_defaults(command=check)
    each = commands.add_parser("report", help="what the table says")
    each.add_argument("--over", type=float, default=5.0, help="seconds of an expensive function")
    each.set_defaults(command=report)
    args = parser.parse_args()
    args.command(args)


if __name__ == "__main__":
    main()
