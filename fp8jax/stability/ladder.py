"""TODO docstring."""

import dataclasses
from collections.abc import Collection, Mapping

# What is done about a rejected step ---------------------------------------------------------------

RUNGS = {
    "repeat": "the same batch again, in the high-precision policy",
    "skip": "on with the next batch",
    "rollback": "back to the last checkpoint, and on with the next batch",
}


STOP = "stop"


@dataclasses.dataclass(frozen=True)
class Ladder:
    """What is tried on a rejected step, in this order, each so many times a run. Then it stops.

    Attributes:
      rungs: (key of `RUNGS`, budget).
    """

    rungs: tuple[tuple[str, int], ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Ladder":
        """Of "repeat:5,skip:50", "" for none.

        Raises ValueError for unknown or repeated rungs and for one without a positive budget.
        """
        rungs = []
        for part in text.split(",") if text else ():
            name, colon, budget = part.strip().partition(":")
            if name not in RUNGS:
                raise ValueError(f"recovery={text!r}: {name!r} is none of {', '.join(RUNGS)}")
            if not (colon and budget.isdecimal() and int(budget)):
                raise ValueError(f"recovery={text!r}: {name} needs a budget, as in {name}:10")
            rungs.append((name, int(budget)))
        names = [name for name, _ in rungs]
        if len(set(names)) < len(names):
            raise ValueError(f"recovery={text!r} names a rung twice")
        return cls(tuple(rungs))

    @property
    def waits(self) -> bool:
        """Whether the loop has to see a step's verdict before it starts the next."""
        return any(name != "skip" for name, _ in self.rungs)

    def next(self, spent: Mapping[str, int], tried: Collection[str]) -> str:
        """The first rung with budget left that was not tried on this step, or STOP."""
        left = (name for name, budget in self.rungs if spent[name] < budget and name not in tried)
        return next(left, STOP)
