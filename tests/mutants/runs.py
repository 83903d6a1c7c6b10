"""Runs the tests that cover a mutant, cheapest first, until enough test functions kill it."""

import json
import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mutants import copies
from tests.mutants.killer import ORDER
from tests.mutants.mutant import Mutant, place
from tests.mutants.recorder import FOLDER, RECORD, SITE
from tests.support import ROOT

BUILD = ROOT / "build" / "mutants"  # git ignores it
WANTED = 2  # test functions that kill a mutant before it is done
FIRST_BATCH_S, GROWTH = 8.0, 3.0  # of test functions in one process


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


def read_record() -> dict[str, dict]:
    """test function -> what the recorder wrote."""
    path = BUILD / RECORD
    if not path.exists():
        raise FileNotFoundError(f"{path}: run `python -m tests.mutants record` first")
    return json.loads(path.read_text("utf-8"))


def record(paths: list[str], functions: set[str]) -> None:
    """Records the test functions of some files in a copy of the tree; of all, if none are named."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with copies.copied_tree() as copy:
        (copy / "sitecustomize.py").write_text(SITE, "utf-8")
        variables = {FOLDER: str(BUILD)}
        if functions:
            everything = {"functions": sorted(functions), "wanted": 10**9, "out": "/dev/null"}
            (copy / "order.json").write_text(json.dumps(everything), "utf-8")
            variables[ORDER] = str(copy / "order.json")
        plugins = ["tests.mutants.recorder", "tests.mutants.killer"]
        copies.pytest_in(copy, plugins, paths, variables)


def covering(known: dict[str, dict], mutant: Mutant, seconds: dict[str, float]) -> list[Covering]:
    """The test functions that enter a mutant's symbol and pass without it, cheapest first.

    Those of the module's own tests, and of its folder's, come before others that are as cheap.
    """
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
        near = 0.1 if test.stem == f"{stem}_test" else 0.3 if test.parent.name == folder else 1.0
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


def _run_batch(copy: Path, tests: list[Covering], wanted: int) -> tuple[dict[str, str], list[str]]:
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


def _without_broken(copy: Path, batch: list[Covering], killed: dict[str, str]) -> dict[str, str]:
    """Those that a batch found dead, without tests that fail in such a batch without a fault."""
    if not killed:
        return {}
    broken, _ = _run_batch(copy, batch, len(batch))
    return {name: how for name, how in killed.items() if name not in broken}


def finders(copy: Path, mutant: Mutant, tests: list[Covering]) -> dict[str, str]:
    """Those of a few test functions that find a mutant and pass without it, and how."""
    with copies.fault(copy, mutant):
        killed, _ = _run_batch(copy, tests, len(tests))
    return _without_broken(copy, tests, killed)


def run(
    copy: Path, mutant: Mutant, tests: list[Covering], outcome: Outcome, limit_s: float
) -> None:
    """Goes on with a mutant: runs the tests that have not been tried, and adds what they say."""
    begin, deadline = _children_s(), time.monotonic() + limit_s
    tried = set(outcome.tried)
    left = [test for test in tests if test.name not in tried]
    while left and len(outcome.killed_by) < WANTED and time.monotonic() < deadline:
        batch = _batches(left)[0]
        wanted = WANTED - len(outcome.killed_by)
        with copies.fault(copy, mutant):
            killed, ended = _run_batch(copy, batch, wanted)
        outcome.killed_by |= _without_broken(copy, batch, killed)
        # One that was not run at all is gone from the tree, or no longer of the tier.
        done = set(ended) if len(killed) >= wanted else {t.name for t in batch}
        if any(how != "failed" for how in killed.values()):
            done = set(ended)
        outcome.tried += sorted(done - tried)
        tried |= done
        left = [test for test in left if test.name not in done]
    outcome.seconds += _children_s() - begin
