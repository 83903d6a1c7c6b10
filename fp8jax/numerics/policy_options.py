"""Options behind a policy's name, and `as_policy`, which resolves a name with options.

Options follow a colon:

    fp8_delayed:history=1024,margin=1      fp4_mixed:gradients=e5m2      nvfp4:head=fp8_current

Options in `OPTIONS` change the casts that they apply to. `head` sets the recipe of the LM head,
`bf16_first` and `bf16_last` set the exempt layers. The options cover what the papers leave open. In
the FP4 paper (arXiv 2502.11458), weights and activations may share scales along 128 elements or
along a whole token or channel (`fp4_tile=row`), and the FP8 gradients may be E4M3 or E5M2
(`gradients=e5m2`). An option that applies to no cast of the policy raises: the policy's name would
otherwise claim a change that did not happen.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from fp8jax.lookup import lookup, unknown
from fp8jax.numerics.formats import FORMATS, Format
from fp8jax.numerics.policy import POLICIES, Policy
from fp8jax.numerics.recipe import Cast
from fp8jax.numerics.recipes import as_recipe
from fp8jax.numerics.scales import Constant, Fp32, NvFp4, Pow2, as_scale_rule
from fp8jax.numerics.tiles import BLOCK128, MX32, NV16, ROW, TENSOR, TILE128, NV16x16, Tile

TILES = {
    "tensor": TENSOR, "row": ROW, "tile128": TILE128, "block128": BLOCK128, "mx32": MX32,
    "nv16": NV16, "nv16x16": NV16x16,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """NAME=VALUE behind a policy's name.

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
        parse=int,
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
        parse=int,
        applies=_has_margin,
        change=_set_margin,
        help="binades left free above the amax (scales in float32)",
    ),
    "bias": Option(
        parse=int,
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
        parse=int,
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

# Options that change the policy itself, not its casts.
_POLICY_OPTIONS = ("head", "bf16_first", "bf16_last")


def as_policy(policy: str | Policy) -> Policy:
    """Return `policy`, or the policy of that name with the options behind a colon applied.

    Raises ValueError for an unknown name or option, a value that does not parse, and an option that
    applies to no cast of the policy.
    """
    if isinstance(policy, Policy):
        return policy
    name, _, options = policy.partition(":")
    resolved = lookup("policy", name, POLICIES)
    for option in options.split(",") if options else ():
        key, equals, value = option.partition("=")
        if key not in OPTIONS and key not in _POLICY_OPTIONS:
            raise unknown("option", key, [*OPTIONS, *_POLICY_OPTIONS])
        if not equals:
            raise ValueError(f"policy {policy!r}: expected {key}=VALUE, got {option!r}")
        resolved = _apply_option(resolved, key, value)
    return dataclasses.replace(resolved, name=policy)


def _apply_option(policy: Policy, name: str, value: str) -> Policy:
    if name == "head":
        return dataclasses.replace(policy, rules=(("lm_head", as_recipe(value)), *policy.rules))
    try:
        if name == "bf16_first":
            return dataclasses.replace(policy, bf16_first=float(value))
        if name == "bf16_last":
            return dataclasses.replace(policy, bf16_last=float(value))
        parsed = OPTIONS[name].parse(value)
    except ValueError as error:
        raise ValueError(f"{name}={value}: {error}") from None
    changed = _change_casts(policy, OPTIONS[name], parsed)
    if changed is None:
        raise ValueError(f"{name}={value}: no cast of policy {policy.name!r} uses this option")
    return changed


def _change_casts(policy: Policy, option: Option, value: Any) -> Policy | None:
    """Return the policy with the option's casts changed; None if it applies to no cast."""
    changed: list[str] = []

    def change(name: str, cast: Cast) -> Cast:
        if not option.applies(name, cast):
            return cast
        changed.append(name)
        return option.change(cast, value)

    rules = tuple((pattern, recipe.map(change)) for pattern, recipe in policy.rules)
    return dataclasses.replace(policy, rules=rules) if changed else None
