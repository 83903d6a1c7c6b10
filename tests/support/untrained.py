"""Checkpoints of runs that have not trained, for tests of what reads them: nothing is compiled."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fp8jax.lm.records.checkpoint import Checkpointer
from fp8jax.lm.records.run_checkpoint import CHECKPOINT_VERSION
from fp8jax.lm.training.build import build
from fp8jax.lm.training.resume import checkpoint_items
from tests.support.random_weights import random_weights


def write_checkpoints(workdir: Path, config: Any, steps: Sequence[int], /, **others: Any) -> None:
    """Writes checkpoints as the run of this config would at some steps.

    Weights are random; whatever else the state has, such as amax histories, is one everywhere.
    `others` are further keys of the meta, or other values.
    """
    run = build(config)
    meta = {"version": CHECKPOINT_VERSION, "config": run.settings.record} | others

    def one(leaf: Any) -> Any:
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.device_put(jax.random.key(1), leaf.sharding)
        return jax.device_put(np.ones(leaf.shape, leaf.dtype), leaf.sharding)

    with Checkpointer(
        workdir / "checkpoints", every=1, keep=len(steps), keep_best=0
    ) as checkpointer:
        for step in steps:
            abstract = run.at(step).state
            items = checkpoint_items(run, jax.tree.map(one, abstract))
            items["params"] = random_weights({"params": abstract.params})["params"]
            checkpointer.save(step, items, meta, None)
