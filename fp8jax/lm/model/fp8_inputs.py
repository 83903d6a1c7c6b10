"""Inputs of norms and activations, kept for the backward in FP8 (COAT, arXiv 2410.19313).

Between two linears a layer keeps arrays that no GEMM reads: what its norms read, and gate and up.
In bfloat16 these are the larger half of what a layer keeps, once the inputs of linears are codes.
Here they are kept as E4M3 codes, with one power of two for each 16 elements along the channels:
17/16 bytes an element instead of 2.

    y   = f(x)              exact: the forward reads x itself
    dx  = f'(D(Q(x))) g     the backward reads the codes

Scales are rounded up, so nothing is clipped: a group's largest element becomes 224 to 448. Elements
of at least 2^-13 of it are normal E4M3 numbers, off by at most 1/16 of themselves.

What differs from the paper: there the forward computes with the codes, too, so that layers hand
codes over; its scales are not powers of two; and the gradients g are E5M2.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from fp8jax.gemm.first_derivative import first_derivative_only
from fp8jax.numerics.quantization import dequantize, quantize_unchecked
from fp8jax.numerics.scales import E8M0
from fp8jax.numerics.tiles import Tile

GROUP = Tile(1, 16)


def with_fp8_inputs(
    f: Callable[..., jax.Array], inputs: Sequence[jax.Array], weights: Sequence[jax.Array] = ()
) -> jax.Array:
    """Returns f(*inputs, *weights); the backward reads codes of the inputs.

    Args:
      f: a function of arrays.
      inputs: arrays [..., D] of a float dtype.
      weights: what is kept as it is.
    """
    return _apply(f, tuple(x.dtype for x in inputs), tuple(inputs), tuple(weights))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _apply(f: Callable[..., jax.Array], dtypes: tuple[Any, ...], inputs, weights) -> jax.Array:
    return f(*inputs, *weights)


def _fwd(f: Callable[..., jax.Array], dtypes: tuple[Any, ...], inputs, weights):
    inputs, weights = first_derivative_only((inputs, weights))
    codes = [quantize_unchecked(x, "e4m3", GROUP, scale=E8M0()) for x in inputs]
    # The forward waits for the codes: XLA would keep x, and make them in the backward.
    codes, inputs = lax.optimization_barrier((codes, inputs))
    return f(*inputs, *weights), (codes, weights)


def _bwd(f: Callable[..., jax.Array], dtypes: tuple[Any, ...], saved, g: jax.Array):
    (codes, weights), g = saved, first_derivative_only(g)
    inputs = tuple(map(dequantize, codes, dtypes))
    _, vjp = jax.vjp(lambda inputs, weights: f(*inputs, *weights), inputs, weights)
    return vjp(g)


_apply.defvjp(_fwd, _bwd)
