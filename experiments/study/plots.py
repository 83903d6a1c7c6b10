"""Figures of studies: one function a figure, data in, a matplotlib Figure out.

Nothing here reads a file or knows of a run. matplotlib is an extra (`pip install fp8jax[plots]`)
and imported where a figure is made. Curves are labeled where they are: there are no legends.
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_COLORS = {"FP8": "#0072b2", "FP4": "#d55e00"}  # Okabe and Ito: told apart by all eyes


_OTHER, _GRAY, _RED = "#009e73", "#888888", "#b00020"


_BROKEN = 10.0  # per cent: a curve that ends further away does not set its group's axis


_COLUMNS = 5


def require_matplotlib() -> Any:
    """matplotlib's Figure; raises ImportError that says what to install. For before long work."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'fp8jax[plots]'") from error
    return Figure


def _figure(rows: int, columns: int, *, panel=(2.6, 2.1), **kwargs) -> tuple[Any, Any]:
    """A Figure with panels of that many inches, and its axes [rows, columns]."""
    size = (panel[0] * columns, panel[1] * rows + 0.5)
    figure = require_matplotlib()(figsize=size, layout="constrained", dpi=120)
    return figure, figure.subplots(rows, columns, squeeze=False, **kwargs)


def _tidy(axis: Any) -> None:
    axis.tick_params(labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)


class Panel(NamedTuple):
    """One precision beside its baseline, in per cent of the baseline's loss.

    Attributes:
      name, group: title, and whose axis and color it shares, such as "FP8".
      steps, training: smoothed difference in training loss.
      valid_steps, validation: difference in validation loss.
      note: what the curve cannot show, such as "non-finite at step 7"; "" for nothing.
    """

    name: str
    group: str
    steps: Sequence[int]
    training: Sequence[float]
    valid_steps: Sequence[int]
    validation: Sequence[float]
    note: str


def _limits(panels: Sequence[Panel]) -> tuple[float, float]:
    """The axis of a group: what its sound curves need from the middle of training on."""
    sound = [p for p in panels if p.validation and not p.note and p.validation[-1] < _BROKEN]
    late = [y for p in sound for y in (*p.training[len(p.training) // 2 :], *p.validation)]
    low, high = min([-0.4, *late]), max([0.8, *late])
    return max(1.2 * low, -_BROKEN), min(1.2 * high, _BROKEN)


def loss_differences(panels: Sequence[Panel], *, baseline: str, title: str) -> Any:
    """A panel a precision: how far its loss lies from the baseline's, over training.

    Panels of a group share an axis and stand together; a curve that leaves the axis is cut there.
    """
    groups: dict[str, list[Panel]] = {}
    for panel in panels:
        groups.setdefault(panel.group, []).append(panel)
    if not groups:
        raise ValueError(f"nothing to compare with {baseline}")
    columns = min(_COLUMNS, max(map(len, groups.values())))
    heights = {group: -(-len(members) // columns) for group, members in groups.items()}
    figure, grid = _figure(sum(heights.values()), columns, sharex=True)
    figure.suptitle(textwrap.fill(title, 38 * columns), x=0.01, ha="left", fontsize=9)
    first = 0
    for group, members in groups.items():
        axes = grid[first : first + heights[group]]
        first += heights[group]
        limits = _limits(members)
        for axis in axes.flat[len(members) :]:
            axis.set_visible(False)
        for row in axes:
            row[0].set_ylabel(f"{group}: % of {baseline}", fontsize=8)
        for panel, axis in zip(members, axes.flat, strict=False):
            _draw_panel(axis, panel, limits)
            if axis not in axes[:, 0]:
                axis.set_yticklabels([])
    for column in grid.T:
        shown = [axis for axis in column if axis.get_visible()]
        if shown:
            shown[-1].set_xlabel("step", fontsize=8)
            shown[-1].tick_params(labelbottom=True)
    return figure


def _draw_panel(axis: Any, panel: Panel, limits: tuple[float, float]) -> None:
    color = _COLORS[panel.group] if panel.group in _COLORS else _OTHER
    axis.axhline(0, color=_GRAY, linewidth=0.8)
    axis.plot(panel.steps, panel.training, color=color, linewidth=1.0, alpha=0.55)
    axis.plot(panel.valid_steps, panel.validation, color=color, marker="o", markersize=3.5, lw=0)
    axis.set_ylim(*limits)
    _tidy(axis)
    axis.set_title(panel.name, fontsize=8, loc="left")
    off = bool(panel.validation) and panel.validation[-1] >= _BROKEN
    ends = f"{panel.validation[-1]:+.2f}%" + ", off the axis" * off if panel.validation else ""
    place = dict(transform=axis.transAxes, ha="right", va="top")
    style = dict(fontsize=8, color=_RED if off or panel.note else color, fontweight="bold")
    axis.text(0.98, 0.95, panel.note or ends, **place, **style)


def bias_sweep(
    excess: Mapping[str, Mapping[str, Sequence[float]]], biases: Sequence[int], *, tolerance: float
) -> Any:
    """Loss over BF16's against the exponent of a constant scale, a panel a use, a curve a model.

    Args:
      excess: use, such as "training" -> model -> validation loss over BF16's, in per cent, one for
        each bias; not finite where the run was not.
      biases: exponents b of the scale 2^-b, ascending.
      tolerance: in per cent, what still works: a band. The axis is linear inside, else logarithmic.
    """
    figure, grid = _figure(1, 2, sharey=True, panel=(4.2, 3.2))
    finite = [y for curves in excess.values() for c in curves.values() for y in c if y < math.inf]
    top = 1.5 * max([10 * tolerance, *finite])
    for axis, (use, curves) in zip(grid[0], excess.items(), strict=True):
        axis.set_title(use, fontsize=9, loc="left")
        axis.axhspan(-tolerance, tolerance, color=_GRAY, alpha=0.18, linewidth=0)
        axis.axhline(0, color=_GRAY, linewidth=0.8)
        for index, (model, curve) in enumerate(curves.items()):
            color = (*_COLORS.values(), _OTHER)[index % 3]
            drawn = [y if y < math.inf else top for y in curve]
            axis.plot(biases, drawn, color=color, linewidth=1.2, marker="o", markersize=3)
            lost = [b for b, y in zip(biases, curve, strict=True) if not y < math.inf]
            axis.plot(lost, [0.99 * top] * len(lost), color=_RED, marker="x", linestyle="")
            place = dict(transform=axis.transAxes, ha="center")
            axis.text(0.5, 0.02 + 0.06 * index, model, color=color, fontsize=8, **place)
        axis.set_yscale("symlog", linthresh=tolerance)
        axis.set_ylim(-4 * tolerance, top)
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_xticks(biases[:: 1 + len(biases) // 16])
        axis.set_xlabel("bias b of the scale 2^-b; x: not finite", fontsize=8)
        _tidy(axis)
    grid[0][0].set_ylabel("validation loss over BF16's, %", fontsize=8)
    grid[0][0].text(biases[0], 0, "BF16", fontsize=7, color=_GRAY, va="bottom")
    return figure
