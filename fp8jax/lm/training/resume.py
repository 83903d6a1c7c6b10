"""Where a run begins: at step 0, or from the newest sound checkpoint of its workdir.

lm/records/run_checkpoint.py says what a checkpoint contains.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from ml_collections import ConfigDict

from fp8jax.lm.corpus import Corpus
from fp8jax.lm.interop.config_json import load_json
from fp8jax.lm.records.checkpoint import Checkpointer, Restored, newest_step
from fp8jax.lm.records.differences import config_difference, listed
from fp8jax.lm.records.run_checkpoint import CONVERTED_FROM, PARAMS, require_version
from fp8jax.lm.training.epochs import require_same_epochs
from fp8jax.lm.training.layer_choice import KEYS, with_layers_of
from fp8jax.lm.training.policy_switch import enter_policy, leaves_by_path
from fp8jax.lm.training.run import Run, Stage
from fp8jax.lm.training.step import TrainState


@dataclasses.dataclass(kw_only=True)
class Position:
    """Where a run stands between two steps.

    Attributes:
      stage: that trained the last step.
      state: after it.
      seeding: whether the next step seeds amax histories.
    """

    stage: Stage
    state: TrainState
    seeding: bool


def as_begun(config: ConfigDict, workdir: Path) -> ConfigDict:
    """The config with the remat and unroll of the run in `workdir`, where it does not say them."""
    folder = workdir / "checkpoints"
    if all(config[key] is not None for key in KEYS) or newest_step(folder) is None:
        return config
    with Checkpointer(folder, every=1, keep=1, keep_best=0) as checkpointer:
        newest = checkpointer.read_meta(only=())
    if newest is None or "config" not in newest[1]:  # none is sound, or a conversion
        return config
    return with_layers_of(config, newest[1]["config"])


def read_checkpoint(
    checkpointer: Checkpointer, run: Run, corpus: Corpus
) -> tuple[Restored | None, list[str]]:
    """Reads the newest sound checkpoint of this config; also lists what has changed since.

    Returns:
      None without a checkpoint. Optional parts whose keys differ are not read.

    Raises:
      ValueError: another checkpoint version, or another config or other data while
        `resume_with_changes` is False; the message lists the differences. Or other data, or
        another batch size, in a run of `num_epochs`.
    """
    newest = checkpointer.read_meta()
    if newest is None:
        return None, []
    step, meta = newest
    require_version(step, meta)
    if CONVERTED_FROM in meta:
        raise _conversion(meta[CONVERTED_FROM])
    changes = config_difference(meta["config"], _record_since(run, meta))
    changes = [line for line in changes if not line.startswith("resume_with_changes:")]
    if meta["data"] != corpus.fingerprint:
        changes.append(
            f"(contents of the data): {meta['data'][:16]} -> {corpus.fingerprint[:16]}; other rows"
            " may be held out, among them some that were trained on"
        )
    if changes and not run.settings.resume_with_changes:
        raise ValueError(
            f"the checkpoint of step {step} in this workdir comes from another config: "
            f"{listed(changes)}. Take another --workdir, or ask for it with "
            "--config.resume_with_changes=True"
        )
    if run.settings.num_epochs is not None:
        require_same_epochs(changes)
    for line in changes:
        logging.warning("resuming with a change: %s", line)
    return checkpointer.restore(valid_items(run, step, meta)), changes


def valid_items(run: Run, step: int, meta: dict[str, Any]) -> dict[str, Any]:
    """The items of a checkpoint that this run goes on from: without the optional parts whose keys
    have changed since it was written, which begin anew."""
    before, now = meta["config"], _record_since(run, meta)
    items = checkpoint_items(run, run.at(step).state)
    for part in run.optional_state:
        if part.key(before, step) != part.key(now, step):
            items.pop(part.item)
    return items


def _record_since(run: Run, meta: dict[str, Any]) -> dict[str, Any]:
    """The run's config; what it does not say was chosen, and is as in the checkpoint."""
    before = meta["config"]  # checkpoints that are older than that choice have None
    return run.settings.record | {key: before[key] for key in run.layers.chosen if key in before}


def refuse_conversion(workdir: Path) -> None:
    """Raises ValueError if the config.json of a workdir says that it holds a conversion."""
    try:
        config = load_json(workdir / "config.json")
    except ValueError:  # none, or a run's that was cut short: the run writes it again
        return
    if CONVERTED_FROM in config:
        raise _conversion(config[CONVERTED_FROM])


def _conversion(source: str) -> ValueError:
    return ValueError(
        f"this workdir holds weights that were converted from {source}, and no run: take another"
        " --workdir, and this one as --config.initial_weights"
    )


def checkpoint_items(run: Run, state: TrainState) -> dict[str, Any]:
    """The state (of arrays or of abstract ones) as items of a checkpoint, by name."""
    always = {"step": state.step, "opt_state": state.opt_state, "key": state.key}
    optional = {part.item: getattr(state, part.field) for part in run.optional_state}
    return {PARAMS: state.params, "state": always, **optional}


def initial_position(run: Run, restored: Restored | None) -> Position:
    """Stage and state to begin with. Parts that were not restored are fresh."""
    if restored is None:
        stage = run.stages[0]
        return Position(stage=stage, state=stage.programs.initialize(), seeding=stage.seeds)
    items = restored.arrays
    same_policy = "histories" in items
    # With its histories, a run is still in the stage of its last step, though the next step may
    # belong to another.
    stage = run.at(restored.step if same_policy else restored.step + 1)
    state = dataclasses.replace(stage.state, params=items[PARAMS], **items["state"])
    for part in run.optional_state:
        if part.item in items:
            state = dataclasses.replace(state, **{part.field: items[part.item]})
        elif part.fresh is not None:
            shardings = jax.tree.map(lambda leaf: leaf.sharding, getattr(stage.state, part.field))
            fresh = jax.device_put(part.fresh(), shardings)
            state = dataclasses.replace(state, **{part.field: fresh})
    if same_policy:
        # Only a part of them may be new. Older checkpoints do not say it, nor those of other runs.
        seeding = "seeding" in restored.meta and restored.meta["seeding"]
        return Position(stage=stage, state=state, seeding=seeding or _are_empty(state.histories))
    state = enter_policy(state, stage.state, frozenset())
    return Position(stage=stage, state=state, seeding=bool(leaves_by_path(state.histories)))


def _are_empty(histories: Any) -> bool:
    """Whether there are histories and all are zeros: each step so far was rejected."""
    leaves = jax.tree.leaves(histories)
    if not leaves:
        return False
    largest = jax.jit(lambda leaves: jnp.max(jnp.stack([jnp.max(leaf) for leaf in leaves])))
    return float(largest(leaves)) == 0.0
