"""GEMMs inside `jax.shard_map`, where each device has its own part of some operands.

With `check_vma=True` JAX knows along which mesh axes an array *varies*, that is, differs between
devices. Take x sharded over the axis "data", and w replicated. Each device computes its part of dw;
w's gradient is the sum of these parts. JAX adds that sum for its own operations, but a custom VJP
has to do it itself, or JAX refuses it. So along the axes on which a cotangent varies and its array
does not

    dx, dw      are summed
    histories   take the maximum: their amaxes are those of the whole operand

The scale of an operand with one scale for the whole tensor is computed from the amax over those
devices that multiply parts of one GEMM: the axes on which one of x and w varies, and the other does
not. Where both vary (a GEMM for each expert, or a split contracting axis) devices use their own
scales, and so does every cast with a scale for each tile or row.

With `check_vma=False` JAX does not say what varies, and adds up histories of replicated modules:
recipes with histories are refused there (`is_untracked`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax import lax

Axes = frozenset[str]


def varying(x: jax.Array) -> Axes:
    """Returns the mesh axes along which x differs between devices; none outside `shard_map`."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


class PooledAxes(NamedTuple):
    """The axes whose devices share an operand's scale, for each operand of one GEMM."""

    x: Axes = frozenset()
    w: Axes = frozenset()
    g: Axes = frozenset()


def pooled_axes(x: jax.Array, ws: Sequence[jax.Array]) -> PooledAxes:
    """Returns the axes whose devices multiply parts of one GEMM.

    Raises ValueError if weights that share x are sharded over different axes.
    """
    first, *others = map(varying, ws)
    if any(other != first for other in others):
        raise ValueError(
            "weights that share one x must vary over the same mesh axes, got"
            f" {[sorted(varying(w)) for w in ws]}"
        )
    ours = varying(x)
    return PooledAxes(ours - first, first - ours, ours ^ first)


def summed_like(cotangent: jax.Array, axes: Axes) -> jax.Array:
    """Returns the cotangent of an array that varies along `axes`: summed along the others."""
    more = varying(cotangent) - axes
    return lax.psum(cotangent, tuple(sorted(more))) if more else cotangent


def largest_like(history: jax.Array, axes: Axes) -> jax.Array:
    """Returns the next value of a history that varies along `axes`: the largest along others."""
    return largest_over(history, varying(history) - axes)


def largest_over(x: jax.Array, axes: Axes) -> jax.Array:
    """Returns the maximum over the devices along `axes`."""
    return lax.pmax(x, tuple(sorted(axes))) if axes else x


def is_untracked() -> bool:
    """Whether devices run this code each by itself, and JAX does not track what varies."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return bool(axes) and not varying(lax.axis_index(axes[0]))
