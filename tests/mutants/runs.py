"""Runs the tests that cover a mutant, cheapest first, until enough test functions kill it."""

import json
import resource
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mutants import copies
from tests.mutants.killer import ORDER
from tests.mutants.mutant import Mutant, place
from tests.mutants.recorder import FOLDER, RECORD, SITE
from tests.support import ROOT

BUILD = ROOT / "build" / "mutants"  # git ignores it
WANTED = 2  # test functions of the default that kill a mutant before it is done
FIRST_BATCH_S, GROWTH = 8.0, 3.0  # of test functions in one process


@dataclass(frozen=True)
class Tier:
    """Some of the tests. A function may have cases in the default, and others that have left it.

    Attributes:
      marks: which tests, an expression of pytest's -m.
      folder: of what is recorded.
      wanted: test functions that kill a mutant before it is done.
    """

    marks: str
    folder: Path
    wanted: int


DEFAULT = Tier("not full and not extended and not gpu", BUILD, WANTED)
OUTSIDE = Tier("(full or extended) and not gpu", BUILD / "outside", 1)


@dataclass(frozen=True)
class Covering:
    """A test function that enters a symbol, and the processor seconds that it takes."""

    name: str
    seconds: float


@dataclass
class Outcome:
    """What the tests said about a mutant.

    Attributes:
      killed_by: test function -> how: `failed`, `crashed` or `timed out`.
      tried: test functions that were run to their end, those that killed among them.
      seconds: processor time.
    """

    killed_by: dict[str, str]
    tried: list[str]
    seconds: float


def read_record(tier: Tier) -> dict[str, dict]:
    """test function -> what the recorder wrote."""
    path = tier.folder / RECORD
    if not path.exists():
        raise FileNotFoundError(f"{path}: run `python -m tests.mutants record` first")
    return json.loads(path.read_text("utf-8"))


def record(tier: Tier, paths: list[str], functions: set[str]) -> None:
    """Records the test functions of some files in a copy of the tree; of all, if none are named."""
    tier.folder.mkdir(parents=True, exist_ok=True)
    with copies.copied_tree() as copy:
        (copy / "sitecustomize.py").write_text(SITE, "utf-8")
        variables = {FOLDER: str(tier.folder)}
        if functions:
            everything = {"functions": sorted(functions), "wanted": 10**9, "out": "/dev/null"}
            (copy / "order.json").write_text(json.dumps(everything), "utf-8")
            variables[ORDER] = str(copy / "order.json")
        plugins = ["tests.mutants.recorder", "tests.mutants.killer"]
        copies.pytest_in(copy, plugins, tier.marks, paths, variables)


def covering(
    known: dict[str, dict], mutant: Mutant, seconds: dict[str, float], killers: Collection[str] = ()
) -> list[Covering]:
    """The test functions that enter a mutant's symbol and pass without it, cheapest first.

    Those of the module's own tests, of its folder's, and of files with a function that kills the
    mutant, come before others that are as cheap.
    """
    files = {killer.partition("::")[0] for killer in killers}
    path, name = Path(place(ROOT, mutant).path), mutant.symbol.rpartition(":")[2]
    stem, folder = path.stem, path.parent.name
    found = [
        Covering(test, seconds[test] if test in seconds else entry["seconds"])
        for test, entry in known.items()
        if entry["passed"] and f"{stem}:{name}" in entry["symbols"]
        if (ROOT / test.partition("::")[0]).exists()
    ]

    def cost(each: Covering) -> float:
        test = Path(each.name.partition("::")[0])
        own = test.stem == f"{stem}_test" or test.as_posix() in files
        near = 0.1 if own else 0.3 if test.parent.name == folder else 1.0
        return max(each.seconds, 0.01) * near

    return sorted(found, key=cost)


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _batches(tests: list[Covering]) -> list[list[Covering]]:
    """Groups for one process each, later ones longer."""
    groups, limit, total = [], FIRST_BATCH_S, 0.0
    for test in tests:
        if not groups or total + test.seconds > limit:
            limit, total = (limit * GROWTH if groups else limit), 0.0
            groups.append([])
        groups[-1].append(test)
        total += test.seconds
    return groups


def _run_batch(
    copy: Path, tier: Tier, tests: list[Covering], wanted: int
) -> tuple[dict[str, str], list[str]]:
    """Runs test functions in one process; returns who killed how, and which came to an end."""
    with tempfile.TemporaryDirectory(prefix="mutants-out-") as folder:
        out, order = Path(folder, "out.jsonl"), Path(folder, "order.json")
        out.touch()
        names = [test.name for test in tests]
        order.write_text(json.dumps({"functions": names, "wanted": wanted, "out": str(out)}))
        expected = sum(test.seconds for test in tests)
        status = copies.pytest_in(
            copy,
            ["tests.mutants.killer"],
            tier.marks,
            sorted({name.partition("::")[0] for name in names}),
            {ORDER: str(order)},
            cpu_s=round(90 + 4 * expected),
            wall_s=round(600 + 30 * expected),
        )
        lines = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    killed = {name: "failed" for what, name in lines if what == "failed"}
    ended = [name for what, name in lines if what == "ended"]
    began = [name for what, name in lines if what == "began"]
    unfinished = [name for name in began if name not in ended and name not in killed]
    if unfinished:
        how = "timed out" if status is None or status in (-24, -9) else "crashed"
        killed[unfinished[-1]] = how
    elif not lines and status not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        said = (copy / copies.OUTPUT).read_text("utf-8", errors="replace")
        raise RuntimeError(f"pytest ended with {status} before any test of {names[:3]}: {said}")
    return killed, [*ended, *(name for name in killed if name not in ended)]


def finders(copy: Path, tier: Tier, mutant: Mutant, tests: list[Covering]) -> dict[str, str]:
    """Those of a few test functions that find a mutant and pass without it, and how."""
    with copies.fault(copy, mutant):
        killed, _ = _run_batch(copy, tier, tests, len(tests))
    if not killed:
        return {}
    broken, _ = _run_batch(copy, tier, tests, len(tests))
    return {name: how for name, how in killed.items() if name not in broken}


def run(
    copy: Path,
    tier: Tier,
    mutant: Mutant,
    tests: list[Covering],
    outcome: Outcome,
    limit_s: float,
) -> None:
    """Goes on with a mutant: runs the tests that have not been tried, and adds what they say.

    A test that fails is run again by itself, with the fault and without: others that run before it
    may be what fails it.
    """
    begin, tried = _children_s(), set(outcome.tried)
    left = [test for test in tests if test.name not in tried]
    while left and len(outcome.killed_by) < tier.wanted and _children_s() - begin < limit_s:
        batch = _batches(left)[0]
        wanted = tier.wanted - len(outcome.killed_by)
        with copies.fault(copy, mutant):
            killed, ended = _run_batch(copy, tier, batch, wanted)
        if killed:
            failed = [test for test in batch if test.name in killed]
            outcome.killed_by |= finders(copy, tier, mutant, failed)
        # One that was not run at all is gone from the tree, or no longer of the tier.
        done = set(ended) if len(killed) >= wanted else {t.name for t in batch}
        if any(how != "failed" for how in killed.values()):
            done = set(ended)
        outcome.tried += sorted(done - tried)
        tried |= done
        left = [test for test in left if test.name not in done]
    outcome.seconds += _children_s() - begin
