"""The keys of a config by their paths, and the names that some had before they stood in groups.

A run does not read an old name: whoever uses one is told the new one. Only what old runs have
stored is translated.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

OLD_KEYS = {
    "optimizer": "optimizer.name",
    "learning_rate": "optimizer.learning_rate",
    "schedule": "optimizer.schedule",
    "warmup_steps": "optimizer.warmup_steps",
    "warmup_fraction": "optimizer.warmup_fraction",
    "decay_fraction": "optimizer.decay_fraction",
    "final_fraction": "optimizer.final_fraction",
    "weight_decay": "optimizer.weight_decay",
    "b1": "optimizer.b1",
    "b2": "optimizer.b2",
    "eps": "optimizer.eps",
    "clip_norm": "optimizer.clip_norm",
    "gradients": "optimizer.gradients",
    "moments": "optimizer.moments",
    "master_weights": "optimizer.master_weights",
    "recovery": "recovery.ladder",
    "recovery_precision": "recovery.precision",
    "spike_window": "recovery.spike_window",
    "spike_deviations": "recovery.spike_deviations",
    "gnmr_alpha": "gnmr.alpha",
    "gnmr_beta": "gnmr.beta",
    "gnmr_first": "gnmr.first",
    "gnmr_most": "gnmr.most",
    "gnmr_lock": "gnmr.lock_steps",
    "gnmr_window": "gnmr.window",
    "gnmr_random": "gnmr.random",
    "gnmr_precision": "gnmr.precision",
    "valid_fraction": "valid.fraction",
    "valid_every": "valid.every",
    "valid_batches": "valid.batches",
    "sample_every": "sample.every",
    "sample_prompt": "sample.prompt",
    "sample_tokens": "sample.tokens",
    "sample_temperature": "sample.temperature",
    "telemetry_every": "telemetry.every",
    "telemetry_what_if": "telemetry.what_if",
    "checkpoint_every": "checkpoint.every",
    "checkpoint_keep": "checkpoint.keep",
    "checkpoint_keep_best": "checkpoint.keep_best",
}

# Switches that are gone, and what to say instead. Off, they are left out of stored configs.
REMOVED = {"size_gate": "docs/benchmarks has the sizes at which FP8 is slower than BF16"}

# Keys that came later, with the values that leave a run as it was: old configs have these.
LATER = {
    "gnmr.unit": "layer",
    "optimizer.reset": "",
    "optimizer.reset_from": 0.6,
    "optimizer.loss_scale": "none",
    "optimizer.loss_scale_window": 2000,
}


def by_path(config: ConfigDict) -> dict[str, Any]:
    """Returns path -> value: "seed" of a key, "mesh_axes.data" of one in a group."""
    values = dict(config)
    for group in [key for key, value in values.items() if isinstance(value, ConfigDict)]:
        values |= {f"{group}.{key}": value for key, value in values.pop(group).items()}
    return values


def refuse_old_keys(paths: Iterable[str]) -> None:
    """Raises ValueError if there is an old name among the paths of a config."""
    for path in paths:
        if path in OLD_KEYS or path in REMOVED:
            raise ValueError(answer(path))


def answer(old: str, group: str = "") -> str:
    """Returns what to say of an old name, such as "optimizer", in a group such as "cpt."."""
    if old in REMOVED:
        return f"config.{group}{old} is gone: {REMOVED[old]}"
    return f"config.{group}{old} is config.{group}{OLD_KEYS[old]} now"


def with_new_keys(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config that a run has stored as JSON, whenever that was, with the keys of today."""
    config: dict[str, Any] = {}
    for key, value in stored.items():
        if key in REMOVED and not value:
            continue
        # A group may have the name that a key had.
        old = key in OLD_KEYS and not isinstance(value, Mapping)
        group, _, name = (OLD_KEYS[key] if old else key).rpartition(".")
        (config.setdefault(group, {}) if group else config)[name] = value
    for key, value in LATER.items():
        group, _, name = key.partition(".")
        if group in config:
            config[group].setdefault(name, value)
    return config
