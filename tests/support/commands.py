"""The programs of experiments/, in processes of their own."""

import os
import subprocess
import sys

from tests.support import ROOT


def command_line(*arguments: str) -> tuple[int, str]:
    """Exit code and output, stderr last, of `experiments.train` with the smoke config."""
    done = subprocess.run(
        [sys.executable, "-m", "experiments.train", "--config=configs/smoke.py", *arguments],
        cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def run_command(name: str, *flags: str) -> subprocess.CompletedProcess:
    # ml_collections loads config files in a way that Python 3.12 drops.
    warnings = ("-W", "error", "-W", "ignore:the load_module:DeprecationWarning")
    return subprocess.run(
        [sys.executable, *warnings, "-m", f"experiments.{name}", *flags],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
