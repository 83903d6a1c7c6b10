"""Products with scales of blocks, exact by construction in any order of their sums.

Codes are integers up to 3, scales powers of two from 1/4 to 4. A block's sum is at most 128 * 9, so
that Hopper's 14 bits hold it; all sums are multiples of 2^-4 below 2^20, so that float32 holds
them. The only rounding is that of the result to bfloat16.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np


def operands(m: int, k: int, n: int, by_row: bool, seed=0):
    """a, b, sa, sb; every block of K, row and block of rows has its own scale."""
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(-3, 4, (rows, k)).astype(ml_dtypes.float8_e4m3fn) for rows in (m, n))
    columns = n if by_row else -(-n // 128)
    sa, sb = (np.exp2(rng.integers(-2, 3, (k // 128, c))).astype(np.float32) for c in (m, columns))
    return a, b, sa, sb


def exact(a, b, sa, sb) -> np.ndarray:
    """The product in float64."""
    (m, k), n = a.shape, len(b)
    y = np.zeros((m, n))
    with np.errstate(invalid="ignore"):
        for c in range(k // 128):
            block = slice(c * 128, (c + 1) * 128)
            of_b = sb[c] if len(sb[c]) == n else np.repeat(sb[c], 128)[:n]
            part = a[:, block].astype(np.float64) @ b[:, block].astype(np.float64).T
            y += part * np.outer(sa[c].astype(np.float64), of_b)
    return y


def check(got: jax.Array, given, dtype):
    expected = jnp.asarray(exact(*given).astype(np.float32)).astype(dtype)
    assert got.dtype == dtype and got.shape == expected.shape
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(expected, np.float32))
