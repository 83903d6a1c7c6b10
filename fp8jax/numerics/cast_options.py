"""Options behind the name of a recipe or policy that change its casts.

Options follow a colon (names.py parses them):

    fp8_delayed:history=1024,margin=1        fp4_mixed:gradients=e5m2

They cover what the papers leave open. In the FP4 paper (arXiv 2502.11458), weights and activations
may share scales along 128 elements or along a whole token or channel (`fp4_tile=row`), the FP8
gradients may be E4M3 or E5M2 (`gradients=e5m2`), and the input gradient may be computed in FP8 or
in BF16 (`dgrad=bf16`). An option that applies to no cast raises: the name would otherwise claim a
change that did not happen.

Options apply in the order of `OPTIONS`, in whichever order they are given: first those that leave
operands in BF16, so that no later option changes a cast that is then dropped.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from fp8jax.lookup import lookup
from fp8jax.numerics.formats import FORMATS, Format
from fp8jax.numerics.recipe import CASTS, Cast, Recipe
from fp8jax.numerics.scales import (
    Bias,
    Constant,
    Delayed,
    Fp32,
    Mse,
    NvFp4,
    Pow2,
    ScaleRule,
    as_scale_rule,
)
from fp8jax.numerics.tiles import TENSOR, TILES, TOKEN, Tile


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """NAME=VALUE behind the name of a recipe or policy.

    Attributes:
      parse: text -> value; raises ValueError.
      applies: (name of a cast, such as "dgrad_g", the cast) -> whether the option changes it.
      change: (name, cast, value) -> the changed cast; None leaves the operand in high precision.
      help: one line for docs/recipes.md.
    """

    parse: Callable[[str], Any]
    applies: Callable[[str, Cast], bool]
    change: Callable[[str, Cast, Any], Cast | None]
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


def _parse_bf16(text: str) -> None:
    if text != "bf16":
        raise ValueError(f"expected bf16, got {text!r}")


def _parse_casts(text: str) -> tuple[str, ...]:
    """Returns a cast, or both casts of a GEMM."""
    gemms = dict.fromkeys(cast.partition("_")[0] for cast in CASTS)
    both = {gemm: tuple(cast for cast in CASTS if cast.startswith(gemm)) for gemm in gemms}
    return lookup("cast or GEMM", text, {cast: (cast,) for cast in CASTS} | both)


def _parse_formats(text: str) -> dict[Format, Format]:
    if text not in _OTHERS:
        raise ValueError(f"expected {' or '.join(_OTHERS)}, got {text!r}")
    return _OTHERS[text]


def _parse_format(text: str) -> Format:
    return lookup("format", text, FORMATS)


def _parse_tile(text: str) -> Tile:
    return lookup("tile", text, TILES)


def _parse_fp4_tile(text: str) -> Tile:
    tile = _parse_tile(text)
    if tile == TOKEN:
        raise ValueError("this tile belongs to a token in wgrad only: add wgrad_tile=token")
    return tile


_OCP = (FORMATS["e4m3"], FORMATS["e5m2"])
# What may stand in place of OCP's FP8 formats: a value of the option -> format -> the other one.
_OTHERS = {
    "fnuz": {fmt: FORMATS[f"{fmt.name}fnuz"] for fmt in _OCP},
    "e3m2": {fmt: FORMATS["e3m2"] for fmt in _OCP},
}


# What options apply to ----------------------------------------------------------------------------


def _is_cast(name: str, cast: Cast) -> bool:
    return True


def _belongs_to(*gemms: str) -> Callable[[str, Cast], bool]:
    def applies(name: str, cast: Cast) -> bool:
        return name.startswith(gemms)

    return applies


def _is_delayed(name: str, cast: Cast) -> bool:
    return cast.delayed


def _is_graphcores(cast: Cast) -> bool:
    """Whether the cast has one current power of two, or one constant, for the tensor."""
    return cast.tile == TENSOR and not cast.delayed and isinstance(cast.rule, Pow2 | Constant)


def _has_margin(name: str, cast: Cast) -> bool:
    if isinstance(cast.rule, Constant):
        return name.endswith("_g")
    return isinstance(cast.rule, Fp32 | Pow2)


def _is_constant(name: str, cast: Cast) -> bool:
    return cast.timing == "constant"


def _has_free_scale_rule(name: str, cast: Cast) -> bool:
    """Whether timing, format and tile leave the scale rule open."""
    return not isinstance(cast.rule, Constant | NvFp4)


def _is_fp8_gradient(name: str, cast: Cast) -> bool:
    return name.endswith("_g") and cast.format.bits == 8


def _has_free_fp4_tile(name: str, cast: Cast) -> bool:
    return cast.format.bits == 4 and _has_free_scale_rule(name, cast)


def _has_free_wgrad_tile(name: str, cast: Cast) -> bool:
    free = cast.timing == "current" and _has_free_scale_rule(name, cast)
    return free and name.startswith("wgrad")


def _has_free_wgrad_g_tile(name: str, cast: Cast) -> bool:
    return name == "wgrad_g" and _has_free_wgrad_tile(name, cast)


def _is_ocp_fp8(name: str, cast: Cast) -> bool:
    return cast.format in _OCP


def _is_rotated(name: str, cast: Cast) -> bool:
    return cast.hadamard > 1


def _is_stochastic(name: str, cast: Cast) -> bool:
    return cast.rounding == "stochastic"


# How options change a cast ------------------------------------------------------------------------


def _drop(name: str, cast: Cast, value: None) -> None:
    return None


def _keep_only(name: str, cast: Cast, kept: tuple[str, ...]) -> Cast | None:
    return cast if name in kept else None


def _set(field: str) -> Callable[[str, Cast, Any], Cast]:
    def change(name: str, cast: Cast, value: Any) -> Cast:
        return dataclasses.replace(cast, **{field: value})

    return change


def _set_hadamard(name: str, cast: Cast, size: int) -> Cast:
    return dataclasses.replace(cast, hadamard=size, redrawn=cast.redrawn and size != 1)


def _set_formats(name: str, cast: Cast, formats: dict[Format, Format]) -> Cast:
    return dataclasses.replace(cast, format=formats[cast.format])


def _set_margin(name: str, cast: Cast, margin: int) -> Cast:
    if _is_graphcores(cast):
        return _set_margin_of_gradients(name, cast, margin)
    assert isinstance(cast.rule, Fp32 | Pow2)  # `_has_margin`
    return _set_rule(name, cast, dataclasses.replace(cast.rule, margin=margin))


def _set_margin_of_gradients(name: str, cast: Cast, margin: int) -> Cast:
    """The margin as in Graphcore's code: of gradients alone, and biases within 31."""
    margin = margin if name.endswith("_g") else 0
    if isinstance(cast.rule, Constant):
        value = min(max(cast.rule.value * 2.0**margin, 2.0**-31), 2.0**31)
        return dataclasses.replace(cast, scale=Constant(value))
    rule = Mse(margin) if isinstance(cast.rule, Mse) else Bias(margin)
    return dataclasses.replace(cast, scale=rule)


def _set_rule(name: str, cast: Cast, rule: ScaleRule) -> Cast:
    return (
        _set_delayed("rule")(name, cast, rule) if cast.delayed else _set("scale")(name, cast, rule)
    )


def _set_delayed(field: str) -> Callable[[str, Cast, Any], Cast]:
    def change(name: str, cast: Cast, value: Any) -> Cast:
        assert isinstance(cast.scale, Delayed)  # `_is_delayed`
        return dataclasses.replace(cast, scale=dataclasses.replace(cast.scale, **{field: value}))

    return change


def _set_bias(name: str, cast: Cast, bias: int) -> Cast:
    return dataclasses.replace(cast, scale=Constant(2.0**-bias))


OPTIONS: dict[str, Option] = {
    "forward": Option(
        parse=_parse_bf16,
        applies=_belongs_to("fwd"),
        change=_drop,
        help="`bf16`: the forward GEMM in BF16, dgrad and wgrad as they are",
    ),
    "backward": Option(
        parse=_parse_bf16,
        applies=_belongs_to("dgrad", "wgrad"),
        change=_drop,
        help="`bf16`: dgrad and wgrad in BF16, the forward as it is",
    ),
    "dgrad": Option(
        parse=_parse_bf16,
        applies=_belongs_to("dgrad"),
        change=_drop,
        help="`bf16`: the input gradient in BF16",
    ),
    "wgrad": Option(
        parse=_parse_bf16,
        applies=_belongs_to("wgrad"),
        change=_drop,
        help="`bf16`: the weight gradient in BF16",
    ),
    "only": Option(
        parse=_parse_casts,
        applies=_is_cast,
        change=_keep_only,
        help="the one cast, such as `fwd_w`, or the one GEMM, such as `wgrad`, that stays; all"
        " other operands in BF16 (of rotated operands only both can stay)",
    ),
    **{
        cast: Option(
            parse=_parse_bf16,
            applies=_belongs_to(cast),
            change=_drop,
            help="`bf16`: this operand of this GEMM in BF16",
        )
        for cast in CASTS
    },
    "history": Option(
        parse=_parse_int,
        applies=_is_delayed,
        change=_set_delayed("history"),
        help="number of amaxes in the history of a delayed cast",
    ),
    "amax": Option(
        parse=str,
        applies=_is_delayed,
        change=_set_delayed("amax"),
        help=(
            "which amax of the history sets the scale: `max` or `newest` (the largest, where the"
            " newest is 0)"
        ),
    ),
    "scale": Option(
        parse=as_scale_rule,
        applies=_has_free_scale_rule,
        change=_set_rule,
        help="`fp32`, `pow2`, `mse` (least squared error), `e8m0`, or `e8m0_floor` as in OCP",
    ),
    "bias": Option(
        parse=_parse_bias,
        applies=_is_constant,
        change=_set_bias,
        help="exponent b of a constant scale 2^-b",
    ),
    "margin": Option(
        parse=_parse_int,
        applies=_has_margin,
        change=_set_margin,
        help=(
            "binades left free above the amax; where a tensor has one current power of two, or a"
            " constant, of gradients alone, and the scale is clipped to 2^-31 to 2^31"
        ),
    ),
    "gradients": Option(
        parse=_parse_format,
        applies=_is_fp8_gradient,
        change=_set("format"),
        help="format of FP8 gradients: `e4m3` or `e5m2`",
    ),
    "formats": Option(
        parse=_parse_formats,
        applies=_is_ocp_fp8,
        change=_set_formats,
        help="`fnuz`: `e4m3fnuz` (largest number 240) and `e5m2fnuz` instead of OCP's formats;"
        " `e3m2`: 6 bits instead of them",
    ),
    "fp4_tile": Option(
        parse=_parse_fp4_tile,
        applies=_has_free_fp4_tile,
        change=_set("tile"),
        help="elements that share a scale in FP4: `row`, `tile128`, `mx32`, …",
    ),
    "wgrad_tile": Option(
        parse=_parse_tile,
        applies=_has_free_wgrad_tile,
        change=_set("tile"),
        help="elements that share a scale in wgrad: `token` for one scale a token; emulated",
    ),
    "wgrad_g_tile": Option(
        parse=_parse_tile,
        applies=_has_free_wgrad_g_tile,
        change=_set("tile"),
        help="the same for the gradient alone: `block128` takes the forward's kernel for blocks",
    ),
    "hadamard": Option(
        parse=_parse_int,
        applies=_is_rotated,
        change=_set_hadamard,
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
    """Returns the recipes with the option `name`, a key of `OPTIONS`, applied to their casts.

    `owner` is whose recipes they are, for error messages: "policy 'fp8_block'".

    Raises ValueError for a value that does not parse, and if the option applies to no cast or
    leaves none.
    """
    option, changed = OPTIONS[name], []
    try:
        parsed = option.parse(value)
    except ValueError as error:
        raise ValueError(f"{name}={value}: {error}") from None

    def change(cast_name: str, cast: Cast) -> Cast | None:
        if not option.applies(cast_name, cast):
            return cast
        changed.append(cast_name)
        return option.change(cast_name, cast, parsed)

    mapped = [(recipe, recipe.map(change)) for recipe in recipes]
    results = tuple(old if new == old else new for old, new in mapped)
    if not changed:
        raise ValueError(f"{name}={value}: no cast of {owner} uses this option")
    if not any(recipe.casts for recipe in results):
        raise ValueError(f"{name}={value}: {owner} would quantize nothing: that is 'bf16'")
    return results
