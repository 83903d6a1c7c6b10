"""The ladder: decides on the host what the training loop does about a rejected step.

For each rejected step the loop tries the rungs of the ladder in their order. Each rung has a budget
for the whole run. When no rung is left, the run stops.
"""

import dataclasses
from collections.abc import Collection, Mapping

from fp8jax.lm.records.events import Event

RUNGS = {
    Event.REPEAT: "repeat the batch in the high-precision policy",
    Event.SKIP: "go on with the next batch",
    Event.ROLLBACK: "go back to the last checkpoint, then on with the next batch",
}

STOP = Event.STOP


@dataclasses.dataclass(frozen=True)
class Ladder:
    """The responses to rejected steps.

    Attributes:
      rungs: (key of `RUNGS`, how many times it may be used in a run) in the order of trying.
    """

    rungs: tuple[tuple[str, int], ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Ladder":
        """Parses, for example, "repeat:5,skip:50"; "" is a ladder without rungs.

        Raises:
          ValueError: a rung is unknown, is named twice or has no positive budget.
        """
        rungs = []
        for part in text.split(",") if text else ():
            name, colon, budget = part.strip().partition(":")
            if name not in RUNGS:
                raise ValueError(
                    f"recovery.ladder={text!r}: {name!r} is none of {', '.join(RUNGS)}"
                )
            if not (colon and budget.isdecimal() and int(budget)):
                raise ValueError(
                    f"recovery.ladder={text!r}: {name} needs a budget, as in {name}:10"
                )
            rungs.append((name, int(budget)))
        names = [name for name, _ in rungs]
        if len(set(names)) < len(names):
            raise ValueError(f"recovery.ladder={text!r} names a rung twice: give each rung once")
        return cls(tuple(rungs))

    @property
    def waits(self) -> bool:
        """Whether the loop must wait for the verdict on a step before it starts the next step."""
        return any(name != "skip" for name, _ in self.rungs)

    def next(self, spent: Mapping[str, int], tried: Collection[str]) -> str:
        """Returns the next rung for a rejected step, or STOP.

        Args:
          spent: rung -> how many times the run has used it.
          tried: the rungs that were already tried on this step.
        """
        left = (name for name, budget in self.rungs if spent[name] < budget and name not in tried)
        return next(left, STOP)
