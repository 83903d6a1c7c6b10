"""The block-scaled product, to the bit; on CPUs in Pallas' interpreter.

Exact by construction: codes are integers up to 3, scales powers of two from 1/4 to 4. A block's sum
is at most 128 * 9, so that Hopper's 14 bits hold it; all sums are multiples of 2^-4 below 2^20,
so that float32 holds them. The only rounding is that of the result to bfloat16.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.kernels import block_gemm
from fp8jax.kernels.block_gemm import E4M3, TuningConfig, _check, block_scaled_matmul, tuned
from tests.support.block_products import check, exact, operands
from tests.support.interpreter import TOO_OLD, interpret, lower, needs_pallas

BF16, F32 = jnp.bfloat16, jnp.float32


def product(given, dtype, tuning: TuningConfig | None = None, cores: int = 1) -> jax.Array:
    f = functools.partial(block_scaled_matmul, out_dtype=dtype, tuning=tuning)
    return interpret(f, *map(jnp.asarray, given), cores=cores)


@needs_pallas
@pytest.mark.parametrize(
    ("shape", "by_row", "dtype", "cores", "tuning"),
    [
        # Whole stages: addresses are constants. One round, two rounds, three stages.
        ((128, 512, 256), False, BF16, 1, dict()),
        ((128, 1024, 128), False, F32, 1, dict()),
        ((136, 768, 192), True, F32, 1, dict(stages=3, tile_n=96)),
        ((128, 512, 192), True, BF16, 1, dict(stages=2, tile_n=192)),
        # Stages do not divide the blocks of K, of which there are more than stages...
        ((128, 640, 64), True, F32, 1, dict(tile_n=64)),
        ((128, 768, 320), False, BF16, 2, dict(stages=5, tile_n=96)),
        # ...or fewer, with several tiles a core: some slots are empty when the second tile begins.
        ((256, 128, 128), False, BF16, 1, dict()),
        ((256, 256, 192), True, F32, 2, dict(tile_n=96, band=1)),
        ((384, 384, 256), False, F32, 2, dict(band=2, along_n=True)),
        # M and N that end within a tile, or within a block of b.
        ((8, 128, 64), False, F32, 1, dict()),
        ((72, 256, 128), True, F32, 2, dict(stages=2)),
        ((136, 384, 320), False, F32, 1, dict(stages=3, tile_n=160)),
        ((264, 256, 448), False, BF16, 2, dict(stages=2, tile_n=192, band=1)),
        ((192, 256, 192), False, BF16, 1, dict(stages=2, tile_n=64, along_n=True)),
        # One warpgroup that multiplies.
        ((128, 512, 128), False, F32, 1, dict(warpgroups=1)),
        # Results of two bytes in columns by row that are no multiple of the 64 stored at a time.
        ((128, 256, 192), True, BF16, 1, dict(stages=2, tile_n=96)),
        ((128, 256, 192), True, BF16, 1, dict(stages=2, tile_n=160)),
    ],
)
def test_exact_products(shape, by_row, dtype, cores, tuning):
    given = operands(*shape, by_row)
    check(product(given, dtype, TuningConfig(**tuning), cores), given, dtype)


@needs_pallas
@pytest.mark.parametrize(("by_row", "dtype"), [(False, BF16), (True, F32), (True, BF16)])
def test_the_cut_that_is_chosen(by_row, dtype):
    """As calls without a tuning have it, with results of either dtype."""
    given = operands(128, 256, 192, by_row)
    check(product(given, dtype), given, dtype)


@pytest.mark.parametrize("by_row", [False, True])
def test_a_cut_is_chosen_by_shape(by_row, monkeypatch):
    """A large product takes the fastest. One of 1024 x 4096 has 192 tiles of 192 x 128, or 256 of
    128 x 128: two rounds on 132 cores either way, of which the smaller tile's are shorter."""
    monkeypatch.setattr(block_gemm, "num_cores", lambda: 132)
    cuts = [cut for cut, _ in (block_gemm._BY_ROW if by_row else block_gemm._BY_BLOCK)]
    assert tuned(16384, 14336, by_row) == cuts[0]
    assert tuned(1024, 4096, by_row) == cuts[1]


@needs_pallas
@pytest.mark.parametrize("by_row", [False, True])
def test_what_is_not_finite_stays_in_its_row_and_column(by_row):
    """NaN scales and the largest codes in a row of a, and in a row of b or its block of 128."""
    given = a, b, sa, sb = operands(200, 256, 320, by_row)
    a[37] = 448
    sa[1, 37] = np.nan
    sb[0, 130 if by_row else 1] = np.nan
    columns = slice(130, 131) if by_row else slice(128, 256)
    b[columns] = -448
    got = product(given, F32, TuningConfig(stages=2), cores=2)
    poisoned = np.zeros(got.shape, bool)
    poisoned[37] = poisoned[:, columns] = True
    np.testing.assert_array_equal(np.isnan(got), poisoned)
    check(got, given, F32)


@needs_pallas
def test_rows_beyond_the_used_ones_do_not_matter():
    """Slices of the result are the product of slices of the operands, whatever lies beyond."""
    given = a, b, sa, sb = operands(256, 256, 256, True)
    used = a[:136].copy(), b[:72].copy(), sa[:, :136].copy(), sb[:, :72].copy()
    a[136:], b[72:] = 448, np.float32(np.nan)
    sa[:, 136:], sb[:, 72:] = np.inf, 1e38
    check(product(given, F32, TuningConfig(tile_n=96))[:136, :72], used, F32)


@needs_pallas
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize(
    "tuning",
    [
        None,
        dict(warpgroups=3, copy_registers=24),
        dict(warpgroups=2, tile_n=192, stages=3),
        dict(warpgroups=1, tile_n=256, stages=5),
        dataclasses.asdict(block_gemm._BY_BLOCK[0][0]),
        dict(tile_n=160, cluster=2),
    ],
)
def test_it_lowers_for_the_gpu(tuning, by_row, dtype):
    """Layouts of registers, shared memory and three warpgroups, for which the interpreter of jax
    0.11 has too few threads on a small machine."""
    tuning = None if tuning is None else TuningConfig(**tuning)
    f = functools.partial(block_scaled_matmul, out_dtype=dtype, tuning=tuning)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands(264, 640, 384, by_row)]
    assert "mosaic_gpu" in lower(f, *shapes)


# Bad input ----------------------------------------------------------------------------------------


def zeros(**changed) -> tuple[jax.Array, ...]:
    """a, b, sa, sb for M = 128, K = 256, N = 192, some of them replaced."""
    given = dict(
        a=jnp.zeros((128, 256), E4M3),
        b=jnp.zeros((192, 256), E4M3),
        sa=jnp.ones((2, 128)),
        sb=jnp.ones((2, 2)),
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
        (dict(b=jnp.zeros((2, 192, 256), E4M3)), r"b float8_e4m3fn\(2, 192, 256\)"),
        (dict(a=jnp.zeros((128, 256), jnp.float8_e5m2)), "float8_e4m3fn codes, got a float8_e5m2"),
        (dict(b=jnp.zeros((192, 256), BF16)), r"codes, .*b bfloat16\(192, 256\)"),
        (dict(sa=jnp.ones((128, 2))), r"be \[K / 128, M\] .*sa \(128, 2\)"),
        (dict(sa=jnp.ones((2, 1))), r"sa \(2, 1\)"),
        (dict(sb=jnp.ones((1, 2))), r"sb \(1, 2\)"),
        (dict(sb=jnp.ones((2, 1))), r"ceil\(N / 128\)\], .*sb \(2, 1\)"),
        (dict(sb=jnp.ones((2, 128))), r"ceil\(N / 128\)\], .*sb \(2, 128\)"),
        (dict(sa=jnp.ones((2, 128), BF16)), "scales must be float32, got bfloat16 and float32"),
        (dict(sb=jnp.ones((2, 2), jnp.float16)), "got float32 and float16"),
        (
            dict(a=jnp.zeros((100, 256), E4M3), sa=jnp.ones((2, 100))),
            r"M must be a multiple of 8 and N of 64, got a float8_e4m3fn\(100, 256\)",
        ),
        (dict(b=jnp.zeros((200, 256), E4M3)), r"N of 64, .*b float8_e4m3fn\(200, 256\)"),
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


@pytest.mark.parametrize(
    ("tuning", "message"),
    [
        (dict(tile_n=100), "192 or 256, got 100"),
        (dict(tile_n=0), "192 or 256, got 0"),
        (dict(tile_n=288), "192 or 256, got 288"),
        (dict(tile_n=224), "192 or 256, got 224"),  # may meet three blocks of b
        (dict(warpgroups=0), "1 to 3 warpgroups.*warpgroups=0"),
        (dict(warpgroups=4), "1 to 3 warpgroups.*warpgroups=4"),
        (dict(stages=1), "2 stages or more.*stages=1"),
        (dict(band=0), "band=0"),
        (dict(cluster=0), "cluster=0"),
    ],
)
def test_bad_tunings(tuning, message):
    with pytest.raises(ValueError, match=message):
        TuningConfig(**tuning)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about a CPU")
def test_another_device_is_refused():
    with pytest.raises(NotImplementedError, match=TOO_OLD or "for Hopper .*, got cpu"):
        block_scaled_matmul(*zeros())


# On the device ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("shape", [(512, 1024, 768), (4104, 256, 3072)])
def test_exact_on_the_gpu(shape, by_row, dtype):
    """The second shape has several tiles a core, and fewer blocks of K than stages."""
    given = operands(*shape, by_row)
    check(jax.jit(functools.partial(block_scaled_matmul, out_dtype=dtype))(*given), given, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [dict(warpgroups=3, copy_registers=24), dict(tile_n=160)])
@pytest.mark.parametrize("by_row", [False, True])
def test_clusters_on_the_gpu(by_row, changes):
    """The interpreter has no copies that a cluster shares. The last cluster has rows beyond M; with
    several tiles a core and more blocks of K than slots, these are filled again while they may
    still be read."""
    given = operands(16392, 1024, 3200, by_row)
    tuning = TuningConfig(cluster=2, **changes)
    f = functools.partial(block_scaled_matmul, out_dtype=F32, tuning=tuning)
    check(jax.jit(f)(*given), given, F32)


@pytest.mark.gpu
@pytest.mark.parametrize("by_row", [False, True])
def test_bounded_on_the_gpu(by_row):
    """Normal numbers against float64. A sum over 32 products loses what lies 14 bits below its
    largest term, which is 8 or so times the typical one: 32 errors of 2^-13 * 8 / sqrt(12) beside
    32 terms, 2.8e-4 relative; 2^-10 leaves a factor 3."""
    rng = np.random.default_rng(0)
    a, b, sa, sb = operands(512, 1024, 768, by_row)
    a, b = (rng.normal(size=x.shape).astype(a.dtype) for x in (a, b))
    got = jax.jit(functools.partial(block_scaled_matmul, out_dtype=F32))(a, b, sa, sb)
    expected = exact(a, b, sa, sb)
    assert np.linalg.norm(got - expected) <= 2.0**-10 * np.linalg.norm(expected)
