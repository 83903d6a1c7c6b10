"""GEMMs of arrays whose sharding is part of their type (`AxisType.Explicit`).

`jax.make_mesh` makes such axes by default. There every operation must say how its result is
sharded, or imply it. Scales, tiles and the gradients of a GEMM imply nothing, so they are computed
under automatic axes (`jax.sharding.auto_axes`): GSPMD chooses their shardings. The result has the
sharding of `lax.dot_general`'s, and each gradient that of its operand.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax


def is_explicit(x: jax.Array) -> bool:
    """Whether the array lives on a mesh with an explicit axis."""
    return bool(jax.typeof(x).sharding.mesh.explicit_axes)


def with_automatic_axes(
    multiply: Callable[..., tuple[jax.Array, ...]],
    lhs: jax.Array,
    rhs: Sequence[jax.Array],
    dimension_numbers: Any,
    out_sharding: Any,
) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns `multiply` for operands with explicit axes; without one, `multiply` itself.

    Args:
      multiply: returns the products of `lhs` with each of `rhs`.
      out_sharding: the sharding of the results; None for what `lax.dot_general` would give them.

    Raises ShardingTypeError where `lax.dot_general` would: both contracting axes are sharded, for
    instance, and `out_sharding` is None.
    """
    if not any(map(is_explicit, (lhs, *rhs))):
        return multiply

    def product(w: jax.Array) -> jax.Array:
        w = w.astype(lhs.dtype)
        return lax.dot_general(lhs, w, dimension_numbers, out_sharding=out_sharding)

    shardings = tuple(jax.eval_shape(product, w).sharding for w in rhs)
    return jax.sharding.auto_axes(multiply, out_sharding=shardings)
