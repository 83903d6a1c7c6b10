"""Scale rules, by hand and at the ends of the formats' ranges."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.numerics.formats import FORMATS
from fp8jax.numerics.quantization import dequantize, quantize
from fp8jax.numerics.scales import Constant, Fp32, Pow2
from fp8jax.numerics.tiles import MX32, NV16, TENSOR


# Compiled whole: operation by operation, each one is compiled for each shape.
@functools.partial(jax.jit, static_argnames=("fmt", "tile", "scale"))
def quantized(x, fmt, tile, scale):
    """Codes and scales, and the numbers that they stand for."""
    q = quantize(x, fmt, tile, scale=scale)
    return q, dequantize(q)


@pytest.mark.parametrize(
    ("rule", "fmt", "amaxes", "expected"),
    [  # largest numbers: e4m3 448, e5m2 57344, e2m1 6
        ("fp32", "e4m3", [0, 448, 224, 1, 4480], [1, 1, 0.5, np.float32(1) / np.float32(448), 10]),
        (Fp32(2), "e4m3", [0, 448, 224, 56, 4480], [1, 4, 2, 0.5, 40]),
        ("pow2", "e4m3", [0, 448, 449, 1, 224], [1, 1, 2, 2.0**-8, 0.5]),
        (Pow2(3), "e4m3", [0, 448, 449, 1, 224], [1, 8, 16, 2.0**-5, 4]),
        ("e8m0", "e4m3", [0, 448, 449, 1, 3e38], [1, 1, 2, 2.0**-8, 2.0**120]),
        ("e8m0", "e2m1", [0, 6, 6.1, 12, 1], [1, 1, 2, 2, 0.25]),
        # floor(log2(amax)) - 8, - 15 and - 2: whole binades, the maximum itself plays no part
        ("e8m0_floor", "e4m3", [0, 256, 511, 512, 1], [1, 1, 1, 2, 2.0**-8]),
        ("e8m0_floor", "e5m2", [0, 57344, 65535, 65536, 3], [1, 1, 1, 2, 2.0**-14]),
        ("e8m0_floor", "e2m1", [0, 6, 7.9, 8, 3e38], [1, 1, 1, 2, 2.0**125]),
        (Constant(4.0), "e4m3", [0, 448, 449, 1, 224], [4, 4, 4, 4, 4]),
    ],
)
def test_scale_rules_by_hand(rule, fmt, amaxes, expected):
    got = [quantized(np.full(8, a, np.float32), fmt, TENSOR, scale=rule)[0] for a in amaxes]
    assert [float(np.asarray(q.scale)[0]) for q in got] == [float(e) for e in expected]


def test_a_floored_scale_saturates_where_a_ceiled_one_does_not():
    x = np.float32([[511, 310, 1, -480]])
    floor, ceil = (quantized(x, "e4m3", MX32, scale=r)[1] for r in ("e8m0_floor", "e8m0"))
    np.testing.assert_array_equal(floor, [[448, 320, 1, -448]])  # scale 1: steps of 32 at 310
    np.testing.assert_array_equal(ceil, [[512, 320, 1, -480]])  # scale 2


def test_a_scale_with_a_margin_has_a_normal_reciprocal():
    """Beyond 2^126 it would be subnormal and flushed: all codes would be zero."""
    amaxes = jnp.float32([1e38, 3e38, np.inf, 0, 1])
    scales, _ = Fp32(margin=4)(amaxes, FORMATS["e2m1"])
    np.testing.assert_array_equal(scales[:4], np.float32([2.0**126, 2.0**126, np.inf, 1]))
    np.testing.assert_allclose(scales[4], 16 / 6, rtol=1e-6)


def test_nvfp4_by_hand():
    """Five tiles under one tensor scale of 1: amax 2688 = 6 * 448 pins it."""
    amaxes = np.float32([2688, 6, 3, 0, 0.001])
    x = np.repeat(amaxes, 16).reshape(1, 80)
    q, dequantized = quantized(x, "e2m1", NV16, scale="nvfp4")
    assert float(q.tensor_scale) == 1.0
    np.testing.assert_array_equal(q.scale.astype(np.float32), [[448, 1, 0.5, 1, 2.0**-9]])
    np.testing.assert_array_equal(dequantized[0, ::16], [2688, 6, 3, 0, 2.0**-10])


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "e2m1"])
def test_powers_of_two_never_saturate_and_waste_less_than_a_binade(fmt):
    """At, just below and just above max * 2^k for every k of float32's range."""
    top = np.float32(FORMATS[fmt].max)
    around = [np.nextafter(top, np.float32(0)), top, np.nextafter(top, np.float32(1e9))]
    with np.errstate(over="ignore"):
        amax = np.float32([a * np.float32(2.0) ** k for k in range(-115, 125) for a in around])
    amax = amax[np.isfinite(amax)]
    scale, _ = jax.jit(lambda amax: Pow2()(amax, FORMATS[fmt]))(amax)
    ratio = amax.astype(np.float64) / np.asarray(scale, np.float64)
    assert (ratio <= top).all() and (ratio > top / 2).all()
    assert (np.frexp(np.asarray(scale))[0] == 0.5).all()
