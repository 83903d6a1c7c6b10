"""The random Hadamard transform, against the NumPy reference and its matrix."""

import math

import ml_dtypes
import numpy as np
import pytest

from tests.support import reference
from tests.support.arrays import normal, rotate

# 128 takes seconds to compile, and is one more round of the loop that 64 goes through.
SIZES = (1, 2, 4, 8, 16, 32, 64, pytest.param(128, marks=pytest.mark.full))
MIDDLE = (4, 16)  # sizes that are rotated along an axis in the middle: no size is moved otherwise


@pytest.mark.parametrize("size", SIZES)
def test_a_rotation_has_the_bits_of_the_reference(size):
    """Along a last axis that the size may not divide, and along one in the middle."""
    for shape, axis in [((3, 130), -1), *([((2, 48, 3), 1)] if size in MIDDLE else [])]:
        x = normal(shape) * np.float32(1e3)
        expected = reference.hadamard(x, size, axis)
        assert expected.shape[axis] == -(-shape[axis] // size) * size
        np.testing.assert_array_equal(rotate(x, size, axis), expected)


@pytest.mark.parametrize("size", SIZES)
def test_a_rotation_is_the_matrix_of_signs_and_sylvester(size):
    """Rotating the unit vectors gives the matrix itself: one product with 1 / sqrt(size), which is
    exact at even powers of two, where the matrix is orthogonal to the last bit in float64. At odd
    ones 1 / sqrt(size) is off by 2^-24 relative, once in an entry and twice in a product of two."""
    matrix = rotate(np.eye(size, dtype=np.float32), size).astype(np.float64)
    error = 0 if math.isqrt(size) ** 2 == size else 2.0**-24
    entry = 1 / np.sqrt(size)
    assert np.abs(matrix - reference.hadamard_matrix(size)).max() <= error * entry
    assert np.abs(matrix @ matrix.T - np.eye(size)).max() <= 2.001 * error
    signs = np.sign(matrix[:, 0])
    # 3.243F6A88 85A308D3 13198A2E 03707344 in hexadecimal.
    pi = f"{0x243F6A8885A308D313198A2E03707344:0128b}"[:size]
    assert pi == "".join("1" if s < 0 else "0" for s in signs)
    assert pi == "".join(map(str, reference.bits_of_pi(size)))


def test_a_rotation_cancels_in_a_product():
    """Each side is rounded in 4 sums and never in the product with 1/4, so that an element of x'
    is off by at most 4 * 2^-24 of |x| |H| / 4, and the product by twice that, to first order. 130
    is no multiple of 16: the zeros that fill the block up add nothing."""
    x, y = normal((8, 130)), normal((130, 6), 1)
    a, b = rotate(x, 16).astype(np.float64), rotate(y, 16, axis=0).astype(np.float64)
    assert a.shape == (8, 144) and b.shape == (144, 6)
    spread = np.kron(np.eye(9), np.full((16, 16), 0.25))[:130]  # |H| / 4
    bound = 2.001 * 4 * 2.0**-24 * (np.abs(x) @ spread) @ (np.abs(y).T @ spread).T
    exact = x.astype(np.float64) @ y.astype(np.float64)
    assert (np.abs(a @ b - exact) <= bound).all()
    assert np.abs(a[:, :130] - x).max() > 1  # and yet something was rotated


def test_an_outlier_is_spread_over_its_block():
    x = np.zeros((2, 48), np.float32)
    x[1, 20] = 1.0
    y = np.abs(rotate(x, 16))
    np.testing.assert_array_equal(y[1], np.repeat(np.float32([0, 0.25, 0]), 16))
    assert (y[0] == 0).all()


def test_rotations_of_empty_and_narrow_arrays():
    for shape, axis, expected in [((0, 5), 1, (0, 16)), ((0, 5), 0, (0, 5)), ((5, 0), -1, (5, 0))]:
        assert rotate(np.ones(shape, np.float32), 16, axis).shape == expected
    x = normal((4, 32)).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(rotate(x, 16), reference.hadamard(x.astype(np.float32), 16))
