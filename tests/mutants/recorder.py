"""A pytest plugin: which functions of the library each test function enters, and its seconds.

`python -m tests.mutants record` loads it, on Python 3.12 or later. `sys.monitoring` reports the
first entry of every function to one of its tools, which then switches the event off for it. The
other tool gets the later entries of the library's functions only. That is nearly free;
`restart_events` for each test is not, since it touches all functions of JAX.

What a fixture enters counts for each test that has the fixture, also when it is made once for many.
Programs that a test starts record themselves (SITE). A function whose trace a test before has left
in a cache of JAX is not entered again, and so not recorded.
"""

import functools
import json
import os
import resource
import sys
import time
from collections import defaultdict
from pathlib import Path
from types import CodeType

import pytest

FIRST, LATER = 3, 4  # ids of tools of sys.monitoring
FOLDER = "MUTANTS_RECORD_FOLDER"  # the environment variable of the folder for what is recorded
ENTERED = "entered.txt"  # there: what the programs of the running test have entered
RECORD = "record.json"
WRITE_EVERY_S = 60.0

# Runs in every program that a test starts, before anything else.
SITE = """
import os, sys
if "MUTANTS_RECORD_FOLDER" in os.environ and not hasattr(sys, "_mutants"):
    sys._mutants = True
    _file = open(os.path.join(os.environ["MUTANTS_RECORD_FOLDER"], "entered.txt"), "a", 1)
    def _enter(code, offset):
        if "/fp8jax/" in code.co_filename:
            _file.write(f"{code.co_filename}\\t{code.co_qualname}\\n")
        return sys.monitoring.DISABLE
    sys.monitoring.use_tool_id(2, "mutants")
    sys.monitoring.register_callback(2, sys.monitoring.events.PY_START, _enter)
    sys.monitoring.set_events(2, sys.monitoring.events.PY_START)
"""


def function_of(nodeid: str) -> str:
    """The test function of a test: its id without parameters."""
    return nodeid.partition("[")[0]


@functools.cache
def symbol_of(filename: str, qualname: str) -> str | None:
    """stem:name of a code object of the library, without what is nested in it; else None."""
    if "/fp8jax/" not in filename or "/site-packages/" in filename or qualname[0] == "<":
        return None
    return f"{Path(filename).stem}:{qualname.partition('.<locals>')[0]}"


def _seconds() -> float:
    both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


class Recorder:
    """Collects what the running test, or the fixture that is being made for it, enters."""

    def __init__(self, folder: Path):
        self._folder, self._written = folder, time.monotonic()
        self._entered: set[str] = set()
        self._made: dict[object, set[str]] = defaultdict(set)  # by fixture
        self.symbols: dict[str, set[str]] = defaultdict(set)  # by test function, as all below
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: set[str] = set()
        start = sys.monitoring.events.PY_START
        for tool, callback in ((FIRST, self._enter_first), (LATER, self._enter)):
            sys.monitoring.use_tool_id(tool, "mutants")
            sys.monitoring.register_callback(tool, start, callback)
        sys.monitoring.set_events(FIRST, start)

    def _enter_first(self, code: CodeType, _offset: int):
        if symbol_of(code.co_filename, code.co_qualname) is not None:
            self._enter(code, _offset)
            sys.monitoring.set_local_events(LATER, code, sys.monitoring.events.PY_START)
        return sys.monitoring.DISABLE

    def _enter(self, code: CodeType, _offset: int):
        if (symbol := symbol_of(code.co_filename, code.co_qualname)) is not None:
            self._entered.add(symbol)

    def _taken(self) -> set[str]:
        """What was entered since the last call, by this process and those that it started."""
        path = self._folder / ENTERED
        if path.exists():
            for line in path.read_text("utf-8").splitlines():
                symbol = symbol_of(*line.partition("\t")[::2])
                self._entered |= set() if symbol is None else {symbol}
            path.unlink()
        entered, self._entered = self._entered, set()
        return entered

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef, request):
        outside = self._taken()
        try:
            return (yield)
        finally:
            inside = self._taken()
            self._made[fixturedef] |= inside
            self._entered = outside | inside

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        self._taken()
        name, begin = function_of(item.nodeid), _seconds()
        try:
            return (yield)
        finally:
            self.seconds[name] += _seconds() - begin
            self.symbols[name] |= self._taken()
            for made in item._fixtureinfo.name2fixturedefs.values():
                for fixture in made:
                    self.symbols[name] |= self._made[fixture]
            if time.monotonic() > self._written + WRITE_EVERY_S:
                self.pytest_sessionfinish()

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.add(function_of(report.nodeid))

    def pytest_sessionfinish(self):
        write(self._folder, self)
        self._written = time.monotonic()


def write(folder: Path, recorder: Recorder) -> None:
    """Adds what was recorded to the record in a folder; a test function replaces its old entry."""
    path = folder / RECORD
    known = json.loads(path.read_text("utf-8")) if path.exists() else {}
    for name, symbols in recorder.symbols.items():
        known[name] = {
            "seconds": round(recorder.seconds[name], 3),
            "passed": name not in recorder.failed,
            "symbols": sorted(symbols),
        }
    new = path.with_suffix(f".{os.getpid()}.tmp")
    new.write_text(json.dumps(known, indent=0, sort_keys=True), "utf-8")
    new.replace(path)
    print(f"\n{len(recorder.symbols)} test functions recorded at {time.strftime('%H:%M:%S')}")


def pytest_configure(config):
    if FOLDER in os.environ:
        config.pluginmanager.register(Recorder(Path(os.environ[FOLDER])), "mutants-recorder")
