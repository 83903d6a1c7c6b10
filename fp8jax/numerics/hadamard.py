"""The random Hadamard transform, which spreads outliers before a cast.

The transform mixes n elements along the contracting axis. With the n x n matrix H of entries +-1,
H H^T = n I, and random signs d,

    x' = x diag(d) H / sqrt(n),       x' y'^T = x y^T

It cancels in a GEMM whose operands are both transformed, while an outlier is spread over n elements
that share a scale. The signs are fixed (the first bits of pi), as in NVFP4: drawing new signs at
every step gains nothing.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

_SIGNS = 0x243F6A8885A308D313198A2E03707344  # the first 128 bits of pi's fractional part


def check_hadamard(size: int) -> None:
    """Raise ValueError unless `size` is a power of two up to 128 (1: no transform)."""
    if size not in (1, 2, 4, 8, 16, 32, 64, 128):
        raise ValueError(
            f"the Hadamard size must be 1 (no transform) or a power of two up to 128, got {size}"
        )


def hadamard(x: Float[Array, "..."], size: int, *, axis: int = -1) -> Float[Array, "..."]:
    """Transform `x`, in float32, in blocks of `size` elements along `axis`.

    Zeros pad that axis to whole blocks. The sums are pairwise, in log2(size) rounds, so every
    device gives the same bits. Raises ValueError unless `size` is a power of two up to 128.
    """
    check_hadamard(size)
    x = jnp.moveaxis(x.astype(jnp.float32), axis, -1)
    *others, length = x.shape
    blocks = -(-length // size)
    x = jnp.pad(x, [(0, 0)] * len(others) + [(0, blocks * size - length)])
    signs = np.array([1 - 2 * (_SIGNS >> (127 - i) & 1) for i in range(size)], np.float32)
    x = x.reshape(*others, blocks, size) * signs.reshape((1,) * x.ndim + (-1,))
    half = 1
    while half < size:
        x = x.reshape(*others, blocks, size // (2 * half), 2, half)
        x = jnp.stack([x[..., 0, :] + x[..., 1, :], x[..., 0, :] - x[..., 1, :]], axis=-2)
        half *= 2
    x = x.reshape(*others, blocks * size) * np.float32(size**-0.5)
    return jnp.moveaxis(x, -1, axis)
