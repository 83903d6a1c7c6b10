"""What the console says about a run: what starts, what was compiled, how it ended.

Everything else is in the workdir: the whole config in config.json, all sources in data.txt, every
GEMM in precision.txt.
"""

import os
import platform
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from fp8jax.device import hardware
from fp8jax.lm.corpus import Corpus
from fp8jax.lm.model.transformer import count_params
from fp8jax.lm.records.differences import changed_values
from fp8jax.lm.training.run import Run
from fp8jax.lm.training.settings import Settings

_MOST_COLUMNS = 100
_MOST_SOURCES = 6  # with a line of their own
_MOST_LINES = 8  # of changed config keys


def labeled(label: str, text: str) -> list[str]:
    """Returns `label  text`, wrapped; the label has a column of its own."""
    return textwrap.wrap(
        text,
        _columns(),
        initial_indent=f"{label:<10} ",
        subsequent_indent=" " * 11,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _columns() -> int:
    """The width of stderr's terminal, or what lines have elsewhere."""
    if not sys.stderr.isatty():
        return _MOST_COLUMNS
    return min(_MOST_COLUMNS, os.get_terminal_size(sys.stderr.fileno()).columns)


def start_lines(run: Run, corpus: Corpus, defaults: Mapping[str, Any] | None) -> list[str]:
    """Returns what a person needs to know before the first step.

    Args:
      defaults: the config that the run's is compared with; None for no comparison.
    """
    settings, devices = run.settings, run.mesh.devices
    shape = ", ".join(f"{axis}={size}" for axis, size in run.mesh.shape.items() if size > 1)
    model = f"{settings.model}, {count_params(run.stages[0].model.config):,} parameters"
    mesh = f" ({shape})" if shape else ""
    accumulated = f" in {settings.grad_accum} microbatches" if settings.grad_accum > 1 else ""
    return [
        *([] if defaults is None else _changes(run, defaults)),
        *_sources(corpus, settings.seq_len),
        *labeled("model", model),
        *(labeled("weights", settings.initial_weights) if settings.initial_weights else []),
        *(labeled("state", settings.initial_state) if settings.initial_state else []),
        *labeled("policy", run.policies),
        *(labeled("layers", run.layers.why) if run.layers.why else []),
        *labeled("devices", f"{devices.size} x {hardware.device_kind()}{mesh}"),
        *labeled(
            "steps",
            f"{settings.num_steps:,} of {settings.batch_size} x {settings.seq_len} ="
            f" {settings.tokens_per_step:,} tokens{accumulated}; {_epochs(settings, corpus)}",
        ),
        *labeled("versions", f"jax {jax.__version__}, Python {platform.python_version()}"),
    ]


def _changes(run: Run, defaults: Mapping[str, Any]) -> list[str]:
    """Returns the keys that the config says otherwise; what the run chose is none of them."""
    changed = changed_values(defaults, run.settings.record)
    changed = {key: value for key, value in changed.items() if key not in run.layers.chosen}
    lines = labeled("config", "  ".join(f"{key}={value}" for key, value in changed.items()))
    if len(lines) > _MOST_LINES:
        lines = [*lines[: _MOST_LINES - 1], " " * 11 + "… all keys are in config.json"]
    return lines or labeled("config", "all defaults")


def _sources(corpus: Corpus, seq_len: int) -> list[str]:
    lines: list[str] = []
    cycle = sum(corpus.train.schedule.values())
    for stats in corpus.stats[:_MOST_SOURCES]:
        share = corpus.train.schedule[stats.name] / cycle
        mixed = f" ({share:.1%} of the rows)" if len(corpus.stats) > 1 else ""
        lines += labeled("" if lines else "data", f"{stats.name}{mixed}: {stats.brief()}")
    if len(corpus.stats) > _MOST_SOURCES:
        lines += labeled("", f"… and {len(corpus.stats) - _MOST_SOURCES} more sources in data.txt")
    lines += labeled("", f"{len(corpus.train):,} rows of {seq_len} tokens")
    return lines + _first(corpus.first) if corpus.first else lines


def _first(examples: Sequence[tuple[str, str]]) -> list[str]:
    """The first examples; the loss is that of what stands between >>> and <<<."""
    lines = labeled("examples", "the first ones; what is trained stands in >>> and <<<")
    for place, text in examples:
        lines += labeled("", f"{place}:")
        lines += [" " * 13 + line for line in text.rstrip("\n").split("\n")]
    return lines


def _epochs(settings: Settings, corpus: Corpus) -> str:
    if settings.num_epochs is not None:
        return f"num_epochs={settings.num_epochs}, which sets num_steps"
    epochs = settings.num_steps * settings.batch_size / len(corpus.train)
    return f"{epochs:.2g} epochs" if epochs < 10 else f"{epochs:,.0f} epochs"


def closing_line(
    reason: str, step: int, seconds: float, lines: Iterable[Mapping[str, Any]], workdir: str
) -> str:
    """Returns two lines: how the run ended and its best loss; where everything lies.

    Args:
      reason: "finished", the name of a signal, or that of an error.
      step: finished steps.
      seconds: since the program started to train.
      lines: those of metrics.jsonl with a validation loss; others are left aside.
    """
    validated = [line for line in lines if "valid_loss" in line]
    parts = [f"{reason} at step {step:,} after {_duration(seconds)}"]
    if validated:
        last, best = validated[-1], best_of(validated)
        parts.append(f"valid_loss {last['valid_loss']:.4f} at step {last['step']:,}")
        if best is not None and best["step"] != last["step"]:
            parts.append(f"best {best['valid_loss']:.4f} at step {best['step']:,}")
    again = ". The same command goes on from there" if reason.startswith("SIG") else ""
    return f"{', '.join(parts)}\nAll files are in {workdir}{again}"


def best_of(lines: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Returns the metrics with the lowest validation loss; None if no loss was a number."""
    losses = [line for line in lines if "valid_loss" in line and line["valid_loss"] < float("inf")]
    return min(losses, key=lambda line: line["valid_loss"], default=None)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
