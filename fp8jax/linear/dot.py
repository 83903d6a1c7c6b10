"""The quantised matrix product, and its one derivative.

Any `dot_general` is brought to

    y[..., M, N] = x[..., M, K] w[..., K, N]

with at most one leading batch axis. There sits the only custom VJP of matrix products:

    forward    y  = Q(x) Q(w)       scales are constant along K or multiplied block by block
    backward   dx = Q(g) Q(w)^T
               dw = Q(x)^T Q(g)

each Q as the recipe says (numerics/recipe.py). Kept from forward to backward are

    x    quantised along the tokens, as wgrad reads it: one byte an element. The high-precision
         x itself only if the recipe leaves wgrad_x in high precision.
    w    the operand as it came, in practice the float32 parameter, which exists anyway; it is
         quantised again in the backward. So no gathered or cast weight is ever kept, under any
         rematerialisation policy.
    the amax histories, already updated.

What a rematerialisation policy may keep has names: PRODUCT, the results of the forward products,
and OPERAND, the codes of x. `jax.checkpoint_policies` that look for `dot_general` would miss the
products of kernels.

Several weights may share one x (queries, keys and values): it is quantised once, and kept once.

Results: y and dx have x's dtype (y another one on request), dw has w's: with bfloat16 activations
and a float32 master weight, the weight's gradient leaves the accumulator in float32.

State. A delayed cast takes its amax from a history. The new history comes back as the *cotangent*
of the old one, which is how flax's `_overwrite_with_gradient` collection wants it. Cotangents of
a leaf that is used twice are added by JAX; a maximum is what is right. Hence inside a model the
leaf has flax's max-combining dtype (nn.max_combining); this file only gives back the dtype it got.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Shaped

from fp8jax.linear.backends import Backend, Coded, Operand, Plain, Request, choose_backend, product
from fp8jax.numerics.recipe import Cast, Recipe, as_recipe
from fp8jax.numerics.scaling import record_amax, tensor_amax

State = dict[str, Array]  # operand "x", "w" or "g" -> its amax history [H]


# Names for jax.checkpoint_policies.save_only_these_names.
PRODUCT, OPERAND = "fp8jax.product", "fp8jax.operand"


# The casts of an operand that two products read, and the axis that each contracts.
OF_X = {"fwd_x": -1, "wgrad_x": -2}


OF_G = {"dgrad_g": -1, "wgrad_g": -2}


# Order of the casts' keys: fold_in(key, index). Part of what makes a run reproducible.
KEY_ORDER = ("fwd_x", "fwd_w", "dgrad_g", "dgrad_w", "wgrad_x", "wgrad_g")


# The product and its derivative -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Context:
    """What is static about products of one x: `dtype` is that of x and dx, `out_dtype` that of y;
    `scopes` name each weight's module in the compiled program, "" for where it stands anyway."""

    recipe: Recipe
    backend: Backend
    dtype: jnp.dtype
    out_dtype: jnp.dtype
    scopes: tuple[str, ...]


class _Residuals(NamedTuple):
    x: Operand  # as wgrad reads it
    ws: tuple[jax.Array, ...]
    states: tuple[State, ...]
    recorded: tuple[State, ...]  # the new histories of x and w; g's amax is not known yet
    keys: tuple[jax.Array | None, ...]


def requests_of(
    recipe: Recipe, wanted: dict[str, int], histories: State, key
) -> dict[str, Request]:
    """What the recipe's casts of those names, name -> the axis that is contracted, ask for; none
    for an operand that stays in high precision."""
    requests: dict[str, Request] = {}
    for name, axis in wanted.items():
        cast: Cast | None = getattr(recipe, name)
        if cast is None:
            continue
        amax = cast_key = None
        if cast.timing == "delayed":
            history = histories[name[-1]]
            amax = _largest(history) if cast.amax == "max" else history[0]
        if cast.rounding == "stochastic":
            cast_key = jax.random.fold_in(key, KEY_ORDER.index(name))
        requests[name] = Request(cast, axis, amax, cast_key)
    return requests


def _largest(history: jax.Array) -> jax.Array:
    """By comparing entries, which XLA fuses with what follows: a reduction is its own kernel."""
    return functools.reduce(jnp.maximum, history) if len(history) <= 16 else jnp.max(history)


def quantized(
    context: Context, x: jax.Array, wanted: dict[str, int], histories: State, key
) -> tuple[dict[str, Operand], jax.Array | None]:
    """`x` as casts of the recipe have it, and its amax where the backend found it on the way."""
    requests = requests_of(context.recipe, wanted, histories, key)
    operands: dict[str, Operand] = {name: Plain(x, axis) for name, axis in wanted.items()}
    if not requests:
        return operands, None
    coded, amax = context.backend.quantize(x, tuple(requests.values()))
    return operands | dict(zip(requests, coded, strict=True)), amax


def multiply(context: Context, name: str, scope: str, a: Operand, b: Operand, dtype) -> jax.Array:
    """Product `name` of the recipe, under scopes that compiled programs keep
    (analysis/gemms.py)."""
    module = jax.named_scope(scope) if scope else contextlib.nullcontext()
    with module, jax.named_scope(f"{context.recipe.name}.{name}"):
        if isinstance(a, Coded) or isinstance(b, Coded):
            return context.backend.matmul(a, b, dtype)
        return product(a, b, dtype)


def record(histories: State, operand: str, x: jax.Array, amax: jax.Array | None) -> State:
    if operand not in histories:
        return {}
    return {operand: record_amax(histories[operand], tensor_amax(x) if amax is None else amax)}


def to_float32(state: State) -> State:
    return {k: lax.convert_element_type(v, jnp.float32) for k, v in state.items()}


def as_computed(w: jax.Array, dtype, cast: Cast | None) -> jax.Array:
    """A weight that is not quantised is multiplied in the activations' dtype; one that is, is
    quantised from its master."""
    return w.astype(dtype) if cast is None else w


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dots(
    context: Context, x: jax.Array, ws: tuple[jax.Array, ...], states: tuple[State, ...], keys
) -> tuple[jax.Array, ...]:
    """[..., M, K] x [..., K, N] -> [..., M, N] for each w; x is quantised once for all."""
    histories = tuple(map(to_float32, states))
    return forward(context, x, ws, histories, keys, {"fwd_x": -1})[0]


def _of_all(histories: tuple[State, ...]) -> State:
    """The histories that x's scale comes from: the largest of all, which are alike where the
    products always had the same x."""
    return jax.tree.map(lambda *leaves: functools.reduce(jnp.maximum, leaves), *histories)


def forward(context: Context, x, ws, histories, keys, wanted: dict[str, int]):
    """The products, the codes of x that are `wanted`, and the histories of x and each w."""
    of_x = tuple({k: v for k, v in state.items() if k == "x"} for state in histories)
    qx, amax_x = quantized(context, x, wanted, _of_all(of_x), keys[0])
    ys, recorded = [], []
    for w, state, key, scope in zip(ws, histories, keys, context.scopes, strict=True):
        y, of_w = product_with(context, qx["fwd_x"], w, state, key, scope, x.dtype)
        ys.append(y)
        recorded.append(record(state, "x", x, amax_x) | of_w)
    return tuple(ys), qx, tuple(recorded)


def product_with(context: Context, qx: Operand, w, histories: State, key, scope: str, dtype):
    """One forward product, and the new history of w."""
    w = as_computed(w, dtype, context.recipe.fwd_w)
    qw, amax = quantized(context, w, {"fwd_w": -2}, histories, key)
    y = multiply(context, "fwd", scope, qx, qw["fwd_w"], context.out_dtype)
    return checkpoint_name(y, PRODUCT), record(histories, "w", w, amax)


def _dots_fwd(context: Context, x, ws, states, keys):
    histories = tuple(map(to_float32, states))
    ys, qx, recorded = forward(context, x, ws, histories, keys, OF_X)
    x = checkpoint_name(qx["wgrad_x"], OPERAND)
    return ys, _Residuals(x, ws, states, recorded, keys)


def _dots_bwd(context: Context, kept: _Residuals, gs: tuple[jax.Array, ...]):
    of_all = (context.scopes, kept.ws, kept.states, kept.recorded, kept.keys, gs)
    each = zip(*of_all, strict=True)
    dxs, dws, states = zip(*(backward(context, kept.x, *one) for one in each), strict=True)
    return sum_of(dxs), dws, states, None


def sum_of(cotangents: Sequence[jax.Array]) -> jax.Array:
    """In the order in which JAX adds the cotangents of an array that several products read."""
    return functools.reduce(jnp.add, cotangents[::-1])


def backward(context: Context, x: Operand, scope: str, w, state: State, recorded: State, key, g):
    """dx, dw and the new state of one product, from the gradient of its result."""
    g = g.astype(context.dtype)
    qg, amax = quantized(context, g, OF_G, to_float32(state), key)
    dx = input_gradient(context, scope, w, state, key, qg)
    dw = weight_gradient(context, x, scope, w, qg)
    return dx, dw, next_state(state, recorded | record(to_float32(state), "g", g, amax))


def input_gradient(context: Context, scope: str, w, state: State, key, qg: dict[str, Operand]):
    w = as_computed(w, context.dtype, context.recipe.dgrad_w)
    qw, _ = quantized(context, w, {"dgrad_w": -1}, to_float32(state), key)
    return multiply(context, "dgrad", scope, qg["dgrad_g"], qw["dgrad_w"], context.dtype)


def weight_gradient(context: Context, x: Operand, scope: str, w, qg: dict[str, Operand]):
    return multiply(context, "wgrad", scope, x, qg["wgrad_g"], w.dtype)


def next_state(state: State, new: State) -> State:
    """The cotangent of a state, in its dtype: `new` histories of all its operands."""
    return {k: lax.convert_element_type(new[k], v.dtype) for k, v in state.items()}


_dots.defvjp(_dots_fwd, _dots_bwd)


# Public -------------------------------------------------------------------------------------------


def dot_general(
    lhs: Float[Array, "..."],
    rhs: Float[Array, "..."],
    dimension_numbers,
    *,
    recipe: str | Recipe,
    state: State | None = None,
    key: Shaped[Array, "..."] | None = None,
    backend: str | None = None,
    preferred_element_type=None,
) -> Float[Array, "..."]:
    """`lax.dot_general` with its operands, and those of its gradients, quantised.

    Pure: with delayed scaling, the cotangent of `state` is the new state. Equivalent, but for the
    quantisation, to::

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
    (y,) = dots(
        lhs, (rhs,), dimension_numbers, recipe=recipe, states=(state,), keys=(key,),
        backend=backend, preferred_element_type=preferred_element_type,
    )  # fmt: skip
    return y


def dots(
    lhs: Float[Array, "..."],
    rhs: Sequence[Float[Array, "..."]],
    dimension_numbers,
    *,
    recipe: str | Recipe,
    states: Sequence[State | None],
    keys: Sequence[Shaped[Array, "..."] | None],
    backend: str | None = None,
    preferred_element_type=None,
    scopes: Sequence[str] | None = None,
) -> tuple[Float[Array, "..."], ...]:
    """`dot_general` of one lhs with each rhs, as many results: lhs is quantised once for all.

    The same as each by itself where their histories of lhs are the same, which they are where they
    always had the same lhs; else its scale comes from the largest. A recipe that rounds lhs
    stochastically takes the first key for it. `scopes` are names for the products in the compiled
    program, of the modules that the weights belong to.

    Raises as `dot_general` does.
    """
    context = context_of(
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
    ys = _dots(context, x, ws, tuple(state or {} for state in states), tuple(keys))
    rows = [lhs.shape[a] for a in (*lhs_batch, *lhs_free)]
    return tuple(
        y.reshape(*rows, *(w.shape[a] for a in free))
        for y, w, free in zip(ys, rhs, frees, strict=True)
    )


def context_of(
    recipe: str | Recipe, states, keys, dtype, *, backend, whole: bool, preferred_element_type=None,
    scopes=None,
) -> Context:  # fmt: skip
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
    return Context(recipe, chosen, dtype, out_dtype, names)


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
    state: State | None = None,
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


def init_state(recipe: str | Recipe) -> State:
    """Empty histories for `dot_general`: operand -> float32 zeros [H]."""
    return {k: jnp.zeros(n, jnp.float32) for k, n in as_recipe(recipe).histories.items()}
