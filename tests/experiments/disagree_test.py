"""Real processes that have something different end in time, with the same line."""

import os
import re
import shutil
import subprocess
import sys
import time

import pytest

from fp8jax.device import processes
from fp8jax.lm.records.workdir_lock import lock_workdir
from tests.support import ROOT
from tests.support.commands import tiny_run
from tests.support.coordinator import free_port

pytestmark = pytest.mark.full  # in threads: agree_test.py, waiting_room_test.py

HOST = re.escape(processes.host())
GONE_S = 30  # after the last one has joined


def run_flags(data, workdir):
    """Of a run of two processes with eight virtual devices each."""
    return tiny_run(data, workdir, batch_size=16)


def run_pair(flags, *, each=((), ()), folders=(ROOT, ROOT), paths=(ROOT, ROOT), indices=(0, 1)):
    """What the processes write to stderr; all have failed, and are gone in time."""
    join = [f"--coordinator=localhost:{free_port()}", "--num_processes=2"]
    began = time.monotonic()
    train = [sys.executable, "-m", "experiments.train", *flags, *join]
    children = [
        subprocess.Popen(
            [*train, f"--process_id={i}", *each[i]],
            cwd=folders[i],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(paths[i])},
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in indices
    ]
    try:
        errors = [child.communicate(timeout=120)[1] for child in children]
    finally:
        for child in children:
            child.kill()
    seconds = time.monotonic() - began
    assert [child.returncode for child in children] == [1] * len(children), errors
    return errors, seconds


def ends(error):
    """The last line, which alone says how it ended."""
    lines = error.splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:], error
    assert "Traceback" not in error and "***" not in error, error
    return lines[-1].removeprefix("error: ")


@pytest.mark.parametrize(
    "first, second, wrong",
    [
        (["--config.seed=0"], ["--config.seed=7"], "config.seed is 0 in {0} and 7 in {1}"),
        (
            ["--config.num_steps=12"],
            ["--config.num_steps=20"],
            "config.num_steps is 12 in {0} and 20 in {1}",
        ),
    ],
)
def test_another_config(data, tmp_path, first, second, wrong):
    errors, seconds = run_pair(run_flags(data, tmp_path / "run"), each=(first, second))
    line = wrong.format(*(f"process {i} on {HOST}" for i in range(2)))
    assert [ends(error) for error in errors] == [f"the processes differ: {line}"] * 2
    assert seconds < GONE_S and not (tmp_path / "run").exists()


def test_other_code(data, tmp_path):
    (tmp_path / "copy").mkdir()
    for name in ("fp8jax", "configs", "experiments"):
        shutil.copytree(ROOT / name, tmp_path / "copy" / name)
    with (tmp_path / "copy/fp8jax/lookup.py").open("a") as file:
        file.write("\n# another version\n")
    errors, seconds = run_pair(
        run_flags(data, tmp_path / "run"),
        folders=(ROOT, tmp_path / "copy"),
        paths=(ROOT, tmp_path / "copy"),
    )
    line = (
        rf"the processes differ: code of fp8jax is (\S+ \w{{12}}) in process 0 on {HOST} "
        rf"and (?!\1)\S+ \w{{12}} in process 1 on {HOST}"
    )
    assert ends(errors[0]) == ends(errors[1]) and re.fullmatch(line, ends(errors[0])), errors
    assert seconds < GONE_S


def test_other_data_under_the_same_name(data, tmp_path):
    """Each node has a copy of the texts, and one is not up to date."""
    name = next(iter(data[0].split(":")[-1].split(",")))
    folders = []
    for i in range(2):
        folders.append(tmp_path / f"node{i}")
        folders[i].mkdir()
        with open(name, "rb") as file:
            (folders[i] / "a.jsonl").write_bytes(file.read() + b'{"text": "a new one"}\n' * i)
    flags = run_flags(("jsonl:a.jsonl", str(tmp_path / "cache")), tmp_path / "run")
    flags[0] = f"--config={ROOT}/configs/base.py"
    errors, seconds = run_pair(flags, folders=folders)
    line = rf"the processes differ: data is \w+ in process 0 on {HOST} and \w+ in process 1 on .*"
    assert ends(errors[0]) == ends(errors[1]) and re.fullmatch(line, ends(errors[0])), errors
    assert seconds < GONE_S


@pytest.mark.parametrize(
    ("step", "line"),
    [
        (
            None,
            "workdir is shared in process 0 on HOST and not shared (OTHER) in process 1 on HOST",
        ),
        # Of a run on one node, in a folder of its own: the other node waited for its share.
        (
            "5",
            "newest checkpoint of the workdir is 5 in process 0 on HOST"
            " and none in process 1 on HOST",
        ),
    ],
)
def test_another_workdir(data, tmp_path, step, line):
    if step is not None:
        (tmp_path / "run/checkpoints" / step).mkdir(parents=True)
    flags = run_flags(data, tmp_path / "run")
    other = tmp_path / "other"
    errors, seconds = run_pair(flags, each=((), (f"--workdir={other}",)))
    line = line.replace("HOST", HOST).replace("OTHER", str(other))
    assert [ends(error) for error in errors] == [f"the processes differ: {line}"] * 2
    assert seconds < GONE_S and not other.exists()


def test_a_lock_that_another_run_holds(data, tmp_path):
    with lock_workdir(tmp_path):
        errors, seconds = run_pair(run_flags(data, tmp_path))
    mine, other = map(ends, errors)
    assert mine.startswith(f"another program (process {os.getpid()} on ")
    assert other == f"process 0 on {HOST}: {mine}"
    assert seconds < GONE_S


@pytest.mark.parametrize("index", [0, 1])
def test_a_process_that_never_joins(data, tmp_path, index):
    flags = [*run_flags(data, tmp_path / "run"), "--join_timeout=18"]
    (error,), seconds = run_pair(flags, indices=(index,))
    waiting = [line for line in error.splitlines() if line.startswith("waiting: ")]
    assert len(waiting) == 1 and waiting[0].endswith("(15 of 18 s)")
    end = {
        0: f"process 1 has not joined within 18 s (--join_timeout); joined: 0 on {HOST}",
        1: f"process 1 of 2 on {HOST} has not reached process 0 at localhost:",
    }[index]
    assert ends(error).startswith(end) and 18 < seconds < 18 + GONE_S
    assert not (tmp_path / "run").exists()
