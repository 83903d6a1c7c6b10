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
  * Casts with given scales pad shards that are not whole tiles of 128, and cut the codes.
    quantize_blocks casts such shards with XLA, and exchanges amaxes of the blocks that devices
    share. So a weight of 768 rows on four GPUs is gathered as codes, not in float32.
  * For other kernels, such a dimension (or one whose shards are not multiples of what the GEMM
    needs) is all-gathered instead.

`shard_map` was rejected: it needs shardings as arguments, when they have not been propagated yet.
Without a mesh, and on one device, the kernel is called directly.

XLA asks for the function of the shards for each call: for each layer of an unrolled stack anew. JAX
then traces and lowers what it gets. So it gets calls of kernels that were lowered before
(`_lowered`), or a training step would lower 15 kernels 336 times.
"""

import functools
import hashlib
import math
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.config import export_ignore_forward_compatibility
from jax._src.mesh import empty_abstract_mesh, empty_concrete_mesh, use_abstract_mesh
from jax._src.sharding_impls import _internal_use_concrete_mesh
from jax.custom_batching import sequential_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Shaped, UInt32

from fp8jax.device import hardware
from fp8jax.kernels import block_gemm, flash_backward, quantize, rotate, row_gemm, swiglu_quantize
from fp8jax.kernels import flash_forward as forward
from fp8jax.kernels.hopper import BLOCK, pad_to_blocks, stored
from fp8jax.kernels.quantize import TileCodes
from fp8jax.kernels.swiglu import Producer
from fp8jax.numerics.formats import Format, cast_unchecked, rounded
from fp8jax.numerics.scales import ScaleRule

Shards = dict[str, tuple[str, ...]]  # letter -> the mesh axes that it is sharded over
Run = Callable[..., Any]  # run(f, *operands) calls the Hopper kernel f

_TILES = {"m": BLOCK, "k": BLOCK}

# Lowered kernels by the hash of what they compute, as long as a program that calls them is kept.
_lowered: weakref.WeakValueDictionary[bytes, jax.export.Exported] = weakref.WeakValueDictionary()
_lowering = threading.Lock()  # programs are compiled in threads
_MOSAIC = jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")


@functools.cache
def _sources() -> str:
    """Returns a hash of the source files that decide what runs on a shard."""
    package, found = Path(__file__).parents[1], hashlib.sha256(jax.__version__.encode())
    for folder in ("kernels", "numerics"):
        for file in sorted((package / folder).glob("*.py")):
            found.update(hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()


def _marks(call: Callable[..., Any], operands: Any, *rules: Any) -> tuple[np.uint32, ...]:
    """Returns scalars that tell this partitioned kernel from others, in every process.

    JAX's compilation cache compares the texts of programs. In that text a partitioned kernel is
    only the address of a Python object. Python reuses addresses, and another process has others:
    device/xla.py leaves them out. So these scalars are more operands of the kernel. They hash what
    it computes, how it is partitioned, and what neither shows, such as kernels of parts of a sum.
    """
    text = f"{jax.make_jaxpr(call)(*operands)} {rules} {_sources()}"
    return tuple(np.frombuffer(hashlib.sha256(text.encode()).digest()[:8], np.uint32))


def _directly(f: Callable[..., Any], *operands: Any) -> Any:
    return f(*operands)


def _lowered_once(f: Callable[..., Any], shapes: list[Any]) -> jax.export.Exported | None:
    """Returns f, lowered, for operands of these shapes; None if it has effects, as interpreters do.

    Equal kernels of equal shapes are lowered once in a process, while a program has them.
    """
    closed = jax.make_jaxpr(f)(*shapes)
    if closed.effects:
        return None
    text = f"{closed} {[np.asarray(x).tobytes() for x in closed.consts]} {hardware.device_kind()}"
    key = hashlib.sha256(text.encode()).digest()
    platform = "cuda" if hardware.platform() == "gpu" else hardware.platform()
    with _lowering:
        found = _lowered[key] if key in _lowered else None
        if found is None:
            with (
                # Nothing is written to a file: the kernel's text is the one of this version of JAX.
                export_ignore_forward_compatibility(True),
                # Under the mesh of `jax.set_mesh`, JAX would say how its scalars are sharded, which
                # means nothing where XLA has partitioned the program already.
                _internal_use_concrete_mesh(empty_concrete_mesh),
                use_abstract_mesh(empty_abstract_mesh),
            ):
                export = jax.export.export(
                    jax.jit(f), platforms=[platform], disabled_checks=[_MOSAIC]
                )
                found = _lowered[key] = export(*shapes)
    return found


def _run_lowered(known: dict[Any, Any], f: Callable[..., Any], *operands: Any) -> Any:
    """Calls f, lowered; `known` keeps that for each shape of the operands."""
    shapes = tuple((x.shape, x.dtype) for x in operands)
    if shapes not in known:
        known[shapes] = _lowered_once(f, [jax.ShapeDtypeStruct(*shape) for shape in shapes])
    lowered = known[shapes]
    return f(*operands) if lowered is None else lowered.call(*operands)


def _mesh_axes(array: Any, dimension: int) -> tuple[str, ...]:
    """Returns the mesh axes that a dimension of a ShapeDtypeStruct is sharded over."""
    entry = array.sharding.spec[dimension]
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _devices(mesh: Any, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _sharded_over(
    mesh: Any, sources: list[tuple[str, Any]], multiples: dict[str, int], ragged: bool
) -> Shards:
    """Decides which mesh axes each letter is sharded over.

    A letter is not sharded if the sources disagree, if its shards would not be multiples of its
    number, or if a letter before it is already sharded over one of its mesh axes.

    Args:
      mesh: the mesh.
      sources: (letters, ShapeDtypeStruct) of each source.
      multiples: letter -> the number that the size of a shard must be a multiple of.
      ragged: whether shards of any equal sizes are taken, too.
    """
    shards: Shards = {}
    for letter, multiple in multiples.items():
        places = [(array, of.index(letter)) for of, array in sources if letter in of]
        first, dimension = places[0]
        axes = _mesh_axes(first, dimension)
        multiple = 1 if ragged else multiple
        fits = first.shape[dimension] % (multiple * _devices(mesh, axes)) == 0
        agree = all(_mesh_axes(*place) == axes for place in places)
        taken = any(set(axes) & set(others) for others in shards.values())
        shards[letter] = axes if fits and agree and not taken else ()
    return shards


def _sharding(mesh: Any, shards: Shards, letters: str, array: Any) -> NamedSharding:
    """Returns the sharding of an operand or result. Dimensions that do not divide are whole."""
    spec = []
    for letter, size in zip(letters, array.shape, strict=True):
        axes = shards[letter]
        spec.append(axes if size % _devices(mesh, axes) == 0 else ())
    return NamedSharding(mesh, PartitionSpec(*spec))


def _on_mesh(
    kernel: Callable[[Shards, Run], Callable[..., Any]],
    operands: tuple[jax.Array, ...],
    letters: tuple[str, ...],
    results: tuple[str, ...],
    multiples: dict[str, int],
    sources: int = 1,
    ragged: bool = False,
) -> Any:
    """Calls a kernel on the operands or, on a mesh, on their shards.

    Args:
      kernel: kernel(shards, run) returns the function of the operands' shards, which calls the
        Hopper kernel once, through run(f, *operands).
      operands: the arrays.
      letters: the letters of each operand; "" is a scalar.
      results: the letters of each leaf of the result.
      multiples: letter -> the number that the size of a shard must be a multiple of. A mesh axis
        goes to the first letter that it shards.
      sources: the shardings of the first so many operands decide; the other operands follow.
      ragged: whether the function takes shards that are not such multiples. Then a dimension of a
        result, such as blocks of rows, is whole on each device if it does not divide among them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    call = kernel(dict.fromkeys(multiples, ()), _directly)
    if mesh.empty or mesh.size == 1:
        return call(*operands)
    marks = _marks(call, operands, letters, results, multiples, sources, ragged)
    letters = (*letters, *[""] * len(marks))
    lowered: dict[Any, dict[Any, Any]] = {}  # for each way to shard it

    def partition(mesh, given, wanted):
        named = list(zip(letters, given, strict=True))
        shards = _sharded_over(mesh, named[:sources], multiples, ragged)
        leaves, tree = jax.tree.flatten(wanted)
        out = [_sharding(mesh, shards, *each) for each in zip(results, leaves, strict=True)]
        arguments = tuple(_sharding(mesh, shards, *each) for each in named)
        known = lowered.setdefault(tuple(shards.items()), {})
        of_shards = kernel(shards, functools.partial(_run_lowered, known))

        def unmarked(*given):
            return of_shards(*given[: -len(marks)])

        return mesh, unmarked, jax.tree.unflatten(tree, out), arguments

    partitioned = custom_partitioning(lambda *given: call(*given[: -len(marks)]))
    partitioned.def_partition(
        partition,
        sharding_rule=" -> ".join(", ".join(map(" ".join, of)) for of in (letters, results)),
        reduction_factors=tuple(letter for letter in multiples if letter not in "".join(results)),
    )
    # vmap runs the kernel for one element after another. That is slow, but vmap is only used to
    # initialize a model's layers, where the results are dropped.
    return sequential_vmap(lambda *given: partitioned(*given))(*operands, *marks)


def _each_shard(f: Callable[..., Any]) -> Callable[[Shards, Run], Callable[..., Any]]:
    """Returns the kernel that calls f on each shard, without a word to other devices."""
    return lambda shards, run: functools.partial(run, f)


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
    return _on_mesh(kernel, (x, scale), ("mk", ""), (*results, ""), _TILES, ragged=True)


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
    return _on_mesh(_each_shard(kernel), (x,), ("mk",), tuple(results), _TILES)


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
    return _on_mesh(kernel, (x,), ("mk",), results, _TILES, ragged=True)


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

    return _on_mesh(kernel, tuple(operands), tuple(letters), tuple(results), _TILES, ragged=True)


def rotated_amax(x: Float[Array, "M K"], size: int) -> Float[Array, "blocks K"]:
    """`rotate.rotated_amax` on a mesh."""
    kernel = functools.partial(rotate.rotated_amax, size=size)
    return _on_mesh(_each_shard(kernel), (x,), ("mk",), ("mk",), _TILES)


def rotated_codes(
    x: Float[Array, "M K"],
    reciprocal: Float[Array, "blocks K"],
    fmt: Format,
    size: int,
    words: tuple[UInt32[Array, ""], UInt32[Array, ""]] | None = None,
) -> Shaped[Array, "M K"]:
    """`rotate.rotated_codes` on a mesh. Draws are those of the whole array's places."""

    def cast(x, reciprocal, *words, columns=x.shape[1]):
        return rotate.rotated_codes(x, reciprocal, fmt, size, words[0] if words else None, columns)

    def kernel(shards: Shards, run: Run):
        def of_shard(x, reciprocal, *words):
            begins = []
            for letter, size_of_shard in zip("mk", x.shape, strict=True):
                at = lax.axis_index(shards[letter]) if shards[letter] else 0
                begins.append(jnp.asarray(at * size_of_shard, jnp.uint32))
            given = (jnp.stack([*words, *begins]),) if words else ()
            return run(cast, x, reciprocal, *given)

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

    def cast(*given):
        return swiglu_quantize.cast_produced(producer, given[:-1], given[-1], formats, axes)

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
    return _on_mesh(
        kernel, (*sources, *scales), letters, tuple(results), _TILES, len(sources), ragged=True
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

    def kernel(*sources):
        return swiglu_quantize.tiles_produced(producer, sources, fmt, rule, axes, blocks)

    results: list[str] = []
    for of in axes:
        for axis in sorted(of):  # as jax.tree has them
            results += ["mk", "km"] if axis == -1 else ["km", "mk"]
    letters = ("mk",) * len(sources)
    return _on_mesh(
        _each_shard(kernel), sources, letters, tuple(results), _TILES, sources=len(sources)
    )


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

    def merging(*given):
        merged = []
        for x, of in zip(given, letters, strict=True):
            merged.append(_merge_heads(x, of))
        split = []
        for x, of in zip(kernel(*merged), results, strict=True):
            split.append(_split_heads(x, of, group))
        return tuple(split)

    # The shardings of the first two operands decide: the queries' and the keys'.
    return _on_mesh(_each_shard(merging), operands, letters, results, multiples, sources=2)


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
        functools.partial(forward.forward, scale=scale),
        (q_BTKGH, k_BTKH, v_BTKH, begin_BT),
        (_QUERIES, _KEYS, _KEYS, _BY_POSITION),
        (_QUERIES, _BY_QUERY),
    )


def flash_gradient_q(
    q, k, v, y, dy, lse, begin_BT: Int[Array, "B T"], scale: float
) -> tuple[Float[Array, "B T K G H"], Float[Array, "B K G T"]]:
    """`flash_backward.gradient_q` on a mesh, with query heads as [K, G]."""
    return _attention_on_mesh(
        functools.partial(flash_backward.gradient_q, scale=scale),
        (q, k, v, y, dy, lse, begin_BT),
        (_QUERIES, _KEYS, _KEYS, _QUERIES, _QUERIES, _BY_QUERY, _BY_POSITION),
        (_QUERIES, _BY_QUERY),
    )


def flash_gradient_kv(
    q, k, v, dy, lse, delta, end_BT: Int[Array, "B T"], scale: float
) -> tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]]:
    """`flash_backward.gradient_kv` on a mesh, with query heads as [K, G]."""
    return _attention_on_mesh(
        functools.partial(flash_backward.gradient_kv, scale=scale),
        (q, k, v, dy, lse, delta, end_BT),
        (_QUERIES, _KEYS, _KEYS, _QUERIES, _BY_QUERY, _BY_QUERY, _BY_POSITION),
        (_KEYS, _KEYS),
    )
