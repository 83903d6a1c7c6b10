"""The product with scales of rows, to the bit; on CPUs in Pallas' interpreter.

Exact by construction: codes are integers up to 3 and K at most 896, so that sums are integers below
2^13, which Hopper's 14 bits hold. Scales are powers of two. The only rounding is that of the result
to bfloat16.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fp8jax.kernels.block_gemm import TuningConfig
from fp8jax.kernels.row_gemm import TUNING, _check, row_scaled_matmul
from tests.support.interpreter import TOO_OLD, interpret, lower, needs_pallas

BF16, F32 = jnp.bfloat16, jnp.float32
E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def operands(m: int, k: int, n: int, formats=(E4M3, E4M3), seed=0):
    """a, b, sa, sb; every row has its own scale."""
    rng = np.random.default_rng(seed)
    codes = (rng.integers(-3, 4, (r, k)).astype(f) for r, f in zip((m, n), formats, strict=True))
    return *codes, *(np.exp2(rng.integers(-4, 5, r)).astype(np.float32) for r in (m, n))


def exact(a, b, sa, sb) -> np.ndarray:
    """The product in float64."""
    with np.errstate(invalid="ignore"):
        return a.astype(np.float64) @ b.astype(np.float64).T * np.outer(sa.astype(np.float64), sb)


def check(got: jax.Array, given, dtype):
    expected = jnp.asarray(exact(*given).astype(np.float32)).astype(dtype)
    assert got.dtype == dtype and got.shape == expected.shape
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(expected, np.float32))


def product(given, dtype, tuning: TuningConfig | None = None, cores: int = 1) -> jax.Array:
    f = functools.partial(row_scaled_matmul, out_dtype=dtype, tuning=tuning)
    return interpret(f, *map(jnp.asarray, given), cores=cores)


@needs_pallas
@pytest.mark.parametrize(
    ("shape", "dtype", "cores", "tuning"),
    [
        # Whole stages: addresses are constants. One round, two rounds, three stages, two tiles.
        ((128, 512, 256), BF16, 1, dict()),
        ((128, 512, 256), F32, 1, dict(tile_n=128, stages=2)),
        ((136, 768, 192), F32, 1, dict(stages=3, tile_n=96)),
        ((256, 256, 384), BF16, 1, dict(stages=2, tile_n=192)),
        # Stages do not divide the blocks of K, of which there are more than stages...
        ((128, 640, 64), F32, 1, dict(tile_n=64)),
        ((128, 768, 320), BF16, 2, dict(stages=5, tile_n=160)),
        # ...or fewer, with several tiles a core: some slots are empty when the second tile begins.
        ((256, 128, 128), BF16, 1, dict(tile_n=64)),
        ((256, 256, 192), F32, 2, dict(tile_n=96, band=1)),
        ((384, 384, 256), F32, 2, dict(tile_n=128, band=2, along_n=True)),
        # M and N that end within a tile.
        ((8, 128, 64), F32, 1, dict()),
        ((72, 256, 128), F32, 2, dict(stages=2, tile_n=192)),
        ((264, 256, 448), BF16, 2, dict(stages=2, tile_n=256, band=1)),
        # More cores than tiles.
        ((128, 128, 64), BF16, 2, dict()),
        # One warpgroup that multiplies, and results stored in an odd number of pieces.
        ((128, 512, 192), F32, 1, dict(warpgroups=1, tile_n=160)),
        ((128, 256, 384), BF16, 1, dict(stages=2, tile_n=192)),
    ],
)
def test_exact_products(shape, dtype, cores, tuning):
    given = operands(*shape)
    check(product(given, dtype, TuningConfig(**(dict(tile_n=256) | tuning)), cores), given, dtype)


@needs_pallas
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)])
def test_formats_with_the_cut_that_is_chosen(formats, dtype):
    given = operands(136, 896, 320, formats)
    check(product(given, dtype), given, dtype)


@needs_pallas
@pytest.mark.parametrize("other", [E4M3, E5M2])
def test_what_is_not_finite_stays_in_its_row_and_column(other):
    """NaN codes and scales of either operand, the largest codes beside them."""
    given = a, b, sa, sb = operands(200, 256, 320, (E4M3, other))
    a[3] = 448
    a[37, 100], b[300, 255] = np.nan, np.nan
    sa[130], sb[5] = np.nan, np.nan
    got = product(given, F32, TuningConfig(stages=2), cores=2)
    poisoned = np.zeros(got.shape, bool)
    poisoned[[37, 130]] = poisoned[:, [5, 300]] = True
    np.testing.assert_array_equal(np.isnan(got), poisoned)
    check(got, given, F32)


@needs_pallas
def test_rows_beyond_the_used_ones_do_not_matter():
    """Slices of the result are the product of slices of the operands, whatever lies beyond."""
    given = a, b, sa, sb = operands(256, 256, 256)
    used = a[:136].copy(), b[:72].copy(), sa[:136].copy(), sb[:72].copy()
    a[136:], b[72:] = 448, np.float32(np.nan)
    sa[136:], sb[72:] = np.inf, 1e38
    check(product(given, F32, TuningConfig(tile_n=96))[:136, :72], used, F32)


@needs_pallas
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)])
@pytest.mark.parametrize(
    "tuning",
    [TUNING, TuningConfig(warpgroups=3, tile_n=192, stages=3), TuningConfig(warpgroups=1)],
    ids=["chosen", "three warpgroups", "one warpgroup"],
)
def test_it_lowers_for_the_gpu(tuning, formats, dtype):
    """Layouts of registers, shared memory and three warpgroups, for which the interpreter of jax
    0.11 has too few threads on a small machine."""
    f = functools.partial(row_scaled_matmul, out_dtype=dtype, tuning=tuning)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands(264, 640, 384, formats)]
    assert "mosaic_gpu" in lower(f, *shapes)


# Bad input ----------------------------------------------------------------------------------------


def zeros(**changed) -> tuple[jax.Array, ...]:
    """a, b, sa, sb for M = 128, K = 256, N = 192, some of them replaced."""
    given = dict(
        a=jnp.zeros((128, 256), E4M3),
        b=jnp.zeros((192, 256), E4M3),
        sa=jnp.ones(128),
        sb=jnp.ones(192),
    )
    return tuple((given | changed).values())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(a=jnp.zeros((128, 384), E4M3)), r"K whole blocks .*a float8_e4m3fn\(128, 384\)"),
        (
            dict(a=jnp.zeros((128, 200), E4M3), b=jnp.zeros((192, 200), E4M3)),
            r"K whole blocks of 128, got a float8_e4m3fn\(128, 200\)",
        ),
        (
            dict(a=jnp.zeros((128, 0), E4M3), b=jnp.zeros((192, 0), E4M3)),
            r"K whole blocks of 128, got a float8_e4m3fn\(128, 0\)",
        ),
        (dict(b=jnp.zeros((2, 192, 256), E4M3)), r"b float8_e4m3fn\(2, 192, 256\)"),
        (dict(a=jnp.zeros((0, 256), E4M3), sa=jnp.ones(0)), r"got a float8_e4m3fn\(0, 256\)"),
        (dict(b=jnp.zeros((0, 256), E4M3), sb=jnp.ones(0)), r"b float8_e4m3fn\(0, 256\)"),
        (dict(a=jnp.zeros((128, 256), BF16)), r"float8_e5m2 codes, got a bfloat16\(128, 256\)"),
        (dict(b=jnp.zeros((192, 256), jnp.int8)), r"codes, .*b int8\(192, 256\)"),
        (
            dict(a=jnp.zeros((128, 256), E5M2), b=jnp.zeros((192, 256), E5M2)),
            "at least one of a and b must be float8_e4m3fn, got a float8_e5m2.* b float8_e5m2",
        ),
        (dict(sa=jnp.ones((128, 1))), r"\[M\] and \[N\], got .*sa \(128, 1\)"),
        (dict(sa=jnp.ones(1)), r"\[M\] and \[N\], got .*sa \(1,\)"),
        (dict(sb=jnp.ones(128)), r"\[M\] and \[N\], got .*sb \(128,\)"),
        (dict(sa=jnp.ones(128, BF16)), "scales must be float32, got bfloat16 and float32"),
        (dict(sb=jnp.ones(192, jnp.float16)), "got float32 and float16"),
        (
            dict(a=jnp.zeros((100, 256), E4M3), sa=jnp.ones(100)),
            r"M must be a multiple of 8 and N of 64, got a float8_e4m3fn\(100, 256\)",
        ),
        (
            dict(b=jnp.zeros((200, 256), E4M3), sb=jnp.ones(200)),
            r"N of 64, .*b float8_e4m3fn\(200, 256\)",
        ),
    ],
)
def test_operands_that_it_does_not_take(changed, message):
    """Some of them the annotations refuse in tests already, hence `_check`."""
    with pytest.raises(ValueError, match=message):
        _check(*zeros(**changed), BF16)


@pytest.mark.parametrize("dtype", [jnp.float16, E4M3])
def test_results_are_bfloat16_or_float32(dtype):
    with pytest.raises(ValueError, match=f"got .*{jnp.dtype(dtype).name}"):
        _check(*zeros(), dtype)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about a CPU")
def test_another_device_is_refused():
    with pytest.raises(NotImplementedError, match=TOO_OLD or "for Hopper .*, got cpu"):
        row_scaled_matmul(*zeros())


# On the device ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)])
@pytest.mark.parametrize("shape", [(512, 896, 768), (4104, 256, 3136), (16392, 1024, 3136)])
def test_exact_on_the_gpu(shape, formats, dtype):
    """The second and third shapes have several tiles a core, and fewer blocks of K than stages, or
    more: slots are filled again while they may still be read."""
    given = operands(*shape, formats)
    check(jax.jit(functools.partial(row_scaled_matmul, out_dtype=dtype))(*given), given, dtype)


@pytest.mark.gpu
def test_bounded_on_the_gpu():
    """Normal numbers against float64. Each instruction adds 32 products to the sum and cuts all 33
    at a unit of 2^-13 of the largest, at most the final sum or so. The products' 32 cuts have
    either sign, 3 units together; the sum's is half a unit towards zero. For K = 1024 that is 32
    times half a unit and sqrt(32) times 3: 33 units, 2^-8."""
    rng = np.random.default_rng(0)
    a, b, sa, sb = operands(512, 1024, 768)
    a, b = (rng.normal(size=x.shape).astype(x.dtype) for x in (a, b))
    got = jax.jit(functools.partial(row_scaled_matmul, out_dtype=F32))(a, b, sa, sb)
    expected = exact(a, b, sa, sb)
    assert np.linalg.norm(got - expected) <= 2.0**-8 * np.linalg.norm(expected)
