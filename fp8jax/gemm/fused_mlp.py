"""A gated MLP with one custom VJP, whose widest arrays are computed inside quantization kernels.

    h = silu(x Wg) * (x Wu)        y = h Wd

With three separate linears, h and the gradients of both factors would be written to memory in
bfloat16, read by their quantizers and discarded. Here they exist only as codes: the quantizer of h
computes h from its factors, and the quantizers of the two gradients compute them from dh and the
factors (kernels/swiglu_quantize.py). The results are the same: casts, GEMMs, histories and
residuals are those of vjp.py, whose functions this file uses.

Saved for the backward are both factors, in bfloat16, and the quantized x. The gradient of Wd needs
the codes of h, which are computed again in the backward, together with the gradients, from the same
numbers with the same scale.

A program with probes (probe.py) runs three linears instead: here h is never whole to be measured.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from fp8jax.gemm.backends.choice import choose_backend
from fp8jax.gemm.backends.operands import Operand
from fp8jax.gemm.backends.refusals import can_fuse_swiglu, kernels_refuse
from fp8jax.gemm.dot import gemm_settings
from fp8jax.gemm.histories.summary import record
from fp8jax.gemm.vjp import (
    G_CASTS,
    QUANTIZED_INPUT,
    X_CASTS,
    GemmSettings,
    cast_requests,
    differentiable_once,
    forward,
    forward_matmul,
    input_gradient,
    once,
    quantize_operand,
    sum_cotangents,
    weight_gradient,
)
from fp8jax.gemm.weight import Observed, Weight, cotangent
from fp8jax.kernels.swiglu import SWIGLU, SWIGLU_GRAD, Producer
from fp8jax.numerics.recipe import Recipe


class _Residuals(NamedTuple):
    """What the forward saves for the backward; tuples of three are gate's, up's and down's."""

    x: Operand  # as wgrad reads it
    factors: tuple[jax.Array, ...]  # results of gate and up, [M, F]
    weights: tuple[Weight, ...]
    observed: tuple[Observed, ...]  # of x and w; the backward adds g


def _quantize_results(
    settings: GemmSettings, producer: Producer, sources, casts
) -> list[tuple[dict[str, Operand], jax.Array | None]]:
    """Quantizes each result of the producer, without storing it.

    Args:
      casts: the arguments of `cast_requests` for each result.

    Returns:
      For each result, its operands by the names of their casts, and its amax or None.
    """
    requests = [cast_requests(*each) for each in casts]
    assert settings.backend.quantize_swiglu is not None  # `can_fuse_mlp` requires it
    results = settings.backend.quantize_swiglu(
        producer, sources, tuple(tuple(r.values()) for r in requests)
    )
    return [
        (dict(zip(names, operands, strict=True)), amax)
        for names, (operands, amax) in zip(requests, results, strict=True)
    ]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(pair: tuple[GemmSettings, GemmSettings], x, weights: tuple[Weight, ...]) -> jax.Array:
    """Computes y [M, N] from x [M, K] and weights [K, F], [K, F], [F, N].

    `pair` has the settings of gate and up, and those of down.
    """
    return _run(pair, x, weights, {"fwd_x": -1})[0]


def _run(pair: tuple[GemmSettings, GemmSettings], x, weights, x_casts: dict[str, int]):
    """Returns y, the operands of `x_casts`, the factors of h, and what casts but g's observe."""
    (first, second), (*gate_up, down) = pair, weights
    factors, qx, observed = forward(first, x, gate_up, x_casts)
    ((qh, amax),) = _quantize_results(
        second, SWIGLU, factors, [(second.recipe, {"fwd_x": -1}, down.histories_of("x"), down.key)]
    )
    y, of_w = forward_matmul(second, qh["fwd_x"], down, x.dtype)
    of_h = Observed(record(down.histories_of("x"), "x", factors[0], amax), {})
    return y, qx, factors, (*observed, of_h.also(of_w))


def _mlp_fwd(pair, x, weights):
    recipes = [settings.recipe for settings in pair]
    once = differentiable_once(x, weights, *recipes)
    y, qx, factors, observed = _run(pair, *once, X_CASTS)
    kept = checkpoint_name(qx["wgrad_x"], QUANTIZED_INPUT)
    return y, _Residuals(kept, factors, weights, observed)


def _mlp_bwd(pair, saved: _Residuals, dy):
    (first, second), (gate, up, down) = pair, saved.weights
    dy = once(dy, first.recipe, second.recipe).astype(second.dtype)
    qdy, amax_dy = quantize_operand(second, dy, G_CASTS, down)
    dh, _ = input_gradient(second, down, qdy)
    casts = [(first.recipe, G_CASTS, each.histories_of("g"), each.key) for each in (gate, up)]
    # h, as in the forward
    casts.append((second.recipe, {"wgrad_x": -2}, down.histories_of("x"), down.key))
    of_gate, of_up, (qh, _) = _quantize_results(first, SWIGLU_GRAD, (dh, *saved.factors), casts)
    dw_down = weight_gradient(second, qh["wgrad_x"], down, qdy)
    dx_up, dw_up = _gradients(first, saved.x, up, of_up[0])
    dx_gate, dw_gate = _gradients(first, saved.x, gate, of_gate[0])
    found = ((dw_gate, of_gate[1]), (dw_up, of_up[1]), (dw_down, amax_dy))
    cotangents = []
    for weight, observed, (dw, amax) in zip(saved.weights, saved.observed, found, strict=True):
        of_g = Observed(record(weight.histories_of("g"), "g", dy, amax), {})
        cotangents.append(cotangent(weight, dw, observed.also(of_g), first.recipe))
    dx = sum_cotangents([dx_gate, dx_up])
    return differentiable_once(dx, cotangents, first.recipe, second.recipe)


def _gradients(
    settings: GemmSettings, x: Operand, weight: Weight, qg
) -> tuple[jax.Array, jax.Array]:
    """Returns dx and dw of one weight from the quantized gradient of its result."""
    return input_gradient(settings, weight, qg)[0], weight_gradient(settings, x, weight, qg)


_mlp.defvjp(_mlp_fwd, _mlp_bwd)


def can_fuse_mlp(gate_up: Recipe, down: Recipe, backend: str | None, dtype) -> bool:
    """Whether `fused_mlp` can run: in bfloat16, with kernels for both recipes.

    On a mesh, all axes must be automatic: XLA shards the operands. `gate_up` and `down` are the
    recipes of those linears, `dtype` is that of x.
    """
    mesh = jax.sharding.get_abstract_mesh()
    automatic = all(kind == jax.sharding.AxisType.Auto for kind in mesh.axis_types)
    if dtype != jnp.bfloat16 or not (automatic or mesh.size == 1):
        return False
    if not gate_up.quantizes_x_once or not can_fuse_swiglu(gate_up, down):
        return False
    # The kernels pad what they quantize: only their own GEMM takes it beside a weight.
    for recipe in (gate_up, down):
        x, w = recipe.gemms["fwd"]
        if x is None or w is None or kernels_refuse(x, w, recipe.accumulation.fwd):
            return False
    return all(
        choose_backend(backend, recipe).quantize_swiglu is not None for recipe in (gate_up, down)
    )


def fused_mlp(
    x: Float[Array, "*rows K"],
    weights: Sequence[Weight],
    *,
    recipes: tuple[Recipe, Recipe],
    backend: str | None = None,
) -> Float[Array, "*rows N"]:
    """Returns y = (silu(x Wg) * (x Wu)) Wd.

    Args:
      x: bfloat16.
      weights: gate [K, F], up [K, F] and down [F, N] in float32, without probes. No recipe with
        these kernels rounds stochastically, so their keys are not used.
      recipes: the recipe of gate and up, and that of down, for which `can_fuse_mlp` is True.
      backend: a key of `BACKENDS`, or None.

    Raises:
      ValueError: if `can_fuse_mlp` is False.
    """
    if not can_fuse_mlp(*recipes, backend, x.dtype):
        raise ValueError(
            f"the fused MLP has no kernels for {recipes[0].name!r} and {recipes[1].name!r} with"
            f" {x.dtype} here: ask can_fuse_mlp first"
        )
    gate, up, down = (weight.summarized() for weight in weights)
    first, second = (
        gemm_settings(recipe, group, x.dtype, backend=backend, whole=True)
        for recipe, group in zip(recipes, ((gate, up), (down,)), strict=True)
    )
    *rows, k = x.shape
    y_MN = _mlp((first, second), x.reshape(math.prod(rows), k), (gate, up, down))
    return y_MN.reshape(*rows, y_MN.shape[-1])
