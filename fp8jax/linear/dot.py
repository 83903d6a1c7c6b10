"""`dot_general` and `einsum` with quantized operands.

Any `dot_general` is brought to the form

    y[..., M, N] = x[..., M, K] w[..., K, N]

with at most one leading batch axis, which vjp.py computes and differentiates.
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
    """`lax.dot_general` with quantized operands, in the forward and in both gradients.

    The function is pure: with delayed scaling, the cotangent of `state` is the new state
    (amax_history.py). Apart from the quantization it equals::

        lax.dot_general(
            lhs, rhs.astype(lhs.dtype), dimension_numbers,
            preferred_element_type=preferred_element_type,
        )

    Args:
      lhs: the activations, x of the recipe.
      rhs: the weights, w of the recipe, in any float dtype; the gradient has the same dtype.
      dimension_numbers: ((lhs contracting, rhs contracting), (lhs batch, rhs batch)).
      recipe: a key of `RECIPES` or a `Recipe`.
      state: amax histories, operand -> float32 [H], of exactly the operands and lengths of
        `recipe.histories`; see `init_state`.
      key: a PRNG key; needed if a cast rounds stochastically, otherwise unused.
      backend: a key of `BACKENDS`; None chooses the fastest that can run the recipe.
      preferred_element_type: dtype of the result; None for lhs's. The gradient of the result is
        rounded to lhs's dtype.

    Returns:
      An array with the batch, lhs free and rhs free dimensions, in this order.

    Raises:
      ValueError: for unknown names, a state that does not fit the recipe, and a missing key.
      NotImplementedError: if the named backend cannot run the recipe; the message says why.
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
    """`dot_general` of one lhs with each rhs; lhs is quantized once for all.

    The results equal separate calls if the histories of lhs are equal, as they are for weights that
    have always shared lhs. Otherwise the scale of lhs comes from the largest history.

    Args:
      rhs, states, keys: one entry per weight. If the recipe rounds lhs stochastically, it uses the
        first key.
      scopes: the names of the weights' modules, for the compiled program.

    Returns:
      One result per weight. Other arguments and errors are those of `dot_general`.
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
    all_histories = tuple(histories or {} for histories in states)
    ys = quantized_matmuls(context, x, ws, all_histories, tuple(keys))
    rows = [lhs.shape[a] for a in (*lhs_batch, *lhs_free)]
    return tuple(
        y.reshape(*rows, *(w.shape[a] for a in free))
        for y, w, free in zip(ys, rhs, frees, strict=True)
    )


def make_context(
    recipe: str | Recipe, states, keys, dtype, *, backend, whole: bool, preferred_element_type=None,
    scopes=None,
) -> VjpContext:  # fmt: skip
    """Return the settings of GEMMs that share one x, after checking states and keys.

    Raises as `dot_general` does.
    """
    recipe = as_recipe(recipe)
    out_dtype = dtype if preferred_element_type is None else jnp.dtype(preferred_element_type)
    chosen = choose_backend(backend, recipe, whole=whole)
    for histories, key in zip(states, keys, strict=True):
        given = {} if histories is None else {k: v.shape[-1] for k, v in histories.items()}
        if given != recipe.histories:
            raise ValueError(
                f"recipe {recipe.name!r} needs amax histories {recipe.histories} (operand: length),"
                f" got {given}"
            )
        if recipe.stochastic and key is None:
            raise ValueError(f"recipe {recipe.name!r} rounds stochastically and needs a key")
    names = ("",) * len(states) if scopes is None else tuple(scopes)
    return VjpContext(recipe, chosen, dtype, out_dtype, names)


def _is_whole(lhs, rhs, dimension_numbers) -> bool:
    """Whether these GEMMs multiply non-empty matrices without a batch axis."""
    return all(operand.size for operand in (lhs, *rhs)) and not dimension_numbers[1][0]


def _merge_axes(x: jax.Array, batch, rows, columns) -> jax.Array:
    """Merge each group of axes into one axis; without batch axes the result is [rows, columns]."""
    x = x.transpose(*batch, *rows, *columns)
    sizes = [math.prod(x.shape[i] for i in group) for group in _groups(batch, rows, columns)]
    return x.reshape(sizes if batch else sizes[1:])


def _groups(*groups) -> list[range]:
    """Return the positions of consecutive groups of axes."""
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
    """`jnp.einsum` of two operands through `dot_general`.

    Args:
      equation: letters only, with the result, such as "bsd,dhk->bshk".
      lhs, rhs, recipe, state, key, backend: as in `dot_general`.

    Raises:
      ValueError: for an equation that is not one GEMM of two arrays, and as `dot_general` does.
      NotImplementedError: as `dot_general` does.
    """
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
        raise ValueError(
            f"equation {equation!r}: each letter must appear in two or all three of the terms, at"
            " most once in each"
        )
    dimension_numbers = (
        ([a.index(c) for c in contract], [b.index(c) for c in contract]),
        ([a.index(c) for c in batch], [b.index(c) for c in batch]),
    )
    y = dot_general(
        lhs, rhs, dimension_numbers, recipe=recipe, state=state, key=key, backend=backend
    )
    return y.transpose([result.index(c) for c in out])
