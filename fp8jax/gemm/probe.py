"""Telemetry of the casts of a linear: what each cast has done to its operand.

A `Probe` is a pair of arrays that stands beside the amax histories of a linear. Its values are not
read. Its *cotangent* is the statistics of the step: so the gradient g is measured where it exists,
inside the one VJP (vjp.py), from the very codes that the GEMMs multiply. A program without probes
has no trace of them. Statistics combine as cotangents do:

    peaks   by maximum (shared_leaf.py; telemetry/measure.py over microbatches): amaxes and scales
    sums    by addition: counts and energies, from which the host computes shares and ratios
            (telemetry/rows.py)

Both therefore stay right under loops over layers, rematerialization, accumulation, meshes and
`shard_map`, where the sums of a device's part are added over the axes on which the operand varies.

Each array has one row for each cast, in the order of `row_names`: the six casts of the recipe, then
those of a `what_if` recipe, which quantizes the same operands beside the run. What-if casts take
the amax of the operand itself, delayed and shared ones too.

A count is two floats, `high` * 4096 + `low`: exact up to 2^36 elements, in at most 4096 parts that
are smaller than 2^32 each. Energies are sums of squares in float32, of numbers below 2^60 and not
much below 2^-60.

Linen models hold probes in the collection `TELEMETRY`, under the name `PROBE`.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8jax.gemm.backends.emulated import quantize_each
from fp8jax.gemm.backends.operands import CastRequest, Operand, PlainOperand, QuantizedOperand
from fp8jax.gemm.histories.shared_leaf import combining_by_max
from fp8jax.gemm.sharding.manual_axes import largest_like, summed_like, varying
from fp8jax.numerics.formats import folded, key_words
from fp8jax.numerics.hadamard import hadamard, whole_hadamard
from fp8jax.numerics.recipe import CASTS, Cast, Recipe
from fp8jax.numerics.tiles import spread, tensor_amax

TELEMETRY = "telemetry"
"""The collection of probes in linen variables, only there while a model is measured.

Name it in `variable_axes` of `nn.scan` and `nn.vmap`, so that `fp8jax.telemetry.measure` reaches
the layers inside.

Example:
  >>> Layers = nn.scan(
  ...     fp8jax.nn.Dense, length=3, split_rngs={"params": True},
  ...     variable_axes={"params": 0, fp8jax.nn.HISTORIES: 0, fp8jax.nn.TELEMETRY: 0},
  ... )
  >>> fp8jax.nn.TELEMETRY
  'telemetry'
"""
PROBE = "probe"

# Columns of `Probe.peaks`. The scale is the largest of the tiles that hold a nonzero element, the
# inverse that of the smallest.
# The current scale is the one that the operand's own amax gives, for delayed casts only.
PEAKS = ("amax", "scale", "inverse_scale", "current_scale")
# Columns of `Probe.sums`: two for each count, one for each energy.
COUNTS = ("elements", "nonzero", "underflow", "saturated")
ENERGIES = ("signal", "noise")
# An element saturates if it lies beyond the format's maximum after scaling. A float32 scale puts
# the amax itself on the maximum to within two units in the last place, which no cast notices.
BEYOND = 1 + 2.0**-20
_SUMS = 2 * len(COUNTS) + len(ENERGIES)
_LOW_BITS = 12


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("peaks", "sums"), meta_fields=("what_if",)
)
@dataclasses.dataclass(frozen=True)
class Probe:
    """Zeros, or as a cotangent the statistics of one linear; leading axes of layers are allowed.

    Attributes:
      peaks: float32 [..., rows, PEAKS].
      sums: float32 [..., rows, two for each of COUNTS and one for each of ENERGIES].
      what_if: the recipe whose casts are measured beside those of the run, or None.
    """

    peaks: Any
    sums: Any
    what_if: Recipe | None = None


# The statistics of casts, by the names of `row_names`: uint32 [PEAKS, COUNTS, ENERGIES], of float32
# their bits. One array each, since a loop over layers stores every array in a kernel of its own.
Statistics = dict[str, jax.Array]


def row_names(what_if: Recipe | None) -> tuple[str, ...]:
    """Returns the names of a probe's rows: "fwd_x", …, and "what_if.fwd_x", …."""
    return CASTS if what_if is None else (*CASTS, *(f"what_if.{name}" for name in CASTS))


def empty_probe(what_if: Recipe | None = None, layers: tuple[int, ...] = ()) -> Probe:
    """Returns a probe of zeros, with leading axes of the sizes `layers`."""
    rows = len(row_names(what_if))
    return Probe(
        jnp.zeros((*layers, rows, len(PEAKS)), jnp.float32),
        jnp.zeros((*layers, rows, _SUMS), jnp.float32),
        what_if,
    )


def module_probe(module: nn.Module) -> Probe | None:
    """Returns the module's probe, None where the variables hold none."""
    if not module.has_variable(TELEMETRY, PROBE):
        return None
    probe: Any = module.get_variable(TELEMETRY, PROBE)
    return probe


def peaks_by_max(probe: Probe | None) -> Probe | None:
    """Returns a probe whose cotangents combine as the module's docstring says."""
    return probe and dataclasses.replace(probe, peaks=combining_by_max(probe.peaks))


# Measuring ----------------------------------------------------------------------------------------


def measure(
    probe: Probe | None,
    x: jax.Array,
    operands: Mapping[str, Operand],
    cast_axes: dict[str, int],
    key: Any,
) -> Statistics:
    """Returns the statistics of the named casts of one array, a row each; {} without a probe.

    Args:
      x: the array [..., rows, columns] before its casts.
      operands: what they have made of it, by their names.
      cast_axes: name of the cast -> contracting axis of the array.
      key: a PRNG key or None, for what-if casts that round stochastically.

    Raises NotImplementedError for 2^32 elements or more.
    """
    if probe is None:
        return {}
    if x.size >= 2**32:
        raise NotImplementedError(
            f"telemetry counts up to 2^32 elements of an operand, got {list(x.shape)}: accumulate"
            " gradients over more microbatches"
        )
    operands = {name: operands[name] for name in cast_axes}
    if probe.what_if is not None:
        operands |= _what_if(probe.what_if, x, cast_axes, key)
    measured: list[tuple[Operand, jax.Array]] = []
    rows = {}
    for name, operand in operands.items():
        axis = cast_axes[name.rpartition(".")[2]]
        row = next((row for other, row in measured if _same(other, operand)), None)
        rows[name] = _row(x, operand, axis) if row is None else row
        measured.append((operand, rows[name]))
    return rows


def _same(one: Operand, other: Operand) -> bool:
    """Whether two operands of one array hold the same codes, maybe for different GEMMs.

    Kernels write such codes in two layouts, of which the first is measured.
    """
    if isinstance(one, PlainOperand) or isinstance(other, PlainOperand):
        return isinstance(one, PlainOperand) and isinstance(other, PlainOperand)
    if one.cast != other.cast:
        return False
    return one.q.values is other.q.values or (one.cast.any_axis and one.q.scale is other.q.scale)


def _what_if(
    recipe: Recipe, x: jax.Array, cast_axes: dict[str, int], key: Any
) -> dict[str, Operand]:
    """Returns x as the recipe's casts of these names make it, by the names of their rows."""
    key = jax.random.key(0) if key is None else key
    operands: dict[str, Operand] = {}
    requests = {}
    for name, axis in cast_axes.items():
        cast: Cast | None = recipe.by_name()[name]
        if cast is None:
            operands[f"what_if.{name}"] = PlainOperand(x, axis)
            continue
        cast = dataclasses.replace(cast.current(), shared_scale=False, requantizes=False)
        cast_key = signs = None
        own = len(CASTS) + CASTS.index(name)
        if cast.rounding == "stochastic":
            cast_key = folded(key, own)
        if cast.redrawn:
            signs = key_words(folded(key, own))[0]
        requests[f"what_if.{name}"] = CastRequest(cast, axis, None, cast_key, signs)
    quantized, _ = quantize_each(x, tuple(requests.values()))
    return operands | dict(zip(requests, quantized, strict=True))


def _row(x: jax.Array, operand: Operand, axis: int) -> jax.Array:
    if isinstance(operand, PlainOperand):
        (amax,), (nonzero,), (signal,) = _totals([_magnitude(x)], [x != 0], [_float(x)])
        return _as_row(x, (amax,), (nonzero,), (signal,))
    cast = operand.cast
    given, x = x, _float(x)
    if cast.hadamard > 1:
        x = _rotated(x, cast.hadamard, operand.signs, axis)
    tiles = operand.q.float_scale()
    codes, scale = _as_given(operand, tiles, axis, x.shape)
    # Multiplied by the reciprocal, as quantize_unchecked does: counts are those of the very cast.
    beyond = jnp.abs(x * (1.0 / scale)) > np.float32(cast.format.max * BEYOND)
    scales: Sequence[jax.Array] = ()
    if tiles.size > 1 or not x.size:
        # The scale of a tile without a nonzero element is 1, and says nothing. Not `jnp.where`: its
        # zeros would be an array that JAX hands to a loop over layers.
        scales = [_magnitude(each) * (x != 0) for each in (scale, 1.0 / scale)]
    (amax, *largest), counts, energies = _totals(
        [_magnitude(given), *scales],
        [x != 0, (x != 0) & (codes == 0), beyond],
        [x, x - codes * scale],
    )
    if not scales:
        only = tiles.reshape(())
        largest = [only, 1.0 / only]
    current = [_float(cast.rule(amax, cast.format)[0])] if cast.delayed else []
    return _as_row(x, (amax, *largest, *current), counts, energies)


def _rotated(x: jax.Array, size: int, signs: jax.Array | None, axis: int) -> jax.Array:
    if signs is None:
        return hadamard(x, size, axis=axis)
    return whole_hadamard(x, size, signs, axis=axis)


def _as_given(
    operand: QuantizedOperand, tiles: jax.Array, axis: int, shape: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns the float32 codes and the scale of each, in the layout of the array that was cast.

    Kernels write codes with the contracting axis last, padded to whole blocks.
    """
    codes = operand.q.values
    each = jnp.broadcast_to(spread(tiles, operand.q.tile, codes.shape), codes.shape)
    if operand.axis != axis:
        codes, each = jnp.swapaxes(codes, -1, -2), jnp.swapaxes(each, -1, -2)
    # Keeps XLA from skipping the rounding to codes, and from transposing them in float32.
    codes = lax.optimization_barrier(codes)
    part = tuple(slice(size) for size in shape)
    return _float(codes[part]), each[part]


def _as_row(x: jax.Array, peaks: Any, counts: Any, energies: Any) -> jax.Array:
    """Returns a row of the columns that are given, the first ones, and zeros for the others."""
    counts = [jnp.full_like(counts[0], x.size), *counts]
    peaks, energies = [*map(_bits, peaks)], [*map(_bits, energies)]
    columns: list[jax.Array] = []
    for names, given in ((PEAKS, peaks), (COUNTS, counts), (ENERGIES, energies)):
        columns += [*given, *[jnp.zeros((), jnp.uint32)] * (len(names) - len(given))]
    return jnp.stack(columns)


def _float(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _magnitude(x: jax.Array) -> jax.Array:
    """Returns the bits of |x| in float32, which sort as numerics/tiles.py says."""
    return _bits(_float(x)) & 0x7FFFFFFF


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint32)


def _from_bits(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _totals(
    magnitudes: Sequence[jax.Array], masks: Sequence[jax.Array], xs: Sequence[jax.Array]
) -> tuple[Sequence[jax.Array], Sequence[jax.Array], Sequence[jax.Array]]:
    """Returns the largest magnitudes in float32, the counts of True in uint32, and the energies.

    The arrays have one shape. A GPU reads them once for all results: reductions of equal shape
    become one kernel. Rows come first, because XLA's sums on CPUs add one by one; the barrier keeps
    XLA from making one long sum of both.
    """
    rows = [
        *(jnp.max(bits, axis=-1, initial=0) for bits in magnitudes),
        *(jnp.sum(mask, axis=-1, dtype=jnp.uint32) for mask in masks),
        *(jnp.sum(x * x, axis=-1) for x in xs),
    ]
    rows = lax.optimization_barrier(rows)
    peaks, counts = len(magnitudes), len(magnitudes) + len(masks)
    kinds = [jnp.maximum] * peaks + [jnp.add] * (len(rows) - peaks)
    totals = lax.reduce(
        rows,
        [np.zeros((), x.dtype) for x in rows],
        lambda a, b: [combined(*pair) for combined, *pair in zip(kinds, a, b, strict=True)],
        tuple(range(rows[0].ndim)),
    )
    return [_from_bits(bits) for bits in totals[:peaks]], totals[peaks:counts], totals[counts:]


def repeated(recipe: Recipe, what_if: Recipe | None, rows: Statistics) -> Statistics:
    """Returns the rows of fwd_w that are those of dgrad_w: where both casts give the same codes.

    Not the other way round: kernels write the codes of fwd_w transposed.
    """
    found = {}
    for prefix, one in (("", recipe), ("what_if.", what_if)):
        if one is None or one.dgrad_w != one.fwd_w:
            continue
        if one.dgrad_w is None or one.dgrad_w.any_axis:
            found[f"{prefix}fwd_w"] = rows[f"{prefix}dgrad_w"]
    return found


# Returned -----------------------------------------------------------------------------------------


def as_cotangent(probe: Probe | None, rows: Statistics) -> Probe | None:
    """Returns the cotangent of a probe: its rows, zeros where a cast was not measured."""
    if probe is None:
        return None
    zeros = jnp.zeros_like(next(iter(rows.values())))
    table = [rows[name] if name in rows else zeros for name in row_names(probe.what_if)]
    ends = len(PEAKS), len(PEAKS) + len(COUNTS)
    # Combined row by row: inside of `shard_map`, rows may vary over different axes.
    peaks = jnp.stack(
        [largest_like(_from_bits(row[: ends[0]]), varying(probe.peaks)) for row in table]
    )
    axes = varying(probe.sums)
    counts = jnp.stack([summed_like(row[ends[0] : ends[1]], axes) for row in table])
    energies = jnp.stack([summed_like(_from_bits(row[ends[1] :]), axes) for row in table])
    high_low = jnp.stack([counts >> _LOW_BITS, counts & (2**_LOW_BITS - 1)], axis=-1)
    high_low = high_low.reshape(*counts.shape[:-1], -1).astype(jnp.float32)
    sums = jnp.concatenate([high_low, energies], axis=-1)
    return Probe(lax.convert_element_type(peaks, probe.peaks.dtype), sums, probe.what_if)


@jax.custom_vjp
def deposit(x: Any, ys: Any, leaves: Any, statistics: Any) -> Any:
    """Returns ys; the cotangent of `leaves` is `statistics`, and that of x is zero.

    For results without a derivative, such as those of frozen kernels: zeros go on to the probes
    below x.
    """
    return ys


def _deposit_fwd(x, ys, leaves, statistics):
    return ys, (x, statistics)


def _deposit_bwd(saved, gs):
    x, statistics = saved
    return jnp.zeros_like(x), None, statistics, None


deposit.defvjp(_deposit_fwd, _deposit_bwd)


@jax.custom_vjp
def watched(x: jax.Array, peak: jax.Array) -> jax.Array:
    """Returns x; the cotangent of `peak` is max|x|."""
    return x


def _watched_fwd(x, peak):
    return x, tensor_amax(x)


def _watched_bwd(amax, g):
    return g, amax


watched.defvjp(_watched_fwd, _watched_bwd)
