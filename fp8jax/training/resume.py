"""TODO docstring."""

import dataclasses
from typing import Any

import jax
from absl import logging

from fp8jax.data.corpus import Corpus
from fp8jax.numerics.policy import Policy
from fp8jax.numerics.schedule import as_schedule
from fp8jax.records.checkpoint import Checkpointer, Restored
from fp8jax.records.differences import config_difference
from fp8jax.training.policy_switch import enter_policy, leaves_by_path
from fp8jax.training.run import Run
from fp8jax.training.step import TrainState


def read_checkpoint(
    checkpointer: Checkpointer, run: Run, config: dict[str, Any], corpus: Corpus
) -> tuple[Restored | None, list[str]]:
    """The newest sound checkpoint, if it belongs to this config, or if a change was asked for;
    and what has changed.

    Under another policy than trained its last step, the amax histories are left out: they start
    anew.

    Raises:
      ValueError: it comes from another config or other data; the message shows the difference.
    """
    found = checkpointer.read_meta()
    if found is None:
        return None, []
    step, meta = found
    # Keys that old checkpoints lack, as they then were.
    new: dict[str, Any] = {"attention_beta": None, "attention_tie_tolerance": None}
    new |= {"precision_schedule": [], "require_fp8_gemms": False, "size_gate": False}
    new |= {"moments": "float32", "recovery": "", "recovery_precision": "bf16"}
    new |= {"gnmr_alpha": [], "gnmr_beta": 1.3, "gnmr_first": 0.025, "gnmr_most": 1}
    new |= {"gnmr_lock": 1, "gnmr_window": 5, "gnmr_precision": "fp8_current"}
    new |= {"gnmr_random": None}
    new |= {"spike_window": None, "spike_deviations": 6.0, "data_timeout": 600.0}
    before = new | meta["config"]
    differences = config_difference(before, config)
    differences = [line for line in differences if not line.startswith("resume_with_changes:")]
    if meta["data"] != corpus.fingerprint:
        differences.append(
            f"(contents of the data): {meta['data'][:16]} -> {corpus.fingerprint[:16]}"
        )
    if differences and not config["resume_with_changes"]:
        raise ValueError(
            f"the checkpoint of step {step} in this workdir comes from another config:\n  "
            + "\n  ".join(differences)
            + "\nTake another --workdir, or ask for it with --config.resume_with_changes=True"
        )
    for line in differences:
        logging.warning("resuming with a change: %s", line)
    abstract = checkpoint_items(run.at(step).state)
    gated = before["size_gate"] or config["size_gate"]  # whose policy hangs on other keys, too
    if _policy_at(before, step) != _policy_at(config, step) or (gated and differences):
        abstract.pop("fp8")
    if before["spike_window"] != config["spike_window"] or config["spike_window"] is None:
        abstract.pop("seen")
    keys = [name for name in config if name.startswith("gnmr_")]
    if any(before[name] != config[name] for name in keys) or not config["gnmr_alpha"]:
        abstract.pop("gnmr")
    return checkpointer.restore(abstract), differences


def _policy_at(config: dict[str, Any], step: int) -> Policy | None:
    """The policy that trains step `step` of a config, which may be an old one: None where its
    names mean nothing any more."""
    try:
        schedule = as_schedule(config["precision"], config["precision_schedule"])
        return schedule.policy_of(step, config["num_steps"])
    except ValueError:
        return None


def initial_stage(run: Run, restored: Restored | None) -> tuple[Run, TrainState, bool]:
    """The stage to begin in, its state, and whether its first step seeds histories."""
    if restored is None:
        return run, run.initialize(), run.seeds
    arrays = restored.arrays
    # With histories, still in the stage of the last step, though the next may begin another.
    stage = run.at(restored.step if "fp8" in arrays else restored.step + 1)
    state = dataclasses.replace(stage.state, **arrays["state"])
    for name, fresh in run.remembered().items():
        shardings = jax.tree.map(lambda leaf: leaf.sharding, getattr(stage.state, name))
        known = arrays[name] if name in arrays else jax.device_put(fresh, shardings)
        state = dataclasses.replace(state, **{name: known})
    if "fp8" in arrays:
        return stage, dataclasses.replace(state, histories=arrays["fp8"]), False
    state = enter_policy(state, stage.state, frozenset())
    return stage, state, bool(leaves_by_path(state.histories))


def checkpoint_items(state: TrainState) -> dict[str, Any]:
    """The state as checkpoint items: histories apart, since a change of precision drops them."""
    return {
        "state": {
            "step": state.step, "params": state.params, "opt_state": state.opt_state,
            "key": state.key,
        },
        "fp8": state.histories,
        "seen": state.seen,
        "gnmr": state.gnmr,
    }  # fmt: skip
