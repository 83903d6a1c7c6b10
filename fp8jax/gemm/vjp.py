"""The custom VJP of the quantized GEMM; those of promotable.py and fused_mlp.py use its parts.

    forward    y  = Q(x) Q(w)
    backward   dx = Q(g) Q(w)^T
               dw = Q(x)^T Q(g)

Each Q is a cast of the recipe (numerics/recipe.py). Scales that are constant along the contracting
axis multiply the result, others multiply block by block. Saved for the backward are

    x    quantized along the tokens, as wgrad reads it: one byte per element. If the recipe leaves
         wgrad_x in high precision, x itself. With `recompute_codes`, x itself instead of codes:
         what made x keeps it for its own backward anyway, and ours quantizes it to the same codes.
    w    the weight as given, with its summaries, key and probe (weight.py). Its value is in
         practice the float32 parameter, which exists anyway. The backward quantizes it again, so no
         gathered or cast weight is saved under any rematerialization policy.
    what the casts of x and w have observed (weight.py): answers to amax histories, and statistics
         where there are probes.

A rematerialization policy can save what has a name: GEMM_OUTPUT, the results of the forward GEMMs,
and QUANTIZED_INPUT, the quantized x. The policies of `jax.checkpoint_policies` look for
`dot_general` and would miss GEMMs that are kernels.

Several weights may share one x (queries, keys and values). It is quantized once and saved once.
With a `shared_scale` the weights have one scale, as if they were one array, and so have their
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
    inner_numbers,
    plain_matmul,
    scaled,
)
from fp8jax.gemm.first_derivative import first_derivative_only
from fp8jax.gemm.histories.summary import (
    Summaries,
    largest_of,
    record,
    self_seeded,
    stored_amax,
)
from fp8jax.gemm.probe import Statistics, measure
from fp8jax.gemm.sharding.gathered import gathered
from fp8jax.gemm.sharding.manual_axes import (
    Axes,
    PooledAxes,
    largest_over,
    summed_like,
    varying,
)
from fp8jax.gemm.weight import Observed, Weight, cotangent, observe
from fp8jax.numerics.formats import folded, key_words
from fp8jax.numerics.recipe import Cast, Recipe
from fp8jax.numerics.scales import Delayed, Mse
from fp8jax.numerics.tiles import TENSOR, joint_amax, tensor_amax

# Names for jax.checkpoint_policies.save_only_these_names.
GEMM_OUTPUT, QUANTIZED_INPUT = "fp8jax.product", "fp8jax.operand"

# Contracting axes of the casts of x, of g, and of w in the backward, by their names.
X_CASTS = {"fwd_x": -1, "wgrad_x": -2}
G_CASTS = {"dgrad_g": -1, "wgrad_g": -2}
W_CASTS = {"dgrad_w": -1}  # of the backward

# Contracting axes of the forward's casts, by their operands.
FORWARD_AXES = {"x": -1, "w": -2}

# A cast's key is folded(key, index in this order). Changing the order changes training runs.
KEY_ORDER = ("fwd_x", "fwd_w", "dgrad_g", "dgrad_w", "wgrad_x", "wgrad_g")
# The signs of both operands of a GEMM are folded(key, this number), beyond those of probe.py.
SIGNS = {"fwd": 12, "dgrad": 13, "wgrad": 14}


@dataclasses.dataclass(frozen=True)
class GemmSettings:
    """The static settings of GEMMs that share one x.

    Attributes:
      recipe, backend: how operands are quantized and multiplied.
      dtype: of x and dx.
      out_dtype: of y.
      seeded: promise that no history is empty; if False, an empty one is read as the operand's own
        amax (histories/summary.py).
      recompute_codes: whether x is saved for the backward and quantized there, not its codes.
      x_axes: mesh axes along which x varies inside `shard_map` (manual_axes.py).
      pooled: mesh axes whose devices share the scale of an operand.
    """

    recipe: Recipe
    backend: Backend
    dtype: jnp.dtype
    out_dtype: jnp.dtype
    seeded: bool
    recompute_codes: bool = False
    x_axes: Axes = frozenset()
    pooled: PooledAxes = PooledAxes()


class _Residuals(NamedTuple):
    """What the forward saves for the backward."""

    x: Operand  # wgrad's operand, or the x from which `_wgrad_x` makes it
    weights: tuple[Weight, ...]
    observed: tuple[Observed, ...]  # of x and w; the backward adds g


class JointAmax(NamedTuple):
    """The largest amax of all weights that share x, and of all gradients g of their results.

    For shared scales; None where each has its own.
    """

    w: jax.Array | None = None
    g: jax.Array | None = None


# Quantizing and multiplying one operand -----------------------------------------------------------


def cast_requests(
    recipe: Recipe,
    cast_axes: dict[str, int],
    summaries: Summaries,
    key,
    wgrad_signs: jax.Array | None = None,
) -> dict[str, CastRequest]:
    """Returns name -> request for each named cast, without the casts that are None.

    Args:
      cast_axes: name of the cast -> contracting axis of its operand.
      summaries: that of the operand's history in float32, read by delayed casts.
      key: a PRNG key, for casts that round stochastically or draw signs.
      wgrad_signs: those of wgrad's other operand; None to draw them from the key.
    """
    requests: dict[str, CastRequest] = {}
    for name, axis in cast_axes.items():
        cast: Cast | None = getattr(recipe, name)
        if cast is None:
            continue
        amax = cast_key = signs = None
        if isinstance(cast.scale, Delayed):
            amax = stored_amax(summaries[name[-1]], cast.scale)
        if cast.rounding == "stochastic":
            cast_key = folded(key, KEY_ORDER.index(name))
        if cast.redrawn:
            gemm, _, _ = name.partition("_")
            signs = wgrad_signs if gemm == "wgrad" else None
            signs = key_words(folded(key, SIGNS[gemm]))[0] if signs is None else signs
        requests[name] = CastRequest(cast, axis, amax, cast_key, signs)
    return requests


def quantize_operand(
    settings: GemmSettings,
    x: jax.Array,
    cast_axes: dict[str, int],
    weight: Weight,
    joint: jax.Array | None = None,
    wgrad_signs: jax.Array | None = None,
) -> tuple[dict[str, Operand], jax.Array | None]:
    """Quantizes `x` for each requested GEMM; also returns max|x| where the kernel computed it.

    Args:
      x: the operand x, w or g of a GEMM of the weight.
      cast_axes: as in `cast_requests`.
      weight: has the operand's history and the PRNG key.
      joint: the amax for a shared scale, None for x's own.
      wgrad_signs: as in `cast_requests`.

    Returns:
      The operands by the names of their casts, those without a cast as `PlainOperand`, and the amax
      or None.
    """
    (operand,) = {name[-1] for name in cast_axes}
    pooled = getattr(settings.pooled, operand) & varying(x)
    summaries = weight.histories_of(operand)
    if summaries and not settings.seeded:
        summaries = self_seeded(summaries, operand, largest_over(tensor_amax(x), pooled))
    requests = cast_requests(settings.recipe, cast_axes, summaries, weight.key, wgrad_signs)
    requests, again = _without_requantized(settings.recipe, operand, requests)
    if again and f"fwd_{operand}" not in requests:
        forward_axes = {f"fwd_{operand}": FORWARD_AXES[operand]}
        requests |= cast_requests(settings.recipe, forward_axes, summaries, weight.key)
    if pooled:
        if any(isinstance(request.cast.rule, Mse) for request in requests.values()):
            raise NotImplementedError(
                f"recipe {settings.recipe.name!r} has scales of least squared error, of which each"
                " device of a shard_map would find its own"
            )
        requests = _with_amax(requests, largest_over(tensor_amax(x), pooled))
    if joint is not None:
        requests = {
            name: request._replace(amax=joint) if request.cast.shared_scale else request
            for name, request in requests.items()
        }
    operands: dict[str, Operand] = {name: PlainOperand(x, axis) for name, axis in cast_axes.items()}
    if not requests:
        return operands, None
    quantized, amax = settings.backend.quantize(x, tuple(requests.values()))
    found: dict[str, Operand] = dict(zip(requests, quantized, strict=True))
    if again:
        multiplied = found[f"fwd_{operand}"]
        assert isinstance(multiplied, QuantizedOperand)
        found |= _requantized(settings, multiplied, operand, x.shape, again)
    return operands | {name: found[name] for name in found if name in cast_axes}, amax


def _without_requantized(
    recipe: Recipe, operand: str, requests: dict[str, CastRequest]
) -> tuple[dict[str, CastRequest], dict[str, CastRequest]]:
    """Returns the requests of x itself, and those of what the forward multiplied, if not x."""
    again: dict[str, CastRequest] = {}
    if operand in FORWARD_AXES and recipe.by_name()[f"fwd_{operand}"] is not None:
        again = {name: each for name, each in requests.items() if each.cast.requantizes}
    return {name: each for name, each in requests.items() if name not in again}, again


def _requantized(
    settings: GemmSettings,
    multiplied: QuantizedOperand,
    operand: str,
    shape: tuple[int, ...],
    requests: dict[str, CastRequest],
) -> dict[str, Operand]:
    """Quantizes what the forward multiplied, an operand of that shape, without its outer scale.

    The outer scale multiplies the results' instead: bfloat16 then holds most operands exactly.
    """
    numbers, outer = inner_numbers(multiplied)
    if multiplied.axis != FORWARD_AXES[operand]:  # the layout of a kernel
        numbers = jnp.swapaxes(numbers, -1, -2)
    numbers = numbers[tuple(slice(size) for size in shape)]
    quantized, _ = settings.backend.quantize(numbers, tuple(requests.values()))
    return {
        name: each if outer is None else scaled(each, outer)
        for name, each in zip(requests, quantized, strict=True)
    }


def _with_amax(requests: dict[str, CastRequest], amax: jax.Array) -> dict[str, CastRequest]:
    """Returns the requests, with `amax` for the casts that take the amax of the whole tensor.

    A cast with a Hadamard transform takes the amax of the transformed tensor, so it stays as it is.
    """

    def takes(cast: Cast) -> bool:
        return cast.tile == TENSOR and cast.timing == "current" and cast.hadamard == 1

    return {
        name: request._replace(amax=amax) if takes(request.cast) else request
        for name, request in requests.items()
    }


def shared_amax(
    settings: GemmSettings, casts: Sequence[str], arrays: Sequence[jax.Array]
) -> jax.Array | None:
    """Returns max|x| over the arrays if one of the named casts has a shared scale, else None."""
    recipe_casts = settings.recipe.by_name()
    shared = [
        cast for name in casts if (cast := recipe_casts[name]) is not None and cast.shared_scale
    ]
    if not shared or len(arrays) < 2:
        return None
    amax = joint_amax(arrays)
    pooled = getattr(settings.pooled, casts[0][-1])
    return largest_over(amax, pooled & varying(amax))


def named_matmul(
    settings: GemmSettings, name: str, scope: str, a: Operand, b: Operand, dtype
) -> jax.Array:
    """Computes GEMM `name` of the recipe under scopes that stay in the compiled program.

    analysis/gemms.py reads them.
    """
    module = jax.named_scope(scope) if scope else contextlib.nullcontext()
    with module, jax.named_scope(f"{settings.recipe.name}.{name}"):
        if isinstance(a, QuantizedOperand) or isinstance(b, QuantizedOperand):
            return settings.backend.matmul(a, b, dtype, getattr(settings.recipe.accumulation, name))
        return plain_matmul(a, b, dtype)


def _whole(settings: GemmSettings, weight: Weight, operand: Operand, axis: int) -> Operand:
    """Returns the weight's operand as its GEMM reads it: gathered before it is dequantized.

    Statistics are of what each device has. A cast that draws signs has turned the weight [K, N],
    whose contracting axis was `axis`; that is left to XLA.
    """
    if weight.gathered is None or not settings.backend.dequantizes:
        return operand
    if isinstance(operand, PlainOperand) or operand.axis != axis:
        return operand
    return gathered(operand, weight.gathered)


def in_compute_dtype(w: jax.Array, dtype, cast: Cast | None) -> jax.Array:
    """Returns the weight in the activations' dtype if no cast quantizes it, else unchanged.

    A cast quantizes the master weight directly.
    """
    return w.astype(dtype) if cast is None else w


# The custom VJP -----------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def quantized_matmuls(
    settings: GemmSettings, x: jax.Array, weights: tuple[Weight, ...]
) -> tuple[jax.Array, ...]:
    """Multiplies x [..., M, K] by each weight [..., K, N] to [..., M, N]; quantizes x once for all.

    The cotangent of a weight is what weight.py says.
    """
    unmeasured = [dataclasses.replace(weight, probe=None) for weight in weights]
    return forward(settings, x, unmeasured, {"fwd_x": -1})[0]


def forward(
    settings: GemmSettings, x: jax.Array, weights: Sequence[Weight], x_casts: dict[str, int]
) -> tuple[tuple[jax.Array, ...], dict[str, Operand], tuple[Observed, ...]]:
    """Computes the forward GEMMs of one x.

    Args:
      weights: all of them, or none, are frozen.
      x_casts: the casts of x to compute, name -> contracting axis; contains fwd_x.

    Returns:
      y for each weight, the operands of `x_casts`, and for each weight what the casts of x and w
      have observed.
    """
    qx, amax = quantize_operand(settings, x, x_casts, _of_shared_x(weights))
    joint = shared_amax(
        settings, ("fwd_w",), [w.value for w in weights if isinstance(w.value, jax.Array)]
    )
    ys, observed = [], []
    # Of one x: measured once for all probes with one what-if recipe.
    of_one_x: dict[Any, Statistics] = {}
    for weight in weights:
        y, of_w = forward_matmul(settings, qx["fwd_x"], weight, x.dtype, joint)
        # A probe may have no what-if recipe, and a weight no probe.
        like = None if weight.probe is None else (weight.probe.what_if,)
        if like not in of_one_x:
            of_one_x[like] = measure(weight.probe, x, qx, x_casts, weight.key)
        of_x = Observed(record(weight.histories_of("x"), "x", x, amax), of_one_x[like])
        ys.append(y)
        observed.append(of_x.also(of_w))
    return tuple(ys), qx, tuple(observed)


def _of_shared_x(weights: Sequence[Weight]) -> Weight:
    """Returns the weight whose key and history of x quantize an x that all of these share."""
    largest = largest_of(tuple(weight.histories_of("x") for weight in weights))
    return dataclasses.replace(weights[0], histories=largest)


def forward_matmul(
    settings: GemmSettings, qx: Operand, weight: Weight, dtype, joint: jax.Array | None = None
) -> tuple[jax.Array, Observed]:
    """Computes one forward GEMM; returns y, and what the cast of w has observed.

    Args:
      dtype: of x.
      joint: the amax of all weights that share the scale.
    """
    master, axes = weight.value, {"fwd_w": -2}
    if isinstance(master, QuantizedOperand):
        y = named_matmul(settings, "fwd", weight.scope, qx, master, settings.out_dtype)
        return y, Observed({}, {})
    w = in_compute_dtype(master, dtype, settings.recipe.fwd_w)
    qw, amax = quantize_operand(settings, w, axes, weight, joint)
    whole = _whole(settings, weight, qw["fwd_w"], axes["fwd_w"])
    y = named_matmul(settings, "fwd", weight.scope, qx, whole, settings.out_dtype)
    return checkpoint_name(y, GEMM_OUTPUT), observe(weight, master, amax, qw, axes)


def once(arrays: Any, *recipes: Recipe) -> Any:
    """Returns arrays with a first derivative only, if a recipe casts; otherwise with all."""
    return first_derivative_only(arrays) if any(recipe.casts for recipe in recipes) else arrays


def differentiable_once(
    x: jax.Array, weights: Sequence[Weight], *recipes: Recipe
) -> tuple[jax.Array, tuple[Weight, ...]]:
    """Returns x and weights, or their cotangents, as `once`."""
    x, values = once((x, [weight.value for weight in weights]), *recipes)
    pairs = zip(weights, values, strict=True)
    return x, tuple(dataclasses.replace(weight, value=value) for weight, value in pairs)


def _matmuls_fwd(settings: GemmSettings, x, weights: tuple[Weight, ...]):
    # What is saved is what was given: a loop over layers stacks anything else a second time.
    recomputes = _recomputes_codes(settings, weights)
    casts = {"fwd_x": -1} if recomputes else X_CASTS
    ys, qx, observed = forward(settings, *differentiable_once(x, weights, settings.recipe), casts)
    if recomputes:
        kept: Operand = PlainOperand(x, X_CASTS["wgrad_x"])
    else:
        # The barrier keeps XLA from saving x itself and quantizing it in the backward.
        kept = checkpoint_name(lax.optimization_barrier(qx["wgrad_x"]), QUANTIZED_INPUT)
    return ys, _Residuals(kept, weights, observed)


def _recomputes_codes(settings: GemmSettings, weights: Sequence[Weight]) -> bool:
    """Whether the backward quantizes x. Not with probes: they measure both casts in the forward."""
    return settings.recompute_codes and all(weight.probe is None for weight in weights)


def _wgrad_x(settings: GemmSettings, saved: _Residuals) -> Operand:
    """Returns the operand x of wgrad, quantized now if the forward has saved x itself."""
    if not _recomputes_codes(settings, saved.weights):
        return saved.x
    assert isinstance(saved.x, PlainOperand)
    casts = {"wgrad_x": X_CASTS["wgrad_x"]}
    return quantize_operand(settings, saved.x.x, casts, _of_shared_x(saved.weights))[0]["wgrad_x"]


def _matmuls_bwd(settings: GemmSettings, saved: _Residuals, gs: tuple[jax.Array, ...]):
    gs = once(gs, settings.recipe)
    x = _wgrad_x(settings, saved)
    joint = JointAmax(
        w=shared_amax(settings, ("dgrad_w",), [weight.value for weight in saved.weights]),
        g=shared_amax(settings, tuple(G_CASTS), [g.astype(settings.dtype) for g in gs]),
    )
    dxs, cotangents = [], []
    for weight, observed, g in zip(saved.weights, saved.observed, gs, strict=True):
        dx, of_weight = backward(settings, x, weight, observed, g, joint)
        dxs.append(dx)
        cotangents.append(of_weight)
    dx = summed_like(sum_cotangents(dxs), settings.x_axes)
    return differentiable_once(dx, cotangents, settings.recipe)


quantized_matmuls.defvjp(_matmuls_fwd, _matmuls_bwd)


def backward(
    settings: GemmSettings,
    x: Operand,
    weight: Weight,
    observed: Observed,
    g: jax.Array,
    joint: JointAmax,
) -> tuple[jax.Array, Weight]:
    """Computes the backward GEMMs of one weight from the gradient g of its result.

    Args:
      x: the operand x of wgrad.
      observed: by the casts of x and w in the forward.
      joint: amaxes for shared scales.

    Returns:
      dx and the cotangent of the weight.
    """
    g = g.astype(settings.dtype)
    # Those of the one x that several weights share.
    signs = x.signs if isinstance(x, QuantizedOperand) else None
    qg, amax = quantize_operand(settings, g, G_CASTS, weight, joint.g, signs)
    dx, qw = input_gradient(settings, weight, qg, joint.w)
    # Statistics alone: the forward has recorded the amax of w.
    again = measure(weight.probe, weight.value, qw, W_CASTS, weight.key)
    observed = observed.also(Observed({}, again))
    dw = weight_gradient(settings, x, weight, qg)
    observed = observed.also(observe(weight, g, amax, qg, G_CASTS))
    return dx, cotangent(weight, dw, observed, settings.recipe)


def input_gradient(
    settings: GemmSettings, weight: Weight, qg: dict[str, Operand], joint_w: jax.Array | None = None
) -> tuple[jax.Array, dict[str, Operand]]:
    """Computes the dgrad GEMM, dx = Q(g) Q(w)^T; also returns the operand Q(w)."""
    w = in_compute_dtype(weight.value, settings.dtype, settings.recipe.dgrad_w)
    qw, _ = quantize_operand(settings, w, W_CASTS, weight, joint_w)
    whole = _whole(settings, weight, qw["dgrad_w"], W_CASTS["dgrad_w"])
    dx = named_matmul(settings, "dgrad", weight.scope, qg["dgrad_g"], whole, settings.dtype)
    return dx, qw


def weight_gradient(
    settings: GemmSettings, x: Operand, weight: Weight, qg: dict[str, Operand]
) -> jax.Array:
    """Computes the wgrad GEMM, dw = Q(x)^T Q(g), in w's dtype."""
    return named_matmul(settings, "wgrad", weight.scope, x, qg["wgrad_g"], weight.value.dtype)


def sum_cotangents(cotangents: Sequence[jax.Array]) -> jax.Array:
    """Adds in the order in which JAX adds the cotangents of an array that several GEMMs read."""
    return functools.reduce(jnp.add, cotangents[::-1])
