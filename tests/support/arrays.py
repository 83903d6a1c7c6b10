"""Arrays to quantize."""

import jax
import numpy as np

from fp8jax.numerics.hadamard import hadamard


def normal(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def rotate(x, size: int, axis: int = -1) -> np.ndarray:
    return np.asarray(jax.jit(hadamard, static_argnames=("size", "axis"))(x, size, axis=axis))
