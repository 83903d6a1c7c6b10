"""The kernels on a mesh: how each one's operands and results are sharded.

Legend: m, k, n name the dimensions of each kernel. Dimensions with the same letter are sharded over
the same mesh axes. A scale has one entry per 128 elements along k, or along both of its dimensions.

    cast_transpose        m k, scalar        ->  m k, k m, scalar       the amax over all shards
    quantize_tiles        m k                ->  m k, scale k m; k m, scale m k
    quantize_blocks       m k                ->  m k or k m, scale m k
    cast_rows_columns     m k, m, k          ->  m k, k m
    rotated_amax          m k                ->  m k                    its m are blocks of rows
    rotated_codes         m k, m k           ->  m k
    cast_produced         m k ..., scalars   ->  m k, k m of each result, amaxes over all shards
    tiles_produced        m k ...            ->  m k, scale k m; k m, scale m k of each result
    block_scaled_matmul   m k, n k, k m, k n ->  m n                    summed over the shards of k
    row_scaled_matmul     m k, n k, m, n     ->  m n                    summed over the shards of k
    scaled_matmul         m k, n k, scalar   ->  m n                    summed over the shards of k
    flash_*               rows and heads, see below; each device attends to its own

XLA cannot look inside a kernel. By default it would gather the operands, and run the whole kernel
on every device. Under `jit`, shardings are propagated after tracing. So each kernel declares the
letters of its dimensions, through which Shardy propagates shardings. Then it is asked how to shard
its operands, given the propagated shardings (`_sharded_over`). The answer for each dimension:

  * It is sharded over the mesh axes that it is sharded over in the source. A GEMM's k is sharded if
    both operands are sharded along k, as in wgrad, whose k is the tokens. If only one is, such as a
    parameter under FSDP, that one is all-gathered, as codes of one byte.
  * If the shards would not be whole tiles of 128 (or the multiple that the GEMM needs), the
    dimension is all-gathered instead.

`shard_map` was rejected: it needs shardings as arguments, when they have not been propagated yet.
Without a mesh, and on one device, the kernel is called directly.
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
from jaxtyping import Array, Float, Int, Shaped, UInt32

from fp8jax.kernels import block_gemm, flash_backward, quantize, rotate, row_gemm, swiglu_quantize
from fp8jax.kernels import flash_forward as forward
from fp8jax.kernels.hopper import BLOCK
from fp8jax.kernels.quantize import TileCodes
from fp8jax.kernels.swiglu import Producer
from fp8jax.numerics.formats import Format
from fp8jax.numerics.scales import ScaleRule

Shards = dict[str, tuple[str, ...]]  # letter -> the mesh axes that it is sharded over

_TILES = {"m": BLOCK, "k": BLOCK}


def _mesh_axes(array: Any, dimension: int) -> tuple[str, ...]:
    """Returns the mesh axes that a dimension of a ShapeDtypeStruct is sharded over."""
    entry = array.sharding.spec[dimension]
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _sharded_over(mesh: Any, sources: list[tuple[str, Any]], multiples: dict[str, int]) -> Shards:
    """Decides which mesh axes each letter is sharded over.

    A letter is not sharded if the sources disagree, if its shards would not be multiples of its
    number, or if a letter before it is already sharded over one of its mesh axes.

    Args:
      mesh: the mesh.
      sources: (letters, ShapeDtypeStruct) of each source.
      multiples: letter -> the number that the size of a shard must be a multiple of.
    """
    shards: Shards = {}
    for letter, multiple in multiples.items():
        places = [(array, of.index(letter)) for of, array in sources if letter in of]
        first, dimension = places[0]
        axes = _mesh_axes(first, dimension)
        devices = math.prod(mesh.shape[axis] for axis in axes)
        fits = first.shape[dimension] % (multiple * devices) == 0
        agree = all(_mesh_axes(*place) == axes for place in places)
        taken = any(set(axes) & set(others) for others in shards.values())
        shards[letter] = axes if fits and agree and not taken else ()
    return shards


def _on_mesh(
    kernel: Callable[[Shards], Callable[..., Any]],
    operands: tuple[jax.Array, ...],
    letters: tuple[str, ...],
    results: tuple[str, ...],
    multiples: dict[str, int],
    sources: int = 1,
) -> Any:
    """Calls a kernel on the operands or, on a mesh, on their shards.

    Args:
      kernel: kernel(shards) returns the function of the operands' shards.
      operands: the arrays.
      letters: the letters of each operand; "" is a scalar.
      results: the letters of each leaf of the result.
      multiples: letter -> the number that the size of a shard must be a multiple of. A mesh axis
        goes to the first letter that it shards.
      sources: the shardings of the first so many operands decide; the other operands follow.
    """
    mesh = jax.sharding.get_abstract_mesh()
    call = kernel(dict.fromkeys(multiples, ()))
    if mesh.empty or mesh.size == 1:
        return call(*operands)
    # JAX's compilation cache compares the texts of programs. In that text this call is only the
    # address of a Python object, and Python reuses addresses. So a checksum of what the kernel
    # computes is added to the program, as one more scalar operand.
    mark = np.uint32(zlib.crc32(str(jax.make_jaxpr(call)(*operands)).encode()))
    letters = (*letters, "")

    def partition(mesh, given, wanted):
        named = list(zip(letters, given, strict=True))
        shards = _sharded_over(mesh, named[:sources], multiples)

        def sharding(of: str) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*(shards[letter] for letter in of)))

        out = jax.tree.unflatten(jax.tree.structure(wanted), [sharding(of) for of in results])
        of_shards = kernel(shards)
        arguments = tuple(sharding(of) for of in letters)
        return mesh, lambda *given: of_shards(*given[:-1]), out, arguments

    partitioned = custom_partitioning(lambda *given: call(*given[:-1]))
    partitioned.def_partition(
        partition,
        sharding_rule=" -> ".join(", ".join(map(" ".join, of)) for of in (letters, results)),
        reduction_factors=tuple(letter for letter in multiples if letter not in "".join(results)),
    )
    # vmap runs the kernel for one element after another. That is slow, but vmap is only used to
    # initialize a model's layers, where the results are dropped.
    return sequential_vmap(lambda *given: partitioned(*given))(*operands, mark)


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

    def kernel(shards: Shards):
        def of_shard(x, scale):
            *codes, amax = quantize.cast_transpose(
                x, scale, fmt, values=values, transposed=transposed
            )
            return *codes, _largest(amax, shards)

        return of_shard

    results = []
    if values:
        results.append("mk")
    if transposed:
        results.append("km")
    return _on_mesh(kernel, (x, scale), ("mk", ""), (*results, ""), _TILES)


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
    return _on_mesh(lambda shards: kernel, (x,), ("mk",), tuple(results), _TILES)


def quantize_blocks(
    x: Float[Array, "M K"], fmt: Format, rule: ScaleRule, *, transposed: bool
) -> TileCodes:
    """`quantize.quantize_blocks` on a mesh."""
    kernel = functools.partial(quantize.quantize_blocks, fmt=fmt, rule=rule, transposed=transposed)
    results = ("km" if transposed else "mk", "mk")
    return _on_mesh(lambda shards: kernel, (x,), ("mk",), results, _TILES)


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

    def of_shard(x, *scales):
        of_rows = None if row_scale is None else scales[0]
        of_columns = None if column_scale is None else scales[-1]
        return quantize.cast_rows_columns(x, of_rows, of_columns, fmt)

    return _on_mesh(
        lambda shards: of_shard, tuple(operands), tuple(letters), tuple(results), _TILES
    )


def rotated_amax(x: Float[Array, "M K"], size: int) -> Float[Array, "blocks K"]:
    """`rotate.rotated_amax` on a mesh."""
    kernel = functools.partial(rotate.rotated_amax, size=size)
    return _on_mesh(lambda shards: kernel, (x,), ("mk",), ("mk",), _TILES)


def rotated_codes(
    x: Float[Array, "M K"],
    reciprocal: Float[Array, "blocks K"],
    fmt: Format,
    size: int,
    words: tuple[UInt32[Array, ""], UInt32[Array, ""]] | None = None,
) -> Shaped[Array, "M K"]:
    """`rotate.rotated_codes` on a mesh. Draws are those of the whole array's places."""
    columns = x.shape[1]

    def kernel(shards: Shards):
        def of_shard(x, reciprocal, *words):
            begins = []
            for letter, size_of_shard in zip("mk", x.shape, strict=True):
                at = lax.axis_index(shards[letter]) if shards[letter] else 0
                begins.append(jnp.asarray(at * size_of_shard, jnp.uint32))
            given = jnp.stack([*words, *begins]) if words else None
            return rotate.rotated_codes(x, reciprocal, fmt, size, given, columns)

        return of_shard

    scalars = () if words is None else words
    letters = ("mk", "mk") + ("",) * len(scalars)
    return _on_mesh(kernel, (x, reciprocal, *scalars), letters, ("mk",), _TILES)


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

    def kernel(shards: Shards):
        def of_shard(*given):
            xs, scales = given[: len(sources)], jnp.stack(given[len(sources) :])
            results = swiglu_quantize.cast_produced(producer, xs, scales, formats, axes)
            return tuple(
                (codes, None if amax is None else _largest(amax, shards)) for codes, amax in results
            )

        return of_shard

    results: list[str] = []
    for of in axes:
        results += ["mk" if axis == -1 else "km" for axis in sorted(of)]  # as jax.tree has them
        results += [""] if -1 in of else []
    letters = ("mk",) * len(sources) + ("",) * len(scales)
    return _on_mesh(
        kernel, (*sources, *scales), letters, tuple(results), _TILES, sources=len(sources)
    )


def tiles_produced(
    producer: Producer,
    sources: tuple[Float[Array, "M K"], ...],
    fmt: Format,
    rule: ScaleRule,
    axes: tuple[swiglu_quantize.Axes, ...],
    blocks: frozenset[int] = frozenset(),
) -> tuple[dict[int, TileCodes], ...]:
    """`swiglu_quantize.tiles_produced` on a mesh."""

    def of_shard(*sources):
        return swiglu_quantize.tiles_produced(producer, sources, fmt, rule, axes, blocks)

    results: list[str] = []
    for of in axes:
        for axis in sorted(of):  # as jax.tree has them
            results += ["mk", "km"] if axis == -1 else ["km", "mk"]
    letters = ("mk",) * len(sources)
    return _on_mesh(
        lambda shards: of_shard, sources, letters, tuple(results), _TILES, sources=len(sources)
    )


def _summed(
    gemm: Callable[..., jax.Array], out_dtype: Any, shards: Shards
) -> Callable[..., jax.Array]:
    """Returns the GEMM of shards. It sums over the devices of k in float32, then rounds once."""
    if not shards["k"]:
        return functools.partial(gemm, out_dtype=out_dtype)
    part = functools.partial(gemm, out_dtype=jnp.float32)
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
    return _on_mesh(kernel, (a, b, sa, sb), letters, ("mn",), multiples, sources=2)


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
    return _on_mesh(kernel, (a, b, sa, sb), letters, ("mn",), multiples, sources=2)


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
    return _on_mesh(kernel, (a, b, scale), letters, ("mn",), multiples, sources=2)


# Flash attention: b rows, t positions, k key heads, g query heads of each key head, h head size.
# Only rows and key heads are sharded: a shard of any other dimension would have to be all of it.
_QUERIES, _KEYS, _BY_QUERY, _BY_POSITION = "btkgh", "btkh", "bkgt", "bt"


def _attention_on_mesh(
    kernel: Callable[..., Any],
    operands: tuple[jax.Array, ...],
    letters: tuple[str, ...],
    results: tuple[str, ...],
) -> Any:
    """Calls a kernel of flash attention, which takes and gives query heads as one dimension."""
    _, length, _, group, head_dim = operands[0].shape
    multiples = {"b": 1, "k": 1, "t": length, "g": group, "h": head_dim}

    def of_shard(*given):
        merged = []
        for x, of in zip(given, letters, strict=True):
            merged.append(_merge_heads(x, of))
        split = []
        for x, of in zip(kernel(*merged), results, strict=True):
            split.append(_split_heads(x, of, group))
        return tuple(split)

    # The shardings of the first two operands decide: the queries' and the keys'.
    return _on_mesh(lambda shards: of_shard, operands, letters, results, multiples, sources=2)


def _merge_heads(x: jax.Array, letters: str) -> jax.Array:
    if "g" not in letters:
        return x
    at = letters.index("k")
    return x.reshape(*x.shape[:at], -1, *x.shape[at + 2 :])


def _split_heads(x: jax.Array, letters: str, group: int) -> jax.Array:
    if "g" not in letters:
        return x
    at = letters.index("k")
    return x.reshape(*x.shape[:at], -1, group, *x.shape[at + 1 :])


def flash_forward(
    q_BTKGH: Float[Array, "B T K G H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    begin_BT: Int[Array, "B T"],
    scale: float,
) -> tuple[Float[Array, "B T K G H"], Float[Array, "B K G T"]]:
    """`flash_forward.forward` on a mesh, with query heads as [K, G]."""
    return _attention_on_mesh(
        functools.partial(forward.forward, scale=scale), (q_BTKGH, k_BTKH, v_BTKH, begin_BT),
        (_QUERIES, _KEYS, _KEYS, _BY_POSITION), (_QUERIES, _BY_QUERY),
    )  # fmt: skip


def flash_gradient_q(
    q, k, v, y, dy, lse, begin_BT: Int[Array, "B T"], scale: float
) -> tuple[Float[Array, "B T K G H"], Float[Array, "B K G T"]]:
    """`flash_backward.gradient_q` on a mesh, with query heads as [K, G]."""
    return _attention_on_mesh(
        functools.partial(flash_backward.gradient_q, scale=scale), (q, k, v, y, dy, lse, begin_BT),
        (_QUERIES, _KEYS, _KEYS, _QUERIES, _QUERIES, _BY_QUERY, _BY_POSITION),
        (_QUERIES, _BY_QUERY),
    )  # fmt: skip


def flash_gradient_kv(
    q, k, v, dy, lse, delta, end_BT: Int[Array, "B T"], scale: float
) -> tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]]:
    """`flash_backward.gradient_kv` on a mesh, with query heads as [K, G]."""
    return _attention_on_mesh(
        functools.partial(flash_backward.gradient_kv, scale=scale),
        (q, k, v, dy, lse, delta, end_BT),
        (_QUERIES, _KEYS, _KEYS, _QUERIES, _BY_QUERY, _BY_QUERY, _BY_POSITION), (_KEYS, _KEYS),
    )  # fmt: skip
