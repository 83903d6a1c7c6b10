"""Recipes and policies: the table as documented, and every contradiction refused by name."""

import dataclasses
import re

import pytest

from fp8jax.formats import FORMATS
from fp8jax.model_config import MODULES
from fp8jax.recipe import (
    HIGH_PRECISION,
    HISTORY,
    POLICIES,
    RECIPES,
    Cast,
    Policy,
    Recipe,
    as_policy,
    as_recipe,
)
from fp8jax.scaling import (
    BLOCK128,
    MX32,
    NV16,
    ROW,
    SCALES,
    TENSOR,
    TILE128,
    Constant,
    Pow2,
)

E4M3, E5M2, E2M1 = (FORMATS[name] for name in ("e4m3", "e5m2", "e2m1"))
OPERANDS = ("fwd_x", "fwd_w", "dgrad_g", "dgrad_w", "wgrad_x", "wgrad_g")
DELAYED = Cast(format=E4M3, timing="delayed", history=4)
CURRENT = Cast(format=E4M3)


# Casts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        (dict(format=E4M3, timing="delay"), ["unknown timing 'delay'", "'delayed'"]),
        (dict(format=E4M3, rounding="stochastc"), ["unknown rounding", "'stochastic'"]),
        (dict(format=FORMATS["e8m0"]), ["e8m0 holds scales"]),
        # A history without delay, delay without a history.
        (dict(format=E4M3, history=4), ["timing='current'", "history=4"]),
        (dict(format=E4M3, history=-1), ["timing='current'", "history=-1"]),
        (dict(format=E4M3, timing="delayed"), ["timing='delayed'", "history=0"]),
        (dict(format=E4M3, timing="delayed", history=-1), ["timing='delayed'", "history=-1"]),
        (dict(format=E4M3, timing="seeding"), ["timing='seeding'", "history=0"]),
        (dict(format=E4M3, timing="constant", scale=Constant(2.0), history=1), ["history=1"]),
        # One amax a history.
        *[
            (
                dict(format=E4M3, timing=timing, history=4, tile=tile),
                ["delayed scaling", str(tile)],
            )
            for timing in ("delayed", "seeding")
            for tile in (ROW, TILE128, BLOCK128, MX32)
        ],
        (
            dict(format=E4M3, timing="delayed", history=4, scale=Constant(2.0)),
            ["delayed scaling", "Constant(value=2.0)"],
        ),
        (
            dict(format=E2M1, timing="delayed", history=4, scale=SCALES["nvfp4"]),
            ["delayed scaling", "NvFp4()"],
        ),
        # A constant that is none, and the other way round.
        (dict(format=E4M3, timing="constant"), ["timing='constant'", "Fp32()"]),
        (dict(format=E4M3, timing="constant", scale=Pow2(3)), ["'constant'", "Pow2(margin=3)"]),
        (dict(format=E4M3, scale=Constant(2.0)), ["timing='current'", "Constant(value=2.0)"]),
        (
            dict(format=E4M3, timing="constant", scale=Constant(2.0), tile=TILE128),
            ["constant", str(TILE128)],
        ),
        (dict(format=E4M3, tile=NV16, scale=SCALES["nvfp4"]), ["nvfp4", "e2m1", "format=e4m3"]),
    ],
)
def test_contradictions_in_a_cast_name_both_parts(kwargs, named):
    with pytest.raises(ValueError) as error:
        Cast(**kwargs)
    for part in named:
        assert part in str(error.value)


@pytest.mark.parametrize(
    "kwargs",
    [
        dict(format=E4M3),
        dict(format=E4M3, tile=MX32, scale=SCALES["e8m0"]),
        dict(format=E2M1, tile=NV16, scale=SCALES["nvfp4"], rounding="stochastic"),
        dict(format=E5M2, timing="delayed", history=1, scale=Pow2(1)),
        dict(format=E5M2, timing="constant", scale=Constant(2.0**-8)),
    ],
)
def test_what_does_not_contradict_itself_is_a_cast(kwargs):
    assert dataclasses.replace(Cast(**kwargs)) == Cast(**kwargs)


def test_a_scale_is_separable_if_constant_along_the_contraction():
    separable = {tile: Cast(format=E4M3, tile=tile).separable for tile in (TENSOR, ROW, TILE128)}
    assert separable == {TENSOR: True, ROW: True, TILE128: False}
    assert not Cast(format=E2M1, tile=TENSOR, scale=SCALES["nvfp4"]).separable


# Recipes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operand", "one", "other"),
    [("x", "fwd_x", "wgrad_x"), ("w", "fwd_w", "dgrad_w"), ("g", "dgrad_g", "wgrad_g")],
)
def test_an_operand_has_one_history(operand, one, other):
    longer = dataclasses.replace(DELAYED, history=7)
    with pytest.raises(ValueError, match=f"{operand} has one history.*(4, 7|7, 4)"):
        Recipe(**{one: DELAYED, other: longer})
    assert Recipe(**{one: DELAYED, other: DELAYED}).histories == {operand: 4}
    assert Recipe(**{one: DELAYED, other: CURRENT}).histories == {operand: 4}
    assert Recipe(**{one: CURRENT, other: longer}).histories == {operand: 7}


def test_operands_may_have_histories_of_unlike_lengths():
    longer = dataclasses.replace(DELAYED, history=7)
    recipe = Recipe(fwd_x=DELAYED, fwd_w=longer, wgrad_g=CURRENT)
    assert recipe.histories == {"x": 4, "w": 7}
    assert recipe.casts == (DELAYED, longer, CURRENT)


def cast_of(fmt, tile, scale, timing, history) -> Cast:
    return Cast(format=fmt, tile=tile, scale=scale, timing=timing, history=history)


FP32, UE8M0 = SCALES["fp32"], SCALES["e8m0"]
# Operand by operand: (format, tile, scale rule, timing, history), rounding to nearest everywhere.
DOCUMENTED = {
    "bf16": {},
    "fp8_delayed": dict(
        fwd_x=(E4M3, TENSOR, FP32, "delayed", 16), fwd_w=(E4M3, TENSOR, FP32, "delayed", 16),
        dgrad_g=(E5M2, TENSOR, FP32, "delayed", 16), dgrad_w=(E4M3, TENSOR, FP32, "delayed", 16),
        wgrad_x=(E4M3, TENSOR, FP32, "delayed", 16), wgrad_g=(E5M2, TENSOR, FP32, "delayed", 16),
    ),
    "fp8_current": dict(
        fwd_x=(E4M3, TENSOR, FP32, "current", 0), fwd_w=(E4M3, TENSOR, FP32, "current", 0),
        dgrad_g=(E5M2, TENSOR, FP32, "current", 0), dgrad_w=(E4M3, TENSOR, FP32, "current", 0),
        wgrad_x=(E4M3, TENSOR, FP32, "current", 0), wgrad_g=(E5M2, TENSOR, FP32, "current", 0),
    ),
    "fp8_block": dict(
        fwd_x=(E4M3, TILE128, FP32, "current", 0), fwd_w=(E4M3, BLOCK128, FP32, "current", 0),
        dgrad_g=(E4M3, TILE128, FP32, "current", 0), dgrad_w=(E4M3, BLOCK128, FP32, "current", 0),
        wgrad_x=(E4M3, TILE128, FP32, "current", 0), wgrad_g=(E4M3, TILE128, FP32, "current", 0),
    ),
    "fp8_block_ue8m0": dict(
        fwd_x=(E4M3, TILE128, UE8M0, "current", 0), fwd_w=(E4M3, BLOCK128, UE8M0, "current", 0),
        dgrad_g=(E4M3, TILE128, UE8M0, "current", 0), dgrad_w=(E4M3, BLOCK128, UE8M0, "current", 0),
        wgrad_x=(E4M3, TILE128, UE8M0, "current", 0), wgrad_g=(E4M3, TILE128, UE8M0, "current", 0),
    ),
    "fp4_block": dict(
        fwd_x=(E2M1, TILE128, FP32, "current", 0), fwd_w=(E2M1, TILE128, FP32, "current", 0),
        dgrad_g=(E4M3, TILE128, FP32, "current", 0), dgrad_w=(E4M3, BLOCK128, FP32, "current", 0),
        wgrad_x=(E4M3, TILE128, FP32, "current", 0), wgrad_g=(E4M3, TILE128, FP32, "current", 0),
    ),
}  # fmt: skip


def test_every_recipe_is_documented_here_and_knows_its_name():
    assert set(RECIPES) == set(DOCUMENTED)
    assert all(recipe.name == name for name, recipe in RECIPES.items())
    assert HISTORY == 16 and HIGH_PRECISION is RECIPES["bf16"]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_table_of_recipes(name):
    for operand in OPERANDS:
        expected = DOCUMENTED[name].get(operand)
        got = getattr(RECIPES[name], operand)
        assert got == (None if expected is None else cast_of(*expected)), operand


def test_products_pair_the_operands():
    casts = {n: Cast(format=E4M3, timing="constant", scale=Constant(2.0**i))
             for i, n in enumerate(OPERANDS)}  # fmt: skip
    assert Recipe(**casts).products == {
        "fwd": (casts["fwd_x"], casts["fwd_w"]),
        "dgrad": (casts["dgrad_g"], casts["dgrad_w"]),
        "wgrad": (casts["wgrad_x"], casts["wgrad_g"]),
    }
    assert set(Recipe(**casts).casts) == set(casts.values())


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_equal_by_their_casts_not_by_name_or_identity(name):
    copy = dataclasses.replace(RECIPES[name], name="another")
    assert copy is not RECIPES[name] and copy.name == "another"
    assert copy == RECIPES[name] and hash(copy) == hash(RECIPES[name])
    assert len({*RECIPES.values(), copy}) == len(RECIPES)


@pytest.mark.parametrize(
    "change",
    [
        dict(format=E5M2),
        dict(tile=TILE128),
        dict(scale=Pow2()),
        dict(scale=Pow2(1)),
        dict(rounding="stochastic"),
        dict(timing="delayed", history=4),
    ],
)
@pytest.mark.parametrize("operand", OPERANDS)
def test_every_field_of_every_cast_is_part_of_a_recipes_identity(operand, change):
    one = Recipe(**{operand: CURRENT})
    other = Recipe(**{operand: dataclasses.replace(CURRENT, **change)})
    assert one != other and one != Recipe()
    assert other.stochastic == ("rounding" in change)
    assert bool(other.histories) == ("history" in change)


@pytest.mark.parametrize("name", RECIPES)
def test_seeding_changes_the_timing_of_delayed_casts_only(name):
    seeding = RECIPES[name].seeding()
    for operand in OPERANDS:
        cast, seeded = getattr(RECIPES[name], operand), getattr(seeding, operand)
        if cast is not None and cast.timing == "delayed":
            assert seeded == dataclasses.replace(cast, timing="seeding") and seeded.delayed
        else:
            assert seeded == cast
    assert seeding.seeding() == seeding and seeding.name == name
    assert seeding.histories == RECIPES[name].histories  # the same variables
    assert (seeding == RECIPES[name]) == (name != "fp8_delayed")


def test_seeding_of_a_recipe_with_one_delayed_cast():
    recipe = Recipe(fwd_x=DELAYED, fwd_w=CURRENT)
    assert recipe.seeding() == Recipe(
        fwd_x=dataclasses.replace(DELAYED, timing="seeding"), fwd_w=CURRENT
    )


@pytest.mark.parametrize("name", RECIPES)
def test_histories(name):
    expected = {"x": 16, "w": 16, "g": 16} if name == "fp8_delayed" else {}
    assert RECIPES[name].histories == expected


# Policies -----------------------------------------------------------------------------------------


def test_the_first_match_wins_and_what_is_unmatched_is_bf16():
    block, current = RECIPES["fp8_block"], RECIPES["fp8_current"]
    policy = Policy((("layers/mlp/down", block), ("layers/mlp/*", current)))
    assert policy.recipe("layers/mlp/down") is block
    assert policy.recipe("layers/mlp/up") is current
    assert policy.recipe("layers/attention/q") == policy.recipe("lm_head") == HIGH_PRECISION
    reversed_rules = Policy(policy.rules[::-1])
    assert reversed_rules.recipe("layers/mlp/down") is current
    assert policy != reversed_rules


def test_patterns_match_whole_paths_and_their_case():
    policy = Policy((("mlp/*", RECIPES["fp8_block"]), ("LAYERS/*", RECIPES["fp8_block"])))
    assert policy.recipe("layers/mlp/down") == HIGH_PRECISION


@pytest.mark.parametrize("pattern", ["layers/mpl/*", "mlp/*", "layers/0/mlp/*", "layers/mlp"])
def test_a_rule_that_matches_nothing_raises_with_its_pattern_and_what_there_is(pattern):
    policy = Policy((("layers/*", HIGH_PRECISION), (pattern, HIGH_PRECISION)), name="mine")
    message = re.escape(repr(pattern)) + " matches no module.*layers/mlp/down"
    with pytest.raises(ValueError, match=f"'mine'.*{message}"):
        policy.check(MODULES, 4)


def test_a_rule_that_an_earlier_one_hides_still_matches_a_module():
    """It is redundant, not a typo."""
    Policy((("layers/*", HIGH_PRECISION), ("layers/mlp/*", HIGH_PRECISION))).check(MODULES, 1)


def test_more_exempt_layers_than_there_are():
    policy = Policy((("layers/*", RECIPES["fp8_block"]),), 3, 2, name="mine")
    policy.check(MODULES, 5)
    with pytest.raises(ValueError, match="'mine': 3 first and 2 last layers.*, of 4"):
        policy.check(MODULES, 4)
    for first, last in [(-1, 0), (0, -1), (3, -2)]:
        with pytest.raises(ValueError, match=rf"negative: .*first={first}.*last={last}"):
            Policy((), first, last)


def test_policies_are_equal_by_rules_and_exemptions():
    policy = POLICIES["fp8_block"]
    copy = Policy((("layers/*", dataclasses.replace(RECIPES["fp8_block"], name="y")),), name="x")
    assert copy == policy and hash(copy) == hash(policy)
    assert dataclasses.replace(policy, bf16_first=1) != policy
    assert dataclasses.replace(policy, bf16_last=1) != policy
    exempt = dataclasses.replace(policy, bf16_first=1, bf16_last=2)
    assert exempt.without_exemptions() == policy
    assert exempt.without_exemptions().name == policy.name == "fp8_block"


def test_seeding_of_a_policy():
    rules = (("layers/mlp/*", RECIPES["fp8_block"]), ("layers/*", RECIPES["fp8_delayed"]))
    policy = Policy(rules, 1, 2, name="mine")
    seeding = policy.seeding()
    assert seeding.rules == (rules[0], ("layers/*", RECIPES["fp8_delayed"].seeding()))
    assert (seeding.bf16_first, seeding.bf16_last, seeding.name) == (1, 2, "mine")
    assert seeding.seeding() == seeding != policy
    assert policy.delayed and seeding.delayed
    for name, other in POLICIES.items():
        assert other.delayed == (name == "fp8_delayed") == (other.seeding() != other)


def test_a_policy_is_stochastic_if_one_of_its_casts_is():
    assert not any(policy.stochastic for policy in POLICIES.values())
    recipe = Recipe(wgrad_g=dataclasses.replace(CURRENT, rounding="stochastic"))
    assert Policy((("layers/*", HIGH_PRECISION), ("lm_head", recipe))).stochastic


def test_there_is_a_policy_for_each_recipe():
    """Every linear of every layer; the head stays as it is."""
    assert set(POLICIES) == {*RECIPES, "fp4_mixed"}
    for name, recipe in RECIPES.items():
        policy = POLICIES[name]
        assert policy.name == name and (policy.bf16_first, policy.bf16_last) == (0, 0)
        for path in MODULES:
            assert policy.recipe(path) == (HIGH_PRECISION if path == "lm_head" else recipe)


def test_fp4_mixed_has_fp4_in_the_mlp_and_fp8_in_the_attention():
    assert {path: POLICIES["fp4_mixed"].recipe(path).name for path in MODULES} == {
        "layers/attention/q": "fp8_block",
        "layers/attention/k": "fp8_block",
        "layers/attention/v": "fp8_block",
        "layers/attention/o": "fp8_block",
        "layers/mlp/gate": "fp4_block",
        "layers/mlp/up": "fp4_block",
        "layers/mlp/down": "fp4_block",
        "lm_head": "bf16",
    }


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_fits_the_model(name):
    POLICIES[name].check(MODULES, 1)


def test_names_and_objects_resolve_alike():
    assert as_recipe("fp8_block") is RECIPES["fp8_block"] is as_recipe(RECIPES["fp8_block"])
    assert as_policy("fp4_mixed") is POLICIES["fp4_mixed"] is as_policy(POLICIES["fp4_mixed"])
    with pytest.raises(ValueError, match="unknown recipe 'fp8_curent'.*'fp8_current'"):
        as_recipe("fp8_curent")
    with pytest.raises(ValueError, match="unknown policy 'fp4_mix'.*'fp4_mixed'"):
        as_policy("fp4_mix")
