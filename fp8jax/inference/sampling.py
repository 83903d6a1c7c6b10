"""How the next token is chosen from the logits, on the device.

The draws of a request depend on its own seed and on its own logits, so they do not change with the
other requests of its batch.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Which tokens may be drawn, and how likely they are.

    The steps have the order of the fields: logits are divided by the temperature, then all but the
    `top_k` most likely tokens are dropped, then all but the most likely ones that together have at
    least the probability `top_p`. Of equally likely tokens, those with lower ids come first.

    Attributes:
      temperature: 0 takes the most likely token.
      top_k: at least 1; None for all tokens.
      top_p: above 0 and up to 1; None for all tokens.

    Raises:
      ValueError: a number is out of its range, or has no effect beside temperature=0.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self):
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature} must be finite and not negative")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")
        for name in ("top_k", "top_p"):
            if self.temperature == 0 and getattr(self, name) is not None:
                raise ValueError(
                    f"temperature=0 takes the most likely token, so {name}="
                    f"{getattr(self, name)} has no effect: drop one of them"
                )

    def rule(self) -> "Rule":
        """Returns the same as arguments of a compiled program."""
        if self.temperature == 0:
            return Rule(temperature=None, top_p=None, top_k=None)
        top_p = None if self.top_p in (None, 1.0) else jnp.float32(self.top_p)
        return Rule(temperature=jnp.float32(self.temperature), top_p=top_p, top_k=self.top_k)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """A `Sampling` whose floats are arrays: a program is compiled once for all their values.

    Attributes:
      temperature: None for 0.
      top_p: None for 1.
      top_k: static.
    """

    temperature: Float[Array, ""] | None
    top_p: Float[Array, ""] | None
    top_k: int | None = dataclasses.field(metadata={"static": True})


def draw(
    rule: Rule, logits_BV: Float[Array, "B V"], keys_B: Shaped[Array, " B"]
) -> Int[Array, " B"]:
    """Returns one token id for each row, int32, drawn with the row's own key."""
    if rule.temperature is None:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    logits_BV, ids_BV = logits_BV / rule.temperature, None
    if rule.top_k is not None or rule.top_p is not None:
        vocab = logits_BV.shape[-1]
        # The most likely first; of equal ones, the lower id first.
        logits_BV, ids_BV = lax.top_k(logits_BV, min(rule.top_k or vocab, vocab))
    if rule.top_p is not None:
        p_BV = jax.nn.softmax(logits_BV, axis=-1)
        before_BV = jnp.cumsum(p_BV, axis=-1) - p_BV
        # The first one stays, whatever the rounding of the sum.
        dropped_BV = (before_BV >= rule.top_p).at[:, 0].set(False)
        logits_BV = jnp.where(dropped_BV, -jnp.inf, logits_BV)
    chosen_B: Any = jax.vmap(jax.random.categorical)(keys_B, logits_BV)
    if ids_BV is not None:
        chosen_B = jnp.take_along_axis(ids_BV, chosen_B[:, None], axis=1)[:, 0]
    return chosen_B.astype(jnp.int32)
