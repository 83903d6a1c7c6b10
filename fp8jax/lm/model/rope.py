"""Rotary position embedding, and published ways of extending it to longer contexts.

RoPE (arXiv 2104.09864) rotates the pair (x_i, x_{i + H/2}) of a head of size H at position p by the
angle p * f_i, with the frequency f_i = theta^(-2i/H), i = 0 … H/2 - 1. The scalar product of two
rotated vectors then depends only on the difference of their positions. The two elements of a pair
are half a head apart, as in the Llama and Qwen checkpoints on Hugging Face; in the paper they are
neighbors.

When rows become longer than the `original` positions of training, the angles become larger than any
that the model has seen. A scaling multiplies each frequency by a number between 1 / factor and 1:

    Linear   1 / factor for all frequencies (position interpolation, arXiv 2306.15595)
    Llama3   1 for wavelengths below original / high, 1 / factor for those above original / low, and
             linear in original / wavelength between them (Llama 3.1's release)
    Yarn     the same, but linear in the index i between the dimensions that turn beta_fast and
             beta_slow times within `original` positions; cos and sin are also multiplied by
             0.1 ln(factor) + 1, or a given number, which sharpens attention (arXiv 2309.00071)
    LongRope 1 / a number for each i, searched for; cos and sin are also multiplied
             (arXiv 2402.13753)

Dynamic NTK scaling is left out: its frequencies depend on the length of the text so far, so that
the same weights would see different frequencies at different steps of a generation. So do those of
LongRoPE, which has other numbers for texts of more than `original` positions; longer ones are
refused here.
"""

import dataclasses
import math
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@runtime_checkable
class RopeScaling(Protocol):
    """A way to extend RoPE: `multipliers` of the frequencies, and a factor of cos and sin."""

    def multipliers(self, theta: float, head_dim: int) -> np.ndarray:
        """Returns the factors of the frequencies, float64 [H/2]."""
        ...

    @property
    def magnitude(self) -> float:
        """The factor of cos and sin."""
        ...


def _frequencies(theta: float, head_dim: int) -> np.ndarray:
    """Returns f_i for all i, float64 [H/2]."""
    return theta ** (-np.arange(0, head_dim, 2) / head_dim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear:
    """Divides all positions by `factor`."""

    factor: float
    magnitude: float = dataclasses.field(default=1.0, init=False)

    def multipliers(self, theta: float, head_dim: int) -> np.ndarray:
        return np.full(head_dim // 2, 1 / self.factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3:
    """Divides low frequencies by `factor` and leaves high ones unchanged.

    Attributes:
      factor: divisor of frequencies that turn fewer than `low` times in `original` positions.
      low, high: number of turns between which the multiplier is interpolated.
      original: positions the model was trained on.
    """

    factor: float
    low: float
    high: float
    original: int
    magnitude: float = dataclasses.field(default=1.0, init=False)

    def multipliers(self, theta: float, head_dim: int) -> np.ndarray:
        turns = self.original * _frequencies(theta, head_dim) / (2 * math.pi)
        unscaled = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return unscaled + (1 - unscaled) / self.factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Yarn:
    """Divides low frequencies by `factor` and leaves high ones unchanged, by dimension.

    Attributes:
      factor: divisor of dimensions that turn fewer than `beta_slow` times in `original` positions.
      original: positions the model was trained on.
      beta_fast: dimensions with more turns than this are unchanged.
      beta_slow: see `factor`.
      attention_factor: multiplies cos and sin; None: 0.1 ln(factor) + 1, and 1 below a factor of 1.
      truncate: round the two ends of the line between those dimensions outward, to whole indices.
    """

    factor: float
    original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * max(0.0, math.log(self.factor)) + 1

    def multipliers(self, theta: float, head_dim: int) -> np.ndarray:
        def dimension(turns: float) -> float:
            """Returns the fractional index i whose frequency makes `turns` turns."""
            return (
                head_dim * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(theta))
            )

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        # Where low equals high, the tiny denominator turns the line into a step.
        width = high - low if high != low else 1e-3
        divided = np.clip((np.arange(head_dim // 2) - low) / width, 0, 1)
        return divided / self.factor + (1 - divided)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongRope:
    """Divides each frequency by a number of its own, in texts of up to `original` positions.

    Attributes:
      short: the divisors, [H/2].
      long: those of longer texts; kept for an export alone.
      original: positions the model was trained on, and the most that are computed.
      factor: of the positions that the published model is for.
      attention_factor: multiplies cos and sin; None: sqrt(1 + ln(factor) / ln(original)).
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original: int
    factor: float
    attention_factor: float | None = None

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original))

    def multipliers(self, theta: float, head_dim: int) -> np.ndarray:
        return 1 / np.array(self.short)


ROPE_SCALINGS: dict[str, RopeScaling] = {
    "linear_2": Linear(factor=2.0),
    "linear_4": Linear(factor=4.0),
    "llama3.1": Llama3(factor=8.0, low=1.0, high=4.0, original=8192),
    "llama3.2": Llama3(factor=32.0, low=1.0, high=4.0, original=8192),
    "yarn_qwen2.5": Yarn(factor=4.0, original=32_768),
}


def frequencies(
    theta: float, head_dim: int, scaling: RopeScaling | None = None
) -> Float[Array, " h"]:
    """Returns the frequencies of a head's pairs, in float32.

    Args:
      theta: base of the wavelengths.
      head_dim: elements of a head that are rotated; twice as many as the frequencies.
      scaling: how RoPE is extended, or None.
    """
    half = head_dim // 2
    plain = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling is None:
        return plain
    return plain * scaling.multipliers(theta, head_dim).astype(np.float32)


def rotate(
    x_BLNH: Float[Array, "B L N H"],
    positions_BL: Int[Array, "B L"],
    frequencies_h: Float[Array, " h"],
    magnitude: Any = None,
) -> Float[Array, "B L N H"]:
    """Returns x with each head rotated by its position, in x's dtype; computed in float32.

    Args:
      frequencies_h: of the pairs of a head. Fewer than half its elements leave its last ones as
        they are.
      magnitude: the factor of cos and sin, of a scaling; None for 1.
    """
    half = frequencies_h.shape[0]
    if 2 * half < x_BLNH.shape[-1]:
        turned = rotate(x_BLNH[..., : 2 * half], positions_BL, frequencies_h, magnitude)
        return jnp.concatenate([turned, x_BLNH[..., 2 * half :]], axis=-1)
    angles = positions_BL[:, :, None, None].astype(jnp.float32) * frequencies_h[None, None, None]
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    if magnitude is not None:
        cos, sin = cos * magnitude, sin * magnitude
    # The two halves become an axis of size 2, and reversing it exchanges them. XLA fuses that into
    # one kernel; a concatenation and its gradient would each take a kernel of their own.
    x_BLN2h = x_BLNH.astype(jnp.float32).reshape(*x_BLNH.shape[:-1], 2, half)
    sign_2h = jnp.array([[-1.0], [1.0]])[None, None, None]
    turned = x_BLN2h * cos + x_BLN2h[..., ::-1, :] * (sign_2h * sin)
    return turned.reshape(x_BLNH.shape).astype(x_BLNH.dtype)
