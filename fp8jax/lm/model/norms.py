"""Normalization layers. They compute in float32 and return the dtype of their input.

The backward computes the float32 values again, from the input and its statistics, which have one
number a row. Otherwise a scan over layers would store these values for every layer, in arrays twice
as large as the input. The statistics are sums, and saved: computed again, they might be summed in
another order.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from fp8jax.lm.model.config import ModelConfig
from fp8jax.lm.model.fp8_inputs import with_fp8_inputs
from fp8jax.lookup import lookup


class RMSNorm(nn.Module):
    """Returns x / sqrt(mean(x^2) + eps) * scale, with the mean over the last axis.

    Attributes:
      eps: see there.
      offset: whether 1 + scale multiplies instead, and the scale begins at 0 (Gemma).
      fp8_inputs: whether x is kept for the backward in FP8 (fp8_inputs.py).
    """

    eps: float
    offset: bool = False
    fp8_inputs: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        init = nn.initializers.zeros if self.offset else nn.initializers.ones
        scale = _vector(self, "scale", init, x)
        scale = 1 + scale if self.offset else scale
        if self.fp8_inputs:
            return with_fp8_inputs(lambda x, s: _rms_norm(x, s, self.eps), (x,), (scale,))
        return _rms_norm(x, scale, self.eps)


class LayerNorm(nn.Module):
    """Returns (x - mean) / sqrt(variance + eps) * scale + bias, over the last axis."""

    eps: float
    fp8_inputs: bool = False  # as in `RMSNorm`

    @nn.compact
    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        scale = _vector(self, "scale", nn.initializers.ones, x)
        bias = _vector(self, "bias", nn.initializers.zeros, x)
        if self.fp8_inputs:
            norm = lambda x, s, b: _layer_norm(x, s, b, self.eps)  # noqa: E731
            return with_fp8_inputs(norm, (x,), (scale, bias))
        return _layer_norm(x, scale, bias, self.eps)


def _statistic(x):
    return checkpoint_name(x, "norm_statistic")


def _normalized(y, eps: float):
    """Returns y divided by the root of its mean square."""
    mean = _statistic(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return y * _statistic(lax.rsqrt(mean))


_recomputed = functools.partial(
    jax.checkpoint,
    prevent_cse=False,
    policy=jax.checkpoint_policies.save_only_these_names("norm_statistic"),
)


@functools.partial(_recomputed, static_argnums=2)
def _rms_norm(x, scale, eps: float):
    return (_normalized(x.astype(jnp.float32), eps) * scale).astype(x.dtype)


@functools.partial(_recomputed, static_argnums=3)
def _layer_norm(x, scale, bias, eps: float):
    y = x.astype(jnp.float32)
    y = y - _statistic(jnp.mean(y, axis=-1, keepdims=True))
    return (_normalized(y, eps) * scale + bias).astype(x.dtype)


def _vector(module: nn.Module, name: str, init: Any, x: Array) -> Array:
    """Returns a parameter for the last axis of x, reshaped to as many axes as x has."""
    init = nn.with_logical_partitioning(init, ("norm",))
    vector_D: Any = module.param(name, init, (x.shape[-1],))
    return vector_D.reshape((1,) * (x.ndim - 1) + (-1,))


NORMS: dict[str, Callable[..., nn.Module]] = {
    "rms": RMSNorm,
    "rms_offset": functools.partial(RMSNorm, offset=True),
    "layer": LayerNorm,
}


def norm_layer(config: ModelConfig, name: str, *, fp8_inputs: bool = False) -> Callable[..., Any]:
    """Returns the config's norm as a submodule called `name`.

    Args:
      fp8_inputs: as in `RMSNorm`.

    Raises:
      ValueError: `config.norm` is unknown.
    """
    norm = lookup("norm", config.norm, NORMS)
    return norm(config.norm_eps, fp8_inputs=fp8_inputs, name=name)
