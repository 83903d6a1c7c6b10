"""TODO docstring."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from fp8jax.lookup import lookup
from fp8jax.model.config import ModelConfig


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * scale over the last axis, float32 inside; x's dtype out."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        y = x.astype(jnp.float32)
        y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return (y * _vector(self, "scale", nn.initializers.ones, x)).astype(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * scale + bias, as `RMSNorm`."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        y = x.astype(jnp.float32)
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        y = y * _vector(self, "scale", nn.initializers.ones, x)
        return (y + _vector(self, "bias", nn.initializers.zeros, x)).astype(x.dtype)


def _vector(module: nn.Module, name: str, init: Any, x: Array) -> Array:
    """A parameter for each entry of x's last axis, with as many axes as x."""
    init = nn.with_logical_partitioning(init, ("norm",))
    vector_D: Any = module.param(name, init, (x.shape[-1],))
    return vector_D.reshape((1,) * (x.ndim - 1) + (-1,))


NORMS: dict[str, type[nn.Module]] = {"rms": RMSNorm, "layer": LayerNorm}


def norm_layer(config: ModelConfig, name: str) -> Callable[..., Any]:
    return lookup("norm", config.norm, NORMS)(config.norm_eps, name=name)  # type: ignore[call-arg]
