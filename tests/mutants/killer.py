"""A pytest plugin: runs chosen test functions in order, and ends when enough of them have failed.

`python -m tests.mutants run` loads it in the copy with the fault. It writes a line for each test
function that begins, ends or fails, so that the tool knows where a process ended that crashed.
"""

import json
import os
from pathlib import Path

import pytest

from tests.mutants.recorder import function_of

ORDER = "MUTANTS_ORDER"  # the environment variable of a JSON file: {"functions", "wanted", "out"}


class Killer:
    """Collects, sorts and judges."""

    def __init__(self, order: dict):
        self._rank = {name: i for i, name in enumerate(order["functions"])}
        self._wanted, self._failed = order["wanted"], set()
        self._out = open(order["out"], "a", buffering=1, encoding="utf-8")
        self._running: str | None = None

    def _write(self, what: str, name: str) -> None:
        self._out.write(json.dumps([what, name]) + "\n")

    def _fail(self, name: str) -> None:
        if name not in self._failed:
            self._failed.add(name)
            self._write("failed", name)

    def pytest_sessionstart(self):
        import fp8jax

        assert Path(fp8jax.__file__).is_relative_to(os.getcwd()), fp8jax.__file__

    def pytest_collectreport(self, report):
        if report.failed:  # a module that fails while it is imported fails all its functions
            for name in self._rank:
                if name.startswith(report.nodeid + "::"):
                    self._fail(name)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        chosen = [item for item in items if function_of(item.nodeid) in self._rank]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        chosen.sort(key=lambda item: self._rank[function_of(item.nodeid)])
        items[:] = chosen

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        name = function_of(item.nodeid)
        if len(self._failed) >= self._wanted:
            item.session.shouldstop = "killed"
        if name in self._failed or item.session.shouldstop:  # nothing more to learn
            # The test before has kept what this one would need, but the next one may not.
            item.session._setupstate.teardown_exact(nextitem)
            return True
        if name != self._running:
            if self._running is not None:
                self._write("ended", self._running)
            self._running = name
            self._write("began", name)
        return None

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self._fail(function_of(report.nodeid))

    def pytest_sessionfinish(self):
        if self._running is not None:
            self._write("ended", self._running)


def pytest_configure(config):
    if ORDER in os.environ:
        order = json.loads(Path(os.environ[ORDER]).read_text("utf-8"))
        config.pluginmanager.register(Killer(order), "mutants-killer")
