"""The commands, in this process, and in processes of their own."""

import contextlib
import importlib
import io
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from absl import flags

import fp8jax.lm.training.loop  # noqa: F401  # defines Grain's flags, which are not the program's
from experiments.config_keys import RUN_KEYS
from fp8jax.lm.cli import command
from fp8jax.lm.cli.config_flag import Keys
from fp8jax.lm.cli.main import COMMANDS
from tests.support import ROOT


@contextlib.contextmanager
def command_here(name: str, keys: Keys = RUN_KEYS) -> Iterator[Callable[..., None]]:
    """A function that runs the command `name` in this process with some flags.

    Where the program would end with an error, it raises SystemExit: its argument is the exit code,
    or the line that Python writes to stderr before it ends with 1. `keys` are those of --config.
    """
    source = f"fp8jax.lm.cli.{name}" if name in COMMANDS else f"experiments.{name}"
    known = set(flags.FLAGS)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def forget_flags() -> None:
        for flag in set(flags.FLAGS) - known:
            delattr(flags.FLAGS, flag)

    def run(*given: str) -> None:
        forget_flags()
        sys.modules.pop(source, None)
        module = importlib.import_module(source)  # defines its flags anew
        errors = getattr(module, "ERRORS", command.ERRORS)
        arguments = [name, *given]
        with (
            contextlib.chdir(ROOT),
            mock.patch.object(sys, "argv", arguments),  # which ml_collections reads
        ):
            with warnings.catch_warnings():
                # ml_collections loads config files in a way that Python 3.12 drops.
                warnings.filterwarnings("ignore", "the load_module", DeprecationWarning)
                parsed = command.parse_flags(arguments, config=keys)
            command.call(module.main, errors, parsed)

    try:
        yield run
    finally:
        forget_flags()
        flags.FLAGS.unparse_flags()
        for number, handler in handlers.items():  # which a program may set
            signal.signal(number, handler)


def run_here(name: str, *given: str, keys: Keys = RUN_KEYS) -> subprocess.CompletedProcess:
    """What `run_command` returns, from a run in this process, but for what is logged."""
    said, errors, code = io.StringIO(), io.StringIO(), 0
    with (
        command_here(name, keys) as run,
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(errors),
    ):
        try:
            run(*given)
        except SystemExit as ended:  # as Python ends
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            if isinstance(ended.code, str):
                print(ended.code, file=errors)
    return subprocess.CompletedProcess([name, *given], code, said.getvalue(), errors.getvalue())


def command_line(*arguments: str) -> tuple[int, str]:
    """Exit code and output, stderr last, of `experiments.train` with the smoke config."""
    done = run_here("train", "--config=configs/smoke.py", *arguments)
    return done.returncode, done.stdout + done.stderr


def tiny_run(text: tuple[str, str], workdir: Path, **changes: object) -> list[str]:
    """Flags of `experiments.train` for a run of seconds, with some keys of the config changed.

    Dotted keys have two underscores. `text` is the spec of its data, and where to cache it.
    """
    spec, cache = text
    settings: dict[str, object] = dict(
        precision="bf16",
        data=spec,
        cache_dir=cache,
        seq_len=64,
        batch_size=8,
        num_steps=12,
        optimizer__warmup_steps=2,
        optimizer__learning_rate=3e-3,
        valid__every=6,
        valid__batches=2,
        checkpoint__every=3,
        valid__fraction=0.1,
        unroll=1,
    )
    small = dict(d_model=64, n_layers=1, n_heads=4, n_kv_heads=2, d_ff=128, head_dim=16)
    settings |= {f"model_overrides__{name}": value for name, value in small.items()}
    return [
        "--config=configs/base.py",
        f"--workdir={workdir}",
        *(f"--config.{key.replace('__', '.')}={v}" for key, v in (settings | changes).items()),
    ]


# Of several processes, each gives the run one device.
_TRAIN_ALONE = """
import runpy
import jax
from fp8jax.lm import mesh
from fp8jax.lm.training import build
from tests.support import shared_programs

def make_mesh(axes, devices=None):
    first = {device.process_index: device for device in reversed(jax.devices())}
    return mesh.make_mesh(axes, [first[i] for i in range(jax.process_count())])

build.make_mesh = make_mesh
shared_programs.install()
runpy.run_module("experiments.train", run_name="__main__", alter_sys=True)
"""


def train_alone(*given: str) -> subprocess.Popen:
    """Starts `experiments.train` in a process of its own, on one device.

    It has as many devices as this process, and compiles its programs as this one does: so it
    computes the same bits, and finds the programs that this one has compiled.
    """
    return subprocess.Popen(
        [sys.executable, "-c", _TRAIN_ALONE, *given],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_command(name: str, *given: str) -> subprocess.CompletedProcess:
    """Runs the command in a process of its own."""
    # ml_collections loads config files in a way that Python 3.12 drops.
    ignored = ("-W", "error", "-W", "ignore:the load_module:DeprecationWarning")
    return subprocess.run(
        [sys.executable, *ignored, "-m", f"experiments.{name}", *given],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
