"""TODO docstring."""

import dataclasses
from collections.abc import Callable
from typing import Any

from fp8jax.lookup import lookup, unknown
from fp8jax.numerics.formats import FORMATS
from fp8jax.numerics.policy import POLICIES, Policy
from fp8jax.numerics.recipe import Cast
from fp8jax.numerics.recipes import as_recipe
from fp8jax.numerics.scales import Constant, Fp32, NvFp4, Pow2, as_scale_rule
from fp8jax.numerics.tiles import BLOCK128, MX32, NV16, ROW, TENSOR, TILE128, NV16x16

TILES = {
    "tensor": TENSOR, "row": ROW, "tile128": TILE128, "block128": BLOCK128, "mx32": MX32,
    "nv16": NV16, "nv16x16": NV16x16,
}  # fmt: skip


# Options ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Option:
    """NAME=VALUE behind a policy's name.

    Attributes:
      parse: text to value; raises ValueError.
      takes: (name of the cast, such as "dgrad_g", the cast) -> whether it is about this one.
      change: (cast, value) -> the cast with it.
      help: one line for docs/recipes.md.
    """

    parse: Callable[[str], Any]
    takes: Callable[[str, Cast], bool]
    change: Callable[[Cast, Any], Cast]
    help: str


def _replace(field: str) -> Callable[[Cast, Any], Cast]:
    return lambda cast, value: dataclasses.replace(cast, **{field: value})


def _has_margin(name: str, cast: Cast) -> bool:
    return isinstance(cast.scale, Fp32 | Pow2)


def _free_rule(cast: Cast) -> bool:
    return not isinstance(cast.scale, Constant | NvFp4)


OPTIONS: dict[str, Option] = {
    "history": Option(
        int, lambda _, c: c.delayed, _replace("history"), "amaxes that a delayed cast keeps"
    ),
    "amax": Option(
        str, lambda _, c: c.delayed, _replace("amax"), "of a history: `max`, or the `newest`"
    ),
    "margin": Option(
        int, _has_margin,
        lambda c, v: dataclasses.replace(c, scale=dataclasses.replace(c.scale, margin=v)),  # type: ignore[type-var]
        "binades left free above the amax (scales in float32)",
    ),
    "bias": Option(
        int, lambda _, c: c.timing == "constant",
        lambda c, v: dataclasses.replace(c, scale=Constant(2.0**-v)),
        "exponent b of a constant scale 2^-b",
    ),
    "scale": Option(
        as_scale_rule, lambda _, c: _free_rule(c), _replace("scale"),
        "`fp32`, `pow2`, `e8m0`, or `e8m0_floor` as in OCP Microscaling",
    ),
    "gradients": Option(
        lambda text: lookup("format", text, FORMATS),
        lambda name, c: name.endswith("_g") and c.format.bits == 8,
        _replace("format"), "format of FP8 gradients: `e4m3` or `e5m2`",
    ),
    "fp4_tile": Option(
        lambda text: lookup("tile", text, TILES),
        lambda _, c: c.format.bits == 4 and _free_rule(c),
        _replace("tile"), "elements that share a scale in FP4: `row`, `tile128`, `mx32`, …",
    ),
    "hadamard": Option(
        int, lambda _, c: c.hadamard > 1, _replace("hadamard"), "size of the rotation, 1 for none"
    ),
    "rounding": Option(
        str, lambda _, c: c.rounding == "stochastic", _replace("rounding"),
        "`nearest` instead of stochastic",
    ),
}  # fmt: skip


_POLICY_OPTIONS = ("head", "bf16_first", "bf16_last")


def _apply_option(policy: Policy, name: str, value: str) -> Policy:
    if name == "head":
        return dataclasses.replace(policy, rules=(("lm_head", as_recipe(value)), *policy.rules))
    try:
        if name == "bf16_first":
            return dataclasses.replace(policy, bf16_first=float(value))
        if name == "bf16_last":
            return dataclasses.replace(policy, bf16_last=float(value))
        option = OPTIONS[name]
        parsed = option.parse(value)
    except ValueError as error:
        raise ValueError(f"{name}={value}: {error}") from None
    changed = 0

    def change(operand: str, cast: Cast) -> Cast:
        nonlocal changed
        if not option.takes(operand, cast):
            return cast
        changed += 1
        return option.change(cast, parsed)

    rules = tuple((pattern, recipe.map(change)) for pattern, recipe in policy.rules)
    if not changed:
        raise ValueError(f"{name}={value}: no cast of policy {policy.name!r} has such a thing")
    return dataclasses.replace(policy, rules=rules)


def as_policy(policy: str | Policy) -> Policy:
    """`policy`, resolved if it is a name, with options after a colon.

    Raises ValueError for an unknown name or option, and for an option that nothing takes.
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
