"""Directories of runs for figures, from the writers that training uses, without training."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8jax.lm.figures.run_files import RunFiles, read_run
from fp8jax.lm.records.metrics import Metrics
from fp8jax.telemetry.files import StepFiles
from fp8jax.telemetry.rows import FIELDS, Row


def row(**fields: Any) -> Row:
    """A row of telemetry: x of the first layer's mlp/up at step 5, unless fields say otherwise."""
    nothing: dict[str, Any] = dict.fromkeys(FIELDS)
    known = dict(
        step=5,
        layer=0,
        linear="layers/mlp/up",
        operand="x",
        cast="fwd_x",
        what_if=False,
        recipe="fp8_amax",
        format="e4m3",
        elements=64,
        nonzero=64,
        amax=1.0,
        bias=8,
        underflow=0.0,
        saturation=0.0,
    )
    return Row(**nothing | known | fields)


def write_run(
    workdir: Path,
    *,
    metrics: Sequence[dict[str, Any]] = (),
    events: Sequence[dict[str, Any]] = (),
    rows: Sequence[Row] = (),
) -> RunFiles:
    """Write a run's files, and read them.

    Args:
      metrics, events: lines with `step`; those of events also with `kind`.
    """
    with Metrics(workdir, num_steps=100) as files:
        for event in events:
            files.event(**event)
        for line in metrics:
            files.write(line["step"], {k: v for k, v in line.items() if k != "step"})
    sampled = StepFiles(workdir, 0)
    for step in sorted({row.step for row in rows}):
        sampled.write(step, [row for row in rows if row.step == step])
    return read_run(workdir)
