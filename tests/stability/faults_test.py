"""Every fault of docs/reliability.md, in the real training program, as a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fp8jax.records.jsonl import read_jsonl
from fp8jax.stability.faults import OF_ROWS, OF_STEPS, Faults
from tests.support import ROOT
from tests.support.runs import numbers

STEPS = 40


def train(data, workdir: Path, *flags: str, code: int = 0) -> str:
    """Runs the program on one device; its output, after it ended with `code`."""
    spec, cache = data
    settings = dict(
        precision="bf16", data=spec, cache_dir=cache, seq_len=64, batch_size=8, num_steps=STEPS,
        warmup_steps=5, learning_rate=3e-3, valid_every=20, valid_batches=2, checkpoint_every=10,
        valid_fraction=0.1, unroll=2,
    )  # fmt: skip
    small = dict(d_model=64, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=128, head_dim=16)
    settings |= {f"model_overrides.{name}": value for name, value in small.items()}
    command = [sys.executable, "-m", "experiments.train", "--config=configs/smoke.py"]
    command += [f"--workdir={workdir}", *(f"--config.{k}={v}" for k, v in settings.items())]
    env = os.environ | {"XLA_FLAGS": ""}
    done = subprocess.run(
        [*command, *flags], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == code, done.stderr[-3000:]
    return done.stderr


def events(workdir: Path, *kinds: str) -> list[dict]:
    return [event for event in read_jsonl(workdir / "events.jsonl") if event["kind"] in kinds]


def final(workdir: Path) -> float:
    last = read_jsonl(workdir / "metrics.jsonl")[-1]
    assert last["step"] == STEPS
    return last["valid_loss"]


@pytest.mark.slow
def test_what_ends_a_process_changes_no_bit(data, tmp_path):
    """A source that raises, one that stalls, a full disk, a damaged checkpoint and a SIGKILL, a
    SIGTERM while a save runs: after all of them the same numbers as without."""
    assert "data source failed" in train(data, tmp_path, "--inject=source_raises@8", code=1)
    (failed,) = events(tmp_path, "data_failed")
    assert failed["step"] == 7
    flags = "--inject=source_stalls@14", "--config.data_timeout=3"
    error = train(data, tmp_path, *flags, "--config.resume_with_changes=True", code=1)
    assert "no batch came within 3 s" in error
    assert [e["step"] for e in events(tmp_path, "resume")] == [7]
    again = "--config.resume_with_changes=True"  # data_timeout is as before
    error = train(data, tmp_path, again, "--inject=full_disk@18", code=1)
    assert "metrics.jsonl" in error.splitlines()[-1] or "File too large" in error
    error = train(data, tmp_path, "--inject=corrupt_checkpoint@30,kill@33", again, code=-9)
    error = train(data, tmp_path, "--inject=sigterm@30")
    (damaged,) = events(tmp_path, "damaged_checkpoint")
    assert damaged["step"] == 30 and "changed since it was saved" in damaged["reason"]
    (stopped,) = events(tmp_path, "stopped")
    assert stopped["signal"] == "SIGTERM" and stopped["step"] == 31
    train(data, tmp_path)
    assert [e["step"] for e in events(tmp_path, "resume")] == [7, 13, 13, 20, 31]
    train(data, tmp_path / "whole")
    assert numbers(tmp_path) == numbers(tmp_path / "whole")


@pytest.mark.slow
def test_bad_steps_are_skipped_and_counted(data, tmp_path):
    """NaN loss, infinite gradients of one layer, a spike of one step and one of ten."""
    flags = "--config.recovery=skip:13", "--config.spike_window=8"
    train(data, tmp_path, *flags, "--inject=nan_loss@12,inf_gradient@17,spike@24,spike@28x10")
    skipped = events(tmp_path, "skip")
    assert [(e["step"], e["cause"]) for e in skipped] == [
        (12, "non_finite"), (17, "non_finite"), (24, "spike"),
        *((step, "spike") for step in range(28, 38)),
    ]  # fmt: skip
    assert skipped[-1]["spent"] == {"skip": 13} and len(events(tmp_path, "stop")) == 0
    losses = [line["loss"] for line in read_jsonl(tmp_path / "metrics.jsonl")]
    assert final(tmp_path) < losses[22] and losses[28] > losses[22] + 1


@pytest.mark.slow
def test_a_step_is_repeated_then_rolled_back_then_the_run_stops(data, tmp_path):
    """The first NaN comes before there is a checkpoint to go back to."""
    ladder = "--config.recovery=repeat:2,skip:1,rollback:1"
    faults = "--inject=nan_loss@5,nan_loss@15,nan_loss@25"
    error = train(data, tmp_path, ladder, "--config.precision=fp8_delayed", faults, code=1)
    assert "step 25: loss=nan" in error and "output of loss" in error and "No rung of" in error
    acts = [(e["step"], e["kind"]) for e in events(tmp_path, "repeat", "skip", "rollback", "stop")]
    assert acts == [
        (5, "repeat"), (5, "skip"), (15, "repeat"), (15, "rollback"), (25, "stop")
    ]  # fmt: skip


@pytest.mark.slow
def test_a_permanent_nan_stops_with_its_cause_and_the_first_bad_tensor(data, tmp_path):
    error = train(data, tmp_path, "--inject=inf_gradient@12x20", "--config.recovery=skip:3", code=1)
    first = "layer 1, gradient of mlp/down/kernel"
    assert first in error and "Traceback" not in error
    (stop,) = events(tmp_path, "stop")
    assert (stop["step"], stop["cause"], stop["first"]) == (15, "non_finite", first)
    kept = [p.name for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit()]
    assert kept == ["10"]


def test_faults_are_parsed():
    faults = Faults.parse("nan_loss@3,spike@5x2").faults
    assert [(f.kind, f.step, f.count) for f in faults] == [("nan_loss", 3, 1), ("spike", 5, 2)]
    assert [step for step in range(9) if faults[1].hits(step)] == [5, 6]
    assert Faults.parse("") == Faults()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nan_los@3", "unknown fault 'nan_los'; did you mean 'nan_loss'"),
        ("kill", "expected kill@STEP"),
        ("kill@0", "expected kill@STEP"),
        ("spike@3x", "expected spike@STEP"),
        ("spike@3x0", "expected spike@STEP"),
    ],
)
def test_faults_that_mean_nothing_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Faults.parse(text)


def test_rows_of_other_steps_are_left_alone():
    rows = {
        "targets": np.arange(12, dtype=np.int32).reshape(2, 6), "weights": np.ones((2, 6), "f")
    }  # fmt: skip
    found = list(Faults.parse("nan_loss@5,spike@6").batches(iter([rows] * 3), 4))
    assert found[0] is rows and np.isnan(found[1]["weights"]).all()
    assert (found[2]["targets"] == 11 - rows["targets"]).all()
    assert not set(OF_ROWS) & set(OF_STEPS)
