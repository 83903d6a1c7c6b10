"""What ptxas makes of the kernels that ship: whether their registers suffice.

Pallas' interpreter cannot run the fastest tunings, with three multiplying warpgroups or clusters.
Here every kernel is compiled for an H200, on any machine with JAX's CUDA plugin: with the tuning
that its shape picks, the formats and the scale rules of the recipes.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from fp8jax.kernels import block_gemm
from fp8jax.kernels.block_gemm import E4M3, block_scaled_matmul, tuned
from fp8jax.kernels.quantize import (
    cast_rows_columns,
    cast_transpose,
    quantize_blocks,
    quantize_tiles,
)
from fp8jax.kernels.rotate import rotated_amax, rotated_codes, rotated_errors, rotated_lengths
from fp8jax.kernels.row_gemm import row_scaled_matmul
from fp8jax.kernels.swiglu import SWIGLU, SWIGLU_GRAD
from fp8jax.kernels.swiglu_quantize import cast_produced, tiles_produced
from fp8jax.lm.flash import backward, forward
from fp8jax.numerics.formats import FORMATS
from fp8jax.numerics.scales import Fp32, Pow2
from tests.support import h200

BF16, F32, E5M2 = jnp.bfloat16, jnp.float32, jnp.dtype(jnp.float8_e5m2)
BOTH = (-1, -2)

pytestmark = h200.needs_plugin


@pytest.fixture
def assembled(monkeypatch, capfd):
    """A function that compiles f for such shapes, and returns the bytes that its kernel spills.

    Mosaic GPU assembles a kernel once in a process: call it for each kernel in one test only.
    """
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    cached = jax.config.values["jax_enable_compilation_cache"]
    # ptxas does not run for a program from the cache. JAX reads the setting once, until a reset.
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()

    def spills(f, *shapes) -> int:
        capfd.readouterr()
        h200.compiled(f, *shapes)
        (size,) = h200.spilled(capfd.readouterr().out)
        return size

    yield spills
    jax.config.update("jax_enable_compilation_cache", cached)
    compilation_cache.reset_cache()


def shape(*size, dtype=BF16):
    return jax.ShapeDtypeStruct(size, dtype)


# GEMMs --------------------------------------------------------------------------------------------

# Linears of Llama-3-8B and Qwen2.5-1.5B with 16,384 tokens, and smaller ones. The blocks of K are a
# multiple of the stages, even, or odd: the loop over K is written out 4, 2 or 1 times.
SIZES = [
    (16384, 4096, 14336),
    (16384, 14336, 4096),
    (16384, 4096, 1024),
    (16384, 1536, 8960),
    (16384, 1536, 256),
    (16384, 8960, 1536),
    (1024, 4096, 4096),
    (1032, 640, 320),
]

# With the loop written out 4 times, ptxas keeps up to 32 numbers of each thread in local memory.
# They are addresses, which it read from there once for each turn of the loop, and the tunings were
# measured with them. The sums of a warpgroup are 64 registers or more: if those did not fit, it
# would be 256 bytes at least. (A variant that spilled its sums ran at a quarter of the speed.)
ADDRESSES = 128


def block_operands(m, k, n, by_row):
    columns = n if by_row else -(-n // 128)
    scales = shape(k // 128, m, dtype=F32), shape(k // 128, columns, dtype=F32)
    return shape(m, k, dtype=E4M3), shape(n, k, dtype=E4M3), *scales


@pytest.mark.parametrize("dtype", [BF16, F32], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("by_row", [False, True], ids=["by block", "by row"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_block_gemms_spill_no_sums(assembled, size, by_row, dtype):
    f = functools.partial(block_scaled_matmul, out_dtype=dtype)
    assert assembled(f, *block_operands(*size, by_row)) <= ADDRESSES


@pytest.mark.parametrize("by_row", [False, True], ids=["by block", "by row"])
def test_these_sizes_pick_every_tuning(by_row):
    with h200.default():
        picked = {tuned(m, n, by_row) for m, _, n in SIZES}
    assert picked == {t for t, _ in (block_gemm._BY_ROW if by_row else block_gemm._BY_BLOCK)}


def test_a_tuning_without_registers_for_its_sums_is_seen(assembled):
    """Three warpgroups of 64 x 192: 96 registers of sums, 96 of products, and 160 in all."""
    tuning = dataclasses.replace(block_gemm._BY_BLOCK[0][0], tile_n=192, stages=3)
    f = functools.partial(block_scaled_matmul, tuning=tuning)
    assert assembled(f, *block_operands(1024, 4096, 4096, by_row=False)) > 256


@pytest.mark.parametrize("dtype", [BF16, F32], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)], ids=str)
@pytest.mark.parametrize("size", [SIZES[0], SIZES[5], SIZES[7]], ids=str)
def test_row_gemms_spill_one_register_at_most(assembled, size, formats, dtype):
    """ptxas 13.5 stores one register of bfloat16 results at the first size, ptxas 13.0 none."""
    m, k, n = size
    codes = (shape(rows, k, dtype=fmt) for rows, fmt in zip((m, n), formats, strict=True))
    f = functools.partial(row_scaled_matmul, out_dtype=dtype)
    assert assembled(f, *codes, shape(m, dtype=F32), shape(n, dtype=F32)) <= 4


# Quantizers ---------------------------------------------------------------------------------------

M, K = 1024, 1536
RULES = pytest.mark.parametrize("rule", [Fp32(), Pow2()], ids=lambda rule: type(rule).__name__)
FORMAT = pytest.mark.parametrize("fmt", [FORMATS["e4m3"], FORMATS["e5m2"]], ids=["e4m3", "e5m2"])
SOURCES = pytest.mark.parametrize("dtype", [BF16, F32], ids=lambda dtype: dtype.__name__)


@SOURCES
@FORMAT
@pytest.mark.parametrize("transposed", [False, True])
def test_cast_transpose_spills_nothing(assembled, dtype, fmt, transposed):
    f = functools.partial(cast_transpose, fmt=fmt, transposed=transposed)
    assert assembled(f, shape(M, K, dtype=dtype), shape(dtype=F32)) == 0


@SOURCES
@FORMAT
def test_cast_rows_columns_spills_nothing(assembled, dtype, fmt):
    f = functools.partial(cast_rows_columns, fmt=fmt)
    scales = shape(M, dtype=F32), shape(K, dtype=F32)
    assert assembled(f, shape(M, K, dtype=dtype), *scales) == 0


@RULES
@FORMAT
@pytest.mark.parametrize("columns", [False, True])
def test_quantize_tiles_spills_nothing(assembled, rule, fmt, columns):
    f = functools.partial(quantize_tiles, fmt=fmt, rule=rule, columns=columns)
    assert assembled(f, shape(M, K)) == 0


@SOURCES
@RULES
@pytest.mark.parametrize("transposed", [False, True])
def test_quantize_blocks_spills_nothing(assembled, dtype, rule, transposed):
    f = functools.partial(quantize_blocks, fmt=FORMATS["e4m3"], rule=rule, transposed=transposed)
    assert assembled(f, shape(M, K, dtype=dtype)) == 0


# Of each result, as gemm/fused_mlp.py asks for them.
PRODUCERS = pytest.mark.parametrize(
    ("producer", "axes"),
    [(SWIGLU, ((-1,),)), (SWIGLU_GRAD, (BOTH, BOTH, (-2,)))],
    ids=["swiglu", "swiglu_grad"],
)


@PRODUCERS
def test_cast_produced_spills_nothing(assembled, producer, axes):
    """Gradients in E5M2 and h in E4M3, which takes memory for codes of both formats."""
    formats = (FORMATS["e5m2"], FORMATS["e5m2"], FORMATS["e4m3"])[-producer.results :]
    f = functools.partial(cast_produced, producer, formats=formats, axes=axes)
    sources = (shape(M, K),) * producer.sources
    assert assembled(f, sources, shape(producer.results, dtype=F32)) == 0


@PRODUCERS
@RULES
def test_tiles_produced_spills_nothing(assembled, producer, axes, rule):
    f = functools.partial(tiles_produced, producer, fmt=FORMATS["e4m3"], rule=rule, axes=axes)
    assert assembled(f, (shape(M, K),) * producer.sources) == 0


def test_blocks_of_gradients_spill_nothing(assembled):
    f = functools.partial(
        tiles_produced,
        SWIGLU_GRAD,
        fmt=FORMATS["e4m3"],
        rule=Fp32(),
        axes=(BOTH, BOTH, (-2,)),
        blocks=frozenset([0, 1]),
    )
    assert assembled(f, (shape(M, K),) * 3) == 0


# Hadamard transforms ------------------------------------------------------------------------------

U32 = jnp.uint32
# Rows that are mixed, and their tiles: nvfp4 and tetrajet2 have 16, quartet2 32 in two tiles.
ROTATIONS = pytest.mark.parametrize(("size", "tiles"), [(16, 1), (32, 2)])
# 4, 2 and 1 columns a thread.
WIDTHS = pytest.mark.parametrize("width", [K, 768, 640])


@WIDTHS
@ROTATIONS
@SOURCES
def test_rotated_amax_spills_nothing(assembled, dtype, size, tiles, width):
    f = functools.partial(rotated_amax, size=size, tile=size // tiles)
    assert assembled(f, shape(M, width, dtype=dtype)) == 0


@WIDTHS
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("drawn", [False, True], ids=["fixed signs", "drawn signs"])
def test_rotated_codes_spill_nothing(assembled, drawn, stochastic, width):
    def f(x, reciprocal, words, signs):
        words, signs = words if stochastic else None, signs if drawn else None
        return rotated_codes(x, reciprocal, FORMATS["e2m1"], 16, words, signs=signs)

    operands = shape(M, width), shape(M // 16, width, dtype=F32)
    assert assembled(f, *operands, shape(4, dtype=U32), shape(dtype=U32)) == 0


@WIDTHS
def test_rotated_errors_spill_nothing(assembled, width):
    f = functools.partial(rotated_errors, fmt=FORMATS["e2m1"], size=16)
    assert assembled(f, shape(M, width), shape(M // 16, width, dtype=F32)) == 0


@WIDTHS
def test_rotated_lengths_spill_nothing(assembled, width):
    def f(x, reciprocal, signs):
        return rotated_lengths(x, reciprocal, FORMATS["e2m1"], 32, signs)

    assert assembled(f, shape(M, width), shape(M // 16, width, dtype=F32), shape(dtype=U32)) == 0


# Attention ----------------------------------------------------------------------------------------

# 2 rows of 1,024 positions, 8 query heads on 2.
HEAD_SIZES = pytest.mark.parametrize("head_dim", [64, 128])


def attention_operands(head_dim: int) -> dict[str, jax.ShapeDtypeStruct]:
    return dict(
        q=shape(2, 1024, 8, head_dim),
        kv=shape(2, 1024, 2, head_dim),
        statistic=shape(2, 8, 1024, dtype=F32),
        bound=shape(2, 1024, dtype=jnp.int32),
    )


@HEAD_SIZES
def test_flash_forward_spills_nothing(assembled, head_dim):
    a = attention_operands(head_dim)
    f = functools.partial(forward.forward, scale=0.1)
    assert assembled(f, a["q"], a["kv"], a["kv"], a["bound"]) == 0


@HEAD_SIZES
def test_flash_gradient_q_spills_nothing(assembled, head_dim):
    a = attention_operands(head_dim)
    f = functools.partial(backward.gradient_q, scale=0.1)
    queries = a["q"], a["kv"], a["kv"], a["q"], a["q"]
    assert assembled(f, *queries, a["statistic"], a["bound"]) == 0


@pytest.mark.parametrize(("head_dim", "most"), [(64, 0), (128, 120)])
def test_flash_gradient_kv_spills_no_sums(assembled, head_dim, most):
    """With heads of 128, dk and dv take 128 registers of a thread, and s and dp 64 more: ptxas
    stores up to 30 others, nearly all where tiles are masked. The sums alone would be 512 bytes."""
    a = attention_operands(head_dim)
    f = functools.partial(backward.gradient_kv, scale=0.1)
    operands = a["q"], a["kv"], a["kv"], a["q"], a["statistic"], a["statistic"]
    assert assembled(f, *operands, a["bound"]) <= most
