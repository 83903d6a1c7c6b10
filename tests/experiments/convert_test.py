"""The command that converts models, in this process and as a shell would run it."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from fp8jax.lm.interop import convert, write
from fp8jax.lm.records.checkpoint import Checkpointer
from tests.support import ROOT
from tests.support.commands import run_command, run_here
from tests.support.hf_folders import config_json, tensors, write_folder


@pytest.fixture
def folder(tmp_path):
    config = config_json("llama")
    return write_folder(tmp_path / "hf", config, tensors(config))


def test_there_and_back(folder, tmp_path):
    """The first as a process of its own, where warnings are errors and nothing else is said."""
    done = run_command("convert", f"--from=hf:{folder}", f"--to={tmp_path}/workdir")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"wrote .*/workdir: [\d,]+ parameters in float32\n", done.stdout)
    back = ("--format=bf16", f"--to=hf:{tmp_path}/back", f"--from={tmp_path}/workdir")
    done = run_here("convert", *back)
    assert (done.returncode, done.stdout) == (0, f"wrote {tmp_path}/back in bf16\n")
    done = run_here("convert", *back)
    assert done.returncode == 1
    assert done.stderr == f"error: {tmp_path}/back exists and is not overwritten\n"
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert config == config_json("llama") | {"dtype": "bfloat16"}


@pytest.mark.usefixtures("takes_ctrl_c")
@pytest.mark.parametrize(
    "at, sent, code, said",
    [
        ((write, "save_file"), signal.SIGINT, 130, "interrupted\n"),
        ((write, "save_file"), signal.SIGTERM, 143, ""),
        # Orbax's threads write on, until the signal takes effect.
        ((Checkpointer, "save"), signal.SIGINT, 130, "interrupted\n"),
        ((convert, "copy_small_files"), signal.SIGINT, 130, "interrupted\n"),
    ],
    ids=["Ctrl-C at a file", "SIGTERM at a file", "Ctrl-C at a checkpoint", "Ctrl-C after it"],
)
def test_an_interrupted_conversion_leaves_nothing(
    at, sent, code, said, folder, monkeypatch, tmp_path
):
    begun, whole = [], getattr(*at)

    @functools.wraps(whole)
    def interrupted(*arguments, **named):
        result = whole(*arguments, **named)
        begun.extend((tmp_path / "new").iterdir())  # beside the target
        signal.raise_signal(sent)
        return result

    monkeypatch.setattr(*at, interrupted)
    to = [f"--to=hf:{tmp_path}/new/back", "--format=bf16"]
    if at[0] is not write:
        to = [f"--to={tmp_path}/new/workdir"]
    done = run_here("convert", f"--from=hf:{folder}", *to)
    assert (done.returncode, done.stderr) == (code, said)
    assert len(begun) == 1 and list((tmp_path / "new").iterdir()) == []


# As a shell would interrupt it; the one above raises the same signals where they hurt.

SLOW = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
from fp8jax.lm.interop import write
from fp8jax.lm.cli import command, convert

def save_file(*args, **kwargs):
    print("writing", flush=True)
    time.sleep(60)

write.save_file = save_file
command.run(convert.main, errors=convert.ERRORS)
"""


@pytest.mark.full
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_process_leaves_nothing(sent, folder, tmp_path):
    program = subprocess.Popen(
        [
            sys.executable,
            "-c",
            SLOW,
            f"--from=hf:{folder}",
            f"--to=hf:{tmp_path}/new/back",
            "--format=bf16",
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.PIPE,
    )
    assert program.stdout.readline() == "writing\n"
    assert len(list((tmp_path / "new").iterdir())) == 1  # beside the target
    time.sleep(0.1)
    program.send_signal(sent)
    try:
        _, error = program.communicate(timeout=60)
    finally:
        program.kill()
    assert program.returncode == (130 if sent == signal.SIGINT else 143)
    assert error == ("interrupted\n" if sent == signal.SIGINT else "")
    assert list((tmp_path / "new").iterdir()) == []


MOMENTS = """
import os, shutil, signal, sys, threading, time
from pathlib import Path
from fp8jax.lm.interop.convert import import_folder

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
source, new = sys.argv[1], Path(sys.argv[2])

def interrupt(delay, over):
    while not list(new.iterdir()):
        time.sleep(0.001)
    if not over.wait(delay):
        os.kill(os.getpid(), signal.SIGINT)

for delay in (0, 0.02, 0.05, 0.1, 0.2):
    over = threading.Event()
    thread = threading.Thread(target=interrupt, args=(delay, over))
    thread.start()
    try:
        import_folder(source, new / "workdir")
        over.set()
        shutil.rmtree(new / "workdir")
        print("finished")
    except KeyboardInterrupt:
        print("interrupted")
    thread.join()
    assert list(new.iterdir()) == [], list(new.rglob("*"))
"""


@pytest.mark.full
def test_an_import_leaves_nothing_whenever_it_is_interrupted(tmp_path):
    """Also while Orbax's threads write."""
    config = config_json("llama", vocab_size=2**17)  # 34 MB, so that writing takes a while
    folder = write_folder(tmp_path / "hf", config, tensors(config, np.float32))
    (tmp_path / "new").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", MOMENTS, f"hf:{folder}", str(tmp_path / "new")],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 5 and lines[0] == "interrupted"


BAD = [
    (["--to=DIR/x"], "Flag --from must have a value"),
    (["--from=hf:DIR/hf"], "Flag --to must have a value"),
    (["--from=DIR/a", "--to=DIR/x"], "one of --from=.*/a and --to=.*/x must be hf:DIR"),
    (["--from=hf:DIR/none", "--to=DIR/x"], "hf:.*/none does not exist"),
    (["--from=hf:", "--to=DIR/x"], "hf: needs a folder"),
    (["--from=hf:DIR/hf", "--to="], "--to= names no folder"),
    (["--from=hf:DIR/hf", "--to=hf:", "--format=bf16"], "--to=hf: names no folder"),
    (["--from=hf:DIR/hf", "--to=DIR/e/.."], r"/e/\.\. ends in '\.\.': name the folder that"),
    (["--from=hf:DIR/hf", "--to=DIR/\udcff"], r"argument '--to=.*/\\udcff' is not UTF-8"),
    (["--from=hf:DIR/hf", "--to=DIR/hf"], "hf exists and is not overwritten"),
    (["--from=DIR/none", "--to=hf:DIR/x", "--format=bf16"], "none is not a folder: name the work"),
    (
        ["--from=DIR/hf", "--to=hf:DIR/x", "--format=bf16"],
        "hf has no checkpoints: name the workdir",
    ),
    (["--from=DIR/a", "--to=hf:DIR/x"], "--to=hf:.*/x needs a --format: bf16, float32"),
    (
        ["--from=DIR/a", "--to=hf:DIR/x", "--format=bf17"],
        "unknown export format 'bf17'; did you me",
    ),
    (["--from=hf:DIR/hf", "--to=DIR/x", "--format=bf16"], "--format is for --to=hf:DIR, not for"),
    (["--from=hf:DIR/hf", "--to=DIR/x", "--step=3"], "--step is for --to=hf:DIR, not for"),
    (["--from=hf:DIR/hf", "--to=hf:DIR/x", "--format=bf16", "--step=3"], "step=3 is for workdirs"),
    (["--from=hf:DIR/hf", "--to=hf:DIR/x", "--format=bf16", "--max_shard_bytes=0"], "max_shard_by"),
    (["--from=hf:DIR/hf", "--to=DIR/x", "more"], "arguments that are not flags: .'more'"),
]


@pytest.mark.parametrize(("given", "message"), BAD, ids=[row[1][:20] for row in BAD])
def test_bad_commands_end_in_one_line(given, message, folder, tmp_path):
    done = run_here("convert", *[text.replace("DIR", str(tmp_path)) for text in given])
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(f"error: .*{message}.*\n", done.stderr), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
