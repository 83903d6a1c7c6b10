"""Training stages: the runs of fp8jax, and what they took."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from configs import base
from fp8jax.lm.model.config import ModelConfig
from fp8jax.lm.records.events import Event
from fp8jax.lm.records.jsonl import read_jsonl
from fp8jax.lm.training.build import build
from fp8jax.lm.training.epochs import read_corpus, with_steps
from fp8jax.lm.training.loop import train_and_evaluate


def check(config: ConfigDict) -> ModelConfig:
    """Returns the shape of a run's model, for which nothing is allocated. Its data is packed.

    Raises ValueError and NotImplementedError as training does before it begins.
    """
    config, corpus = with_steps(config)
    run = build(config)
    if corpus is None:
        read_corpus(run.settings, run.tokenizer)
    if run.initial_weights is not None:
        run.initial_weights.check(run.tokenizer)
    return run.stages[0].model.config


def train(config: ConfigDict, folder: Path) -> Mapping[str, Any]:
    """Trains a run, or goes on with it, to its end.

    Returns:
      What `measured` returns.

    Raises:
      InterruptedError: a signal stopped it; its state is saved.
    """
    train_and_evaluate(config, str(folder), defaults=base.get_config())
    jax.clear_caches()  # the programs of this stage, whose memory the next one needs
    reason = _last(read_jsonl(folder / "events.jsonl"), Event.END)["reason"]
    if reason != "finished":
        raise InterruptedError(f"{reason} stopped the run, whose state is saved")
    return measured(folder)


def measured(folder: Path) -> dict[str, Any]:
    """Returns what a finished run took: steps, losses, times in seconds, bytes of memory.

    `memory` is what XLA allocates on each device for a training step, with its arguments. It does
    not depend on what ran before in the process, as a device's own peak does.
    """
    lines, events = (read_jsonl(folder / f"{name}.jsonl") for name in ("metrics", "events"))
    valid = [line["valid_loss"] for line in lines if "valid_loss" in line]
    stages = [event for event in events if event["kind"] == Event.STAGE]
    return {
        "steps": lines[-1]["step"],
        "loss": statistics.fmean(line["loss"] for line in lines[-max(1, len(lines) // 20) :]),
        "valid_loss": valid[-1] if valid else None,
        "step_s": _median(lines, "step_s"),
        "tokens_per_s": _median(lines, "tokens_per_s"),
        "memory": stages[-1]["memory"]["total"] if stages else None,
        "devices": _last(events, Event.START)["devices"],
    }


def _median(lines: list[dict[str, Any]], name: str) -> float | None:
    """Of the steps that have it: none whose program was new; None if all were."""
    return statistics.median(found) if (found := [x[name] for x in lines if x[name]]) else None


def _last(events: list[dict[str, Any]], kind: Event) -> dict[str, Any]:
    return [event for event in events if event["kind"] == kind][-1]
