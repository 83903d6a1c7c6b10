"""The figures of the page, each in a light and a dark version, as texts that need no file."""

import base64
import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from fp8jax.lm.cli.compare import why_not
from fp8jax.lm.figures.run_files import RunFiles

NO_MATPLOTLIB = (
    "There are no figures: matplotlib is not installed. Install it with"
    " pip install 'fp8jax[plots]' and write the page again."
)


@dataclasses.dataclass(frozen=True)
class Chart:
    """A figure as two `data:` addresses of SVG.

    Attributes:
      alt: what it shows, for those who do not see it.
      caption: how to read it.
    """

    light: str
    dark: str
    alt: str
    caption: str


@dataclasses.dataclass(frozen=True)
class NoChart:
    """A figure that is not there, and why."""

    why: str


def have_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def loss_charts(runs: Sequence[RunFiles]) -> list[Chart | NoChart]:
    """Returns the losses of runs that compare with the first one, and each other run's alone."""
    from fp8jax.lm import figures

    first, *others = runs
    alone = [run for run in others if why_not(run, first)]
    groups = [[run for run in runs if run not in alone], *([run] for run in alone)]
    return [
        _chart(
            figures.losses,
            group,
            f"Line chart: training and validation loss by step of {_and(group)}"
            + ("." if len(group) == 1 else f"; below, the loss above that of {group[0].name}."),
            "Training loss (lines) and validation loss (markers)"
            + ("." if len(group) == 1 else f", and below the gap to {group[0].name} in percent."),
        )
        for group in groups
    ]


def memory_chart(runs: Sequence[RunFiles]) -> Chart | NoChart:
    """Returns the memory of a training step by kind, of all runs on one axis."""
    from fp8jax.lm import figures

    return _chart(
        lambda runs, dark: figures.memory_by_kind(*runs, dark=dark),
        runs,
        f"Bar chart: device memory of a training step of {_and(runs)} by kind.",
        "What a training step keeps on each device; thick line: all that XLA allocates.",
    )


def telemetry_charts(run: RunFiles) -> list[Chart | NoChart]:
    """Returns the figures of a run's sampled casts, none without telemetry."""
    from fp8jax.lm import figures

    if run.telemetry is None:
        return []
    drawn = {
        figures.scaling_bias: (
            "Line charts: Graphcore's scaling bias of every tensor by step",
            "The bias is the largest power of two by which a tensor can be multiplied and still fit"
            " its format. A line that falls is a tensor that grows; lines far apart need scales of"
            " their own.",
        ),
        figures.underflow: (
            "Heat maps: share of elements that underflow, by layer and step",
            "Underflow: the share of nonzero elements whose code is zero. They are lost.",
        ),
        figures.saturation: (
            "Heat maps: share of elements that saturate, by layer and step",
            "Saturation: the share of elements beyond the format's maximum. They are clipped.",
        ),
    }
    return [
        _chart(figure, run, f"{alt}, of {run.name}.", f"{run.name}. {caption}")
        for figure, (alt, caption) in drawn.items()
    ]


def promotion_chart(run: RunFiles) -> Chart | NoChart:
    """Returns when GNMR promoted which layers."""
    from fp8jax.lm import figures

    return _chart(
        figures.promotions,
        run,
        f"Bars: the steps in which GNMR promoted each layer of {run.name}.",
        f"{run.name}: layers that GNMR ran in high precision.",
    )


def _and(runs: Sequence[RunFiles]) -> str:
    return ", ".join(run.name for run in runs)


def _chart(figure: Callable[..., Any], what: Any, alt: str, caption: str) -> Chart | NoChart:
    from fp8jax.lm.figures import NothingToDraw, svg_text

    try:
        light, dark = (svg_text(figure(what, dark=dark)) for dark in (False, True))
    except NothingToDraw as nothing:
        return NoChart(f"No figure: {nothing}")
    except KeyError as key:  # lines of an older version
        return NoChart(f"No figure: the files of these runs have no {key}.")
    return Chart(_address(light), _address(dark), alt, caption)


def _address(svg: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"
