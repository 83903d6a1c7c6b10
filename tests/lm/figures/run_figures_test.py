"""Figures of losses, promotions and memory show what the run has written."""

import math

import numpy as np
import pytest

from fp8jax import figures
from fp8jax.lm.figures.gnmr import promoted_stretches
from fp8jax.lm.figures.loss_curves import gaps, smoothed
from fp8jax.lm.figures.style import NothingToDraw
from fp8jax.lm.records.events import Cause, Event
from tests.support.run_files import write_run


def losses_of(values, valid=()):
    """Lines of metrics.jsonl; `valid` maps steps to validation losses."""
    valid = dict(valid)
    return [
        {"step": step, "loss": loss} | ({"valid_loss": valid[step]} if step in valid else {})
        for step, loss in enumerate(values, start=1)
    ]


def drawn(axis):
    """(x, y) of each line that has points."""
    lines = [(list(line.get_xdata()), list(line.get_ydata())) for line in axis.get_lines()]
    return [line for line in lines if line[0]]


def test_losses_and_gaps_are_those_of_the_runs(tmp_path):
    base = write_run(tmp_path / "bf16", metrics=losses_of([4.0, 2.0, 1.0], {3: 1.0}))
    other = write_run(tmp_path / "fp8", metrics=losses_of([5.0, 2.0, 1.5], {3: 1.1}))
    figure = figures.losses([base, other])
    top, below = figure.axes
    assert drawn(top) == [
        ([1, 2, 3], [4.0, 2.0, 1.0]),
        ([3], [1.0]),
        ([1, 2, 3], [5.0, 2.0, 1.5]),
        ([3], [1.1]),
    ]
    assert drawn(below)[:2] == [([1, 2, 3], [0.0] * 3), ([3], [0.0])]
    np.testing.assert_allclose(drawn(below)[2][1], [25, 0, 50])
    np.testing.assert_allclose(drawn(below)[3][1], [10])
    assert (top.get_ylabel(), below.get_ylabel()) == ("loss, nats a token", "loss above bf16's, %")
    assert below.get_xlabel() == "step"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["bf16", "fp8"]
    first, second = legend.get_lines()
    for cue in ("color", "marker", "linestyle"):
        assert getattr(first, f"get_{cue}")() != getattr(second, f"get_{cue}")()


def test_long_runs_are_smoothed_and_short_ones_are_not(tmp_path):
    values = [float(i % 7) for i in range(120)]
    figure = figures.losses(write_run(tmp_path, metrics=losses_of(values)))
    (axis,) = figure.axes  # one run has no gap
    ((steps, means),) = drawn(axis)
    assert steps == list(range(1, 121)) and means[:2] == [0.0, 0.5]
    whole = np.convolve(values, np.full(3, 1 / 3), "valid")
    np.testing.assert_allclose(means[2:], whole, atol=1e-12)
    assert axis.get_title(loc="left") == "line: training, mean of 3 steps; markers: validation"
    assert smoothed({1: 3.0, 5: 5.0, 6: 1.0}, 2) == {1: 3.0, 5: 4.0, 6: 3.0}
    assert gaps({1: 3.0, 2: 1.0}, {2: 4.0, 3: 1.0}) == {2: -75.0}


def test_a_run_that_a_rejected_step_ended_has_a_cross(tmp_path):
    values = {"loss": math.nan, "grad_norm": math.nan}
    stop = {"step": 3, "kind": Event.STOP, "cause": Cause.NON_FINITE, **values}
    end = {"step": 2, "kind": Event.END, "reason": "NonFiniteError"}
    run = write_run(tmp_path, metrics=losses_of([4.0, 2.0]), events=[stop, end])
    (axis,) = figures.losses(run).axes
    assert drawn(axis)[-1] == ([2], [2.0]) and axis.get_lines()[-1].get_marker() == "X"
    assert axis.texts[0].get_text() == "stopped at step 3"


def test_losses_that_are_not_there(tmp_path):
    run = write_run(tmp_path / "a", events=[{"step": 0, "kind": Event.START}])
    with pytest.raises(NothingToDraw, match="a: no loss in metrics.jsonl"):
        figures.losses([run])
    with pytest.raises(NothingToDraw, match="no runs"):
        figures.losses([])


def promotion(step, *layers):
    return {"step": step, "kind": Event.PROMOTION, "layers": list(layers)}


START = {"step": 0, "kind": Event.START}


def test_promotions_are_bars_while_a_layer_is_promoted(tmp_path):
    events = [START, promotion(3, 1), promotion(5, 1, 2), promotion(7), promotion(10, 1)]
    run = write_run(tmp_path / "gnmr", metrics=losses_of([1.0] * 12), events=events)
    assert promoted_stretches(run.events, 12) == {1: [(3, 7), (10, 13)], 2: [(5, 7)]}
    figure = figures.promotions(run)
    (axis,) = figure.axes
    first, second = axis.collections
    boxes = [path.get_extents() for path in first.get_paths()]
    assert [(box.x0, box.x1, box.y0, box.y1) for box in boxes] == [
        (2.5, 6.5, 0.65, 1.35),
        (9.5, 12.5, 0.65, 1.35),
    ]
    assert [path.get_extents().x0 for path in second.get_paths()] == [4.5]
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("step", "layer")
    assert axis.get_title(loc="left") == "gnmr: promoted layers; 9 steps, summed over layers"


def test_promoted_linears_have_a_row_each(tmp_path):
    both = {"step": 2, "kind": Event.PROMOTION, "linears": ["2/mlp/up", "10/attention/q"]}
    events = [START, both, {"step": 4, "kind": Event.PROMOTION, "linears": []}]
    run = write_run(tmp_path / "gnmr", metrics=losses_of([1.0] * 5), events=events)
    assert list(promoted_stretches(run.events, 5).items()) == [
        ("2/mlp/up", [(2, 4)]),
        ("10/attention/q", [(2, 4)]),
    ]
    (axis,) = figures.promotions(run).axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["2/mlp/up", "10/attention/q"]
    assert axis.get_title(loc="left") == "gnmr: promoted linears; 4 steps, summed over linears"


def test_promotions_after_a_resume_are_not_counted_twice():
    """Killed after step 8 and resumed from step 4: what it did between is done again."""
    resume = {"step": 4, "kind": Event.START}
    events = [START, promotion(2, 0), promotion(6), promotion(7, 3), resume, promotion(5, 0)]
    assert promoted_stretches(events, 8) == {0: [(2, 9)]}
    assert promoted_stretches([*events[:-1], promotion(6, 0)], 8) == {0: [(2, 5), (6, 9)]}
    assert promoted_stretches(events, 4) == {0: [(2, 5)]}  # metrics of later steps were dropped


def test_a_run_without_promotions(tmp_path):
    run = write_run(tmp_path / "a", metrics=losses_of([1.0]), events=[START])
    with pytest.raises(NothingToDraw, match="a has promoted nothing"):
        figures.promotions(run)


MEMORY = {
    "weights": 1,
    "optimizer": 2,
    "histories": 0,
    "batch": 0,
    "gradients": 1,
    "activations": 4,
    "total": 8,
}


def stage(policy, unit):
    memory = {kind: size * unit for kind, size in MEMORY.items()}
    return {"step": 0, "kind": Event.STAGE, "policy": policy, "memory": memory}


def test_memory_by_kind(tmp_path):
    lines = [{"step": 1, "loss": 1.0, "peak_memory_bytes": size} for size in (None, 10 * 2**30)]
    events = [stage("fp8_block", 2**30), stage("bf16", 2**31)]
    run = write_run(tmp_path / "tiny", metrics=lines, events=events)
    figure = figures.memory_by_kind(run)
    (axis,) = figure.axes
    widths = [[bar.get_width() for bar in bars] for bars in axis.containers]
    assert widths == [[n] for n in (1, 2, 0, 0, 1, 4)] + [[2 * n] for n in (1, 2, 0, 0, 1, 4)]
    lefts = [bars[0].get_x() for bars in axis.containers[:6]]
    assert lefts == [0, 1, 3, 3, 3, 4]
    assert [text.get_text().strip() for text in axis.texts] == ["8", "16"]
    assert axis.get_xlabel() == "memory on each device, GiB"
    assert [text.get_text() for text in axis.get_yticklabels()] == ["fp8_block", "bf16"]
    (legend,) = figure.legends
    said = {text.get_text() for text in legend.get_texts()}
    assert len(said) == 7 and {"optimizer state", "peak of the device"} <= said
    looks = {(bars[0].get_facecolor(), bars[0].get_hatch()) for bars in axis.containers[:6]}
    assert len({color for color, _ in looks}) == len({hatch for _, hatch in looks}) == 6


def test_memory_of_small_runs_is_in_mib_and_that_of_old_ones_unknown(tmp_path):
    run = write_run(tmp_path / "a", events=[stage("bf16", 2**20)])
    assert figures.memory_by_kind(run).axes[0].get_xlabel().endswith("MiB")
    old = write_run(tmp_path / "b", events=[{"step": 0, "kind": Event.STAGE, "policy": "bf16"}])
    with pytest.raises(NothingToDraw, match="b did not record memory by kind"):
        figures.memory_by_kind(old)
    larger, same = (
        write_run(tmp_path / name, events=[stage("fp8", 2**30)]) for name in ("c", "fp8")
    )
    both = figures.memory_by_kind(run, larger, same, old)
    (axis,) = both.axes  # on one axis, in one unit
    assert [text.get_text() for text in axis.get_yticklabels()] == ["a, bf16", "c, fp8", "fp8"]
    assert [text.get_text().strip() for text in axis.texts] == ["0.00781", "8", "8"]
