"""How long a run takes from the start of its process to the end of its third step.

    start_cold/MODEL/POLICY      nothing was compiled before: what a first run waits
    start_cached/MODEL/POLICY    the same run again, which reads its programs from the cache
    mesh_compile/cold            of such a run on all devices, the seconds for its steps' programs:
                                 to trace, lower and compile them
    mesh_compile/second          the same of the second run

Each is a process of its own, `python -m experiments.train` with the config's arguments, killed when
it has written its third step. The text is tokenized before, as any earlier run would have done.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from experiments.bench.report import Report, Row
from experiments.bench.timing import Timing, say
from fp8jax.lm.corpus import build_corpus
from fp8jax.lm.data.tokenizers import tokenizer
from fp8jax.lm.records.events import Event
from fp8jax.lm.records.jsonl import read_jsonl

_STEPS = 3
_PATIENCE = 600.0  # seconds


def measure_starts(config: ConfigDict, arguments: Sequence[str], policies: Sequence[str]) -> Report:
    """Starts the run of `config` twice for each policy, without and with a cache of programs.

    Args:
      config: what `arguments` say.
      arguments: --config=FILE and its changes, as the command got them.
      policies: values of --config.precision.

    Raises:
      RuntimeError: a run ends before its third step, or takes more than ten minutes.
    """
    rows, figures = [], {}
    for policy in policies:
        for kind, start in zip(("cold", "cached"), _both(config, arguments, policy), strict=True):
            figures[f"start_{kind}/{config.model}/{policy}"] = start.seconds
            rows.append(_row(config, f"{policy}, {kind}", start.seconds, start.note))
    return Report(
        title=f"From the start of a process to the end of step {_STEPS}, {config.model}",
        rate="TFLOP/s",
        rows=rows,
        figures=figures,
    )


def measure_mesh_compile(config: ConfigDict, arguments: Sequence[str], policy: str) -> Report:
    """Starts the run of `config` twice on all devices, as `measure_starts` does.

    Raises:
      RuntimeError: as `measure_starts`.
    """
    rows, figures = [], {}
    for kind, start in zip(("cold", "second"), _both(config, arguments, policy), strict=True):
        figures[f"mesh_compile/{kind}"] = start.compiling
        note = f"step {_STEPS} after {start.seconds:.1f} s; {start.note}"
        rows.append(_row(config, f"{policy}, {kind}", start.compiling, note))
    return Report(
        title=f"Compiling the steps of {config.model} on a mesh ({config.mesh}) of all devices",
        rate="TFLOP/s",
        rows=rows,
        figures=figures,
    )


def _row(config: ConfigDict, name: str, seconds: float, note: str) -> Row:
    case = f"{config.model} {config.batch_size}x{config.seq_len}"
    return Row(case=case, name=name, timing=Timing(seconds=seconds), note=note)


class _Start(NamedTuple):
    """A run until its third step.

    Attributes:
      seconds: from the start of the process.
      compiling: seconds for the programs of its steps.
      note: where the time went, and what the cache was for.
    """

    seconds: float
    compiling: float
    note: str


def _both(config: ConfigDict, arguments: Sequence[str], policy: str) -> list[_Start]:
    """Starts a run twice, with one cache that is empty before."""
    build_corpus(
        config.data,
        tokenizer(config.tokenizer),
        seq_len=config.seq_len,
        valid_fraction=config.valid.fraction,
        cache_dir=config.cache_dir,
    )
    found: list[_Start] = []
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder, "programs")
        for kind in ("first", "second"):
            words = [*arguments, f"--config.precision={policy}"]
            found.append(_start(words, cache, Path(folder, kind)))
            say(f"{policy}, {kind}: {found[-1].seconds:.1f} s, {found[-1].note}")
    return found


def _start(arguments: Sequence[str], cache: Path, workdir: Path) -> _Start:
    """Runs until the third step has been written."""
    command = [sys.executable, "-m", "experiments.train", *arguments, f"--workdir={workdir}"]
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache)}
    before = set(cache.glob("*-cache"))
    with open(f"{workdir}.log", "w+b") as log:
        clock = time.perf_counter()
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            while not (steps := _steps(workdir)):
                if process.poll() is not None:
                    log.seek(0)
                    text = log.read().decode(errors="replace").strip()
                    raise RuntimeError(f"the run ended before step {_STEPS}: {text[-500:]}")
                if time.perf_counter() - clock > _PATIENCE:
                    raise RuntimeError(f"no step {_STEPS} after {_PATIENCE:.0f} s")
                time.sleep(0.02)
            seconds = time.perf_counter() - clock
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    events = read_jsonl(workdir / "events.jsonl")
    compiling = sum(event["compile_s"] for event in events if event["kind"] == Event.STAGE)
    timed = [line["step_s"] for line in steps if line["step_s"] is not None]
    each = ", ".join(f"{seconds:.1f}" for seconds in timed)
    stored = len(set(cache.glob("*-cache")) - before)
    note = f"compiling the steps {compiling:.1f} s; later steps {each} s; {stored} programs stored"
    return _Start(seconds, compiling, note)


def _steps(workdir: Path) -> list[dict[str, Any]]:
    """Returns the lines of the first steps, [] while there are fewer than three."""
    file = workdir / "metrics.jsonl"
    lines = [line for line in read_jsonl(file) if "loss" in line] if file.exists() else []
    return lines[:_STEPS] if len(lines) >= _STEPS else []
