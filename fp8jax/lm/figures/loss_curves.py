"""The losses of several runs, and how far each lies above the first."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fp8jax.lm.figures.run_files import RunFiles
from fp8jax.lm.figures.style import NothingToDraw, panels, style
from fp8jax.lm.records.events import Event

_WINDOWS = 40  # a curve is smoothed over this part of its steps


def losses(runs: RunFiles | Sequence[RunFiles], *, dark: bool = False) -> Any:
    """Returns the losses of runs over steps; below, how far each lies above the first run's.

    Lines are training losses, the mean of the last steps that the axis names. Markers are
    validation losses. A cross is where a run stopped since a step was rejected. One run has no
    panel below.

    Args:
      runs: one run, or several; the first one is the baseline of the gaps.
      dark: whether to draw for dark pages.

    Returns:
      A `matplotlib.figure.Figure`.

    Raises:
      NothingToDraw: no run has a loss.
      ImportError: matplotlib is not installed.

    Example:
      >>> run = fp8jax.figures.RunFiles(
      ...     path=Path("runs/a"), name="a", metrics=[{"step": 1, "loss": 4.0}]
      ... )
      >>> fp8jax.figures.losses(run).axes[0].get_ylabel()
      'loss, nats a token'
    """
    runs = [runs] if isinstance(runs, RunFiles) else list(runs)
    smooth, window = training_curves(runs)
    valid = [by_step(run, "valid_loss") for run in runs]
    with style(dark=dark) as look:
        below = len(runs) > 1
        ratios = {"height_ratios": [3, 2]} if below else {}
        figure, grid = panels(
            1 + below, 1, height=4.2 if below else 2.8, sharex=True, gridspec_kw=ratios
        )
        top = grid[0][0]
        for i, run in enumerate(runs):
            line = look.line(i)
            plain = line | {"marker": ""}
            top.plot(list(smooth[i]), list(smooth[i].values()), **plain)
            top.plot(list(valid[i]), list(valid[i].values()), **line | {"linestyle": ""})
            top.plot([], [], **line, label=run.name)
            _draw_stop(top, run, smooth[i], look.bad)
            if below:
                axis = grid[1][0]
                gap, points = gaps(smooth[i], smooth[0]), gaps(valid[i], valid[0])
                axis.plot(list(gap), list(gap.values()), **plain)
                axis.plot(list(points), list(points.values()), **line | {"linestyle": ""})
        top.set_ylabel("loss, nats a token")
        mean = f"training, mean of {window} steps" if window > 1 else "training"
        top.set_title(f"line: {mean}; markers: validation")
        figure.legend(loc="outside lower center", ncols=4)
        if below:
            axis.set_ylabel(f"loss above {runs[0].name}'s, %")
        grid[-1][0].set_xlabel("step")
    return figure


def training_curves(runs: Sequence[RunFiles]) -> tuple[list[dict[int, float]], int]:
    """Returns the smoothed training loss of each run by step, and how many steps a mean is of.

    Raises NothingToDraw if no run has a loss.
    """
    curves = [by_step(run, "loss") for run in runs]
    if not any(curves):
        names = ", ".join(run.name for run in runs) or "no runs"
        raise NothingToDraw(f"{names}: no loss in metrics.jsonl")
    window = max(1, max(map(len, curves)) // _WINDOWS)
    return [smoothed(curve, window) for curve in curves], window


def by_step(run: RunFiles, name: str) -> dict[int, float]:
    """Returns step -> a number of metrics.jsonl, where there is one."""
    return {
        line["step"]: line[name]
        for line in run.metrics
        if name in line and isinstance(line[name], float | int)
    }


def smoothed(loss: Mapping[int, float], window: int) -> dict[int, float]:
    """Returns step -> mean of the last losses up to it, `window` of them if there are so many."""
    values = list(loss.values())
    last = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
    return {step: math.fsum(some) / len(some) for step, some in zip(loss, last, strict=True)}


def gaps(loss: Mapping[int, float], baseline: Mapping[int, float]) -> dict[int, float]:
    """Returns step -> the loss above the baseline's, in percent, where both have one."""
    return {
        step: 100 * (value / baseline[step] - 1)
        for step, value in loss.items()
        if step in baseline and baseline[step]
    }


def _draw_stop(axis: Any, run: RunFiles, loss: Mapping[int, float], color: str) -> None:
    """Marks the last loss of a run that a rejected step has ended."""
    ends = [event for event in run.events if event["kind"] != Event.END][-1:]
    if loss and ends and ends[0]["kind"] == Event.STOP:
        last = max(loss)
        axis.plot([last], [loss[last]], marker="X", markersize=7, color=color, linestyle="")
        text = {"xytext": (4, 4), "textcoords": "offset points", "fontsize": 7}
        axis.annotate(f"stopped at step {ends[0]['step']}", (last, loss[last]), color=color, **text)
