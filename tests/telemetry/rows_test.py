"""Numbers derived on the host, files of rows, and the scalars for curves."""

import dataclasses
import math

import numpy as np
import pyarrow.dataset
import pytest

from fp8jax.gemm.probe import Probe
from fp8jax.numerics.formats import FORMATS
from fp8jax.numerics.names import as_recipe
from fp8jax.telemetry.files import StepFiles, read_rows, write_rows
from fp8jax.telemetry.outliers import out_of_line
from fp8jax.telemetry.rows import FIELDS, Table, hidden_row, rows_of, scaling_bias
from fp8jax.telemetry.summary import layer_groups, summary


@pytest.mark.parametrize(
    "fmt, amax, bias",
    [
        ("e4m3", 448.0, 0),
        ("e4m3", 448.1, -1),
        ("e4m3", 224.0, 1),
        ("e4m3", 0.1, 12),
        ("e5m2", 57344.0 * 2**-30, 30),
        ("e4m3", 0.0, 0),
        ("e4m3", math.inf, None),
        ("e4m3", math.nan, None),
    ],
)
def test_scaling_bias_is_the_largest_shift_that_fits(fmt, amax, bias):
    assert scaling_bias(amax, FORMATS[fmt]) == bias
    if bias is not None and amax:
        assert amax * 2.0**bias <= FORMATS[fmt].max < amax * 2.0 ** (bias + 1)


def statistics(layers=1):
    """Of a linear whose casts saw 5000 elements, 4000 of them not zero."""
    peaks = np.tile(np.float32([3.5, 2.0**-7, 2.0**8, 2.0**-6]), (layers, 6, 1))
    sums = np.tile(np.float32([1, 904, 0, 4000, 0, 40, 0, 5, 1000, 10]), (layers, 6, 1))
    return Probe(peaks, sums)


def some_rows(step=0, layers=1, recipe="fp8_delayed"):
    recipes = [as_recipe(recipe)] * layers
    return rows_of(statistics(layers), "layers/mlp/up", recipes, step=step, layers=range(layers))


def test_shares_ratios_and_distances():
    first = some_rows()[0]
    assert (first.elements, first.nonzero, first.bias) == (5000, 4000, 7)
    assert (first.underflow, first.saturation) == (0.01, 0.001)
    assert first.sqnr_db == pytest.approx(20) and first.delay == -1
    assert (first.scale, first.smallest_scale) == (2.0**-7, 2.0**-8)
    plain = some_rows(recipe="bf16")[2]  # dgrad_g: Graphcore's format of gradients is E5M2
    assert (plain.format, plain.sqnr_db, plain.delay, plain.scale) == (None,) * 4
    assert plain.bias == 14 and plain.amax == 3.5  # 57344 / 2^14
    assert some_rows(recipe="fp8_block")[0].delay is None
    nothing = dataclasses.replace(statistics(), sums=np.zeros((1, 6, 10), np.float32))
    assert rows_of(nothing, "a", [as_recipe("bf16")], step=0, layers=[0]) == []


def test_files_hold_each_step_once_and_only_whole(tmp_path):
    files = StepFiles(tmp_path, 0)
    for step in (50, 100, 150):
        files.write(step, some_rows(step))
    files.write(100, some_rows(100))  # measured again
    half = tmp_path / "telemetry" / ".step_000000200.parquet.tmp"
    half.write_bytes(b"PAR1 half a file")
    assert [row.step for row in read_rows(tmp_path).rows[::6]] == [50, 100, 150]
    assert read_rows(tmp_path).rows[:6] == tuple(some_rows(50))
    # What pandas reads: the folder as one table.
    table = pyarrow.dataset.dataset(tmp_path / "telemetry").to_table()
    assert tuple(table.column_names) == FIELDS and table.num_rows == 18

    files.write(101, some_rows(101))
    files = StepFiles(tmp_path, 100)  # resumed from step 100: 101 and 150 never were
    assert not half.exists()
    assert {row.step for row in read_rows(tmp_path).rows} == {50, 100}
    files.write(150, some_rows(150))
    assert len(read_rows(tmp_path / "telemetry").rows) == 18


def test_files_that_are_not_there_or_not_telemetry(tmp_path):
    with pytest.raises(FileNotFoundError, match="no telemetry in .*telemetry.every=50"):
        read_rows(tmp_path)
    write_rows(tmp_path / "one.parquet", [hidden_row(2.0, "mlp", step=1, layer=0, recipe="bf16")])
    assert read_rows(tmp_path / "one.parquet").rows[0].scale is None
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"step": [1]}), tmp_path / "step_000000001.parquet")
    with pytest.raises(ValueError, match="has no column layer, linear"):
        read_rows(tmp_path)


def test_columns_and_text():
    table = Table(tuple(some_rows(layers=2)))
    assert table.columns()["layer"] == [0] * 6 + [1] * 6
    assert "layers/mlp/up  fwd_x    fp8_delayed  e4m3     3.5" in str(table)
    assert len(table.where(lambda row: row.operand == "g").rows) == 4


def test_summary_has_the_worst_cast_of_each_group():
    assert layer_groups([0, 1, 2, 3, 4, 5, -1])[5] == "layers_4-5"
    rows = some_rows(layers=2)
    rows[1] = dataclasses.replace(rows[1], underflow=0.5, sqnr_db=math.inf)
    scalars = summary([*rows, dataclasses.replace(rows[0], what_if=True, amax=1e9)])
    assert scalars["telemetry/layers_0/w/underflow"] == 0.5
    assert scalars["telemetry/layers_0/w/sqnr_db"] == pytest.approx(20)  # of its other cast
    assert scalars["telemetry/layers_1/x/amax"] == 3.5 and len(scalars) == 2 * 3 * 5


def test_reasons_and_order():
    rows = [row for step in (1, 2) for row in some_rows(step, layers=5, recipe="fp8_block")]
    assert out_of_line(rows) == []

    def changed(step, layer, operand, **fields):
        return [
            dataclasses.replace(row, **fields)
            if (row.step, row.layer, row.operand) == (step, layer, operand)
            else row
            for row in rows
        ]

    rows = changed(2, 3, "g", amax=math.inf)
    rows = changed(2, 1, "g", amax=3.5 * 64)
    rows = changed(2, 2, "x", sqnr_db=2.0)
    rows = changed(2, 0, "x", sqnr_db=8.0)
    found = [(f.layer, f.operand, f.why) for f in out_of_line(rows)]
    assert [why[:2] for why in found] == [(0, "x"), (2, "x"), (3, "g"), (1, "g")]
    assert found[0][2] == "its SQNR is 8.0 dB, that of its peers 20.0 dB"
    assert found[1][2] == "its SQNR is 2.0 dB: the cast leaves little of it"
    assert found[2][2] == "its amax is inf"
    assert found[3][2] == "its amax 224 is 64 times its largest before"

    # All gradients of a linear may grow at once, but not one of them.
    rows = [row for step in (1, 2) for row in some_rows(step, layers=5, recipe="fp8_block")]
    for layer in range(5):
        rows = changed(1, layer, "g", amax=3.5 / 64)
    assert out_of_line(rows) == []
    rows = changed(2, 4, "g", amax=3.5 * 20)
    assert [str(f) for f in out_of_line(rows)] == [
        "step 2: g of layers/mlp/up in layer 4: its amax 70 is 1.28e+03 times its largest before"
    ]

    # A delayed scale that clips counts where that makes most of the noise.
    rows = [row for step in (1, 2) for row in some_rows(step, layers=5, recipe="fp8_delayed")]
    rows = changed(2, 4, "x", saturation=2.5e-6, delay=-1.5, sqnr_db=24.0)
    assert out_of_line(rows) == []
    rows = changed(2, 4, "x", sqnr_db=19.0)
    assert out_of_line(rows)[0].why.startswith("its delayed scale is 2.83 times too small")

    # A weight explains the others of its step; a tensor is named once.
    rows = [row for step in (1, 2) for row in some_rows(step, layers=5, recipe="fp8_block")]
    rows = changed(1, 2, "w", amax=3.5 * 1024)
    rows = changed(1, 0, "x", amax=3.5 * 64)
    rows += [dataclasses.replace(row, step=3) for row in rows if row.step == 1]
    first, *_ = out_of_line(rows)
    assert (first.layer, first.operand, first.followers) == (2, "w", 1)
    assert str(first).endswith("1024 times the median of its peers; 1 other tensor follows")


def test_three_layers_are_the_peers_of_each_other():
    """Those of a linear whose tensors are all larger than in the others are not out of line."""
    rows = some_rows(layers=3, recipe="fp8_block")
    others = [dataclasses.replace(row, linear="layers/mlp/gate") for row in rows]
    larger = [
        dataclasses.replace(row, linear="layers/mlp/down", amax=row.amax * 2.0**20) for row in rows
    ]
    assert out_of_line([*rows, *others, *larger]) == []
    alone = [row for row in larger if row.layer == 0]
    assert {finding.linear for finding in out_of_line([*rows, *others, *alone])} == {
        "layers/mlp/down"
    }
