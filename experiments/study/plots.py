"""Figures of studies. Each function takes numbers and returns a matplotlib Figure.

Nothing here reads a file or knows of a run. matplotlib is an extra (`pip install fp8jax[plots]`)
and is imported when a figure is made. Curves are labeled directly, without legends. Colors are
those of Okabe and Ito, which color-blind readers can tell apart, and markers differ as well.
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_BLUE, _ORANGE, _GREEN = "#0072b2", "#d55e00", "#009e73"  # of Okabe and Ito


_GRAY, _RED = "#888888", "#b00020"


_STYLES = {"FP8": (_BLUE, "o"), "FP4": (_ORANGE, "s")}  # group -> color, marker


_OTHER = (_GREEN, "^")


_BROKEN = 10.0  # percent: a curve that ends above it does not widen its group's axis


_COLUMNS = 5


def require_matplotlib() -> Any:
    """Returns matplotlib's Figure. Call it before long work that ends in a figure.

    Raises:
      ImportError: matplotlib is not installed; the message says how to install it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'fp8jax[plots]'") from error
    return Figure


def _figure(rows: int, columns: int, *, panel=(2.6, 2.1), **kwargs) -> tuple[Any, Any]:
    """Returns a Figure and its axes [rows, columns]; `panel` is the size of each, in inches."""
    size = (panel[0] * columns, panel[1] * rows + 0.5)
    figure = require_matplotlib()(figsize=size, layout="constrained", dpi=120)
    return figure, figure.subplots(rows, columns, squeeze=False, **kwargs)


def _tidy(axis: Any) -> None:
    axis.tick_params(labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)


class Panel(NamedTuple):
    """The loss of one precision above that of its baseline, in percent of the baseline's.

    Attributes:
      name: the title of the panel.
      group: panels of a group share axis and color; such as "FP8".
      steps, training: the smoothed difference in training loss.
      valid_steps, validation: the difference in validation loss.
      note: what the curve cannot show, such as "non-finite at step 7"; "" for none.
    """

    name: str
    group: str
    steps: Sequence[int]
    training: Sequence[float]
    valid_steps: Sequence[int]
    validation: Sequence[float]
    note: str


def _limits(panels: Sequence[Panel]) -> tuple[float, float]:
    """Returns the limits of a group's axis.

    They fit the second half of the training of all curves that end as finite numbers below _BROKEN.
    """
    sound = [p for p in panels if p.validation and not p.note and p.validation[-1] < _BROKEN]
    late = [y for p in sound for y in (*p.training[len(p.training) // 2 :], *p.validation)]
    low, high = min([-0.4, *late]), max([0.8, *late])
    return max(1.2 * low, -_BROKEN), min(1.2 * high, _BROKEN)


def loss_differences(panels: Sequence[Panel], *, baseline: str, title: str) -> Any:
    """Returns a figure of small panels, one for each precision, with its loss over training.

    The rows of panels are grouped, as FP8 and FP4. Panels of a group share their axis. A curve that
    leaves the axis is cut off, and the number in its panel says where it ends.

    Args:
      panels: any number, in the order in which they are drawn within their groups.
      baseline: the name of the zero line.
      title: of the figure.

    Raises:
      ValueError: there are no panels.
    """
    groups: dict[str, list[Panel]] = {}
    for panel in panels:
        groups.setdefault(panel.group, []).append(panel)
    if not groups:
        raise ValueError(f"nothing to compare with {baseline}: there are no panels")
    columns = min(_COLUMNS, max(map(len, groups.values())))
    heights = {group: -(-len(members) // columns) for group, members in groups.items()}
    figure, grid = _figure(sum(heights.values()), columns, sharex=True)
    figure.suptitle(textwrap.fill(title, 38 * columns), x=0.01, ha="left", fontsize=9)
    first = 0
    for group, members in groups.items():
        _draw_group(grid[first : first + heights[group]], members, baseline)
        first += heights[group]
    for column in grid.T:
        shown = [axis for axis in column if axis.get_visible()]
        if shown:
            shown[-1].set_xlabel("step", fontsize=8)
            shown[-1].tick_params(labelbottom=True)
    return figure


def _draw_group(axes: Any, members: Sequence[Panel], baseline: str) -> None:
    """Draws the panels of a group onto axes [rows, columns]; the last row may not be full."""
    limits = _limits(members)
    for axis in axes.flat[len(members) :]:
        axis.set_visible(False)
    for row in axes:
        row[0].set_ylabel(f"{members[0].group}: loss above {baseline}, %", fontsize=8)
    for panel, axis in zip(members, axes.flat, strict=False):
        _draw_panel(axis, panel, limits)
        if axis not in axes[:, 0]:
            axis.set_yticklabels([])
    place = axes[0, 0].get_yaxis_transform()  # x in parts of the axis, y in percent
    axes[0, 0].text(0.01, 0, baseline, transform=place, va="top", fontsize=7, color=_GRAY)


def _draw_panel(axis: Any, panel: Panel, limits: tuple[float, float]) -> None:
    color, marker = _STYLES[panel.group] if panel.group in _STYLES else _OTHER
    axis.axhline(0, color=_GRAY, linewidth=0.8, alpha=0.6)
    axis.plot(panel.steps, panel.training, color=color, linewidth=1.2, alpha=0.6)
    axis.plot(panel.valid_steps, panel.validation, color=color, marker=marker, markersize=3.5, lw=0)
    axis.set_ylim(*limits)
    _tidy(axis)
    axis.set_title(panel.name, fontsize=8, loc="left")
    off_axis = bool(panel.validation) and panel.validation[-1] >= _BROKEN
    text = panel.note
    if not text and panel.validation:
        text = f"{panel.validation[-1]:+.2f}%" + (", off the axis" if off_axis else "")
    axis.text(
        0.98, 0.95, text, transform=axis.transAxes, ha="right", va="top", fontsize=8,
        fontweight="bold", color=_RED if off_axis or panel.note else color,
    )  # fmt: skip


def bias_sweep(
    excess: Mapping[str, Mapping[str, Sequence[float]]], biases: Sequence[int], *, tolerance: float
) -> Any:
    """Returns a figure of losses above BF16's by the exponent of a constant scale.

    It has one panel for each use, with one curve for each model. Losses that are not finite are
    marked with an x at the top.

    Args:
      excess: use, such as "training" -> model -> for each bias, the validation loss above BF16's in
        percent.
      biases: exponents b of the scale 2^-b, ascending.
      tolerance: in percent. A gray band marks the losses within it. The axis is linear inside the
        band, and logarithmic outside.
    """
    figure, grid = _figure(1, 2, sharey=True, panel=(4.2, 3.2))
    finite = [y for curves in excess.values() for c in curves.values() for y in c if y < math.inf]
    top = 1.5 * max([10 * tolerance, *finite])
    styles = (*_STYLES.values(), _OTHER)
    for axis, (use, curves) in zip(grid[0], excess.items(), strict=True):
        axis.set_title(use, fontsize=9, loc="left")
        axis.axhspan(-tolerance, tolerance, color=_GRAY, alpha=0.18, linewidth=0)
        axis.axhline(0, color=_GRAY, linewidth=0.8)
        for index, (model, curve) in enumerate(curves.items()):
            color, marker = styles[index % len(styles)]
            drawn = [y if y < math.inf else top for y in curve]
            axis.plot(biases, drawn, color=color, linewidth=1.2, marker=marker, markersize=3.5)
            lost = [b for b, y in zip(biases, curve, strict=True) if not y < math.inf]
            axis.plot(lost, [0.99 * top] * len(lost), color=_RED, marker="x", linestyle="")
            height = 0.03 + 0.06 * index
            axis.plot([0.24], [height], color=color, marker=marker, transform=axis.transAxes)
            label = dict(transform=axis.transAxes, va="center_baseline", fontsize=8)
            axis.text(0.27, height, model, color=color, **label)
        axis.set_yscale("symlog", linthresh=tolerance)
        axis.set_ylim(-4 * tolerance, top)
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_xticks(biases[:: 1 + len(biases) // 16])
        axis.set_xlabel("bias b of the scale 2^-b; x: not finite", fontsize=8)
        _tidy(axis)
    grid[0][0].set_ylabel("validation loss over BF16's, %", fontsize=8)
    grid[0][0].text(biases[0], 0, "BF16", fontsize=7, color=_GRAY, va="bottom")
    return figure
