"""The parts of the train state that only some configs have, each declared in one place.

A part is a field of `TrainState` and an item of a checkpoint. A resumed run
reads it where `key` gives the same for the config that wrote the checkpoint and for its own;
otherwise the part starts anew. So a new part needs one entry, and no special case in resume.py.

    histories   amax histories of a delayed policy; they belong to that policy
    spikes      the window of the spike detector (lm/stability/spikes.py)
    promoter    what decides which layers are promoted (lm/model/promotion.py)
    loss_scale  a dynamic loss scale and its count (lm/stability/loss_scaling.py)
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from fp8jax.numerics.policy import Policy
from fp8jax.numerics.schedule import as_schedule

Record = Mapping[str, Any]  # a config as JSON has it: `Settings.record`


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptionalState:
    """One part.

    Attributes:
      field: of `TrainState`.
      item: of a checkpoint.
      key: (config as JSON, finished steps) -> what the part depends on.
      fresh: () -> the part before the first step, {} where the config does not ask for it; None for
        amax histories, which are created with the model.
    """

    field: str
    item: str
    key: Callable[[Record, int], Any]
    fresh: Callable[[], Any] | None


def histories_key(config: Record, step: int) -> Any:
    """The policy that trained step `step`, and whether the gate of old runs left linears of it in
    BF16 (`REMOVED`, lm/records/config_keys.py)."""
    return _policy_at(config, step), "size_gate" in config


def spikes_key(config: Record, step: int) -> Any:
    """The window has as many entries as `recovery.spike_window` says."""
    return config["recovery"]["spike_window"]


def loss_scale_key(config: Record, step: int) -> Any:
    """Whether there is a dynamic scale, which goes on under another window."""
    return config["optimizer"]["loss_scale"] == "dynamic"


def _policy_at(config: Record, step: int) -> Policy | str:
    """The policy that trains step `step`; the error's text where a checkpoint names a policy that
    this version does not have, which equals no policy."""
    try:
        schedule = as_schedule(config["precision"], config["precision_schedule"])
        return schedule.policy_of(step, config["num_steps"])
    except ValueError as error:
        return str(error)
