"""TODO docstring."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

# The random Hadamard transform --------------------------------------------------------------------

_SIGNS = 0x243F6A8885A308D313198A2E03707344  # the first 128 bits of pi's fraction


def check_hadamard(size: int) -> None:
    """Raises ValueError for a size that has no transform here."""
    if size not in (1, 2, 4, 8, 16, 32, 64, 128):
        raise ValueError(f"a Hadamard transform mixes 2, 4, ... 128 elements (1: none), got {size}")


def hadamard(x: Float[Array, "..."], size: int, *, axis: int = -1) -> Float[Array, "..."]:
    """float32 `x` rotated in blocks of `size` along `axis`, which is filled up with zeros to whole
    blocks. Sums of pairs, in log2(size) rounds: the same bits on every device.

    Raises ValueError for a size that is no power of two up to 128.
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
