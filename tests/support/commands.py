"""The programs of experiments/, in processes of their own, and in this one."""

import contextlib
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

from absl import flags

from experiments import command
from tests.support import ROOT


@contextlib.contextmanager
def command_here(name: str) -> Iterator[Callable[..., None]]:
    """A function that runs the command `name` in this process with some flags."""
    known = set(flags.FLAGS)

    def run(*given: str) -> None:
        for flag in set(flags.FLAGS) - known:
            delattr(flags.FLAGS, flag)
        sys.modules.pop(f"experiments.{name}", None)
        module = importlib.import_module(f"experiments.{name}")  # defines its flags anew
        errors = getattr(module, "ERRORS", command.ERRORS)
        command.call(module.main, errors, command.parse_flags([name, *given]))

    try:
        yield run
    finally:
        for flag in set(flags.FLAGS) - known:
            delattr(flags.FLAGS, flag)


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
