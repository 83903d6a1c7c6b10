"""The real command in a process of its own: killed, stopped, resumed, misused."""

import itertools
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from fp8jax.records.jsonl import read_jsonl
from tests.support import ROOT
from tests.support.text import write_generated_text

# Delayed scaling, layers scanned, accumulated and sharded over eight devices, all at once.
HARD = {
    "precision": "fp8_delayed", "grad_accum": 2, "mesh_axes.data": 2, "mesh_axes.fsdp": 2,
    "mesh_axes.tensor": 2,
}  # fmt: skip
SMALL = {
    "model_overrides.d_model": 64, "model_overrides.n_layers": 3, "model_overrides.d_ff": 128,
    "model_overrides.head_dim": 16, "seq_len": 64, "batch_size": 16, "num_steps": 28,
    "checkpoint_every": 4, "valid_every": 10, "valid_batches": 2, "warmup_steps": 5,
    "valid_fraction": 0.1,
}  # fmt: skip


def command(tmp_path, workdir, **changes):
    spec = write_generated_text(tmp_path, documents=400)
    settings = {**SMALL, "data": spec, "cache_dir": tmp_path / "cache", **changes}
    flags = [f"--config.{key}={value}" for key, value in settings.items()]
    return [sys.executable, "-m", "experiments.train", "--config=configs/base.py",
            f"--workdir={workdir}", *flags]  # fmt: skip


def start(arguments, log):
    with log.open("ab") as file:
        return subprocess.Popen(arguments, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)


def wait_for_step(workdir, step, process, seconds=180):
    """Returns once metrics.jsonl holds a line of that step; the process must still run."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        path = workdir / "metrics.jsonl"
        if path.exists() and any(line["step"] >= step for line in read_jsonl(path)):
            assert process.poll() is None, "the run ended before it could be interrupted"
            return
        assert process.poll() is None, "the run ended early"
        time.sleep(0.01)
    raise AssertionError(f"no step {step} within {seconds} s")


def history(workdir):
    """Loss, gradient norm and validation of every step, as written."""
    keys = ("loss", "grad_norm", "learning_rate", "valid_loss", "valid_bits_per_byte", "rows/a")
    lines = read_jsonl(workdir / "metrics.jsonl")
    return [[line["step"], *(line[key] for key in keys if key in line)] for line in lines]


@pytest.mark.slow
def test_killed_stopped_and_resumed_equals_never_stopped(tmp_path):
    """kill -9 at a random step, then SIGTERM, then to the end: every number is bit-identical."""
    whole, broken, log = tmp_path / "whole", tmp_path / "broken", tmp_path / "log"
    (tmp_path / "other").mkdir()
    sources = [write_generated_text(path, documents=400) for path in (tmp_path, tmp_path / "other")]
    hard = HARD | {"data": f"a=0.7*{sources[0]},b=0.3*{sources[1]}"}
    assert start(command(tmp_path, whole, **hard), log).wait(300) == 0, log.read_text()

    kill_at = int(np.random.default_rng().integers(5, 14))
    process = start(command(tmp_path, broken, **hard), log)
    wait_for_step(broken, kill_at, process)
    while not any(path.name.isdigit() for path in (broken / "checkpoints").iterdir()):
        assert process.poll() is None  # on a loaded machine step 4 may still be being saved
    process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL

    process = start(command(tmp_path, broken, **hard), log)
    wait_for_step(broken, 16, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0, log.read_text()
    stopped = read_jsonl(broken / "events.jsonl")[-1]
    assert stopped["kind"] == "stopped" and stopped["signal"] == "SIGTERM"
    assert (broken / "checkpoints" / str(stopped["step"])).is_dir()

    assert start(command(tmp_path, broken, **hard), log).wait(300) == 0, log.read_text()
    resumed = [e["step"] for e in read_jsonl(broken / "events.jsonl") if e["kind"] == "resume"]
    assert len(resumed) == 2 and resumed[1] == stopped["step"], f"{kill_at=}"
    assert history(broken) == history(whole), f"{kill_at=}"
    assert len(history(whole)) == 28


@pytest.mark.slow
def test_ctrl_c_saves_and_a_finished_run_says_so(tmp_path):
    workdir, log = tmp_path / "run", tmp_path / "log"
    process = start(command(tmp_path, workdir, **{"mesh": "data"}), log)
    wait_for_step(workdir, 6, process)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0, log.read_text()
    step = read_jsonl(workdir / "events.jsonl")[-1]["step"]
    changes = {"num_steps": step, "resume_with_changes": True}
    assert start(command(tmp_path, workdir, **changes), log).wait(120) == 0, log.read_text()
    assert "already_finished" in log.read_text()
    assert read_jsonl(workdir / "metrics.jsonl")[-1]["step"] == step


@pytest.mark.slow
def test_bad_input_is_one_line_and_loses_nothing(tmp_path):
    """Each ends at once, with a non-zero code and its reason in the last line; no traceback."""
    good = tmp_path / "run"
    assert start(command(tmp_path, good, num_steps=6), tmp_path / "log").wait(120) == 0
    before = {p: p.read_bytes() for p in good.rglob("*") if p.is_file() and p.suffix == ".jsonl"}
    (tmp_path / "bad.jsonl").write_text('{"text": "a document that is long enough"}\n{"text": \n')
    cases = [
        (dict(seed=1), "seed: 0 -> 1"),
        (dict(precision="fp8_delayd"), "unknown policy 'fp8_delayd'; did you mean 'fp8_delayed'"),
        (dict(data=f"jsonl:{tmp_path}/none-*.jsonl"), "none-*.jsonl"),
        (dict(data=f"jsonl:{tmp_path}/bad.jsonl"), "bad.jsonl, line 2"),
        (dict(precision="fp4_mixed", backend="xla"), "cannot run recipe"),
    ]
    for (changes, message), workdir in zip(cases, itertools.repeat(good), strict=False):
        done = subprocess.run(
            command(tmp_path, workdir, **{"num_steps": 6, **changes}),
            cwd=ROOT, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
        assert message in done.stderr[done.stderr.rindex("error: ") :]
    assert before == {p: p.read_bytes() for p in before}
