"""What the name of a recipe or of a policy means, with the options behind it.

    fp8_delayed:history=1024,margin=1      fp4_mixed:gradients=e5m2      nvfp4:head=fp8_current
    my_recipes:tile64                      my_recipes:tile64:margin=1

The second line names an object of the user's own module, a `Recipe` or a `Policy`.

Options follow a colon. Those of cast_options.py change casts, those of accumulation.py how FP8
GEMMs add up their products. A policy has four more: `head` sets the recipe of the LM head,
`qkv=shared` gives the projections to queries, keys and values the scales of one fused weight,
`bf16_first` and `bf16_last` set the exempt layers. The order of options does not matter: `head`
comes first, so that options that change recipes apply to the head, too, `accumulation` comes before
the accumulation of a single GEMM, and `qkv` comes last.
"""

import dataclasses
from typing import Any

from fp8jax.lookup import brief, lookup, own_object, unknown
from fp8jax.numerics.accumulation import ACCUMULATION_OPTIONS, parse_accumulation
from fp8jax.numerics.cast_options import OPTIONS, change_casts
from fp8jax.numerics.policy import POLICIES, Policy
from fp8jax.numerics.recipe import Recipe
from fp8jax.numerics.recipes import RECIPES

# Options that change the policy itself, not its casts.
POLICY_OPTIONS = ("head", "qkv", "bf16_first", "bf16_last")
RECIPE_OPTIONS = (*OPTIONS, *ACCUMULATION_OPTIONS)

# Options apply in this order: `accumulation` before that of one GEMM, which overrides it; `qkv`
# last, since it shares the casts that the others leave.
_ORDER = ("head", "bf16_first", "bf16_last", *RECIPE_OPTIONS, "qkv")


def as_recipe(recipe: str | Recipe) -> Recipe:
    """Returns `recipe`, or the recipe of that name with the options behind a colon applied.

    Raises:
      TypeError: if it is neither a recipe nor a name.
      ValueError: for an unknown name or option, the name of a policy that is no recipe, a value
        that does not parse, and an option that applies to no cast.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, Policy):
        raise TypeError(
            f"policy {recipe.name!r} says which module runs which recipe: give one of its recipes,"
            " such as policy.recipe('layers/mlp/up')"
        )
    if not isinstance(recipe, str):
        raise TypeError(
            f"expected a recipe or its name, a key of fp8jax.RECIPES, got {brief(recipe)}"
        )
    name, options = _split(recipe, "recipe", RECIPE_OPTIONS)
    if name in POLICIES and name not in RECIPES:
        raise ValueError(
            f"{name!r} is a policy, which says which module of a model runs which recipe; recipes"
            f" are {', '.join(RECIPES)}"
        )
    if ":" in name:
        resolved = own_object("recipe", name)
        if not isinstance(resolved, Recipe):
            raise TypeError(f"{name} is no recipe, but {brief(resolved)}")
        resolved = dataclasses.replace(resolved, name=name)
    else:
        resolved = lookup("recipe", name, RECIPES)
    if not options:
        return resolved
    for key, value in options:
        (resolved,) = _change_recipes(f"recipe {name!r}", (resolved,), key, value)
    return dataclasses.replace(resolved, name=recipe)


def as_policy(policy: str | Policy) -> Policy:
    """Returns `policy`, or the policy of that name with the options behind a colon applied.

    Raises:
      TypeError: if it is neither a policy nor a name.
      ValueError: for an unknown name or option, a value that does not parse, and an option that
        applies to no cast of the policy.
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, Recipe):
        raise TypeError(
            f"recipe {policy.name!r} is not a policy, which says which module runs which recipe:"
            ' use fp8jax.Policy((("layers/*", recipe),))'
        )
    if not isinstance(policy, str):
        raise TypeError(
            f"expected a policy or its name, a key of fp8jax.POLICIES, got {brief(policy)}"
        )
    name, options = _split(policy, "policy", (*RECIPE_OPTIONS, *POLICY_OPTIONS))
    resolved = _own_policy(name) if ":" in name else lookup("policy", name, POLICIES)
    for key, value in options:
        resolved = _apply(resolved, key, value)
    return dataclasses.replace(resolved, name=policy)


def _own_policy(name: str) -> Policy:
    """The policy MODULE:OBJECT; a recipe is that of all linears in layers."""
    own = own_object("policy", name)
    if isinstance(own, Recipe):
        return Policy((("layers/*", dataclasses.replace(own, name=name)),))
    if not isinstance(own, Policy):
        raise TypeError(f"{name} is no policy and no recipe, but {brief(own)}")
    return own


def _split(text: str, kind: str, known: tuple[str, ...]) -> tuple[str, list[tuple[str, str]]]:
    """Returns the name, and (option, value) of each option in the order in which they apply.

    `known` are the names of options.
    """
    name, colon, behind = text.partition(":")
    own, more, options_of_own = behind.partition(":")
    if own.isidentifier() and name not in POLICIES and name not in RECIPES:  # MODULE:OBJECT
        name, colon, behind = f"{name}:{own}", more, options_of_own
    if colon and not behind:
        raise ValueError(
            f"{kind} {text!r} has a colon and no option: drop it, or give OPTION=VALUE"
        )
    options: dict[str, str] = {}
    for option in behind.split(",") if behind else ():
        key, equals, value = option.partition("=")
        if kind == "recipe" and key in POLICY_OPTIONS:
            raise ValueError(f"{text!r} names a recipe: {key} is an option of policies only")
        if key not in known:
            raise unknown("option", key, known)
        if not equals:
            raise ValueError(f"{kind} {text!r}: expected {key}=VALUE, got {option!r}")
        if key in options:
            raise ValueError(f"{kind} {text!r} sets {key} twice")
        options[key] = value
    return name, [(key, options[key]) for key in _ORDER if key in options]


def _apply(policy: Policy, name: str, value: str) -> Policy:
    if name == "head":
        return dataclasses.replace(policy, rules=(("lm_head", as_recipe(value)), *policy.rules))
    if name == "qkv":
        return _with_shared_qkv(policy, value)
    if name in POLICY_OPTIONS:
        return dataclasses.replace(policy, **{name: _number(name, value)})
    patterns, recipes = zip(*policy.rules, strict=True)
    changed = _change_recipes(f"policy {policy.name!r}", recipes, name, value)
    return dataclasses.replace(policy, rules=tuple(zip(patterns, changed, strict=True)))


def _change_recipes(
    owner: str, recipes: tuple[Recipe, ...], name: str, value: str
) -> tuple[Recipe, ...]:
    """Returns the recipes of `owner` with an option applied; raises ValueError if none takes it."""
    if name in OPTIONS:
        return change_casts(owner, recipes, name, value)
    gemms, _ = ACCUMULATION_OPTIONS[name]
    try:
        how = parse_accumulation(value)
    except ValueError as error:
        raise ValueError(f"{name}={value}: {error}") from None
    if not any(recipe.gemms[gemm].sums_codes for recipe in recipes for gemm in gemms):
        raise ValueError(
            f"{name}={value}: no GEMM of {owner} uses this option: it is for FP8 operands with"
            " scales that are constant along the contracting axis"
        )
    changed = [recipe.with_accumulation(how, gemms) for recipe in recipes]
    return tuple(old if new == old else new for old, new in zip(recipes, changed, strict=True))


def _with_shared_qkv(policy: Policy, value: str) -> Policy:
    """Returns the policy with one scale for the weights of queries, keys and values together.

    The gradients of their results share a scale, too. Raises ValueError for another value, if the
    three run different recipes, and if these have no scales that can be shared.
    """
    if value != "shared":
        raise ValueError(f"qkv={value}: expected qkv=shared")
    recipes = {policy.recipe(f"layers/attention/{name}") for name in "qkv"}
    if len(recipes) > 1:
        raise ValueError(
            f"qkv={value}: policy {policy.name!r} gives queries, keys and values different recipes"
        )
    (recipe,) = recipes
    if not recipe.sharing_scales().shares_scales:
        raise ValueError(
            f"qkv={value}: no cast of {recipe.name!r} has one current scale for the whole tensor"
        )
    rule = ("layers/attention/[qkv]", recipe.sharing_scales())
    return dataclasses.replace(policy, rules=(rule, *policy.rules))


def _number(name: str, value: str) -> Any:
    try:
        return float(value)
    except ValueError:
        raise ValueError(
            f"{name}={value}: expected a number of layers, such as 2 or 0.15"
        ) from None
