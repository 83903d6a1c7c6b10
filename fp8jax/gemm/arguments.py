"""Arguments of `lax.dot_general` that a quantized GEMM takes, and those that it must refuse.

Libraries call the function that they are given as they would call `lax.dot_general`. Whatever
cannot be honored raises; nothing is ignored.
"""

import operator
import string
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax.linen.fp8_ops import fm32
from jax import lax

from fp8jax.gemm.histories.summary import Summary
from fp8jax.gemm.sharding.explicit_axes import is_explicit
from fp8jax.lookup import brief
from fp8jax.numerics.formats import check_float, check_key, check_result_dtype
from fp8jax.numerics.recipe import Recipe

_DEFAULT = (None, lax.Precision.DEFAULT, "default")


def check_lax_arguments(
    recipe: Recipe,
    positional: tuple[Any, ...],
    precision: Any,
    preferred_element_type: Any,
) -> Any:
    """Returns the dtype of the result, None for lhs's.

    Args:
      positional: precision and preferred_element_type where they were given by position.

    Raises:
      TypeError: too many positions.
      ValueError: a precision that cannot be honored; positions, with a recipe that treats lhs and
        rhs differently.
    """
    if len(positional) > 2:
        raise TypeError(
            f"dot_general takes at most 5 positional arguments, got {3 + len(positional)}: pass the"
            " others by name"
        )
    if positional:
        _check_symmetric(recipe)
        precision = positional[0]
    if len(positional) > 1:
        preferred_element_type = positional[1]
    each = precision if isinstance(precision, tuple) else (precision,)
    if not all(one in _DEFAULT for one in each):
        raise ValueError(f"the recipe decides how a GEMM is computed: drop {precision=}")
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
    """Checks one GEMM's operands.

    Raises:
      TypeError: for operands that are not arrays, or not of a real float dtype of 16 or more bits,
        for such a result, and for dimension numbers that are not of the form
        ((lhs contracting, rhs contracting), (lhs batch, rhs batch)).
      ValueError: for dimension numbers that do not fit the shapes.
    """
    check_float("lhs", lhs)
    check_float("rhs", rhs)
    if result_dtype is not None:
        check_result_dtype("preferred_element_type, the dtype of the result,", result_dtype)
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = _four_axes(dimension_numbers)
    _check_axes("lhs", lhs.shape, (*lhs_contract, *lhs_batch))
    _check_axes("rhs", rhs.shape, (*rhs_contract, *rhs_batch))
    for what, ours, theirs in (
        ("contracting", lhs_contract, rhs_contract),
        ("batch", lhs_batch, rhs_batch),
    ):
        sizes, others = [lhs.shape[a] for a in ours], [rhs.shape[a] for a in theirs]
        if sizes != others:
            raise ValueError(
                f"the {what} axes must have equal sizes: axes {ours} of lhs {lhs.shape} have"
                f" {sizes}, axes {theirs} of rhs {rhs.shape} have {others}"
            )


def check_out_sharding(out_sharding: Any, lhs: Any, rhs: Sequence[Any]) -> None:
    """Raises ValueError for a sharding of results whose operands have no explicit mesh axes."""
    if out_sharding is not None and not any(map(is_explicit, (lhs, *rhs))):
        raise ValueError(
            f"{out_sharding=} needs operands on a mesh with explicit axes; otherwise apply"
            " jax.lax.with_sharding_constraint to the result"
        )


def _four_axes(numbers: Any) -> list[list[list[int]]]:
    """Returns dimension numbers as lists of ints; raises TypeError for others."""
    try:
        pairs = [[[operator.index(a) for a in axes] for axes in pair] for pair in numbers]
        well_formed = len(pairs) == 2 and all(len(pair) == 2 for pair in pairs)
    except TypeError:
        well_formed = False
    if not well_formed:
        raise TypeError(
            "dimension_numbers must be ((lhs contracting, rhs contracting), (lhs batch, rhs"
            f" batch)), such as (((1,), (0,)), ((), ())), got {brief(numbers)}"
        )
    return pairs


def _check_axes(name: str, shape: tuple[int, ...], axes: Sequence[int]) -> None:
    """Raises ValueError for an axis that the shape does not have, and for one that comes twice."""
    if not all(0 <= axis < len(shape) for axis in axes):
        allowed = f"from 0 to {len(shape) - 1}" if shape else "none, as it is a scalar"
        raise ValueError(
            f"dimension_numbers name the axes {list(axes)} of {name}, which has shape {shape}:"
            f" allowed are axes {allowed}"
        )
    if len(set(axes)) < len(axes):
        raise ValueError(
            f"dimension_numbers name the axes {list(axes)} of {name}: each at most once"
        )


def parse_equation(equation: Any, lhs: Any, rhs: Any) -> tuple[str, str, str]:
    """Returns the letters of lhs, rhs and the result of an einsum that is one GEMM.

    An ellipsis stands for as many letters as its operand has further axes.

    Raises:
      TypeError: for operands that are not arrays of floats, and an equation that is not a string.
      ValueError: for an equation that is not one GEMM of two arrays, or does not fit their shapes.
    """
    check_float("lhs", lhs)
    check_float("rhs", rhs)
    example = "expected an equation such as 'bsd,dhk->bshk'"
    if not isinstance(equation, str):
        raise TypeError(f"{example}, got {brief(equation)}")
    operands, arrow, out = equation.replace(" ", "").partition("->")
    terms = operands.split(",")
    letters = [term.replace("...", "", 1) for term in (*terms, out)]
    if not arrow or len(terms) != 2 or not "".join(letters).isalpha():
        raise ValueError(
            f"{example} (two operands, letters only, with the result), got {equation!r}"
        )
    a, b, out = _without_ellipses(equation, terms, out, (len(lhs.shape), len(rhs.shape)))
    repeated = sorted({c for term in (a, b, out) for c in term if term.count(c) > 1})
    alone = sorted(c for c in {*a, *b, *out} if (c in a) + (c in b) + (c in out) == 1)
    if repeated or alone:
        raise ValueError(
            f"equation {equation!r}: each letter must appear in two or all three of the terms, at"
            f" most once in each; see {', '.join(repeated + alone)}"
        )
    sizes: dict[str, int] = {}
    for name, term, x in (("lhs", a, lhs), ("rhs", b, rhs)):
        if len(term) != len(x.shape):
            raise ValueError(
                f"equation {equation!r}: {term!r} has {len(term)} letters, but {name} has shape"
                f" {x.shape}: one letter per axis"
            )
        for letter, size in zip(term, x.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ValueError(
                    f"equation {equation!r}: {letter!r} is {sizes[letter]} in lhs {lhs.shape} and"
                    f" {size} in rhs {rhs.shape}; they must be equal"
                )
    return a, b, out


def _without_ellipses(
    equation: str, terms: Sequence[str], out: str, ranks: Sequence[int]
) -> tuple[str, str, str]:
    """Returns the three terms of an equation with letters in the place of ellipses.

    As in NumPy, the last axes of two ellipses are the same.

    Raises:
      ValueError: an operand has fewer axes than letters, or ellipses are in the operands alone or
        in the result alone.
    """
    counts = [
        rank - len(term.replace("...", "")) if "..." in term else 0
        for term, rank in zip(terms, ranks, strict=True)
    ]
    if ("..." in "".join(terms)) != ("..." in out) or min(counts) < 0:
        raise ValueError(
            f"equation {equation!r}: an ellipsis in an operand must be in the result, too, and"
            f" stand for its further axes; the operands have {ranks[0]} and {ranks[1]} axes"
        )
    unused = [letter for letter in string.ascii_letters if letter not in equation]
    letters = "".join(unused[: max(counts)])
    a, b = (
        term.replace("...", letters[len(letters) - count :])
        for term, count in zip(terms, counts, strict=True)
    )
    return a, b, out.replace("...", letters)


def history_lengths(recipe: Recipe, histories: Any) -> dict[str, int]:
    """Returns operand -> length of its history.

    Raises TypeError for what is not a dict of float32 arrays with one axis, or of their summaries.
    """
    expected = f"the state of recipe {recipe.name!r} must be a dict of float32 arrays [length]"
    if not isinstance(histories, Mapping):
        raise TypeError(f"{expected}, as fp8jax.init_state returns, got {brief(histories)}")
    lengths = {}
    for operand, history in histories.items():
        if isinstance(history, Summary):
            lengths[operand] = history.length
            continue
        if not (hasattr(history, "dtype") and hasattr(history, "shape")):
            raise TypeError(f"{expected}, got {brief(history)} for {operand!r}")
        # fm32: flax's float32 whose addition is the maximum (amax_history.py).
        if history.dtype not in (jnp.float32, fm32) or len(history.shape) != 1:
            got = f"{history.dtype}{list(history.shape)}"
            raise TypeError(f"{expected}, got {got} for {operand!r}")
        lengths[operand] = history.shape[0]
    return lengths


def check_rounding_key(recipe: Recipe, key: Any) -> None:
    """Raises ValueError for a missing key, TypeError for one of another type, if one is needed."""
    if not recipe.stochastic:
        return
    if key is None:
        raise ValueError(
            f"recipe {recipe.name!r} rounds stochastically and needs a key: pass key=, such as"
            " jax.random.key(0), a new one every step"
        )
    check_key(key)


def check_sizes(name: str, sizes: Any, shown: Any) -> None:
    """Raises TypeError or ValueError unless `sizes` are positive ints; `shown` is the argument."""
    for size in sizes:
        try:
            positive = operator.index(size) > 0
        except TypeError:
            raise TypeError(f"{name} must be a positive int, got {brief(shown)}") from None
        if not positive:
            raise ValueError(f"{name} must be positive, got {brief(shown)}")
