"""SwiGLU and its gradient as elementwise functions for the kernels of swiglu_quantize.py.

The derivative is written out because a kernel cannot be differentiated. The tests compare it with
JAX's derivative of the plain function.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

Registers = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Producer:
    """An elementwise function that produces the arrays to quantize.

    Attributes:
      name: for error messages.
      sources: the number of its arguments.
      results: the number of its results.
      compute: the function, of float32 arrays with the same shape.
    """

    name: str
    sources: int
    results: int
    compute: Callable[..., Registers]


def _sigmoid(x: jax.Array) -> jax.Array:
    return 1.0 / (1.0 + jnp.exp(-x))


def _swiglu(gate: jax.Array, up: jax.Array) -> Registers:
    """Returns h = silu(gate) * up."""
    return (gate * _sigmoid(gate) * up,)


def _swiglu_grad(dh: jax.Array, gate: jax.Array, up: jax.Array) -> Registers:
    """Returns the gradients of gate and up, and h.

    silu'(x) = s + x s (1 - s) with s = sigmoid(x).
    """
    s = _sigmoid(gate)
    silu = gate * s
    return dh * up * (s + silu * (1.0 - s)), dh * silu, silu * up


SWIGLU = Producer(name="swiglu", sources=2, results=1, compute=_swiglu)

SWIGLU_GRAD = Producer(name="swiglu_grad", sources=3, results=3, compute=_swiglu_grad)
