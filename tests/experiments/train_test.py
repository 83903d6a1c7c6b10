"""The real command in a process of its own: killed, stopped, resumed, misused."""

import itertools
import os
import signal
import socket
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


def start(arguments, log, devices=1):
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "XLA_FLAGS": flags}
    with log.open("ab") as file:
        return subprocess.Popen(
            arguments, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT
        )


def start_two(arguments, logs):
    """Starts two processes of one run, with a device each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = [f"--coordinator=localhost:{port}", "--num_processes=2"]
    return [start([*arguments, *flags, f"--process_id={i}"], log) for i, log in enumerate(logs)]


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
    assert start(command(tmp_path, whole, **hard), log, 8).wait(300) == 0, log.read_text()
    lines = log.read_text().splitlines()
    (first,) = (n for n, line in enumerate(lines) if line.startswith("step 1/28 "))
    assert first <= 25 and "compiling the training step…" in lines[:first]
    assert any(line.startswith("precision  0 of ") for line in lines[:first])
    assert lines[-1].startswith("finished at step 28 after 0:") and str(whole) in lines[-1]

    kill_at = int(np.random.default_rng().integers(5, 14))
    process = start(command(tmp_path, broken, **hard), log, 8)
    wait_for_step(broken, kill_at, process)
    while not any(path.name.isdigit() for path in (broken / "checkpoints").iterdir()):
        assert process.poll() is None  # on a loaded machine step 4 may still be being saved
    process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL

    process = start(command(tmp_path, broken, **hard), log, 8)
    wait_for_step(broken, 16, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0, log.read_text()
    stopped, end = read_jsonl(broken / "events.jsonl")[-2:]
    assert (end["kind"], end["reason"], end["step"]) == ("end", "SIGTERM", stopped["step"])
    assert stopped["kind"] == "stopped" and stopped["signal"] == "SIGTERM"
    assert (broken / "checkpoints" / str(stopped["step"])).is_dir()

    assert start(command(tmp_path, broken, **hard), log, 8).wait(300) == 0, log.read_text()
    resumed = [e["step"] for e in read_jsonl(broken / "events.jsonl") if e["kind"] == "resume"]
    assert len(resumed) == 2 and resumed[1] == stopped["step"], f"{kill_at=}"
    assert history(broken) == history(whole), f"{kill_at=}"
    assert len(history(whole)) == 28


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    """Sharded over two processes, one of which gets SIGTERM, and resumed: the numbers of one."""
    settings = {"precision": "fp8_delayed", "mesh": "fsdp", "num_steps": 12, "valid_every": 4}
    one, two = (tmp_path / name for name in ("one", "two"))
    assert start(command(tmp_path, one, **settings), tmp_path / "log", 2).wait(300) == 0
    logs = [tmp_path / f"log{i}" for i in range(2)]
    arguments = command(tmp_path, two, **settings)
    processes = start_two(arguments, logs)
    wait_for_step(two, 2, processes[0])
    processes[1].send_signal(signal.SIGTERM)  # process 0 learns of it
    for process, log in zip(processes, logs, strict=True):
        assert process.wait(120) == 0, log.read_text()
    events = read_jsonl(two / "events.jsonl")
    assert (events[-1]["kind"], events[-1]["reason"]) == ("end", "SIGTERM")
    assert events[-1]["step"] in (4, 8) and events[0]["processes"] == 2
    for process, log in zip(start_two(arguments, logs), logs, strict=True):
        assert process.wait(300) == 0, log.read_text()
    assert history(two) == history(one) and len(history(one)) == 12
    assert "step " not in logs[1].read_text()  # process 0 alone speaks


@pytest.mark.parametrize(
    "flags",
    [
        ["--num_processes=2"],
        ["--coordinator=localhost:1", "--num_processes=2", "--process_id=2"],
    ],
)
def test_processes_that_do_not_fit_together_are_refused(tmp_path, flags):
    done = subprocess.run(
        [*command(tmp_path, tmp_path / "run"), *flags], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1 and not (tmp_path / "run").exists()
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: --")


@pytest.mark.slow
def test_ctrl_c_saves_and_a_finished_run_says_so(tmp_path):
    workdir, log = tmp_path / "run", tmp_path / "log"
    process = start(command(tmp_path, workdir, **{"mesh": "data"}), log)
    wait_for_step(workdir, 6, process)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130, log.read_text()
    assert "Traceback" not in log.read_text()
    step = read_jsonl(workdir / "events.jsonl")[-1]["step"]
    assert (workdir / "checkpoints" / str(step)).is_dir()
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
