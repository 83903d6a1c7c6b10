"""Arrays to quantize."""

import jax
import numpy as np

from fp8jax.numerics.hadamard import hadamard


def normal(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def edge_cases() -> np.ndarray:
    """20,480 numbers [128, 160]: columns of many sizes, and tiles of zeros, of numbers that float32
    hardly holds, of ties of e2m1, of one number beside zeros, and of the largest next to them."""
    x = normal((128, 160)) * np.exp2(np.arange(160, dtype=np.float32) % 40 - 20)
    ties = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.25, -0.75, -5, -6, 0, 4, 3, 2])
    x[:16, :8] = 0
    x[16:32, :8] = 0
    x[17, :8] = np.exp2(np.arange(8, dtype=np.float32))
    x[32:48, :8] = ties[:, None] * np.exp2(np.arange(8, dtype=np.float32) - 4)
    x[48:64, :8] = ties[:, None] * np.float32(1.0625)
    x[64:80, :8] = np.float32(2.0**-126) * ties[:, None] * 4
    x[80:96, :8] = np.float32(3e7) * np.sign(ties[:, None])
    return x


def rotate(x, size: int, axis: int = -1) -> np.ndarray:
    return np.asarray(jax.jit(hadamard, static_argnames=("size", "axis"))(x, size, axis=axis))
