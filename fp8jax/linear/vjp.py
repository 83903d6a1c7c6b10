"""TODO docstring."""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from fp8jax.linear.amax_history import (
    Histories,
    as_cotangent,
    largest_amax,
    largest_of,
    record,
    to_float32,
)
from fp8jax.linear.backends import Backend
from fp8jax.linear.operands import (
    CastRequest,
    Operand,
    PlainOperand,
    QuantizedOperand,
    plain_matmul,
)
from fp8jax.numerics.recipe import Cast, Recipe

# Names for jax.checkpoint_policies.save_only_these_names.
GEMM_OUTPUT, QUANTIZED_INPUT = "fp8jax.product", "fp8jax.operand"


# The casts of an operand that two products read, and the axis that each contracts.
X_CASTS = {"fwd_x": -1, "wgrad_x": -2}


G_CASTS = {"dgrad_g": -1, "wgrad_g": -2}


# Order of the casts' keys: fold_in(key, index). Part of what makes a run reproducible.
KEY_ORDER = ("fwd_x", "fwd_w", "dgrad_g", "dgrad_w", "wgrad_x", "wgrad_g")


# The product and its derivative -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class VjpContext:
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
    states: tuple[Histories, ...]
    recorded: tuple[Histories, ...]  # the new histories of x and w; g's amax is not known yet
    keys: tuple[jax.Array | None, ...]


def cast_requests(
    recipe: Recipe, wanted: dict[str, int], histories: Histories, key
) -> dict[str, CastRequest]:
    """What the recipe's casts of those names, name -> the axis that is contracted, ask for; none
    for an operand that stays in high precision."""
    requests: dict[str, CastRequest] = {}
    for name, axis in wanted.items():
        cast: Cast | None = getattr(recipe, name)
        if cast is None:
            continue
        amax = cast_key = None
        if cast.timing == "delayed":
            history = histories[name[-1]]
            amax = largest_amax(history) if cast.amax == "max" else history[0]
        if cast.rounding == "stochastic":
            cast_key = jax.random.fold_in(key, KEY_ORDER.index(name))
        requests[name] = CastRequest(cast, axis, amax, cast_key)
    return requests


def quantize_operand(
    context: VjpContext, x: jax.Array, wanted: dict[str, int], histories: Histories, key
) -> tuple[dict[str, Operand], jax.Array | None]:
    """`x` as casts of the recipe have it, and its amax where the backend found it on the way."""
    requests = cast_requests(context.recipe, wanted, histories, key)
    operands: dict[str, Operand] = {name: PlainOperand(x, axis) for name, axis in wanted.items()}
    if not requests:
        return operands, None
    coded, amax = context.backend.quantize(x, tuple(requests.values()))
    return operands | dict(zip(requests, coded, strict=True)), amax


def named_matmul(
    context: VjpContext, name: str, scope: str, a: Operand, b: Operand, dtype
) -> jax.Array:
    """Product `name` of the recipe, under scopes that compiled programs keep
    (analysis/gemms.py)."""
    module = jax.named_scope(scope) if scope else contextlib.nullcontext()
    with module, jax.named_scope(f"{context.recipe.name}.{name}"):
        if isinstance(a, QuantizedOperand) or isinstance(b, QuantizedOperand):
            return context.backend.matmul(a, b, dtype)
        return plain_matmul(a, b, dtype)


def in_compute_dtype(w: jax.Array, dtype, cast: Cast | None) -> jax.Array:
    """A weight that is not quantized is multiplied in the activations' dtype; one that is, is
    quantized from its master."""
    return w.astype(dtype) if cast is None else w


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def quantized_matmuls(
    context: VjpContext,
    x: jax.Array,
    ws: tuple[jax.Array, ...],
    states: tuple[Histories, ...],
    keys,
) -> tuple[jax.Array, ...]:
    """[..., M, K] x [..., K, N] -> [..., M, N] for each w; x is quantized once for all."""
    histories = tuple(map(to_float32, states))
    return forward(context, x, ws, histories, keys, {"fwd_x": -1})[0]


def forward(context: VjpContext, x, ws, histories, keys, wanted: dict[str, int]):
    """The products, the codes of x that are `wanted`, and the histories of x and each w."""
    of_x = tuple({k: v for k, v in state.items() if k == "x"} for state in histories)
    qx, amax_x = quantize_operand(context, x, wanted, largest_of(of_x), keys[0])
    ys, recorded = [], []
    for w, state, key, scope in zip(ws, histories, keys, context.scopes, strict=True):
        y, of_w = forward_matmul(context, qx["fwd_x"], w, state, key, scope, x.dtype)
        ys.append(y)
        recorded.append(record(state, "x", x, amax_x) | of_w)
    return tuple(ys), qx, tuple(recorded)


def forward_matmul(
    context: VjpContext, qx: Operand, w, histories: Histories, key, scope: str, dtype
):
    """One forward product, and the new history of w."""
    w = in_compute_dtype(w, dtype, context.recipe.fwd_w)
    qw, amax = quantize_operand(context, w, {"fwd_w": -2}, histories, key)
    y = named_matmul(context, "fwd", scope, qx, qw["fwd_w"], context.out_dtype)
    return checkpoint_name(y, GEMM_OUTPUT), record(histories, "w", w, amax)


def _matmuls_fwd(context: VjpContext, x, ws, states, keys):
    histories = tuple(map(to_float32, states))
    ys, qx, recorded = forward(context, x, ws, histories, keys, X_CASTS)
    x = checkpoint_name(qx["wgrad_x"], QUANTIZED_INPUT)
    return ys, _Residuals(x, ws, states, recorded, keys)


def _matmuls_bwd(context: VjpContext, kept: _Residuals, gs: tuple[jax.Array, ...]):
    of_all = (context.scopes, kept.ws, kept.states, kept.recorded, kept.keys, gs)
    each = zip(*of_all, strict=True)
    dxs, dws, states = zip(*(backward(context, kept.x, *one) for one in each), strict=True)
    return sum_cotangents(dxs), dws, states, None


def sum_cotangents(cotangents: Sequence[jax.Array]) -> jax.Array:
    """In the order in which JAX adds the cotangents of an array that several products read."""
    return functools.reduce(jnp.add, cotangents[::-1])


def backward(
    context: VjpContext, x: Operand, scope: str, w, state: Histories, recorded: Histories, key, g
):
    """dx, dw and the new state of one product, from the gradient of its result."""
    g = g.astype(context.dtype)
    qg, amax = quantize_operand(context, g, G_CASTS, to_float32(state), key)
    dx = input_gradient(context, scope, w, state, key, qg)
    dw = weight_gradient(context, x, scope, w, qg)
    return dx, dw, as_cotangent(state, recorded | record(to_float32(state), "g", g, amax))


def input_gradient(
    context: VjpContext, scope: str, w, state: Histories, key, qg: dict[str, Operand]
):
    w = in_compute_dtype(w, context.dtype, context.recipe.dgrad_w)
    qw, _ = quantize_operand(context, w, {"dgrad_w": -1}, to_float32(state), key)
    return named_matmul(context, "dgrad", scope, qg["dgrad_g"], qw["dgrad_w"], context.dtype)


def weight_gradient(context: VjpContext, x: Operand, scope: str, w, qg: dict[str, Operand]):
    return named_matmul(context, "wgrad", scope, x, qg["wgrad_g"], w.dtype)


quantized_matmuls.defvjp(_matmuls_fwd, _matmuls_bwd)
