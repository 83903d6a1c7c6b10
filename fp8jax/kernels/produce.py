"""Quantisers with what produces their source: an elementwise function runs inside the kernel.

Legend: M rows, K columns; a tile is 128 x 128.

SwiGLU and its gradient are the widest arrays of a transformer's layer. Apart, XLA reads gate and
up, writes h = silu(gate) * up, and a quantiser reads h again; in the backward it reads dh, gate and
up, writes two gradients, and quantisers read both. Inside the quantiser h and the gradients never
reach memory: 6 bytes an element are moved instead of 10 forward, 10 instead of 18 backward.

    TMA          sources -> shared memory, 64 rows at a time
    registers    64 x 64 elements of each source -> results, rounded to bfloat16 as if they had been
                 stored, into shared memory where the first sources were
    registers    the results, by rows and by columns, as in quantize.py -> codes, amaxes, scales

Two blocks of threads fit a core, so that one computes while the other's copies are on their way.
For that, results overwrite sources, and one buffer takes the codes of all results in turn. Keeping
every operand in registers instead was tried: three sources of 64 x 128 spill.

Derivatives are written out here: differentiating a kernel is not possible. The tests compare them
with JAX's of the plain function.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from fp8jax.formats import Format
from fp8jax.kernels.mosaic import BLOCK, load, scoped
from fp8jax.kernels.quantize import (
    WGMMA,
    Codes,
    _amax,
    _check,
    _codes,
    _columns,
    _over_tiles,
    _rows,
    _store,
    _store_rows,
    _tile,
)
from fp8jax.scaling import ScaleRule

_HALF = BLOCK // 2  # rows that are copied at a time; rows and columns that are computed at a time
Registers = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Producer:
    """An elementwise function of `sources` arrays with `results` values, in float32."""

    name: str
    sources: int
    results: int
    compute: Callable[..., Registers]


def _sigmoid(x: jax.Array) -> jax.Array:
    return 1.0 / (1.0 + jnp.exp(-x))


def _swiglu(gate: jax.Array, up: jax.Array) -> Registers:
    return (gate * _sigmoid(gate) * up,)


def _swiglu_grad(dh: jax.Array, gate: jax.Array, up: jax.Array) -> Registers:
    """Gradients of gate and of up: silu'(x) = s + x s (1 - s) with s = sigmoid(x)."""
    s = _sigmoid(gate)
    silu = gate * s
    return dh * up * (s + silu * (1.0 - s)), dh * silu


SWIGLU = Producer(name="swiglu", sources=2, results=1, compute=_swiglu)
SWIGLU_GRAD = Producer(name="swiglu_grad", sources=3, results=2, compute=_swiglu_grad)


def _check_sources(producer: Producer, sources: tuple[Array, ...], fmt: Format, rule=None) -> None:
    """Raises ValueError for sources that the kernel does not take, with the values."""
    given = [f"{source.dtype}{source.shape}" for source in sources]
    if len(sources) != producer.sources or len({(s.shape, s.dtype) for s in sources}) != 1:
        raise ValueError(f"{producer.name} takes {producer.sources} arrays of a shape, got {given}")
    if sources[0].dtype != jnp.bfloat16:
        raise ValueError(f"{producer.name} takes bfloat16, got {given}")
    _check(sources[0], fmt, rule)


def _buffers(producer: Producer, dtype: Any) -> dict[str, Any]:
    """Shared memory: tiles for results, in which as many sources arrive; half tiles for the other
    sources; one tile of codes."""
    whole = {f"x{i}": _tile(jnp.bfloat16) for i in range(producer.results)}
    more = range(producer.results, producer.sources)
    halves = {f"x{i}": _tile(jnp.bfloat16, _HALF) for i in more}
    arrivals = plgpu.Barrier(num_arrivals=producer.sources, num_barriers=2)
    return dict(**whole, **halves, codes_s=_tile(dtype), arrived=arrivals)


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


@functools.partial(jax.jit, static_argnames=("producer", "fmt", "transposed"))
def cast_produced(
    producer: Producer,
    sources: tuple[Float[Array, "M K"], ...],
    scales: Float[Array, " R"],
    fmt: Format,
    *,
    transposed: bool = True,
) -> tuple[tuple[Array, Array | None, Array], ...]:
    """What `cast_transpose` gives of each result: codes [M, K], codes [K, M] (None unless
    `transposed`), and float32 max|result|.

    Args:
      producer: what makes the results, R of them.
      sources: bfloat16, whole tiles of 128 x 128.
      scales: float32, one a result.
      fmt: e4m3 or e5m2.

    Raises as `cast_transpose` does.
    """
    _check_sources(producer, sources, fmt)
    if scales.shape != (producer.results,):
        raise ValueError(f"{producer.name} has {producer.results} results, got {scales.shape}")
    (rows, columns), dtype = sources[0].shape, fmt.dtype
    out = [jax.ShapeDtypeStruct((rows // BLOCK, columns // BLOCK), jnp.int32)]
    out += [jax.ShapeDtypeStruct((rows, columns), dtype)]
    out += [jax.ShapeDtypeStruct((columns, rows), dtype)] * transposed

    def tile(at_m, at_k, m, k, *references):
        sources_g, scales_g = references[: producer.sources], references[producer.sources]
        results_g = iter(references[producer.sources + 1 :])

        @scoped(**_buffers(producer, dtype))
        def _(codes_s, **buffers):
            tiles = _produce(producer, [x.at[at_m, at_k] for x in sources_g], buffers)
            for i, x_s in enumerate(tiles):
                reciprocal, numbers = 1.0 / scales_g[i], _rows(x_s)
                next(results_g)[m, k] = _amax(numbers)
                _store_next(
                    codes_s, _codes(numbers, reciprocal, fmt), next(results_g).at[at_m, at_k]
                )
                if transposed:
                    q = _codes(_columns(x_s), reciprocal, fmt)
                    _store_next(codes_s, q, next(results_g).at[at_k, at_m])

    found = _over_tiles(
        (rows, columns), (*sources, scales), out * producer.results, tile, approximate=True
    )
    each = [found[i : i + len(out)] for i in range(0, len(found), len(out))]
    return tuple(
        (codes[0], codes[1] if transposed else None, _as_amax(amax)) for amax, *codes in each
    )


def _as_amax(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(jnp.max(bits), jnp.float32)


def _store_next(codes_s: Any, codes: jax.Array, target: Any) -> None:
    """Stores a tile through a buffer whose last tile may still be on its way."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    _store(codes_s, codes, (codes_s, target))


@functools.partial(jax.jit, static_argnames=("producer", "fmt", "rule", "columns"))
def tiles_produced(
    producer: Producer,
    sources: tuple[Float[Array, "M K"], ...],
    fmt: Format,
    rule: ScaleRule,
    *,
    columns: bool = True,
) -> tuple[tuple[Codes, Codes | None], ...]:
    """What `quantize_tiles` gives of each result; that of columns only if wanted.

    Args:
      producer, sources: as in `cast_produced`.
      fmt, rule: as in `quantize_tiles`.

    Raises as `quantize_tiles` does.
    """
    _check_sources(producer, sources, fmt, rule)
    (m_size, k_size), dtype = sources[0].shape, fmt.dtype

    def results(rows: int, width: int) -> list[Any]:
        scales = jax.ShapeDtypeStruct((width // BLOCK, rows), jnp.float32)
        return [jax.ShapeDtypeStruct((rows, width), dtype), scales]

    out = results(m_size, k_size) + (results(k_size, m_size) if columns else [])

    def tile(at_m, at_k, m, k, *references):
        sources_g, results_g = references[: producer.sources], iter(references[producer.sources :])

        @scoped(scale_s=plgpu.SMEM((BLOCK,), jnp.float32), **_buffers(producer, dtype))
        def _(codes_s, scale_s, **buffers):
            for x_s in _produce(producer, [x.at[at_m, at_k] for x in sources_g], buffers):
                for numbers, rows, width, at in (
                    (_rows, at_m, at_k, k),
                    (_columns, at_k, at_m, m),
                )[: 1 + columns]:
                    codes, scales = (next(results_g) for _ in range(2))
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    _store_rows(
                        numbers(x_s), rule, fmt, (codes_s, codes.at[rows, width]),
                        (scale_s, scales.at[at, rows]),
                    )  # fmt: skip

    found = _over_tiles((m_size, k_size), sources, out * producer.results, tile, approximate=True)
    pairs = [Codes(*found[i : i + 2]) for i in range(0, len(found), 2)]
    if not columns:
        return tuple((rows, None) for rows in pairs)
    return tuple(zip(pairs[::2], pairs[1::2], strict=True))
