"""A report of one or more runs, as one HTML file that needs no network.

    fp8jax report runs/a --output=report.html
    fp8jax report runs/bf16 runs/fp8 runs/fp4 --output=report.html

Losses are compared with those of the first run. The runs may still be going on, be of an older
version, or lack telemetry: the page says what is missing. Of runs at s3:// or gs:// the logs are
copied for the while. Figures need matplotlib: pip install matplotlib.
"""

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags, logging

from fp8jax.lm.cli import command
from fp8jax.lm.cli.page import report
from fp8jax.lm.data.urls import as_path, copy_files, is_url, store_errors
from fp8jax.lm.figures.run_files import FILES, RunFiles, read_run, require_run
from fp8jax.telemetry.files import FOLDER

_OUTPUT = flags.DEFINE_string("output", "report.html", "The file to write.")

ERRORS = command.ERRORS
VERBOSITY = logging.WARNING


def main(arguments: Sequence[str]) -> None:
    if not arguments:
        raise app.UsageError("name the directory of a run, or several")
    output = Path(_OUTPUT.value)
    if output.suffix not in (".html", ".htm"):
        raise ValueError(f"--output={output}: the page is HTML, name a file ending in .html")
    text = report([read_stored(run) if is_url(run) else read_run(run) for run in arguments])
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    print(f"wrote {output}, {len(text.encode()) / 2**20:.1f} MiB")


def read_stored(url: str) -> RunFiles:
    """Returns what is in a run's directory in an object store, as `read_run` does of one here.

    Its checkpoints are not read. What the store has is as new as the last checkpoint.

    Raises:
      ValueError: the store does not answer, or the URL is not that of a run.
    """
    with tempfile.TemporaryDirectory() as scratch:
        with store_errors(url):
            root = as_path(url.rstrip("/"))
            if not root.is_dir():
                raise ValueError(f"no such directory: {url}")
            require_run(root)
            files = [path for path in (root / name for name in FILES) if path.exists()]
            sampled = root / FOLDER
            files += sampled.iterdir() if sampled.is_dir() else ()
            copy = Path(scratch, root.name)
            copy_files(files, root, copy)
        return dataclasses.replace(read_run(copy), path=root)
