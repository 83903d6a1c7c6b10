"""The real command: sharded, in two processes, stopped, resumed, misused.

tests/lm/training/faults_test.py kills and stops it on one device.
"""

import re
import shutil
import signal
import socket
import subprocess
import sys

import jax
import pytest

from fp8jax.lm import mesh
from fp8jax.lm.records.jsonl import read_jsonl
from fp8jax.lm.training import build
from fp8jax.lm.training.channel import RUN_AGAIN
from fp8jax.lm.training.faults import OF_STEPS
from tests.support import ROOT
from tests.support.commands import run_here, tiny_run, train_alone
from tests.support.runs import numbers
from tests.support.text import write_generated_text

# Layers scanned, and sharded over eight devices in all three ways.
SHARDED = dict(
    mesh_axes__data=2, mesh_axes__fsdp=2, mesh_axes__tensor=2, model_overrides__n_layers=2
)


def train(given, code=0):
    """Runs the command in this process; its last words, after it ended with `code`."""
    done = run_here("train", *given)
    assert done.returncode == code, done.stderr
    return done.stderr


@pytest.fixture
def two_sources(tmp_path):
    """(spec, cache) of a mixture."""
    (tmp_path / "other").mkdir()
    a, b = (write_generated_text(path, documents=400) for path in (tmp_path, tmp_path / "other"))
    return f"a=0.7*{a},b=0.3*{b}", str(tmp_path / "cache")


# Two processes, below, go on with a sharded run; loop_test.py trains on this mesh.
@pytest.mark.full
def test_a_sharded_run_resumes_to_the_bit(two_sources, tmp_path):
    """From the checkpoint before the last, as after a death before the last was written."""
    run = tiny_run(
        two_sources, tmp_path / "run", num_steps=6, checkpoint__every=3, valid__every=2, **SHARDED
    )
    train(run)
    whole = numbers(tmp_path / "run")
    assert len(whole) == 6 and "rows/a" in whole[-1] and "valid_bits_per_byte" in whole[-1]
    shutil.rmtree(tmp_path / "run/checkpoints/6")
    train(run)
    (resume,) = [e for e in read_jsonl(tmp_path / "run/events.jsonl") if e["kind"] == "resume"]
    assert resume["step"] == 3 and not resume["changes"]
    assert numbers(tmp_path / "run") == whole


# The one above has its sharding; faults_test.py kills and stops a process on one device.
@pytest.mark.full
def test_killed_stopped_and_resumed_equals_never_stopped(two_sources, tmp_path):
    """As a user runs it, with delayed scaling, and accumulated, too: kill -9 while a checkpoint is
    written, then SIGTERM, then to the end: every number is bit-identical."""
    hard = SHARDED | dict(precision="fp8_delayed", batch_size=16, grad_accum=2)

    def alone(workdir, *flags, code=0):
        given = tiny_run(two_sources, workdir, **hard)
        done = subprocess.run(
            [sys.executable, "-m", "experiments.train", *given, *flags],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == code, done.stderr
        return done.stderr.splitlines()

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    lines = alone(whole)
    (first,) = (n for n, line in enumerate(lines) if line.startswith("step 1/12 "))
    assert first <= 25 and "compiling the training step…" in lines[:first]
    said = [line for line in lines[:first] if line.startswith("precision  ")]
    assert re.match(r"precision  \d+ quantized GEMMs, none of which multiplies in FP8", said[0])
    assert lines[-2].startswith("finished at step 12 after 0:") and str(whole) in lines[-1]

    alone(broken, "--inject=kill@6", code=-signal.SIGKILL)
    alone(broken, "--inject=sigterm@8")
    stopped, end = read_jsonl(broken / "events.jsonl")[-2:]
    assert (end["kind"], end["reason"], end["step"]) == ("end", "SIGTERM", stopped["step"])
    assert stopped["kind"] == "stopped" and stopped["signal"] == "SIGTERM"
    assert (broken / "checkpoints" / str(stopped["step"])).is_dir()

    alone(broken)
    resumed = [e["step"] for e in read_jsonl(broken / "events.jsonl") if e["kind"] == "resume"]
    assert resumed[0] in (3, 6) and resumed[1:] == [stopped["step"]] == [9]
    assert numbers(broken) == numbers(whole) and len(numbers(whole)) == 12


def together(given, *inject, code=0):
    """Runs the command in two processes with a device each; what each of them said.

    The second has the faults. Both end with `code`.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = [f"--coordinator=localhost:{port}", "--num_processes=2"]
    processes = [
        train_alone(*given, *flags, f"--process_id={i}", *(inject if i else ())) for i in range(2)
    ]
    try:
        said = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [code, code], said
    return said


@pytest.mark.full
def test_processes_that_an_axis_tensor_spans_read_the_same_rows(data, monkeypatch, tmp_path):
    two = lambda axes, devices=None: mesh.make_mesh(axes, jax.devices()[:2])  # noqa: E731
    monkeypatch.setattr(build, "make_mesh", two)
    short = dict(mesh="tensor", num_steps=4, valid__every=2, checkpoint__every=4)
    train(tiny_run(data, tmp_path / "one", **short))
    together(tiny_run(data, tmp_path / "two", **short))
    assert numbers(tmp_path / "one") == numbers(tmp_path / "two")


@pytest.mark.parametrize(
    "precision, finish",
    [
        ("bf16", "one process"),
        # Where two processes read what two have written, and share histories.
        pytest.param("fp8_delayed", "two processes", marks=pytest.mark.full),
    ],
)
def test_two_processes_train_as_one(precision, finish, data, monkeypatch, tmp_path):
    """They go on with a run that was sharded over two devices of one process. One of them gets
    SIGTERM; the run is resumed. The numbers are those of one process."""
    two = lambda axes, devices=None: mesh.make_mesh(axes, jax.devices()[:2])  # noqa: E731
    monkeypatch.setattr(build, "make_mesh", two)
    workdir = tmp_path / "run"
    run = tiny_run(
        data,
        workdir,
        precision=precision,
        mesh="fsdp",
        valid__every=12,
        checkpoint__every=4,
        checkpoint__keep=3,
    )
    train(run)
    whole = numbers(workdir)
    for step in (8, 12):
        shutil.rmtree(workdir / "checkpoints" / str(step))
    said = together(run, "--inject=sigterm@5", code=RUN_AGAIN)  # process 0 learns of it
    events = read_jsonl(workdir / "events.jsonl")
    assert (events[-1]["kind"], events[-1]["reason"]) == ("end", "SIGTERM")
    # Process 1 has taken step 5, so both have asked about step 4; none gets past step 6 alone.
    last = events[-1]["step"]
    assert last in (5, 6, 7)
    assert [e["processes"] for e in events if e["kind"] == "start"] == [1, 2]
    assert f"step {last}/12" in said[0] and "step 5/12" not in said[1]  # process 0 alone speaks
    asked = f"SIGTERM in process 1 of 2 on .*: all stop after step {last}"
    assert all(re.search(asked, each) for each in said)
    assert numbers(workdir) == whole[:last]
    if finish == "one process":
        train(run)
    else:
        together(run)
    resumed = [e["step"] for e in read_jsonl(workdir / "events.jsonl") if e["kind"] == "resume"]
    assert resumed == [4, last] and numbers(workdir) == whole and len(whole) == 12


@pytest.mark.parametrize(
    "flags",
    [
        ["--num_processes=2"],
        ["--coordinator=localhost:1", "--num_processes=2", "--process_id=2"],
    ],
)
def test_processes_that_do_not_fit_together_are_refused(data, tmp_path, flags):
    error = train([*tiny_run(data, tmp_path / "run"), *flags], code=1)
    assert len(error.splitlines()) == 1 and error.startswith("error: --")
    assert not (tmp_path / "run").exists()


def test_a_mesh_of_another_machine_is_answered_with_the_nearest(data, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "make_mesh", mesh.make_mesh)  # on all eight devices
    error = train([*tiny_run(data, tmp_path / "run"), "--config.mesh=gpus_64"], code=1)
    assert "data=8 x fsdp=8 x tensor=1 does not fit 8 devices" in error
    assert error.endswith("the nearest that fits is data=1 x fsdp=8 x tensor=1\n")


def test_a_command_of_one_process_refuses_to_be_one_of_several(tmp_path):
    flags = ["--coordinator=localhost:1", "--num_processes=4", "--process_id=2"]
    done = run_here("generate", f"--from={tmp_path}", "--prompt=a", *flags)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: this command runs in one process, and this is one of 4: ")


@pytest.mark.usefixtures("takes_ctrl_c")
def test_ctrl_c_saves_a_finished_run_says_so_and_bad_input_loses_nothing(
    data, monkeypatch, tmp_path
):
    """Bad input ends at once, with a non-zero code and its reason in the one line."""
    workdir = tmp_path / "run"
    monkeypatch.setitem(OF_STEPS, "ctrl_c", lambda _: signal.raise_signal(signal.SIGINT))
    said = train([*tiny_run(data, workdir), "--inject=ctrl_c@5"], code=130)
    assert said.splitlines()[-1] == "interrupted"
    end = read_jsonl(workdir / "events.jsonl")[-1]
    assert (end["kind"], end["reason"], end["step"]) == ("end", "SIGINT", 6)
    assert (workdir / "checkpoints/6").is_dir()
    train(tiny_run(data, workdir, num_steps=6, resume_with_changes=True))
    finished = [e for e in read_jsonl(workdir / "events.jsonl") if e["kind"] == "already_finished"]
    assert len(finished) == 1
    assert read_jsonl(workdir / "metrics.jsonl")[-1]["step"] == 6

    before = {p: p.read_bytes() for p in workdir.rglob("*") if p.is_file() and p.suffix == ".jsonl"}
    (tmp_path / "bad.jsonl").write_text('{"text": "a document that is long enough"}\n{"text": \n')
    for changes, message in [
        (dict(seed=1), "seed: 0 -> 1"),
        (dict(precision="fp8_delayd"), "unknown policy 'fp8_delayd'; did you mean 'fp8_delayed'"),
        (dict(data=f"jsonl:{tmp_path}/none-*.jsonl"), "none-*.jsonl"),
        (dict(data=f"jsonl:{tmp_path}/bad.jsonl"), "bad.jsonl, line 2"),
        (dict(precision="fp4_mixed", backend="xla"), "cannot run recipe"),
    ]:
        error = train(tiny_run(data, workdir, **changes), code=1)
        assert error.startswith("error: ") and error.count("\n") == 1 and message in error
    assert before == {p: p.read_bytes() for p in before}
