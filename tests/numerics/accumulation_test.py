"""Options of accumulation: what they set, what they leave alone, and what refuses them."""

import dataclasses

import pytest

from fp8jax.numerics.accumulation import Accumulation
from fp8jax.numerics.names import as_policy, as_recipe
from fp8jax.numerics.recipe import Recipe
from fp8jax.numerics.recipes import RECIPES

# The recipes with FP8 GEMMs whose scales are constant along the contracting axis, and those GEMMs.
ALL = ("fwd", "dgrad", "wgrad")
CHOICE = {
    "fp8_delayed": ALL,
    "fp8_current": ALL,
    "fp8_amax": ALL,
    "fp8_cscale": ALL,
    "fp8_rowwise": ALL,
    "fp8_rowwise_wgrad_bf16": ("fwd", "dgrad"),
}


def splits(recipe: Recipe) -> tuple[str, ...]:
    return tuple(name for name, how in recipe.accumulation._asdict().items() if how == "split")


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_fast_and_split_where_there_is_a_choice(name):
    assert splits(RECIPES[name]) == ()
    for option, asked in (
        ("accumulation", ALL),
        *((f"{gemm}_accumulation", (gemm,)) for gemm in ALL),
    ):
        spec = f"{name}:{option}=split"
        has = tuple(gemm for gemm in asked if name in CHOICE and gemm in CHOICE[name])
        if not has:
            with pytest.raises(
                ValueError, match=f"^{option}=split: no GEMM of recipe '{name}' uses"
            ):
                as_recipe(spec)
            continue
        recipe = as_recipe(spec)
        assert splits(recipe) == has and recipe != RECIPES[name] and recipe.name == spec
        assert recipe.by_name() == RECIPES[name].by_name()
        assert splits(recipe.current()) == has
        assert as_recipe(f"{name}:{option}=fast") == RECIPES[name]


def test_the_option_of_one_gemm_overrides_that_of_all():
    """In any order. This is TransformerEngine's choice, spelled in three ways."""
    specs = (
        "dgrad_accumulation=split,wgrad_accumulation=split",
        "accumulation=split,fwd_accumulation=fast",
        "fwd_accumulation=fast,accumulation=split",
    )
    for spec in specs:
        assert splits(as_recipe(f"fp8_delayed:{spec}")) == ("dgrad", "wgrad")
        assert splits(as_policy(f"fp8_delayed:{spec}").recipe("layers/mlp/up")) == (
            "dgrad",
            "wgrad",
        )


def test_a_policy_sets_it_where_there_is_a_choice():
    policy = as_policy("fp8_block:accumulation=split,head=fp8_current")
    assert splits(policy.recipe("lm_head")) == ALL
    assert policy.recipe("layers/mlp/up") is RECIPES["fp8_block"]
    with pytest.raises(ValueError, match="no GEMM of policy 'fp4_mixed' uses this option"):
        as_policy("fp4_mixed:accumulation=split")


def test_a_recipe_is_described_with_its_split_sums():
    recipe = as_recipe("fp8_current:dgrad_accumulation=split,wgrad_accumulation=split")
    assert repr(recipe).endswith("; accumulation: dgrad+wgrad split)")
    assert recipe.table().splitlines()[-1].split() == ["accumulation", "dgrad+wgrad", "split"]
    assert "accumulation" not in repr(RECIPES["fp8_current"]) + RECIPES["fp8_current"].table()
    last = as_policy("fp8_current:fwd_accumulation=split").table().splitlines()[-1]
    assert last.split() == ["layers/*", "fp8_current", "accumulation", "fwd", "split"]


def test_with_forward_takes_the_accumulation_of_the_forward():
    split, fast = as_recipe("fp8_current:accumulation=split"), RECIPES["fp8_rowwise"]
    assert splits(split.with_forward(fast)) == ("dgrad", "wgrad")
    assert splits(fast.with_forward(split)) == ("fwd",)


def test_contradictions_are_refused():
    split = Accumulation(wgrad="split")
    with pytest.raises(ValueError, match="accumulation='split' of wgrad: only a GEMM of two FP8"):
        dataclasses.replace(RECIPES["fp8_block"], accumulation=split)
    with pytest.raises(ValueError, match="unknown accumulation of dgrad 'slow'"):
        dataclasses.replace(RECIPES["fp8_current"], accumulation=Accumulation(dgrad="slow"))
    with pytest.raises(ValueError, match="accumulation=fats: unknown accumulation 'fats'; did you"):
        as_recipe("fp8_current:accumulation=fats")
