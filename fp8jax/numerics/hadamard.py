"""The random Hadamard transform, which spreads outliers before a cast.

The transform mixes n elements along the contracting axis. With the n x n matrix H of entries +-1,
H H^T = n I, and random signs d,

    x' = x diag(d) H / sqrt(n),       x' y'^T = x y^T

It cancels in a GEMM whose operands are both transformed, while an outlier is spread over n elements
that share a scale. The signs are fixed (the first bits of pi), as in NVFP4, where drawing new signs
at every step gains nothing. Quartet II and TetraJet-v2 draw new ones for each GEMM
(`whole_hadamard`).
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Shaped, UInt32

_SIGNS = 0x243F6A8885A308D313198A2E03707344  # the first 128 bits of pi's fractional part


def check_hadamard(size: int) -> None:
    """Raises ValueError unless `size` is a power of two up to 128 (1: no transform)."""
    if size not in (1, 2, 4, 8, 16, 32, 64, 128):
        raise ValueError(
            f"the Hadamard size must be 1 (no transform) or a power of two up to 128, got {size}"
        )


def hadamard(x: Float[Array, "..."], size: int, *, axis: int = -1) -> Float[Array, "..."]:
    """Transforms `x`, in float32, in blocks of `size` elements along `axis`.

    Zeros pad that axis to whole blocks. The sums are pairwise, in log2(size) rounds, so every
    device gives the same bits. Raises ValueError unless `size` is a power of two up to 128.
    """
    return joined(hadamard_parts(x, size, axis=axis), axis)


def whole_hadamard(
    x: Float[Array, "..."], size: int, signs: UInt32[Array, ""] | None = None, *, axis: int = -1
) -> Float[Array, "..."]:
    """`hadamard` in few operations on whole arrays, whose sums are the same.

    Bit i of the word `signs` flips the sign of element i of all blocks, of up to 32, beside the
    fixed signs.
    """
    axis %= x.ndim
    blocks = -(-x.shape[axis] // size)
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, blocks * size - x.shape[axis])
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    bits = np.array([_SIGNS >> (127 - i) & 1 for i in range(size)], np.float32)
    sign = jnp.asarray(1 - 2 * bits)
    if signs is not None:
        sign = sign * sign_of(signs, np.arange(size, dtype=np.uint32))
    y = jnp.pad(x.astype(jnp.float32), padding).reshape(*before, blocks, size, *after)
    y = y * sign.reshape(*[1] * (len(before) + 1), size, *[1] * len(after))
    half = 1
    while half < size:
        pairs = y.reshape(*before, blocks * size // (2 * half), 2, half, *after)
        a, b = (lax.index_in_dim(pairs, i, axis + 1, keepdims=False) for i in (0, 1))
        y = jnp.stack([a + b, a - b], axis + 1)
        half *= 2
    return y.reshape(*before, blocks * size, *after) * np.float32(size**-0.5)


def sign_of(signs: UInt32[Array, ""], element: Any) -> Float[Array, "..."]:
    """Returns -1.0 for elements whose bit in the word is set, else 1.0."""
    bit = (signs >> jnp.asarray(element, jnp.uint32)) & np.uint32(1)
    return 1.0 - 2.0 * bit.astype(jnp.float32)


def hadamard_parts(
    x: Float[Array, "..."], size: int, *, axis: int = -1
) -> list[Float[Array, "..."]]:
    """`hadamard`, as `size` arrays: the i-th elements of all blocks along `axis`.

    So that what follows, the amax of a block for instance, is elementwise: a GPU then keeps the
    transformed numbers in registers.
    """
    check_hadamard(size)
    return butterflies(split(x.astype(jnp.float32), size, axis))


def butterflies(parts: Sequence[Float[Array, "..."]]) -> list[Float[Array, "..."]]:
    """Returns the transform of the elements of a block, one float32 array for each element."""
    size, half = len(parts), 1
    parts = [-part if _SIGNS >> (127 - i) & 1 else part for i, part in enumerate(parts)]
    while half < size:
        for i in range(size):
            if not i & half:
                a, b = parts[i], parts[i + half]
                parts[i], parts[i + half] = a + b, a - b
        half *= 2
    return [part * np.float32(size**-0.5) for part in parts]


def split(x: Shaped[Array, "..."], size: int, axis: int) -> list[Shaped[Array, "..."]]:
    """Returns the i-th elements of all blocks of `size` along `axis`, for each i; zeros pad it."""
    if size == 1:
        return [x]
    axis %= x.ndim
    blocks = -(-x.shape[axis] // size)
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, blocks * size - x.shape[axis])
    if padding[axis][1]:
        x = jnp.pad(x, padding)
    x = x.reshape(*x.shape[:axis], blocks, size, *x.shape[axis + 1 :])
    return [lax.index_in_dim(x, i, axis + 1, keepdims=False) for i in range(size)]


def joined(parts: Sequence[Shaped[Array, "..."]], axis: int) -> Shaped[Array, "..."]:
    """Undoes `split`, but for its padding."""
    if len(parts) == 1:
        return parts[0]
    shape = list(parts[0].shape)
    axis %= len(shape)
    shape[axis] *= len(parts)
    return jnp.stack(parts, axis + 1).reshape(shape)
