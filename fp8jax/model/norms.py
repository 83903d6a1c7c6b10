"""Normalization layers. They compute in float32 and return the dtype of their input."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from fp8jax.lookup import lookup
from fp8jax.model.config import ModelConfig


class RMSNorm(nn.Module):
    """Returns x / sqrt(mean(x^2) + eps) * scale, with the mean over the last axis."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        y = x.astype(jnp.float32)
        y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return (y * _vector(self, "scale", nn.initializers.ones, x)).astype(x.dtype)


class LayerNorm(nn.Module):
    """Returns (x - mean) / sqrt(variance + eps) * scale + bias, over the last axis."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        y = x.astype(jnp.float32)
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        y = y * _vector(self, "scale", nn.initializers.ones, x)
        return (y + _vector(self, "bias", nn.initializers.zeros, x)).astype(x.dtype)


def _vector(module: nn.Module, name: str, init: Any, x: Array) -> Array:
    """Returns a parameter for the last axis of x, reshaped to as many axes as x has."""
    init = nn.with_logical_partitioning(init, ("norm",))
    vector_D: Any = module.param(name, init, (x.shape[-1],))
    return vector_D.reshape((1,) * (x.ndim - 1) + (-1,))


NORMS: dict[str, type[nn.Module]] = {"rms": RMSNorm, "layer": LayerNorm}


def norm_layer(config: ModelConfig, name: str) -> Callable[..., Any]:
    """Returns the config's norm as a submodule called `name`.

    Raises:
      ValueError: `config.norm` is unknown.
    """
    return lookup("norm", config.norm, NORMS)(config.norm_eps, name=name)  # type: ignore[call-arg]
