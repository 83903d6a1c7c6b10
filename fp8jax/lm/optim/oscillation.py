"""TetraJet-v2's reset of weights that oscillate between two codes (arXiv 2510.27527).

Late in training a weight may lie between two codes and cross from one to the other again and again:
its quantized value moves far while the weight itself hardly does. In the last WINDOW steps of each
PERIOD, from a share of the run on,

    sum |Q(w') - Q(w)|  >=  RATIO * sum |w' - w|     over these steps,

w and w' being the weight before and after a step, makes w <- Q(w) at the period's end: the middle
of what rounds to its code. Q is the forward's cast of the weights in a recipe. Only the kernels of
layers are reset (muon.py), each layer by itself; two sums of each are stored in float32.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float, Int

from fp8jax.lm.optim.muon import labels
from fp8jax.numerics.names import as_recipe
from fp8jax.numerics.quantization import dequantize, quantize_unchecked
from fp8jax.numerics.recipe import Cast

PERIOD, WINDOW, RATIO = 200, 50, 8.0


class ResetState(NamedTuple):
    """Finished steps, and the distances that quantized values and weights have covered."""

    step: Int[Array, ""]
    codes: Any
    weights: Any


def _quantized(w: Float[Array, "*layers K N"], cast: Cast) -> Float[Array, "*layers K N"]:
    if w.ndim > 2:
        return jax.vmap(lambda one: _quantized(one, cast))(w)
    return dequantize(
        quantize_unchecked(w, cast.format, cast.tile, contract_axis=-2, scale=cast.rule)
    )


def reset_oscillating(recipe: str, begin: int) -> optax.GradientTransformation:
    """Resets weights that oscillate; the last of a chain of transformations.

    Args:
      recipe: of which the cast `fwd_w` is Q.
      begin: the first step, counted from 0, that measures.

    Raises ValueError for a recipe that leaves weights in high precision, or rounds them at random.
    """
    cast = as_recipe(recipe).fwd_w
    if cast is None or cast.random or cast.timing != "current":
        raise ValueError(f"reset={recipe}: the recipe has no current cast of weights to nearest")

    def init(params: Any) -> ResetState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return ResetState(jnp.zeros((), jnp.int32), zeros, zeros)

    def measured(updates: Any, state: ResetState, params: Any) -> tuple[Any, Any, Any]:
        phase = state.step % PERIOD
        fresh, last = phase == PERIOD - WINDOW, phase == PERIOD - 1

        def leaf(u, p, codes, weights):
            after = _quantized(p + u, cast)
            codes = jnp.where(fresh, 0.0, codes) + jnp.abs(after - _quantized(p, cast))
            weights = jnp.where(fresh, 0.0, weights) + jnp.abs(u)
            oscillates = last & (weights > 0) & (codes >= RATIO * weights)
            return jnp.where(oscillates, after - p, u), codes, weights

        found = jax.tree.map(leaf, updates, params, state.codes, state.weights)
        return jax.tree.transpose(jax.tree.structure(updates), jax.tree.structure((0, 0, 0)), found)

    def update(updates: Any, state: ResetState, params: Any = None) -> tuple[Any, ResetState]:
        inside = (state.step >= begin) & (state.step % PERIOD >= PERIOD - WINDOW)
        updates, codes, weights = lax.cond(
            inside,
            lambda: measured(updates, state, params),
            lambda: (updates, state.codes, state.weights),
        )
        return updates, ResetState(state.step + 1, codes, weights)

    def kernels(params: Any) -> Any:
        return jax.tree.map(lambda label: label == "muon", labels(params))

    return optax.masked(optax.GradientTransformation(init, update), kernels)
