"""What telemetry costs: one run without it, one with it, on the same batches.

Both runs compile everything anew, without the cache of compiled programs, and the one with
telemetry writes its files. So its cost is all that it costs. The runs write and read no more than
they must: no validation but the last, no checkpoint but the last. A short run before them tokenizes
the text and loads the libraries of the device, which the first run of a process would pay for. Runs
without telemetry, with it, with it and without it follow each other, so that a machine that becomes
faster or slower favors neither.

Compilation, validation and checkpoints scatter more than telemetry costs. So the table says where
the time of each run went, from the files that the run wrote.
"""

import contextlib
import copy
import dataclasses
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
from ml_collections import ConfigDict

from experiments.bench.report import Report, Row
from experiments.bench.timing import Timing
from fp8jax.lm.records.events import Event
from fp8jax.lm.records.jsonl import read_jsonl
from fp8jax.lm.training.loop import train_and_evaluate

_FIRST = 3  # steps whose times also hold compilation and the first reads


def measure_telemetry(config: ConfigDict) -> Report:
    """Trains `config` without telemetry and with it; returns times, and the cost as figures.

    Figures: telemetry_cost, the share by which the run's time grows; telemetry_cost_steps, the same
    of the time of its steps alone; telemetry_sample, what a sampled step takes beyond a step, in
    steps.

    Raises ValueError for a config without `telemetry.every`, or too short for two samples;
    RuntimeError if a run stops before its last step, after SIGTERM for instance.
    """
    every, num_steps = config.telemetry.every, config.num_steps
    if every is None:
        raise ValueError("telemetry needs --config.telemetry.every, 50 for instance")
    if num_steps < 2 * every:
        raise ValueError(f"{num_steps=} has fewer than two samples at telemetry.every={every}")
    off, on = copy.deepcopy(config), copy.deepcopy(config)
    off.telemetry.every = off.telemetry.what_if = None
    for one in (off, on):
        one.valid.every, one.valid.batches, one.checkpoint.every = num_steps, 1, num_steps
    first = copy.deepcopy(off)
    first.num_steps = first.valid.every = first.checkpoint.every = _FIRST
    with tempfile.TemporaryDirectory() as folder, _no_compilation_cache():
        _train(first, Path(folder, "first"))
        runs = [
            (one, _train(on if one else off, Path(folder, str(number))))
            for number, one in enumerate([False, True, True, False])
        ]
    return _report(
        f"{config.model}, {num_steps} steps",
        every,
        [run for one, run in runs if not one],
        [run for one, run in runs if one],
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """What a run wrote of its time, in seconds.

    Attributes:
      whole: from its begin to its end.
      compiling: until its steps were compiled.
      telemetry: of compiling telemetry, in a thread beside all else; 0 without telemetry.
      steps: step -> its time, without the first few and the last.
    """

    whole: float
    compiling: float
    telemetry: float
    steps: dict[int, float]

    @property
    def stepping(self) -> float:
        return sum(self.steps.values())

    @property
    def rest(self) -> float:
        return self.whole - self.compiling - self.stepping

    def sampled(self, every: int) -> list[float]:
        """The times of sampled steps, with what their neighbors take beyond a step.

        The loop reads a step while the next one runs: what the host does for a sample lengthens the
        step, and shortens the next one by what the device has done meanwhile.
        """
        usual, times = statistics.median(self.steps.values()), self.steps
        return [
            usual + sum(times[near] - usual for near in (step - 1, step, step + 1) if near in times)
            for step in times
            if step % every == 0
        ]


def _train(config: ConfigDict, workdir: Path) -> _Run:
    train_and_evaluate(config, str(workdir))
    events = read_jsonl(workdir / "events.jsonl")
    (end,) = [event for event in events if event["kind"] == Event.END]
    if end["reason"] != "finished":
        raise RuntimeError(
            f"a run ended at step {end['step']} of {config.num_steps}, reason {end['reason']!r}:"
            " nothing is measured"
        )
    compiled = {e["step"]: e["compile_s"] for e in events if e["kind"] == Event.STAGE}
    return _Run(
        whole=end["seconds"],
        compiling=sum(compiled.values()),  # stages that compile together have one time
        telemetry=sum(e["compile_s"] for e in events if e["kind"] == Event.TELEMETRY),
        steps={
            line["step"]: line["step_s"]
            for line in read_jsonl(workdir / "metrics.jsonl")
            if _FIRST < line["step"] < config.num_steps and line["step_s"] is not None
        },
    )


def _report(case: str, every: int, off: list[_Run], on: list[_Run]) -> Report:
    """The table of the runs without telemetry and with it, and its figures."""

    def mean(runs: list[_Run], name: str) -> Timing:
        return _mean([getattr(run, name) for run in runs])

    without, whole = mean(off, "whole"), mean(on, "whole")
    step = _mean([statistics.median(run.steps.values()) for run in off])
    samples = [time for run in on for time in run.sampled(every)]
    sample = Timing(
        seconds=statistics.median(samples),
        spread=(max(samples) - min(samples)) / statistics.median(samples),
    )
    figures = {
        "telemetry_cost": whole.seconds / without.seconds - 1,
        "telemetry_cost_steps": (mean(on, "stepping").seconds - mean(off, "stepping").seconds)
        / without.seconds,
        "telemetry_sample": sample.seconds / step.seconds - 1,
    }
    rows = [
        Row(case=case, name="run without telemetry", timing=without),
        Row(
            case=case,
            name=f"run with telemetry every {every} steps",
            timing=whole,
            note=f"{figures['telemetry_cost']:+.1%}",
        ),
    ]
    for kind, runs in (("without telemetry", off), ("with telemetry", on)):
        parts = {
            "compiling the step": "compiling",
            "the steps": "stepping",
            "the rest": "rest",
        }
        rows += [Row(case=kind, name=name, timing=mean(runs, part)) for name, part in parts.items()]
    rows += [
        Row(
            case="with telemetry",
            name="compiling telemetry",
            timing=mean(on, "telemetry"),
            note="in a thread beside all else",
        ),
        Row(case="one step", name="not sampled", timing=step),
        Row(
            case="one step",
            name="sampled",
            timing=sample,
            note=f"{figures['telemetry_sample']:+.2f} steps",
        ),
    ]
    return Report(title="Telemetry", rate="TFLOP/s", rows=rows, figures=figures)


def _mean(seconds: list[float]) -> Timing:
    """The mean of times, with their spread."""
    mean = statistics.mean(seconds)
    spread = (max(seconds) - min(seconds)) / mean if mean else 0.0
    return Timing(seconds=mean, spread=spread)


@contextlib.contextmanager
def _no_compilation_cache() -> Iterator[None]:
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
