"""Products: their dimension numbers, the recipes of policies, and what a program has of them."""

import functools

import jax
import numpy as np
from jax import lax

from fp8jax.gemm.dot import dot_general
from fp8jax.numerics.names import as_policy
from fp8jax.numerics.recipe import Recipe

MATMUL = (((1,), (0,)), ((), ()))
# Product -> its operands as (cast, contracting axis of the canonical operand).
CONTRACTED = {
    "fwd": (("x", -1), ("w", -2)),
    "dgrad": (("g", -1), ("w", -1)),
    "wgrad": (("x", -2), ("g", -2)),
}
PER_TENSOR = {
    "bf16",
    "fp8_delayed",
    "fp8_current",
    "fp8_amax",
    "fp8_cscale",
    "fp8_rowwise",
    "fp8_rowwise_wgrad_bf16",
}
# What kernels/ have, on Hopper.
KERNELS = PER_TENSOR - {"bf16"} | {"fp8_block", "fp8_block_ue8m0"}
# What the backend of those kernels runs there: also FP4 in tiles of 128, and what bfloat16 holds.
IN_BF16 = {
    "mxfp8",
    "mxfp4",
    "nvfp4",
    "nvfp4_unbiased",
    "nvfp4_4over6",
    "quartet2",
    "tetrajet2",
}
ON_HOPPER = KERNELS | {"fp4_block", "fp4_weights", "fp4_naive"} | IN_BF16


def normal_operands(
    m: int, k: int, n: int, sigma=(3.0, 0.02, 1e-5), dtype=np.float32, seed=0
) -> dict[str, np.ndarray]:
    """x [m, k] and g [m, n] of a dtype, and w [k, n] in float32, of normal numbers. They are of
    unlike scales: nothing is near 1, and gradients are as small as they are."""
    rng = np.random.default_rng(seed)
    shapes, dtypes = ((m, k), (k, n), (m, n)), (dtype, np.float32, dtype)
    normal = [rng.normal(size=shape) * size for shape, size in zip(shapes, sigma, strict=True)]
    return {name: a.astype(d) for name, a, d in zip("xwg", normal, dtypes, strict=True)}


@functools.partial(jax.jit, static_argnames=("recipe", "backend", "seeded"))
def three_products(x, w, g, state, key=None, *, recipe, backend=None, seeded=False):
    """y, dx, dw and the new histories; of batches of matrices if there are three axes."""
    numbers = MATMUL if x.ndim == 2 else (((2,), (1,)), ((0,), (0,)))
    f = functools.partial(
        dot_general, dimension_numbers=numbers, recipe=recipe, backend=backend, seeded=seeded
    )
    y, vjp = jax.vjp(lambda x, w, s: f(x, w, state=s, key=key), x, w, state)
    return y, *vjp(g)


def variant(name: str) -> Recipe:
    """The recipe of a policy's layers, options and all."""
    return as_policy(name).recipe("layers/mlp/up")


def float8_products(jaxpr) -> int:
    """dot_generals with two float8 operands, nested jaxprs included."""
    count = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive is lax.dot_general_p:
            count += all(v.aval.dtype.itemsize == 1 for v in eqn.invars)
        for sub in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")
        ):
            inner = getattr(sub, "jaxpr", sub)
            if hasattr(inner, "eqns"):
                count += float8_products(inner)
    return count


def equations(jaxpr, times=1):
    """(equation, how often it runs) with those inside loops and calls."""
    for eqn in jaxpr.eqns:
        yield eqn, times
        inner_times = times * (eqn.params["length"] if eqn.primitive is lax.scan_p else 1)
        subs = jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")
        )
        for sub in subs:
            inner = getattr(sub, "jaxpr", sub)
            if hasattr(inner, "eqns"):
                yield from equations(inner, inner_times)
