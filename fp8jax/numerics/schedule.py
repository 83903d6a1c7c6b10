"""Precision schedules: which policy a run trains with, and from when.

A `PrecisionSchedule` is a list of (fraction of training, policy). In the FP4 paper's
target-precision stage (arXiv 2502.11458), the last part of training runs in high precision:
((0.0, "fp4_mixed"), (1 - f, "bf16")). The paper does not state f; 0.05 to 0.1 is usual.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from fp8jax.lookup import brief
from fp8jax.numerics.names import as_policy
from fp8jax.numerics.policy import Policy


@dataclasses.dataclass(frozen=True)
class PrecisionSchedule:
    """The policies of a run, in the order in which they apply.

    Attributes:
      stages: (fraction of training after which the stage begins, policy); the first begins at 0.0.
        The constructor also accepts names of policies and resolves them.

    Raises:
      ValueError: if the fractions do not begin at 0.0, do not increase, or reach 1; for unknown
        names.

    Example:
      >>> schedule = fp8jax.PrecisionSchedule(((0.0, "fp4_mixed"), (0.9, "bf16")))
      >>> schedule.begins(1000)
      (0, 900)
      >>> schedule.policy_of(900, 1000).name, schedule.policy_of(901, 1000).name
      ('fp4_mixed', 'bf16')
    """

    stages: tuple[tuple[int | float, str | Policy], ...]

    def __post_init__(self):
        if not isinstance(self.stages, tuple | list):
            raise TypeError(
                'a precision schedule is a tuple of stages, such as ((0.0, "fp4_mixed"), (0.9,'
                f' "bf16")), got {brief(self.stages)}'
            )
        for stage in self.stages:
            _check_stage("a precision schedule", stage)
        stages = tuple((float(begin), as_policy(policy)) for begin, policy in self.stages)
        object.__setattr__(self, "stages", stages)
        begins = [begin for begin, _ in stages]
        if not begins or begins[0] != 0.0:
            raise ValueError(f"a precision schedule must begin at 0.0, got {begins}")
        if begins != sorted(set(begins)) or not begins[-1] < 1:  # `not <` also rejects NaN
            raise ValueError(
                "the fractions of a precision schedule must increase and stay below 1,"
                f" got {begins}"
            )

    @property
    def policies(self) -> tuple[Policy, ...]:
        """The policy of each stage."""
        return tuple(as_policy(policy) for _, policy in self.stages)

    def begins(self, num_steps: int) -> tuple[int, ...]:
        """Returns how many steps are finished when each stage begins.

        Raises ValueError if a stage gets no step.
        """
        begins = tuple(round(begin * num_steps) for begin, _ in self.stages)
        if len(set(begins)) < len(begins) or begins[-1] >= num_steps:
            raise ValueError(
                f"precision schedule: a stage gets none of the {num_steps} steps: the stages begin"
                f" at {begins}"
            )
        return begins

    def policy_of(self, step: int, num_steps: int) -> Policy:
        """Returns the policy of step `step`, counted from 1."""
        begun = [begin < step for begin in self.begins(num_steps)]
        return self.policies[max(sum(begun), 1) - 1]


def _check_stage(owner: str, stage: Any) -> None:
    """Raises ValueError unless `stage` is a pair (fraction of training, policy)."""
    match stage:
        case (int() | float(), str() | Policy()):
            return
    raise ValueError(
        f"{owner}: {brief(stage)} is not a pair (fraction of training, policy); write a single"
        ' stage as ((0.9, "bf16"),), with quotes'
    )


def as_schedule(precision: str, schedule: Iterable[Any]) -> PrecisionSchedule:
    """Returns the schedule that a config's keys `precision` and `precision_schedule` describe.

    Args:
      precision: the policy at the start.
      schedule: pairs (fraction of training, policy); the stage at 0.0 may be left out.

    Raises:
      ValueError: for an entry that is not such a pair, and if `precision` and the stage at 0.0 are
        different policies.
    """
    schedule = tuple(schedule)
    for stage in schedule:
        _check_stage(f"precision_schedule={schedule}", stage)
    stages = tuple((float(begin), policy) for begin, policy in schedule)
    if not stages or stages[0][0] > 0:
        stages = ((0.0, precision), *stages)
    if as_policy(stages[0][1]) != as_policy(precision):
        raise ValueError(
            f"{precision=} contradicts the first stage of precision_schedule={stages}: change both,"
            " or leave out the stage at 0.0"
        )
    return PrecisionSchedule(stages)
