"""Kernels that compute SwiGLU or its gradient and quantize the results, in one pass.

Legend: M rows, K columns; a tile is 128 x 128.

SwiGLU and its gradient have the widest arrays of a transformer layer. Without these kernels XLA
reads gate and up and writes h = silu(gate) * up, and a quantization kernel reads h again. In the
backward XLA reads dh, gate and up and writes two gradients, and quantization kernels read both.
Here h and the gradients never reach global memory: the kernels move 5 instead of 10 bytes per
element in the forward, and 11 instead of 18 in the backward.

The forward GEMM needs the codes of h by rows; its weight gradient needs those by columns. The
backward computes the latter, because it computes h together with the gradients anyway. So no codes
of h are saved for the backward.

    TMA          sources -> shared memory, 64 rows at a time
    registers    64 x 64 elements of each source -> results, rounded to bfloat16 like arrays that
                 are written to memory; they overwrite the first sources in shared memory
    registers    the results, by rows and by columns, as in quantize.py -> codes, amaxes, scales

Two thread blocks fit an SM, so that one computes while the other waits for its copies. To make room
for two, results overwrite sources, and all codes go through one buffer of half a tile. An attempt
to hold all operands in registers failed: three sources of 64 x 128 spill.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from fp8jax.kernels.hopper import BLOCK, load, scoped, stored
from fp8jax.kernels.quantize import (
    WGMMA,
    TileCodes,
    _amax,
    _as_amax,
    _check,
    _codes,
    _from_amax,
    _magnitude,
    _over_tiles,
    _store,
    _tile,
    _tile_results,
)
from fp8jax.kernels.swiglu import Producer
from fp8jax.numerics.formats import Format
from fp8jax.numerics.scales import ScaleRule

_HALF = BLOCK // 2  # copies have so many rows; computations so many rows and columns

Axes = tuple[int, ...]  # the codes of one result: -1 for codes [M, K], -2 for [K, M], or both


def _check_sources(producer: Producer, sources: tuple[Array, ...], fmt: Format, rule=None) -> None:
    """Raises ValueError for sources that the kernel does not support."""
    given = [f"{source.dtype}{source.shape}" for source in sources]
    if len(sources) != producer.sources or len({(s.shape, s.dtype) for s in sources}) != 1:
        raise ValueError(
            f"{producer.name} needs {producer.sources} arrays of equal shape and dtype, got {given}"
        )
    if sources[0].dtype != jnp.bfloat16:
        raise ValueError(f"{producer.name} needs bfloat16 arrays, got {given}")
    _check(sources[0], fmt, rule)


def _buffers(producer: Producer, formats: tuple[Format, ...]) -> dict[str, Any]:
    """Allocates the shared memory of a tile.

    The first sources arrive in the tiles of the results. The other sources get half a tile each,
    since only 64 rows of them are needed at a time. Codes get half a tile, for any of the formats.
    """
    codes = plgpu.RefUnion(*(_tile(stored(fmt), _HALF) for fmt in dict.fromkeys(formats)))
    whole = {f"x{i}": _tile(jnp.bfloat16) for i in range(producer.results)}
    more = range(producer.results, producer.sources)
    halves = {f"x{i}": _tile(jnp.bfloat16, _HALF) for i in more}
    arrivals = plgpu.Barrier(num_arrivals=producer.sources, num_barriers=2)
    return dict(**whole, **halves, codes_s=codes, arrived=arrivals)


def _produce(producer: Producer, sources: list[Any], buffers: dict[str, Any]) -> list[Any]:
    """Computes the results of a tile, and returns references to them: bfloat16 in shared memory.

    Args:
      producer: the function.
      sources: references to the tile of each source in global memory.
      buffers: the memory that `_buffers` allocated, without that of the codes.
    """
    x_s = [buffers[f"x{i}"] for i in range(producer.sources)]
    arrived = buffers["arrived"]

    def copy(i: int, half: int) -> None:
        rows = pl.ds(half * _HALF, _HALF)
        target = x_s[i].at[rows] if i < producer.results else x_s[i]
        plgpu.copy_gmem_to_smem(sources[i].at[rows], target, arrived.at[half])

    for i in range(producer.sources):
        copy(i, 0)
    for i in range(producer.results):
        copy(i, 1)
    for half in range(2):
        plgpu.barrier_wait(arrived.at[half])
        rows = pl.ds(half * _HALF, _HALF)
        for begin in range(0, BLOCK, _HALF):
            columns = pl.ds(begin, _HALF)
            parts = []
            for i, x in enumerate(x_s):
                parts.append(x.at[rows, columns] if i < producer.results else x.at[:, columns])
            numbers = producer.compute(*(load(x, WGMMA).astype(jnp.float32) for x in parts))
            for part, result in zip(parts, numbers, strict=False):  # the first sources
                part[...] = result.astype(jnp.bfloat16)
        plgpu.commit_smem()  # also waits until all threads have read the half tiles
        if half == 0:
            for i in range(producer.results, producer.sources):
                copy(i, 1)
    return x_s[: producer.results]


@functools.partial(jax.jit, static_argnames=("producer", "formats", "axes"))
def cast_produced(
    producer: Producer,
    sources: tuple[Float[Array, "M K"], ...],
    scales: Float[Array, " R"],
    formats: tuple[Format, ...],
    axes: tuple[Axes, ...],
) -> tuple[tuple[dict[int, Array], Array | None], ...]:
    """Computes the R results of `producer`, and quantizes each as `cast_transpose` does.

    Args:
      producer: the function.
      sources: its arguments: bfloat16; M and K are multiples of 128.
      scales: float32, the scale of each result.
      formats: e4m3 or e5m2, for each result.
      axes: which codes to compute of each result.

    Returns:
      For each result a tuple (axis -> codes, float32 max|result|). The amax is None if the codes
      of rows (axis -1) are not computed.

    Raises:
      ValueError, NotImplementedError: as `cast_transpose`.
    """
    for fmt in formats:
        _check_sources(producer, sources, fmt)
    if not scales.shape == (len(formats),) == (len(axes),) == (producer.results,):
        given = f"{scales.shape} scales, {len(formats)} formats, {len(axes)} axes"
        raise ValueError(f"{producer.name} has {producer.results} results, got {given}")
    size = sources[0].shape

    def tile(at_m, at_k, m, k, *references):
        sources_g, scales_g = references[: producer.sources], references[producer.sources]
        results_g = iter(references[producer.sources + 1 :])

        @scoped(**_buffers(producer, formats))
        def _(codes_s, **buffers):
            codes_of = dict(zip(dict.fromkeys(formats), codes_s, strict=True))
            results_s = _produce(producer, [x.at[at_m, at_k] for x in sources_g], buffers)
            for i, (x_s, fmt, of) in enumerate(zip(results_s, formats, axes, strict=True)):
                reciprocal, amaxes = 1.0 / scales_g[i], []
                for axis in of:
                    codes_g = next(results_g).at[_position(axis, at_m, at_k)]
                    for rows, numbers in _halves(x_s, axis):
                        q = _codes(numbers, reciprocal, fmt)
                        _store_next(codes_of[fmt], q, codes_g.at[rows])
                        if axis == -1:
                            amaxes.append(_amax(numbers))
                if amaxes:
                    next(results_g)[m, k] = functools.reduce(jnp.maximum, amaxes)

    out = _cast_results(size, formats, axes)
    arrays = iter(_over_tiles(size, (*sources, scales), out, tile, approximate=True))
    results = []
    for of in axes:
        codes = {axis: next(arrays) for axis in of}
        results.append((codes, _as_amax(next(arrays)) if -1 in of else None))
    return tuple(results)


def _cast_results(
    size: tuple[int, ...], formats: tuple[Format, ...], axes: tuple[Axes, ...]
) -> list[Any]:
    """Returns the ShapeDtypeStructs of the codes of each result, and of its tiles' amaxes."""
    out = []
    for fmt, of in zip(formats, axes, strict=True):
        for axis in of:
            out.append(jax.ShapeDtypeStruct(size if axis == -1 else size[::-1], stored(fmt)))
        if -1 in of:
            out.append(jax.ShapeDtypeStruct((size[0] // BLOCK, size[1] // BLOCK), jnp.int32))
    return out


def _position(axis: int, at_m: Any, at_k: Any) -> tuple[Any, Any]:
    """Returns where a tile's codes lie in codes [M, K] (axis -1) or [K, M] (axis -2)."""
    return (at_m, at_k) if axis == -1 else (at_k, at_m)


def _halves(x_s: Any, axis: int) -> Iterator[tuple[Any, jax.Array]]:
    """Yields (rows, float32 registers) of each half of a tile, or of its transpose (axis -2)."""
    for begin in (0, _HALF):
        rows = pl.ds(begin, _HALF)
        part = x_s.at[rows] if axis == -1 else x_s.at[:, rows].transpose((1, 0))
        yield rows, load(part, WGMMA).astype(jnp.float32)


def _store_next(codes_s: Any, codes: jax.Array, target: Any) -> None:
    """Stores codes through a buffer, after the last copy from that buffer has finished."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    _store(codes_s, codes, (codes_s, target))


def _store_block(x_s: Any, codes_s: Any, codes_g: Any, rule: ScaleRule, fmt: Format) -> jax.Array:
    """Stores the codes of a tile's transpose, with one scale; returns the scale."""
    amaxes = [_amax(numbers) for _, numbers in _halves(x_s, -2)]
    scale, reciprocal = _from_amax(jnp.maximum(*amaxes), rule, fmt)
    for half, numbers in _halves(x_s, -2):
        _store_next(codes_s, _codes(numbers, reciprocal, fmt), codes_g.at[half])
    return scale


def _store_tiles(
    x_s: Any, axis: int, codes_s: Any, scale_s: Any, codes_g: Any, rule: ScaleRule, fmt: Format
) -> None:
    """Stores the codes of a tile or of its transpose; leaves a scale for each row in scale_s."""
    for half, numbers in _halves(x_s, axis):
        bits = jnp.max(_magnitude(numbers), axis=1)
        scale, reciprocal = _from_amax(bits, rule, fmt)
        spread = lax.broadcast_in_dim(reciprocal, numbers.shape, (0,))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        scale_s[half] = scale
        _store(codes_s, _codes(numbers, spread, fmt), (codes_s, codes_g.at[half]))


def _produced_results(
    size: tuple[int, ...], dtype: Any, axes: tuple[Axes, ...], blocks: frozenset[int]
) -> list[Any]:
    """Returns the ShapeDtypeStructs of the codes and scales of each result."""
    out = []
    for i, of in enumerate(axes):
        for axis in of:
            out += _tile_results(size if axis == -1 else size[::-1], dtype)
            if axis == -2 and i in blocks:
                of_blocks = size[0] // BLOCK, size[1] // BLOCK
                out[-1] = jax.ShapeDtypeStruct(of_blocks, jnp.float32)
    return out


@functools.partial(jax.jit, static_argnames=("producer", "fmt", "rule", "axes", "blocks"))
def tiles_produced(
    producer: Producer,
    sources: tuple[Float[Array, "M K"], ...],
    fmt: Format,
    rule: ScaleRule,
    axes: tuple[Axes, ...],
    blocks: frozenset[int] = frozenset(),
) -> tuple[dict[int, TileCodes], ...]:
    """Computes the results of `producer`, and quantizes each as `quantize_tiles` does.

    Args:
      producer, sources, axes: as in `cast_produced`.
      fmt, rule: as in `quantize_tiles`.
      blocks: numbers of results whose codes by columns are those of `quantize_blocks` instead, with
        one scale for each 128 x 128.

    Returns:
      For each result a dict: axis -> its codes and scales.

    Raises:
      ValueError, NotImplementedError: as `quantize_tiles`.
    """
    _check_sources(producer, sources, fmt, rule)
    if len(axes) != producer.results:
        raise ValueError(f"{producer.name} has {producer.results} results, got {axes=}")
    size = sources[0].shape

    def tile(at_m, at_k, m, k, *references):
        sources_g, results_g = references[: producer.sources], iter(references[producer.sources :])

        @scoped(scale_s=plgpu.SMEM((BLOCK,), jnp.float32), **_buffers(producer, (fmt,)))
        def _(codes_s, scale_s, **buffers):
            results_s = _produce(producer, [x.at[at_m, at_k] for x in sources_g], buffers)
            for i, (x_s, of) in enumerate(zip(results_s, axes, strict=True)):
                for axis in of:
                    rows, columns = _position(axis, at_m, at_k)
                    codes_g, scales_g = next(results_g).at[rows, columns], next(results_g)
                    if axis == -2 and i in blocks:
                        scales_g[m, k] = _store_block(x_s, codes_s[0], codes_g, rule, fmt)
                        continue
                    _store_tiles(x_s, axis, codes_s[0], scale_s, codes_g, rule, fmt)
                    plgpu.copy_smem_to_gmem(scale_s, scales_g.at[k if axis == -1 else m, rows])

    out = _produced_results(size, stored(fmt), axes, blocks)
    arrays = iter(_over_tiles(size, sources, out, tile, approximate=True))
    results = []
    for of in axes:
        results.append({axis: TileCodes(next(arrays), next(arrays)) for axis in of})
    return tuple(results)
