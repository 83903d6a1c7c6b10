"""The page: everything about some runs in one HTML text without scripts, links out or files."""

import dataclasses
import datetime
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path

import jinja2

from fp8jax.lm.cli import charts, compare, tables
from fp8jax.lm.cli.charts import Chart, NoChart
from fp8jax.lm.cli.first_look import FirstLook, first_look
from fp8jax.lm.cli.tables import Happened, Table
from fp8jax.lm.figures.run_files import RunFiles

_MOST_TENSORS = 8  # out of line that are shown at once
_MOST_STEPS = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """What the page says of one run."""

    files: RunFiles
    look: FirstLook
    gap: str
    config: dict[str, str]
    events: list[Happened]
    unlisted: str
    casts: Table | None
    what_if: list[str]
    telemetry: list[Chart | NoChart]
    promotions: list[Chart]


def report(runs: Sequence[RunFiles]) -> str:
    """Returns the page of some runs, of which losses are compared with those of the first.

    Raises ValueError if a directory is named twice.
    """
    runs = compare.with_unique_names(runs)
    drawn = charts.have_matplotlib()
    return page_template(Path(__file__).with_name("page.html")).render(
        runs=[_run(run, runs[0], drawn) for run in runs],
        names=[run.name for run in runs],
        warnings=compare.warnings(runs),
        no_figures="" if drawn else charts.NO_MATPLOTLIB,
        summary=tables.summary(runs),
        overview=tables.overview(runs),
        differences=tables.config(runs),
        losses=tables.losses(runs),
        loss_charts=charts.loss_charts(runs) if drawn else [],
        speeds=tables.speeds(runs),
        memory=tables.memory(runs),
        memory_charts=[charts.memory_chart(runs)] if drawn else [],
        most_tensors=_MOST_TENSORS,
        most_steps=_MOST_STEPS,
        **signature(),
    )


def page_template(path: Path) -> jinja2.Template:
    """Returns the template in a file, which may use parts.html and style.html of this folder."""
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FileSystemLoader([path.parent, Path(__file__).parent]),
    )
    return environment.get_template(path.name)


def signature() -> dict[str, str]:
    """Returns what pages say of their making: `version` and `written`."""
    try:
        version = importlib.metadata.version("fp8jax")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        version = "(not installed)"
    return {
        "version": version,
        "written": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
    }


def _run(run: RunFiles, baseline: RunFiles, drawn: bool) -> _Run:
    promotions = [charts.promotion_chart(run)] if drawn else []
    return _Run(
        files=run,
        look=first_look(run),
        gap="" if run is baseline else tables.gap(run, baseline),
        config=compare.all_keys(run),
        events=tables.events(run),
        unlisted=tables.unlisted_events(run),
        casts=tables.worst_casts(run),
        what_if=tables.what_if(run),
        telemetry=charts.telemetry_charts(run) if drawn else [],
        promotions=[chart for chart in promotions if isinstance(chart, Chart)],
    )
