"""Quantization kernels that read their source once: codes, transposed codes, scales, amax.

Legend: M rows, K columns; a tile is 128 x 128.

`wgmma` multiplies float8 operands only if the contracting axis is the last axis of both. The
contracting axis of a weight gradient is the tokens, so both of its operands must be transposed. XLA
runs a cast, a transposition of single bytes and a reduction for the amax. It reads the source
twice, at half of the memory's bandwidth. Here one thread block processes one tile:

    TMA            source tile -> shared memory (swizzled)
    registers      elements, rows across threads:       amax and codes of rows
    registers      the same tile, columns across threads (ldmatrix transposes 16-bit elements):
                   amax and codes of columns
    TMA            codes -> global memory, [M, K] and [K, M]

ldmatrix cannot transpose 32-bit elements. So the codes of a float32 source are converted to
float16, which represents them exactly, and transposed through shared memory. The tile of a float32
source is read to registers at once, and its shared memory is reused for everything after it.

Thread blocks are many and small: three fit an SM at a time, which hides the latencies. A persistent
loop with double buffering was no faster.

    cast_transpose     one given scale for the tensor (delayed scaling), and the tensor's amax
    cast_rows_columns  given scales for each row, and for each column
    quantize_tiles     a scale for each 1 x 128 along rows, and for each 128 x 1 along columns
    quantize_blocks    a scale for each 128 x 128

Scales follow the rules of numerics/scales.py, applied to registers. As there, an amax is a maximum
of bit patterns, in which NaN is greater than infinity and infinity greater than all numbers, and
the scale of a tile whose amax is not finite is NaN. M and K must be multiples of 128;
`hopper.pad_to_blocks` pads other arrays with zeros, which do not change an amax.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Shaped

from fp8jax.kernels.hopper import BLOCK, launch, load, saturated, scoped, stored, swizzled
from fp8jax.numerics.formats import Format, nan_unless, rounded
from fp8jax.numerics.scales import E8M0, Fp32, Pow2, ScaleRule

WGMMA = plgpu.Layout.WGMMA

_INF_BITS = 0x7F800000  # of float32


class TileCodes(NamedTuple):
    """Codes and their scales.

    Attributes:
      values: the codes, [M, K], or [K, M] of the transpose.
      scale: float32. From `quantize_tiles` it is [K / 128, M] for the codes [M, K], and
        [M / 128, K] for the codes [K, M]: the tile's index comes first, in the order in which a
        GEMM reads them. From `quantize_blocks` it is [M / 128, K / 128] for both.
    """

    values: Shaped[Array, "..."]
    scale: Float[Array, "..."]


def _check(x: Array, fmt: Format, rule: ScaleRule | None = None) -> None:
    """Raises ValueError for a source, format or scale rule that the kernels do not support."""
    if x.ndim != 2 or any(size % BLOCK or not size for size in x.shape):
        raise ValueError(f"the kernel needs whole tiles of {BLOCK} x {BLOCK}, got shape {x.shape}")
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"the kernel needs a bfloat16 or float32 array, got {x.dtype}")
    if fmt.name not in ("e4m3", "e5m2", "e2m1"):
        raise ValueError(f"the kernel casts to e4m3, e5m2 or e2m1, got {fmt.name}")
    if not (rule in (None, E8M0()) or isinstance(rule, Fp32 | Pow2)):
        raise ValueError(f"the kernel supports the scale rules fp32, pow2 and e8m0, got {rule}")


def _magnitude(x: jax.Array) -> jax.Array:
    """Returns the bits of |x| as int32. They compare like |x|, with NaN above infinity."""
    return lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF


def _amax(x: jax.Array) -> jax.Array:
    """Returns the bits of a tile's amax."""
    return jnp.max(jnp.max(_magnitude(x), axis=1))


def _as_amax(bits: jax.Array) -> jax.Array:
    """Returns the float32 amax of an array from the bits of its tiles' amaxes.

    The barrier makes XLA reduce once, instead of once in each consumer.
    """
    return lax.optimization_barrier(lax.bitcast_convert_type(jnp.max(bits), jnp.float32))


def _codes(x: jax.Array, reciprocal: jax.Array, fmt: Format) -> jax.Array:
    """Returns the codes of x * reciprocal in `fmt`, saturated; NaN stays NaN if `fmt` has one."""
    if fmt.bits == 4:  # Hopper has no conversion to it
        return rounded(x * reciprocal, fmt, None).astype(stored(fmt))
    return saturated(x * reciprocal, fmt.max).astype(fmt.dtype)


def _from_amax(bits: jax.Array, rule: ScaleRule, fmt: Format) -> tuple[jax.Array, jax.Array]:
    """Returns (the scale, the reciprocal of the scale) for the bits of an amax.

    If the amax is not finite, the scale is NaN; the reciprocal is that of the rule's scale.
    """
    if isinstance(rule, E8M0):
        rule = Pow2()  # gives the same values, as float32
    scale, _ = rule(lax.bitcast_convert_type(bits, jnp.float32), fmt)
    return nan_unless(bits < _INF_BITS, scale), 1.0 / scale


def _over_tiles(
    shape: tuple[int, ...],
    operands: tuple[jax.Array, ...],
    out: list[Any],
    tile: Callable,
    *,
    approximate: bool = False,
) -> list[Any]:
    """Runs a kernel with one thread block per tile and returns its results.

    Args:
      shape: [M, K] of the source.
      operands: the operands of the kernel.
      out: ShapeDtypeStructs of its results.
      tile: tile(rows, columns, m, k, *references) processes tile (m, k). `rows` and `columns` slice
        the source; the references are those of the operands and results.
      approximate: as in `hopper.launch`.
    """

    def body(*references):
        m, k = lax.axis_index("m"), lax.axis_index("k")
        rows, columns = pl.ds(m * BLOCK, BLOCK), pl.ds(k * BLOCK, BLOCK)
        tile(rows, columns, m, k, *references)
        plgpu.wait_smem_to_gmem(0)

    grid = (shape[0] // BLOCK, shape[1] // BLOCK)
    return list(
        launch(
            body,
            *operands,
            out=tuple(out),
            approximate=approximate,
            grid=grid,
            grid_names=("m", "k"),
        )
    )


def _tile(dtype: Any, rows: int = BLOCK) -> Any:
    """Allocates shared memory for a tile, or for `rows` rows of it."""
    return plgpu.SMEM((rows, BLOCK), dtype, transforms=swizzled(dtype, BLOCK))


def _code_buffers(dtype: Any, rows: bool, columns: bool, direct: bool) -> dict[str, Any]:
    """Allocates tiles for the codes of rows (q_s) and of columns (t_s).

    If the transposition is not `direct`, also allocates the float16 tile that it needs (half_s).
    """
    buffers = {}
    if rows:
        buffers["q_s"] = _tile(dtype)
    if columns:
        buffers["t_s"] = _tile(dtype)
    if columns and not direct:
        buffers["half_s"] = _tile(jnp.float16)
    return buffers


def _with_source(source: Any, buffers: dict[str, Any]) -> dict[str, Any]:
    """Allocates a tile for the source next to `buffers`, which are used after it was read.

    The tile of a float32 source shares its memory with the buffers.
    """
    if source.dtype == jnp.bfloat16:
        return dict(x_s=_tile(source.dtype), **buffers)
    return dict(union_s=plgpu.RefUnion(_tile(source.dtype), buffers))


def _references(x_s: Any = None, union_s: Any = None, **buffers: Any) -> tuple[Any, dict[str, Any]]:
    """Returns what `_with_source` allocated: the source's tile, and the buffers by name."""
    return (x_s, buffers) if union_s is None else tuple(union_s)


def _load(source: Any, target: Any, barrier: Any) -> jax.Array:
    """Copies a tile to shared memory, and returns it in registers by rows.

    If the tile shares its memory (`_with_source`), that memory may be overwritten afterwards.
    """
    plgpu.copy_gmem_to_smem(source, target, barrier)
    plgpu.barrier_wait(barrier)
    numbers = _rows(target)
    if target.dtype != jnp.bfloat16:
        plgpu.commit_smem()  # all threads have read the tile
    return numbers


def _store(target: Any, values: jax.Array, *copies: tuple[Any, Any]) -> None:
    """Stores registers in shared memory, then starts copies of it to global memory.

    Args:
      target: the shared memory.
      values: the registers.
      *copies: (shared memory, global memory) of each copy.
    """
    target[...] = values
    plgpu.commit_smem()
    for source, destination in copies:
        plgpu.copy_smem_to_gmem(source, destination)


def _rows(source: Any) -> jax.Array:
    """Loads a tile into float32 registers; four threads of a warp share a row."""
    return load(source, WGMMA).astype(jnp.float32)


def _columns(source: Any) -> jax.Array:
    """Loads the transpose of a tile into float32 registers, like `_rows`."""
    return _rows(source.transpose((1, 0)))


def _transposed(codes: jax.Array, half_s: Any) -> jax.Array:
    """Transposes codes through shared memory, as float16."""
    half_s[...] = codes.astype(jnp.float16)
    plgpu.commit_smem()
    return _columns(half_s).astype(codes.dtype)


@functools.partial(jax.jit, static_argnames=("fmt", "values", "transposed"))
def cast_transpose(
    x: Float[Array, "M K"],
    scale: Float[Array, ""],
    fmt: Format,
    *,
    values: bool = True,
    transposed: bool = True,
) -> tuple[Shaped[Array, "M K"] | None, Shaped[Array, "K M"] | None, Float[Array, ""]]:
    """Returns the codes of x / scale, the same codes transposed, and float32 max|x|.

    Args:
      x: bfloat16 or float32; M and K are multiples of 128.
      scale: float32. The codes are those of x * (1 / scale), saturated.
      fmt: e4m3, e5m2 or e2m1.
      values, transposed: whether to compute the codes [M, K] and [K, M]; None replaces those that
        are not computed.

    Returns:
      (codes [M, K], codes [K, M], amax). The amax is NaN if x has a NaN.

    Raises:
      ValueError: the kernel does not support the dtype, format or shape.
      NotImplementedError: the kernels cannot run here.
    """
    _check(x, fmt)
    direct = x.dtype == jnp.bfloat16
    (rows, columns), dtype = x.shape, stored(fmt)
    out = [jax.ShapeDtypeStruct((rows // BLOCK, columns // BLOCK), jnp.int32)]
    if values:
        out.append(jax.ShapeDtypeStruct((rows, columns), dtype))
    if transposed:
        out.append(jax.ShapeDtypeStruct((columns, rows), dtype))

    def tile(at_m, at_k, m, k, x_g, scale_g, amax_g, *codes_g):
        buffers = _code_buffers(dtype, values, transposed, direct)

        @scoped(barrier=plgpu.Barrier(), **_with_source(x, buffers))
        def _(barrier, **smem):
            x_s, buffers_s = _references(**smem)
            numbers = _load(x_g.at[at_m, at_k], x_s, barrier)
            reciprocal = 1.0 / scale_g[0]
            q = _codes(numbers, reciprocal, fmt)
            amax_g[m, k] = _amax(numbers)
            if values:
                _store(buffers_s["q_s"], q, (buffers_s["q_s"], codes_g[0].at[at_m, at_k]))
            if transposed:
                if direct:
                    q = _codes(_columns(x_s), reciprocal, fmt)
                else:
                    q = _transposed(q, buffers_s["half_s"])
                _store(buffers_s["t_s"], q, (buffers_s["t_s"], codes_g[-1].at[at_k, at_m]))

    bits, *codes = _over_tiles(x.shape, (x, scale.reshape(1)), out, tile)
    return codes[0] if values else None, codes[-1] if transposed else None, _as_amax(bits)


@functools.partial(jax.jit, static_argnames="fmt")
def cast_rows_columns(
    x: Float[Array, "M K"],
    row_scale: Float[Array, " M"] | None,
    column_scale: Float[Array, " K"] | None,
    fmt: Format,
) -> tuple[Shaped[Array, "M K"] | None, Shaped[Array, "K M"] | None]:
    """Returns the codes of x[m, k] / row_scale[m], and of x[m, k] / column_scale[k] transposed.

    Scales of whole rows cost a second pass over x: a reduction computes them before this kernel.

    Args:
      x: bfloat16 or float32; M and K are multiples of 128.
      row_scale, column_scale: float32, or None to leave out their codes. The codes are those of
        x * (1 / scale), saturated.
      fmt: e4m3, e5m2 or e2m1.

    Returns:
      (codes [M, K], codes [K, M]), with None for codes that are left out.

    Raises:
      ValueError: the kernel does not support the dtype, format or shape.
      NotImplementedError: the kernels cannot run here.
    """
    _check(x, fmt)
    rows, columns = row_scale is not None, column_scale is not None
    scales = [scale for scale in (row_scale, column_scale) if scale is not None]
    direct, dtype = x.dtype == jnp.bfloat16, stored(fmt)
    out = []
    if rows:
        out.append(jax.ShapeDtypeStruct(x.shape, dtype))
    if columns:
        out.append(jax.ShapeDtypeStruct(x.shape[::-1], dtype))

    def reciprocals(scale_g, axis: int):
        """Returns the reciprocals of a tile's scales along `axis`, broadcast to the tile."""
        scale = load(scale_g, WGMMA.reduce(1 - axis), optimized=False)
        return lax.broadcast_in_dim(1.0 / scale, (BLOCK, BLOCK), (axis,))

    def tile(at_m, at_k, m, k, x_g, *references):
        scales_g, codes_g = references[: len(scales)], references[len(scales) :]
        buffers = _code_buffers(dtype, rows, columns, direct)

        @scoped(barrier=plgpu.Barrier(), **_with_source(x, buffers))
        def _(barrier, **smem):
            x_s, buffers_s = _references(**smem)
            numbers = _load(x_g.at[at_m, at_k], x_s, barrier)
            if rows:
                q = _codes(numbers, reciprocals(scales_g[0].at[at_m], 0), fmt)
                _store(buffers_s["q_s"], q, (buffers_s["q_s"], codes_g[0].at[at_m, at_k]))
            if columns:
                of_columns = scales_g[-1].at[at_k]
                if direct:
                    q = _codes(_columns(x_s), reciprocals(of_columns, 0), fmt)
                else:
                    q = _codes(numbers, reciprocals(of_columns, 1), fmt)
                    q = _transposed(q, buffers_s["half_s"])
                _store(buffers_s["t_s"], q, (buffers_s["t_s"], codes_g[-1].at[at_k, at_m]))

    codes = _over_tiles(x.shape, (x, *scales), out, tile) if scales else []
    return codes[0] if rows else None, codes[-1] if columns else None


def _store_rows(numbers: jax.Array, rule: ScaleRule, fmt: Format, codes: Any, scales: Any) -> None:
    """Quantizes a tile with one scale per row, and stores codes and scales.

    Args:
      numbers: the tile in registers.
      rule, fmt: how an amax becomes a scale, and the format of the codes.
      codes, scales: (shared memory, global memory) of each.
    """
    bits = jnp.max(_magnitude(numbers), axis=1)
    scale, reciprocal = _from_amax(bits, rule, fmt)
    spread = lax.broadcast_in_dim(reciprocal, (BLOCK, BLOCK), (0,))
    scales[0][...] = scale
    _store(codes[0], _codes(numbers, spread, fmt), codes, scales)


@functools.partial(jax.jit, static_argnames=("fmt", "rule", "rows", "columns"))
def quantize_tiles(
    x: Float[Array, "M K"], fmt: Format, rule: ScaleRule, *, rows: bool = True, columns: bool = True
) -> tuple[TileCodes | None, TileCodes | None]:
    """Quantizes rows in tiles of 1 x 128, and columns in tiles of 128 x 1.

    Args:
      x: bfloat16; M and K are multiples of 128.
      fmt: e4m3, e5m2 or e2m1.
      rule: how an amax becomes a scale: `Fp32`, `Pow2` or `E8M0` (as float32).
      rows, columns: which of the two to compute; None replaces the other.

    Returns:
      (codes [M, K] with the scales of the rows' tiles, codes [K, M] with those of the columns).

    Raises:
      ValueError: the kernel does not support the dtype, format, rule or shape.
      NotImplementedError: the kernels cannot run here.
    """
    _check(x, fmt, rule)
    if x.dtype != jnp.bfloat16:
        raise ValueError(f"tiles of 1 x {BLOCK} need a bfloat16 array, got {x.dtype}")
    size, dtype = x.shape, stored(fmt)
    out = []
    if rows:
        out += _tile_results(size, dtype)
    if columns:
        out += _tile_results(size[::-1], dtype)

    def tile(at_m, at_k, m, k, x_g, *codes_g):
        smem: dict[str, Any] = dict(x_s=_tile(x.dtype), barrier=plgpu.Barrier())
        if rows:
            smem |= dict(q_s=_tile(dtype), s_s=plgpu.SMEM((BLOCK,), jnp.float32))
        if columns:
            smem |= dict(t_s=_tile(dtype), u_s=plgpu.SMEM((BLOCK,), jnp.float32))

        @scoped(**smem)
        def _(x_s, barrier, q_s=None, s_s=None, t_s=None, u_s=None):
            numbers = _load(x_g.at[at_m, at_k], x_s, barrier)
            if rows:
                codes, scales = (q_s, codes_g[0].at[at_m, at_k]), (s_s, codes_g[1].at[k, at_m])
                _store_rows(numbers, rule, fmt, codes, scales)
            if columns:
                codes, scales = (t_s, codes_g[-2].at[at_k, at_m]), (u_s, codes_g[-1].at[m, at_k])
                _store_rows(_columns(x_s), rule, fmt, codes, scales)

    results = _over_tiles(size, (x,), out, tile)
    of_rows = TileCodes(*results[:2]) if rows else None
    of_columns = TileCodes(*results[-2:]) if columns else None
    return of_rows, of_columns


def _tile_results(shape: tuple[int, ...], dtype: Any) -> list[Any]:
    """Returns the ShapeDtypeStructs of codes of this shape and of their scales per 1 x 128."""
    rows, columns = shape
    return [
        jax.ShapeDtypeStruct(shape, dtype),
        jax.ShapeDtypeStruct((columns // BLOCK, rows), jnp.float32),
    ]


@functools.partial(jax.jit, static_argnames=("fmt", "rule", "transposed"))
def quantize_blocks(
    x: Float[Array, "M K"], fmt: Format, rule: ScaleRule, *, transposed: bool
) -> TileCodes:
    """Quantizes x in blocks of 128 x 128.

    Args:
      x: bfloat16 or float32; M and K are multiples of 128.
      fmt, rule: as in `quantize_tiles`.
      transposed: whether to return the codes [K, M] of the transpose instead of [M, K].

    Returns:
      The codes, and float32 scales [M / 128, K / 128] for either order of the codes.

    Raises:
      ValueError: the kernel does not support the dtype, format, rule or shape.
      NotImplementedError: the kernels cannot run here.
    """
    _check(x, fmt, rule)
    (rows, columns), dtype = x.shape, stored(fmt)
    codes_shape = (columns, rows) if transposed else (rows, columns)
    out = [
        jax.ShapeDtypeStruct(codes_shape, dtype),
        jax.ShapeDtypeStruct((rows // BLOCK, columns // BLOCK), jnp.float32),
    ]

    def tile(at_m, at_k, m, k, x_g, q_g, scale_g):
        buffers = {"q_s": _tile(dtype)}
        if transposed:
            buffers["half_s"] = _tile(jnp.float16)

        @scoped(barrier=plgpu.Barrier(), **_with_source(x, buffers))
        def _(barrier, **smem):
            x_s, buffers_s = _references(**smem)
            numbers = _load(x_g.at[at_m, at_k], x_s, barrier)
            bits = _amax(numbers)
            scale, reciprocal = _from_amax(bits, rule, fmt)
            scale_g[m, k] = scale
            q, q_s = _codes(numbers, reciprocal, fmt), buffers_s["q_s"]
            if transposed:
                _store(q_s, _transposed(q, buffers_s["half_s"]), (q_s, q_g.at[at_k, at_m]))
            else:
                _store(q_s, q, (q_s, q_g.at[at_m, at_k]))

    return TileCodes(*_over_tiles(x.shape, (x,), out, tile))
