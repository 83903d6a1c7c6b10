"""Quantizers that read their source once: codes, transposed codes, scales and amax in one pass.

Legend: M rows, K columns; a tile is 128 x 128.

`wgmma` multiplies float8 operands only with the contracted axis last in both. A weight gradient
contracts the tokens, so that both of its operands are needed transposed. XLA runs a cast, a
transposition of single bytes and a reduction for the amax, and reads the source twice at half of
the memory's speed. Here one block of threads takes one tile:

    TMA            source tile -> shared memory (swizzled)
    registers      numbers, rows across threads:        amax and codes of rows
    registers      the same tile, columns across threads (ldmatrix transposes 16-bit elements):
                   amax and codes of columns
    TMA            codes -> memory, [M, K] and [K, M]

A float32 source has no 16-bit transposition: its codes, which float16 holds exactly, go through
shared memory once more as float16. Blocks are many and small (three fit a core at a time), which
hides the latencies; a persistent loop with its own double buffering was no faster. For that a tile
of float32, which is read to registers at once, gives its memory to all that comes after it.

    cast_transpose     one given scale for the tensor (delayed scaling), and the tensor's amax
    cast_rows_columns  given scales for each row, and for each column
    quantize_tiles     a scale for each 1 x 128 along the rows, and for each 128 x 1 along columns
    quantize_blocks    a scale for each 128 x 128

Scales come from the same rules as everywhere (numerics/scaling.py), applied to registers. An amax
is a
maximum of bit patterns, as there: NaN above infinity above all else; and as there the scale of a
tile whose amax is not finite is NaN. Rows and columns are whole tiles; `mosaic.pad_to_blocks`
fills up others with zeros, which raise no amax.
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

from fp8jax.kernels.hopper import BLOCK, launch, load, saturated, scoped, swizzled
from fp8jax.numerics.formats import Format
from fp8jax.numerics.scales import E8M0, Fp32, Pow2, ScaleRule

WGMMA = plgpu.Layout.WGMMA


_INF_BITS = 0x7F800000


class TileCodes(NamedTuple):
    """Codes and their scales: of the rows [M, K], or transposed [K, M].

    The scale of `quantize_tiles` is float32 [K / 128, M] for rows and [M / 128, K] for columns: the
    tile's index first, as a product reads them. Of `quantize_blocks` it is [M / 128, K / 128].
    """

    values: Shaped[Array, "..."]
    scale: Float[Array, "..."]


def _check(x: Array, fmt: Format, rule: ScaleRule | None = None) -> None:
    """Raises ValueError for what the kernels do not take, with the values."""
    if x.ndim != 2 or any(size % BLOCK or not size for size in x.shape):
        raise ValueError(f"the kernel takes whole tiles of {BLOCK} x {BLOCK}, got shape {x.shape}")
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"the kernel takes bfloat16 and float32, got {x.dtype}")
    if fmt.bits != 8 or not fmt.signed:
        raise ValueError(f"the kernel casts to e4m3 and e5m2, got {fmt.name}")
    if not (rule in (None, E8M0()) or isinstance(rule, Fp32 | Pow2)):
        raise ValueError(f"the kernel has the scale rules fp32, pow2 and e8m0, got {rule}")


def _magnitude(x: jax.Array) -> jax.Array:
    """Bits of |x|, which order like the numbers."""
    return lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF


def _amax(x: jax.Array) -> jax.Array:
    """The bits of a tile's largest magnitude."""
    return jnp.max(jnp.max(_magnitude(x), axis=1))


def _as_amax(bits: jax.Array) -> jax.Array:
    """float32, of all tiles' bits; reduced once for all who read it, which the barrier is for."""
    return lax.optimization_barrier(lax.bitcast_convert_type(jnp.max(bits), jnp.float32))


def _codes(x: jax.Array, reciprocal: jax.Array, fmt: Format) -> jax.Array:
    """x * reciprocal in `fmt`, saturating; NaN stays."""
    return saturated(x * reciprocal, fmt.max).astype(fmt.dtype)


def _from_amax(bits: jax.Array, rule: ScaleRule, fmt: Format) -> tuple[jax.Array, jax.Array]:
    """(scale, NaN where the amax is not finite; reciprocal of the scale as the rule gave it)."""
    if isinstance(rule, E8M0):
        rule = Pow2()  # the same numbers, as float32
    scale, _ = rule(lax.bitcast_convert_type(bits, jnp.float32), fmt)
    return jnp.where(bits < _INF_BITS, scale, jnp.nan), 1.0 / scale


def _over_tiles(
    shape: tuple[int, ...],
    operands: tuple[jax.Array, ...],
    out: list[Any],
    tile: Callable,
    *,
    approximate: bool = False,
) -> list[Any]:
    """Runs `tile(rows, columns, m, k, *references)` on one block of threads for each tile."""

    def body(*references):
        m, k = lax.axis_index("m"), lax.axis_index("k")
        rows, columns = pl.ds(m * BLOCK, BLOCK), pl.ds(k * BLOCK, BLOCK)
        tile(rows, columns, m, k, *references)
        plgpu.wait_smem_to_gmem(0)

    grid = (shape[0] // BLOCK, shape[1] // BLOCK)
    return list(
        launch(
            body, *operands, out=tuple(out), approximate=approximate, grid=grid,
            grid_names=("m", "k"),
        )
    )  # fmt: skip


def _tile(dtype: Any, rows: int = BLOCK) -> Any:
    return plgpu.SMEM((rows, BLOCK), dtype, transforms=swizzled(dtype, BLOCK))


def _in_turn(source: Any, after: dict[str, Any]) -> dict[str, Any]:
    """Shared memory for a tile of the source, and for what is written `after` it was read to
    registers: in the same place if the source is float32."""
    if source.dtype == jnp.bfloat16:
        return dict(x_s=_tile(source.dtype), **after)
    return dict(union_s=plgpu.RefUnion(_tile(source.dtype), after))


def _taken(x_s: Any = None, union_s: Any = None, **after: Any) -> tuple[Any, dict[str, Any]]:
    """The references of `_in_turn`: that of the source's tile, and those after it by name."""
    return (x_s, after) if union_s is None else tuple(union_s)


def _load(source: Any, target: Any, barrier: Any) -> jax.Array:
    """A tile, also in registers by rows; `_in_turn` may give its memory away then."""
    plgpu.copy_gmem_to_smem(source, target, barrier)
    plgpu.barrier_wait(barrier)
    numbers = _rows(target)
    if target.dtype != jnp.bfloat16:
        plgpu.commit_smem()  # everybody has read it
    return numbers


def _store(target: Any, values: jax.Array, *copies: tuple[Any, Any]) -> None:
    """Registers to shared memory, and from there to memory."""
    target[...] = values
    plgpu.commit_smem()
    for source, destination in copies:
        plgpu.copy_smem_to_gmem(source, destination)


def _rows(source: Any) -> jax.Array:
    """float32 registers of a tile, a row in four threads of a warp."""
    return load(source, WGMMA).astype(jnp.float32)


def _columns(source: Any) -> jax.Array:
    """The same of its transpose."""
    return _rows(source.transpose((1, 0)))


def _transposed(codes: jax.Array, half_s: Any) -> jax.Array:
    """Codes through shared memory, as float16."""
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
    """Codes of x / scale, the same transposed, and float32 max|x| (NaN where x has one).

    Args:
      x: bfloat16 or float32, whole tiles of 128 x 128.
      scale: float32; codes are those of x * (1 / scale), saturating.
      fmt: e4m3 or e5m2.
      values, transposed: which codes are wanted; None is returned for the others.

    Raises:
      ValueError: another dtype, format or shape. NotImplementedError: another device or jax.
    """
    _check(x, fmt)
    direct = x.dtype == jnp.bfloat16
    (rows, columns), dtype = x.shape, fmt.dtype
    out = [jax.ShapeDtypeStruct((rows // BLOCK, columns // BLOCK), jnp.int32)]
    out += [jax.ShapeDtypeStruct((rows, columns), dtype)] * values
    out += [jax.ShapeDtypeStruct((columns, rows), dtype)] * transposed

    def tile(at_m, at_k, m, k, x_g, scale_g, amax_g, *codes_g):
        after = {"q_s": _tile(dtype)} if values else {}
        after |= {"t_s": _tile(dtype)} if transposed else {}
        after |= {"half_s": _tile(jnp.float16)} if transposed and not direct else {}

        @scoped(barrier=plgpu.Barrier(), **_in_turn(x, after))
        def _(barrier, **smem):
            x_s, after_s = _taken(**smem)
            numbers = _load(x_g.at[at_m, at_k], x_s, barrier)
            reciprocal = 1.0 / scale_g[0]
            q = _codes(numbers, reciprocal, fmt)
            amax_g[m, k] = _amax(numbers)
            if values:
                _store(after_s["q_s"], q, (after_s["q_s"], codes_g[0].at[at_m, at_k]))
            if transposed:
                if direct:
                    q = _codes(_columns(x_s), reciprocal, fmt)
                else:
                    q = _transposed(q, after_s["half_s"])
                _store(after_s["t_s"], q, (after_s["t_s"], codes_g[-1].at[at_k, at_m]))

    amax, *codes = _over_tiles(x.shape, (x, scale.reshape(1)), out, tile)
    found = iter(codes)
    return (
        next(found) if values else None,
        next(found) if transposed else None,
        _as_amax(amax),
    )


@functools.partial(jax.jit, static_argnames="fmt")
def cast_rows_columns(
    x: Float[Array, "M K"],
    row_scale: Float[Array, " M"] | None,
    column_scale: Float[Array, " K"] | None,
    fmt: Format,
) -> tuple[Shaped[Array, "M K"] | None, Shaped[Array, "K M"] | None]:
    """Codes of x[m, k] / row_scale[m], and transposed ones of x[m, k] / column_scale[k].

    A row's amax is known when all of it was read, so scales come from a reduction before; two
    passes instead of one are what whole rows cost.

    Args:
      x: bfloat16 or float32, whole tiles of 128 x 128.
      row_scale, column_scale: float32; codes are those of x * (1 / scale), saturating. None is
        returned for codes whose scale is None.
      fmt: e4m3 or e5m2.

    Raises:
      ValueError: another dtype, format or shape. NotImplementedError: another device or jax.
    """
    _check(x, fmt)
    rows, columns = row_scale is not None, column_scale is not None
    scales = [scale for scale in (row_scale, column_scale) if scale is not None]
    direct, dtype = x.dtype == jnp.bfloat16, fmt.dtype
    out = [jax.ShapeDtypeStruct(x.shape, dtype)] * rows
    out += [jax.ShapeDtypeStruct(x.shape[::-1], dtype)] * columns

    def reciprocals(scale_g, axis: int):
        """Of a tile's scales along `axis`, spread over the other one."""
        scale = load(scale_g, WGMMA.reduce(1 - axis), optimized=False)
        return lax.broadcast_in_dim(1.0 / scale, (BLOCK, BLOCK), (axis,))

    def tile(at_m, at_k, m, k, x_g, *references):
        scales_g, codes_g = references[: len(scales)], references[len(scales) :]
        after = {"q_s": _tile(dtype)} if rows else {}
        after |= {"t_s": _tile(dtype)} if columns else {}
        after |= {"half_s": _tile(jnp.float16)} if columns and not direct else {}

        @scoped(barrier=plgpu.Barrier(), **_in_turn(x, after))
        def _(barrier, **smem):
            x_s, after_s = _taken(**smem)
            numbers = _load(x_g.at[at_m, at_k], x_s, barrier)
            if rows:
                q = _codes(numbers, reciprocals(scales_g[0].at[at_m], 0), fmt)
                _store(after_s["q_s"], q, (after_s["q_s"], codes_g[0].at[at_m, at_k]))
            if columns:
                of_columns = scales_g[-1].at[at_k]
                if direct:
                    q = _codes(_columns(x_s), reciprocals(of_columns, 0), fmt)
                else:
                    q = _codes(numbers, reciprocals(of_columns, 1), fmt)
                    q = _transposed(q, after_s["half_s"])
                _store(after_s["t_s"], q, (after_s["t_s"], codes_g[-1].at[at_k, at_m]))

    found = _over_tiles(x.shape, (x, *scales), out, tile) if scales else []
    return found[0] if rows else None, found[-1] if columns else None


def _store_rows(numbers: jax.Array, rule: ScaleRule, fmt: Format, codes: Any, scales: Any) -> None:
    """A tile with a scale for each of its rows, through (shared memory, memory) of each."""
    bits = jnp.max(_magnitude(numbers), axis=1)
    scale, reciprocal = _from_amax(bits, rule, fmt)
    spread = lax.broadcast_in_dim(reciprocal, (BLOCK, BLOCK), (0,))
    scales[0][...] = scale
    _store(codes[0], _codes(numbers, spread, fmt), codes, scales)


@functools.partial(jax.jit, static_argnames=("fmt", "rule", "rows", "columns"))
def quantize_tiles(
    x: Float[Array, "M K"], fmt: Format, rule: ScaleRule, *, rows: bool = True, columns: bool = True
) -> tuple[TileCodes | None, TileCodes | None]:
    """Codes [M, K] with a scale for each 1 x 128 of a row, and codes [K, M] of the transpose with
    a scale for each 128 rows of a column.

    Args:
      x: bfloat16, whole tiles of 128 x 128.
      fmt: e4m3 or e5m2.
      rule: how an amax becomes a scale: `Fp32`, `Pow2` or `E8M0` (as float32).
      rows, columns: which of the two are wanted; None is returned for the other.

    Raises:
      ValueError: another dtype, format, rule or shape. NotImplementedError: another device or jax.
    """
    _check(x, fmt, rule)
    if x.dtype != jnp.bfloat16:
        raise ValueError(f"tiles of 1 x {BLOCK} are of bfloat16 activations, got {x.dtype}")
    size, dtype = x.shape, fmt.dtype

    def results(rows: int, columns: int) -> list[Any]:
        return [
            jax.ShapeDtypeStruct((rows, columns), dtype),
            jax.ShapeDtypeStruct((columns // BLOCK, rows), jnp.float32),
        ]

    out = (results(*size) if rows else []) + (results(*size[::-1]) if columns else [])

    def tile(at_m, at_k, m, k, x_g, *codes_g):
        pairs = dict(q_s=_tile(dtype), s_s=plgpu.SMEM((BLOCK,), jnp.float32))
        more = dict(t_s=_tile(dtype), u_s=plgpu.SMEM((BLOCK,), jnp.float32))
        smem: dict[str, Any] = dict(x_s=_tile(x.dtype), barrier=plgpu.Barrier())
        smem |= (pairs if rows else {}) | (more if columns else {})

        @scoped(**smem)
        def _(x_s, barrier, q_s=None, s_s=None, t_s=None, u_s=None):
            numbers = _load(x_g.at[at_m, at_k], x_s, barrier)
            if rows:
                codes, scales = (q_s, codes_g[0].at[at_m, at_k]), (s_s, codes_g[1].at[k, at_m])
                _store_rows(numbers, rule, fmt, codes, scales)
            if columns:
                codes, scales = (t_s, codes_g[-2].at[at_k, at_m]), (u_s, codes_g[-1].at[m, at_k])
                _store_rows(_columns(x_s), rule, fmt, codes, scales)

    found = _over_tiles(size, (x,), out, tile)
    return TileCodes(*found[:2]) if rows else None, TileCodes(*found[-2:]) if columns else None


@functools.partial(jax.jit, static_argnames=("fmt", "rule", "transposed"))
def quantize_blocks(
    x: Float[Array, "M K"], fmt: Format, rule: ScaleRule, *, transposed: bool
) -> TileCodes:
    """Codes with a scale for each 128 x 128: [M, K], or [K, M] of the transpose. The scale is
    float32 [M / 128, K / 128] in both cases.

    Args:
      x: bfloat16 or float32, whole tiles of 128 x 128.
      fmt, rule: as in `quantize_tiles`.

    Raises:
      ValueError: another dtype, format, rule or shape. NotImplementedError: another device or jax.
    """
    _check(x, fmt, rule)
    (rows, columns), dtype = x.shape, fmt.dtype
    out = [
        jax.ShapeDtypeStruct((columns, rows) if transposed else (rows, columns), dtype),
        jax.ShapeDtypeStruct((rows // BLOCK, columns // BLOCK), jnp.float32),
    ]

    def tile(at_m, at_k, m, k, x_g, q_g, scale_g):
        after = {"q_s": _tile(dtype)} | ({"half_s": _tile(jnp.float16)} if transposed else {})

        @scoped(barrier=plgpu.Barrier(), **_in_turn(x, after))
        def _(barrier, **smem):
            x_s, after_s = _taken(**smem)
            numbers = _load(x_g.at[at_m, at_k], x_s, barrier)
            bits = _amax(numbers)
            scale, reciprocal = _from_amax(bits, rule, fmt)
            scale_g[m, k] = scale
            q, q_s = _codes(numbers, reciprocal, fmt), after_s["q_s"]
            if not transposed:
                return _store(q_s, q, (q_s, q_g.at[at_m, at_k]))
            return _store(q_s, _transposed(q, after_s["half_s"]), (q_s, q_g.at[at_k, at_m]))

    return TileCodes(*_over_tiles(x.shape, (x,), out, tile))
