"""Text from a model, one token after the other.

`generate` runs the whole row through the model for every new token. That is slow, as the square of
the length, and as simple as it gets: the training program's own forward pass, with no second
definition of attention that could disagree with it. It serves samples during training.

A row is filled up with zeros beyond what exists so far. Attention is causal, so that they change
nothing, but for recipes that scale a whole tensor by its current amax: there the amax covers them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from fp8jax.model.transformer import Transformer


def generate(
    model: Transformer,
    variables: Any,
    prompt_L: Int[Array, " L"],
    *,
    num_tokens: int,
    temperature: float,
    num_words: int,
    key: Shaped[Array, "..."],
) -> Int[Array, " total"]:
    """The prompt and `num_tokens` more, int32 [L + num_tokens]; to be jitted.

    Args:
      variables: parameters, and amax histories if the policy delays; not updated.
      prompt_L: at least one token, such as BOS.
      temperature: logits are divided by it; 0 takes the most likely token.
      num_words: tokens from this id on are never drawn: a model's vocabulary may be padded.
      key: of the draws, and of a policy that rounds stochastically.

    Raises:
      ValueError: an empty prompt, or a negative number of tokens or temperature.
    """
    if prompt_L.size == 0:
        raise ValueError("the prompt is empty: begin with BOS")
    if num_tokens < 0 or temperature < 0:
        raise ValueError(f"must not be negative: {num_tokens=}, {temperature=}")
    begin, total = len(prompt_L), len(prompt_L) + num_tokens
    segments_1L = jnp.ones((1, total), jnp.int32)
    positions_1L = jnp.arange(total, dtype=jnp.int32)[None]

    def add_one(at: Array, tokens_L: Array) -> Array:
        here = jax.random.fold_in(key, at)
        logits_1LV: Any = model.apply(variables, tokens_L[None], segments_1L, positions_1L, here)
        token = _draw(logits_1LV[0, at - 1, :num_words], temperature, here)
        return tokens_L.at[at].set(token)

    tokens_L = jnp.zeros(total, jnp.int32).at[:begin].set(prompt_L)
    return lax.fori_loop(begin, total, add_one, tokens_L)


def _draw(logits_V: Float[Array, " V"], temperature: float, key) -> Int[Array, ""]:
    if temperature == 0:
        return jnp.argmax(logits_V).astype(jnp.int32)
    # Folded once more: the key itself is the model's.
    key = jax.random.fold_in(key, 1)
    return jax.random.categorical(key, logits_V / temperature).astype(jnp.int32)
