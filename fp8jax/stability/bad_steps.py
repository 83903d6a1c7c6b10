"""What keeps a bad step from doing harm.

On the device, inside the compiled step, pure functions:

    is_finite, gate    a step whose loss or gradients are not finite changes nothing
    judge              that, and whether the loss is a spike among the last accepted ones

On the host, `Ladder`: which rung is tried next on a step that was rejected; the loop applies it.
And `growing`, which warns of what no single step shows.

**Spikes.** With the median m of the last accepted losses and their median distance d from it (MAD),
a loss is a spike above

    m + max(deviations * 1.4826 d, m / 50)

1.4826 d estimates a normal distribution's standard deviation. Mean and standard deviation were
rejected: one outlier among 64 raises both, and hides the next. A rejected loss never enters the
window, finite or not, so neither a NaN nor a spike of many steps moves the threshold. The price: a
loss that rises for good (other data) is rejected until the ladder's budget ends, and the run says
so. A window that spans a fast decline is wide, which makes the detector slow to cry early in a run;
and nothing is judged before half a window was accepted. m / 50: losses that hardly differ have no
spikes.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

ACCEPTED, SPIKE, NON_FINITE = range(3)  # verdicts


CAUSES = {SPIKE: "spike", NON_FINITE: "non_finite"}


_NORMAL = 1.4826  # standard deviations of a normal distribution, from its MAD


_SLACK = 1 / 50  # of the median: no spike below


def is_finite(loss: Float[Array, ""], grad_norm: Float[Array, ""]) -> Bool[Array, ""]:
    """Whether a step may be applied. The norm is over all gradients: one NaN among them shows."""
    return jnp.isfinite(loss) & jnp.isfinite(grad_norm)


def gate(accept: Bool[Array, ""], new: Any, old: Any) -> Any:
    """`new` if accepted, else `old`, leaf by leaf and bit for bit.

    Selected, never multiplied: 0 * NaN is NaN.
    """
    return jax.tree.map(lambda n, o: jnp.where(accept, n, o), new, old)


# Spikes -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpikeDetector:
    """Settings of `judge`.

    Attributes:
      window: accepted losses that a new one is compared with, at least 8.
      deviations: how many standard deviations above their median are a spike, positive.
    """

    window: int
    deviations: float

    def __post_init__(self):
        if self.window < 8:
            raise ValueError(f"spike_window={self.window} must be at least 8, or None")
        if not self.deviations > 0:  # NaN is not
            raise ValueError(f"spike_deviations={self.deviations} must be positive")

    def init(self) -> dict[str, Array]:
        """What `judge` remembers, before the first step."""
        return {"losses": jnp.full(self.window, jnp.nan), "accepted": jnp.zeros((), jnp.int32)}


def judge(
    detector: SpikeDetector,
    seen: Mapping[str, Array],
    loss: Float[Array, ""],
    grad_norm: Float[Array, ""],
) -> tuple[Int[Array, ""], dict[str, Array]]:
    """ACCEPTED, SPIKE or NON_FINITE, and what to remember: `seen` itself unless accepted."""
    losses, accepted = seen["losses"], seen["accepted"]
    median = jnp.nanmedian(losses)
    mad = jnp.nanmedian(jnp.abs(losses - median))
    limit = median + jnp.maximum(detector.deviations * _NORMAL * mad, _SLACK * jnp.abs(median))
    spike = (accepted >= detector.window // 2) & (loss > limit)
    verdict = jnp.where(is_finite(loss, grad_norm), jnp.where(spike, SPIKE, ACCEPTED), NON_FINITE)
    kept = {
        "losses": losses.at[accepted % detector.window].set(loss), "accepted": accepted + 1
    }  # fmt: skip
    return verdict, gate(verdict == ACCEPTED, kept, dict(seen))


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


# What grows for long ------------------------------------------------------------------------------

GROWTHS = 5  # validations in a row


_FACTOR = 4.0  # two binades


def growing(amaxes: Sequence[Sequence[float]]) -> list[int]:
    """Layers whose SwiGLU output grew at each of the last `GROWTHS` validations, and fourfold.

    Such growth precedes the divergence that FP8 training shows after 200 billion tokens, where two
    columns of gate and up align and a few channels become outliers (arXiv 2409.12517). Validation
    sees the same text each time, so that one value a layer and validation says it without noise.

    Args:
      amaxes: [validations, layers], the largest magnitudes, the oldest first.
    """
    last = amaxes[-GROWTHS - 1 :]
    if len(last) <= GROWTHS:
        return []
    layers = zip(*last, strict=True)
    return [
        layer
        for layer, seen in enumerate(layers)
        if all(a < b for a, b in zip(seen, seen[1:], strict=False)) and seen[-1] > _FACTOR * seen[0]
    ]
