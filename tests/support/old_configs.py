"""Configs as runs stored them when all keys stood side by side."""

import json
from collections.abc import Mapping
from typing import Any

from fp8jax.lm.records.config_keys import LATER, OLD_KEYS


def without_groups(record: Mapping[str, Any]) -> dict[str, Any]:
    """The config of today, as JSON has it, under the old names."""
    flat, old = json.loads(json.dumps(record)), {"size_gate": False}
    for name, path in OLD_KEYS.items():
        group, _, key = path.partition(".")
        old[name] = flat[group].pop(key)
        if {f"{group}.{left}" for left in flat[group]} <= LATER.keys():
            del flat[group]
    return flat | old
