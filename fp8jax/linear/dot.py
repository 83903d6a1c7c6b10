"""The quantized matrix product, and its one derivative.

Any `dot_general` is brought to

    y[..., M, N] = x[..., M, K] w[..., K, N]

with at most one leading batch axis. There sits the only custom VJP of matrix products:

    forward    y  = Q(x) Q(w)       scales are constant along K or multiplied block by block
    backward   dx = Q(g) Q(w)^T
               dw = Q(x)^T Q(g)

each Q as the recipe says (numerics/recipe.py). Kept from forward to backward are

    x    quantized along the tokens, as wgrad reads it: one byte an element. The high-precision
         x itself only if the recipe leaves wgrad_x in high precision.
    w    the operand as it came, in practice the float32 parameter, which exists anyway; it is
         quantized again in the backward. So no gathered or cast weight is ever kept, under any
         rematerialization policy.
    the amax histories, already updated.

What a rematerialization policy may keep has names: PRODUCT, the results of the forward products,
and OPERAND, the codes of x. `jax.checkpoint_policies` that look for `dot_general` would miss the
products of kernels.

Several weights may share one x (queries, keys and values): it is quantized once, and kept once.

Results: y and dx have x's dtype (y another one on request), dw has w's: with bfloat16 activations
and a float32 master weight, the weight's gradient leaves the accumulator in float32.

State. A delayed cast takes its amax from a history. The new history comes back as the *cotangent*
of the old one, which is how flax's `_overwrite_with_gradient` collection wants it. Cotangents of
a leaf that is used twice are added by JAX; a maximum is what is right. Hence inside a model the
leaf has flax's max-combining dtype (nn.max_combining); this file only gives back the dtype it got.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from fp8jax.linear.amax_history import Histories
from fp8jax.linear.backends import choose_backend
from fp8jax.linear.vjp import VjpContext, quantized_matmuls
from fp8jax.numerics.recipe import Recipe
from fp8jax.numerics.recipes import as_recipe

# Public -------------------------------------------------------------------------------------------


def dot_general(
    lhs: Float[Array, "..."],
    rhs: Float[Array, "..."],
    dimension_numbers,
    *,
    recipe: str | Recipe,
    state: Histories | None = None,
    key: Shaped[Array, "..."] | None = None,
    backend: str | None = None,
    preferred_element_type=None,
) -> Float[Array, "..."]:
    """`lax.dot_general` with its operands, and those of its gradients, quantized.

    Pure: with delayed scaling, the cotangent of `state` is the new state. Equivalent, but for the
    quantization, to::

        lax.dot_general(
            lhs, rhs.astype(lhs.dtype), dimension_numbers,
            preferred_element_type=preferred_element_type,
        )

    Args:
      lhs: the activations, x of the recipe.
      rhs: the weights, w of the recipe; any float dtype, its gradient has the same.
      dimension_numbers: ((lhs contracting, rhs contracting), (lhs batch, rhs batch)).
      recipe: a key of `RECIPES` or a `Recipe`.
      state: operand -> float32 [H], exactly `recipe.histories`; see `init_state`.
      key: a PRNG key; needed if a cast rounds stochastically, otherwise unused.
      backend: a key of `BACKENDS`; None takes the fastest that can.
      preferred_element_type: dtype of the result; None for lhs's. The gradient that comes back
        is rounded to lhs's dtype.

    Returns:
      batch, lhs free and rhs free dimensions in that order.

    Raises:
      ValueError: unknown names; a state that does not fit the recipe; a key that is missing.
      NotImplementedError: the named backend cannot run the recipe; says why.
    """
    (y,) = dot_general_shared(
        lhs, (rhs,), dimension_numbers, recipe=recipe, states=(state,), keys=(key,),
        backend=backend, preferred_element_type=preferred_element_type,
    )  # fmt: skip
    return y


def dot_general_shared(
    lhs: Float[Array, "..."],
    rhs: Sequence[Float[Array, "..."]],
    dimension_numbers,
    *,
    recipe: str | Recipe,
    states: Sequence[Histories | None],
    keys: Sequence[Shaped[Array, "..."] | None],
    backend: str | None = None,
    preferred_element_type=None,
    scopes: Sequence[str] | None = None,
) -> tuple[Float[Array, "..."], ...]:
    """`dot_general` of one lhs with each rhs, as many results: lhs is quantized once for all.

    The same as each by itself where their histories of lhs are the same, which they are where they
    always had the same lhs; else its scale comes from the largest. A recipe that rounds lhs
    stochastically takes the first key for it. `scopes` are names for the products in the compiled
    program, of the modules that the weights belong to.

    Raises as `dot_general` does.
    """
    context = make_context(
        recipe, states, keys, lhs.dtype, backend=backend,
        whole=_is_whole(lhs, rhs, dimension_numbers),
        preferred_element_type=preferred_element_type, scopes=scopes,
    )  # fmt: skip
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    lhs_free = [a for a in range(lhs.ndim) if a not in (*lhs_contract, *lhs_batch)]
    frees = [[a for a in range(w.ndim) if a not in (*rhs_contract, *rhs_batch)] for w in rhs]
    x = _merge_axes(lhs, lhs_batch, lhs_free, lhs_contract)
    ws = tuple(
        _merge_axes(w, rhs_batch, rhs_contract, free) for w, free in zip(rhs, frees, strict=True)
    )
    ys = quantized_matmuls(context, x, ws, tuple(state or {} for state in states), tuple(keys))
    rows = [lhs.shape[a] for a in (*lhs_batch, *lhs_free)]
    return tuple(
        y.reshape(*rows, *(w.shape[a] for a in free))
        for y, w, free in zip(ys, rhs, frees, strict=True)
    )


def make_context(
    recipe: str | Recipe, states, keys, dtype, *, backend, whole: bool, preferred_element_type=None,
    scopes=None,
) -> VjpContext:  # fmt: skip
    """What products of one x have in common, checked."""
    recipe = as_recipe(recipe)
    out_dtype = dtype if preferred_element_type is None else jnp.dtype(preferred_element_type)
    chosen = choose_backend(backend, recipe, whole=whole)
    for state, key in zip(states, keys, strict=True):
        given = {} if state is None else {k: v.shape[-1] for k, v in state.items()}
        if given != recipe.histories:
            raise ValueError(
                f"recipe {recipe.name!r} keeps amax histories {recipe.histories} (operand: length),"
                f" got {given}"
            )
        if recipe.stochastic and key is None:
            raise ValueError(f"recipe {recipe.name!r} rounds stochastically and needs a key")
    names = ("",) * len(states) if scopes is None else tuple(scopes)
    return VjpContext(recipe, chosen, dtype, out_dtype, names)


def _is_whole(lhs, rhs, dimension_numbers) -> bool:
    """Whether these are products of two matrices, none of them empty."""
    return all(operand.size for operand in (lhs, *rhs)) and not dimension_numbers[1][0]


def _merge_axes(x: jax.Array, batch, rows, columns) -> jax.Array:
    """[batch, rows, columns], each group of axes merged into one; no batch axis if none."""
    x = x.transpose(*batch, *rows, *columns)
    sizes = [math.prod(x.shape[i] for i in group) for group in _groups(batch, rows, columns)]
    return x.reshape(sizes if batch else sizes[1:])


def _groups(*groups) -> list[range]:
    """Positions of consecutive groups of axes."""
    ends = [sum(len(g) for g in groups[: i + 1]) for i in range(len(groups))]
    return [range(end - len(g), end) for end, g in zip(ends, groups, strict=True)]


def einsum(
    equation: str,
    lhs: Float[Array, "..."],
    rhs: Float[Array, "..."],
    *,
    recipe: str | Recipe,
    state: Histories | None = None,
    key: Shaped[Array, "..."] | None = None,
    backend: str | None = None,
) -> Float[Array, "..."]:
    """`jnp.einsum` of two operands through `dot_general`; explicit letters only, such as
    "bsd,dhk->bshk". Raises ValueError for an equation that is not one product of two arrays."""
    operands, arrow, out = equation.replace(" ", "").partition("->")
    terms = operands.split(",")
    letters = [set(term) for term in terms]
    if not arrow or len(terms) != 2 or not (operands + out).replace(",", "").isalpha():
        raise ValueError(f"expected an equation such as 'bsd,dhk->bshk', got {equation!r}")
    a, b = terms
    contract = [c for c in a if c in letters[1] and c not in out]
    batch = [c for c in a if c in letters[1] and c in out]
    result = batch + [c for c in a if c not in b] + [c for c in b if c not in a]
    distinct = all(len(set(term)) == len(term) for term in (a, b, out))
    if not distinct or sorted(result) != sorted(out):
        raise ValueError(f"{equation!r} repeats, sums out or invents a letter")
    dimension_numbers = (
        ([a.index(c) for c in contract], [b.index(c) for c in contract]),
        ([a.index(c) for c in batch], [b.index(c) for c in batch]),
    )
    y = dot_general(
        lhs, rhs, dimension_numbers, recipe=recipe, state=state, key=key, backend=backend
    )
    return y.transpose([result.index(c) for c in out])
