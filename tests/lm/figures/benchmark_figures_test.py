"""Figures of benchmarks show the rows that the benchmarks write."""

import json
import math

import numpy as np
import pytest

from experiments.bench.report import Report, Row, write
from experiments.bench.timing import Timing
from fp8jax import figures
from fp8jax.lm.figures.style import NothingToDraw

LIMITS = {"bf16": 700e12, "fp8": 1400e12, "copy": 4e12}
PARTS = {"matmuls": 0.1, "attention": 0.02}


def step(name, seconds, case="tiny", parts=PARTS, **fields):
    return Row(
        case=case, name=name, timing=Timing(seconds=seconds, **fields), work=1e12, parts=parts
    )


def gemm(name, seconds, moved, work=1e12):
    return Row(case="8x8x8", name=name, timing=Timing(seconds=seconds), work=work, moved=moved)


@pytest.fixture
def tables_of(tmp_path):
    """Writes reports, section -> rows, and returns the path of their tables."""

    def made(**sections):
        for section, rows in sections.items():
            report = Report(
                title="T", rate="TFLOP/s", rows=rows, figures={"lost": math.nan}, limits=LIMITS
            )
            write(tmp_path / "h200", section, report, "a command")
        return tmp_path / "h200_tables.json"

    return made


def bars(axis):
    """Contestant -> the widths of its bars, in ms."""
    names = [text.get_text() for text in axis.get_yticklabels()]
    found = {name: [] for name in names}
    for bar in axis.patches:
        found[names[round(bar.get_y() + bar.get_height() / 2)]].append(round(bar.get_width(), 6))
    return found


def test_the_table_keeps_what_the_page_rounds(tables_of):
    path = tables_of(a=[step("bf16", 1 / 3)], b=[gemm("x", math.nan, math.nan)])
    tables = json.loads(path.read_text())
    (row,) = tables["a"]["rows"]
    assert (row["seconds"], row["parts"], row["moved"]) == (1 / 3, PARTS, None)
    assert tables["a"]["limits"] == LIMITS and tables["a"]["command"] == "a command"
    assert tables["b"]["rows"][0]["seconds"] is None


def test_a_step_is_its_products_its_attention_and_the_rest(tables_of):
    lost = step("torch", math.nan, reason="ImportError: torch")
    path = tables_of(
        step=[
            step("bf16", 0.2),
            step("fp8", 0.15, parts={"matmuls": 0.05, "attention": 0.02}),
            lost,
        ],
        gemm=[gemm("JAX bf16", 0.1, 1e9)],
    )
    figure = figures.step_breakdown(path)
    (axis,) = figure.axes
    assert bars(axis) == {"bf16": [100, 20, 80], "fp8": [50, 20, 80]}
    assert [text.get_text().strip() for text in axis.texts] == ["200", "150"]
    assert axis.get_xlabel() == "time of a step, ms" and axis.get_title(loc="left") == "tiny"
    looks = [(bar.get_facecolor(), bar.get_hatch()) for bar in axis.patches[:3]]
    assert len({color for color, _ in looks}) == len({hatch for _, hatch in looks}) == 3
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 3


def test_a_step_faster_than_the_limits_has_no_rest(tables_of):
    axis = figures.step_breakdown(tables_of(step=[step("bf16", 0.1)])).axes[0]
    assert bars(axis) == {"bf16": [100, 20, 0]} and axis.texts[0].get_text() == " 100"


def test_whole_training_steps_show_their_optimizer(tables_of):
    rows = [step("bf16", 0.3), step("bf16, no optimizer", 0.25), step("optimizer", 0.04, parts={})]
    axis = figures.step_breakdown(tables_of(train=rows)).axes[0]
    assert bars(axis) == {"bf16": [100, 20, 40, 140]}


def test_a_panel_for_each_shape_of_the_sections_asked_for(tables_of):
    path = tables_of(
        a=[step("bf16", 0.2), step("bf16", 0.4, case="wide")], b=[step("fp8", 0.1, "c")]
    )
    titles = lambda figure: [axis.get_title(loc="left") for axis in figure.axes]  # noqa: E731
    assert titles(figures.step_breakdown(path)) == ["tiny", "wide", "c"]
    again = tables_of(again=[step("bf16", 0.2)])
    assert titles(figures.step_breakdown(again)) == ["tiny", "wide", "tiny, section again", "c"]
    tables = json.loads(path.read_text())
    assert titles(figures.step_breakdown(tables, sections=["b"])) == ["c"]
    with pytest.raises(KeyError, match="other"):
        figures.step_breakdown(path, sections=["other"])


def test_roofline(tables_of):
    points = [
        gemm("ours", 1e-3, 1e9, 1e12),
        gemm("ours", 1e-3, 1e10, 5e11),
        gemm("bf16", 2e-3, 2e9),
    ]
    figure = figures.roofline(tables_of(gemm=[*points, step("no bytes", 1.0)]))
    (axis,) = figure.axes
    bf16, fp8, *series = axis.get_lines()
    # The roofs rise with the copy's rate, up to the corner, rate of matmuls over rate of the copy.
    np.testing.assert_allclose(bf16.get_xdata(), [25, 175, 1500])
    np.testing.assert_allclose(bf16.get_ydata(), [100, 700, 700])
    np.testing.assert_allclose(fp8.get_ydata(), [100, 1400, 1400])
    assert bf16.get_linestyle() != fp8.get_linestyle()
    assert [line.get_label() for line in series] == ["ours", "bf16"]
    np.testing.assert_allclose(series[0].get_xdata(), [1000, 50])
    np.testing.assert_allclose(series[0].get_ydata(), [1000, 500])
    assert series[0].get_marker() != series[1].get_marker()
    assert axis.get_xlabel() == "arithmetic intensity, FLOP/byte" and axis.get_ylabel() == "TFLOP/s"
    assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log")
    assert [text.get_text() for text in axis.texts] == ["BF16 700 TFLOP/s", "FP8 1,400 TFLOP/s"]


def test_benchmarks_without_such_rows(tables_of):
    with pytest.raises(NothingToDraw, match="bench step"):
        figures.step_breakdown(tables_of(gemm=[gemm("bf16", 0.1, 1e9)]))
    with pytest.raises(NothingToDraw, match="bench gemm"):
        figures.roofline({})
