"""Faults in one of two processes, as experiments/process_faults.py injects them."""

import os
import subprocess
import sys

import pytest

from tests.support import ROOT

# One fails by itself, JAX alone aborts or hangs of two, and one is asked to stop.
FAULTS = (
    "source raises in the last",
    "kill -9 in the first",
    "kill -9 in the last",
    "SIGTERM in the last",
)

# A device for each process, and programs that compile in half the time.
FLAGS = "--xla_backend_optimization_level=0"


@pytest.mark.full
@pytest.mark.parametrize("given", [[f"--only={','.join(FAULTS)}"], ["--moments=3"]])
def test_faults_are_named_and_lose_nothing(tmp_path, given):
    done = subprocess.run(
        [sys.executable, "-m", "experiments.process_faults", f"--workdir={tmp_path}/runs", *given],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    table = done.stdout
    assert len(table.splitlines()) == 4 + (len(FAULTS) if "only" in given[0] else 3)
    for wrong in ("| NO ", "never", "NEVER", "WRONG", "LOST", "DIFFERENT"):
        assert wrong not in table, table
    assert "are equal." in table
