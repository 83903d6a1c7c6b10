"""The size gate on tables made up here: kinds, interpolation, what is left in BF16, what is said.

The tables are of powers of two, whose logarithms are exact: gains at their points are met to the
bit. What the shipped table says of any size is not asserted, only that it can be read.
"""

import fnmatch
import functools
import importlib.resources
import itertools
import json
import math
import re
import tomllib
import types

import jax
import pytest

from fp8jax.analysis import gains_table
from fp8jax.analysis import size_gate as gate
from fp8jax.analysis.gains_table import KINDS, grid, parse_table
from fp8jax.analysis.size_gate import size_gate
from fp8jax.device import hardware
from fp8jax.device.hardware import Device
from fp8jax.lm.model.config import ModelConfig
from fp8jax.lm.records.jsonl import read_jsonl
from fp8jax.lm.training.build import build
from fp8jax.lm.training.loop import train_and_evaluate
from fp8jax.lm.training.programs import abstract_batch, abstract_numbers
from fp8jax.numerics.names import as_policy
from fp8jax.numerics.policy import POLICIES
from fp8jax.numerics.recipes import HIGH_PRECISION, RECIPES
from tests.support import ROOT
from tests.support.runs import tiny

ROWS, SIDES = (64, 256, 512), (32, 64, 256)
H200 = Device("gpu", "NVIDIA H200", (9, 0))


def table_of(gains, kinds=KINDS, rows=ROWS, sides=SIDES) -> str:
    """A file whose times are 1 us in the recipe and gains(m, k, n) in BF16."""
    lines = [[kind, *shape, gains(*shape), 1.0] for kind in kinds for shape in grid(rows, sides)]
    return json.dumps({"device": "NVIDIA H200", "columns": gains_table.COLUMNS, "rows": lines})


def power(m, k, n):
    """Between 2^-3 and 2^3 on the grid, and 1 where M K N = 2^20."""
    return math.sqrt(m * k * n / 2**20)


def uneven(m, k, n):
    """A power of two that no power law has."""
    return 2.0 ** ((5 * m + 3 * k * n) % 7 - 3)


TABLE = parse_table(table_of(power))


# Kinds --------------------------------------------------------------------------------------------


def test_the_kind_of_every_recipe():
    assert {name: gains_table.timing_kind(recipe) for name, recipe in RECIPES.items()} == {
        "bf16": None,
        "fp8_delayed": "delayed",
        "fp8_current": "current",
        "fp8_amax": "current",  # powers of two are found on the same amax
        "fp8_cscale": None,  # no amax: faster than what was measured
        "fp8_rowwise": "row",
        "fp8_rowwise_wgrad_bf16": None,
        "fp8_block": "block",
        "fp8_block_ue8m0": "block",
        "mxfp8": None,
        "fp4_block": None,
        "fp4_naive": None,
        "nvfp4": None,
        "mxfp4": None,
    }


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ("fp8_delayed:history=1024,amax=newest,margin=1,gradients=e4m3", "delayed"),
        ("fp8_current:scale=pow2,gradients=e4m3", "current"),
        ("fp8_rowwise:scale=pow2,gradients=e5m2", "row"),
        ("fp8_block:scale=pow2", "block"),
        ("fp8_block:gradients=e5m2", None),  # the kernel multiplies e4m3 by e4m3: emulated
        ("fp8_block:scale=e8m0_floor", None),  # likewise
        ("mxfp8:scale=fp32", None),
        ("fp8_delayed:wgrad_accumulation=split", None),  # takes longer
    ],
)
def test_options_that_cost_no_time_keep_the_kind(spec, kind):
    assert gains_table.timing_kind(as_policy(spec).recipe("layers/mlp/up")) == kind


# The table ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("gains", [power, uneven])
def test_gains_at_measured_points_are_those_measured(gains):
    """For K > N those of the transpose. Even powers of two have exact roots and logarithms."""
    table = parse_table(table_of(gains, rows=(64, 256), sides=(64, 256, 1024)))
    for m, k, n in itertools.product((64, 256), (64, 256, 1024), (64, 256, 1024)):
        expected = gains(m, min(k, n), max(k, n))
        assert table.gain(RECIPES["fp8_block"], (m, k, n)) == (expected, False)


@pytest.mark.parametrize("shape", [(100, 48, 200), (511, 255, 33), (64, 32, 100), (300, 100, 100)])
def test_a_power_law_is_met_between_the_points(shape):
    """Some tens of roundings of 2^-53 relative to logarithms of at most 10."""
    gain = TABLE.gain(RECIPES["fp8_delayed"], shape)
    assert gain.value == pytest.approx(power(*shape), rel=1e-13) and not gain.beyond


def test_the_logarithm_is_linear_in_each_logarithm():
    """At the middle of a cell the geometric mean of its eight corners, two of which are one."""
    table = parse_table(table_of(uneven, rows=(64, 256), sides=(64, 256)))
    corners = [
        uneven(m, min(k, n), max(k, n)) for m, k, n in itertools.product((64, 256), repeat=3)
    ]
    gain = table.gain(RECIPES["fp8_current"], (128, 128, 128))
    assert gain.value == pytest.approx(math.prod(corners) ** (1 / 8), rel=1e-13)


@pytest.mark.parametrize(
    ("shape", "edge"),
    [
        ((1, 64, 64), (64, 64, 64)),
        ((10**6, 64, 64), (512, 64, 64)),
        ((64, 1, 10**6), (64, 32, 256)),
        ((64, 10**6, 1), (64, 32, 256)),
    ],
)
def test_beyond_the_table_its_edge_counts(shape, edge):
    block = RECIPES["fp8_block"]
    assert TABLE.gain(block, shape) == (TABLE.gain(block, edge).value, True)
    assert TABLE.gain(block, edge).beyond is False


def test_what_was_not_measured_is_unknown():
    assert TABLE.gain(RECIPES["nvfp4"], (64, 64, 64)) is None
    assert TABLE.gain(HIGH_PRECISION, (64, 64, 64)) is None
    assert (
        parse_table(table_of(power, kinds=["row"])).gain(RECIPES["fp8_block"], (64, 64, 64)) is None
    )


def test_tables_that_make_no_sense_are_refused():
    whole = json.loads(table_of(power))
    for rows, message in (
        (whole["rows"][1:], r"'delayed' must be a full grid .*grid: \[\(64, 32, 32\)\]"),
        ([["delayed", 64, 64, 32, 1, 1]], r"\(64, 32, 32\).*\(64, 64, 32\)"),
        ([["blok", 64, 64, 64, 1, 1]], "unknown kind of recipe 'blok'; did you mean 'block'"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_table(json.dumps(whole | {"rows": rows}))
    with pytest.raises(ValueError, match=r"expected the columns \('recipe kind', .*got \['m'\]"):
        parse_table(json.dumps(whole | {"columns": ["m"]}))


def test_the_shipped_table_is_part_of_the_package():
    """It can be read where it is installed, is of the device it is named for, and a wheel has it,
    whatever ignores JSON files."""
    found = json.loads(
        importlib.resources.files("fp8jax.analysis").joinpath("h200_gains.json").read_text()
    )
    assert (
        gains_table.shipped_table() is gains_table.shipped_table()
        and gains_table.shipped_table().device == "NVIDIA H200"
    )
    assert {row[0] for row in found["rows"]} == set(gains_table.shipped_table().gains)
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    wheel = wheel["targets"]["wheel"]
    assert wheel["packages"] == ["fp8jax"] and (ROOT / "fp8jax/analysis/h200_gains.json").exists()
    assert fnmatch.filter(["fp8jax/analysis/h200_gains.json"], wheel["artifacts"][0])


# The gate -----------------------------------------------------------------------------------------

# With 256 tokens the power law is 1 where K N = 4096: k and v lose, q and o neither gain nor lose.
MODEL = ModelConfig(
    vocab_size=512, d_model=64, n_layers=2, n_heads=8, n_kv_heads=4, d_ff=256, head_dim=8
)
GATE = functools.partial(
    size_gate, linears=MODEL.linears, tokens=256, tensor=1, backend=None, table=TABLE
)


@pytest.fixture
def on_h200(monkeypatch):
    """The gate sees an H200 and the table above, the rest of the library what is there."""
    monkeypatch.setattr(gate, "hardware", types.SimpleNamespace(device=lambda: H200))
    monkeypatch.setattr(gate, "shipped_table", lambda: TABLE)


def recipes(policy, config=MODEL) -> dict[str, str]:
    return {path: policy.recipe(path).name for path in config.linears}


def test_by_default_the_policy_is_the_same_and_the_losers_are_named():
    policy = POLICIES["fp8_block"]
    gated = GATE(policy, leave=False)
    assert gated.policy is policy
    *lines, first, last = gated.report.splitlines()
    assert lines == [
        "Gains over BF16, policy fp8_block, of a linear alone on NVIDIA H200:",
        "  layers/attention/q  fp8_block  256 x 64 x 64   1.000x",
        "  layers/attention/k  fp8_block  256 x 64 x 32   0.707x",
        "  layers/attention/v  fp8_block  256 x 64 x 32   0.707x",
        "  layers/attention/o  fp8_block  256 x 64 x 64   1.000x",
        "  layers/mlp/gate     fp8_block  256 x 64 x 256  2.000x",
        "  layers/mlp/up       fp8_block  256 x 64 x 256  2.000x",
        "  layers/mlp/down     fp8_block  256 x 256 x 64  2.000x",
    ]
    assert f"{first} {last}" == (
        "Slower than BF16: layers/attention/k, layers/attention/v."
        " --config.size_gate=True leaves them in BF16."
    )


def test_exactly_the_losers_are_left_in_bf16(on_h200):
    policy = as_policy("fp8_block:head=fp8_current,bf16_last=1")
    gated = GATE(policy, leave=True)
    losers = dict.fromkeys(("layers/attention/k", "layers/attention/v"), "bf16")
    assert recipes(gated.policy) == recipes(policy) | losers
    assert gated.policy.name == "fp8_block:head=fp8_current,bf16_last=1 (gated)"
    assert gated.policy.exempt(2) == (0, 1)
    gated.policy.check(MODEL.modules, 2)
    *_, head, verdict = gated.report.splitlines()
    assert (
        head
        == "  lm_head             fp8_current  256 x 64 x 512  2.000x, beyond the table: its edge"
    )
    assert verdict == "Left in BF16: layers/attention/k, layers/attention/v."
    again = GATE(policy, leave=True, tokens=512)
    assert recipes(again.policy) == recipes(policy) and "Left in BF16: none." in again.report


def test_other_recipes_and_backends_are_left_alone_and_said_to_be(on_h200):
    mixed = GATE(POLICIES["fp4_mixed"], leave=True)
    losers = dict.fromkeys(("layers/attention/k", "layers/attention/v"), "bf16")
    assert recipes(mixed.policy) == recipes(POLICIES["fp4_mixed"]) | losers
    unknown = [line.split()[0] for line in mixed.report.splitlines() if "not in the table" in line]
    assert unknown == ["layers/mlp/gate", "layers/mlp/up", "layers/mlp/down"]
    named = GATE(POLICIES["fp8_block"], leave=True, backend="xla")
    assert recipes(named.policy) == recipes(POLICIES["fp8_block"])
    assert named.report.count("not in the table") == 7 and "Left in BF16: none." in named.report


def test_where_nothing_is_quantized_nothing_is_said():
    assert GATE(POLICIES["bf16"], leave=False) == (POLICIES["bf16"], "", "")


def test_tensor_parallel_linears_are_cut_as_their_kernels_are():
    """Those into the residual stream along their inputs, all others along their outputs."""
    shapes = dict(
        re.findall(
            r"  (\S+) +fp8_current +(\d+ x \d+ x \d+)",
            GATE(as_policy("fp8_current:head=fp8_current"), leave=False, tensor=4).report,
        )
    )
    assert shapes == {
        "layers/attention/q": "256 x 64 x 16",
        "layers/attention/k": "256 x 64 x 8",
        "layers/attention/v": "256 x 64 x 8",
        "layers/attention/o": "256 x 16 x 64",
        "layers/mlp/gate": "256 x 64 x 64",
        "layers/mlp/up": "256 x 64 x 64",
        "layers/mlp/down": "256 x 64 x 64",
        "lm_head": "256 x 64 x 128",
    }


def test_another_device_and_an_empty_table_are_refused(monkeypatch):
    policy, empty = POLICIES["fp8_block"], parse_table(table_of(power, kinds=[]))
    with pytest.raises(ValueError, match="on NVIDIA H200, which .* this device, cpu"):
        GATE(policy, leave=True)
    for here in (H200, Device("gpu", "NVIDIA H100 80GB HBM3", (9, 0))):
        monkeypatch.setattr(hardware, "device", lambda here=here: here)
        assert GATE(policy, leave=True).policy != policy
        with pytest.raises(ValueError, match="h200_gains.json is empty"):
            GATE(policy, leave=True, table=empty)
    assert GATE(policy, leave=False, table=empty).report.count("not in the table") == 7


# In a run -----------------------------------------------------------------------------------------

# 16 rows of 128 tokens in 2 microbatches over 4 devices of the batch are 256 tokens. In halves, the
# attention's linears are 64 x 32 at most, and the MLP's 64 x 64.
CHANGES = dict(seq_len=128, grad_accum=2, mesh_axes__data=4, mesh_axes__tensor=2)


def test_every_stage_of_a_run_is_gated_alike(on_h200, data):
    changes = CHANGES | dict(precision="fp8_delayed", precision_schedule=((0.5, "fp8_current"),))
    plain, run = (build(tiny(data, size_gate=on, **changes)) for on in (False, True))
    for before, stage in zip(plain.stages, run.stages, strict=True):
        attention = [path for path in MODEL.modules if path.startswith("layers/attention/")]
        config = stage.model.config
        wanted = recipes(before.policy, config) | dict.fromkeys(attention, "bf16")
        assert recipes(stage.policy, config) == wanted
        table = lambda each: [line for line in each.gains.splitlines() if " x " in line]  # noqa: E731
        assert table(stage) == table(before) and "256 x 64 x 32" in stage.gains
        assert stage.gains.endswith("\nLeft in BF16: " + ", ".join(attention) + ".")
        assert "size_gate=True leaves them" in " ".join(before.gains.split())
    assert set(run.stages[0].state.histories["layers"]) == {"mlp"}
    assert set(plain.stages[0].state.histories["layers"]) == {"attention", "mlp"}
    assert run.policies == "fp8_delayed (gated), after step 10 fp8_current (gated)"
    # The first step is of the same policy.
    with jax.set_mesh(run.mesh):
        shapes = abstract_batch(run, 16), abstract_numbers(run, run.stages[0])
        for step in (run.stages[0].programs.seed_step, run.stages[0].programs.step):
            state, _ = jax.eval_shape(step, run.stages[0].state, *shapes)
            assert jax.tree.structure(state) == jax.tree.structure(run.stages[0].state)


def test_sizes_are_those_of_the_kernels_on_each_device(data):
    """Kernels [layers, inputs, outputs], of which `tensor` cuts one side and `data` none."""
    run = build(tiny(data, precision="fp8_current:head=fp8_current", **CHANGES))
    printed = dict(
        re.findall(r"^  (\S+) +fp8_current +256 x (\d+ x \d+)", run.stages[0].gains, re.M)
    )
    assert list(printed) == list(run.stages[0].model.config.linears)
    for path, sizes in printed.items():
        kernel = run.stages[0].state.params
        for name in [*path.split("/"), "kernel"]:
            kernel = kernel[name]
        k, n = kernel.sharding.shard_shape(kernel.shape)[-2:]
        assert sizes == f"{k} x {n}", path


def test_the_gate_of_a_run_refuses_another_device(data):
    with pytest.raises(ValueError, match="size_gate=True decides by times measured on NVIDIA H200"):
        build(tiny(data, size_gate=True))


# Two whole runs: what the gate leaves in BF16, writes and refuses is tested above without one.
@pytest.mark.full
def test_the_gains_are_written_once_and_a_run_resumes_under_the_gate(
    on_h200, data, tmp_path, caplog
):
    """The histories of a checkpoint belong to its policy: a gated one begins its own, and then goes
    on with them."""
    config = tiny(
        data, precision="fp8_delayed", seq_len=128, num_steps=5, optimizer__warmup_steps=2
    )
    config.batch_size = 2  # few rows make the small linears lose
    config.unroll = config.model_overrides.n_layers = 1  # compiles in half the time
    with caplog.at_level("INFO", logger="absl"):
        train_and_evaluate(config, str(tmp_path))
    report = (tmp_path / "precision.txt").read_text()
    assert report.count("Gains over BF16, policy fp8_delayed, of") == 1
    assert caplog.text.count("Slower than BF16: layers/attention/k, layers/attention/v.") == 1
    config.update(size_gate=True, num_steps=7, resume_with_changes=True)
    for _ in range(2):
        train_and_evaluate(config, str(tmp_path))
    events = read_jsonl(tmp_path / "events.jsonl")
    resumes = [(e["step"], e["seeding"]) for e in events if e["kind"] == "resume"]
    assert resumes == [(5, True), (7, False)]
    assert "size_gate: False -> True" in str(events)
