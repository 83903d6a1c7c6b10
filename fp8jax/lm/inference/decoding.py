"""Prefill and decoding as pure functions, which generate.py and training's samples compile.

Legend: B requests, P positions of the padded prompts, S slots of the cache, V token ids.

`prefill` runs all prompts at once and draws the first new token of each request. `decode` then
draws many tokens in a loop on the device. A request ends with a stop id, or at its limit; from then
on it is padding.

Requests share a batch, and what couples them is the recipe alone: one current scale for a whole
tensor comes from all tokens of a step, in prefill of all prompts, also the tokens that come later.
Padding carries zeros into every linear, so it raises no amax. Delayed scaling reads its histories
and does not write them. Recipes with scales for each token, and BF16, do not couple requests.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from fp8jax.lm.inference.sampling import Rule, draw
from fp8jax.lm.model.cache import Caches, empty_cache
from fp8jax.lm.model.prepare import inference_model, prepare
from fp8jax.lm.model.transformer import Transformer

NO_TOKEN = -1  # fills arrays of tokens behind the last one

# A single row would be multiplied as a vector. CPUs sum its products in another order, so a request
# would not give the bits that it gives in a batch. On GPUs, XLA would convert the LM head to
# float32 in every step.
LEAST_ROWS = 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Requests:
    """What is decoded, as arrays. Whole numbers are int32.

    Attributes:
      keys_B: the random key of each request.
      limits_B: the most new tokens of each; 0 for rows that hold no request.
      stops: any number of ids that end a request; `NO_TOKEN` fills unused places.
      rule: of the draws.
      vocab_size: ids below this one may be drawn, since a model's vocabulary may be padded. Static.
    """

    keys_B: Any
    limits_B: Any
    stops: Any
    rule: Rule
    vocab_size: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding:
    """What is carried from token to token, as arrays. Whole numbers are int32.

    Attributes:
      cache: holds all tokens but the newest.
      newest_B: the newest token of each request.
      lengths_B: tokens in the cache.
      drawn_B: new tokens so far.
      active_B: bool, whether the request goes on.
      steps: [], passes through the model so far.
    """

    cache: Caches
    newest_B: Any
    lengths_B: Any
    drawn_B: Any
    active_B: Any
    steps: Any


def prefill(
    model: Transformer,
    variables: Any,
    cache: Caches,
    prompts_BP: Int[Array, "B P"],
    lengths_B: Int[Array, " B"],
    requests: Requests,
) -> Decoding:
    """Runs the prompts and draws the first new token of each request.

    Args:
      model: of `inference_model`.
      cache: fresh, with at least P slots.
      prompts_BP: padded on the right with any ids.
      lengths_B: of the prompts, at least 1; 0 for rows that hold no request.
    """
    positions_BP = jnp.broadcast_to(jnp.arange(prompts_BP.shape[1]), prompts_BP.shape)
    real_BP = positions_BP < lengths_B[:, None]
    last_B = jnp.maximum(lengths_B - 1, 0)
    steps = jnp.zeros((), jnp.int32)
    out: Any = model.apply(
        variables,
        jnp.where(real_BP, prompts_BP, 0),
        real_BP.astype(jnp.int32),
        positions_BP,
        _model_key(model, requests, steps),
        cache=cache,
        only_B=last_B,
    )
    logits_B1V, cache = out
    drawn_B = jnp.zeros_like(lengths_B)
    newest_B = _drawn(requests, logits_B1V[:, 0], drawn_B)
    return _after_draw(
        requests, requests.limits_B > 0, cache, newest_B, lengths_B, drawn_B, steps + 1
    )


def decode(
    model: Transformer,
    variables: Any,
    state: Decoding,
    requests: Requests,
    most: Int[Array, ""],
    *,
    tokens: int,
) -> tuple[Decoding, Int[Array, "B tokens"]]:
    """Draws up to `most` new tokens of each active request, in one loop on the device.

    Args:
      most: at most `tokens`.
      tokens: width of the result.

    Returns:
      The state, and the new tokens of each request; `NO_TOKEN` behind its last one.
    """

    def goes_on(carry):
        state, _, done = carry
        return (done < most) & jnp.any(state.active_B)

    def step(carry):
        state, out_BT, done = carry
        active_B = state.active_B
        out: Any = model.apply(
            variables,
            state.newest_B[:, None],
            active_B[:, None].astype(jnp.int32),
            state.lengths_B[:, None],
            _model_key(model, requests, state.steps),
            cache=state.cache,
        )
        logits_B1V, cache = out
        newest_B = _drawn(requests, logits_B1V[:, 0], state.drawn_B)
        out_BT = out_BT.at[:, done].set(jnp.where(active_B, newest_B, NO_TOKEN))
        state = _after_draw(
            requests,
            active_B,
            cache,
            newest_B,
            state.lengths_B + active_B,
            state.drawn_B,
            state.steps + 1,
        )
        return state, out_BT, done + 1

    out_BT = jnp.full((len(state.newest_B), tokens), NO_TOKEN, jnp.int32)
    state, out_BT, _ = lax.while_loop(goes_on, step, (state, out_BT, jnp.zeros((), jnp.int32)))
    return state, out_BT


def complete(
    model: Transformer,
    variables: Any,
    prompts_BP: Int[Array, "B P"],
    lengths_B: Int[Array, " B"],
    requests: Requests,
    *,
    tokens: int,
) -> Int[Array, "B tokens"]:
    """Returns the new tokens of each request, `NO_TOKEN` behind its last one. Call it in `jax.jit`.

    Args:
      model: as trained.
      variables: parameters, and amax histories if the policy has delayed scaling.
      prompts_BP, lengths_B, requests: as in `prefill`.
      tokens: width of the result; at least the largest limit.
    """
    model = inference_model(model)
    variables = prepare(model, variables, unrolled=False)
    kind = "fp32" if model.dtype == jnp.float32 else "bf16"
    cache = empty_cache(model.config, len(lengths_B), prompts_BP.shape[1] + tokens, kind)
    state = prefill(model, variables, cache, prompts_BP, lengths_B, requests)
    first_B1 = jnp.where(requests.limits_B > 0, state.newest_B, NO_TOKEN)[:, None]
    if tokens == 1:
        return first_B1
    most = jnp.asarray(tokens - 1)
    _, more_BT = decode(model, variables, state, requests, most, tokens=tokens - 1)
    return jnp.concatenate([first_B1, more_BT], axis=1)


def _drawn(requests: Requests, logits_BV: Float[Array, "B V"], drawn_B: Array) -> Array:
    keys_B = jax.vmap(jax.random.fold_in)(requests.keys_B, drawn_B)
    return draw(requests.rule, logits_BV[:, : requests.vocab_size], keys_B)


def _after_draw(
    requests: Requests, active_B, cache: Caches, newest_B, lengths_B, drawn_B, steps
) -> Decoding:
    """Returns the state after a draw of the active requests, some of which it ended."""
    drawn_B = drawn_B + active_B
    stopped_B = jnp.any(newest_B[:, None] == requests.stops[None], axis=1)
    return Decoding(
        cache=cache,
        newest_B=newest_B,
        lengths_B=lengths_B,
        drawn_B=drawn_B,
        steps=steps,
        active_B=active_B & ~stopped_B & (drawn_B < requests.limits_B),
    )


def _model_key(model: Transformer, requests: Requests, step: Array) -> Any:
    """Returns the key of stochastic rounding, which all rows of a batch share; None without."""
    if not model.resolved_policy.stochastic:
        return None
    return jax.random.fold_in(jax.random.fold_in(requests.keys_B[0], step), 1)
