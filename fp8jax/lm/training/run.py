"""A run, resolved from its config: objects and compiled programs, nothing allocated.

A precision schedule gives a run one `Stage` for each of its policies. All stages are built at the
start, so that a later one that cannot run is refused before anything is trained. `build.py` makes
a `Run` from a config, and nothing after it reads the config.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from fp8jax.analysis.gemms import Gemm, find_gemms
from fp8jax.device import xla
from fp8jax.lm.data.byte_tokenizer import Tokenizer
from fp8jax.lm.data.loader import Batch
from fp8jax.lm.interop.initial_weights import InitialWeights
from fp8jax.lm.model.promotion import Promoter, Promotion, promoted_linears
from fp8jax.lm.model.transformer import Transformer
from fp8jax.lm.stability.loss_scaling import LossScaling
from fp8jax.lm.training.ladder import Ladder
from fp8jax.lm.training.layer_choice import LayerChoice
from fp8jax.lm.training.optional_state import OptionalState
from fp8jax.lm.training.policy_switch import leaves_by_path
from fp8jax.lm.training.settings import Settings
from fp8jax.lm.training.step import StepNumbers, TrainState, promotion_of
from fp8jax.numerics.names import as_policy
from fp8jax.numerics.policy import Policy

Step = Callable[[TrainState, Batch, StepNumbers], tuple[TrainState, dict[str, Array]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """The jitted functions of one stage. Each compiles when it is first called.

    A training step donates its state, so the numbers of the step are asked for before it:

        state, metrics = programs.step(state, batch, programs.numbers(state))

    Attributes:
      initialize: () -> the state of step 0, from random numbers or from the initial weights.
      numbers: state -> the learning rate and the other numbers of the step that it begins. All
        stages share it. The host does not wait for it: what it reads of the state is on the device,
        and right after rejected steps.
      seed_step: the first step of a delayed policy; takes current amaxes and fills the histories.
      step: every other step.
      repeat_step: a rejected step once more, in the policy `recovery.precision`.
      eval_step: (state, batch) -> sums over the batch, see `step.eval_step`.
      telemetry: (state, batch) -> statistics of every cast in that step, and which layers ran in
        another policy (`step.telemetry_step`); seed_telemetry is that of a seeding step. None
        without telemetry.
      sample: state -> tokens of a generated text; None if the config asks for no samples.
    """

    initialize: Callable[[], TrainState]
    numbers: Callable[[TrainState], StepNumbers]
    seed_step: Step
    step: Step
    repeat_step: Step
    eval_step: Callable[[TrainState, Batch], dict[str, Array]]
    telemetry: Callable[[TrainState, Batch], Any] | None
    seed_telemetry: Callable[[TrainState, Batch], Any] | None
    sample: Callable[[TrainState], Array] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """What trains under one policy of the precision schedule.

    Attributes:
      begins: finished steps when it begins; 0 for the first stage.
      model: with the stage's policy.
      state: abstract arrays with shardings, in the place of the state's arrays.
      programs: its compiled functions.
      carried: names of the amax histories that it takes over from the stage before.
      promoter: chooses layers that run in another policy; None for none.
    """

    begins: int
    model: Transformer
    state: TrainState
    programs: Programs
    carried: frozenset[str]
    promoter: Promoter | None

    @property
    def policy(self) -> Policy:
        return self.model.resolved_policy

    @property
    def promoted_linears(self) -> tuple[str, ...]:
        """The paths of the linears that are promoted one by one."""
        return promoted_linears(self.promoter, self.model.config)

    def promotion(self, state: TrainState) -> Promotion | None:
        """What runs in another policy in the next step."""
        return promotion_of(self.promoter, self.model, state)

    def gemms(self, text: str) -> list[Gemm]:
        """The GEMMs of the stage's compiled training step, from its `as_text()`."""
        return find_gemms(
            text,
            self.policy,
            self.model.config.linears,
            backend=self.model.backend,
            high=None if self.promoter is None else as_policy(self.promoter.precision),
        )

    @property
    def seeds(self) -> bool:
        """Whether its first step has new histories to seed."""
        return bool(leaves_by_path(self.state.histories).keys() - self.carried)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """All stages of a run, and what they share.

    Attributes:
      settings: the config's numbers.
      stages: in the order of the precision schedule, at least one.
      mesh: of all devices.
      tokenizer: of the run's text.
      batch_sharding: of every array of a batch, [B, L].
      ladder: what is tried on a rejected step.
      scaling: of the loss in the backward pass; None for none.
      optional_state: the parts of the train state that only some configs have.
      initial_weights: what step 0 starts from; None for random numbers.
      layers: how its layers run.
      with_layers: (remat, unroll) -> the same run with these.
    """

    settings: Settings
    stages: tuple[Stage, ...]
    mesh: Mesh
    tokenizer: Tokenizer
    batch_sharding: NamedSharding
    ladder: Ladder
    scaling: LossScaling | None
    optional_state: tuple[OptionalState, ...]
    initial_weights: InitialWeights | None
    layers: LayerChoice
    with_layers: Callable[[str, int], "Run"]

    def smaller(self, programs: Iterable[Any]) -> "Run | None":
        """The run to go on with if one of its compiled programs takes more memory than there is.

        Its state is the same. None if all fit, or if nothing smaller is left to try.
        """
        fallback = self.layers.fallback(max(map(xla.program_bytes, programs)))
        return None if fallback is None else self.with_layers(*fallback)

    @property
    def policies(self) -> str:
        """For people: the first stage's policy, and those of later stages with their steps."""
        first, *later = self.stages
        more = [f", after step {stage.begins} {stage.policy.name}" for stage in later]
        return first.policy.name + "".join(more)

    def at(self, step: int) -> Stage:
        """The stage that trains step `step`, counted from 1."""
        return [stage for stage in self.stages if stage.begins < max(step, 1)][-1]
