"""What the tests rely on: that a test which takes too long is found."""

import os
import subprocess
import sys

from tests.support import ROOT

# The hook with another limit, as conftest.py takes it, and tests that take more or less than that.
CONFTEST = """
from tests.support import tiers
from tests.support.tiers import pytest_runtest_call, pytest_runtest_protocol

tiers.LIMIT_SECONDS = 0.5
"""
TESTS = """
import subprocess, sys, time
import pytest

RUNS = []

def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

def test_quick():
    time.sleep(0.7)

def test_long(tmp_path):
    assert not list(tmp_path.iterdir())  # each attempt has a folder of its own
    (tmp_path / "file").touch()
    burn(0.7)

def test_long_once():
    RUNS.append(1)
    burn(0.7 if len(RUNS) == 1 else 0)

def test_long_in_a_child():
    code = "import time\\nwhile time.process_time() < 0.7: pass"
    subprocess.run([sys.executable, "-c", code], check=True)

def test_long_and_wrong():
    burn(0.7)
    assert False, "wrong"

@pytest.mark.slow
def test_marked():
    burn(0.7)
"""


def run(folder, **environment: str) -> str:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "made_up_test.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = slow: takes long\n")
    env = {name: value for name, value in os.environ.items() if name != "CI"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "made_up_test.py"],
        cwd=folder,
        env=env | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
    )
    assert not done.stderr, done.stderr
    return done.stdout


def test_in_ci_an_unmarked_test_that_is_long_twice_fails(tmp_path):
    said = run(tmp_path, CI="true")
    assert "3 failed, 3 passed" in said, said
    for name in ("test_long", "test_long_in_a_child"):
        assert f"{name} took 0." in said and f"FAILED made_up_test.py::{name}" in said
    assert "more than 0.5 s. Make it faster, or mark it slow" in said
    assert "AssertionError: wrong" in said
    for name in ("test_quick", "test_long_once", "test_marked"):
        assert f"PASSED made_up_test.py::{name}" in said


def test_elsewhere_nothing_is_timed(tmp_path):
    said = run(tmp_path)
    assert "1 failed, 5 passed" in said and "FAILED made_up_test.py::test_long_and_wrong" in said
