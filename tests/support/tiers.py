"""The tiers of the tests: every test takes at most ten seconds, unless it is marked as longer.

tests/conftest.py takes the hooks below. Where the environment variable CI is set, a test without a
mark fails that takes twice as long, since one machine is up to twice as slow as another. It fails
if a second attempt takes too long, too: the first may have compiled programs that other tests
usually compile before it. Only the test itself counts, not its fixtures.
"""

import os
import resource

import pytest
from _pytest.runner import runtestprotocol

MARKS = ("slow", "extended", "gpu")  # of tests that may take longer
LIMIT_SECONDS = 20.0  # of processor time, of this process and the ones that it waited for

_TAKEN = pytest.StashKey[float]()


def process_seconds() -> float:
    """Processor time so far, of this process and of those of its children that have ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item):
    begin = process_seconds()
    try:
        return (yield)
    finally:
        item.stash[_TAKEN] = process_seconds() - begin


def _attempt(item, nextitem) -> tuple[list[pytest.TestReport], float]:
    """The reports of one run of a test, and the seconds that it took if it passed (0 if not)."""
    item.stash[_TAKEN] = 0.0
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    return reports, item.stash[_TAKEN] if all(report.passed for report in reports) else 0.0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    """In CI: runs a test that took too long again, and fails it if it takes too long again."""
    if not os.environ.get("CI") or any(item.get_closest_marker(mark) for mark in MARKS):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports, first = _attempt(item, nextitem)
    if first > LIMIT_SECONDS:
        item._initrequest()  # fixtures of its own, as the first attempt had
        reports, second = _attempt(item, nextitem)
        if second > LIMIT_SECONDS:
            (call,) = (report for report in reports if report.when == "call")
            call.outcome = "failed"
            call.longrepr = (
                f"{item.nodeid} took {first:.1f} s and then {second:.1f} s of processor time, more "
                f"than {LIMIT_SECONDS:g} s. Make it faster, or mark it slow (pyproject.toml)."
            )
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
