"""Producers inside quantizers: the same codes as of the results, had they been stored."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.kernels.quantize import cast_transpose, quantize_blocks, quantize_tiles
from fp8jax.kernels.swiglu import SWIGLU, SWIGLU_GRAD
from fp8jax.kernels.swiglu_quantize import cast_produced, tiles_produced
from fp8jax.numerics.formats import FORMATS
from fp8jax.numerics.scales import Pow2
from tests.support.interpreter import interpret, lower, needs_pallas

BF16, F32 = jnp.bfloat16, jnp.float32
E4M3, E5M2 = FORMATS["e4m3"], FORMATS["e5m2"]
PRODUCERS = pytest.mark.parametrize("producer", [SWIGLU, SWIGLU_GRAD], ids=lambda p: p.name)
SCALES = jnp.float32([2.0**-5, 2.0**-7, 2.0**-6])
BOTH = (-1, -2)


def sources(producer, shape=(128, 256), seed=0):
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.normal(size=shape) * 3, BF16) for _ in range(producer.sources))


def results(producer, arrays):
    """As they would have been stored, in bfloat16."""
    return [r.astype(BF16) for r in producer.compute(*(a.astype(F32) for a in arrays))]


def everything(producer):
    return dict(formats=(E4M3,) * producer.results, axes=(BOTH,) * producer.results)


def equal(got, expected):
    """Bit for bit, arrays or None."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_swiglu_and_its_gradient_are_those_of_jax():
    """In float32 both are off by a few units of 2^-24; sums of three products by 2^-20 of their
    largest term, which is below 2^8 here."""
    dh, gate, up = (x.astype(F32) for x in sources(SWIGLU_GRAD))
    h, vjp = jax.vjp(lambda gate, up: jax.nn.silu(gate) * up, gate, up)
    np.testing.assert_allclose(SWIGLU.compute(gate, up)[0], h, rtol=2**-20, atol=2**-20)
    for ours, jaxs in zip(SWIGLU_GRAD.compute(dh, gate, up), (*vjp(dh), h), strict=True):
        np.testing.assert_allclose(ours, jaxs, rtol=2**-20, atol=2**-12)


def test_far_from_zero_nothing_overflows():
    """exp(-x) is infinite for x below -88: the sigmoid is then 0, and no derivative is NaN."""
    gate = jnp.float32([[-3e38, -1e4, -100.0, 100.0, 3e38]])
    one = jnp.ones_like(gate)
    np.testing.assert_array_equal(SWIGLU.compute(gate, one)[0], jnp.maximum(gate, 0))
    d_gate, d_up, _ = SWIGLU_GRAD.compute(one, gate, one)
    np.testing.assert_array_equal(d_gate, (gate > 0).astype(F32))
    np.testing.assert_array_equal(d_up, jnp.maximum(gate, 0))


# Of each result, as gemm/fused_mlp.py wants them, and all.
AXES = pytest.mark.parametrize(
    ("producer", "axes"),
    [
        (SWIGLU, ((-1,),)),
        (SWIGLU, (BOTH,)),
        (SWIGLU_GRAD, (BOTH, BOTH, (-2,))),
        (SWIGLU_GRAD, (BOTH, BOTH, BOTH)),
    ],
)


@needs_pallas
@AXES
def test_casts(producer, axes):
    arrays, scales = sources(producer), SCALES[: producer.results]
    formats = (E5M2, E5M2, E4M3)[-producer.results :]
    f = functools.partial(cast_produced, producer, formats=formats, axes=axes)
    of_each = zip(results(producer, arrays), scales, formats, axes, strict=True)
    for (got, amax), (x, scale, fmt, of) in zip(interpret(f, arrays, scales), of_each, strict=True):
        *both, largest = interpret(functools.partial(cast_transpose, fmt=fmt), x, scale)
        equal(got, {axis: both[BOTH.index(axis)] for axis in of})
        equal(amax, largest if -1 in of else None)


@needs_pallas
@AXES
def test_tiles(producer, axes):
    arrays = sources(producer, (256, 128))
    f = functools.partial(tiles_produced, producer, fmt=E4M3, rule=Pow2(), axes=axes)
    of_each = zip(results(producer, arrays), axes, strict=True)
    for got, (x, of) in zip(interpret(f, arrays), of_each, strict=True):
        both = interpret(functools.partial(quantize_tiles, fmt=E4M3, rule=Pow2()), x)
        equal(got, {axis: both[BOTH.index(axis)] for axis in of})


@needs_pallas
def test_blocks_by_columns():
    """As the weight gradient may want the gradients of gate and up; h keeps its tiles."""
    arrays, axes = sources(SWIGLU_GRAD, (256, 128)), (BOTH, BOTH, (-2,))
    f = functools.partial(
        tiles_produced, SWIGLU_GRAD, fmt=E4M3, rule=Pow2(), axes=axes, blocks=frozenset([0, 1])
    )
    tiles = functools.partial(quantize_tiles, fmt=E4M3, rule=Pow2())
    blocks = functools.partial(quantize_blocks, fmt=E4M3, rule=Pow2(), transposed=True)
    *gradients, h = zip(interpret(f, arrays), results(SWIGLU_GRAD, arrays), strict=True)
    for got, x in gradients:
        equal(got, {-1: interpret(tiles, x)[0], -2: interpret(blocks, x)})
    got, x = h
    equal(got, {-2: interpret(tiles, x)[1]})


@needs_pallas
@PRODUCERS
def test_nan_comes_out_where_it_went_in(producer):
    """Of every source: in the results' places, and in the amax. An infinite gate gives NaN, too:
    infinity times 0."""
    for i in range(producer.sources):
        arrays = [*sources(producer)]
        arrays[i] = arrays[i].at[3, 200].set(jnp.nan)
        got = interpret(
            functools.partial(cast_produced, producer, **everything(producer)),
            tuple(arrays),
            SCALES[: producer.results],
        )
        for (codes, amax), x in zip(got, results(producer, arrays), strict=True):
            nan = np.isnan(np.asarray(x, np.float32))
            np.testing.assert_array_equal(np.isnan(np.asarray(codes[-1], np.float32)), nan)
            np.testing.assert_array_equal(np.isnan(np.asarray(codes[-2], np.float32)), nan.T)
            assert bool(jnp.isnan(amax)) == bool(nan.any())


@needs_pallas
@PRODUCERS
def test_lowers_for_hopper(producer):
    arrays = tuple(jax.ShapeDtypeStruct((512, 768), BF16) for _ in range(producer.sources))
    scales = jax.ShapeDtypeStruct((producer.results,), F32)
    cast = functools.partial(cast_produced, producer, **everything(producer))
    assert "mosaic" in lower(cast, arrays, scales)
    axes = (BOTH,) * producer.results
    tiles = functools.partial(tiles_produced, producer, fmt=E5M2, rule=Pow2(), axes=axes)
    assert "mosaic" in lower(tiles, arrays)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ([(128, 128)], "swiglu needs 2 arrays of equal shape"),
        ([(128, 128), (128, 256)], "swiglu needs 2 arrays of equal shape"),
        ([(128, 100)] * 2, r"whole tiles of 128 x 128, got shape \(128, 100\)"),
    ],
)
def test_refuses_other_shapes(arrays, message):
    given = tuple(jnp.zeros(shape, BF16) for shape in arrays)
    with pytest.raises(ValueError, match=message):
        cast_produced(SWIGLU, given, SCALES[:1], **everything(SWIGLU))


def test_refuses_other_dtypes_and_scales():
    given = tuple(jnp.zeros((128, 128), F32) for _ in range(2))
    with pytest.raises(ValueError, match="needs bfloat16 arrays"):
        tiles_produced(SWIGLU, given, E4M3, Pow2(), ((-1,),))
    given = tuple(x.astype(BF16) for x in given)
    with pytest.raises(ValueError, match=r"has 1 results, got \(3,\) scales, 1 formats, 1 axes"):
        cast_produced(SWIGLU, given, SCALES, **everything(SWIGLU))
    with pytest.raises(ValueError, match=r"has 1 results, got axes=\(\)"):
        tiles_produced(SWIGLU, given, E4M3, Pow2(), ())


# On the device ------------------------------------------------------------------------------------


@pytest.mark.gpu
@PRODUCERS
def test_produced_on_the_gpu(producer):
    """Against the plain function and the quantizer of what it stored. The GPU's exponential and
    reciprocal are off by 2^-22, so that one result in 2^13 or so rounds to the next bfloat16, and
    fewer codes to the next code; the amaxes lie within a unit of bfloat16."""
    arrays, scales = sources(producer, (1024, 640)), SCALES[: producer.results]
    f = functools.partial(cast_produced, producer, **everything(producer))
    got = jax.jit(f)(arrays, scales)
    for (codes, amax), x, scale in zip(got, results(producer, arrays), scales, strict=True):
        expected, _, of_all = jax.jit(functools.partial(cast_transpose, fmt=E4M3))(x, scale)
        rows, columns, wanted = (
            np.asarray(a).view(np.uint8) for a in (codes[-1], codes[-2].T, expected)
        )
        np.testing.assert_array_equal(rows, columns)
        assert (rows != wanted).mean() < 1e-3
        np.testing.assert_allclose(amax, of_all, rtol=2**-7)
