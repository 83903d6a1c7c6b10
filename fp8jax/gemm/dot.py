"""`dot_general` and `einsum` with quantized operands.

Any `dot_general` is brought to the form

    y[..., M, N] = x[..., M, K] w[..., K, N]

with at most one leading batch axis, which vjp.py computes and differentiates.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from fp8jax.gemm.arguments import (
    check_lax_arguments,
    check_operands,
    check_out_sharding,
    check_rounding_key,
    history_lengths,
    parse_equation,
)
from fp8jax.gemm.backends.choice import choose_backend
from fp8jax.gemm.histories.amax_history import SEED_ENTRIES, Histories
from fp8jax.gemm.probe import Probe
from fp8jax.gemm.sharding.explicit_axes import with_automatic_axes
from fp8jax.gemm.sharding.manual_axes import is_untracked, pooled_axes, varying
from fp8jax.gemm.vjp import GemmSettings, quantized_matmuls
from fp8jax.gemm.weight import Weight, for_several_uses
from fp8jax.numerics.names import as_recipe
from fp8jax.numerics.recipe import Cast, Recipe
from fp8jax.numerics.scales import Delayed


def dot_general(
    lhs: Float[Array, "..."],
    rhs: Float[Array, "..."],
    dimension_numbers,
    *positional: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
    recipe: str | Recipe,
    state: Histories | None = None,
    key: Shaped[Array, "..."] | None = None,
    backend: str | None = None,
    seeded: bool = False,
    probe: Probe | None = None,
) -> Float[Array, "..."]:
    """`lax.dot_general` with quantized operands, in the forward and in both gradients.

    Takes the arguments of `lax.dot_general`, so that `functools.partial(dot_general, recipe=...)`
    can stand for it in other libraries. The function is pure: with delayed scaling, the cotangent
    of `state` is the new state (amax_history.py). Uses of one state in jitted or checkpointed
    functions add theirs up, unless `fp8jax.nn.to_max_combining` converted it. Unquantized it is::

        lax.dot_general(
            lhs, rhs.astype(lhs.dtype), dimension_numbers,
            preferred_element_type=preferred_element_type,
        )

    Args:
      lhs: the activations, x of the recipe.
      rhs: the weights, w of the recipe, in any float dtype; the gradient has the same dtype.
      dimension_numbers: ((lhs contracting, rhs contracting), (lhs batch, rhs batch)).
      positional: precision and preferred_element_type, as positions of `lax.dot_general`.
      precision: only None or the default: the recipe decides how a GEMM is computed.
      preferred_element_type: dtype of the result, None for lhs's; its gradient is rounded to lhs's.
      out_sharding: of the result, if the operands have explicit mesh axes; else None.
      recipe: a `Recipe` or the name of one, with options if any ("fp8_delayed:history=4").
      state: amax histories, operand -> float32 [H], of exactly the operands and lengths of
        `recipe.histories`, or one entry longer, as `fp8jax.histories.seed` asks for seeding.
      key: a PRNG key; needed if a cast rounds stochastically, otherwise unused.
      backend: a key of `BACKENDS`; None chooses the fastest that can run the recipe.
      seeded: promise that every history is filled (an empty one has the scale 1). By default it
        seeds itself from the operand's own amax, at the cost of a pass over it in every step.
      probe: its cotangent is the statistics of the casts (probe.py); None measures nothing.

    Returns:
      An array with the batch, lhs free and rhs free dimensions, in this order.

    Raises:
      TypeError: for operands or results that are not real floating-point arrays of 16 or more bits.
      ValueError: for unknown names, arguments of `lax.dot_general` that cannot be honored, a state
        that does not fit the recipe, and a missing key.
      NotImplementedError: if the named backend cannot run the recipe; the message says why.

    Example:
      >>> x, w = jnp.ones((4, 16)), jnp.full((16, 8), 0.5)
      >>> dims = (((1,), (0,)), ((), ()))
      >>> fp8jax.dot_general(x, w, dims, recipe="fp8_amax")[0, 0].item()
      8.0

      With delayed scaling, the gradient of the state is the next state:

      >>> delayed = "fp8_delayed:history=2"
      >>> state = fp8jax.init_state(delayed)
      >>> def loss(w, state):
      ...     return fp8jax.dot_general(x, w, dims, recipe=delayed, state=state).sum()
      >>> dw, state = jax.grad(loss, (0, 1))(w, state)
      >>> dw.shape, state["x"], state["w"]
      ((16, 8), Array([1., 0.], dtype=float32), Array([0.5, 0. ], dtype=float32))
    """
    recipe = as_recipe(recipe)
    result_dtype = check_lax_arguments(recipe, positional, precision, preferred_element_type)
    weight = Weight(rhs, {} if state is None else state, key, probe)
    options: Any = dict(preferred_element_type=result_dtype, out_sharding=out_sharding)
    return dot_general_together(
        lhs, (weight,), dimension_numbers, recipe=recipe, backend=backend, seeded=seeded, **options
    )[0]


def dot_general_together(
    lhs: Float[Array, "..."],
    weights: Sequence[Weight],
    dimension_numbers,
    *,
    recipe: str | Recipe,
    backend: str | None = None,
    preferred_element_type=None,
    out_sharding: Any = None,
    seeded: bool = False,
    recompute_codes: bool = False,
) -> tuple[Float[Array, "..."], ...]:
    """`dot_general` of one lhs with each weight; lhs is quantized once for all.

    The results equal separate calls if the histories of lhs are equal, as they are for weights that
    have always shared lhs, and the recipe shares no scales. Otherwise the scale of lhs comes from
    the largest history. With shared scales (`Recipe.sharing_scales`) that of each rhs comes from
    the largest amax of all, and so does that of the gradients of the results.

    Args:
      weights: their values are rhs of `dot_general`. If the recipe rounds lhs stochastically, it
        uses the key of the first.
      recompute_codes: as in `fp8jax.nn.Dense`.

    Returns:
      One result per weight. Other arguments and errors are those of `dot_general`.
    """
    values = [weight.value for weight in weights]
    for w in values:
        check_operands(lhs, w, dimension_numbers, preferred_element_type)
    check_out_sharding(out_sharding, lhs, values)
    filled, (_, (batch_axes, _)) = all(x.size for x in (lhs, *values)), dimension_numbers
    settings = gemm_settings(
        recipe,
        weights,
        lhs.dtype,
        backend=backend,
        whole=filled and not batch_axes,
        preferred_element_type=preferred_element_type,
        seeded=seeded,
    )
    if settings.recipe.histories and is_untracked():
        raise NotImplementedError(
            f"recipe {settings.recipe.name!r} has amax histories, which jax.shard_map with"
            " check_vma=False and jax.pmap would add up over devices: use jax.shard_map with"
            " check_vma=True"
        )
    settings = dataclasses.replace(
        settings,
        recompute_codes=recompute_codes,
        x_axes=varying(lhs),
        pooled=pooled_axes(lhs, values),
    )

    def multiply(lhs, weights):
        return _multiply(settings, lhs, weights, dimension_numbers)

    multiply = with_automatic_axes(multiply, lhs, values, dimension_numbers, out_sharding)
    return multiply(lhs, tuple(for_several_uses(lhs, weight) for weight in weights))


def _multiply(
    settings: GemmSettings, lhs, weights: tuple[Weight, ...], dimension_numbers
) -> tuple[jax.Array, ...]:
    """Merges the operands' axes, multiplies, and splits the axes of the results."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    lhs_free = [a for a in range(lhs.ndim) if a not in (*lhs_contract, *lhs_batch)]
    x = _merge_axes(lhs, lhs_batch, lhs_free, lhs_contract)
    ends, merged = [], []
    for weight in weights:
        w = weight.value
        free = [a for a in range(w.ndim) if a not in (*rhs_contract, *rhs_batch)]
        ends.append([w.shape[a] for a in free])
        value = _merge_axes(w, rhs_batch, rhs_contract, free)
        merged.append(dataclasses.replace(weight, value=value).summarized())
    ys = quantized_matmuls(settings, x, tuple(merged))
    rows = [lhs.shape[a] for a in (*lhs_batch, *lhs_free)]
    return tuple(y.reshape(*rows, *end) for y, end in zip(ys, ends, strict=True))


def gemm_settings(
    recipe: str | Recipe,
    weights: Sequence[Weight],
    dtype,
    *,
    backend,
    whole: bool,
    preferred_element_type=None,
    seeded: bool = True,
) -> GemmSettings:
    """Returns the settings of GEMMs that share one x, after checking histories and keys.

    Raises as `dot_general` does.
    """
    recipe = as_recipe(recipe)
    out_dtype = dtype if preferred_element_type is None else jnp.dtype(preferred_element_type)
    chosen = choose_backend(backend, recipe, whole=whole)
    given = [history_lengths(recipe, weight.histories) for weight in weights]
    if recipe.histories and all(one == _with_seed_entries(recipe).histories for one in given):
        recipe, seeded = _with_seed_entries(recipe), False
    for lengths, weight in zip(given, weights, strict=True):
        if lengths != recipe.histories:
            raise ValueError(
                f"recipe {recipe.name!r} needs amax histories {recipe.histories} (operand: length),"
                f" got {lengths}: fp8jax.init_state(recipe), or a module's init, creates them"
            )
        check_rounding_key(recipe, weight.key)
    return GemmSettings(recipe, chosen, dtype, out_dtype, seeded)


def _with_seed_entries(recipe: Recipe) -> Recipe:
    """Returns the recipe with the longer histories by which `seed` asks for self-seeding."""

    def longer(_, cast: Cast) -> Cast:
        if not isinstance(cast.scale, Delayed):
            return cast
        scale = dataclasses.replace(cast.scale, history=cast.history + SEED_ENTRIES)
        return dataclasses.replace(cast, scale=scale)

    return recipe.map(longer)


def _merge_axes(x: jax.Array, batch, rows, columns) -> jax.Array:
    """Merges each group of axes into one axis; without batch axes the result is [rows, columns]."""
    x = x.transpose(*batch, *rows, *columns)
    sizes = [math.prod(x.shape[i] for i in group) for group in _groups(batch, rows, columns)]
    return x.reshape(sizes if batch else sizes[1:])


def _groups(*groups) -> list[range]:
    """Returns the positions of consecutive groups of axes."""
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
    preferred_element_type: Any = None,
    seeded: bool = False,
    probe: Probe | None = None,
) -> Float[Array, "..."]:
    """`jnp.einsum` of two operands through `dot_general`.

    Args:
      equation: letters, with the result, such as "bsd,dhk->bshk". An ellipsis stands for any
        number of axes, as in "...k,nk->...n".
      lhs, rhs, recipe, state, key, backend, preferred_element_type, seeded, probe: as in
        `dot_general`.

    Returns:
      An array with the axes of the equation's result, in lhs's dtype or in
      `preferred_element_type`.

    Raises:
      TypeError: for an equation that is not a string, and as `dot_general` does.
      ValueError: for an equation that is not one GEMM of two arrays or does not fit their shapes,
        and as `dot_general` does.
      NotImplementedError: as `dot_general` does.

    Example:
      >>> x, w = jnp.ones((2, 3, 16)), jnp.ones((16, 4, 8))
      >>> fp8jax.einsum("bsd,dhk->bshk", x, w, recipe="fp8_rowwise").shape
      (2, 3, 4, 8)
      >>> fp8jax.einsum("...d,dhk->...hk", x, w, recipe="fp8_rowwise").shape
      (2, 3, 4, 8)
      >>> fp8jax.einsum("bsd,dhk", x, w, recipe="fp8_rowwise")
      Traceback (most recent call last):
          ...
      ValueError: expected an equation such as 'bsd,dhk->bshk' ..., got 'bsd,dhk'
    """
    a, b, out = parse_equation(equation, lhs, rhs)
    contract = [c for c in a if c in b and c not in out]
    batch = [c for c in a if c in b and c in out]
    result = batch + [c for c in a if c not in b] + [c for c in b if c not in a]
    dimension_numbers = (
        ([a.index(c) for c in contract], [b.index(c) for c in contract]),
        ([a.index(c) for c in batch], [b.index(c) for c in batch]),
    )
    y = dot_general(
        lhs,
        rhs,
        dimension_numbers,
        recipe=recipe,
        state=state,
        key=key,
        backend=backend,
        preferred_element_type=preferred_element_type,
        seeded=seeded,
        probe=probe,
    )
    return y.transpose([result.index(c) for c in out])
