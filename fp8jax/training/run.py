"""A config resolved to objects: model, mesh, optimizer and the compiled programs of each stage.

A precision schedule is one `Run` a stage, all made at the start, so that a later one that cannot
run is refused before anything is trained. Each compiles its own programs of training, validation
and samples, when it first calls them.

The first step after the start of a delayed policy runs a second program, made with
`policy.seeding()` (numerics/policy.py).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from fp8jax.data.byte_tokenizer import Tokenizer
from fp8jax.data.loader import Batch
from fp8jax.model.transformer import Transformer
from fp8jax.numerics.policy import Policy
from fp8jax.numerics.policy_options import as_policy
from fp8jax.stability.ladder import Ladder
from fp8jax.training.policy_switch import leaves_by_path
from fp8jax.training.step import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A config resolved to objects; the config itself goes no further. All of it is for the first
    stage of the precision schedule; `later` are the other stages."""

    model: Transformer
    mesh: Mesh
    tokenizer: Tokenizer
    state: TrainState  # abstract, with shardings
    initialize: Callable[[], TrainState]
    seed_step: Callable[[TrainState, Batch], tuple[TrainState, dict[str, Array]]]
    step: Callable[[TrainState, Batch], tuple[TrainState, dict[str, Array]]]
    repeat_step: Callable[[TrainState, Batch], tuple[TrainState, dict[str, Array]]]
    eval_step: Callable[[TrainState, Batch], dict[str, Array]]
    sample: Callable[[TrainState], Array] | None  # tokens of a generated text, if asked for
    batch_sharding: NamedSharding
    kept: frozenset[str]  # names of the histories that the stage before hands on
    gains: str  # of the linears at their sizes, as predicted; "" if nothing is quantized
    ladder: Ladder  # what is done about a step that was rejected
    remembered: Callable[[], dict[str, Any]]  # what detector and GNMR know before the first step
    later: tuple[tuple[int, "Run"], ...] = ()  # finished steps when it begins, and the stage

    @property
    def policy(self) -> Policy:
        return as_policy(self.model.policy)

    @property
    def high(self) -> Policy | None:
        """The policy of layers that are promoted, None where that never happens."""
        return None if self.model.high is None else as_policy(self.model.high)

    @property
    def seeds(self) -> bool:
        """Whether the first step has new histories to seed."""
        return bool(leaves_by_path(self.state.histories).keys() - self.kept)

    @property
    def policies(self) -> str:
        """For people: the policy's name, and those of the later stages."""
        later = [f", after step {begin} {stage.policy.name}" for begin, stage in self.later]
        return self.policy.name + "".join(later)

    def at(self, step: int) -> "Run":
        """The stage that trains step `step`, counted from 1."""
        return [self, *(stage for begin, stage in self.later if begin < step)][-1]
