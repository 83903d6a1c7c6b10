"""Generates text from a model, one token after the other.

`generate` runs the whole row through the model for every new token. That is slow, quadratic in the
length, but simple: it uses the forward pass of training, so no second definition of attention can
disagree with it. It is meant for samples during training.

The positions that have no token yet are filled with zeros. Attention is causal, so they change
nothing, with one exception: recipes that scale a whole tensor by its current amax include them.
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
    """Returns the prompt and `num_tokens` new tokens, int32 [L + num_tokens]. Call it in `jax.jit`.

    Args:
      variables: parameters, and amax histories if the policy has delayed scaling; not updated.
      prompt_L: at least one token, such as BOS.
      num_tokens: number of new tokens.
      temperature: logits are divided by it; 0 selects the most likely token.
      num_words: only ids below this one are drawn, since a model's vocabulary may be padded.
      key: random key of the draws, and of policies that round stochastically.

    Raises:
      ValueError: the prompt is empty, or `num_tokens` or `temperature` is negative.
    """
    if prompt_L.size == 0:
        raise ValueError("the prompt is empty: start it with BOS")
    if num_tokens < 0 or temperature < 0:
        raise ValueError(f"{num_tokens=} and {temperature=} must not be negative")
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
    """Draws a token id from softmax(logits / temperature)."""
    if temperature == 0:
        return jnp.argmax(logits_V).astype(jnp.int32)
    # Folded once more, since the model uses the key itself.
    key = jax.random.fold_in(key, 1)
    return jax.random.categorical(key, logits_V / temperature).astype(jnp.int32)
