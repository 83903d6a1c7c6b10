"""The fused quantizers, bit for bit against the NumPy reference; on CPUs in Pallas' interpreter."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fp8jax.kernels.quantize import (
    TileCodes,
    _check,
    cast_rows_columns,
    cast_transpose,
    quantize_blocks,
    quantize_tiles,
)
from fp8jax.numerics.formats import FORMATS
from fp8jax.numerics.scales import E8M0, SCALES, Constant, Fp32, Pow2
from fp8jax.numerics.tiles import BLOCK128, ROW, TILE128
from tests.support import reference
from tests.support.interpreter import TOO_OLD, interpret, needs_pallas

E4M3, E5M2 = FORMATS["e4m3"], FORMATS["e5m2"]
RULES = {name: SCALES[name] for name in ("fp32", "pow2", "e8m0")} | {
    "Fp32(2)": Fp32(2),
    "Pow2(3)": Pow2(3),
    "Pow2(-2)": Pow2(-2),
    "Fp32(-3)": Fp32(-3),
}
DTYPES = {"bf16": ml_dtypes.bfloat16, "f32": np.float32}


def source(shape, dtype: str = "bf16", seed=0) -> np.ndarray:
    """Normal numbers; rows and columns are unlike by up to 2^16, so that every tile's scale is its
    own and codes reach into the subnormal ones."""
    rng = np.random.default_rng(seed)
    exponents = rng.integers(-8, 9, (shape[0], 1)) + rng.integers(-8, 9, (1, shape[1]))
    return (rng.normal(size=shape) * np.exp2(exponents)).astype(DTYPES[dtype])


def as_bits(codes) -> np.ndarray:
    return np.asarray(codes).view(np.uint8)


def expected_codes(x: np.ndarray, fmt: str, tile, axis: int, rule):
    """Codes, and float32 scales with one entry a tile of x."""
    values, _, scales = reference.quantize(x, fmt, tile, axis, rule)
    if fmt == "e2m1":  # kernels store its codes in e4m3
        values = values.astype(np.float32).astype(reference.DTYPES["e4m3"])
    counts = [max(indices) + 1 for indices in zip(*scales, strict=True)]
    grid = np.zeros(counts, np.float32)
    for index, scale in scales.items():
        grid[index] = np.float32(scale)
    return values, grid


def check_tiles(
    x: np.ndarray, fmt: str, rule, got: tuple[TileCodes | None, TileCodes | None], keep=None
):
    """`keep`, a mask of x, leaves out what is not compared."""
    keep = np.ones(x.shape, bool) if keep is None else keep
    for codes, axis in zip(got, (-1, -2), strict=True):
        if codes is None:
            continue
        values, scale = expected_codes(x, fmt, TILE128, axis, rule)
        kept = keep
        if axis == -2:
            values, scale, kept = values.T, scale.T, keep.T
        assert codes.values.dtype == values.dtype and codes.scale.dtype == jnp.float32
        np.testing.assert_array_equal(as_bits(codes.values)[kept], as_bits(values)[kept])
        tiles = kept.reshape(scale.shape[0], -1, 128).all(axis=-1)
        np.testing.assert_array_equal(np.asarray(codes.scale.T)[tiles], scale[tiles])


@needs_pallas
@pytest.mark.parametrize(
    ("shape", "fmt", "rule", "rows", "columns"),
    [
        ((128, 128), "e4m3", "fp32", True, True),
        ((256, 384), "e4m3", "fp32", True, False),
        ((256, 384), "e5m2", "pow2", False, True),
        ((384, 128), "e4m3", "e8m0", True, True),
        ((128, 256), "e5m2", "fp32", True, True),
        ((256, 128), "e4m3", "Fp32(2)", True, True),
        ((128, 256), "e5m2", "Pow2(3)", True, True),
        ((128, 128), "e4m3", "Pow2(-2)", True, True),  # most of a tile saturates
        ((256, 128), "e2m1", "fp32", True, True),
        ((128, 128), "e2m1", "Pow2(-2)", True, True),
    ],
)
def test_tiles_along_rows_and_columns(shape, fmt, rule, rows, columns):
    x, rule = source(shape), RULES[rule]
    got = interpret(
        lambda x: quantize_tiles(x, FORMATS[fmt], rule, rows=rows, columns=columns), jnp.asarray(x)
    )
    assert [codes is not None for codes in got] == [rows, columns]
    check_tiles(x, fmt, rule, got)


def check_blocks(x: np.ndarray, fmt: str, rule, transposed: bool, got: TileCodes):
    values, scale = expected_codes(x, fmt, BLOCK128, -1, rule)
    assert got.values.dtype == values.dtype and got.scale.dtype == jnp.float32
    np.testing.assert_array_equal(
        as_bits(got.values), as_bits(values.T.copy() if transposed else values)
    )
    np.testing.assert_array_equal(got.scale, scale)


@needs_pallas
@pytest.mark.parametrize(
    ("shape", "dtype", "fmt", "rule", "transposed"),
    [
        ((128, 128), "bf16", "e4m3", "fp32", False),
        ((256, 384), "bf16", "e4m3", "fp32", True),
        ((256, 384), "f32", "e4m3", "fp32", False),
        ((384, 128), "f32", "e4m3", "e8m0", True),
        ((128, 256), "f32", "e5m2", "pow2", True),
        ((256, 128), "bf16", "e5m2", "e8m0", False),
        ((128, 256), "f32", "e4m3", "Pow2(3)", False),
        ((256, 128), "f32", "e5m2", "Fp32(-3)", True),  # saturates
    ],
)
def test_blocks_and_their_transposes(shape, dtype, fmt, rule, transposed):
    x, rule = source(shape, dtype), RULES[rule]
    got = interpret(
        lambda x: quantize_blocks(x, FORMATS[fmt], rule, transposed=transposed), jnp.asarray(x)
    )
    check_blocks(x, fmt, rule, transposed, got)


def check_cast(x: np.ndarray, scale, fmt: str, got):
    """Codes as the convention has them, values = cast(x * (1 / scale)); an infinity saturates."""
    plain, transposed, amax = got
    scaled = x.astype(np.float32) * (np.float32(1) / np.float32(scale))
    values = reference.saturating_cast(scaled, fmt)
    for codes, wanted in ((plain, values), (transposed, values.T.copy())):
        if codes is not None:
            assert codes.dtype == values.dtype
            np.testing.assert_array_equal(as_bits(codes), as_bits(wanted))
    assert amax.dtype == jnp.float32 and amax.shape == ()
    assert float(amax) == np.abs(x.astype(np.float32)).max()


@needs_pallas
@pytest.mark.parametrize(
    ("shape", "dtype", "fmt", "scale", "values", "transposed"),
    [
        ((128, 128), "bf16", "e4m3", 0.013, True, True),
        ((256, 384), "bf16", "e5m2", 2.0**-9, True, False),
        ((256, 384), "bf16", "e4m3", 1.7, False, True),
        ((384, 128), "f32", "e4m3", 2.0**5, True, True),
        ((128, 256), "f32", "e5m2", 0.3, False, True),
        ((256, 128), "f32", "e4m3", 2.0**-20, True, False),  # nearly all saturates
    ],
)
def test_casts_and_their_transposes(shape, dtype, fmt, scale, values, transposed):
    x = source(shape, dtype)
    f = functools.partial(cast_transpose, fmt=FORMATS[fmt], values=values, transposed=transposed)
    got = interpret(f, jnp.asarray(x), jnp.float32(scale))
    assert [codes is not None for codes in got[:2]] == [values, transposed]
    check_cast(x, scale, fmt, got)


def check_rows_columns(x: np.ndarray, fmt: str, rule, want: tuple[bool, bool], run):
    """Codes of whole rows and columns, each with the scale that `rule` makes of its own amax;
    run(f, *arguments) calls the kernel."""
    expected, scales = [], []
    for wanted, axis in zip(want, (-1, -2), strict=True):
        values, scale = expected_codes(x, fmt, ROW, axis, rule)
        expected.append((values if axis == -1 else values.T.copy()) if wanted else None)
        scales.append(jnp.asarray(scale.reshape(-1)) if wanted else None)
    got = run(functools.partial(cast_rows_columns, fmt=FORMATS[fmt]), jnp.asarray(x), *scales)
    for codes, values in zip(got, expected, strict=True):
        assert (codes is None) == (values is None)
        if codes is not None:
            assert codes.dtype == values.dtype
            np.testing.assert_array_equal(as_bits(codes), as_bits(values))


@needs_pallas
@pytest.mark.parametrize(
    ("shape", "dtype", "fmt", "rule", "want"),
    [
        ((128, 128), "bf16", "e4m3", "fp32", (True, True)),
        ((256, 384), "bf16", "e5m2", "pow2", (True, True)),
        ((384, 128), "bf16", "e4m3", "fp32", (True, False)),
        ((128, 256), "bf16", "e4m3", "e8m0", (False, True)),
        ((256, 384), "f32", "e4m3", "fp32", (True, True)),
        ((384, 128), "f32", "e5m2", "fp32", (True, False)),
        ((128, 256), "f32", "e4m3", "Fp32(-3)", (False, True)),  # saturates
        ((128, 128), "f32", "e4m3", "fp32", (False, False)),
    ],
)
def test_rows_and_columns_with_scales_of_their_own(shape, dtype, fmt, rule, want):
    check_rows_columns(source(shape, dtype), fmt, RULES[rule], want, interpret)


@needs_pallas
@pytest.mark.parametrize("dtype", DTYPES)
def test_accidents_in_a_row_or_column_stay_there(dtype):
    """A NaN stays one, an infinity saturates, a NaN scale poisons its row or column of codes."""
    x = source((128, 256), dtype)
    x[3, 130], x[100, 7] = np.nan, -np.inf
    of_rows, of_columns = jnp.ones(128).at[9].set(jnp.nan), jnp.ones(256).at[200].set(jnp.nan)
    got = interpret(
        lambda *args: cast_rows_columns(*args, E4M3), jnp.asarray(x), of_rows, of_columns
    )
    rows, columns = (np.asarray(codes, np.float32) for codes in got)
    expected = np.zeros(x.shape, bool)
    expected[3, 130] = expected[9] = True
    np.testing.assert_array_equal(np.isnan(rows), expected)
    expected = np.zeros(x.shape, bool)
    expected[3, 130] = expected[:, 200] = True
    np.testing.assert_array_equal(np.isnan(columns.T), expected)
    assert rows[100, 7] == columns[7, 100] == -448


@needs_pallas
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_saturation_is_the_largest_number_and_never_nan(fmt, dtype):
    """Far above the scale's range, infinities too; the largest code has its sign. What is not
    finite is in the amax, from which the caller makes the scale NaN."""
    x = np.zeros((128, 128), DTYPES[dtype])
    x[0, :4] = [3e38, -3e38, np.inf, -np.inf]
    plain, transposed, amax = interpret(
        lambda x, s: cast_transpose(x, s, FORMATS[fmt]), jnp.asarray(x), jnp.float32(1)
    )
    for codes in (plain, transposed.T):
        top = FORMATS[fmt].max
        numbers = np.asarray(codes, np.float32)
        np.testing.assert_array_equal(numbers[0, :4], [top, -top, top, -top])
        assert np.count_nonzero(numbers) == 4
    assert np.isinf(amax)


def with_accidents() -> tuple[np.ndarray, np.ndarray]:
    """A source with two tiles of zeros, a NaN and an infinity; and where tiles of 1 x 128, of
    128 x 1 and of 128 x 128 are finite: those of (3, 130) and (200, 7) are not."""
    x = source((256, 256))
    x[:128, :128] = 0
    x[5, 128:] = -0.0
    x[3, 130], x[200, 7] = np.nan, -np.inf
    bad = np.zeros((256, 256), bool)
    for row, column in ((3, 130), (200, 7)):
        bad[row // 128 * 128 :, column // 128 * 128 :][:128, :128] = True
    return x, bad


@needs_pallas
def test_accidents_in_a_tile_stay_there():
    """All zeros: scale 1 and zeros as codes. A NaN or an infinity: NaN is the scale of its own tile
    of a row and of a column, and nothing else changes."""
    x, _ = with_accidents()
    rows, columns = interpret(lambda x: quantize_tiles(x, E4M3, RULES["fp32"]), jnp.asarray(x))
    expected = np.zeros((2, 256), bool)
    expected[1, 3] = expected[0, 200] = True
    np.testing.assert_array_equal(np.isnan(rows.scale), expected)
    expected = np.zeros((2, 256), bool)
    expected[0, 130] = expected[1, 7] = True
    np.testing.assert_array_equal(np.isnan(columns.scale), expected)
    assert (rows.scale[0, :128] == 1).all() and rows.scale[1, 5] == 1
    assert (columns.scale[0, :128] == 1).all()
    assert (np.asarray(rows.values, np.float32)[:128, :128] == 0).all()
    finite = np.where(np.isfinite(x.astype(np.float32)), x, np.zeros_like(x))
    keep = np.ones(x.shape, bool)
    keep[3, 128:] = keep[200, :128] = keep[:128, 130] = keep[128:, 7] = False
    check_tiles(finite, "e4m3", RULES["fp32"], (rows, columns), keep)


@needs_pallas
@pytest.mark.parametrize("rule", ["fp32", "e8m0"])
def test_accidents_in_a_block_stay_there(rule):
    x, bad = with_accidents()
    got = interpret(
        lambda x: quantize_blocks(x, E4M3, RULES[rule], transposed=True), jnp.asarray(x)
    )
    np.testing.assert_array_equal(np.isnan(got.scale), [[False, True], [True, False]])
    assert got.scale[0, 0] == 1
    finite = np.where(bad, np.zeros_like(x), x)
    values, scale = expected_codes(finite, "e4m3", BLOCK128, -1, RULES[rule])
    assert got.scale[1, 1] == scale[1, 1]
    np.testing.assert_array_equal(as_bits(got.values).T[~bad], as_bits(values)[~bad])


@needs_pallas
def test_a_cast_keeps_a_nan_and_reports_it():
    x, _ = with_accidents()
    plain, transposed, amax = interpret(
        lambda x, s: cast_transpose(x, s, E4M3), jnp.asarray(x), jnp.float32(0.1)
    )
    for codes in (plain, transposed.T):
        np.testing.assert_array_equal(
            np.argwhere(np.isnan(np.asarray(codes, np.float32))), [[3, 130]]
        )
        assert np.asarray(codes, np.float32)[200, 7] == -448
    assert np.isnan(amax)


# Bad input ----------------------------------------------------------------------------------------

GOOD = jnp.ones((128, 128), jnp.bfloat16)
ONE = jnp.float32(1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cast_transpose(jnp.ones((128, 130)), ONE, E4M3), r"whole tiles .*\(128, 130\)"),
        (lambda: cast_transpose(jnp.ones((0, 128)), ONE, E4M3), r"whole tiles .*\(0, 128\)"),
        (lambda: cast_transpose(GOOD.astype(jnp.float16), ONE, E4M3), "got float16"),
        (lambda: cast_transpose(GOOD, ONE, FORMATS["e4m3fnuz"]), "e5m2 or e2m1, got e4m3fnuz"),
        (lambda: cast_transpose(GOOD, ONE, FORMATS["e8m0"]), "e5m2 or e2m1, got e8m0"),
        (lambda: cast_rows_columns(GOOD[:, :64], None, None, E4M3), r"whole tiles .*\(128, 64\)"),
        (lambda: cast_rows_columns(GOOD, None, None, FORMATS["e8m0"]), "e5m2 or e2m1, got e8m0"),
        (lambda: quantize_tiles(GOOD[:64], E4M3, Fp32()), r"whole tiles .*\(64, 128\)"),
        (lambda: quantize_tiles(GOOD.astype(jnp.float32), E4M3, Fp32()), "bfloat16 .*got float32"),
        (lambda: quantize_tiles(GOOD, FORMATS["e5m2fnuz"], Fp32()), "got e5m2fnuz"),
        (lambda: quantize_tiles(GOOD, E4M3, Constant(0.5)), r"got Constant\(value=0.5\)"),
        (lambda: quantize_tiles(GOOD, E4M3, E8M0(floor=True)), "floor=True"),
        (lambda: quantize_blocks(GOOD[:, :8], E4M3, Fp32(), transposed=True), r"\(128, 8\)"),
        (
            lambda: quantize_blocks(GOOD.astype(jnp.float16), E4M3, Fp32(), transposed=True),
            "got float16",
        ),
        (lambda: quantize_blocks(GOOD, E4M3, SCALES["nvfp4"], transposed=False), "got NvFp4"),
        (lambda: quantize_blocks(GOOD, E4M3, E8M0(floor=True), transposed=True), "floor=True"),
        # What the annotations refuse in tests already, and nobody else does.
        (lambda: _check(jnp.ones((2, 128, 128)), E4M3), r"got shape \(2, 128, 128\)"),
        (lambda: _check(jnp.ones((128,)), E4M3), r"got shape \(128,\)"),
        (lambda: _check(jnp.ones((128, 128), jnp.int32), E4M3), "got int32"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: cast_transpose(GOOD, ONE, E4M3),
        lambda: cast_rows_columns(GOOD, jnp.ones(128), jnp.ones(128), E4M3),
        lambda: quantize_tiles(GOOD, E4M3, Fp32()),
        lambda: quantize_blocks(GOOD, E4M3, Fp32(), transposed=True),
    ],
)
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about a CPU")
def test_another_device_is_refused(call):
    with pytest.raises(NotImplementedError, match=TOO_OLD or "for Hopper .*, got cpu"):
        call()


# On the device ------------------------------------------------------------------------------------

ON_GPU = [(256, 384), (1024, 640)]
EXACT = "pow2"  # Under fp32, an H200's reciprocal may be off by a unit in the last place.


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("shape", ON_GPU)
def test_tiles_on_the_gpu(shape, fmt):
    x, rule = source(shape), RULES[EXACT]
    got = jax.jit(lambda x: quantize_tiles(x, FORMATS[fmt], rule))(x)
    check_tiles(x, fmt, rule, got)


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ON_GPU)
def test_blocks_on_the_gpu(shape, dtype, transposed):
    x, rule = source(shape, dtype), RULES[EXACT]
    got = jax.jit(lambda x: quantize_blocks(x, E4M3, rule, transposed=transposed))(x)
    check_blocks(x, "e4m3", rule, transposed, got)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ON_GPU)
def test_casts_on_the_gpu(shape, dtype, fmt):
    x = source(shape, dtype)
    got = jax.jit(lambda x, s: cast_transpose(x, s, FORMATS[fmt]))(x, jnp.float32(2.0**-6))
    check_cast(x, 2.0**-6, fmt, got)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ON_GPU)
def test_rows_and_columns_on_the_gpu(shape, dtype):
    check_rows_columns(
        source(shape, dtype), "e4m3", RULES[EXACT], (True, True), lambda f, *args: jax.jit(f)(*args)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ON_GPU)
def test_float32_scales_on_the_gpu(shape):
    """Scales have the same bits everywhere; a code on a rounding tie may be its neighbor, since
    the reciprocal of the scale may be off by 2^-24 relative: for fewer than one in a thousand."""
    x = source(shape)
    rows, columns = jax.jit(lambda x: quantize_tiles(x, E4M3, RULES["fp32"]))(x)
    for codes, axis in ((rows, -1), (columns, -2)):
        values, scale = expected_codes(x, "e4m3", TILE128, axis, RULES["fp32"])
        values, scale = (values, scale.T) if axis == -1 else (values.T.copy(), scale)
        np.testing.assert_array_equal(codes.scale, scale)
        apart = np.abs(as_bits(codes.values).astype(int) - as_bits(values).astype(int))
        assert apart.max() <= 1 and (apart > 0).mean() < 1e-3
