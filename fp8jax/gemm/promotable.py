"""A linear with two recipes; a flag on the device selects one, without recompiling.

    y  = Q(x) Q(w)                        Q of the high recipe if `promoted`, else of the low one
    dx = Q(g) Q(w)^T, dw = Q(x)^T Q(g)    with the same recipe

Saved for the backward is x itself, for both recipes. A `lax.cond` around the layer would save the
residuals of both branches. x takes more memory than the quantized x that a single recipe saves.

The amax histories belong to the low recipe; the high recipe has none. A promoted linear records the
same amaxes as the low recipe would, so when the promotion ends the scales are up to date.

A promoted linear computes the same bits as the high recipe alone. A whole program does not equal
the program of the high recipe, because XLA fuses and rounds differently around a branch.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Shaped

from fp8jax.gemm.dot import make_context
from fp8jax.gemm.histories.amax_history import Histories, record, to_float32
from fp8jax.gemm.probe import Probe, Rows, measure
from fp8jax.gemm.vjp import (
    X_CASTS,
    JointAmax,
    VjpContext,
    backward,
    forward,
    quantize_operand,
)
from fp8jax.numerics.recipe import Recipe

Pair = tuple[VjpContext, VjpContext]  # of the low recipe and of the high one


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _promotable(pair: Pair, promoted, x, w, histories: Histories, key, probe) -> jax.Array:
    return _forward(pair, promoted, x, w, histories, key, probe)[0]


def _forward(
    pair: Pair, promoted, x, w, histories: Histories, key, probe: Probe | None
) -> tuple[jax.Array, Histories, Rows]:
    """Return y, the new histories of x and w, and the statistics of the casts made."""

    def with_recipe(context: VjpContext):
        def branch(x, w, histories):
            (y,), _, (new_histories,), (rows,) = forward(
                context, x, (w,), (to_float32(histories),), (key,), {"fwd_x": -1}, (probe,)
            )
            # Recorded again from w itself: a recipe that leaves w in high precision has recorded
            # the amax of w rounded to x's dtype.
            return y, new_histories | record(to_float32(histories), "w", w, None), rows

        return branch

    low, high = pair
    return lax.cond(promoted, with_recipe(high), with_recipe(low), x, w, histories)


def _fwd(pair: Pair, promoted, x, w, histories: Histories, key, probe):
    y, new_histories, rows = _forward(pair, promoted, x, w, histories, key, probe)
    return y, (promoted, x, w, histories, new_histories, key, probe, rows)


def _bwd(pair: Pair, saved: Any, g: jax.Array):
    promoted, x, w, histories, new_histories, key, probe, rows = saved

    def with_recipe(context: VjpContext):
        def branch(x, w, histories, new_histories, g, rows):
            x_casts = {"wgrad_x": X_CASTS["wgrad_x"]}
            qx, _ = quantize_operand(context, x, x_casts, to_float32(histories), key)
            rows = rows | measure(probe, x, qx, x_casts, key)
            return backward(
                context,
                qx["wgrad_x"],
                context.scopes[0],
                w,
                histories,
                new_histories,
                key,
                g,
                JointAmax(),
                probe,
                rows,
            )

        return branch

    low, high = pair
    dx, dw, cotangent, statistics = lax.cond(
        promoted, with_recipe(high), with_recipe(low), x, w, histories, new_histories, g, rows
    )
    return None, dx, dw, cotangent, None, statistics


_promotable.defvjp(_fwd, _bwd)


def promotable_dot(
    x: Float[Array, "*rows K"],
    w: Float[Array, "K N"],
    promoted: Bool[Array, ""],
    *,
    low: Recipe,
    high: Recipe,
    state: Histories,
    key: Shaped[Array, "..."] | None,
    backend: str | None = None,
    scope: str = "",
    probe: Probe | None = None,
) -> Float[Array, "*rows N"]:
    """Return x w in x's dtype, quantized by recipe `high` if `promoted`, else by `low`.

    dx has x's dtype, dw has w's.

    Args:
      promoted: a flag on the device.
      state: the amax histories of `low`. Their cotangent is their next value.
      key: a PRNG key, for recipes that round stochastically.
      backend: a key of `BACKENDS`, or None for the fastest that can run each recipe.
      scope: name of the module in the compiled program.
      probe: its cotangent is the statistics of the casts of the recipe that runs.

    Raises:
      ValueError: if `high` has histories, one of the recipes shares scales between weights, or
        `state` or `key` do not fit the recipes.
      NotImplementedError: if the backend cannot run one of the recipes.
    """
    if high.histories:
        raise ValueError(
            f"high recipe {high.name!r} needs amax histories: choose one without delayed scaling"
        )
    for recipe in (low, high):
        if recipe.shared:
            raise ValueError(
                f"recipe {recipe.name!r} shares scales between weights, and a linear that can be"
                " promoted has its own: drop qkv=shared or turn promotions off"
            )
    settings: Any = dict(backend=backend, whole=bool(x.size and w.size), scopes=(scope,))
    pair = (
        make_context(low, (state,), (key,), x.dtype, **settings),
        make_context(high, ({},), (key,), x.dtype, **settings),
    )
    rows_MK = x.reshape(-1, x.shape[-1])
    y_MN = _promotable(pair, promoted, rows_MK, w, state, key, probe)
    return jnp.reshape(y_MN, (*x.shape[:-1], -1))
