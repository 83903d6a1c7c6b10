"""The custom VJP of the quantized GEMM (promotable.py and fused_mlp.py have theirs from its parts).

    forward    y  = Q(x) Q(w)
    backward   dx = Q(g) Q(w)^T
               dw = Q(x)^T Q(g)

Each Q is a cast of the recipe (numerics/recipe.py). Scales that are constant along the contracting
axis multiply the result, others multiply block by block. Saved for the backward are

    x    quantized along the tokens, as wgrad reads it: one byte per element. If the recipe leaves
         wgrad_x in high precision, x itself. Also with `requantize`, for an x that is kept anyway,
         because the backward of what made it reads it: it is quantized in the backward, to the same
         codes.
    w    the operand as given, in practice the float32 parameter, which exists anyway. The backward
         quantizes it again, so no gathered or cast weight is saved under any rematerialization
         policy.
    the amax histories, with x and w already recorded (amax_history.py).
    the statistics of the casts of x and w, where there are probes (probe.py).

A rematerialization policy can save what has a name: GEMM_OUTPUT, the results of the forward GEMMs,
and QUANTIZED_INPUT, the quantized x. The policies of `jax.checkpoint_policies` look for
`dot_general` and would miss GEMMs that are kernels.

Several weights may share one x (queries, keys and values). It is quantized once and saved once.
With `shared` casts the weights have one scale, as if they were one array, and so have their
gradients g.

Dtypes: y and dx have x's dtype (y another one on request), dw has w's. With bfloat16 activations
and a float32 master weight, the weight gradient leaves the accumulator in float32.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from fp8jax.gemm.backends.choice import Backend
from fp8jax.gemm.backends.operands import (
    CastRequest,
    Operand,
    PlainOperand,
    QuantizedOperand,
    plain_matmul,
)
from fp8jax.gemm.histories.amax_history import (
    Histories,
    as_cotangent,
    largest_of,
    record,
    self_seeded,
    stored_amax,
    to_float32,
)
from fp8jax.gemm.probe import Probe, Rows, measure, repeated
from fp8jax.gemm.probe import as_cotangent as probe_cotangent
from fp8jax.gemm.sharding.manual_axes import (
    Axes,
    PooledAxes,
    largest_like,
    largest_over,
    summed_like,
    varying,
)
from fp8jax.numerics.formats import folded
from fp8jax.numerics.recipe import Cast, Recipe
from fp8jax.numerics.tiles import TENSOR, joint_amax, tensor_amax

# Names for jax.checkpoint_policies.save_only_these_names.
GEMM_OUTPUT, QUANTIZED_INPUT = "fp8jax.product", "fp8jax.operand"

# Casts of the operands that two GEMMs read: name -> contracting axis.
X_CASTS = {"fwd_x": -1, "wgrad_x": -2}
G_CASTS = {"dgrad_g": -1, "wgrad_g": -2}
W_CASTS = {"dgrad_w": -1}  # of the backward

# A cast's key is folded(key, index in this order). Changing the order changes training runs.
KEY_ORDER = ("fwd_x", "fwd_w", "dgrad_g", "dgrad_w", "wgrad_x", "wgrad_g")


@dataclasses.dataclass(frozen=True)
class VjpContext:
    """The static settings of GEMMs that share one x.

    Attributes:
      recipe, backend: how operands are quantized and multiplied.
      dtype: of x and dx.
      out_dtype: of y.
      scopes: the name of each weight's module in the compiled program; "" adds no name.
      seeded: whether no history is empty; if False, empty ones seed themselves (amax_history.py).
      requantize: whether x is saved for the backward and quantized there, instead of its codes.
      x_axes: mesh axes along which x varies inside `shard_map` (manual_axes.py).
      pooled: mesh axes whose devices share the scale of an operand.
    """

    recipe: Recipe
    backend: Backend
    dtype: jnp.dtype
    out_dtype: jnp.dtype
    scopes: tuple[str, ...]
    seeded: bool
    requantize: bool = False
    x_axes: Axes = frozenset()
    pooled: PooledAxes = PooledAxes()


class _Residuals(NamedTuple):
    """What the forward saves for the backward. Tuples have one entry per weight."""

    x: Operand  # as wgrad reads it, or as `_wgrad_x` quantizes it
    ws: tuple[jax.Array, ...]
    histories: tuple[Histories, ...]
    new_histories: tuple[Histories, ...]  # of x and w; the backward adds g's
    keys: tuple[jax.Array | None, ...]
    probes: tuple[Probe | None, ...]
    rows: tuple[Rows, ...]  # of x and w; the backward adds the others


class JointAmax(NamedTuple):
    """The amax of all weights that share x, for shared casts; None where each has its own scale."""

    w: jax.Array | None = None
    g: jax.Array | None = None


# Quantizing and multiplying one operand -----------------------------------------------------------


def cast_requests(
    recipe: Recipe, cast_axes: dict[str, int], histories: Histories, key
) -> dict[str, CastRequest]:
    """Return name -> request for each named cast, without the casts that are None.

    Args:
      cast_axes: name of the cast -> contracting axis of its operand.
      histories: the layer's histories in float32, read by delayed casts.
      key: a PRNG key, for casts that round stochastically.
    """
    requests: dict[str, CastRequest] = {}
    for name, axis in cast_axes.items():
        cast: Cast | None = getattr(recipe, name)
        if cast is None:
            continue
        amax = cast_key = None
        if cast.timing == "delayed":
            amax = stored_amax(histories[name[-1]], cast)
        if cast.rounding == "stochastic":
            cast_key = folded(key, KEY_ORDER.index(name))
        requests[name] = CastRequest(cast, axis, amax, cast_key)
    return requests


def quantize_operand(
    context: VjpContext,
    x: jax.Array,
    cast_axes: dict[str, int],
    histories: Histories,
    key,
    joint: jax.Array | None = None,
) -> tuple[dict[str, Operand], jax.Array | None]:
    """Quantize `x` for each requested GEMM; also return max|x| where the kernel computed it.

    Arguments as in `cast_requests`; `joint` is the amax for shared casts, None for x's own. The
    operands are returned by the names of their casts; those without a cast are `PlainOperand`.
    """
    (operand,) = {name[-1] for name in cast_axes}
    pooled = getattr(context.pooled, operand) & varying(x)
    if histories and not context.seeded:
        histories = self_seeded(histories, operand, largest_over(tensor_amax(x), pooled))
    requests = cast_requests(context.recipe, cast_axes, histories, key)
    if pooled:
        requests = _with_amax(requests, largest_over(tensor_amax(x), pooled))
    if joint is not None:
        requests = {
            name: request._replace(amax=joint) if request.cast.shared else request
            for name, request in requests.items()
        }
    operands: dict[str, Operand] = {name: PlainOperand(x, axis) for name, axis in cast_axes.items()}
    if not requests:
        return operands, None
    quantized, amax = context.backend.quantize(x, tuple(requests.values()))
    return operands | dict(zip(requests, quantized, strict=True)), amax


def _with_amax(requests: dict[str, CastRequest], amax: jax.Array) -> dict[str, CastRequest]:
    """Return the requests, with `amax` for the casts that take the amax of the whole tensor.

    A cast with a Hadamard transform takes the amax of the transformed tensor, so it stays as it is.
    """

    def takes(cast: Cast) -> bool:
        return cast.tile == TENSOR and cast.timing in ("current", "seeding") and cast.hadamard == 1

    return {
        name: request._replace(amax=amax) if takes(request.cast) else request
        for name, request in requests.items()
    }


def shared_amax(
    context: VjpContext, casts: Sequence[str], arrays: Sequence[jax.Array]
) -> jax.Array | None:
    """Return max|x| over the arrays if one of the named casts is shared, else None."""
    recipe_casts = context.recipe.by_name()
    shared = [cast for name in casts if (cast := recipe_casts[name]) is not None and cast.shared]
    if not shared or len(arrays) < 2:
        return None
    amax = joint_amax(arrays)
    pooled = getattr(context.pooled, casts[0][-1])
    return largest_over(amax, pooled & varying(amax))


def named_matmul(
    context: VjpContext, name: str, scope: str, a: Operand, b: Operand, dtype
) -> jax.Array:
    """Compute GEMM `name` of the recipe under scopes that stay in the compiled program.

    analysis/gemms.py reads them.
    """
    module = jax.named_scope(scope) if scope else contextlib.nullcontext()
    with module, jax.named_scope(f"{context.recipe.name}.{name}"):
        if isinstance(a, QuantizedOperand) or isinstance(b, QuantizedOperand):
            return context.backend.matmul(a, b, dtype, getattr(context.recipe.accumulation, name))
        return plain_matmul(a, b, dtype)


def in_compute_dtype(w: jax.Array, dtype, cast: Cast | None) -> jax.Array:
    """Return the weight in the activations' dtype if no cast quantizes it, else unchanged.

    A cast quantizes the master weight directly.
    """
    return w.astype(dtype) if cast is None else w


# The custom VJP -----------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def quantized_matmuls(
    context: VjpContext,
    x: jax.Array,
    ws: tuple[jax.Array, ...],
    histories: tuple[Histories, ...],
    keys,
    probes: tuple[Probe | None, ...],
) -> tuple[jax.Array, ...]:
    """Multiply x [..., M, K] by each w [..., K, N] to [..., M, N]; quantize x once for all.

    `histories`, `keys` and `probes` have one entry per weight. The cotangent of `histories` is
    their next value, that of `probes` the statistics of the casts.
    """
    in_float32 = tuple(map(to_float32, histories))
    return forward(context, x, ws, in_float32, keys, {"fwd_x": -1})[0]


def forward(
    context: VjpContext,
    x: jax.Array,
    ws: Sequence[jax.Array | QuantizedOperand],
    histories: Sequence[Histories],
    keys,
    x_casts: dict[str, int],
    probes: Sequence[Probe | None] | None = None,
) -> tuple[tuple[jax.Array, ...], dict[str, Operand], tuple[Histories, ...], tuple[Rows, ...]]:
    """Compute the forward GEMMs of one x.

    Args:
      ws: the weights, or what fwd_w has made of all of them (frozen.py).
      histories: in float32, one entry per weight, like `ws` and `keys`.
      x_casts: the casts of x to compute, name -> contracting axis; contains fwd_x.
      probes: one entry per weight; None measures nothing.

    Returns:
      y for each weight, the operands of `x_casts`, the new histories of x and each w, and the
      statistics of these casts, {} without a probe.
    """
    qx, amax_x = quantize_operand(context, x, x_casts, _histories_of_x(histories), keys[0])
    joint = shared_amax(context, ("fwd_w",), [w for w in ws if isinstance(w, jax.Array)])
    ys, new_histories, rows = [], [], []
    rows_x: dict[Any, Rows] = {}  # by what-if recipe
    each = zip(ws, histories, keys, context.scopes, probes or (None,) * len(ws), strict=True)
    for w, one, key, scope, probe in each:
        y, of_w, rows_w = forward_matmul(
            context, qx["fwd_x"], w, one, key, scope, x.dtype, joint, probe
        )
        ys.append(y)
        new_histories.append(record(one, "x", x, amax_x) | of_w)
        what_if = None if probe is None else probe.what_if
        if what_if not in rows_x:
            rows_x[what_if] = measure(probe, x, qx, x_casts, key)
        rows.append(rows_x[what_if] | rows_w)
    return tuple(ys), qx, tuple(new_histories), tuple(rows)


def _histories_of_x(histories: Sequence[Histories]) -> Histories:
    """Return the history of x, if the recipe has one, from those of the weights that share it."""
    return largest_of(tuple({k: v for k, v in one.items() if k == "x"} for one in histories))


def forward_matmul(
    context: VjpContext,
    qx: Operand,
    w,
    histories: Histories,
    key,
    scope: str,
    dtype,
    joint: jax.Array | None = None,
    probe: Probe | None = None,
) -> tuple[jax.Array, Histories, Rows]:
    """Compute one forward GEMM; return y, the new history of w, and the statistics of its cast.

    Args:
      w: the weight, or what fwd_w has made of it (frozen.py), which has neither of the two.
      dtype: of x.
      joint: the amax of all weights that share the scale.
    """
    if isinstance(w, QuantizedOperand):
        return named_matmul(context, "fwd", scope, qx, w, context.out_dtype), {}, {}
    w, master, axes = in_compute_dtype(w, dtype, context.recipe.fwd_w), w, {"fwd_w": -2}
    qw, amax = quantize_operand(context, w, axes, histories, key, joint)
    y = named_matmul(context, "fwd", scope, qx, qw["fwd_w"], context.out_dtype)
    rows = measure(probe, master, qw, axes, key)
    return checkpoint_name(y, GEMM_OUTPUT), record(histories, "w", w, amax), rows


@jax.custom_jvp
def _first_derivative(arrays: Any) -> Any:
    """Return arrays, gradients or what they are computed from, that nobody may differentiate.

    JAX would differentiate the casts of forward and backward, which are constant almost everywhere:
    second derivatives would be wrong, mostly zero.
    """
    return arrays


@_first_derivative.defjvp
def _refuse_second_derivative(primals, tangents):
    raise NotImplementedError(
        "quantized GEMMs have first derivatives only: JAX would differentiate their casts. For"
        " second derivatives (a Hessian, a gradient penalty) use the recipe 'bf16'"
    )


def _matmuls_fwd(context: VjpContext, x, ws, histories, keys, probes):
    saved_ws = ws  # as given: a loop over layers stacks anything else a second time
    if context.recipe.casts:  # whose derivatives are zero: they would hide a second derivative
        x, ws = _first_derivative((x, ws))
    in_float32 = tuple(map(to_float32, histories))
    casts = {"fwd_x": -1} if _requantizes(context, probes) else X_CASTS
    ys, qx, new_histories, rows = forward(context, x, ws, in_float32, keys, casts, probes)
    if _requantizes(context, probes):
        kept: Operand = PlainOperand(x, X_CASTS["wgrad_x"])
    else:
        # The barrier keeps XLA from saving x itself and quantizing it in the backward.
        kept = checkpoint_name(lax.optimization_barrier(qx["wgrad_x"]), QUANTIZED_INPUT)
    return ys, _Residuals(kept, saved_ws, histories, new_histories, keys, probes, rows)


def _requantizes(context: VjpContext, probes: Sequence[Probe | None]) -> bool:
    """Whether the backward quantizes x. Probes measure both of its casts in the forward."""
    return context.requantize and all(probe is None for probe in probes)


def _wgrad_x(context: VjpContext, saved: _Residuals) -> Operand:
    """Return the operand x of wgrad, quantized now if the forward has saved x itself."""
    if not _requantizes(context, saved.probes):
        return saved.x
    assert isinstance(saved.x, PlainOperand)
    histories = _histories_of_x(tuple(map(to_float32, saved.histories)))
    casts = {"wgrad_x": X_CASTS["wgrad_x"]}
    return quantize_operand(context, saved.x.x, casts, histories, saved.keys[0])[0]["wgrad_x"]


def _matmuls_bwd(context: VjpContext, saved: _Residuals, gs: tuple[jax.Array, ...]):
    x = _wgrad_x(context, saved)
    dxs, dws, histories, statistics = [], [], [], []
    joint = JointAmax(
        w=shared_amax(context, ("dgrad_w",), saved.ws),
        g=shared_amax(context, tuple(G_CASTS), [g.astype(context.dtype) for g in gs]),
    )
    for scope, w, old, new, key, g, probe, rows in zip(
        context.scopes,
        saved.ws,
        saved.histories,
        saved.new_histories,
        saved.keys,
        gs,
        saved.probes,
        saved.rows,
        strict=True,
    ):
        dx, dw, cotangent, measured = backward(
            context, x, scope, w, old, new, key, g, joint, probe, rows
        )
        dxs.append(dx)
        dws.append(dw)
        histories.append(cotangent)
        statistics.append(measured)
    dx = summed_like(sum_cotangents(dxs), context.x_axes)
    if context.recipe.casts:
        dx, dws = _first_derivative(dx), [_first_derivative(dw) for dw in dws]
    return dx, tuple(dws), tuple(histories), None, tuple(statistics)


quantized_matmuls.defvjp(_matmuls_fwd, _matmuls_bwd)


def backward(
    context: VjpContext,
    x: Operand,
    scope: str,
    w: jax.Array,
    histories: Histories,
    new_histories: Histories,
    key,
    g: jax.Array,
    joint: JointAmax,
    probe: Probe | None,
    rows: Rows,
) -> tuple[jax.Array, jax.Array, Histories, Probe | None]:
    """Compute the backward GEMMs of one weight from the gradient g of its result.

    Args:
      x: the operand x of wgrad.
      histories: as given to the forward, in their own dtype.
      new_histories: those of x and w, from the forward.
      joint: amaxes for shared casts.
      rows: the statistics of the casts of the forward, {} without a probe.

    Returns:
      dx, dw and the cotangents of `histories` and of `probe`.
    """
    g = g.astype(context.dtype)
    qg, amax = quantize_operand(context, g, G_CASTS, to_float32(histories), key, joint.g)
    dx, qw = input_gradient(context, scope, w, histories, key, qg, joint.w)
    rows = rows | measure(probe, w, qw, W_CASTS, key) | measure(probe, g, qg, G_CASTS, key)
    if probe is not None:  # XLA drops what was measured for nothing
        rows |= repeated(context.recipe, probe.what_if, rows)
    dw = weight_gradient(context, x, scope, w, qg)
    of_g = record(to_float32(histories), "g", g, amax)
    following = {
        operand: largest_like(history, varying(histories[operand]))
        for operand, history in (new_histories | of_g).items()
    }
    return (
        dx,
        summed_like(dw, varying(w)),
        as_cotangent(histories, following),
        probe_cotangent(probe, rows),
    )


def input_gradient(
    context: VjpContext,
    scope: str,
    w,
    histories: Histories,
    key,
    qg: dict[str, Operand],
    joint_w: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, Operand]]:
    """Compute the dgrad GEMM, dx = Q(g) Q(w)^T; also return the operand Q(w)."""
    w = in_compute_dtype(w, context.dtype, context.recipe.dgrad_w)
    qw, _ = quantize_operand(context, w, W_CASTS, to_float32(histories), key, joint_w)
    dx = named_matmul(context, "dgrad", scope, qg["dgrad_g"], qw["dgrad_w"], context.dtype)
    return dx, qw


def weight_gradient(
    context: VjpContext, x: Operand, scope: str, w, qg: dict[str, Operand]
) -> jax.Array:
    """Compute the wgrad GEMM, dw = Q(x)^T Q(g), in w's dtype."""
    return named_matmul(context, "wgrad", scope, x, qg["wgrad_g"], w.dtype)


def sum_cotangents(cotangents: Sequence[jax.Array]) -> jax.Array:
    """Add in the order in which JAX adds the cotangents of an array that several GEMMs read."""
    return functools.reduce(jnp.add, cotangents[::-1])
