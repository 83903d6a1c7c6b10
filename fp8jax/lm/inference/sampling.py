"""How the next token is chosen from the logits, on the device.

The draws of a request depend on its own seed and on its own logits, so they do not change with the
other requests of its batch.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

# Of temperatures: a float32 logit up to 1e8, divided by the least one, stays finite.
LEAST, MOST = 1e-30, 1e30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Which tokens may be drawn, and how likely they are.

    The steps have the order of the fields: logits are divided by the temperature, then all but the
    `top_k` most likely tokens are dropped, then all but the most likely ones that together have at
    least the probability `top_p`. Of equally likely tokens, those with lower ids come first.

    Attributes:
      temperature: from `LEAST` to `MOST`; 0 takes the most likely token.
      top_k: at least 1; None for all tokens.
      top_p: above 0 and up to 1; None for all tokens.

    Raises:
      ValueError: a number is out of its range, or has no effect beside temperature=0.

    Example:
      >>> from fp8jax.lm.inference.sampling import Sampling
      >>> Sampling(temperature=0.8, top_p=0.95)
      Sampling(temperature=0.8, top_k=None, top_p=0.95)
      >>> Sampling(temperature=0, top_k=40)
      Traceback (most recent call last):
          ...
      ValueError: temperature=0 takes the most likely token, so top_k=40 has no effect: ...
    """

    temperature: int | float = 1.0
    top_k: int | None = None
    top_p: int | float | None = None

    def __post_init__(self):
        if self.temperature != 0 and not LEAST <= self.temperature <= MOST:
            raise ValueError(
                f"temperature={self.temperature} must be 0, or between {LEAST:g} and {MOST:g}"
            )
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
      temperature: float32 []; None for 0.
      top_p: float32 []; None for 1.
      top_k: static.
    """

    temperature: Any
    top_p: Any
    top_k: int | None = dataclasses.field(metadata={"static": True})


def draw(
    rule: Rule, logits_BV: Float[Array, "B V"], keys_B: Shaped[Array, " B"]
) -> Int[Array, " B"]:
    """Returns one token id for each row, int32, drawn with the row's own key."""
    if rule.temperature is None:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    logits_BV = _kept(rule, logits_BV / rule.temperature)
    chosen_B: Any = jax.vmap(jax.random.categorical)(keys_B, logits_BV)
    return chosen_B.astype(jnp.int32)


def _kept(rule: Rule, logits_BV: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """Returns the logits with -inf for the tokens that `top_k` and `top_p` drop.

    The tokens keep their places. In the order of their logits, rounding that exchanges two of them
    would give each the other one's noise.
    """
    if rule.top_k is None and rule.top_p is None:
        return logits_BV
    vocab = logits_BV.shape[-1]
    # The most likely first; of equal ones, the lower id first.
    sorted_BK, ids_BK = lax.top_k(logits_BV, min(rule.top_k or vocab, vocab))
    last_B1 = jnp.full((len(logits_BV), 1), sorted_BK.shape[1] - 1)
    if rule.top_p is not None:
        p_BK = jax.nn.softmax(sorted_BK, axis=-1)
        before_BK = jnp.cumsum(p_BK, axis=-1) - p_BK
        # The first one stays, whatever the rounding of the sum.
        last_B1 = jnp.maximum(jnp.sum(before_BK < rule.top_p, axis=-1, keepdims=True) - 1, 0)
    logit_B1, id_B1 = (jnp.take_along_axis(x, last_B1, axis=1) for x in (sorted_BK, ids_BK))
    kept_BV = (logits_BV > logit_B1) | (
        (logits_BV == logit_B1) & (jnp.arange(vocab)[None] <= id_B1)
    )
    return jnp.where(kept_BV, logits_BV, -jnp.inf)
