"""Reprs of recipes and policies fit two lines of a terminal, and their tables say every field."""

import pytest

from fp8jax.numerics.formats import FORMATS
from fp8jax.numerics.names import as_policy, as_recipe
from fp8jax.numerics.policy import POLICIES
from fp8jax.numerics.recipe import Cast, Recipe
from fp8jax.numerics.recipes import RECIPES
from fp8jax.numerics.scales import Delayed, Pow2
from fp8jax.numerics.tiles import Tile


@pytest.mark.parametrize("name", [*RECIPES, "fp8_delayed:history=1024,margin=1"])
def test_a_recipe_is_a_line_or_two_that_no_other_recipe_has(name):
    recipe = as_recipe(name)
    assert repr(recipe).startswith(f"Recipe({name!r}, ") and len(repr(recipe)) <= 240
    without_name = repr(recipe).replace(repr(name), "", 1)
    assert all(
        without_name != repr(other).replace(repr(other.name), "", 1)
        for other in RECIPES.values()
        if other != recipe
    )


@pytest.mark.parametrize("name", [*POLICIES, "nvfp4:head=fp8_current,bf16_last=2"])
def test_a_policy_is_a_line_or_two(name):
    policy = as_policy(name)
    assert repr(policy).startswith(f"Policy({name!r}, ") and len(repr(policy)) <= 200
    assert all(pattern in repr(policy) for pattern, _ in policy.rules)
    lines = policy.table().splitlines()
    assert len(lines) == 1 + 6 * len(policy.rules)
    assert lines == [line.rstrip() for line in lines]


def test_the_table_by_hand():
    recipe = Recipe(
        name="mine",
        fwd_x=Cast(format=FORMATS["e4m3"], tile=Tile(2, 64), scale=Pow2(3), rounding="stochastic"),
        fwd_w=Cast(format=FORMATS["e5m2"], scale=Delayed(4)),
        wgrad_g=Cast(format=FORMATS["e5m2"], shared_scale=True),
    )
    words = [line.split("  ") for line in recipe.table().splitlines()]
    rows = [[cell.strip() for cell in line if cell.strip()] for line in words]
    assert rows == [
        ["cast", "format", "tile", "scale", "timing", "rounding", "Hadamard"],
        ["fwd_x", "e4m3", "2 x 64", "Pow2(margin=3)", "current", "stochastic", "-"],
        ["fwd_w", "e5m2", "tensor", "fp32", "delayed, max of 4", "nearest", "-"],
        *[[name, "high precision"] for name in ("dgrad_g", "dgrad_w", "wgrad_x")],
        ["wgrad_g", "e5m2", "tensor, shared", "fp32", "current", "nearest", "-"],
    ]
    assert repr(recipe) == (
        "Recipe('mine', fwd_x: e4m3 2 x 64 Pow2(margin=3) current stochastic;"
        " fwd_w: e5m2 tensor fp32 delayed, max of 4;"
        " dgrad_g+dgrad_w+wgrad_x: high precision; wgrad_g: e5m2 tensor, shared fp32 current)"
    )
