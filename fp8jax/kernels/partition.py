"""The kernels on a mesh: how each one's operands and results are sharded.

Legend: m, k, n name the dimensions of each kernel. Dimensions with the same letter are sharded over
the same mesh axes. A scale has one entry per 128 elements along k, or along both of its dimensions.

    cast_transpose        m k, scalar        ->  m k, k m, scalar       the amax over all shards
    quantize_tiles        m k                ->  m k, scale k m; k m, scale m k
    quantize_blocks       m k                ->  m k or k m, scale m k
    cast_rows_columns     m k, m, k          ->  m k, k m
    rotated_amax          m k                ->  m k                    its m are blocks of rows
    rotated_codes         m k, m k           ->  m k
    rotated_errors        m k, m k           ->  m k                    its m are blocks of rows
    rotated_lengths       m k, m k, scalar   ->  m k, m k, m k          its last m are blocks
    cast_produced         m k ..., scalars   ->  m k, k m of each result, amaxes over all shards
    tiles_produced        m k ...            ->  m k, scale k m; k m, scale m k of each result
    block_scaled_matmul   m k, n k, k m, k n ->  m n                    summed over the shards of k
    row_scaled_matmul     m k, n k, m, n     ->  m n                    summed over the shards of k
    scaled_matmul         m k, n k, scalar   ->  m n                    summed over the shards of k

mesh_call.py calls them. What a shard that is not whole tiles of 128 becomes:

  * Casts with given scales pad shards that are not whole tiles of 128, and cut the codes.
    quantize_blocks casts such shards with XLA, and exchanges amaxes of the blocks that devices
    share. So a weight of 768 rows on four GPUs is gathered as codes, not in float32.
  * For other kernels, such a dimension (or one whose shards are not multiples of what the GEMM
    needs) is all-gathered instead.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped, UInt32

from fp8jax.kernels import block_gemm, quantize, rotate, row_gemm, swiglu_quantize
from fp8jax.kernels.hopper import BLOCK, pad_to_blocks, stored
from fp8jax.kernels.mesh_call import TILES, Run, Shards, call_on_mesh, each_shard
from fp8jax.kernels.quantize import TileCodes
from fp8jax.kernels.swiglu import Producer
from fp8jax.numerics.formats import Format, cast_unchecked, rounded
from fp8jax.numerics.scales import ScaleRule


def _cut(codes: jax.Array | None, shape: tuple[int, ...]) -> jax.Array | None:
    """Returns the codes of an array of this shape, without those of `pad_to_blocks`."""
    if codes is None or codes.shape == shape:
        return codes
    return codes[: shape[0], : shape[1]]


def _padded_scales(scales: jax.Array) -> jax.Array:
    """Returns scales of the rows or columns of `pad_to_blocks`: 1 for those that it adds."""
    missing = -scales.size % BLOCK
    return jnp.pad(scales, (0, missing), constant_values=1) if missing else scales


def _largest(amax: jax.Array, shards: Shards) -> jax.Array:
    """Returns the maximum over the devices that hold shards; NaN if any device's is NaN."""
    axes = (*shards["m"], *shards["k"])
    if not axes:
        return amax
    # The maximum of the bits keeps a NaN. A maximum of floats might drop it.
    bits = lax.pmax(lax.bitcast_convert_type(amax, jnp.int32), axes)
    return lax.bitcast_convert_type(bits, jnp.float32)


def cast_transpose(
    x: Float[Array, "M K"],
    scale: Float[Array, ""],
    fmt: Format,
    *,
    values: bool = True,
    transposed: bool = True,
) -> tuple[Shaped[Array, "M K"] | None, Shaped[Array, "K M"] | None, Float[Array, ""]]:
    """`quantize.cast_transpose` on a mesh. The amax is over all shards, NaN if any shard's is."""

    cast = functools.partial(quantize.cast_transpose, fmt=fmt, values=values, transposed=transposed)

    def kernel(shards: Shards, run: Run):
        def of_shard(x, scale):
            q, t, amax = run(cast, pad_to_blocks(x), scale)
            return _cut(q, x.shape), _cut(t, x.shape[::-1]), _largest(amax, shards)

        return of_shard

    results = []
    if values:
        results.append("mk")
    if transposed:
        results.append("km")
    return call_on_mesh(kernel, (x, scale), ("mk", ""), (*results, ""), TILES, ragged=True)


def quantize_tiles(
    x: Float[Array, "M K"], fmt: Format, rule: ScaleRule, *, rows: bool = True, columns: bool = True
) -> tuple[TileCodes | None, TileCodes | None]:
    """`quantize.quantize_tiles` on a mesh."""
    kernel = functools.partial(
        quantize.quantize_tiles, fmt=fmt, rule=rule, rows=rows, columns=columns
    )
    results = []
    if rows:
        results += ["mk", "km"]
    if columns:
        results += ["km", "mk"]
    return call_on_mesh(each_shard(kernel), (x,), ("mk",), tuple(results), TILES)


def quantize_blocks(
    x: Float[Array, "M K"], fmt: Format, rule: ScaleRule, *, transposed: bool
) -> TileCodes:
    """`quantize.quantize_blocks` on a mesh."""
    whole = functools.partial(quantize.quantize_blocks, fmt=fmt, rule=rule, transposed=transposed)

    def kernel(shards: Shards, run: Run):
        def of_shard(x):
            sizes = zip("mk", x.shape, strict=True)
            if not any(shards[letter] and size % BLOCK for letter, size in sizes):
                return run(whole, x)
            codes, scale = _ragged_blocks(x, fmt, rule, shards)
            return TileCodes(codes.T if transposed else codes, scale)

        return of_shard

    results = ("km" if transposed else "mk", "mk")
    return call_on_mesh(kernel, (x,), ("mk",), results, TILES, ragged=True)


def _largest_of(x: jax.Array, count: int, axis: int) -> jax.Array:
    """Returns the maximum of each `count` neighbors along an axis."""
    shape = (*x.shape[:axis], x.shape[axis] // count, count, *x.shape[axis + 1 :])
    return jnp.max(x.reshape(shape), axis=axis + 1)


def _ragged_blocks(
    x: Float[Array, "m k"], fmt: Format, rule: ScaleRule, shards: Shards
) -> tuple[Shaped[Array, "m k"], Float[Array, "blocks_m blocks_k"]]:
    """Quantizes a shard that is not whole blocks, with the bits of `quantize.quantize_blocks`.

    Returns:
      (codes of the shard, scales). Scales are those of the whole array along a dimension whose
      shards are not whole blocks, and of the shard along others.
    """
    # Along a dimension, the parts of a shard are as large as blocks and shards allow.
    parts = [math.gcd(size, BLOCK) for size in x.shape]
    bits = quantize._magnitude(x.astype(jnp.float32))
    for axis, part in enumerate(parts):
        bits = _largest_of(bits, part, axis)
    for axis, (part, letter) in enumerate(zip(parts, "mk", strict=True)):
        if part < BLOCK:
            bits = lax.all_gather(bits, shards[letter], axis=axis, tiled=True)
            bits = _largest_of(bits, BLOCK // part, axis)
    scale, reciprocal = quantize._from_amax(bits, rule, fmt)
    for axis, (part, letter) in enumerate(zip(parts, "mk", strict=True)):
        reciprocal = jnp.repeat(reciprocal, BLOCK, axis)
        if part < BLOCK:
            size = x.shape[axis]
            begin = lax.axis_index(shards[letter]) * size
            reciprocal = lax.dynamic_slice_in_dim(reciprocal, begin, size, axis)
    numbers = x.astype(jnp.float32) * reciprocal
    if fmt.bits == 4:
        return rounded(numbers, fmt, None).astype(stored(fmt)), scale
    return cast_unchecked(numbers, fmt), scale


def cast_rows_columns(
    x: Float[Array, "M K"],
    row_scale: Float[Array, " M"] | None,
    column_scale: Float[Array, " K"] | None,
    fmt: Format,
) -> tuple[Shaped[Array, "M K"] | None, Shaped[Array, "K M"] | None]:
    """`quantize.cast_rows_columns` on a mesh."""
    operands, letters, results = [x], ["mk"], []
    if row_scale is not None:
        operands.append(row_scale)
        letters.append("m")
        results.append("mk")
    if column_scale is not None:
        operands.append(column_scale)
        letters.append("k")
        results.append("km")

    def cast(x, *scales):
        of_rows = None if row_scale is None else scales[0]
        of_columns = None if column_scale is None else scales[-1]
        return quantize.cast_rows_columns(x, of_rows, of_columns, fmt)

    def kernel(shards: Shards, run: Run):
        def of_shard(x, *scales):
            q, t = run(cast, pad_to_blocks(x), *map(_padded_scales, scales))
            return _cut(q, x.shape), _cut(t, x.shape[::-1])

        return of_shard

    return call_on_mesh(kernel, tuple(operands), tuple(letters), tuple(results), TILES, ragged=True)


def rotated_amax(
    x: Float[Array, "M K"],
    size: int,
    tile: int | None = None,
    signs: UInt32[Array, ""] | None = None,
) -> Float[Array, "tiles K"]:
    """`rotate.rotated_amax` on a mesh."""

    def amax(x, *signs):
        return rotate.rotated_amax(x, size, tile, *signs)

    operands = (x,) if signs is None else (x, signs)
    letters = ("mk", "")[: len(operands)]
    return call_on_mesh(each_shard(amax), operands, letters, ("mk",), TILES)


def rotated_codes(
    x: Float[Array, "M K"],
    reciprocal: Float[Array, "blocks K"],
    fmt: Format,
    size: int,
    words: tuple[UInt32[Array, ""], UInt32[Array, ""]] | None = None,
    signs: UInt32[Array, ""] | None = None,
) -> Shaped[Array, "M K"]:
    """`rotate.rotated_codes` on a mesh. Draws are those of the whole array's places."""
    flips = () if signs is None else (signs,)

    def cast(x, reciprocal, *others, columns=x.shape[1]):
        given = others[0] if words else None
        return rotate.rotated_codes(
            x, reciprocal, fmt, size, given, columns, *others[1 if words else 0 :]
        )

    def kernel(shards: Shards, run: Run):
        def of_shard(x, reciprocal, *others):
            begins = []
            for letter, size_of_shard in zip("mk", x.shape, strict=True):
                at = lax.axis_index(shards[letter]) if shards[letter] else 0
                begins.append(jnp.asarray(at * size_of_shard, jnp.uint32))
            drawn, flips = (others[:2], others[2:]) if words else ((), others)
            given = (jnp.stack([*drawn, *begins]),) if words else ()
            return run(cast, x, reciprocal, *given, *flips)

        return of_shard

    scalars = (*(words or ()), *flips)
    letters = ("mk", "mk") + ("",) * len(scalars)
    return call_on_mesh(kernel, (x, reciprocal, *scalars), letters, ("mk",), TILES)


def rotated_errors(
    x: Float[Array, "M K"], reciprocal: Float[Array, "blocks K"], fmt: Format, size: int
) -> Float[Array, "blocks K"]:
    """`rotate.rotated_errors` on a mesh."""
    kernel = functools.partial(rotate.rotated_errors, fmt=fmt, size=size)
    return call_on_mesh(each_shard(kernel), (x, reciprocal), ("mk", "mk"), ("mk",), TILES)


def rotated_lengths(
    x: Float[Array, "M K"],
    reciprocal: Float[Array, "tiles K"],
    fmt: Format,
    size: int,
    signs: UInt32[Array, ""],
) -> tuple[Shaped[Array, "M K"], Float[Array, "blocks K"], Float[Array, "blocks K"]]:
    """`rotate.rotated_lengths` on a mesh."""

    def cast(x, reciprocal, signs):
        return rotate.rotated_lengths(x, reciprocal, fmt, size, signs)

    operands = (x, reciprocal, signs)
    return call_on_mesh(each_shard(cast), operands, ("mk", "mk", ""), ("mk",) * 3, TILES)


def cast_produced(
    producer: Producer,
    sources: tuple[Float[Array, "M K"], ...],
    scales: tuple[Float[Array, ""], ...],
    formats: tuple[Format, ...],
    axes: tuple[swiglu_quantize.Axes, ...],
) -> tuple[tuple[dict[int, Array], Array | None], ...]:
    """`swiglu_quantize.cast_produced` on a mesh, with one scalar for each scale.

    The amaxes are over all shards, NaN if any shard's is.
    """
    cast = functools.partial(_cast_produced, producer, formats, axes)

    def kernel(shards: Shards, run: Run):
        def of_shard(*given):
            xs, shape = tuple(map(pad_to_blocks, given[: len(sources)])), given[0].shape
            found = []
            for codes, amax in run(cast, *xs, jnp.stack(given[len(sources) :])):
                cut = {a: _cut(q, shape if a == -1 else shape[::-1]) for a, q in codes.items()}
                found.append((cut, None if amax is None else _largest(amax, shards)))
            return tuple(found)

        return of_shard

    results: list[str] = []
    for of in axes:
        results += ["mk" if axis == -1 else "km" for axis in sorted(of)]  # as jax.tree has them
        results += [""] if -1 in of else []
    letters = ("mk",) * len(sources) + ("",) * len(scales)
    return call_on_mesh(
        kernel, (*sources, *scales), letters, tuple(results), TILES, len(sources), ragged=True
    )


def _cast_produced(
    producer: Producer,
    formats: tuple[Format, ...],
    axes: tuple[swiglu_quantize.Axes, ...],
    *given: jax.Array,
) -> Any:
    """`swiglu_quantize.cast_produced` of its sources, and its scales as one array behind them."""
    return swiglu_quantize.cast_produced(producer, given[:-1], given[-1], formats, axes)


def tiles_produced(
    producer: Producer,
    sources: tuple[Float[Array, "M K"], ...],
    fmt: Format,
    rule: ScaleRule,
    axes: tuple[swiglu_quantize.Axes, ...],
    blocks: frozenset[int] = frozenset(),
) -> tuple[dict[int, TileCodes], ...]:
    """`swiglu_quantize.tiles_produced` on a mesh."""

    kernel = functools.partial(_tiles_produced, producer, fmt, rule, axes, blocks)
    results: list[str] = []
    for of in axes:
        for axis in sorted(of):  # as jax.tree has them
            results += ["mk", "km"] if axis == -1 else ["km", "mk"]
    letters = ("mk",) * len(sources)
    return call_on_mesh(
        each_shard(kernel), sources, letters, tuple(results), TILES, sources=len(sources)
    )


def _tiles_produced(
    producer: Producer,
    fmt: Format,
    rule: ScaleRule,
    axes: tuple[swiglu_quantize.Axes, ...],
    blocks: frozenset[int],
    *sources: jax.Array,
) -> tuple[dict[int, TileCodes], ...]:
    return swiglu_quantize.tiles_produced(producer, sources, fmt, rule, axes, blocks)


def _summed(
    gemm: Callable[..., jax.Array], out_dtype: Any, shards: Shards, run: Run
) -> Callable[..., jax.Array]:
    """Returns the GEMM of shards. It sums over the devices of k in float32, then rounds once."""
    if not shards["k"]:
        return functools.partial(run, functools.partial(gemm, out_dtype=out_dtype))
    part = functools.partial(run, functools.partial(gemm, out_dtype=jnp.float32))
    return lambda *operands: lax.psum(part(*operands), shards["k"]).astype(out_dtype)


def block_scaled_matmul(
    a: Float[Array, "M K"],
    b: Float[Array, "N K"],
    sa: Float[Array, "blocks M"],
    sb: Float[Array, "blocks columns"],
    out_dtype: Any = jnp.bfloat16,
) -> Float[Array, "M N"]:
    """`block_gemm.block_scaled_matmul` on a mesh."""
    kernel = functools.partial(_summed, block_gemm.block_scaled_matmul, out_dtype)
    multiples = {"k": BLOCK, "m": 8, "n": 64 if sb.shape[1] == b.shape[0] else BLOCK}
    letters = ("mk", "nk", "km", "kn")
    return call_on_mesh(kernel, (a, b, sa, sb), letters, ("mn",), multiples, sources=2)


def row_scaled_matmul(
    a: Float[Array, "M K"],
    b: Float[Array, "N K"],
    sa: Float[Array, " M"],
    sb: Float[Array, " N"],
    out_dtype: Any = jnp.bfloat16,
) -> Float[Array, "M N"]:
    """`row_gemm.row_scaled_matmul` on a mesh."""
    kernel = functools.partial(_summed, row_gemm.row_scaled_matmul, out_dtype)
    multiples = {"k": BLOCK, "m": 8, "n": 64}
    letters = ("mk", "nk", "m", "n")
    return call_on_mesh(kernel, (a, b, sa, sb), letters, ("mn",), multiples, sources=2)


def scaled_matmul(
    a: Float[Array, "..."],
    b: Float[Array, "..."],
    scale: Float[Array, ""],
    axes: tuple[int, int],
    out_dtype: Any = jnp.bfloat16,
) -> Float[Array, "M N"]:
    """`row_gemm.scaled_matmul` on a mesh."""
    gemm = functools.partial(row_gemm.scaled_matmul, axes=axes)
    letters = ("mk" if axes[0] == -1 else "km", "nk" if axes[1] == -1 else "kn", "")
    multiples = {"k": row_gemm.DEPTH, "m": 8, "n": 64}
    kernel = functools.partial(_summed, gemm, out_dtype)
    return call_on_mesh(kernel, (a, b, scale), letters, ("mn",), multiples, sources=2)
