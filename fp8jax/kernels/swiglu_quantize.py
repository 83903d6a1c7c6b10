"""Quantizers with what produces their source: an elementwise function runs inside the kernel.

Legend: M rows, K columns; a tile is 128 x 128.

SwiGLU and its gradient are the widest arrays of a transformer's layer. Apart, XLA reads gate and
up, writes h = silu(gate) * up, and a quantizer reads h again; in the backward it reads dh, gate and
up, writes two gradients, and quantizers read both. Inside the quantizer h and the gradients never
reach memory: 5 bytes an element are moved instead of 10 forward, 11 instead of 18 backward. The
forward needs h's codes by rows, the weight gradient those by columns: they are made in the
backward, where h comes with its gradients anyway, so that no code of h is kept in between.

    TMA          sources -> shared memory, 64 rows at a time
    registers    64 x 64 elements of each source -> results, rounded to bfloat16 as if they had been
                 stored, into shared memory where the first sources were
    registers    the results, by rows and by columns, as in quantize.py -> codes, amaxes, scales

Two blocks of threads fit a core, so that one computes while the other's copies are on their way.
For that, results overwrite sources, and half a tile takes all codes in turn. Keeping every operand
in registers instead was tried: three sources of 64 x 128 spill.

Derivatives are written out here: differentiating a kernel is not possible. The tests compare them
with JAX's of the plain function.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from fp8jax.kernels.hopper import BLOCK, load, scoped
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
)
from fp8jax.kernels.swiglu import Producer
from fp8jax.numerics.formats import Format
from fp8jax.numerics.scales import ScaleRule

_HALF = BLOCK // 2  # rows that are copied at a time; rows and columns that are computed at a time


def _check_sources(producer: Producer, sources: tuple[Array, ...], fmt: Format, rule=None) -> None:
    """Raises ValueError for sources that the kernel does not take, with the values."""
    given = [f"{source.dtype}{source.shape}" for source in sources]
    if len(sources) != producer.sources or len({(s.shape, s.dtype) for s in sources}) != 1:
        raise ValueError(f"{producer.name} takes {producer.sources} arrays of a shape, got {given}")
    if sources[0].dtype != jnp.bfloat16:
        raise ValueError(f"{producer.name} takes bfloat16, got {given}")
    _check(sources[0], fmt, rule)


def _buffers(producer: Producer, formats: tuple[Format, ...]) -> dict[str, Any]:
    """Shared memory: tiles for results, in which as many sources arrive; half tiles for the other
    sources; half a tile of codes, in the formats that there are."""
    codes = plgpu.RefUnion(*(_tile(fmt.dtype, _HALF) for fmt in dict.fromkeys(formats)))
    whole = {f"x{i}": _tile(jnp.bfloat16) for i in range(producer.results)}
    more = range(producer.results, producer.sources)
    halves = {f"x{i}": _tile(jnp.bfloat16, _HALF) for i in more}
    arrivals = plgpu.Barrier(num_arrivals=producer.sources, num_barriers=2)
    return dict(**whole, **halves, codes_s=codes, arrived=arrivals)


def _produce(producer: Producer, sources: list[Any], buffers: dict[str, Any]) -> list[Any]:
    """The references of the results of a tile, bfloat16 in shared memory, from its `sources`."""
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
        whole = pl.ds(half * _HALF, _HALF)
        for begin in range(0, BLOCK, _HALF):
            columns = pl.ds(begin, _HALF)
            places = [
                x.at[whole, columns] if i < producer.results else x.at[:, columns]
                for i, x in enumerate(x_s)
            ]
            numbers = producer.compute(*(load(x, WGMMA).astype(jnp.float32) for x in places))
            for place, result in zip(places, numbers, strict=False):
                place[...] = result.astype(jnp.bfloat16)
        plgpu.commit_smem()  # also: everybody has read the half tiles
        if half == 0:
            for i in range(producer.results, producer.sources):
                copy(i, 1)
    return x_s[: producer.results]


Axes = tuple[int, ...]  # of one result: -1 for codes [M, K], -2 for codes [K, M], or both


@functools.partial(jax.jit, static_argnames=("producer", "formats", "axes"))
def cast_produced(
    producer: Producer,
    sources: tuple[Float[Array, "M K"], ...],
    scales: Float[Array, " R"],
    formats: tuple[Format, ...],
    axes: tuple[Axes, ...],
) -> tuple[tuple[dict[int, Array], Array | None], ...]:
    """What `cast_transpose` gives of each result: its codes by axis and, where those of rows are
    wanted, float32 max|result|.

    Args:
      producer: what makes the results, R of them.
      sources: bfloat16, whole tiles of 128 x 128.
      scales: float32, one a result.
      formats: e4m3 or e5m2, of each result.
      axes: which codes of each result are wanted.

    Raises as `cast_transpose` does.
    """
    for fmt in formats:
        _check_sources(producer, sources, fmt)
    if not scales.shape == (len(formats),) == (len(axes),) == (producer.results,):
        given = f"{scales.shape} scales, {len(formats)} formats, {len(axes)} axes"
        raise ValueError(f"{producer.name} has {producer.results} results, got {given}")
    size, out = sources[0].shape, []
    for fmt, of in zip(formats, axes, strict=True):
        out += [jax.ShapeDtypeStruct(size if axis == -1 else size[::-1], fmt.dtype) for axis in of]
        out += [jax.ShapeDtypeStruct((size[0] // BLOCK, size[1] // BLOCK), jnp.int32)] * (-1 in of)

    def tile(at_m, at_k, m, k, *references):
        sources_g, scales_g = references[: producer.sources], references[producer.sources]
        results_g = iter(references[producer.sources + 1 :])

        @scoped(**_buffers(producer, formats))
        def _(codes_s, **buffers):
            codes_of = dict(zip(dict.fromkeys(formats), codes_s, strict=True))
            tiles = _produce(producer, [x.at[at_m, at_k] for x in sources_g], buffers)
            for i, (x_s, fmt, of) in enumerate(zip(tiles, formats, axes, strict=True)):
                reciprocal, amaxes = 1.0 / scales_g[i], []
                for axis in of:
                    codes_g = next(results_g).at[_position(axis, at_m, at_k)]
                    for rows, numbers in _halves(x_s, axis):
                        q = _codes(numbers, reciprocal, fmt)
                        _store_next(codes_of[fmt], q, codes_g.at[rows])
                        amaxes += [_amax(numbers)] if axis == -1 else []
                if amaxes:
                    next(results_g)[m, k] = functools.reduce(jnp.maximum, amaxes)

    found = iter(_over_tiles(size, (*sources, scales), out, tile, approximate=True))
    return tuple(
        ({axis: next(found) for axis in of}, _as_amax(next(found)) if -1 in of else None)
        for of in axes
    )


def _position(axis: int, at_m: Any, at_k: Any) -> tuple[Any, Any]:
    return (at_m, at_k) if axis == -1 else (at_k, at_m)


def _halves(x_s: Any, axis: int) -> Iterator[tuple[Any, jax.Array]]:
    """64 rows of a tile, or of its transpose, and the other 64: float32 registers."""
    for begin in (0, _HALF):
        rows = pl.ds(begin, _HALF)
        part = x_s.at[rows] if axis == -1 else x_s.at[:, rows].transpose((1, 0))
        yield rows, load(part, WGMMA).astype(jnp.float32)


def _store_next(codes_s: Any, codes: jax.Array, target: Any) -> None:
    """Stores through a buffer whose last contents may still be on their way."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    _store(codes_s, codes, (codes_s, target))


@functools.partial(jax.jit, static_argnames=("producer", "fmt", "rule", "axes"))
def tiles_produced(
    producer: Producer,
    sources: tuple[Float[Array, "M K"], ...],
    fmt: Format,
    rule: ScaleRule,
    axes: tuple[Axes, ...],
) -> tuple[dict[int, TileCodes], ...]:
    """What `quantize_tiles` gives of each result, by axis.

    Args:
      producer, sources, axes: as in `cast_produced`.
      fmt, rule: as in `quantize_tiles`.

    Raises as `quantize_tiles` does.
    """
    _check_sources(producer, sources, fmt, rule)
    if len(axes) != producer.results:
        raise ValueError(f"{producer.name} has {producer.results} results, got {axes=}")
    size, out = sources[0].shape, []
    for axis in itertools.chain(*axes):
        rows, width = size if axis == -1 else size[::-1]
        out.append(jax.ShapeDtypeStruct((rows, width), fmt.dtype))
        out.append(jax.ShapeDtypeStruct((width // BLOCK, rows), jnp.float32))

    def tile(at_m, at_k, m, k, *references):
        sources_g, results_g = references[: producer.sources], iter(references[producer.sources :])

        @scoped(scale_s=plgpu.SMEM((BLOCK,), jnp.float32), **_buffers(producer, (fmt,)))
        def _(codes_s, scale_s, **buffers):
            tiles = _produce(producer, [x.at[at_m, at_k] for x in sources_g], buffers)
            for x_s, axis in ((x, axis) for x, of in zip(tiles, axes, strict=True) for axis in of):
                rows, width = _position(axis, at_m, at_k)
                codes_g, scales_g = next(results_g).at[rows, width], next(results_g)
                for half, numbers in _halves(x_s, axis):
                    bits = jnp.max(_magnitude(numbers), axis=1)
                    scale, reciprocal = _from_amax(bits, rule, fmt)
                    spread = lax.broadcast_in_dim(reciprocal, numbers.shape, (0,))
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    scale_s[half] = scale
                    _store(codes_s[0], _codes(numbers, spread, fmt), (codes_s[0], codes_g.at[half]))
                plgpu.copy_smem_to_gmem(scale_s, scales_g.at[k if axis == -1 else m, rows])

    found = iter(_over_tiles(size, sources, out, tile, approximate=True))
    return tuple({axis: TileCodes(next(found), next(found)) for axis in of} for of in axes)
