"""A copy of the tree in a temporary folder, and pytest in it."""

import contextlib
import importlib
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutants.mutant import LIBRARY, Mutant, planted
from tests.support import ROOT

# One folder for the compiled programs of all runs, so that only what a fault changes is compiled.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fp8jax" / "mutants"

_VARIABLES = {
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": str(CACHE),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.05",
}
OUTPUT = "output.txt"  # in the copy: what the last run of pytest wrote
_PRELOADED = (
    "jax.numpy",
    "jax.experimental.multihost_utils",
    "jax.experimental.pallas",
    "flax.linen",
    "flax.nnx",
    "optax",
    "orbax.checkpoint",
    "grain",
    "ml_collections",
    "numpy.random",
    "tokenizers",
    "tensorboardX",
    "tqdm",
    "safetensors.numpy",
    "jinja2",
)


@contextlib.contextmanager
def copied_tree() -> Iterator[Path]:
    """A copy of the files that git knows or would add; it is deleted in the end."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for name in filter(None, listed.split("\0")):
            source, target = ROOT / name, Path(folder, name)
            if source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
        yield Path(folder)


@contextlib.contextmanager
def fault(copy: Path, mutant: Mutant) -> Iterator[None]:
    """Plants a mutant in the copy, and takes it out again."""
    path, text = planted(ROOT, mutant)
    _write(copy / path, text)
    try:
        yield
    finally:
        _write(copy / path, (ROOT / path).read_text("utf-8"))


def _write(path: Path, text: str) -> None:
    """Writes a module. Its bytecode goes, since Python compares size and seconds only."""
    path.write_text(text, "utf-8")
    for old in path.parent.glob(f"__pycache__/{path.stem}.*"):
        old.unlink()


def preload() -> None:
    """Imports what test processes import, but nothing of this project: they are forked from here.

    That saves four of six seconds of each.
    """
    os.environ.update(_VARIABLES)
    for name in _PRELOADED:
        importlib.import_module(name)


def pytest_in(
    copy: Path,
    plugins: list[str],
    marks: str,
    paths: list[str],
    variables: dict[str, str],
    *,
    cpu_s: int | None = None,
    wall_s: float | None = None,
) -> int | None:
    """Runs pytest in one process in the copy; returns its status, None if it took too long.

    Args:
      plugins: modules of plugins.
      marks: which tests, an expression of pytest's -m.
      paths: of test files.
      variables: of the environment.
      cpu_s, wall_s: limits on processor time and time, without which pytest is also heard.
    """
    options = ["-n", "0", "-q", "--no-header", "--tb=no", "--durations=1", "-p", "no:cacheprovider"]
    options += ["-m", marks, "--continue-on-collection-errors", *(f"-p{name}" for name in plugins)]
    sys.stdout.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of forks: it has no thread yet
        child = os.fork()
    if not child:
        status = 70
        try:
            os.environ.update(variables)
            status = _run_pytest(copy, [*options, *paths], cpu_s)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    try:
        return _wait(child, wall_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # also what the tests have started


def _run_pytest(copy: Path, arguments: list[str], cpu_s: int | None) -> int:
    """Runs pytest in this process, which was forked for it."""
    os.setsid()
    if cpu_s is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 10))
        os.dup2(os.open(copy / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)
    sys.path[:] = [str(copy), *(path for path in sys.path if path not in ("", str(ROOT)))]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    assert LIBRARY not in sys.modules
    return int(pytest.main(arguments))


def _wait(child: int, wall_s: float | None) -> int | None:
    """Returns the status of a process, negative if a signal ended it; None if it takes too long."""
    deadline = time.monotonic() + (math.inf if wall_s is None else wall_s)
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None
