"""TODO docstring."""

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
from fp8jax.numerics.policy_options import as_policy
from fp8jax.records.jsonl import read_jsonl
from fp8jax.training.loop import train_and_evaluate
from fp8jax.training.recovery import NonFiniteError

# Loss curves --------------------------------------------------------------------------------------


class Curve(NamedTuple):
    """What a run left: training and validation loss by step, and the step that was not finite."""

    loss: dict[int, float]
    valid: dict[int, float]
    failed: int | None


def _read_curve(workdir: Path) -> Curve:
    rows, events = (read_jsonl(workdir / f"{name}.jsonl") for name in ("metrics", "events"))
    loss = {row["step"]: row["loss"] for row in rows}
    valid = {row["step"]: row["valid_loss"] for row in rows if "valid_loss" in row}
    # Events outlive their run: that of an older one does not come right after these metrics.
    step = max(loss, default=0) + 1
    failed = any((e["kind"], e["step"]) == ("non_finite", step) for e in events[-1:])
    return Curve(loss, valid, step if failed else None)


def train_once(config: ConfigDict, workdir: Path) -> Curve:
    """Trains, or goes on, or reads what a finished run of this config left in `workdir`."""
    path, settings = workdir / "config.json", json.loads(config.to_json())
    if path.exists() and json.loads(path.read_text()) == settings:
        curve = _read_curve(workdir)
        if curve.failed is not None or config.num_steps in curve.valid:
            return curve
    try:
        train_and_evaluate(config, str(workdir))
    except NonFiniteError as error:
        logging.warning("%s: %s", workdir, error)
    curve = _read_curve(workdir)
    if curve.failed is None and config.num_steps not in curve.valid:
        raise InterruptedError(f"{workdir}: stopped early; the same command goes on from there")
    return curve


def _smooth(loss: Mapping[int, float], window: int) -> dict[int, float]:
    """step -> mean over the last `window` steps."""
    windows = ((last, range(last - window + 1, last + 1)) for last in loss if last >= window)
    return {last: fmean(loss[step] for step in steps) for last, steps in windows}


def _excess(losses: Sequence[Mapping], baselines: Sequence[Mapping]) -> dict[int, list[float]]:
    """step -> how far each seed's loss lies above its baseline's, in per cent."""
    pairs = list(zip(losses, baselines, strict=True))
    steps = set.intersection(*(set(a) & set(b) for a, b in pairs))
    return {step: [100 * (a[step] / b[step] - 1) for a, b in pairs] for step in sorted(steps)}


def _panel(name: str, curves: Sequence[Curve], bases: Sequence[Curve], window: int) -> plots.Panel:
    bits = [cast.format.bits for _, recipe in as_policy(name).rules for cast in recipe.casts]
    training = _excess(*([_smooth(c.loss, window) for c in side] for side in (curves, bases)))
    valid = _excess(*([c.valid for c in side] for side in (curves, bases)))
    failed = [curve.failed for curve in curves if curve.failed is not None]
    return plots.Panel(
        name, f"FP{min(bits)}" if bits else "BF16", list(training),
        list(map(fmean, training.values())), list(valid), list(map(fmean, valid.values())),
        f"non-finite at step {min(failed)}" if failed else "",
    )  # fmt: skip


def require_ungated(config: ConfigDict) -> None:
    """Raises ValueError where linears of a compared policy would be left in BF16 by their size."""
    if config.size_gate:
        raise ValueError(
            "size_gate=True: a study compares precisions, and what the gate leaves in BF16 would be"
            " compared with itself; leave it False"
        )


def loss_curves(
    config: ConfigDict, workdir: Path, precisions: Sequence[str], seeds: Sequence[int]
) -> str:
    """Trains `config` in BF16 and each precision into WORKDIR/NAME (NAME-seedN for other seeds than
    the config's), writes curves.md and curves.png, and returns the text.

    What is finished is not trained again. A run that was not finite is reported, and is no error.
    """
    plots.require_matplotlib()
    require_ungated(config)
    names = [as_policy(name).name for name in dict.fromkeys(["bf16", *precisions])]
    if len(names) == 1:
        raise ValueError("no precision to compare with bf16")
    runs: dict[str, list[Curve]] = {}
    for name, seed in itertools.product(names, seeds):
        one = copy.deepcopy(config)
        one.precision, one.seed = name, seed
        folder = name if seed == config.seed else f"{name}-seed{seed}"
        logging.info("study: %s", folder)
        runs.setdefault(name, []).append(train_once(one, workdir / folder))
    bases, window = runs["bf16"], max(1, config.num_steps // 10)
    steps = sorted(bases[0].valid)
    rows, panels = [], []
    for name, curves in runs.items():
        panels.append(_panel(name, curves, bases, window))
        valid = _excess([c.valid for c in curves], [c.valid for c in bases])
        end = panels[-1].note
        if config.num_steps in valid:
            last = valid[config.num_steps]
            spread = f" ({min(last):+.2f} to {max(last):+.2f})" if len(last) > 1 else ""
            end = f"{fmean(last):+.2f}%{spread}"
        means = [f"{fmean(c.valid[s] for c in curves):.4f}" if s in valid else "–" for s in steps]
        rows.append([f"`{name}`", *means, end])
    text = f"Validation loss in nats a token, mean of the seeds {', '.join(map(str, seeds))}.\n\n"
    text += markdown_table(["precision", *(f"step {step}" for step in steps), "against BF16"], rows)
    workdir.joinpath("curves.md").write_text(text, encoding="utf-8")
    title = f"Loss above BF16's. Line: training, window of {window}; dots, number: validation"
    figure = plots.loss_differences(panels[1:], baseline="BF16", title=title)
    figure.savefig(workdir / "curves.png")
    return text
