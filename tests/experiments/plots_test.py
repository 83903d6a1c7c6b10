"""Figures render, and show what they were given."""

import io
import math

import matplotlib.image
import numpy as np
import pytest

from experiments.study import plots
from experiments.study.intervals import t_interval

RED = "#b00020"  # of what went wrong, in the light style

pytestmark = pytest.mark.extended


def rendered(figure):
    """The pixels of a figure, [height, width, channels]."""
    file = io.BytesIO()
    figure.savefig(file, format="png")
    file.seek(0)
    return matplotlib.image.imread(file)


def panel(name: str, group: str, end: float, note: str = "") -> plots.Panel:
    steps = list(range(1, 11))
    training = [end + 3 / step for step in steps]
    return plots.Panel(name, group, steps, training, [5, 10], [end + 1, end], note)


def test_a_panel_a_precision_in_groups_with_an_axis_each():
    panels = [
        *(panel(f"fp8_{i}", "FP8", 0.1 * i) for i in range(6)),
        panel("mixed", "FP4", 2.0),
        panel("naive", "FP4", 14.0),
        panel("lost", "FP4", 1.0, "non-finite at step 11"),
    ]
    figure = plots.loss_differences(panels, baseline="BF16", title="Loss above BF16's")
    pixels = rendered(figure)
    assert pixels.shape[0] > 300 and pixels.shape[1] > 1000 and pixels.min() < 0.5 < pixels.max()
    shown = [axis for axis in figure.axes if axis.get_visible()]
    assert [axis.get_title(loc="left") for axis in shown] == [p.name for p in panels]
    for axis, given in zip(shown, panels, strict=True):
        zero, training, validation = axis.get_lines()
        assert set(zero.get_ydata()) == {0}
        assert list(training.get_xdata()) == given.steps
        assert list(training.get_ydata()) == given.training
        assert list(validation.get_ydata()) == given.validation
    said = [axis.texts[0].get_text() for axis in shown]
    assert said[:2] == ["+0.00%", "+0.10%"]
    assert said[-3:] == ["+2.00%", "+14.00%, off the axis", "non-finite at step 11"]
    red = [axis.texts[0].get_color() == RED for axis in shown]
    assert red == [False] * 7 + [True, True]
    limits = {p.group: axis.get_ylim() for p, axis in zip(panels, shown, strict=True)}
    # By hand: FP8's last panel validates at 1.5 at most; of FP4's only the sound one counts.
    assert limits["FP8"] == pytest.approx((-0.48, 1.2 * 1.5))
    assert limits["FP4"] == pytest.approx((-0.48, 1.2 * 3.0))
    labels = [axis.get_ylabel() for axis in shown if axis.get_ylabel()]
    assert labels == [
        "FP8: loss above BF16, %",
        "FP8: loss above BF16, %",
        "FP4: loss above BF16, %",
    ]


def test_curves_that_ended_at_once_are_drawn_all_the_same():
    lost = plots.Panel("lost", "FP4", [], [], [], [], "non-finite at step 1")
    figure = plots.loss_differences([lost], baseline="BF16", title="")
    rendered(figure)
    assert figure.axes[0].texts[0].get_text() == "non-finite at step 1"
    with pytest.raises(ValueError, match="nothing to compare with BF16"):
        plots.loss_differences([], baseline="BF16", title="")


def test_the_sweep_shows_every_model_in_every_use_and_marks_what_was_lost():
    biases = [-1, 0, 1, 2]
    excess = {
        "training": {"small": [30.0, 0.5, -0.2, math.inf], "large": [math.nan, 8.0, 0.1, 40.0]},
        "inference": {"small": [0.1, 0.0, 0.0, 3.0], "large": [0.2, 0.1, 0.0, 5.0]},
    }
    figure = plots.bias_sweep(excess, biases, tolerance=1.0)
    assert rendered(figure).shape[1] > 800
    assert [axis.get_title(loc="left") for axis in figure.axes] == list(excess)
    for axis, curves in zip(figure.axes, excess.values(), strict=True):
        assert {"small", "large"} <= {text.get_text() for text in axis.texts}
        assert axis.get_yscale() == "symlog" and list(axis.get_xticks()) == biases
        top = axis.get_ylim()[1]
        assert top == 1.5 * 40
        drawn = [list(line.get_ydata()) for line in axis.get_lines() if len(line.get_xdata()) == 4]
        expected = [[y if y < math.inf else top for y in curve] for curve in curves.values()]
        assert drawn == expected
    lost = [
        list(line.get_xdata()) for line in figure.axes[0].get_lines() if line.get_color() == RED
    ]
    assert lost == [[2], [-1]]


def test_a_line_for_each_interval_and_a_mark_for_each_seed():
    losses = {"a/x": [0.1, 0.3], "a/y": [-1.0, 0.0, 1.0], "b/x": [2.0, 2.5]}
    figure = plots.seed_intervals({"a/one": [7.0], **losses})
    assert rendered(figure).shape[1] > 800
    (axis,) = figure.axes
    zero, *lines = axis.get_lines()
    assert set(zero.get_xdata()) == {0}
    assert [label.get_text() for label in axis.get_yticklabels()] == list(losses)
    for row, values in enumerate(losses.values()):
        ends, mean, seeds = lines[3 * row : 3 * row + 3]
        interval = t_interval(values)
        assert list(ends.get_xdata()) == [interval.low, interval.high]
        assert list(mean.get_xdata()) == [interval.mean]
        assert list(seeds.get_xdata()) == values
        assert {y for line in (ends, mean, seeds) for y in line.get_ydata()} == {row}
    colors = [line.get_color() for line in lines[::3]]
    assert colors[0] == colors[1] != colors[2]
    with pytest.raises(ValueError, match="no interval to draw"):
        plots.seed_intervals({"a/one": [7.0]})


def test_a_curve_for_each_recipe_with_its_intervals_and_names_that_do_not_meet():
    curves = {
        "FP8": {"a": {1: [0.1, 0.3], 50: [0.2, 0.2]}},
        "FP4": {"b": {50: [1.0, 2.0], 302_000_000: [3.0, 3.0]}, "c": {50: [2.0, 2.0, 2.6]}},
    }
    figure = plots.gap_curves(curves, over="steps")
    assert rendered(figure).shape[1] > 800
    for axis, (title, members) in zip(figure.axes, curves.items(), strict=True):
        assert axis.get_title(loc="left") == title and axis.get_xlabel() == "steps"
        assert [label.get_text() for label in axis.get_xticklabels()] == ["1", "50", "302M"]
        for drawn, points in zip(axis.containers, members.values(), strict=True):
            data, _, (bars,) = drawn.lines
            found = [t_interval(gaps) for gaps in points.values()]
            assert list(data.get_ydata()) == [interval.mean for interval in found]
            assert list(data.get_xdata()) == [[1, 50, 302_000_000].index(x) for x in points]
            ends = np.array(bars.get_segments())[:, :, 1]
            np.testing.assert_allclose(ends, [(each.low, each.high) for each in found], rtol=1e-12)
    names = {text.get_text(): text.xy[1] for text in figure.axes[1].texts}
    assert names == {"c": pytest.approx(2.2), "b": 3.0}
    notes = {1: "one", 50: "two", 302_000_000: "three"}
    axis = plots.gap_curves(curves, over="steps", notes=notes).axes[0]
    below = [label.get_text() for label in axis.get_xticklabels()]
    assert below == ["1\none", "50\ntwo", "302M\nthree"]
    close = {"FP4": {name: {1: [1.0, 1.2 + i / 1000]} for i, name in enumerate("dcba")}}
    axis = plots.gap_curves(close, over="steps").axes[0]
    heights = [text.xy[1] for text in axis.texts]
    assert [text.get_text() for text in axis.texts] == ["d", "c", "b", "a"]
    assert min(np.diff(heights)) >= 0.05 * (axis.get_ylim()[1] - axis.get_ylim()[0])
