"""Loss curves: trains one config under several policies, and compares their losses with BF16's.

Each run has its own folder, WORKDIR/POLICY or WORKDIR/POLICY-seedN. A finished run is read from its
folder instead of being trained again. The comparison is written as a Markdown table and a figure.
"""

import copy
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from absl import logging
from ml_collections import ConfigDict

from experiments.markdown import markdown_table
from experiments.study import plots
from fp8jax.lm.figures.style import require_matplotlib
from fp8jax.lm.records.config_keys import with_new_keys
from fp8jax.lm.records.events import Cause, Event
from fp8jax.lm.records.jsonl import read_jsonl
from fp8jax.lm.training.epochs import with_steps
from fp8jax.lm.training.layer_choice import with_layers_of
from fp8jax.lm.training.loop import train_and_evaluate
from fp8jax.lm.training.recovery import NonFiniteError
from fp8jax.numerics.names import as_policy


def loss_curves(
    config: ConfigDict, workdir: Path, precisions: Sequence[str], seeds: Sequence[int]
) -> str:
    """Trains `config` in BF16 and in each precision, with each seed, and compares the losses.

    Writes curves.md and curves.png into `workdir`. A run that becomes non-finite is reported in
    them, and does not end the study.

    Args:
      config: its `precision` and `seed` are replaced.
      workdir: run folders are WORKDIR/NAME for the config's own seed, else WORKDIR/NAME-seedN.
      precisions: names of policies; BF16 is added.
      seeds: a precision is compared with the BF16 run of the same seed.

    Returns:
      The text of curves.md.

    Raises:
      ValueError: an unknown policy, or no precision besides BF16.
      InterruptedError: a run was stopped before its end. The same call resumes it.
    """
    require_matplotlib()
    names = [as_policy(name).name for name in dict.fromkeys(["bf16", *precisions])]
    if len(names) == 1:
        raise ValueError("no precision to compare with bf16: add one")
    config, _ = with_steps(config)
    runs: dict[str, list[Curve]] = {}
    for name, seed in itertools.product(names, seeds):
        one = copy.deepcopy(config)
        one.precision, one.seed = name, seed
        folder = name if seed == config.seed else f"{name}-seed{seed}"
        logging.info("study: %s", folder)
        runs.setdefault(name, []).append(train_once(one, workdir / folder))
    window = max(1, config.num_steps // 10)
    panels = {name: _panel(name, curves, runs["bf16"], window) for name, curves in runs.items()}
    text = f"Validation loss in nats a token, mean of the seeds {', '.join(map(str, seeds))}.\n\n"
    text += _loss_table(runs, panels, config.num_steps)
    workdir.joinpath("curves.md").write_text(text, encoding="utf-8")
    title = f"Loss above BF16's. Line: training, window of {window}; dots, number: validation"
    others = [panel for name, panel in panels.items() if name != "bf16"]
    figure = plots.loss_differences(others, baseline="BF16", title=title)
    figure.savefig(workdir / "curves.png")
    return text


# Runs ---------------------------------------------------------------------------------------------


class Curve(NamedTuple):
    """The losses of a run by step, and the step that stopped it because it was not finite."""

    loss: dict[int, float]
    valid: dict[int, float]
    failed: int | None


def train_once(config: ConfigDict, workdir: Path) -> Curve:
    """Trains a run or resumes it; reads it if `workdir` holds a finished run of this config.

    Raises:
      InterruptedError: the run was stopped before its end.
    """
    path = workdir / "config.json"
    record = with_new_keys(json.loads(path.read_text())) if path.exists() else {}
    if json.loads(with_layers_of(config, record).to_json()) == record:
        curve = _read_curve(workdir)
        if curve.failed is not None or config.num_steps in curve.valid:
            return curve
    try:
        train_and_evaluate(config, str(workdir))
    except NonFiniteError as error:
        logging.warning("%s: %s", workdir, error)
    curve = _read_curve(workdir)
    if curve.failed is None and config.num_steps not in curve.valid:
        raise InterruptedError(f"{workdir}: stopped early; the same command resumes the run")
    return curve


def _read_curve(workdir: Path) -> Curve:
    rows, events = (read_jsonl(workdir / f"{name}.jsonl") for name in ("metrics", "events"))
    loss = {row["step"]: row["loss"] for row in rows}
    valid = {row["step"]: row["valid_loss"] for row in rows if "valid_loss" in row}
    # The events of earlier runs stay in the file. The last one before the run's end is of this run,
    # and belongs to the step right after the last metrics: the rejected step itself has none.
    rejected = max(loss, default=0) + 1
    failed = any(
        event["kind"] == Event.STOP
        and event["cause"] == Cause.NON_FINITE
        and event["step"] == rejected
        for event in [event for event in events if event["kind"] != Event.END][-1:]
    )
    return Curve(loss, valid, rejected if failed else None)


# Comparison ---------------------------------------------------------------------------------------


def _smooth(loss: Mapping[int, float], window: int) -> dict[int, float]:
    """Returns step -> mean loss over the `window` steps up to this one."""
    windows = ((last, range(last - window + 1, last + 1)) for last in loss if last >= window)
    return {last: fmean(loss[step] for step in steps) for last, steps in windows}


def _excess(losses: Sequence[Mapping], baselines: Sequence[Mapping]) -> dict[int, list[float]]:
    """Returns step -> each seed's loss above its baseline's, in percent, where all have a loss."""
    pairs = list(zip(losses, baselines, strict=True))
    steps = set.intersection(*(set(a) & set(b) for a, b in pairs))
    return {step: [100 * (a[step] / b[step] - 1) for a, b in pairs] for step in sorted(steps)}


def _panel(name: str, curves: Sequence[Curve], bases: Sequence[Curve], window: int) -> plots.Panel:
    """Returns what the figure shows of one precision: means over the seeds."""
    training = _excess(
        [_smooth(curve.loss, window) for curve in curves],
        [_smooth(base.loss, window) for base in bases],
    )
    valid = _excess([curve.valid for curve in curves], [base.valid for base in bases])
    failed = [curve.failed for curve in curves if curve.failed is not None]
    return plots.Panel(
        name=name,
        group=plots.group_of(name),
        steps=list(training),
        training=[fmean(values) for values in training.values()],
        valid_steps=list(valid),
        validation=[fmean(values) for values in valid.values()],
        note=f"non-finite at step {min(failed)}" if failed else "",
    )


def _loss_table(
    runs: Mapping[str, Sequence[Curve]], panels: Mapping[str, plots.Panel], num_steps: int
) -> str:
    """Returns the Markdown table of validation losses by precision, and how they compare to BF16.

    The last column is the mean and the range over the seeds, or why a run did not reach the end.
    """
    bases = runs["bf16"]
    steps = sorted(bases[0].valid)
    rows = []
    for name, curves in runs.items():
        excess = _excess([c.valid for c in curves], [c.valid for c in bases])
        means = [f"{fmean(c.valid[s] for c in curves):.4f}" if s in excess else "–" for s in steps]
        end = panels[name].note
        if num_steps in excess:
            last = excess[num_steps]
            end = f"{fmean(last):+.2f}%"
            if len(last) > 1:
                end += f" ({min(last):+.2f} to {max(last):+.2f})"
        rows.append([f"`{name}`", *means, end])
    return markdown_table(["precision", *(f"step {step}" for step in steps), "against BF16"], rows)
