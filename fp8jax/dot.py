"""The quantised matrix product, and its one derivative.

Any `dot_general` is brought to

    y[..., M, N] = x[..., M, K] w[..., K, N]

with at most one leading batch axis. There sits the only custom VJP of matrix products:

    forward    y  = Q(x) Q(w)       scales are constant along K or multiplied block by block
    backward   dx = Q(g) Q(w)^T
               dw = Q(x)^T Q(g)

each Q as the recipe says (recipe.py). Kept from forward to backward are

    x    quantised along the tokens, as wgrad reads it: one byte an element. The high-precision
         x itself only if the recipe leaves wgrad_x in high precision.
    w    the operand as it came, in practice the float32 parameter, which exists anyway; it is
         quantised again in the backward. So no gathered or cast weight is ever kept, under any
         rematerialisation policy.
    the amax histories, already updated.

Results: y and dx have x's dtype (y another one on request), dw has w's: with bfloat16 activations
and a float32 master weight, the weight's gradient leaves the accumulator in float32.

State. A delayed cast takes its amax from a history. The new history comes back as the *cotangent*
of the old one, which is how flax's `_overwrite_with_gradient` collection wants it. Cotangents of
a leaf that is used twice are added by JAX; a maximum is what is right. Hence inside a model the
leaf has flax's max-combining dtype (nn.max_combining); this file only gives back the dtype it got.

Backends. `emulated` quantises, dequantises and multiplies exactly, on every device and for every
recipe: it defines what a recipe means. `xla` hands the float8 codes to `lax.dot_general` and
multiplies the scales afterwards; on Blackwell it hands MXFP8 and NVFP4 codes with their scales to
`jax.nn.scaled_matmul`. The spelling that suggests itself, dequantise and then multiply,
was rejected for `xla`: where XLA does not recognise the pattern it runs a BF16 GEMM, and on a GPU
even drops the rounding, without a word.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import logging
from jax import lax
from jaxtyping import Array, Float, Shaped

from fp8jax import runtime
from fp8jax.kernels.block_scaled import scaled_matmul
from fp8jax.names import lookup
from fp8jax.recipe import Cast, Recipe, as_recipe
from fp8jax.runtime import Device
from fp8jax.scaling import (
    E8M0,
    TENSOR,
    NvFp4,
    Quantized,
    dequantize,
    hadamard,
    quantize,
    record_amax,
    tensor_amax,
)

State = dict[str, Array]  # operand "x", "w" or "g" -> its amax history [H]
# Order of the casts' keys: fold_in(key, index). Part of what makes a run reproducible.
KEY_ORDER = ("fwd_x", "fwd_w", "dgrad_g", "dgrad_w", "wgrad_x", "wgrad_g")


class Coded(NamedTuple):
    """A quantised operand: the codes and the cast that made them."""

    q: Quantized
    cast: Cast


Operand = Coded | jax.Array  # one side of a product; an array is left in high precision


# Backends -----------------------------------------------------------------------------------------


def _product(a: jax.Array, b: jax.Array, ca: int, cb: int, dtype) -> jax.Array:
    """sum over axis ca of a and cb of b (-1 or -2), a leading axis being a batch."""
    batch = tuple(range(a.ndim - 2))
    dimension_numbers = (((a.ndim + ca,), (b.ndim + cb,)), (batch, batch))
    # For float32 operands the default would be TF32 on a GPU.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, dimension_numbers, precision, preferred_element_type=dtype)


def _scale_of_result(a: Quantized, b: Quantized, ca: int, cb: int) -> jax.Array:
    """The product of two separable scales, broadcastable to [..., M, N]."""
    rows, columns = a.float_scale(), b.float_scale()
    rows = rows if ca == -1 else jnp.swapaxes(rows, -1, -2)
    columns = columns if cb == -2 else jnp.swapaxes(columns, -1, -2)
    return rows * columns


def _exact(operand: Operand) -> jax.Array:
    """The operand's numbers: in bfloat16 where that is exact, else in float32."""
    if not isinstance(operand, Coded):
        return operand
    # A code has at most four significant bits; a power of two changes none of them.
    exact_in_bf16 = operand.cast.scale.power_of_two
    return dequantize(operand.q, jnp.bfloat16 if exact_in_bf16 else jnp.float32)


def _emulated(a: Operand, b: Operand, ca: int, cb: int, dtype) -> jax.Array:
    """Exact products of the dequantised operands, accumulated in float32."""
    if isinstance(a, Coded) and isinstance(b, Coded) and a.cast.separable and b.cast.separable:
        # Codes alone are exact in bfloat16. The first barrier keeps XLA from undoing the rounding,
        # the second from making an FP8 GEMM of it, which on Hopper keeps 14 bits of the sums.
        codes = lax.optimization_barrier((a.q.values, b.q.values))
        left, right = lax.optimization_barrier(tuple(v.astype(jnp.bfloat16) for v in codes))
        y = _product(left, right, ca, cb, jnp.float32)
        return (y * _scale_of_result(a.q, b.q, ca, cb)).astype(dtype)
    left, right = _exact(a), _exact(b)
    if left.dtype != right.dtype:
        left, right = left.astype(jnp.float32), right.astype(jnp.float32)
    left, right = lax.optimization_barrier((left, right))
    return _product(left, right, ca, cb, jnp.float32).astype(dtype)


def _xla(a: Operand, b: Operand, ca: int, cb: int, dtype) -> jax.Array:
    """float8 codes into the matrix unit, scales multiplied into its result."""
    assert isinstance(a, Coded) and isinstance(b, Coded)  # what `_xla_refuses` is for
    if _block_scaled(a.cast, b.cast):
        return scaled_matmul(a.q, b.q, ca, cb).astype(dtype)
    y = _product(a.q.values, b.q.values, ca, cb, dtype)
    scale = _scale_of_result(a.q, b.q, ca, cb)
    if scale.size == 1 and runtime.folds_scales():
        # XLA folds this spelling, and only this, into the GEMM's epilogue, where scale and result
        # are float32 (a test on the GPU compares bits): no second pass over y.
        return y * scale.astype(dtype)
    # Elsewhere in float32: a scale in bfloat16 would be off by up to 2^-9 for the whole tensor.
    return (y.astype(jnp.float32) * scale).astype(dtype)


def _block_scaled(lhs: Cast, rhs: Cast) -> bool:
    """Whether this is MXFP8 or NVFP4 on both sides, the products that Blackwell has a unit for."""
    casts = (lhs, rhs)
    mxfp8 = all(c.tile.contract == 32 and isinstance(c.scale, E8M0) for c in casts)
    nvfp4 = all(c.tile.contract == 16 and isinstance(c.scale, NvFp4) for c in casts)
    return nvfp4 or (mxfp8 and all(c.format.bits == 8 for c in casts))


def _emulated_refuses(recipe: Recipe, device: Device) -> str | None:
    return None


def _xla_refuses(recipe: Recipe, device: Device) -> str | None:
    """Why `xla` cannot run a recipe on such a device, or None."""
    for name, (lhs, rhs) in recipe.products.items():
        if lhs is None and rhs is None:
            continue
        if lhs is None or rhs is None:
            return f"{name} has one quantised and one high-precision operand"
        if _block_scaled(lhs, rhs):
            if not device.block_scaled:
                return f"{name} has a scale for every {lhs.tile.contract} numbers: no unit for that"
            continue
        for cast in (lhs, rhs):
            if cast.format.bits != 8:
                return f"{name} has an operand in {cast.format.name}: XLA has no such 4-bit product"
            if not cast.separable:
                return (
                    f"{name} has scales that change along the contraction ({cast.tile}): XLA "
                    "multiplies scales only after the product"
                )
        if lhs.format.name == rhs.format.name == "e5m2":
            return f"{name} multiplies e5m2 by e5m2: no GPU does"
    if recipe.casts and device.platform != "cpu" and not device.fp8:
        return f"{device.kind} has no FP8 matrix unit: XLA would widen to 16 bits"
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """How a product of two `Operand`s is computed.

    Attributes:
      name: key in `BACKENDS`.
      matmul: (a, b, contracting axis of a, of b, dtype) -> [..., M, N]; at least one operand is
        `Coded`.
      refuses: (recipe, device) -> why this backend cannot run it there, or None.
    """

    name: str
    matmul: Callable[[Operand, Operand, int, int, jnp.dtype], jax.Array]
    refuses: Callable[[Recipe, Device], str | None]


BACKENDS: dict[str, Backend] = {
    "emulated": Backend(name="emulated", matmul=_emulated, refuses=_emulated_refuses),
    "xla": Backend(name="xla", matmul=_xla, refuses=_xla_refuses),
}


@functools.cache  # once a recipe and backend: the log says what runs, not how often
def _log_choice(recipe: str, backend: str, why: str) -> None:
    logging.info("recipe %s: backend %s (%s)", recipe, backend, why)


def choose_backend(backend: str | None, recipe: Recipe, device: Device | None = None) -> Backend:
    """The backend of that name, or for None the fastest that can run `recipe` on `device` (None:
    the default one of this process).

    Raises:
      ValueError: unknown name.
      NotImplementedError: a named backend that cannot run the recipe; says why.
    """
    here = runtime.device()
    device = here if device is None else device
    if backend is not None:
        chosen = lookup("backend", backend, BACKENDS)
        reason = chosen.refuses(recipe, device)
        if reason is not None:
            raise NotImplementedError(
                f"backend {backend!r} cannot run recipe {recipe.name!r} here ({device.kind}): "
                + reason
            )
        return chosen
    if not recipe.casts:
        return BACKENDS["emulated"]  # nothing to quantise: every backend is the same
    if not device.fp8:
        reason = f"{device.kind} has no FP8 matrix unit"
    else:
        reason = BACKENDS["xla"].refuses(recipe, device)
    choice = "xla" if reason is None else "emulated"
    if device == here:
        _log_choice(recipe.name, choice, reason or "codes into the matrix unit")
    return BACKENDS[choice]


# The product and its derivative -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Context:
    """What is static about a product: `dtype` is that of x and dx, `out_dtype` that of y."""

    recipe: Recipe
    backend: Backend
    dtype: jnp.dtype
    out_dtype: jnp.dtype


class _Residuals(NamedTuple):
    x: Any  # as wgrad reads it: a Quantized, or an array in high precision
    w: jax.Array
    state: State
    recorded: State  # the new histories of x and w; g's amax is not known yet
    key: jax.Array | None


def _operand(
    context: _Context, name: str, x: jax.Array, axis: int, histories: State, key
) -> Operand:
    """`x` as cast `name` of the recipe has it, `axis` being contracted."""
    cast: Cast | None = getattr(context.recipe, name)
    if cast is None:
        return x
    amax = None
    if cast.timing == "delayed":
        history = histories[name[-1]]
        amax = jnp.max(history) if cast.amax == "max" else history[0]
    if cast.hadamard > 1:
        x = hadamard(x, cast.hadamard, axis=axis)
    if cast.rounding == "stochastic":
        key = jax.random.fold_in(key, KEY_ORDER.index(name))
    else:
        key = None
    q = quantize(
        x, cast.format, cast.tile, contract_axis=axis, scale=cast.scale, amax=amax,
        rounding=cast.rounding, key=key,
    )  # fmt: skip
    return Coded(q, cast)


def _same_codes(one: Cast | None, other: Cast | None) -> bool:
    """Whether two casts of a tensor along different axes are one and the same."""
    if one is None or one != other:
        return False
    return one.tile == TENSOR and one.rounding == "nearest" and one.hadamard == 1


def _multiply(context: _Context, a: Operand, b: Operand, ca: int, cb: int, dtype) -> jax.Array:
    if isinstance(a, Coded) or isinstance(b, Coded):
        return context.backend.matmul(a, b, ca, cb, dtype)
    return _product(a, b, ca, cb, dtype)


def _record(histories: State, operand: str, x: jax.Array) -> State:
    if operand not in histories:
        return {}
    return {operand: record_amax(histories[operand], tensor_amax(x))}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(context: _Context, x: jax.Array, w: jax.Array, state: State, key) -> jax.Array:
    """[..., M, K] x [..., K, N] -> [..., M, N]."""
    return _forward(context, x, w, _to_float32(state), key)[0]


def _to_float32(state: State) -> State:
    return {k: lax.convert_element_type(v, jnp.float32) for k, v in state.items()}


def _forward(context: _Context, x, w, histories: State, key) -> tuple[jax.Array, Operand]:
    """y, and x quantised for it."""
    qx = _operand(context, "fwd_x", x, -1, histories, key)
    qw = _operand(context, "fwd_w", _compute(w, x.dtype, context.recipe.fwd_w), -2, histories, key)
    return _multiply(context, qx, qw, -1, -2, context.out_dtype), qx


def _compute(w: jax.Array, dtype, cast: Cast | None) -> jax.Array:
    """A weight that is not quantised is multiplied in the activations' dtype; one that is, is
    quantised from its master."""
    return w.astype(dtype) if cast is None else w


def _dot_fwd(context: _Context, x, w, state: State, key):
    recipe, histories = context.recipe, _to_float32(state)
    y, qx = _forward(context, x, w, histories, key)
    if not _same_codes(recipe.fwd_x, recipe.wgrad_x):
        qx = _operand(context, "wgrad_x", x, -2, histories, key)
    recorded = _record(histories, "x", x) | _record(histories, "w", w)
    kept_x = qx.q if isinstance(qx, Coded) else qx
    return y, _Residuals(kept_x, w, state, recorded, key)


def _dot_bwd(context: _Context, kept: _Residuals, g: jax.Array):
    recipe, histories = context.recipe, _to_float32(kept.state)
    g = g.astype(context.dtype)
    w = _compute(kept.w, g.dtype, recipe.dgrad_w)
    qw = _operand(context, "dgrad_w", w, -1, histories, kept.key)
    qg = _operand(context, "dgrad_g", g, -1, histories, kept.key)
    dx = _multiply(context, qg, qw, -1, -1, g.dtype)
    if not _same_codes(recipe.dgrad_g, recipe.wgrad_g):
        qg = _operand(context, "wgrad_g", g, -2, histories, kept.key)
    qx: Operand = kept.x if recipe.wgrad_x is None else Coded(kept.x, recipe.wgrad_x)
    dw = _multiply(context, qx, qg, -2, -2, kept.w.dtype)
    new = kept.recorded | _record(histories, "g", g)
    new_state = {k: lax.convert_element_type(new[k], v.dtype) for k, v in kept.state.items()}
    return dx, dw, new_state, None


_dot.defvjp(_dot_fwd, _dot_bwd)


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
    recipe = as_recipe(recipe)
    out_dtype = lhs.dtype if preferred_element_type is None else jnp.dtype(preferred_element_type)
    context = _Context(recipe, choose_backend(backend, recipe), lhs.dtype, out_dtype)
    expected = recipe.histories
    given = {} if state is None else {k: v.shape[-1] for k, v in state.items()}
    if given != expected:
        raise ValueError(
            f"recipe {recipe.name!r} keeps amax histories {expected} (operand: length), got {given}"
        )
    if recipe.stochastic and key is None:
        raise ValueError(f"recipe {recipe.name!r} rounds stochastically and needs a key")
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    lhs_free = [a for a in range(lhs.ndim) if a not in (*lhs_contract, *lhs_batch)]
    rhs_free = [a for a in range(rhs.ndim) if a not in (*rhs_contract, *rhs_batch)]
    x = _merge_axes(lhs, lhs_batch, lhs_free, lhs_contract)
    w = _merge_axes(rhs, rhs_batch, rhs_contract, rhs_free)
    y = _dot(context, x, w, {} if state is None else state, key)
    batch = [lhs.shape[a] for a in lhs_batch]
    return y.reshape(*batch, *(lhs.shape[a] for a in lhs_free), *(rhs.shape[a] for a in rhs_free))


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
