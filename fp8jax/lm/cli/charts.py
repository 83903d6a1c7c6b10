"""The figures of the page, each in a light and a dark version, as texts that need no file."""

import base64
import dataclasses
import functools
import importlib.util
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fp8jax.lm.cli.compare import why_not
from fp8jax.lm.figures.loss_curves import by_step, gaps, training_curves
from fp8jax.lm.figures.run_files import RunFiles

NO_MATPLOTLIB = (
    "There are no figures: matplotlib is not installed. Install it with"
    " pip install matplotlib and write the page again."
)


_MOST_SPOTS = 60


@dataclasses.dataclass(frozen=True)
class Spot:
    """What a chart says under the pointer: a strip of it, and the lines about the strip's step.

    Attributes:
      left, width: of the strip, in percent of the figure's width.
      at: of the step, in percent of the strip's width.
    """

    left: float
    width: float
    at: float
    lines: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Hover:
    """The strips of a chart, and their upper and lower ends in percent of the figure's height."""

    top: float
    bottom: float
    spots: Sequence[Spot]


@dataclasses.dataclass(frozen=True)
class Chart:
    """A figure as two `data:` addresses of SVG.

    Attributes:
      alt: what it shows, for those who do not see it.
      caption: how to read it.
      hover: what it says under the pointer; None for nothing.
    """

    light: str
    dark: str
    alt: str
    caption: str
    hover: Hover | None = None


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
            functools.partial(_losses_by_step, group),
        )
        for group in groups
    ]


def _losses_by_step(runs: Sequence[RunFiles], figure: Any) -> Hover:
    """The losses of some of the steps, as the figure of `losses` draws them."""
    training, _ = training_curves(runs)
    valid = [by_step(run, "valid_loss") for run in runs]
    known = sorted({step for curve in (*training, *valid) for step in curve})
    every = -(-len(known) // _MOST_SPOTS)
    steps = [*known[every - 1 :: every][:-1], known[-1]]
    upper, lower = figure.axes[0], figure.axes[-1]
    places = [upper.transData.transform((step, 0))[0] / figure.bbox.width for step in steps]
    box = upper.get_position()
    ends = [box.x0, *((a + b) / 2 for a, b in itertools.pairwise(places)), box.x1]
    spots = [
        Spot(
            left=100 * begin,
            width=100 * (end - begin),
            at=100 * (place - begin) / (end - begin),
            lines=[
                f"step {step:,}",
                *(
                    said
                    for run, curve, marks in zip(runs, training, valid, strict=True)
                    if (said := _losses_at(run.name, step, curve, training[0], marks))
                ),
            ],
        )
        for step, place, (begin, end) in zip(steps, places, itertools.pairwise(ends), strict=True)
    ]
    return Hover(100 * (1 - box.y1), 100 * lower.get_position().y0, spots)


def _losses_at(
    name: str,
    step: int,
    training: Mapping[int, float],
    baseline: Mapping[int, float],
    valid: Mapping[int, float],
) -> str:
    """The losses of a run at a step, and how far above the baseline's; "" if it has none."""
    said = []
    if step in training:
        gap = gaps({step: training[step]}, {} if training is baseline else baseline)
        above = f" ({gap[step]:+.2f}%)" if gap else ""
        said.append(f"{training[step]:.4f}{above}")
    if step in valid:
        said.append(f"validation {valid[step]:.4f}")
    return f"{name}: {', '.join(said)}" if said else ""


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
    """Returns when which layers were promoted."""
    from fp8jax.lm import figures

    return _chart(
        figures.promotions,
        run,
        f"Bars: the steps in which each layer of {run.name} was promoted to higher precision.",
        f"{run.name}: layers that were promoted to higher precision.",
    )


def _and(runs: Sequence[RunFiles]) -> str:
    return ", ".join(run.name for run in runs)


def _chart(
    figure: Callable[..., Any],
    what: Any,
    alt: str,
    caption: str,
    hover: Callable[[Any], Hover | None] = lambda drawn: None,
) -> Chart | NoChart:
    from fp8jax.lm.figures import NothingToDraw, svg_text

    try:
        drawn = figure(what, dark=False)
        light, dark = svg_text(drawn), svg_text(figure(what, dark=True))
        under_pointer = hover(drawn)  # once it is drawn, its axes have their places
    except NothingToDraw as nothing:
        return NoChart(f"No figure: {nothing}")
    except KeyError as key:  # lines of an older version
        return NoChart(f"No figure: the files of these runs have no {key}.")
    return Chart(_address(light), _address(dark), alt, caption, under_pointer)


def _address(svg: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"
