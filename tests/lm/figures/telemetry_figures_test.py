"""Figures of telemetry show the run's numbers, in the panels and with the labels that they name."""

import io
import math

import numpy as np
import pytest

from fp8jax import figures
from fp8jax.lm.figures.style import NothingToDraw
from fp8jax.telemetry.rows import NO_LAYER
from tests.support.run_files import row, write_run

STEPS, LAYERS = (5, 10, 20), (0, 1)
CASTS = {"w": "fwd_w", "x": "fwd_x", "g": "dgrad_g"}
LINEARS = ("layers/attention/q", "layers/mlp/up")


def bias_of(step, layer, linear, operand):
    """A number of its own for each tensor."""
    return step + 2 * layer + 7 * LINEARS.index(linear) + 100 * list(CASTS).index(operand)


def own(step, layer, linear, operand, **fields):
    fmt = "e5m2" if operand == "g" else "e4m3"
    bias = bias_of(step, layer, linear, operand)
    known = dict(
        step=step,
        layer=layer,
        linear=linear,
        operand=operand,
        cast=CASTS[operand],
        format=fmt,
        bias=bias,
        underflow=bias / 1000,
        saturation=bias / 2000,
    )
    return row(**known | fields)


ROWS = [own(s, n, p, o) for s in STEPS for p in LINEARS for n in LAYERS for o in CASTS]
# None of these are drawn: what another recipe would do, and the output of SwiGLU.
OTHERS = [row(what_if=True, bias=999), row(operand="hidden", cast="", bias=None, format=None)]


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "tiny", rows=[*ROWS, *OTHERS])


def render(figure):
    figure.savefig(io.BytesIO(), format="svg")


def panels_of(figure):
    """(linear, operand) -> axis; the last axis is the key of colors."""
    *axes, key = figure.axes
    assert len(axes) == len(LINEARS) * len(CASTS)
    return dict(zip([(p, o) for p in LINEARS for o in CASTS], axes, strict=True)), key


def test_biases_of_each_tensor_over_the_steps(run):
    figure = figures.scaling_bias(run)
    axes, key = panels_of(figure)
    for (linear, operand), axis in axes.items():
        lines = axis.get_lines()
        assert len(lines) == len(LAYERS)
        for layer, line in enumerate(lines):
            assert tuple(line.get_xdata()) == STEPS
            # Layers of equal bias are apart: 0.3 below the integer, and 0.3 above it.
            expected = [bias_of(s, layer, linear, operand) + (-0.3, 0.3)[layer] for s in STEPS]
            np.testing.assert_allclose(line.get_ydata(), expected, rtol=1e-12)
    assert len({line.get_color() for line in axes["layers/mlp/up", "x"].get_lines()}) == 2
    titles = [axis.get_title(loc="left") for axis in list(axes.values())[:3]]
    assert titles == ["weights, E4M3", "activations, E4M3", "gradients, E5M2"]
    assert [axes[linear, "w"].get_ylabel() for linear in LINEARS] == ["attention q", "mlp up"]
    assert figure.get_supylabel() == "scaling bias, log2" and key.get_ylabel() == "layer"
    assert {axes[LINEARS[1], o].get_xlabel() for o in CASTS} == {"step"}
    assert figure.get_suptitle() == "tiny: scaling bias of each tensor"


def test_an_axis_of_biases_spans_six_binades(tmp_path):
    """One that fits the data would make the offsets of the layers look like differences."""
    rows = [row(layer=layer, bias=9) for layer in range(4)]
    figure = figures.scaling_bias(write_run(tmp_path, rows=rows))
    axis = figure.axes[0]
    assert axis.get_ylim() == (6, 12)
    assert {line.get_marker() for line in axis.get_lines()} == {"o"}  # a line of one point


def test_biases_of_a_run_in_high_precision_are_those_of_graphcores_formats(tmp_path):
    rows = [own(5, 0, LINEARS[0], o, format=None) for o in CASTS]
    figure = figures.scaling_bias(write_run(tmp_path, rows=rows))
    titles = [axis.get_title(loc="left") for axis in figure.axes[:3]]
    assert titles == ["weights, of E4M3", "activations, of E4M3", "gradients, of E5M2"]


def test_linears_outside_the_stack_have_a_line_of_their_own(tmp_path):
    head = [row(step=s, layer=NO_LAYER, linear="lm_head", bias=s) for s in STEPS]
    figure = figures.scaling_bias(write_run(tmp_path, rows=[*ROWS, *head]))
    (line,) = figure.axes[7].get_lines()
    assert figure.axes[6].get_ylabel() == "lm_head"
    assert tuple(line.get_ydata()) == STEPS
    assert not figure.axes[6].get_visible() and not figure.axes[8].get_visible()


@pytest.mark.parametrize("name, divisor", [("underflow", 1000), ("saturation", 2000)])
def test_heat_maps_show_percents(run, name, divisor):
    figure = getattr(figures, name)(run)
    axes, key = panels_of(figure)
    for (linear, operand), axis in axes.items():
        (mesh,) = axis.collections
        shown = np.asarray(mesh.get_array()).reshape(len(LAYERS), len(STEPS))
        expected = [
            [100 * bias_of(s, layer, linear, operand) / divisor for s in STEPS] for layer in LAYERS
        ]
        np.testing.assert_allclose(shown, expected, rtol=1e-12)
    corners = mesh.get_coordinates()
    assert corners[0, :, 0].tolist() == [2.5, 7.5, 15, 25]  # borders halfway between the steps
    assert corners[:, 0, 1].tolist() == [-0.5, 0.5, 1.5]
    assert name in key.get_ylabel() and "% of" in key.get_ylabel()
    assert figure.get_supylabel() == "layer"
    assert [axis.get_title(loc="left") for axis in list(axes.values())[:3]] == [
        "weights",
        "activations",
        "gradients",
    ]
    labels = [text.get_text() for text in axes["layers/mlp/up", "w"].get_yticklabels()]
    assert labels == ["0", "1"]


def test_zero_is_blank_and_what_is_not_cast_is_hatched(tmp_path):
    rows = [row(layer=0), row(layer=1, underflow=0.5), row(layer=2, underflow=None, format=None)]
    figure = figures.underflow(write_run(tmp_path, rows=rows), dark=True)
    axis = figure.axes[0]
    (mesh,) = axis.collections
    colors = mesh.to_rgba(mesh.get_array()).reshape(3, 4)
    background = np.array([0x15, 0x18, 0x1C]) / 255
    np.testing.assert_allclose(colors[0, :3], background, atol=1e-6)
    assert colors[1, 3] == 1 and np.abs(colors[1, :3] - background).max() > 0.2
    assert colors[2, 3] == 0 and axis.patch.get_hatch()


@pytest.mark.parametrize(
    ("shares", "percents"),
    [
        ((0.02, 0.4), (1, 100)),
        ((0.0, 5e-7, 3e-4, 0.02), (0.01, 10)),  # the first two are blank
        ((0.05,), (1, 10)),
        ((0.1,), (10, 100)),
        ((0.0, 0.0), (1e-3, 100)),
    ],
)
def test_colors_span_the_decades_of_what_is_shown(tmp_path, shares, percents):
    """A map whose cells are all between 2 and 40% is not of one color."""
    rows = [row(layer=i, underflow=share) for i, share in enumerate(shares)]
    (mesh,) = figures.underflow(write_run(tmp_path, rows=rows)).axes[0].collections
    assert (mesh.norm.vmin, mesh.norm.vmax) == pytest.approx(percents, rel=1e-12)


def test_the_worst_cast_of_an_operand_is_shown(tmp_path):
    rows = [row(underflow=0.1, bias=4), row(cast="wgrad_x", underflow=0.4, bias=3)]
    for i, ordered in enumerate((rows, rows[::-1])):
        run = write_run(tmp_path / str(i), rows=ordered)
        (mesh,) = figures.underflow(run).axes[0].collections
        assert float(mesh.get_array().ravel()[0]) == pytest.approx(40)
        (line,) = figures.scaling_bias(run).axes[0].get_lines()
        assert line.get_ydata()[0] == 3


def test_biases_by_linear_are_counted(tmp_path):
    biases = {LINEARS[0]: [8, 8, 8, 9], LINEARS[1]: [5, 6, 6, 5]}
    rows = [
        row(layer=n, linear=p, bias=b, step=0) for p, bs in biases.items() for n, b in enumerate(bs)
    ]
    rows += [row(layer=0, linear=LINEARS[0], operand="w", cast="fwd_w", bias=12, step=0)]
    rows += [row(layer=0, linear=LINEARS[0], cast="wgrad_x", bias=0, step=0)]  # counted once
    figure = figures.scaling_bias_by_linear(rows)
    (axis,) = figure.axes
    marks = [c for c in axis.collections if len(c.get_offsets())]
    weights, activations = marks
    assert weights.get_offsets()[:, 1].tolist() == [12]
    assert activations.get_offsets()[:, 1].tolist() == [8, 9, 5, 6]
    np.testing.assert_allclose(activations.get_sizes() / activations.get_sizes()[1], [3, 1, 2, 2])
    medians = [line.get_ydata()[0] for line in axis.get_lines()]
    assert medians == [12, 8, 5.5]
    assert [text.get_text() for text in axis.get_xticklabels()] == ["attention\nq", "mlp\nup"]
    assert axis.get_ylabel() == "scaling bias, log2" and axis.get_xlabel() == "linear"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "weights, E4M3",
        "activations, E4M3",
    ]


def test_what_cannot_be_drawn_says_why(tmp_path):
    empty = write_run(tmp_path / "a", metrics=[{"step": 1, "loss": 2.0}])
    for draw in (figures.scaling_bias, figures.underflow, figures.saturation):
        with pytest.raises(NothingToDraw, match="a has no telemetry: train with"):
            draw(empty)
    exact = write_run(tmp_path / "b", rows=[row(underflow=None, saturation=None, format=None)])
    with pytest.raises(NothingToDraw, match="b casts nothing to FP8 or FP4: it has no underflow"):
        figures.underflow(exact)
    with pytest.raises(NothingToDraw, match="no row of telemetry has a scaling bias"):
        figures.scaling_bias_by_linear([row(bias=None)])


def test_amaxes_that_are_not_finite_leave_gaps(tmp_path):
    rows = [row(step=s, bias=None if s == 10 else 4, amax=math.nan) for s in STEPS]
    figure = figures.scaling_bias(write_run(tmp_path, rows=rows))
    (line,) = figure.axes[0].get_lines()
    np.testing.assert_equal(line.get_ydata(), [4, math.nan, 4])
    render(figure)


def test_all_biases_unknown(tmp_path):
    figure = figures.scaling_bias(write_run(tmp_path, rows=[row(bias=None)]))
    assert figure.axes[0].get_ylim() == (-3, 3)
