"""A product with two recipes, of which a flag on the device chooses one: no compilation in between.

    y  = Q(x) Q(w)                  Q of the low recipe, or of the high one where `promoted`
    dx = Q(g) Q(w)^T, dw = Q(x)^T Q(g)    in the same recipe

Kept from forward to backward is x itself, once, for both: a `lax.cond` around a layer keeps what
either branch wants. It is more than the codes that a single recipe keeps.

The amax histories are the low recipe's. A promoted product records its amaxes in them as the low
one would have: when the promotion ends, scales are as new as if there had been none. The high
recipe keeps no histories.

A product that runs promoted is the product of the high recipe to the bit; a whole program is not
the program of the high recipe, since XLA fuses and rounds around a branch as it likes.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Shaped

from fp8jax.linear.amax_history import Histories, record, to_float32
from fp8jax.linear.dot import make_context
from fp8jax.linear.vjp import X_CASTS, VjpContext, backward, forward, quantize_operand
from fp8jax.numerics.recipe import Recipe

Pair = tuple[VjpContext, VjpContext]  # the low recipe's, and the high one's


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _promotable(pair: Pair, promoted, x, w, state: Histories, key) -> jax.Array:
    return _forward(pair, promoted, x, w, state, key)[0]


def _forward(pair: Pair, promoted, x, w, state: Histories, key) -> tuple[jax.Array, Histories]:
    def run(context: VjpContext):
        def branch(x, w, state):
            (y,), _, (recorded,) = forward(
                context, x, (w,), (to_float32(state),), (key,), {"fwd_x": -1}
            )
            # A recipe that leaves w in high precision has seen it in x's dtype only.
            return y, recorded | record(to_float32(state), "w", w, None)

        return branch

    return lax.cond(promoted, run(pair[1]), run(pair[0]), x, w, state)


def _fwd(pair: Pair, promoted, x, w, state: Histories, key):
    y, recorded = _forward(pair, promoted, x, w, state, key)
    return y, (promoted, x, w, state, recorded, key)


def _bwd(pair: Pair, kept: Any, g: jax.Array):
    promoted, x, w, state, recorded, key = kept

    def run(context: VjpContext):
        def branch(x, w, state, recorded, g):
            wanted = {"wgrad_x": X_CASTS["wgrad_x"]}
            qx, _ = quantize_operand(context, x, wanted, to_float32(state), key)
            return backward(context, qx["wgrad_x"], context.scopes[0], w, state, recorded, key, g)

        return branch

    dx, dw, new = lax.cond(promoted, run(pair[1]), run(pair[0]), x, w, state, recorded, g)
    return None, dx, dw, new, None


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
) -> Float[Array, "*rows N"]:
    """x w in the recipe `low`, or `high` where `promoted`; in x's dtype, dw in w's.

    Args:
      state: histories of `low`; their cotangent is their next value.
      key: for recipes that round stochastically.
      scope: name of the module in the compiled program.

    Raises:
      ValueError: a high recipe with histories; a state or a key that `low` does not fit.
      NotImplementedError: a backend that cannot run one of the recipes.
    """
    if high.histories:
        raise ValueError(f"{high.name!r} keeps amax histories: a promoted product has none")
    settings: Any = dict(backend=backend, whole=bool(x.size and w.size), scopes=(scope,))
    pair = (
        make_context(low, (state,), (key,), x.dtype, **settings),
        make_context(high, ({},), (key,), x.dtype, **settings),
    )
    rows_MK = x.reshape(-1, x.shape[-1])
    y_MN = _promotable(pair, promoted, rows_MK, w, state, key)
    return jnp.reshape(y_MN, (*x.shape[:-1], -1))
