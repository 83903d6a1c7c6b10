"""The tiers of the tests, and the budget that keeps them.

    quick       pytest -m quick     the functions that take at most QUICK_SECONDS: for each edit
    default     pytest              all but full, extended and gpu: the README's command
    everything  .ci/run --all       also full (others find the same faults) and extended

tests/seconds.json holds the processor seconds of each test function, all its parameters together,
those of its fixtures and children included. `pytest --record-seconds` writes it; run it with an
empty compilation cache and both test processes (`CI=1 pytest --record-seconds`).

Where the environment variable CI is set, a run fails
- if a test function of the default is not in the table,
- if the table's sum over the default exceeds BUDGET_SECONDS,
- if the whole default ran and took more than that, on a machine as fast as the table's: how fast a
  machine is tells the median over the functions of what they took and what the table says.
"""

import collections
import json
import os
import resource
import statistics
from pathlib import Path

import pytest

from tests.support import ROOT, shared_programs

TABLE = ROOT / "tests" / "seconds.json"
QUICK_SECONDS = 1.0
# Of processor time, of the default (docs/results/test_suite.md). It only falls.
BUDGET_SECONDS = 1000.0
DEARER = ("full", "extended", "gpu")  # marks of tests that the default leaves out
SPEED_SECONDS = 1.0  # functions that take longer tell how fast the machine is

_RECORD = "--record-seconds"


def processor_seconds() -> dict[str, float]:
    """Seconds so far: of this process, of its children that have ended, and of XLA in it."""
    own, children = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {
        "here": own.ru_utime + own.ru_stime,
        "children": children.ru_utime + children.ru_stime,
        "xla": shared_programs.seconds(),
    }


def function(nodeid: str) -> str:
    """The test function of a test: its id without parameters."""
    return nodeid.split("[")[0]


def read_table(path: Path) -> dict[str, float]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write_table(table: dict[str, float], path: Path) -> None:
    rounded = {name: round(table[name], 2) for name in sorted(table)}
    path.write_text(json.dumps(rounded, indent=0) + "\n", encoding="utf-8")


def complaints(table: dict[str, float], measured: dict[str, float]) -> list[str]:
    """What is wrong with the cost of the default tier, a line each.

    Args:
      table: recorded seconds by function.
      measured: seconds by function of the default tier, of this run.
    """
    unknown = sorted(measured.keys() - table.keys())
    lines = [f"{name} is not in {TABLE.name}: pytest {_RECORD} FILE" for name in unknown]
    recorded = sum(table[name] for name in measured if name in table)
    if recorded > BUDGET_SECONDS:
        lines.append(
            f"the default tier takes {recorded:.0f} s by {TABLE.name}, more than "
            f"{BUDGET_SECONDS:g} s: make tests cheaper, or move some to full (tests/mutants)"
        )
    spent = sum(measured.values()) / speed(table, measured)
    if spent > BUDGET_SECONDS:
        lines.append(
            f"the default tier took {spent:.0f} s on a machine as fast as that of {TABLE.name}, "
            f"more than {BUDGET_SECONDS:g} s"
        )
    return lines


def speed(table: dict[str, float], measured: dict[str, float]) -> float:
    """How many times as long as the table says this machine takes; 1 if nothing tells."""
    ratios = [
        measured[name] / table[name]
        for name in measured.keys() & table.keys()
        if table[name] > SPEED_SECONDS
    ]
    return statistics.median(ratios) if ratios else 1.0


class Costs:
    """What the tests of a run cost: each report carries its seconds to the process that sums them.

    Attributes:
      path: of the table.
      by_function: seconds by test function, of those that were not skipped.
      by_cause: seconds by cause: XLA, child processes, the rest.
    """

    def __init__(self, path: Path):
        self.path = path
        self.by_function: dict[str, float] = collections.defaultdict(float)
        self.by_cause: dict[str, float] = collections.defaultdict(float)
        self._default: set[str] = set()
        self._ran: set[str] = set()
        self._before = processor_seconds()

    @pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
    def pytest_collection_modifyitems(self, items):
        table = read_table(self.path)
        files = {function(item.nodeid): item.path for item in items}
        cost: dict[Path, float] = collections.defaultdict(float)
        for name, path in files.items():
            cost[path] += table[name] if name in table else 0.0
        # Dear files first, so that no process is left alone with one at the end. A file's tests
        # stay together and in their order.
        items.sort(key=lambda item: -cost[item.path])
        for item in items:
            name = function(item.nodeid)
            if _in_default(item) and name in table and table[name] <= QUICK_SECONDS:
                item.add_marker(pytest.mark.quick)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item):
        report = yield
        after = processor_seconds()
        report.seconds = {cause: after[cause] - self._before[cause] for cause in after}
        report.in_default = _in_default(item)
        self._before = after
        return report

    def pytest_runtest_logreport(self, report):
        if not hasattr(report, "seconds"):  # of a test process that crashed
            return
        name, seconds = function(report.nodeid), report.seconds
        self.by_cause["XLA"] += seconds["xla"]
        self.by_cause["child processes"] += seconds["children"]
        self.by_cause["the rest"] += seconds["here"] - seconds["xla"]
        self.by_function[name] += seconds["here"] + seconds["children"]
        if report.when == "call" and not report.skipped:
            self._ran.add(name)
        if report.in_default:
            self._default.add(name)

    def measured(self) -> dict[str, float]:
        """Seconds by function, without those of which every test was skipped."""
        return {name: self.by_function[name] for name in self._ran}

    def measured_default(self) -> dict[str, float]:
        return {name: self.by_function[name] for name in self._ran & self._default}

    def pytest_sessionfinish(self, session):
        config = session.config
        if hasattr(config, "workerinput"):  # a test process: the one that started it sums up
            return
        if config.getoption(_RECORD):
            write_table(read_table(self.path) | self.measured(), self.path)
        elif os.environ.get("CI") and complaints(read_table(self.path), self.measured_default()):
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        measured, table = self.measured(), read_table(self.path)
        causes = ", ".join(f"{cause} {s:.0f}" for cause, s in sorted(self.by_cause.items()))
        line = f"processor seconds: {sum(measured.values()):.0f} ({causes})"
        terminalreporter.write_line(f"{line}; {speed(table, measured):.2f} of {TABLE.name}'s")
        if os.environ.get("CI"):
            for line in complaints(table, self.measured_default()):
                terminalreporter.write_line(f"FAILED {line}")


def _in_default(item: pytest.Item) -> bool:
    return not any(item.get_closest_marker(mark) for mark in DEARER)


def pytest_addoption(parser):
    parser.addoption(_RECORD, action="store_true", help=f"write what tests cost to {TABLE.name}")


def pytest_configure(config):
    config.pluginmanager.register(Costs(TABLE), "costs of tests")
