"""Every fault of docs/reliability.md, in the real training program; what kills or stops it, as a
process of its own."""

import re
import signal
from pathlib import Path

import numpy as np
import pytest

from fp8jax.lm.records.jsonl import read_jsonl
from fp8jax.lm.training import faults
from fp8jax.lm.training.faults import OF_ROWS, OF_STEPS, Faults
from tests.support.commands import run_here, tiny_run, train_alone
from tests.support.runs import numbers
from tests.support.traced_programs import traced_once

STEPS = 40


@pytest.fixture(scope="module", autouse=True)
def traced():
    with traced_once():
        yield


def longer(data, workdir: Path, **changes) -> list[str]:
    """A run in which bad steps come after others that were good."""
    steps = dict(num_steps=STEPS, optimizer__warmup_steps=5, valid__every=20, checkpoint__every=10)
    return tiny_run(data, workdir, **steps, **changes)


def train(given: list[str], *flags: str, code: int = 0) -> str:
    """Runs the program in this process; its last words, after it ended with `code`."""
    done = run_here("train", *given, *flags)
    assert done.returncode == code, done.stderr[-3000:]
    return done.stderr


def killed_or_stopped(given: list[str], *flags: str, code: int) -> str:
    """Runs the program in a process of its own; what it said, after it ended with `code`."""
    process = train_alone(*given, *flags)
    _, error = process.communicate(timeout=300)
    assert process.returncode == code, error[-3000:]
    return error


def events(workdir: Path, *kinds: str) -> list[dict]:
    return [event for event in read_jsonl(workdir / "events.jsonl") if event["kind"] in kinds]


def final(workdir: Path) -> float:
    last = read_jsonl(workdir / "metrics.jsonl")[-1]
    assert last["step"] == STEPS
    return last["valid_loss"]


def test_what_ends_a_process_changes_no_bit(data, monkeypatch, tmp_path):
    """A source that raises, one that stalls, a full disk, a damaged checkpoint and a SIGKILL, a
    SIGTERM while a save runs: after all of them the same numbers as without."""
    train(tiny_run(data, tmp_path / "whole"))
    run = tiny_run(data, tmp_path / "run")
    again = "--config.resume_with_changes=True"  # of data_timeout, and back

    assert "data source failed" in train(run, "--inject=source_raises@3", code=1)
    (failed,) = events(tmp_path / "run", "data_failed")
    assert failed["step"] == 2
    monkeypatch.setattr(faults, "_STALL", 6.0)
    error = train(run, "--inject=source_stalls@5", "--config.data_timeout=3", again, code=1)
    assert "no batch came within 3 s" in error
    assert [e["step"] for e in events(tmp_path / "run", "resume")] == [2]
    # The disk is full at the last save of all: the run has not finished.
    last = "--config.num_steps=6"
    error = killed_or_stopped(run, last, "--inject=full_disk@5", again, code=1)
    assert re.search("^error: .*File too large", error, re.MULTILINE)
    assert "finished at step" not in error
    assert events(tmp_path / "run", "end")[-1]["reason"] != "finished"
    killed_or_stopped(run, "--inject=corrupt_checkpoint@9,kill@11", again, code=-signal.SIGKILL)
    killed_or_stopped(run, "--inject=sigterm@9", code=0)
    (damaged,) = events(tmp_path / "run", "damaged_checkpoint")
    assert damaged["step"] == 9 and "changed since it was saved" in damaged["reason"]
    (stopped,) = events(tmp_path / "run", "stopped")
    assert stopped["signal"] == "SIGTERM" and stopped["step"] == 10
    train(run)
    assert [e["step"] for e in events(tmp_path / "run", "resume")] == [2, 4, 4, 6, 10]
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")


# The programs of the next two tests; the ladder is no part of them. The second layer gets faults.
SPIKES = ("--config.recovery.spike_window=8",)
TWO = dict(model_overrides__n_layers=2, unroll=2)


def test_bad_steps_are_skipped_and_counted(data, tmp_path):
    """NaN loss, infinite gradients of one layer, a spike of one step and one of ten."""
    injected = "--inject=nan_loss@12,inf_gradient@17,spike@24,spike@28x10"
    train(longer(data, tmp_path, **TWO), *SPIKES, "--config.recovery.ladder=skip:13", injected)
    skipped = events(tmp_path, "skip")
    assert [(e["step"], e["cause"]) for e in skipped] == [
        (12, "non_finite"),
        (17, "non_finite"),
        (24, "spike"),
        *((step, "spike") for step in range(28, 38)),
    ]
    assert skipped[-1]["spent"] == {"skip": 13} and len(events(tmp_path, "stop")) == 0
    losses = [line["loss"] for line in read_jsonl(tmp_path / "metrics.jsonl")]
    assert final(tmp_path) < losses[22] and losses[28] > losses[22] + 1


def test_a_permanent_nan_stops_with_its_cause_and_the_first_bad_tensor(data, tmp_path):
    flags = (*SPIKES, "--config.recovery.ladder=skip:3")
    run = longer(data, tmp_path / "gradient", **TWO)
    error = train(run, *flags, "--inject=inf_gradient@12x20", code=1)
    first = "layer 1, gradient of mlp/down/kernel"
    assert first in error and "No rung of" in error and "Traceback" not in error
    (stop,) = events(tmp_path / "gradient", "stop")
    assert (stop["step"], stop["cause"], stop["first"]) == (15, "non_finite", first)
    kept = [p.name for p in (tmp_path / "gradient/checkpoints").iterdir() if p.name.isdigit()]
    assert kept == ["10"]
    # A gradient that may be infinite is in the compiled step (fp8jax/lm/training/faults.py): with
    # it these are the programs of above.
    run = longer(data, tmp_path / "loss", **TWO)
    error = train(run, *flags, "--inject=nan_loss@12x20,inf_gradient@40", code=1)
    assert "step 15: loss=nan" in error and "output of loss" in error


def test_a_step_is_repeated_then_skipped_then_rolled_back(data, tmp_path):
    """The first NaN comes before there is a checkpoint to go back to."""
    run = longer(data, tmp_path, precision="fp8_delayed")
    ladder = "--config.recovery.ladder=repeat:2,skip:1,rollback:1"
    # The source ends the run, without programs that say what was not finite, or validate.
    error = train(run, ladder, "--inject=nan_loss@5,nan_loss@15,source_raises@17", code=1)
    assert "data source failed" in error
    acts = [(e["step"], e["kind"]) for e in events(tmp_path, "repeat", "skip", "rollback", "stop")]
    assert acts == [(5, "repeat"), (5, "skip"), (15, "repeat"), (15, "rollback")]
    # Step 16 trains on from step 10, and counts: the learning rate follows the accepted steps.
    lines = read_jsonl(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 17))


@pytest.mark.full
def test_a_rollback_goes_to_before_a_change_of_the_config(data, tmp_path):
    """The checkpoint of step 12 has amax histories, and nothing of the detector."""
    train(tiny_run(data, tmp_path, precision="fp8_delayed"))
    changed = tiny_run(
        data,
        tmp_path,
        num_steps=15,
        recovery__spike_window=8,
        recovery__ladder="rollback:1",
        resume_with_changes=True,
    )
    train(changed, "--inject=nan_loss@14")
    (back,) = events(tmp_path, "rollback")
    assert back["step"] == 14 and read_jsonl(tmp_path / "metrics.jsonl")[-1]["step"] == 15


@pytest.mark.full
def test_a_rollback_over_a_whole_stage_seeds_anew(data, tmp_path):
    """The checkpoint is of the first stage; the second, 5 and 6, gave the third its histories."""
    run = tiny_run(data, tmp_path, num_steps=8, checkpoint__every=4, recovery__ladder="rollback:1")
    stages = '((0.5,"fp8_delayed"),(0.75,"fp8_delayed:backward=bf16"))'
    train(run, f"--config.precision_schedule={stages}", "--inject=nan_loss@7")
    (back,) = events(tmp_path, "rollback")
    switches = [(e["step"], e["to"], e["seeding"]) for e in events(tmp_path, "precision_switch")]
    last = "fp8_delayed:backward=bf16"
    assert back["step"] == 7
    assert switches == [(4, "fp8_delayed", True), (6, last, False), (7, last, True)]
    assert read_jsonl(tmp_path / "metrics.jsonl")[-1]["step"] == 8


def test_faults_are_parsed():
    found = Faults.parse("nan_loss@3,spike@5x2").faults
    assert [(f.kind, f.step, f.count) for f in found] == [("nan_loss", 3, 1), ("spike", 5, 2)]
    assert [step for step in range(9) if found[1].hits(step)] == [5, 6]
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
    rows = {"targets": np.arange(12, dtype=np.int32).reshape(2, 6), "weights": np.ones((2, 6), "f")}
    found = list(Faults.parse("nan_loss@5,spike@6").batches(iter([rows] * 3), 4))
    assert found[0] is rows and np.isnan(found[1]["weights"]).all()
    assert (found[2]["targets"] == 11 - rows["targets"]).all()
    assert not set(OF_ROWS) & set(OF_STEPS)
