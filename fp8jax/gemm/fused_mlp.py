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
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Shaped

from fp8jax.gemm.backends.choice import choose_backend
from fp8jax.gemm.backends.operands import Operand
from fp8jax.gemm.backends.refusals import can_fuse_swiglu
from fp8jax.gemm.dot import make_context
from fp8jax.gemm.histories.amax_history import Histories, as_cotangent, record, to_float32
from fp8jax.gemm.vjp import (
    G_CASTS,
    QUANTIZED_INPUT,
    X_CASTS,
    VjpContext,
    cast_requests,
    forward,
    forward_matmul,
    input_gradient,
    quantize_operand,
    sum_cotangents,
    weight_gradient,
)
from fp8jax.kernels.swiglu import SWIGLU, SWIGLU_GRAD, Producer
from fp8jax.numerics.recipe import Recipe


class _Residuals(NamedTuple):
    """What the forward saves for the backward; tuples of three are gate's, up's and down's."""

    x: Operand  # as wgrad reads it
    factors: tuple[jax.Array, ...]  # results of gate and up, [M, F]
    ws: tuple[jax.Array, ...]
    histories: tuple[Histories, ...]
    new_histories: tuple[Histories, ...]  # without g's
    keys: tuple[jax.Array | None, ...]


def _quantize_results(
    context: VjpContext, producer: Producer, sources, casts
) -> list[tuple[dict[str, Operand], jax.Array | None]]:
    """Quantize each result of the producer, without storing it.

    Args:
      casts: the arguments of `cast_requests` for each result.

    Returns:
      For each result, its operands by the names of their casts, and its amax or None.
    """
    requests = [cast_requests(*each) for each in casts]
    assert context.backend.quantize_swiglu is not None  # `can_fuse_mlp` requires it
    results = context.backend.quantize_swiglu(
        producer, sources, tuple(tuple(r.values()) for r in requests)
    )
    return [
        (dict(zip(names, operands, strict=True)), amax)
        for names, (operands, amax) in zip(requests, results, strict=True)
    ]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(contexts: tuple[VjpContext, VjpContext], x, ws, histories, keys) -> jax.Array:
    """Compute y [M, N] from x [M, K] and ws [K, F], [K, F], [F, N].

    `contexts` are those of gate and up, and of down.
    """
    return _run(contexts, x, ws, histories, keys, {"fwd_x": -1})[0]


def _run(contexts: tuple[VjpContext, VjpContext], x, ws, histories, keys, x_casts: dict[str, int]):
    """Return y, the operands of `x_casts`, the factors of h, and the new histories without g's."""
    first, second = contexts
    in_float32 = tuple(map(to_float32, histories))
    factors, qx, new_histories, _ = forward(first, x, ws[:2], in_float32[:2], keys[:2], x_casts)
    ((qh, amax),) = _quantize_results(
        second, SWIGLU, factors, [(second.recipe, {"fwd_x": -1}, in_float32[2], keys[2])]
    )
    y, of_w, _ = forward_matmul(
        second, qh["fwd_x"], ws[2], in_float32[2], keys[2], second.scopes[0], x.dtype
    )
    of_h = record(in_float32[2], "x", factors[0], amax)
    return y, qx, factors, (*new_histories, of_h | of_w)


def _mlp_fwd(contexts, x, ws, histories, keys):
    y, qx, factors, new_histories = _run(contexts, x, ws, histories, keys, X_CASTS)
    x = checkpoint_name(qx["wgrad_x"], QUANTIZED_INPUT)
    return y, _Residuals(x, factors, ws, histories, new_histories, keys)


def _mlp_bwd(contexts, saved: _Residuals, dy):
    (first, second), keys = contexts, saved.keys
    in_float32 = tuple(map(to_float32, saved.histories))
    dy = dy.astype(second.dtype)
    qdy, amax_dy = quantize_operand(second, dy, G_CASTS, in_float32[2], keys[2])
    dh, _ = input_gradient(second, second.scopes[0], saved.ws[2], saved.histories[2], keys[2], qdy)
    casts = [(first.recipe, G_CASTS, in_float32[i], keys[i]) for i in range(2)]
    casts.append((second.recipe, {"wgrad_x": -2}, in_float32[2], keys[2]))  # h, as in the forward
    *of_factors, (qh, _) = _quantize_results(first, SWIGLU_GRAD, (dh, *saved.factors), casts)
    dws = [weight_gradient(second, qh["wgrad_x"], second.scopes[0], saved.ws[2], qdy)]
    dxs: list[jax.Array] = []
    for i in (1, 0):  # up, then gate
        scope, w, (qg, _) = first.scopes[i], saved.ws[i], of_factors[i]
        dxs.insert(0, input_gradient(first, scope, w, saved.histories[i], keys[i], qg)[0])
        dws.insert(0, weight_gradient(first, saved.x, scope, w, qg))
    cotangents = []
    amaxes = [*(amax for _, amax in of_factors), amax_dy]
    for i, amax in enumerate(amaxes):
        of_g = record(in_float32[i], "g", dy, amax)
        cotangents.append(as_cotangent(saved.histories[i], saved.new_histories[i] | of_g))
    return sum_cotangents(dxs), tuple(dws), tuple(cotangents), None


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
    if not gate_up.same_x or not can_fuse_swiglu(gate_up, down):
        return False
    return all(
        choose_backend(backend, recipe).quantize_swiglu is not None for recipe in (gate_up, down)
    )


def fused_mlp(
    x: Float[Array, "*rows K"],
    ws: Sequence[Float[Array, "..."]],
    *,
    recipes: tuple[Recipe, Recipe],
    states: Sequence[Histories],
    keys: Sequence[Shaped[Array, "..."] | None],
    backend: str | None = None,
    scopes: Sequence[str] = ("", "", ""),
) -> Float[Array, "*rows N"]:
    """Return y = (silu(x Wg) * (x Wu)) Wd.

    Args:
      x: bfloat16.
      ws: float32 kernels of gate [K, F], up [K, F] and down [F, N].
      recipes: the recipe of gate and up, and that of down, for which `can_fuse_mlp` is True.
      states: the amax histories of the three. Their cotangent is their next value.
      keys: unused PRNG keys; no recipe with these kernels rounds stochastically.
      backend: a key of `BACKENDS`, or None.
      scopes: names of the three modules in the compiled program.

    Raises:
      ValueError: if `can_fuse_mlp` is False.
    """
    if not can_fuse_mlp(*recipes, backend, x.dtype):
        raise ValueError(
            f"the fused MLP has no kernels for {recipes[0].name!r} and {recipes[1].name!r} with"
            f" {x.dtype} here: ask can_fuse_mlp first"
        )
    contexts = [
        make_context(
            recipe,
            states[part],
            keys[part],
            x.dtype,
            backend=backend,
            whole=True,
            scopes=scopes[part],
        )
        for recipe, part in zip(recipes, (slice(0, 2), slice(2, 3)), strict=True)
    ]
    rows_MK = x.reshape(-1, x.shape[-1])
    y_MN = _mlp((contexts[0], contexts[1]), rows_MK, tuple(ws), tuple(states), tuple(keys))
    return y_MN.reshape(*x.shape[:-1], -1)
