"""TODO docstring."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from fp8jax.numerics.policy import Policy
from fp8jax.numerics.policy_options import as_policy

# Schedules ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PrecisionSchedule:
    """The policies of a run, one after the other.

    Attributes:
      stages: (fraction of training at which it begins, policy or its name), the first at 0.0.
        Names are resolved.
    """

    stages: tuple[tuple[int | float, str | Policy], ...]

    def __post_init__(self):
        stages = tuple((float(begin), as_policy(policy)) for begin, policy in self.stages)
        object.__setattr__(self, "stages", stages)
        begins = [begin for begin, _ in stages]
        if not begins or begins[0] != 0.0:
            raise ValueError(f"a precision schedule begins at 0.0, got {begins}")
        if begins != sorted(set(begins)) or not begins[-1] < 1:  # NaN is not
            raise ValueError(
                f"a precision schedule's fractions of training grow and stay below 1, got {begins}"
            )

    @property
    def policies(self) -> tuple[Policy, ...]:
        return tuple(as_policy(policy) for _, policy in self.stages)

    def begins(self, num_steps: int) -> tuple[int, ...]:
        """How many steps are finished when each stage begins. Raises ValueError for a stage
        without a step."""
        begins = tuple(round(begin * num_steps) for begin, _ in self.stages)
        if len(set(begins)) < len(begins) or begins[-1] >= num_steps:
            raise ValueError(
                f"precision schedule: of {num_steps} steps, some stage gets none: they begin at"
                f" {begins}"
            )
        return begins

    def policy_of(self, step: int, num_steps: int) -> Policy:
        """The policy of step `step`, counted from 1."""
        begun = [begin < step for begin in self.begins(num_steps)]
        return self.policies[max(sum(begun), 1) - 1]


def as_schedule(precision: str, schedule: Iterable[Any]) -> PrecisionSchedule:
    """The schedule of a config's keys `precision` and `precision_schedule`: the first is the
    policy at the start, the second the stages, pairs of (fraction of training, policy), with or
    without the one at 0.0.

    Raises ValueError for what is no such pair, and where the two name two policies for the start.
    """
    schedule = tuple(schedule)
    for stage in schedule:
        match stage:
            case (int() | float(), str() | Policy()):
                continue
        raise ValueError(
            f"precision_schedule={schedule}: {stage!r} is no pair of a fraction of training and a"
            ' policy; one stage is ((0.9, "bf16"),)'
        )
    stages = tuple((float(begin), policy) for begin, policy in schedule)
    if not stages or stages[0][0] > 0:
        stages = ((0.0, precision), *stages)
    if as_policy(stages[0][1]) != as_policy(precision):
        raise ValueError(
            f"{precision=} contradicts the first stage of precision_schedule={stages}: change both,"
            " or leave out the stage at 0.0"
        )
    return PrecisionSchedule(stages)
