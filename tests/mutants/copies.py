"""A copy of the tree in a temporary folder, and pytest in it."""

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.mutants.mutant import Mutant, planted
from tests.support import ROOT

# One folder for the compiled programs of all runs, so that only what a fault changes is compiled.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fp8jax" / "mutants"


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


def environment(copy: Path, **more: str) -> dict[str, str]:
    """The variables of a run in the copy.

    The checks of annotations are off, as in the default tier: a fault that they alone find is not
    found there.
    """
    return os.environ | {
        "PYTHONPATH": str(copy),
        "JAX_COMPILATION_CACHE_DIR": str(CACHE),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.05",
        "JAXTYPING_DISABLE": "1",
        **more,
    }


def pytest_in(
    copy: Path,
    plugin: str,
    arguments: list[str],
    variables: dict[str, str],
    *,
    cpu_s: int | None = None,
    wall_s: int | None = None,
) -> int | None:
    """Runs pytest in one process in the copy; returns its status, None if it took too long.

    Args:
      plugin: the module of the plugin.
      cpu_s, wall_s: limits on processor time and time; None for none.
    """
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-q",
        "--no-header",
        "--tb=no",
        "--durations=0",
        "--durations-min=1e9",
        "-p",
        "no:cacheprovider",
        "-p",
        plugin,
        "--continue-on-collection-errors",
        *arguments,
    ]

    def limited() -> None:
        os.setsid()
        if cpu_s is not None:
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 10))

    with subprocess.Popen(
        command,
        cwd=copy,
        env=environment(copy, **variables),
        preexec_fn=limited,
        stdout=subprocess.DEVNULL if cpu_s else None,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            return process.wait(wall_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)  # also what the tests have started
