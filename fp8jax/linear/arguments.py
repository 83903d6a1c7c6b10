"""Arguments of `lax.dot_general` that a quantized GEMM takes, and those that it must refuse.

Libraries call the function that they are given as they would call `lax.dot_general`. Whatever
cannot be honored raises; nothing is ignored.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8jax.numerics.formats import check_float
from fp8jax.numerics.recipe import Recipe

_DEFAULT = (None, lax.Precision.DEFAULT, "default")


def check_lax_arguments(
    recipe: Recipe,
    positional: tuple[Any, ...],
    precision: Any,
    preferred_element_type: Any,
    out_sharding: Any,
) -> Any:
    """Return the dtype of the result, None for lhs's.

    Args:
      positional: precision and preferred_element_type where they were given by position.

    Raises:
      TypeError: too many positions.
      ValueError: a precision or a sharding that cannot be honored; positions, with a recipe that
        treats lhs and rhs differently.
    """
    if len(positional) > 2:
        raise TypeError(f"dot_general takes at most 5 positions, got {3 + len(positional)}")
    if positional:
        _check_symmetric(recipe)
        precision = positional[0]
    if len(positional) > 1:
        preferred_element_type = positional[1]
    each = precision if isinstance(precision, tuple) else (precision,)
    if not all(one in _DEFAULT for one in each):
        raise ValueError(f"the recipe decides how a GEMM is computed: drop {precision=}")
    if out_sharding is not None:
        raise ValueError(
            f"{out_sharding=} cannot be honored: apply jax.lax.with_sharding_constraint to the"
            " result, or jax.sharding.reshard under explicit axes"
        )
    return preferred_element_type


def _check_symmetric(recipe: Recipe) -> None:
    """Raises ValueError for a recipe that `jnp.einsum(..., _dot_general=...)` may apply wrongly.

    `jnp.einsum` passes precision by position, and swaps its operands for some results.
    """
    as_lhs = recipe.fwd_x, recipe.wgrad_x, recipe.dgrad_g
    as_rhs = recipe.fwd_w, recipe.dgrad_w, recipe.wgrad_g
    if as_lhs != as_rhs:
        raise ValueError(
            f"recipe {recipe.name!r} quantizes x and w differently, and jnp.einsum may swap its"
            " operands: use fp8jax.einsum, or pass precision by keyword"
        )


def check_operands(lhs: Any, rhs: Any, dimension_numbers: Any, result_dtype: Any) -> None:
    """Check one GEMM's operands.

    Raises:
      TypeError: for operands that are not arrays, or not of a real float dtype of 16 or more bits,
        and for such a result; and as `lax.dot_general` does for shapes that do not fit.
    """
    check_float("lhs", lhs)
    check_float("rhs", rhs)
    if result_dtype is not None:
        check_float("the result", jax.ShapeDtypeStruct((), result_dtype))
    shapes = (jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (lhs, rhs))
    jax.eval_shape(lambda x, w: lax.dot_general(x, w, dimension_numbers), *shapes)
