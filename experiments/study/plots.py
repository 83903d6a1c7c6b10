"""Figures of studies. Each function takes numbers and returns a matplotlib Figure.

Nothing here reads a file or knows of a run. The style is that of all figures, and so needs
matplotlib (fp8jax/lm/figures/style.py). Curves are labeled directly, without legends.
"""

import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments.study.intervals import CONFIDENCE, t_interval
from fp8jax.lm.figures.style import Style, panels, style
from fp8jax.numerics.names import as_policy

_INDEX = {"FP8": 0, "FP6": 0, "FP4": 1}  # group -> which of the style's curves
_OTHER = 2


_BROKEN = 10.0  # percent: a curve that ends above it does not widen its group's axis


_COLUMNS = 5


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


def group_of(policy: str) -> str:
    """Returns the narrowest format that a policy casts to, such as "FP8"; "BF16" if it casts none.

    Raises:
      ValueError: an unknown policy.
    """
    bits = [cast.format.bits for _, recipe in as_policy(policy).rules for cast in recipe.casts]
    return f"FP{min(bits)}" if bits else "BF16"


def _limits(panels: Sequence[Panel]) -> tuple[float, float]:
    """Returns the limits of a group's axis.

    They fit the second half of the training of all curves that end as finite numbers below _BROKEN.
    """
    sound = [p for p in panels if p.validation and not p.note and p.validation[-1] < _BROKEN]
    late = [y for p in sound for y in (*p.training[len(p.training) // 2 :], *p.validation)]
    low, high = min([-0.4, *late]), max([0.8, *late])
    return max(1.2 * low, -_BROKEN), min(1.2 * high, _BROKEN)


def loss_differences(members: Sequence[Panel], *, baseline: str, title: str) -> Any:
    """Returns a figure of small panels, one for each precision, with its loss over training.

    The rows of panels are grouped, as FP8 and FP4. Panels of a group share their axis. A curve that
    leaves the axis is cut off, and the number in its panel says where it ends.

    Args:
      members: panels, any number, in the order in which they are drawn within their groups.
      baseline: the name of the zero line.
      title: of the figure.

    Raises:
      ValueError: there are no panels.
    """
    groups: dict[str, list[Panel]] = {}
    for panel in members:
        groups.setdefault(panel.group, []).append(panel)
    if not groups:
        raise ValueError(f"nothing to compare with {baseline}: there are no panels")
    columns = min(_COLUMNS, max(map(len, groups.values())))
    heights = {group: -(-len(members) // columns) for group, members in groups.items()}
    rows = sum(heights.values())
    size = {"width": 2.6 * columns, "height": 2.1 * rows + 0.5}
    with style() as look:
        figure, grid = panels(rows, columns, **size, sharex=True)
        figure.suptitle(textwrap.fill(title, 38 * columns), x=0.01, ha="left")
        first = 0
        for group, of_group in groups.items():
            _draw_group(grid[first : first + heights[group]], of_group, baseline, look)
            first += heights[group]
        for column in grid.T:
            shown = [axis for axis in column if axis.get_visible()]
            if shown:
                shown[-1].set_xlabel("step")
                shown[-1].tick_params(labelbottom=True)
    return figure


def _draw_group(axes: Any, members: Sequence[Panel], baseline: str, look: Style) -> None:
    """Draws the panels of a group onto axes [rows, columns]; the last row may not be full."""
    limits = _limits(members)
    for axis in axes.flat[len(members) :]:
        axis.set_visible(False)
    for row in axes:
        row[0].set_ylabel(f"{members[0].group}: loss above {baseline}, %")
    for panel, axis in zip(members, axes.flat, strict=False):
        _draw_panel(axis, panel, limits, look)
        if axis not in axes[:, 0]:
            axis.set_yticklabels([])
    place = axes[0, 0].get_yaxis_transform()  # x in parts of the axis, y in percent
    axes[0, 0].text(0.01, 0, baseline, transform=place, va="top", fontsize=7, color=look.muted)


def _draw_panel(axis: Any, panel: Panel, limits: tuple[float, float], look: Style) -> None:
    line = look.line(_INDEX[panel.group] if panel.group in _INDEX else _OTHER)
    color, marker = line["color"], line["marker"]
    axis.axhline(0, color=look.muted, linewidth=0.8, alpha=0.6)
    axis.plot(panel.steps, panel.training, color=color, alpha=0.6)
    axis.plot(panel.valid_steps, panel.validation, color=color, marker=marker, lw=0)
    axis.set_ylim(*limits)
    axis.set_title(panel.name)
    off_axis = bool(panel.validation) and panel.validation[-1] >= _BROKEN
    text = panel.note
    if not text and panel.validation:
        text = f"{panel.validation[-1]:+.2f}%" + (", off the axis" if off_axis else "")
    axis.text(
        0.98,
        0.95,
        text,
        transform=axis.transAxes,
        ha="right",
        va="top",
        fontweight="bold",
        color=look.bad if off_axis or panel.note else color,
    )


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
    finite = [y for curves in excess.values() for c in curves.values() for y in c if y < math.inf]
    top = 1.5 * max([10 * tolerance, *finite])
    with style() as look:
        figure, grid = panels(1, 2, width=8.4, height=3.7, sharey=True)
        for axis, (use, curves) in zip(grid[0], excess.items(), strict=True):
            axis.axhspan(-tolerance, tolerance, color=look.muted, alpha=0.18, linewidth=0)
            axis.axhline(0, color=look.muted, linewidth=0.8)
            for index, (model, curve) in enumerate(curves.items()):
                _draw_sweep(axis, index, model, (biases, curve), top, look)
            axis.set_title(use)
            axis.set_yscale("symlog", linthresh=tolerance)
            axis.set_ylim(-4 * tolerance, top)
            axis.yaxis.set_major_formatter("{x:g}")
            axis.set_xticks(biases[:: 1 + len(biases) // 16])
            axis.set_xlabel("bias b of the scale 2^-b; x: not finite")
        grid[0][0].set_ylabel("validation loss over BF16's, %")
        grid[0][0].text(biases[0], 0, "BF16", fontsize=7, color=look.muted, va="bottom")
    return figure


def _draw_sweep(
    axis: Any,
    index: int,
    model: str,
    points: tuple[Sequence[int], Sequence[float]],
    top: float,
    look: Style,
) -> None:
    """Draws one model's losses over the biases, and its name at the left."""
    biases, curve = points
    line = look.line(index)
    drawn = [y if y < math.inf else top for y in curve]
    axis.plot(biases, drawn, **line | {"linestyle": "-"})
    lost = [b for b, y in zip(biases, curve, strict=True) if not y < math.inf]
    axis.plot(lost, [0.99 * top] * len(lost), color=look.bad, marker="x", linestyle="")
    height = 0.03 + 0.06 * index
    place = {"transform": axis.transAxes}
    axis.plot([0.24], [height], color=line["color"], marker=line["marker"], **place)
    axis.text(0.27, height, model, color=line["color"], va="center_baseline", **place)


def seed_intervals(losses: Mapping[str, Sequence[float]]) -> Any:
    """Returns a figure of losses above BF16's: a mark for each seed, their mean and its t-interval.

    Args:
      losses: RECIPE or RECIPE/STAGE -> for each seed, the loss above BF16's in percent of it. Each
        recipe has a color. What has one seed has no interval, and is not drawn.

    Raises:
      ValueError: nothing has two seeds.
    """
    drawn = {name: values for name, values in losses.items() if len(values) > 1}
    if not drawn:
        raise ValueError(f"no interval to draw: one seed in each of {list(losses)}")
    recipes = list(dict.fromkeys(name.partition("/")[0] for name in drawn))
    with style() as look:
        figure, grid = panels(1, 1, height=0.6 + 0.24 * len(drawn))
        axis = grid[0, 0]
        axis.axvline(0, color=look.muted, linewidth=0.8)
        for row, (name, values) in enumerate(drawn.items()):
            line = look.line(recipes.index(name.partition("/")[0]))
            color, interval = line["color"], t_interval(values)
            ends = [interval.low, interval.high]
            axis.plot(ends, [row, row], color=color, alpha=0.35, lw=3, solid_capstyle="butt")
            axis.plot([interval.mean], [row], color=color, marker="|", markersize=11)
            axis.plot(values, [row] * len(values), color=color, marker=line["marker"], lw=0)
        axis.set_yticks(range(len(drawn)), list(drawn))
        axis.set_ylim(len(drawn) - 0.5, -0.5)
        axis.set_xlabel(
            "held-out loss above BF16's, %: each seed, their mean and its"
            f" {CONFIDENCE:.0%} t-interval"
        )
    return figure


def gap_curves(
    curves: Mapping[str, Mapping[str, Mapping[int, Sequence[float]]]],
    *,
    over: str,
    notes: Mapping[int, str] | None = None,
) -> Any:
    """Returns a figure of losses above BF16's over what grows: means with t-intervals.

    The values of x are drawn at equal distances.

    Args:
      curves: panel -> what trained -> x -> for each of two seeds or more, the loss above BF16's in
        percent of it.
      over: what x is.
      notes: x -> what stands below its label; of each x, or None for none.
    """
    places = sorted({x for of in curves.values() for points in of.values() for x in points})
    labels = [_short(x) if notes is None else f"{_short(x)}\n{notes[x]}" for x in places]
    with style() as look:
        figure, grid = panels(1, len(curves), height=3.0)
        for axis, (title, members) in zip(grid[0], curves.items(), strict=True):
            axis.axhline(0, color=look.muted, linewidth=0.8)
            for index, points in enumerate(members.values()):
                found = [t_interval(gaps) for gaps in points.values()]
                means = [interval.mean for interval in found]
                half = [interval.high - interval.mean for interval in found]
                x = [places.index(place) for place in points]
                axis.errorbar(x, means, half, **look.line(index), elinewidth=0.8, capsize=2)
            axis.set_title(title)
            axis.set_xticks(range(len(places)), labels)
            axis.set_xlabel(over)
            _name_ends(axis, members, look)
        grid[0, 0].set_ylabel(f"loss above BF16's, %: mean, {CONFIDENCE:.0%} t-interval")
    return figure


def _name_ends(
    axis: Any, members: Mapping[str, Mapping[int, Sequence[float]]], look: Style
) -> None:
    """Writes the name of each curve beside its end, the names apart from each other."""
    low, high = axis.get_ylim()
    ends = [statistics.fmean(list(points.values())[-1]) for points in members.values()]
    height, below = 0.055 * (high - low), -math.inf
    for end, index, name in sorted(zip(ends, range(len(ends)), members, strict=True)):
        below = max(end, below + height)
        place = {"xy": (1.02, below), "xycoords": axis.get_yaxis_transform()}
        color = look.line(index)["color"]
        axis.annotate(name, **place, color=color, fontsize=7, va="center", annotation_clip=False)


def _short(number: int) -> str:
    """Returns 302M for 301989888."""
    return f"{number / 1e6:.0f}M" if number >= 1e6 else str(number)
