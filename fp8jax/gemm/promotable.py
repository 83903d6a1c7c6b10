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

import dataclasses
import functools
import math
from typing import Any

import jax
from jax import lax
from jaxtyping import Array, Bool, Float

from fp8jax.gemm.dot import gemm_settings
from fp8jax.gemm.probe import measure
from fp8jax.gemm.vjp import (
    X_CASTS,
    GemmSettings,
    JointAmax,
    backward,
    differentiable_once,
    forward,
    once,
    quantize_operand,
)
from fp8jax.gemm.weight import Observed, Weight
from fp8jax.numerics.recipe import Recipe

Pair = tuple[GemmSettings, GemmSettings]  # of the low recipe and of the high one


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _promotable(pair: Pair, promoted, x, weight: Weight) -> jax.Array:
    return _forward(pair, promoted, x, weight)[0]


def _forward(pair: Pair, promoted, x, weight: Weight) -> tuple[jax.Array, Observed]:
    """Returns y, and what the casts of x and w have observed."""

    def with_recipe(settings: GemmSettings):
        def branch(x, weight: Weight):
            (y,), _, (observed,) = forward(settings, x, (weight,), {"fwd_x": -1})
            return y, observed

        return branch

    low, high = pair
    return lax.cond(promoted, with_recipe(high), with_recipe(low), x, weight)


def _fwd(pair: Pair, promoted, x, weight: Weight):
    recipes = [settings.recipe for settings in pair]
    x_once, (once,) = differentiable_once(x, (weight,), *recipes)
    y, observed = _forward(pair, promoted, x_once, once)
    return y, (promoted, x, weight, observed)


def _bwd(pair: Pair, saved: Any, g: jax.Array):
    def with_recipe(settings: GemmSettings):
        def branch(x, weight: Weight, observed: Observed, g):
            casts = {"wgrad_x": X_CASTS["wgrad_x"]}
            qx, _ = quantize_operand(settings, x, casts, weight)
            statistics = measure(weight.probe, x, qx, casts, weight.key)
            observed = observed.also(Observed({}, statistics))
            return backward(settings, qx["wgrad_x"], weight, observed, g, JointAmax())

        return branch

    (low, high), (promoted, x, weight, observed) = pair, saved
    g = once(g, low.recipe, high.recipe)
    dx, of_weight = lax.cond(promoted, with_recipe(high), with_recipe(low), x, weight, observed, g)
    dx, (of_weight,) = differentiable_once(dx, (of_weight,), low.recipe, high.recipe)
    return None, dx, of_weight


_promotable.defvjp(_fwd, _bwd)


def promotable_dot(
    x: Float[Array, "*rows K"],
    weight: Weight,
    promoted: Bool[Array, ""],
    *,
    low: Recipe,
    high: Recipe,
    backend: str | None = None,
    seeded: bool = True,
) -> Float[Array, "*rows N"]:
    """Returns x w in x's dtype, quantized by recipe `high` if `promoted`, else by `low`.

    dx has x's dtype, dw has w's.

    Args:
      weight: [K, N], with the amax histories of `low`; its probe has the statistics of the casts of
        the recipe that runs.
      promoted: a flag on the device.
      backend: a key of `BACKENDS`, or None for the fastest that can run each recipe.
      seeded: False takes the amaxes of the operands themselves where histories of `low` are empty.

    Raises:
      ValueError: if `high` has histories, one of the recipes shares scales between weights, or
        the weight's histories or key do not fit the recipes.
      NotImplementedError: if the backend cannot run one of the recipes.
    """
    if high.histories:
        raise ValueError(
            f"high recipe {high.name!r} needs amax histories: choose one without delayed scaling"
        )
    for recipe in (low, high):
        if recipe.shares_scales:
            raise ValueError(
                f"recipe {recipe.name!r} shares scales between weights, and a linear that can be"
                " promoted has its own: drop qkv=shared or turn promotions off"
            )
    options: Any = dict(backend=backend, whole=bool(x.size and weight.value.size))
    without = dataclasses.replace(weight, histories={})
    pair = (
        gemm_settings(low, (weight,), x.dtype, seeded=seeded, **options),
        gemm_settings(high, (without,), x.dtype, **options),
    )
    *rows, k = x.shape
    y_MN = _promotable(pair, promoted, x.reshape(math.prod(rows), k), weight.summarized())
    return y_MN.reshape(*rows, y_MN.shape[-1])
