"""TODO docstring."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT, fm32
from jax import lax
from jaxtyping import Array, Float

from fp8jax.numerics.recipe import Recipe
from fp8jax.numerics.recipes import as_recipe
from fp8jax.numerics.tiles import tensor_amax

Histories = dict[str, Array]  # operand "x", "w" or "g" -> its amax history [H]


def largest_amax(history: jax.Array) -> jax.Array:
    """By comparing entries, which XLA fuses with what follows: a reduction is its own kernel."""
    return functools.reduce(jnp.maximum, history) if len(history) <= 16 else jnp.max(history)


def record(histories: Histories, operand: str, x: jax.Array, amax: jax.Array | None) -> Histories:
    if operand not in histories:
        return {}
    return {operand: record_amax(histories[operand], tensor_amax(x) if amax is None else amax)}


def to_float32(state: Histories) -> Histories:
    return {k: lax.convert_element_type(v, jnp.float32) for k, v in state.items()}


def largest_of(histories: tuple[Histories, ...]) -> Histories:
    """The histories that x's scale comes from: the largest of all, which are alike where the
    products always had the same x."""
    return jax.tree.map(lambda *leaves: functools.reduce(jnp.maximum, leaves), *histories)


def as_cotangent(state: Histories, new: Histories) -> Histories:
    """The cotangent of a state, in its dtype: `new` histories of all its operands."""
    return {k: lax.convert_element_type(new[k], v.dtype) for k, v in state.items()}


def init_state(recipe: str | Recipe) -> Histories:
    """Empty histories for `dot_general`: operand -> float32 zeros [H]."""
    return {k: jnp.zeros(n, jnp.float32) for k, n in as_recipe(recipe).histories.items()}


# The collection of amax histories, by flax's name for it.
HISTORIES = OVERWRITE_WITH_GRADIENT


def module_histories(module: nn.Module, recipe: Recipe) -> Histories:
    """The module's amax histories, created empty: operand -> [H]."""
    return {
        operand: module.variable(
            HISTORIES, f"{operand}_amax_history", jnp.zeros, (length,), jnp.float32
        ).value
        for operand, length in recipe.histories.items()
    }


def to_max_combining(histories: Any) -> Any:
    """A tree of float32 histories in the dtype whose sum is the maximum; others stay."""
    return jax.tree.map(
        lambda h: lax.convert_element_type(h, fm32) if h.dtype == jnp.float32 else h, histories
    )


def max_combining(module: type[nn.Module]) -> Callable[..., nn.Module]:
    """`module` with its amax histories converted at its door, so that several calls of one
    submodule combine by maximum. Parameters and the tree of variables stay the same."""

    def to_float32(variables: Any) -> Any:
        return jax.tree.map(lambda h: lax.convert_element_type(h, jnp.float32), variables)

    return nn.map_variables(
        module, HISTORIES, trans_in_fn=to_max_combining, trans_out_fn=to_float32,
        init=True, mutable=True,
    )  # fmt: skip


# Amax histories -----------------------------------------------------------------------------------


def record_amax(history: Float[Array, " H"], amax: Float[Array, ""]) -> Float[Array, " H"]:
    """The next history: rolled by one, slot 0 this step's amax, or the old slot 0 where that is
    not finite."""
    newest = jnp.where(jnp.isfinite(amax), amax, history[0])
    return jnp.roll(history, 1).at[0].set(newest)


def merge_history(old: Float[Array, "*L H"], new: Float[Array, "*L H"]) -> Float[Array, "*L H"]:
    """`new` where it recorded anything, else `old`, each history (last axis) by itself.

    A product that did not run leaves a cotangent of zeros (never traced) or of -inf (the branch
    not taken, under a max-combining dtype): neither is a history. A history that would become all
    zeros is kept as well, since a tensor of zeros is served by any scale.
    """
    received = jnp.any(new > 0, axis=-1, keepdims=True) & jnp.all(
        jnp.isfinite(new), axis=-1, keepdims=True
    )
    return jnp.where(received, new, old)
