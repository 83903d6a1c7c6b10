"""Telemetry of training: the run stays the same, and its numbers do not depend on how it runs."""

import re
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.lm.data.loader import to_devices, train_batches
from fp8jax.lm.model.probes import transformer_probes, transformer_rows
from fp8jax.lm.records.checkpoint import Checkpointer
from fp8jax.lm.records.jsonl import read_jsonl
from fp8jax.lm.records.metrics import Metrics
from fp8jax.lm.training import build as build_module
from fp8jax.lm.training.build import build
from fp8jax.lm.training.loop import train_and_evaluate
from fp8jax.lm.training.programs import lower_program
from fp8jax.lm.training.telemetry import Telemetry
from fp8jax.numerics.policy import POLICIES, Policy
from fp8jax.numerics.recipes import RECIPES
from fp8jax.telemetry import read, write
from fp8jax.telemetry.files import StepFiles
from tests.support.runs import ONE_LINEAR, corpus, tiny

SMALL = dict(
    model_overrides__d_model=32,
    model_overrides__n_heads=2,
    model_overrides__n_kv_heads=2,
    model_overrides__d_ff=64,
    batch_size=8,
    unroll=1,
)


def test_the_training_programs_stay_byte_identical(data, monkeypatch):
    monkeypatch.setitem(POLICIES, "one_linear", ONE_LINEAR)
    texts = []
    for changes in ({}, dict(telemetry__every=2, telemetry__what_if="fp8_block")):
        run = build(tiny(data, precision="one_linear", **SMALL, **changes), jax.devices()[:1])
        (stage,) = run.stages
        texts.append([lower_program(run, stage, name).as_text() for name in ("step", "seed_step")])
    assert texts[0] == texts[1]


def test_a_run_is_sampled(data, tmp_path, monkeypatch):
    config = tiny(
        data,
        precision="fp8_delayed:history=4",
        telemetry__every=2,
        num_steps=4,
        valid__every=4,
        checkpoint__every=2,
        optimizer__warmup_steps=0,
        model_overrides__n_layers=1,
        model_overrides__mlp="gelu",
        **SMALL,
    )
    # What a killed run without a checkpoint has left: this run begins at step 0.
    write(tmp_path / "telemetry" / "step_000000009.parquet", [])
    present, write_file, save = {}, StepFiles.write, Checkpointer.save

    def write_slowly(self, step, rows):
        time.sleep(1)
        write_file(self, step, rows)

    def save_and_look(self, step, *arguments):
        present[step] = sorted(path.name for path in (tmp_path / "telemetry").glob("step_*"))
        save(self, step, *arguments)

    monkeypatch.setattr(StepFiles, "write", write_slowly)
    monkeypatch.setattr(Checkpointer, "save", save_and_look)
    train_and_evaluate(config, str(tmp_path))
    # A checkpoint has the telemetry of all steps before it: a run that resumes samples none again.
    files = ["step_000000002.parquet", "step_000000004.parquet"]
    assert present == {2: files[:1], 4: files}
    events = [e["kind"] for e in read_jsonl(tmp_path / "events.jsonl")]
    assert events.count("telemetry") == 1

    whole = read(tmp_path)
    assert sorted({row.step for row in whole.rows}) == [2, 4]
    assert len(whole.rows) == 2 * (6 * 6 + 1)  # six linears, six casts; and the MLP's activation
    casts = whole.where(lambda row: row.cast != "")
    assert all(row.elements and row.delay is not None for row in casts.rows)
    curves = b"".join(path.read_bytes() for path in (tmp_path / "tensorboard").glob("events*"))
    assert b"telemetry/layers_0/x/underflow" in curves


# Writing in a thread ------------------------------------------------------------------------------


@pytest.fixture
def writer(data, tmp_path):
    """Yields the telemetry of a run at its last step, what it measured, and its curves."""
    config = tiny(data, telemetry__every=2, **SMALL)
    run = build(config, jax.devices()[:1])
    (stage,) = run.stages
    measured = jax.tree.map(jnp.ones_like, transformer_probes(stage.model)), None
    curves = []
    with Metrics(tmp_path, num_steps=config.num_steps) as metrics:
        metrics.curves = lambda step, scalars: curves.append((step, len(scalars) > 0))
        telemetry = Telemetry(str(tmp_path), run, metrics, config.num_steps)
        yield telemetry, (measured, stage), curves


def fails(self, step, rows):
    raise OSError(f"no space for step {step}")


def test_the_loop_does_not_wait_for_a_file_until_the_next_step(writer, tmp_path, monkeypatch):
    telemetry, measured, curves = writer
    go_on, write_file = threading.Event(), StepFiles.write

    def write_later(self, step, rows):
        assert go_on.wait(60)
        write_file(self, step, rows)

    monkeypatch.setattr(StepFiles, "write", write_later)
    with telemetry:
        telemetry.write(2, measured)
        assert not list((tmp_path / "telemetry").glob("step_*")) and not curves
        go_on.set()
        telemetry.write(3, None)
        assert [row.step for row in read(tmp_path).rows[:1]] == [2] and curves == [(2, True)]
        telemetry.write(4, measured)
    assert {row.step for row in read(tmp_path).rows} == {2, 4}
    assert curves == [(2, True), (4, True)]


def test_an_error_of_writing_is_raised_at_the_next_step_once(writer, monkeypatch):
    telemetry, measured, curves = writer
    monkeypatch.setattr(StepFiles, "write", fails)
    with telemetry:
        telemetry.write(2, measured)
        with pytest.raises(OSError, match="no space for step 2"):
            telemetry.write(3, None)
    assert not curves


def test_an_error_of_writing_is_raised_at_the_end(writer, monkeypatch):
    telemetry, measured, _ = writer
    monkeypatch.setattr(StepFiles, "write", fails)
    with pytest.raises(OSError, match="no space for step 4"), telemetry:
        telemetry.write(4, measured)


def test_an_error_of_writing_does_not_hide_what_ended_the_run(writer, monkeypatch, caplog):
    telemetry, measured, _ = writer
    monkeypatch.setattr(StepFiles, "write", fails)
    with pytest.raises(KeyError, match="of the run"), telemetry:
        telemetry.write(4, measured)
        raise KeyError("of the run")
    assert "the last telemetry is not written: no space for step 4" in caplog.text


# The same numbers ---------------------------------------------------------------------------------

# A linear whose outputs a tensor-parallel mesh cuts, and one whose inputs it cuts.
ONE_EACH_WAY = Policy(
    tuple((f"layers/{path}", RECIPES["fp8_rowwise"]) for path in ("attention/q", "mlp/down")),
    name="one_each_way",
)
# FP8 moments have groups of 32 along axes that a mesh shards.
HEADS = dict(model_overrides__n_heads=4, model_overrides__n_kv_heads=4)


def sample(data, devices, **changes):
    """The rows of the first step, run in a certain way."""
    config = tiny(data, telemetry__every=1, **{**SMALL, **changes})
    run = build(config, jax.devices()[:devices])
    (stage,) = run.stages
    with jax.set_mesh(run.mesh):
        state = stage.programs.initialize()
        rows = train_batches(corpus(*data).train, seed=0, batch_size=config.batch_size)
        batch = to_devices(next(rows), run.batch_sharding)
        rows.close()
        statistics, promotion = jax.device_get(stage.programs.telemetry(state, batch))
    return transformer_rows(stage.model, statistics, step=1, promotion=promotion)


def test_loops_remat_accumulation_mesh_moments_and_gnmr_do_not_change_the_numbers(
    data, monkeypatch
):
    """In float32, where sums in another order change a value by a relative 1e-5 at most: 2^7 terms
    a GEMM, and a dozen GEMMs between input and last gradient. An element's distance from the grid
    changes by no more than the element and, through its scale, than its code: each by that share.
    So the noise changes by 2e-5 of the signal, which is 10^(SQNR/20) times the noise."""
    step = build_module.telemetry_step
    monkeypatch.setattr(
        build_module,
        "telemetry_step",
        lambda *arguments, model, **named: step(
            *arguments, model=model.clone(dtype=jnp.float32), **named
        ),
    )
    monkeypatch.setitem(POLICIES, "one_each_way", ONE_EACH_WAY)
    plain = sample(data, 1, precision="one_each_way", **HEADS)
    halves = sample(data, 1, precision="one_each_way", grad_accum=2, **HEADS)
    other = sample(
        data,
        4,
        precision="one_each_way",
        remat="full",
        grad_accum=2,
        optimizer__moments="fp8",
        optimizer__name="lion",
        gnmr__alpha=(1.5,),
        mesh_axes__data=2,
        mesh_axes__tensor=2,
        **HEADS,
    )
    assert len(plain) == len(halves) == len(other) == 2 * 7 * 6 + 2
    for whole, half in zip(plain, halves, strict=True):
        # Weights are measured in each microbatch.
        assert half.elements == whole.elements * (2 if whole.operand == "w" else 1)
        # Scales along tokens: a microbatch has its own.
        if whole.cast.startswith("wgrad") and whole.recipe == "fp8_rowwise":
            assert half.amax == pytest.approx(whole.amax, rel=1e-5)
            assert half.scale == pytest.approx(whole.scale, rel=1e-5)
            assert half.smallest_scale <= whole.smallest_scale * (1 + 1e-5)
        else:
            same_to_rounding(whole, half)
    for one, two in zip(halves, other, strict=True):
        assert one.elements == two.elements
        same_to_rounding(one, two)


def same_to_rounding(one, two):
    assert (one.layer, one.linear, one.cast, one.recipe) == (
        two.layer,
        two.linear,
        two.cast,
        two.recipe,
    )
    assert two.amax == pytest.approx(one.amax, rel=0 if one.operand == "w" else 1e-5)
    if one.sqnr_db is None:  # in BF16
        assert two.sqnr_db is None
    elif one.operand == "w":  # the same numbers, whose sums alone are in another order
        assert two.sqnr_db == pytest.approx(one.sqnr_db, rel=1e-5)
    else:
        share = 2e-5 * 10 ** (one.sqnr_db / 20)
        assert two.sqnr_db == pytest.approx(one.sqnr_db, abs=20 * np.log10(1 + share))


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(telemetry__every=0), "telemetry.every=0 must be at least 1"),
        (dict(telemetry__every=-5), "telemetry.every=-5 must be at least 1"),
        (dict(telemetry__every=5, telemetry__what_if="fp9"), "unknown policy 'fp9'"),
        (
            dict(telemetry__what_if="fp8_block"),
            "telemetry.what_if='fp8_block' is .*try.every",
        ),
        (dict(log_to="wandb"), "log_to='wandb': expected wandb:PROJECT"),
    ],
)
def test_bad_settings_are_one_line(data, changes, message):
    with pytest.raises(ValueError, match=re.compile(message)) as error:
        build(tiny(data, precision="fp8_block", **SMALL, **changes), jax.devices()[:1])
    assert "\n" not in str(error.value)
