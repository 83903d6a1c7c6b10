"""Options behind the name of a recipe or policy that change its casts.

Options follow a colon (names.py parses them):

    fp8_delayed:history=1024,margin=1        fp4_mixed:gradients=e5m2

They cover what the papers leave open. In the FP4 paper (arXiv 2502.11458), weights and activations
may share scales along 128 elements or along a whole token or channel (`fp4_tile=row`), and the FP8
gradients may be E4M3 or E5M2 (`gradients=e5m2`). An option that applies to no cast raises: the name
would otherwise claim a change that did not happen.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from fp8jax.lookup import lookup
from fp8jax.numerics.formats import FORMATS, Format
from fp8jax.numerics.recipe import Cast, Recipe
from fp8jax.numerics.scales import Constant, Fp32, NvFp4, Pow2, as_scale_rule
from fp8jax.numerics.tiles import TILES, Tile


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """NAME=VALUE behind the name of a recipe or policy.

    Attributes:
      parse: text -> value; raises ValueError.
      applies: (name of a cast, such as "dgrad_g", the cast) -> whether the option changes it.
      change: (cast, value) -> the changed cast.
      help: one line for docs/recipes.md.
    """

    parse: Callable[[str], Any]
    applies: Callable[[str, Cast], bool]
    change: Callable[[Cast, Any], Cast]
    help: str


# What options parse -------------------------------------------------------------------------------


def _parse_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"expected an int, got {text!r}") from None


def _parse_bias(text: str) -> int:
    bias = _parse_int(text)
    if abs(bias) > 126:
        raise ValueError(f"the scale 2^-bias must be between 2^-126 and 2^126, got {bias=}")
    return bias


def _parse_format(text: str) -> Format:
    return lookup("format", text, FORMATS)


def _parse_tile(text: str) -> Tile:
    return lookup("tile", text, TILES)


# What options apply to ----------------------------------------------------------------------------


def _is_delayed(name: str, cast: Cast) -> bool:
    return cast.delayed


def _has_margin(name: str, cast: Cast) -> bool:
    return isinstance(cast.scale, Fp32 | Pow2)


def _is_constant(name: str, cast: Cast) -> bool:
    return cast.timing == "constant"


def _has_free_scale_rule(name: str, cast: Cast) -> bool:
    """Whether timing, format and tile leave the scale rule open."""
    return not isinstance(cast.scale, Constant | NvFp4)


def _is_fp8_gradient(name: str, cast: Cast) -> bool:
    return name.endswith("_g") and cast.format.bits == 8


def _has_free_fp4_tile(name: str, cast: Cast) -> bool:
    return cast.format.bits == 4 and _has_free_scale_rule(name, cast)


def _is_rotated(name: str, cast: Cast) -> bool:
    return cast.hadamard > 1


def _is_stochastic(name: str, cast: Cast) -> bool:
    return cast.rounding == "stochastic"


# How options change a cast ------------------------------------------------------------------------


def _set(field: str) -> Callable[[Cast, Any], Cast]:
    def change(cast: Cast, value: Any) -> Cast:
        return dataclasses.replace(cast, **{field: value})

    return change


def _set_margin(cast: Cast, margin: int) -> Cast:
    assert isinstance(cast.scale, Fp32 | Pow2)  # `_has_margin`
    return dataclasses.replace(cast, scale=dataclasses.replace(cast.scale, margin=margin))


def _set_bias(cast: Cast, bias: int) -> Cast:
    return dataclasses.replace(cast, scale=Constant(2.0**-bias))


OPTIONS: dict[str, Option] = {
    "history": Option(
        parse=_parse_int,
        applies=_is_delayed,
        change=_set("history"),
        help="number of amaxes in the history of a delayed cast",
    ),
    "amax": Option(
        parse=str,
        applies=_is_delayed,
        change=_set("amax"),
        help="which amax of the history sets the scale: `max` or `newest`",
    ),
    "margin": Option(
        parse=_parse_int,
        applies=_has_margin,
        change=_set_margin,
        help="binades left free above the amax (scales in float32)",
    ),
    "bias": Option(
        parse=_parse_bias,
        applies=_is_constant,
        change=_set_bias,
        help="exponent b of a constant scale 2^-b",
    ),
    "scale": Option(
        parse=as_scale_rule,
        applies=_has_free_scale_rule,
        change=_set("scale"),
        help="`fp32`, `pow2`, `e8m0`, or `e8m0_floor` as in OCP Microscaling",
    ),
    "gradients": Option(
        parse=_parse_format,
        applies=_is_fp8_gradient,
        change=_set("format"),
        help="format of FP8 gradients: `e4m3` or `e5m2`",
    ),
    "fp4_tile": Option(
        parse=_parse_tile,
        applies=_has_free_fp4_tile,
        change=_set("tile"),
        help="elements that share a scale in FP4: `row`, `tile128`, `mx32`, …",
    ),
    "hadamard": Option(
        parse=_parse_int,
        applies=_is_rotated,
        change=_set("hadamard"),
        help="size of the Hadamard transform, 1 for none",
    ),
    "rounding": Option(
        parse=str,
        applies=_is_stochastic,
        change=_set("rounding"),
        help="`nearest` instead of stochastic",
    ),
}


def change_casts(
    owner: str, recipes: Sequence[Recipe], name: str, value: str
) -> tuple[Recipe, ...]:
    """Return the recipes with the option `name`, a key of `OPTIONS`, applied to their casts.

    `owner` is whose recipes they are, for error messages: "policy 'fp8_block'".

    Raises ValueError for a value that does not parse, and if the option applies to no cast.
    """
    option, changed = OPTIONS[name], []
    try:
        parsed = option.parse(value)
    except ValueError as error:
        raise ValueError(f"{name}={value}: {error}") from None

    def change(cast_name: str, cast: Cast) -> Cast:
        if not option.applies(cast_name, cast):
            return cast
        changed.append(cast_name)
        return option.change(cast, parsed)

    mapped = [(recipe, recipe.map(change)) for recipe in recipes]
    results = tuple(old if new == old else new for old, new in mapped)
    if not changed:
        raise ValueError(f"{name}={value}: no cast of {owner} uses this option")
    return results
