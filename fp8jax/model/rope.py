"""Rotary position embedding, and the published ways of stretching it to longer contexts.

RoPE (arXiv 2104.09864) turns the pair (x_i, x_{i + H/2}) of a head of size H at position p by the
angle p * f_i, with the frequency f_i = theta^(-2i/H), i = 0 … H/2 - 1. The scalar product of two
turned vectors then depends on the difference of their positions only. Pairs are halves apart, as
in the published Llama and Qwen checkpoints of Hugging Face, not neighbors as in the paper.

A model trained on `original` positions sees larger angles than it knows when rows grow. A scaling
multiplies each frequency by a number between 1 / factor and 1:

    Linear   1 / factor for all (position interpolation, arXiv 2306.15595)
    Llama3   1 for wavelengths under original / high, 1 / factor for those over original / low, and
             between them a straight line in original / wavelength (Llama 3.1's release)
    Yarn     the same idea with the line over the index i, between the dimensions that turn
             beta_fast and beta_slow times within `original`; and cos and sin are multiplied by
             0.1 ln(factor) + 1, which sharpens attention (arXiv 2309.00071)

Dynamic NTK scaling is not here: its frequencies depend on the length of the text so far, so that
one weight would mean different things at different steps of a generation.
"""

import dataclasses
import math
from typing import Protocol

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fp8jax.lookup import lookup


class RopeScaling(Protocol):
    """What multiplies the frequencies [H/2], and what multiplies cos and sin."""

    def multipliers(self, theta: float, head_dim: int) -> np.ndarray: ...

    @property
    def magnitude(self) -> float: ...


def _frequencies(theta: float, head_dim: int) -> np.ndarray:
    """float64 [H/2]."""
    return theta ** (-np.arange(0, head_dim, 2) / head_dim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear:
    """All positions divided by `factor`."""

    factor: float
    magnitude: float = dataclasses.field(default=1.0, init=False)

    def multipliers(self, theta: float, head_dim: int) -> np.ndarray:
        """float64 [H/2]."""
        return np.full(head_dim // 2, 1 / self.factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3:
    """Long wavelengths divided by `factor`, short ones kept; `low` and `high` bound what lies
    between, in turns within `original` positions."""

    factor: float
    low: float
    high: float
    original: int
    magnitude: float = dataclasses.field(default=1.0, init=False)

    def multipliers(self, theta: float, head_dim: int) -> np.ndarray:
        """float64 [H/2]."""
        turns = self.original * _frequencies(theta, head_dim) / (2 * math.pi)
        kept = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return kept + (1 - kept) / self.factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Yarn:
    """Dimensions of fewer than `beta_slow` turns within `original` positions divided by `factor`,
    those of more than `beta_fast` kept."""

    factor: float
    original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    @property
    def magnitude(self) -> float:
        return 0.1 * math.log(self.factor) + 1

    def multipliers(self, theta: float, head_dim: int) -> np.ndarray:
        """float64 [H/2]."""

        def dimension(turns: float) -> float:
            """The index i, not whole, at which theta^(-2i/H) makes so many turns."""
            return (
                head_dim * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(theta))
            )

        low = max(math.floor(dimension(self.beta_fast)), 0)
        high = min(math.ceil(dimension(self.beta_slow)), head_dim - 1)
        # A line of no length is a step.
        divided = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 1e-3), 0, 1)
        return divided / self.factor + (1 - divided)


ROPE_SCALINGS: dict[str, RopeScaling] = {
    "linear_2": Linear(factor=2.0),
    "linear_4": Linear(factor=4.0),
    "llama3.1": Llama3(factor=8.0, low=1.0, high=4.0, original=8192),
    "llama3.2": Llama3(factor=32.0, low=1.0, high=4.0, original=8192),
    "yarn_qwen2.5": Yarn(factor=4.0, original=32_768),
}


def rotate(
    x_BLNH: Float[Array, "B L N H"],
    positions_BL: Int[Array, "B L"],
    theta: float,
    scaling: str | None = None,
) -> Float[Array, "B L N H"]:
    """x with each head turned by its position; float32 inside, x's dtype out.

    Args:
      theta: base of the wavelengths.
      scaling: a key of `ROPE_SCALINGS`, or None for none. Raises ValueError for an unknown one.
    """
    half = x_BLNH.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    magnitude = 1.0
    if scaling is not None:
        rule = lookup("RoPE scaling", scaling, ROPE_SCALINGS)
        frequencies *= rule.multipliers(theta, 2 * half).astype(np.float32)
        magnitude = rule.magnitude
    angles = positions_BL[:, :, None, None].astype(jnp.float32) * frequencies[None, None, None]
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    if magnitude != 1.0:
        cos, sin = cos * magnitude, sin * magnitude
    # Halves as an axis, exchanged by a reversal: XLA runs that within one kernel, a concatenation
    # and its gradient in one each.
    x_BLN2h = x_BLNH.astype(jnp.float32).reshape(*x_BLNH.shape[:-1], 2, half)
    sign_2h = jnp.array([[-1.0], [1.0]])[None, None, None]
    turned = x_BLN2h * cos + x_BLN2h[..., ::-1, :] * (sign_2h * sin)
    return turned.reshape(x_BLNH.shape).astype(x_BLNH.dtype)
