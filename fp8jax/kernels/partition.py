"""The kernels on a mesh: which shards of its operands each one takes, and what it gives back.

Legend: m, k, n name dimensions; a letter that stands twice is cut alike in both places. A scale has
one entry for 128 elements along k, or along both.

    cast_transpose        m k, scalar        ->  m k, k m, scalar       the largest amax of all
    quantize_tiles        m k                ->  m k, scale k m; k m, scale m k
    quantize_blocks       m k                ->  m k or k m, scale m k
    cast_rows_columns     m k, m, k          ->  m k, k m
    block_scaled_matmul   m k, n k, k m, k n ->  m n                    summed over what cuts k
    row_scaled_matmul     m k, n k, m, n     ->  m n                    likewise

To XLA a kernel is one opaque call: it would gather the operands, and run all of it on every device.
Inside `jit` shardings are found by propagation, after tracing. So a kernel states its letters,
through which Shardy propagates, and is asked with what was found how it wants to be cut:

  * along the mesh axes that its source has there. A product is cut along k where both factors are,
    as for a weight gradient, whose k are the tokens; where one is, as for a parameter under FSDP,
    that one is gathered, in codes of one byte;
  * if shards are whole tiles of 128, or what the product takes. Else that dimension is gathered.

`shard_map` was rejected: it takes shardings as arguments, before there are any. Without a mesh, and
on one device, the kernel is called as it is.
"""

import functools
import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Shaped

from fp8jax.kernels import block_gemm, quantize, row_gemm
from fp8jax.kernels.hopper import BLOCK
from fp8jax.kernels.quantize import TileCodes
from fp8jax.numerics.formats import Format
from fp8jax.numerics.scales import ScaleRule

Cut = dict[str, tuple[str, ...]]  # letter -> the mesh axes that cut it
_TILES = {"m": BLOCK, "k": BLOCK}


def _axes(array: Any, dimension: int) -> tuple[str, ...]:
    """The mesh axes along a dimension of a ShapeDtypeStruct."""
    entry = array.sharding.spec[dimension]
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _cut(mesh: Any, sources: list[tuple[str, Any]], whole: dict[str, int]) -> Cut:
    """How each letter of `whole` is cut, given (letters, ShapeDtypeStruct) of the sources. Shards
    are multiples of its number; a mesh axis goes to the first letter that it cuts."""
    cut: Cut = {}
    for letter, multiple in whole.items():
        found = [(array, of.index(letter)) for of, array in sources if letter in of]
        axes, size = _axes(*found[0]), found[0][0].shape[found[0][1]]
        fits = size % (multiple * math.prod(mesh.shape[axis] for axis in axes)) == 0
        alike = all(_axes(*other) == axes for other in found)
        taken = any(set(axes) & set(others) for others in cut.values())
        cut[letter] = axes if fits and alike and not taken else ()
    return cut


def _on_mesh(
    kernel: Callable[[Cut], Callable[..., Any]],
    operands: tuple[jax.Array, ...],
    letters: tuple[str, ...],
    results: tuple[str, ...],
    whole: dict[str, int],
    sources: int = 1,
) -> Any:
    """`kernel(cut)` of the operands or, on a mesh, of their shards.

    Args:
      letters, results: of each operand and of each leaf of the result; "" is a scalar.
      whole: letter -> what a shard is a multiple of, in the order in which they take mesh axes.
      sources: so many operands say how it is cut, the others follow.
    """
    mesh = jax.sharding.get_abstract_mesh()
    call = kernel(dict.fromkeys(whole, ()))
    if mesh.empty or mesh.size == 1:
        return call(*operands)
    # JAX's cache tells programs apart by their text, where this call is an address, which Python
    # uses again for the next program. So what the kernel computes stands there too, as a number.
    mark = np.uint32(zlib.crc32(str(jax.make_jaxpr(call)(*operands)).encode()))
    letters = (*letters, "")

    def partition(mesh, given, wanted):
        cut = _cut(mesh, list(zip(letters, given, strict=True))[:sources], whole)
        shardings = [
            NamedSharding(mesh, PartitionSpec(*(cut[letter] for letter in of)))
            for of in (*letters, *results)
        ]
        out = jax.tree.unflatten(jax.tree.structure(wanted), shardings[len(letters) :])
        return mesh, lambda *shards: kernel(cut)(*shards[:-1]), out, tuple(shardings[: len(given)])

    partitioned = custom_partitioning(lambda *given: call(*given[:-1]))
    partitioned.def_partition(
        partition,
        sharding_rule=" -> ".join(", ".join(map(" ".join, of)) for of in (letters, results)),
        reduction_factors=tuple(letter for letter in whole if letter not in "".join(results)),
    )
    # One after another under vmap: a model's layers are initialized so, and their results dropped.
    return sequential_vmap(lambda *given: partitioned(*given))(*operands, mark)


def cast_transpose(
    x: Float[Array, "M K"],
    scale: Float[Array, ""],
    fmt: Format,
    *,
    values: bool = True,
    transposed: bool = True,
) -> tuple[Shaped[Array, "M K"] | None, Shaped[Array, "K M"] | None, Float[Array, ""]]:
    """`quantize.cast_transpose`; the amax is that of all shards, NaN if one of them is."""

    def kernel(cut: Cut):
        def of_shard(x, scale):
            *codes, amax = quantize.cast_transpose(
                x, scale, fmt, values=values, transposed=transposed
            )
            if axes := (*cut["m"], *cut["k"]):
                # As bits, which order like magnitudes: a maximum of numbers may lose a NaN.
                bits = lax.pmax(lax.bitcast_convert_type(amax, jnp.int32), axes)
                amax = lax.bitcast_convert_type(bits, jnp.float32)
            return *codes, amax

        return of_shard

    results = ("mk",) * values + ("km",) * transposed + ("",)
    return _on_mesh(kernel, (x, scale), ("mk", ""), results, _TILES)


def quantize_tiles(
    x: Float[Array, "M K"], fmt: Format, rule: ScaleRule, *, rows: bool = True, columns: bool = True
) -> tuple[TileCodes | None, TileCodes | None]:
    """`quantize.quantize_tiles`."""
    kernel = functools.partial(
        quantize.quantize_tiles, fmt=fmt, rule=rule, rows=rows, columns=columns
    )
    results = ("mk", "km") * rows + ("km", "mk") * columns
    return _on_mesh(lambda cut: kernel, (x,), ("mk",), results, _TILES)


def quantize_blocks(
    x: Float[Array, "M K"], fmt: Format, rule: ScaleRule, *, transposed: bool
) -> TileCodes:
    """`quantize.quantize_blocks`."""
    kernel = functools.partial(quantize.quantize_blocks, fmt=fmt, rule=rule, transposed=transposed)
    results = ("km" if transposed else "mk", "mk")
    return _on_mesh(lambda cut: kernel, (x,), ("mk",), results, _TILES)


def cast_rows_columns(
    x: Float[Array, "M K"],
    row_scale: Float[Array, " M"] | None,
    column_scale: Float[Array, " K"] | None,
    fmt: Format,
) -> tuple[Shaped[Array, "M K"] | None, Shaped[Array, "K M"] | None]:
    """`quantize.cast_rows_columns`."""
    given = {"m": row_scale, "k": column_scale}
    scales = {letter: scale for letter, scale in given.items() if scale is not None}

    def of_shard(x, *shards):
        found = dict(zip(scales, shards, strict=True))
        of_rows, of_columns = (found[letter] if letter in found else None for letter in "mk")
        return quantize.cast_rows_columns(x, of_rows, of_columns, fmt)

    results = ("mk",) * ("m" in scales) + ("km",) * ("k" in scales)
    operands = (x, *scales.values())
    return _on_mesh(lambda cut: of_shard, operands, ("mk", *scales), results, _TILES)


def _summed(
    product: Callable[..., jax.Array], out_dtype: Any, cut: Cut
) -> Callable[..., jax.Array]:
    """The product of shards, or the sum over their parts of k, in float32 and then rounded."""
    if not cut["k"]:
        return functools.partial(product, out_dtype=out_dtype)
    part = functools.partial(product, out_dtype=jnp.float32)
    return lambda *shards: lax.psum(part(*shards), cut["k"]).astype(out_dtype)


def block_scaled_matmul(
    a: Float[Array, "M K"],
    b: Float[Array, "N K"],
    sa: Float[Array, "blocks M"],
    sb: Float[Array, "blocks columns"],
    out_dtype: Any = jnp.bfloat16,
) -> Float[Array, "M N"]:
    """`gemm.block_scaled_matmul`."""
    kernel = functools.partial(_summed, block_gemm.block_scaled_matmul, out_dtype)
    whole = {"k": BLOCK, "m": 8, "n": 64 if sb.shape[1] == b.shape[0] else BLOCK}
    return _on_mesh(kernel, (a, b, sa, sb), ("mk", "nk", "km", "kn"), ("mn",), whole, sources=2)


def row_scaled_matmul(
    a: Float[Array, "M K"],
    b: Float[Array, "N K"],
    sa: Float[Array, " M"],
    sb: Float[Array, " N"],
    out_dtype: Any = jnp.bfloat16,
) -> Float[Array, "M N"]:
    """`gemm_rows.row_scaled_matmul`."""
    kernel = functools.partial(_summed, row_gemm.row_scaled_matmul, out_dtype)
    whole = {"k": BLOCK, "m": 8, "n": 64}
    return _on_mesh(kernel, (a, b, sa, sb), ("mk", "nk", "m", "n"), ("mn",), whole, sources=2)
