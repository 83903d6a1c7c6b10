"""How long a run takes from the start of its process to the end of its third step.

    start_cold/MODEL/POLICY      nothing was compiled before: what a first run waits
    start_cached/MODEL/POLICY    the same run again, which reads its programs from the cache

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
from typing import Any

from ml_collections import ConfigDict

from experiments.bench.report import Report, Row
from experiments.bench.timing import Timing, say
from fp8jax.data.corpus import build_corpus
from fp8jax.data.tokenizers import tokenizer
from fp8jax.records.events import Event
from fp8jax.records.jsonl import read_jsonl

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
    build_corpus(
        config.data, tokenizer(config.tokenizer), seq_len=config.seq_len,
        valid_fraction=config.valid_fraction, cache_dir=config.cache_dir,
    )  # fmt: skip
    rows, figures = [], {}
    for policy in policies:
        with tempfile.TemporaryDirectory() as folder:
            cache = Path(folder, "programs")
            for kind in ("cold", "cached"):
                seconds, note = _start(
                    [*arguments, f"--config.precision={policy}"], cache, Path(folder, kind)
                )
                say(f"{policy}, {kind}: {seconds:.1f} s, {note}")
                figures[f"start_{kind}/{config.model}/{policy}"] = seconds
                rows.append(
                    Row(case=f"{config.model} {config.batch_size}x{config.seq_len}",
                        name=f"{policy}, {kind}", timing=Timing(seconds=seconds), note=note)
                )  # fmt: skip
    return Report(
        title=f"From the start of a process to the end of step {_STEPS}, {config.model}",
        rate="TFLOP/s", rows=rows, figures=figures,
    )  # fmt: skip


def _start(arguments: Sequence[str], cache: Path, workdir: Path) -> tuple[float, str]:
    """Runs until the third step has been written; returns the seconds, and what they were."""
    command = [sys.executable, "-m", "experiments.train", *arguments, f"--workdir={workdir}"]
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache)}
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
    return seconds, _described(read_jsonl(workdir / "events.jsonl"), steps)


def _steps(workdir: Path) -> list[dict[str, Any]]:
    """Returns the lines of the first steps, [] while there are fewer than three."""
    file = workdir / "metrics.jsonl"
    lines = [line for line in read_jsonl(file) if "loss" in line] if file.exists() else []
    return lines[:_STEPS] if len(lines) >= _STEPS else []


def _described(events: Sequence[Any], steps: Sequence[Any]) -> str:
    """Returns where the time went, by the files of the run."""
    compiling = sum(event["compile_s"] for event in events if event["kind"] == Event.STAGE)
    each = ", ".join(f"{line['step_s']:.1f}" for line in steps)
    return f"compiling the steps {compiling:.1f} s; steps {each} s"
