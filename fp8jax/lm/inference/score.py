"""The likelihood of given text: what perplexity and multiple-choice tasks are made of."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from fp8jax.lm.model.cache import empty_cache
from fp8jax.lm.model.chunked_loss import chunk_length, join_chunks, split_chunks, token_losses
from fp8jax.lm.model.prepare import inference_model
from fp8jax.lm.model.transformer import Transformer


class Scores(NamedTuple):
    """What a model says of each token, given those before it in its segment.

    The first token of a segment has no tokens before it, and padding has no token: 0 and False.

    Attributes:
      log_p_BL: float32, the logarithm of its probability, in nats.
      best_BL: whether no other token is more likely.
    """

    log_p_BL: Float[Array, "B L"]
    best_BL: Bool[Array, "B L"]


def log_likelihoods(
    model: Transformer,
    variables: Any,
    tokens_BL: Int[Array, "B L"],
    segments_BL: Int[Array, "B L"],
    *,
    key: Shaped[Array, "..."] | None = None,
    cache: str | None = None,
) -> Float[Array, "B L"]:
    """Returns the logarithm of each token's probability, given those before it in its segment.

    Call it in `jax.jit`. Recipes with one current scale for a whole tensor take it over all tokens
    of all rows, those that come later included, but not over padding.

    Args:
      model: the model that scores.
      variables: parameters, trained or frozen, and amax histories if the policy has any.
      tokens_BL: ids.
      segments_BL: number of each token's document within its row, from 1, consecutive; 0 is
        padding.
      key: random key, for policies that round stochastically.
      cache: None to attend as in training; a key of `CACHES` for keys and values as decoding stores
        them. Each row is then one document, with padding on the right.

    Returns:
      Float32, in nats; 0 for padding, and for the first token of a document.

    Raises:
      ValueError: the policy or the cache does not fit the model, or the key is missing.

    Example:
      >>> from fp8jax.lm.inference.score import log_likelihoods
      >>> config = dataclasses.replace(fp8jax.MODELS["llama_tiny"], n_layers=1)
      >>> model = fp8jax.Transformer(config, "fp8_block")
      >>> tokens = jnp.arange(8)[None]
      >>> ones = jnp.ones_like(tokens)
      >>> variables = jax.jit(model.init)(jax.random.key(0), tokens, ones, tokens)
      >>> scores = jax.jit(log_likelihoods, static_argnums=0)(model, variables, tokens, ones)
      >>> scores.shape, scores[0, 0].item(), bool((scores[0, 1:] < 0).all())
      ((1, 8), 0.0, True)
    """
    return score(model, variables, tokens_BL, segments_BL, key=key, cache=cache).log_p_BL


def score(
    model: Transformer,
    variables: Any,
    tokens_BL: Int[Array, "B L"],
    segments_BL: Int[Array, "B L"],
    *,
    key: Shaped[Array, "..."] | None = None,
    cache: str | None = None,
) -> Scores:
    """Returns the scores of all tokens, from one pass over the rows. Call it in `jax.jit`.

    See `score_targets`, also for what recipes see, and for the other arguments.

    Args:
      cache: None to attend as in training. A key of `CACHES` to attend to keys and values that are
        stored as decoding stores them: each row is then one document, with padding on the right.
    """
    inside_BL = jnp.pad(
        (segments_BL[:, 1:] == segments_BL[:, :-1]) & (segments_BL[:, 1:] > 0), ((0, 0), (1, 0))
    )
    at_BL = jnp.broadcast_to(jnp.arange(tokens_BL.shape[1], dtype=jnp.int32), tokens_BL.shape)
    begins_BL: Any = 0 if cache else lax.cummax(jnp.where(inside_BL, 0, at_BL), axis=1)
    found = score_targets(
        model,
        variables,
        tokens_BL,
        jnp.roll(tokens_BL, -1, axis=1),
        segments_BL,
        at_BL - begins_BL,
        key=key,
        cache=cache,
    )
    log_p_BL, best_BL = (jnp.roll(x, 1, axis=1) for x in found)
    return Scores(jnp.where(inside_BL, log_p_BL, 0.0), best_BL & inside_BL)


def score_targets(
    model: Transformer,
    variables: Any,
    tokens_BL: Int[Array, "B L"],
    targets_BL: Int[Array, "B L"],
    segments_BL: Int[Array, "B L"],
    positions_BL: Int[Array, "B L"],
    *,
    key: Shaped[Array, "..."] | None = None,
    cache: str | None = None,
) -> Scores:
    """Returns the scores of the tokens that follow each token. Call it in `jax.jit`.

    Unlike `score` it also scores what follows the last token of a row, as training does.

    Logits of more than 2 GiB are computed a chunk of positions at a time, unless a recipe quantizes
    the head. Recipes with one current scale for a whole tensor take it over all tokens of all rows,
    those that come later included, but not over padding.

    Args:
      variables: parameters, and amax histories if the policy has delayed scaling.
      targets_BL: the id that follows each token; any id where none does.
      segments_BL: number of each token's document within its row, from 1, consecutive; 0 is
        padding.
      positions_BL: of each token in its document.
      key: random key, for policies that round stochastically.
      cache: as in `score`.
    """
    model = inference_model(model)
    batch, length = tokens_BL.shape
    positions = chunk_length(batch, length, model.config.vocab_size)
    whole = bool(model.resolved_policy.recipe("lm_head").casts) or positions == length
    arguments = tokens_BL, segments_BL, positions_BL, key
    if cache is None:
        out: Any = model.apply(variables, *arguments, head=whole)
    else:
        # Not fresh: the tokens attend to what the cache holds of them.
        slots: Any = empty_cache(model.config, batch, length, cache)
        slots = dataclasses.replace(slots, fresh=False)
        scored: Any = model.apply(variables, *arguments, head=whole, cache=slots)
        out, _ = scored
    if whole:
        return Scores(*_judged(out, targets_BL))
    x_BLD, w_DV = out
    return Scores(*_judged_in_chunks(x_BLD, w_DV, targets_BL, positions))


def _judged(logits_BLV: Array, targets_BL: Array) -> tuple[Array, Array]:
    """Returns the log-likelihood of each target, and whether it has the largest logit."""
    of_target_BL = jnp.take_along_axis(logits_BLV, targets_BL[..., None], axis=-1)[..., 0]
    return -token_losses(logits_BLV, targets_BL), of_target_BL >= jnp.max(logits_BLV, axis=-1)


def _judged_in_chunks(x_BLD, w_DV, targets_BL, positions: int) -> tuple[Array, Array]:
    """Returns `_judged` of the logits x w, of which one chunk of positions exists at a time."""
    w_DV = w_DV.astype(x_BLD.dtype)
    precision = lax.Precision.HIGHEST if x_BLD.dtype == jnp.float32 else None

    def chunk(scanned):
        x_BCD, targets_BC = scanned
        logits_BCV = jnp.einsum(
            "bcd,dv->bcv", x_BCD, w_DV, preferred_element_type=jnp.float32, precision=precision
        )
        return _judged(logits_BCV, targets_BC)

    parts = lax.map(chunk, (split_chunks(x_BLD, positions), split_chunks(targets_BL, positions)))
    log_p_BL, best_BL = (join_chunks(part, targets_BL.shape[1]) for part in parts)
    return log_p_BL, best_BL
