"""How an operand is quantised and how two quantised operands are multiplied, on which device.

A backend has two functions. `quantize` turns one array into the codes that its products ask for,
each a `Request`: a cast, and the axis that will be contracted. `matmul` multiplies two operands.

    emulated   quantises, dequantises and multiplies exactly, on every device and for every recipe:
               it defines what a recipe means
    xla        float8 codes into `lax.dot_general`, scales multiplied afterwards; on Blackwell,
               MXFP8 and NVFP4 codes with their scales into `jax.nn.scaled_matmul`
    pallas     Hopper: the kernels of kernels/ quantise for both products of an operand in one pass,
               codes with the contracted axis last. Scales of the whole tensor are multiplied as in
               `xla`, those of rows and of 128 elements inside kernels/row_gemm.py and block_gemm.py

The spelling that suggests itself, dequantise and then multiply, was rejected for `xla`: where XLA
does not recognise the pattern it runs a BF16 GEMM, and on a GPU even drops the rounding, without a
word.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from absl import logging
from jax import lax

from fp8jax.device import hardware
from fp8jax.device.hardware import Device
from fp8jax.kernels import hopper
from fp8jax.kernels.blackwell import scaled_matmul
from fp8jax.kernels.hopper import pad_to_blocks
from fp8jax.kernels.partition import (
    block_scaled_matmul,
    cast_rows_columns,
    cast_transpose,
    quantize_blocks,
    quantize_tiles,
    row_scaled_matmul,
)
from fp8jax.kernels.swiglu_quantize import Producer, cast_produced, tiles_produced
from fp8jax.lookup import lookup
from fp8jax.numerics.recipe import Cast, Recipe
from fp8jax.numerics.scaling import (
    BLOCK128,
    E8M0,
    ROW,
    TENSOR,
    TILE128,
    Fp32,
    NvFp4,
    Pow2,
    Quantized,
    dequantize,
    hadamard,
    quantize,
    tensor_amax,
    tile_amax,
)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("q",),
    meta_fields=("cast", "axis", "rows"),
)
@dataclasses.dataclass(frozen=True)
class Coded:
    """A quantised operand.

    Attributes:
      q: codes and scales.
      cast: that made them.
      axis: of `q.values`, -1 or -2, that is contracted.
      rows: along the axis that is not contracted, without what was filled up to whole blocks; None
        where nothing was.
    """

    q: Quantized
    cast: Cast
    axis: int
    rows: int | None = None


@functools.partial(jax.tree_util.register_dataclass, data_fields=("x",), meta_fields=("axis",))
@dataclasses.dataclass(frozen=True)
class Plain:
    """An operand left in high precision, and the axis, -1 or -2, that is contracted."""

    x: jax.Array
    axis: int


Operand = Coded | Plain


class Request(NamedTuple):
    """What a product asks of an operand [..., rows, columns].

    Attributes:
      cast: how.
      axis: -1 or -2, the one that is contracted.
      amax: where the scale comes from instead of the array itself, or None.
      key: for stochastic rounding, else None.
    """

    cast: Cast
    axis: int
    amax: jax.Array | None
    key: jax.Array | None


Quantiser = Callable[[jax.Array, tuple[Request, ...]], tuple[tuple[Coded, ...], jax.Array | None]]


# Quantising ---------------------------------------------------------------------------------------


def _same_codes(one: Request, other: Request) -> bool:
    """Whether two casts of an array for different axes give one and the same."""
    cast = one.cast
    whole = cast.tile == TENSOR and cast.rounding == "nearest" and cast.hadamard == 1
    return whole and cast == other.cast


def quantize_each(
    x: jax.Array, requests: tuple[Request, ...]
) -> tuple[tuple[Coded, ...], jax.Array | None]:
    """`x` as each request has it, by `scaling.quantize`; equal ones once. No amax comes with it."""
    done: list[Coded] = []
    for i, request in enumerate(requests):
        for before, coded in zip(requests[:i], done, strict=True):
            if _same_codes(before, request):
                done.append(dataclasses.replace(coded, axis=request.axis))
                break
        else:
            cast = request.cast
            source = hadamard(x, cast.hadamard, axis=request.axis) if cast.hadamard > 1 else x
            q = quantize(
                source, cast.format, cast.tile, contract_axis=request.axis, scale=cast.scale,
                amax=request.amax, rounding=cast.rounding, key=request.key,
            )  # fmt: skip
            done.append(Coded(q, cast, request.axis))
    return tuple(done), None


Fused = dict[int, tuple[jax.Array, jax.Array]]  # contracted axis of x -> codes, scale


def _quantize_fused(
    x: jax.Array, requests: tuple[Request, ...]
) -> tuple[tuple[Coded, ...], jax.Array | None]:
    """The same by kernels/quantize.py, and the amax where a kernel found it. Codes have the
    contracted axis last, and are filled up to whole blocks."""
    cast, axes = requests[0].cast, {request.axis for request in requests}
    several = any(request.cast != cast for request in requests)
    if several or (cast.tile == TILE128 and x.dtype != jnp.bfloat16):
        return quantize_each(x, requests)
    padded, amax = pad_to_blocks(x), None
    if cast.tile == TENSOR:
        fused, amax = _whole(x, padded, cast, requests[0].amax, axes)
    elif cast.tile == ROW:
        fused = _vectors(padded, cast, axes)
    elif cast.tile == TILE128:
        fused = _tiles(padded, cast, axes)
    else:
        fused = _blocks(padded, cast, axes)
    return _as_requested(fused, requests, x.shape), amax


def _as_requested(
    fused: Fused, requests: tuple[Request, ...], shape: tuple[int, ...]
) -> tuple[Coded, ...]:
    """Of each request, from the codes of an array of such a shape."""
    cast = requests[0].cast
    tile = cast.tile.per_axis(2, -1)
    coded = {
        axis: Coded(Quantized(codes, scale, None, tile), cast, -1, shape[0 if axis == -1 else 1])
        for axis, (codes, scale) in fused.items()
    }
    return tuple(coded[request.axis] for request in requests)


def _whole(x, padded, cast: Cast, given, axes: set[int]) -> tuple[Fused, jax.Array]:
    """One scale, of the amax that is given or of x; and x's amax."""
    source = tensor_amax(x) if given is None else given.astype(jnp.float32)
    scale, _ = cast.scale(source, cast.format)
    plain, transposed, amax = cast_transpose(
        padded, scale, cast.format, values=-1 in axes, transposed=-2 in axes
    )
    checked = _checked(scale, amax, source)
    found = {-1: plain, -2: transposed}
    return {axis: (codes, checked) for axis, codes in found.items() if codes is not None}, amax


def _checked(scale: jax.Array, *amaxes: jax.Array) -> jax.Array:
    """[1, 1]: the scale of a whole array, NaN where an amax is not finite."""
    finite = functools.reduce(jnp.logical_and, map(jnp.isfinite, amaxes))
    return jnp.where(finite, scale, jnp.nan).astype(jnp.float32).reshape(1, 1)


def _vectors(padded, cast: Cast, axes: set[int]) -> Fused:
    """One scale a row along either axis; that of rows which were filled up is 1."""
    amax = {axis: tile_amax(padded, cast.tile.per_axis(2, axis)).reshape(-1) for axis in axes}
    scale = {axis: cast.scale(a, cast.format)[0].astype(jnp.float32) for axis, a in amax.items()}
    rows, columns = cast_rows_columns(padded, scale.get(-1), scale.get(-2), cast.format)
    checked = {axis: jnp.where(jnp.isfinite(amax[axis]), scale[axis], jnp.nan) for axis in axes}
    found = {-1: rows, -2: columns}
    return {
        axis: (codes, checked[axis].reshape(-1, 1))
        for axis, codes in found.items()
        if codes is not None
    }


def _tiles(padded, cast: Cast, axes: set[int]) -> Fused:
    """1x128 along either axis."""
    both = quantize_tiles(padded, cast.format, cast.scale, rows=-1 in axes, columns=-2 in axes)
    found = zip((-1, -2), both, strict=True)
    return {axis: (codes.values, codes.scale.T) for axis, codes in found if codes is not None}


def fuses(factor: Recipe, product: Recipe) -> bool:
    """Whether an operand x of `product`, made of results of `factor`, and the gradients of those
    can be quantised as they are made: by casts with scales that are known before, or of tiles."""
    (x, again), (g, other) = (product.fwd_x, product.wgrad_x), (factor.dgrad_g, factor.wgrad_g)
    if x is None or g is None or x != again or g != other:
        return False
    if x.tile == g.tile == TENSOR:
        return x.timing == g.timing == "delayed"
    return x.tile == TILE128 and (x.tile, x.format, x.scale) == (g.tile, g.format, g.scale)


def _produce_fused(
    producer: Producer, sources: tuple[jax.Array, ...], each: tuple[tuple[Request, ...], ...]
) -> tuple[tuple[tuple[Coded, ...], jax.Array | None], ...]:
    """`_quantize_fused` of each result of the producer, for recipes that `fuses` takes."""
    casts = [requests[0].cast for requests in each]
    axes = tuple(tuple(request.axis for request in requests) for requests in each)
    padded, shape = tuple(map(pad_to_blocks, sources)), sources[0].shape
    if casts[0].tile == TILE128:
        tiles = tiles_produced(producer, padded, casts[0].format, casts[0].scale, axes)
        found = [({a: (c.values, c.scale.T) for a, c in of.items()}, None) for of in tiles]
    else:
        given = [r[0].amax.astype(jnp.float32) for r in each if r[0].amax is not None]  # all
        scales = [c.scale(amax, c.format)[0] for c, amax in zip(casts, given, strict=True)]
        formats = tuple(cast.format for cast in casts)
        whole = cast_produced(producer, padded, jnp.stack(scales), formats, axes)
        found = []
        for (of, amax), scale, source in zip(whole, scales, given, strict=True):
            checked = _checked(scale, source if amax is None else amax, source)
            found.append(({axis: (codes, checked) for axis, codes in of.items()}, amax))
    return tuple(
        (_as_requested(fused, requests, shape), amax)
        for (fused, amax), requests in zip(found, each, strict=True)
    )


def _blocks(padded, cast: Cast, axes: set[int]) -> Fused:
    """128x128: codes as they are or transposed, with the same scales."""
    fused = {}
    for axis in axes:
        codes = quantize_blocks(padded, cast.format, cast.scale, transposed=axis == -2)
        fused[axis] = codes.values, codes.scale if axis == -1 else codes.scale.T
    return fused


# Multiplying --------------------------------------------------------------------------------------


def product(a: Plain, b: Plain, dtype) -> jax.Array:
    """[..., M, N]: both without their contracted axes, a leading axis being a batch."""
    batch = tuple(range(a.x.ndim - 2))
    contract = ((a.x.ndim + a.axis,), (b.x.ndim + b.axis,))
    # For float32 operands the default would be TF32 on a GPU.
    precision = lax.Precision.HIGHEST if a.x.dtype == jnp.float32 else None
    return lax.dot_general(
        a.x, b.x, (contract, (batch, batch)), precision, preferred_element_type=dtype
    )


def _codes(operand: Coded) -> Plain:
    return Plain(operand.q.values, operand.axis)


def _scale_of_result(a: Coded, b: Coded) -> jax.Array:
    """The product of two separable scales, broadcastable to [..., M, N]."""
    rows, columns = a.q.float_scale(), b.q.float_scale()
    rows = rows if a.axis == -1 else jnp.swapaxes(rows, -1, -2)
    columns = columns if b.axis == -2 else jnp.swapaxes(columns, -1, -2)
    return rows * columns


def _exact(operand: Operand) -> jax.Array:
    """The operand's numbers: in bfloat16 where that is exact, else in float32."""
    if isinstance(operand, Plain):
        return operand.x
    # A code has at most four significant bits; a power of two changes none of them.
    exact_in_bf16 = operand.cast.scale.power_of_two
    return dequantize(operand.q, jnp.bfloat16 if exact_in_bf16 else jnp.float32)


def _emulated(a: Operand, b: Operand, dtype) -> jax.Array:
    """Exact products of the dequantised operands, accumulated in float32."""
    if isinstance(a, Coded) and isinstance(b, Coded) and a.cast.separable and b.cast.separable:
        # Codes alone are exact in bfloat16. The first barrier keeps XLA from undoing the rounding,
        # the second from making an FP8 GEMM of it, which on Hopper keeps 14 bits of the sums.
        codes = lax.optimization_barrier((a.q.values, b.q.values))
        left, right = lax.optimization_barrier(tuple(v.astype(jnp.bfloat16) for v in codes))
        y = product(Plain(left, a.axis), Plain(right, b.axis), jnp.float32)
        return (y * _scale_of_result(a, b)).astype(dtype)
    left, right = _exact(a), _exact(b)
    if left.dtype != right.dtype:
        left, right = left.astype(jnp.float32), right.astype(jnp.float32)
    left, right = lax.optimization_barrier((left, right))
    return product(Plain(left, a.axis), Plain(right, b.axis), jnp.float32).astype(dtype)


def _xla(a: Operand, b: Operand, dtype) -> jax.Array:
    """float8 codes into the matrix unit, scales multiplied into its result."""
    assert isinstance(a, Coded) and isinstance(b, Coded)  # what `_xla_refuses` is for
    if _block_scaled(a.cast, b.cast):
        return scaled_matmul(a.q, b.q, a.axis, b.axis).astype(dtype)
    y = product(_codes(a), _codes(b), dtype)
    scale = _scale_of_result(a, b)
    if scale.size == 1 and hardware.folds_scales():
        # XLA folds this spelling, and only this, into the GEMM's epilogue, where scale and result
        # are float32 (a test on the GPU compares bits): no second pass over y.
        return y * scale.astype(dtype)
    # Elsewhere in float32: a scale in bfloat16 would be off by up to 2^-9 for the whole tensor.
    return (y.astype(jnp.float32) * scale).astype(dtype)


def _pallas(a: Operand, b: Operand, dtype) -> jax.Array:
    """As `_xla` where scales are of whole tensors, else by kernels/row_gemm.py and
    block_gemm.py."""
    assert isinstance(a, Coded) and isinstance(b, Coded)
    if a.cast.tile == b.cast.tile == TENSOR:
        return _xla(a, b, dtype)[: _rows(a), : _rows(b)]
    (left, sa), (right, sb) = _contracted_last(a), _contracted_last(b)
    if a.cast.separable and b.cast.separable:
        sa, sb = (jnp.broadcast_to(s[0], v.shape[:1]) for s, v in ((sa, left), (sb, right)))
        y = row_scaled_matmul(left, right, sa, sb, dtype)
    else:
        y = block_scaled_matmul(left, right, sa, sb, dtype)
    return y[: _rows(a), : _rows(b)]


def _rows(operand: Coded) -> int:
    """Of the operand as it came, along the axis that is not contracted."""
    free = -2 if operand.axis == -1 else -1
    return operand.q.values.shape[free] if operand.rows is None else operand.rows


def _contracted_last(operand: Coded) -> tuple[jax.Array, jax.Array]:
    """Codes [rows, K] and scales [K / 128 or 1, rows or blocks of them or 1], in whole blocks."""
    values, scale = operand.q.values, operand.q.float_scale()
    if operand.axis == -2:
        values = values.T
    else:
        scale = scale.T
    values = pad_to_blocks(values)
    missing = 0 if operand.cast.tile.free != 1 else values.shape[0] - scale.shape[1]
    return values, jnp.pad(scale, ((0, 0), (0, missing)), constant_values=1)


def _block_scaled(lhs: Cast, rhs: Cast) -> bool:
    """Whether this is MXFP8 or NVFP4 on both sides, the products that Blackwell has a unit for."""
    casts = (lhs, rhs)
    mxfp8 = all(c.tile.contract == 32 and isinstance(c.scale, E8M0) for c in casts)
    nvfp4 = all(c.tile.contract == 16 and isinstance(c.scale, NvFp4) for c in casts)
    return nvfp4 or (mxfp8 and all(c.format.bits == 8 for c in casts))


# The table ----------------------------------------------------------------------------------------


def _emulated_refuses(recipe: Recipe, device: Device) -> str | None:
    return None


def _xla_refuses(recipe: Recipe, device: Device) -> str | None:
    """Why `xla` cannot run a recipe on such a device, or None."""
    for name, (lhs, rhs) in recipe.products.items():
        if lhs is None and rhs is None:
            continue
        if lhs is None or rhs is None:
            return f"{name} has one quantised and one high-precision operand"
        if _block_scaled(lhs, rhs):
            if not device.block_scaled:
                return f"{name} has a scale for every {lhs.tile.contract} numbers: no unit for that"
            continue
        for cast in (lhs, rhs):
            if cast.format.bits != 8:
                return f"{name} has an operand in {cast.format.name}: XLA has no such 4-bit product"
            if not cast.separable:
                return (
                    f"{name} has scales that change along the contraction ({cast.tile}): XLA "
                    "multiplies scales only after the product"
                )
        if lhs.format.name == rhs.format.name == "e5m2":
            return f"{name} multiplies e5m2 by e5m2: no GPU does"
    if recipe.casts and device.platform != "cpu" and not device.fp8:
        return f"{device.kind} has no FP8 matrix unit: XLA would widen to 16 bits"
    return None


# (lhs, rhs) tiles of the products in kernels/block_gemm.py.
_BLOCK_PRODUCTS = ((TILE128, BLOCK128), (TILE128, TILE128))


def _pallas_refuses(recipe: Recipe, device: Device) -> str | None:
    """Why `pallas` cannot run a recipe on such a device, or None."""
    for name, (lhs, rhs) in recipe.products.items():
        if lhs is None or rhs is None:
            if lhs is None and rhs is None:
                continue
            return f"{name} has one quantised and one high-precision operand"
        casts = (lhs, rhs)
        if any(c.format.bits != 8 for c in casts):
            return f"{name} has an operand in {[c.format.name for c in casts]}: no such kernel"
        if any(c.rounding != "nearest" or c.hadamard > 1 for c in casts):
            return f"{name} rounds stochastically or rotates an operand: no such kernel"
        if {lhs.tile, rhs.tile} <= {TENSOR, ROW}:
            if lhs.format.name == rhs.format.name == "e5m2":
                return f"{name} multiplies e5m2 by e5m2: no GPU does"
            continue
        if (lhs.tile, rhs.tile) not in _BLOCK_PRODUCTS:
            return f"{name} multiplies tiles of {lhs.tile} by {rhs.tile}: no such kernel"
        if any(c.format.name != "e4m3" for c in casts):
            return f"{name} has scales for blocks: the kernel multiplies e4m3 by e4m3"
        if not all(isinstance(c.scale, Fp32 | Pow2) or c.scale == E8M0() for c in casts):
            return f"{name} has a scale rule that the kernel does not: {[c.scale for c in casts]}"
    return hopper.refuses(device) if recipe.casts else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """How operands are quantised and multiplied.

    Attributes:
      name: key in `BACKENDS`.
      quantize: (array [..., rows, columns], requests) -> what each asks for, and the array's
        float32 amax where it came for free.
      matmul: (a, b, dtype) -> [..., M, N]; at least one operand is `Coded`.
      refuses: (recipe, device) -> why this backend cannot run it there, or None.
      batches: whether its products take a batch axis, and operands without elements.
      produce: (producer, its sources, requests for each result) -> what `quantize` gives of each
        result, without the results; None where a backend has no kernel for it.
      missing: () -> why this process cannot use it on any device, or None.
    """

    name: str
    quantize: Quantiser
    matmul: Callable[[Operand, Operand, jnp.dtype], jax.Array]
    refuses: Callable[[Recipe, Device], str | None]
    batches: bool = True
    produce: Callable[..., tuple[tuple[tuple[Coded, ...], jax.Array | None], ...]] | None = None
    missing: Callable[[], str | None] = lambda: None


BACKENDS: dict[str, Backend] = {
    "emulated": Backend(
        name="emulated", quantize=quantize_each, matmul=_emulated, refuses=_emulated_refuses
    ),
    "xla": Backend(name="xla", quantize=quantize_each, matmul=_xla, refuses=_xla_refuses),
    "pallas": Backend(
        name="pallas",
        quantize=_quantize_fused,
        matmul=_pallas,
        refuses=_pallas_refuses,
        batches=False,
        produce=_produce_fused,
        missing=hopper.too_old,
    ),  # fmt: skip
}


@functools.cache  # once a recipe and backend: the log says what runs, not how often
def _log_choice(recipe: str, backend: str, why: str) -> None:
    logging.info("recipe %s: backend %s (%s)", recipe, backend, why)


def choose_backend(
    backend: str | None, recipe: Recipe, device: Device | None = None, *, whole: bool = True
) -> Backend:
    """The backend of that name, or for None the fastest that can run `recipe` on `device` (None:
    the default one of this process).

    Args:
      whole: whether a product is of two matrices, none of them empty: no batch axis.

    Raises:
      ValueError: unknown name.
      NotImplementedError: a named backend that cannot run the recipe; says why.
    """
    here = hardware.device()
    device = here if device is None else device
    if backend is not None:
        chosen = lookup("backend", backend, BACKENDS)
        reason = _refuses(chosen, recipe, device, whole)
        if reason is not None:
            raise NotImplementedError(
                f"backend {backend!r} cannot run recipe {recipe.name!r} here ({device.kind}): "
                + reason
            )
        return chosen
    if not recipe.casts:
        return BACKENDS["emulated"]  # nothing to quantise: every backend is the same
    if not device.fp8:
        choice, why = "emulated", f"{device.kind} has no FP8 matrix unit"
    else:
        reasons = {
            name: _refuses(BACKENDS[name], recipe, device, whole) for name in ("pallas", "xla")
        }
        able = [name for name, reason in reasons.items() if reason is None]
        choice = [*able, "emulated"][0]
        why = "codes into the matrix unit" if able else str(reasons["xla"])
    if device == here:
        _log_choice(recipe.name, choice, why)
    return BACKENDS[choice]


def _refuses(backend: Backend, recipe: Recipe, device: Device, whole: bool) -> str | None:
    reason = backend.refuses(recipe, device)
    if reason is None and recipe.casts and device == hardware.device():
        reason = backend.missing()
    if reason is None and recipe.casts and not (whole or backend.batches):
        return "its kernels multiply two matrices, none of them empty: no batch axis"
    return reason
