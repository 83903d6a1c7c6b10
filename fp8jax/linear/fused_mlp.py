"""A gated MLP as one differentiated product, where kernels make its widest arrays on the fly.

    h = silu(x Wg) * (x Wu)        y = h Wd

Of three separate products (dot.py), h and the gradients of both factors would be written in
bfloat16, read again by their quantizers, and forgotten. Here they exist as codes only: the
quantizer of h computes it from its factors, and the quantizers of the two gradients compute them
from dh and the factors (kernels/swiglu_quantize.py). What is computed is the same: casts, products,
histories and residuals are those of dot.py, with whose pieces this is written. Kept for the
backward are both factors, in bfloat16, and the codes of x. Those of h, which the gradient of Wd
needs, are made once more beside the gradients: from the same numbers with the same scale.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Shaped

from fp8jax.kernels.swiglu import SWIGLU, SWIGLU_GRAD, Producer
from fp8jax.linear.amax_history import Histories, as_cotangent, record, to_float32
from fp8jax.linear.backends import choose_backend
from fp8jax.linear.dot import make_context
from fp8jax.linear.operands import Operand
from fp8jax.linear.refusals import can_fuse_swiglu
from fp8jax.linear.vjp import (
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
from fp8jax.numerics.recipe import Recipe


class _Residuals(NamedTuple):
    x: Operand  # as wgrad reads it
    factors: tuple[jax.Array, ...]  # gate and up, [M, F]
    ws: tuple[jax.Array, ...]
    states: tuple[Histories, ...]
    recorded: tuple[Histories, ...]
    keys: tuple[jax.Array | None, ...]


def _produced(context: VjpContext, producer: Producer, sources, wanted):
    """(operands by name, amax) of each result, from (recipe, casts, histories, key) of each."""
    requests = [cast_requests(*each) for each in wanted]
    assert context.backend.quantize_swiglu is not None  # what `can_fuse` is for
    found = context.backend.quantize_swiglu(
        producer, sources, tuple(tuple(r.values()) for r in requests)
    )
    return [
        (dict(zip(names, coded, strict=True)), amax)
        for names, (coded, amax) in zip(requests, found, strict=True)
    ]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(contexts: tuple[VjpContext, VjpContext], x, ws, states, keys) -> jax.Array:
    """[M, K] x [K, F], [K, F], [F, N] -> [M, N]."""
    return _run(contexts, x, ws, states, keys, {"fwd_x": -1})[0]


def _run(contexts: tuple[VjpContext, VjpContext], x, ws, states, keys, wanted: dict[str, int]):
    """y and what the backward needs, of the casts of x that are `wanted`."""
    first, second = contexts
    histories = tuple(map(to_float32, states))
    factors, qx, recorded = forward(first, x, ws[:2], histories[:2], keys[:2], wanted)
    ((qh, amax),) = _produced(
        second, SWIGLU, factors, [(second.recipe, {"fwd_x": -1}, histories[2], keys[2])]
    )
    y, of_w = forward_matmul(
        second, qh["fwd_x"], ws[2], histories[2], keys[2], second.scopes[0], x.dtype
    )
    of_h = record(histories[2], "x", factors[0], amax)
    return y, qx, factors, (*recorded, of_h | of_w)


def _mlp_fwd(contexts, x, ws, states, keys):
    y, qx, factors, recorded = _run(contexts, x, ws, states, keys, X_CASTS)
    x = checkpoint_name(qx["wgrad_x"], QUANTIZED_INPUT)
    return y, _Residuals(x, factors, ws, states, recorded, keys)


def _mlp_bwd(contexts, kept: _Residuals, dy):
    (first, second), keys = contexts, kept.keys
    histories = tuple(map(to_float32, kept.states))
    dy = dy.astype(second.dtype)
    qdy, amax_dy = quantize_operand(second, dy, G_CASTS, histories[2], keys[2])
    dh = input_gradient(second, second.scopes[0], kept.ws[2], kept.states[2], keys[2], qdy)
    wanted = [(first.recipe, G_CASTS, histories[i], keys[i]) for i in range(2)]
    wanted.append((second.recipe, {"wgrad_x": -2}, histories[2], keys[2]))  # h: the same codes
    *of_factors, (qh, _) = _produced(first, SWIGLU_GRAD, (dh, *kept.factors), wanted)
    dws = [weight_gradient(second, qh["wgrad_x"], second.scopes[0], kept.ws[2], qdy)]
    amaxes = [amax for _, amax in of_factors] + [amax_dy]
    dxs: list[jax.Array] = []
    for i in (1, 0):
        of_one = first.scopes[i], kept.ws[i]
        qg = of_factors[i][0]
        dxs.insert(0, input_gradient(first, *of_one, kept.states[i], keys[i], qg))
        dws.insert(0, weight_gradient(first, kept.x, *of_one, qg))
    states = tuple(
        as_cotangent(state, new | record(history, "g", dy, amax))
        for state, new, history, amax in zip(
            kept.states, kept.recorded, histories, amaxes, strict=True
        )
    )
    return sum_cotangents(dxs), tuple(dws), states, None


_mlp.defvjp(_mlp_fwd, _mlp_bwd)


def can_fuse_mlp(factor: Recipe, product: Recipe, backend: str | None, dtype) -> bool:
    """Whether `gated_mlp` runs here: on one device, in bfloat16, with kernels for both recipes."""
    mesh = jax.sharding.get_abstract_mesh()
    if dtype != jnp.bfloat16 or not (mesh.empty or mesh.size == 1):
        return False
    if not factor.same_x or not can_fuse_swiglu(factor, product):
        return False
    return all(
        choose_backend(backend, recipe).quantize_swiglu is not None for recipe in (factor, product)
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
    """y of the module's docstring; with delayed scaling, the cotangent of `states` is their next.

    Args:
      x: bfloat16.
      ws: float32 kernels of gate [K, F], up [K, F] and down [F, N].
      recipes: of gate and up, and of down; `can_fuse` says which.
      states: histories of the three.
      keys: for recipes that round stochastically; these kernels have none that do.
      scopes: names of the three modules in the compiled program.

    Raises ValueError where `can_fuse` is False.
    """
    if not can_fuse_mlp(*recipes, backend, x.dtype):
        raise ValueError(f"no kernels for {recipes[0].name!r} and {recipes[1].name!r}, {x.dtype}")
    contexts = [
        make_context(
            recipe, states[part], keys[part], x.dtype, backend=backend, whole=True,
            scopes=scopes[part],
        )
        for recipe, part in zip(recipes, (slice(0, 2), slice(2, 3)), strict=True)
    ]  # fmt: skip
    rows_MK = x.reshape(-1, x.shape[-1])
    y_MN = _mlp((contexts[0], contexts[1]), rows_MK, tuple(ws), tuple(states), tuple(keys))
    return y_MN.reshape(*x.shape[:-1], -1)
