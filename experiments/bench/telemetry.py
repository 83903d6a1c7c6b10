"""What telemetry costs: one run without it, one with it, on the same batches.

Both runs compile everything anew, without the cache of compiled programs, and the one with
telemetry writes its files. So its cost is all that it costs. The runs write and read no more than
they must: no validation but the last, no checkpoint but the last. A short run before them tokenizes
the text and loads the libraries of the device, which the first run of a process would pay for. Runs
without telemetry, with it, with it and without it follow each other, so that a machine that becomes
faster or slower favors neither.
"""

import contextlib
import copy
import math
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
from ml_collections import ConfigDict

from experiments.bench.report import Report, Row
from experiments.bench.timing import Timing
from fp8jax.records.events import Event
from fp8jax.records.jsonl import read_jsonl
from fp8jax.training.loop import train_and_evaluate

_FIRST = 3  # steps whose times also hold compilation and the first reads


def measure_telemetry(config: ConfigDict) -> Report:
    """Train `config` without telemetry and with it; return times, and the cost as figures.

    Figures: telemetry_cost, the share by which the run's time grows; telemetry_sample, what a
    sampled step takes beyond a step, in steps.

    Raises ValueError for a config without `telemetry_every`, or too short for two samples.
    """
    every, num_steps = config.telemetry_every, config.num_steps
    if every is None:
        raise ValueError("telemetry needs --config.telemetry_every, 50 for instance")
    if num_steps < 2 * every:
        raise ValueError(f"{num_steps=} has fewer than two samples at telemetry_every={every}")
    off, on = copy.deepcopy(config), copy.deepcopy(config)
    off.telemetry_every = off.telemetry_what_if = None
    for one in (off, on):
        one.update(valid_every=num_steps, checkpoint_every=num_steps, valid_batches=1)
    first = copy.deepcopy(off)
    first.update(num_steps=_FIRST, valid_every=_FIRST, checkpoint_every=_FIRST)
    with tempfile.TemporaryDirectory() as folder, _no_compilation_cache():
        train_and_evaluate(first, str(Path(folder, "first")))
        runs = [
            (one, *_run(on if one else off, Path(folder, str(number)), every if one else None))
            for number, one in enumerate([False, True, True, False])
        ]
    without, step = _mean([run[1:] for run in runs if not run[0]])
    whole, sampled = _mean([run[1:] for run in runs if run[0]])
    cost, extra = whole.seconds / without.seconds - 1, sampled.seconds / step.seconds - 1
    case = f"{config.model}, {num_steps} steps"
    rows = [
        Row(case=case, name="run without telemetry", timing=without),
        Row(case=case, name=f"run with telemetry every {every} steps",
            timing=whole, note=f"{cost:+.1%}"),
        Row(case="one step", name="not sampled", timing=step),
        Row(case="one step", name="sampled", timing=sampled, note=f"{extra:+.2f} steps"),
    ]  # fmt: skip
    figures = {"telemetry_cost": cost, "telemetry_sample": extra}
    return Report(title="Telemetry", rate="TFLOP/s", rows=rows, figures=figures)


def _run(config: ConfigDict, workdir: Path, every: int | None) -> tuple[float, Timing]:
    """Train; return the run's seconds, and the time of a sampled step (of any, for None)."""
    train_and_evaluate(config, str(workdir))
    events = read_jsonl(workdir / "events.jsonl")
    (seconds,) = [event["seconds"] for event in events if event["kind"] == Event.END]
    # The loop reads a step while the next one runs, so that a sample shows in either of the two.
    times = {
        line["step"]: line["step_s"]
        for line in read_jsonl(workdir / "metrics.jsonl")
        if _FIRST < line["step"] < config.num_steps
    }
    if every is None:
        chosen = list(times.values())
    else:
        usual = statistics.median(times.values())
        chosen = [
            usual + sum(times[near] - usual for near in (step - 1, step) if near in times)
            for step in times
            if step % every == 0
        ]
    middle = statistics.median(chosen) if chosen else math.nan
    return seconds, Timing(seconds=middle, spread=(max(chosen) - min(chosen)) / middle)


def _mean(runs: list[tuple[float, Timing]]) -> tuple[Timing, Timing]:
    """Returns the mean time of runs with their spread, and the mean of their steps' medians."""
    wholes, steps = [run[0] for run in runs], [run[1] for run in runs]
    whole, step = statistics.mean(wholes), statistics.mean(one.seconds for one in steps)
    spread = (max(wholes) - min(wholes)) / whole
    return (
        Timing(seconds=whole, spread=spread),
        Timing(seconds=step, spread=max(one.spread for one in steps)),
    )


@contextlib.contextmanager
def _no_compilation_cache() -> Iterator[None]:
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
