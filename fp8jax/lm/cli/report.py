"""A report of one or more runs, as one HTML file that needs no network.

    fp8jax report runs/a --output=report.html
    fp8jax report runs/bf16 runs/fp8 runs/fp4 --output=report.html

Losses are compared with those of the first run. The runs may still be going on, be of an older
version, or lack telemetry: the page says what is missing. Figures need matplotlib:
pip install matplotlib.
"""

from collections.abc import Sequence
from pathlib import Path

from absl import app, flags, logging

from fp8jax.lm.cli import command
from fp8jax.lm.cli.page import report
from fp8jax.lm.figures.run_files import read_run

_OUTPUT = flags.DEFINE_string("output", "report.html", "The file to write.")

ERRORS = command.ERRORS
VERBOSITY = logging.WARNING


def main(arguments: Sequence[str]) -> None:
    if not arguments:
        raise app.UsageError("name the directory of a run, or several")
    output = Path(_OUTPUT.value)
    if output.suffix not in (".html", ".htm"):
        raise ValueError(f"--output={output}: the page is HTML, name a file ending in .html")
    text = report([read_run(workdir) for workdir in arguments])
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    print(f"wrote {output}, {len(text.encode()) / 2**20:.1f} MiB")
