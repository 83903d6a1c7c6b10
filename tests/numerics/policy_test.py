"""Policies: first match, exemptions, options; schedules; every contradiction refused by name."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.numerics.cast_options import OPTIONS
from fp8jax.numerics.formats import FORMATS
from fp8jax.numerics.module_paths import MODULES
from fp8jax.numerics.names import as_policy, as_recipe
from fp8jax.numerics.policy import POLICIES, Policy
from fp8jax.numerics.recipe import CASTS, Cast, Recipe
from fp8jax.numerics.recipes import HIGH_PRECISION, RECIPES
from fp8jax.numerics.scales import SCALES, Bias, Constant, Delayed, Fp32, Mse, Pow2
from fp8jax.numerics.schedule import PrecisionSchedule, as_schedule
from fp8jax.numerics.tiles import BLOCK128, MX32, ROW, TOKEN

CURRENT = Cast(format=FORMATS["e4m3"])


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
    with pytest.raises(ValueError, match="'mine': 3 first and 2 last layers.*only 4"):
        policy.check(MODULES, 4)
    for bad in [dict(bf16_first=-1), dict(bf16_last=-2), dict(bf16_last=1.5)]:
        ((name, value),) = bad.items()
        with pytest.raises(ValueError, match=f"{name}={value} is neither a number of layers nor"):
            Policy((), **bad)


def test_exempt_layers_may_be_a_share_rounded_up():
    """NVIDIA's 12B: 10 of 62 blocks, 16%."""
    policy = Policy((), bf16_last=0.15)
    assert [policy.exempt(n) for n in (1, 4, 12, 20, 62)] == [
        (0, 1),
        (0, 1),
        (0, 2),
        (0, 3),
        (0, 10),
    ]
    assert Policy((), 2, 0.5).exempt(8) == (2, 4) and Policy((), 1.0, 2.0).exempt(8) == (1, 2)


def test_policies_are_equal_by_rules_and_exemptions():
    policy = POLICIES["fp8_block"]
    copy = Policy((("layers/*", dataclasses.replace(RECIPES["fp8_block"], name="y")),), name="x")
    assert copy == policy and hash(copy) == hash(policy)
    assert dataclasses.replace(policy, bf16_first=1) != policy
    assert dataclasses.replace(policy, bf16_last=1) != policy
    exempt = dataclasses.replace(policy, bf16_first=1, bf16_last=2)
    assert exempt.without_exemptions() == policy
    assert exempt.without_exemptions().name == policy.name == "fp8_block"


def test_current_of_a_policy():
    rules = (("layers/mlp/*", RECIPES["fp8_block"]), ("layers/*", RECIPES["fp8_delayed"]))
    policy = Policy(rules, 1, 2, name="mine")
    current = policy.current()
    assert current.rules == (rules[0], ("layers/*", RECIPES["fp8_delayed"].current()))
    assert (current.bf16_first, current.bf16_last, current.name) == (1, 2, "mine")
    assert current.current() == current != policy
    assert policy.delayed and not current.delayed
    for name, other in POLICIES.items():
        assert other.delayed == (name == "fp8_delayed") == (other.current() != other)


def test_a_policy_is_stochastic_if_one_of_its_casts_is():
    stochastic = {name for name, policy in POLICIES.items() if policy.stochastic}
    variants = {"nvfp4_unbiased", "nvfp4_4over6", "quartet2", "tetrajet2"}
    assert stochastic == {"nvfp4", "nvfp4_mixed", "nemotron3", "mxfp4", *variants}
    recipe = Recipe(wgrad_g=dataclasses.replace(CURRENT, rounding="stochastic"))
    assert Policy((("layers/*", HIGH_PRECISION), ("lm_head", recipe))).stochastic


def test_there_is_a_policy_for_each_recipe():
    """Every linear of every layer; the head stays as it is."""
    assert set(POLICIES) == {
        *RECIPES,
        "fp4_mixed",
        "fp4_backward",
        "nvfp4_mixed",
        "nemotron3",
        "deepseek_v4",
    }
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


def test_the_two_by_two_of_the_fp4_paper():
    """(attention's forward, every backward) -> policy; the MLP's forward is FP4 in all four."""
    names = {(4, 4): "fp4_naive", (4, 8): "fp4_block", (8, 4): "fp4_backward", (8, 8): "fp4_mixed"}
    for (attention, backward), name in names.items():
        policy = POLICIES[name]
        for path in MODULES[:-1]:
            recipe = policy.recipe(path)
            forward = attention if "attention" in path else 4
            assert {recipe.fwd_x.format.bits, recipe.fwd_w.format.bits} == {forward}
            casts = (recipe.dgrad_g, recipe.dgrad_w, recipe.wgrad_x, recipe.wgrad_g)
            assert {cast.format.bits for cast in casts} == {backward}
        assert policy.recipe("lm_head") == HIGH_PRECISION


def test_nvfp4_mixed_leaves_the_last_layers_in_bf16():
    policy = POLICIES["nvfp4_mixed"]
    assert policy.without_exemptions() == POLICIES["nvfp4"] and policy.exempt(62) == (0, 10)


def test_policies_of_released_models():
    nemotron, deepseek = POLICIES["nemotron3"], POLICIES["deepseek_v4"]
    assert nemotron.exempt(20) == (0, 3) and deepseek.exempt(20) == (0, 0)
    for path in MODULES:
        mlp, head = path.startswith("layers/mlp/"), path == "lm_head"
        assert nemotron.recipe(path) is (RECIPES["nvfp4"] if mlp else HIGH_PRECISION)
        other = HIGH_PRECISION if head else RECIPES["fp8_block_ue8m0"]
        assert deepseek.recipe(path) is (RECIPES["fp4_weights"] if mlp else other)
    weights, blocks = RECIPES["fp4_weights"], RECIPES["fp8_block_ue8m0"]
    assert weights.with_forward(blocks) == dataclasses.replace(blocks, dgrad_w=weights.dgrad_w)
    assert weights.fwd_x == blocks.fwd_x


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_fits_the_model(name):
    POLICIES[name].check(MODULES, 1)


def test_the_margin_of_graphcore_is_that_of_gradients():
    """Biases within 31, as in popxl-addons; of other recipes the margin shifts all casts."""
    for scale, rule in (("pow2", Bias), ("mse", Mse)):
        casts = casts_of(f"fp8_amax:scale={scale},margin=3")
        for name, cast in casts.items():
            assert cast.rule == rule(3 if name.endswith("_g") else 0), name
    small, large = np.float32([2.0**-60, 2.0**60])
    e5m2 = FORMATS["e5m2"]
    for amax, bias in ((small, 28), (large, -31), (np.float32(57344.0), -3), (np.float32(1), 12)):
        assert Bias(3)(jnp.asarray(amax), e5m2)[0] == 2.0**-bias


def test_names_and_objects_resolve_alike():
    assert as_policy("fp4_mixed") == POLICIES["fp4_mixed"] is as_policy(POLICIES["fp4_mixed"])
    with pytest.raises(ValueError, match="unknown policy 'fp4_mix'.*'fp4_mixed'"):
        as_policy("fp4_mix")


# Options ------------------------------------------------------------------------------------------


def casts_of(spec: str, module: str = "layers/mlp/up") -> dict[str, Cast]:
    recipe = as_policy(spec).recipe(module)
    names = ("fwd_x", "fwd_w", "dgrad_g", "dgrad_w", "wgrad_x", "wgrad_g")
    return {name: getattr(recipe, name) for name in names}


@pytest.mark.parametrize(
    ("spec", "field", "value", "names"),
    [
        ("fp8_delayed:history=1024", "scale", Delayed(1024), "all"),
        ("fp8_delayed:amax=newest", "scale", Delayed(16, "newest"), "all"),
        ("fp8_delayed:margin=1", "scale", Delayed(16, rule=Fp32(1)), "all"),
        ("fp8_cscale:margin=3", "scale", Constant(0.125), "dgrad_g wgrad_g"),
        ("fp8_amax:scale=mse", "scale", SCALES["mse"], "all"),
        ("fp8_cscale:bias=-2", "scale", Constant(4.0), "all"),
        ("fp8_rowwise:scale=pow2", "scale", Pow2(), "all"),
        ("fp8_block:gradients=e5m2", "format", FORMATS["e5m2"], "dgrad_g wgrad_g"),
        ("fp4_block:gradients=e5m2", "format", FORMATS["e5m2"], "dgrad_g wgrad_g"),
        ("fp4_mixed:fp4_tile=row", "tile", ROW, "fwd_x fwd_w"),
        ("fp4_naive:fp4_tile=mx32", "tile", MX32, "all"),
        ("nvfp4:hadamard=1", "hadamard", 1, "wgrad_x wgrad_g"),
        ("nvfp4:rounding=nearest", "rounding", "nearest", "dgrad_g wgrad_g"),
        ("fp8_block:formats=fnuz", "format", FORMATS["e4m3fnuz"], "all"),
        ("fp8_block:formats=e3m2", "format", FORMATS["e3m2"], "all"),
        ("fp4_naive:wgrad_tile=token", "tile", TOKEN, "wgrad_x wgrad_g"),
        ("fp8_rowwise:wgrad_tile=token", "tile", TOKEN, "wgrad_x wgrad_g"),
        ("fp8_block:wgrad_g_tile=block128", "tile", BLOCK128, "wgrad_g"),
        ("fp8_block:forward=bf16", None, None, "fwd_x fwd_w"),
        ("fp8_block:backward=bf16", None, None, "dgrad_g dgrad_w wgrad_x wgrad_g"),
        ("fp4_mixed:dgrad=bf16", None, None, "dgrad_g dgrad_w"),
        ("fp4_naive:only=wgrad_x", None, None, "fwd_x fwd_w dgrad_g dgrad_w wgrad_g"),
        ("fp4_naive:only=wgrad", None, None, "fwd_x fwd_w dgrad_g dgrad_w"),
        ("nvfp4:only=wgrad", None, None, "fwd_x fwd_w dgrad_g dgrad_w"),
        ("nvfp4:wgrad=bf16", None, None, "wgrad_x wgrad_g"),
        *((f"fp4_naive:{name}=bf16", None, None, name) for name in CASTS),
    ],
)
def test_an_option_changes_what_it_is_about_and_nothing_else(spec, field, value, names):
    """A field of None: the operand is left in high precision."""
    plain, changed = casts_of(spec.partition(":")[0]), casts_of(spec)
    for name, cast in plain.items():
        if names == "all" or name in names.split():
            if field is None:
                assert cast is not None and changed[name] is None
                continue
            assert changed[name] == dataclasses.replace(cast, **{field: value}) != cast
        else:
            assert changed[name] == cast
    assert as_policy(spec).name == spec


def test_every_option_is_tested_above():
    tested = test_an_option_changes_what_it_is_about_and_nothing_else.pytestmark[0].args[1]
    assert {re.search(":(.*)=", case[0])[1] for case in tested} == set(OPTIONS)


def test_options_add_up_and_reach_head_and_layers():
    policy = as_policy("fp8_delayed:history=4,head=fp8_current,bf16_first=1,bf16_last=0.25")
    assert policy.recipe("lm_head") is RECIPES["fp8_current"]
    assert policy.recipe("layers/mlp/up").histories == {"x": 4, "w": 4, "g": 4}
    assert policy.exempt(8) == (1, 2)
    assert policy == as_policy("fp8_delayed:bf16_last=0.25,bf16_first=1,head=fp8_current,history=4")


def test_the_order_of_options_does_not_matter():
    one, other = (
        as_policy(f"fp8_delayed:{options}")
        for options in ("history=4,head=fp8_delayed", "head=fp8_delayed,history=4")
    )
    assert one == other and one.recipe("lm_head").histories == {"x": 4, "w": 4, "g": 4}
    assert as_policy("fp8_delayed:margin=1,scale=pow2") == as_policy(
        "fp8_delayed:scale=pow2,margin=1"
    )
    assert casts_of("fp8_delayed:margin=1,scale=pow2")["fwd_x"].rule == Pow2(1)
    for options in ("gradients=e5m2,formats=fnuz", "formats=fnuz,gradients=e5m2"):
        casts = casts_of(f"fp8_block:{options}")
        formats = {name: cast.format.name for name, cast in casts.items()}
        assert formats["fwd_x"] == "e4m3fnuz" and formats["wgrad_g"] == "e5m2fnuz"
        assert as_recipe(f"fp8_block:{options}") == as_policy(f"fp8_block:{options}").recipe(
            "layers/mlp/up"
        )


def test_queries_keys_and_values_share_the_scales_of_one_fused_weight():
    """w and g of the three, in both GEMMs that read them. Other linears keep their scales."""
    policy = as_policy("fp8_amax:qkv=shared,margin=3")
    assert policy == as_policy("fp8_amax:margin=3,qkv=shared")
    plain = as_recipe("fp8_amax:margin=3")
    for path in MODULES[:-1]:
        recipe = policy.recipe(path)
        shared = {name for name, cast in recipe.by_name().items() if cast.shared_scale}
        if path in ("layers/attention/q", "layers/attention/k", "layers/attention/v"):
            assert shared == {"fwd_w", "dgrad_w", "dgrad_g", "wgrad_g"} and recipe.shares_scales
            unshared = recipe.map(lambda _, cast: dataclasses.replace(cast, shared_scale=False))
            assert unshared == plain != recipe
        else:
            assert recipe == plain and not recipe.shares_scales
    policy.check(MODULES, 1)
    assert not any(as_policy(name).recipe("layers/attention/q").shares_scales for name in POLICIES)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("bf16:margin=1", "margin=1: no cast of policy 'bf16' uses this option"),
        ("fp8_current:history=4", "history=4: no cast of policy 'fp8_current'"),
        ("fp8_block:hadamard=16", "hadamard=16: no cast of policy 'fp8_block'"),
        ("fp8_block:fp4_tile=row", "fp4_tile=row: no cast"),
        ("nvfp4:fp4_tile=row", "fp4_tile=row: no cast"),  # its two scales belong to its tiles
        ("fp8_delayed:histry=4", "unknown option 'histry'; did you mean 'history'"),
        ("fp8_delayed:history", "expected history=VALUE, got 'history'"),
        ("fp8_delayed:history=x", "history=x: expected an int, got .x."),
        ("fp8_delayed:history=0", "history=0: delayed scaling needs at least one amax"),
        ("fp8_delayed:scale=nvfp4", "NvFp4.* of delayed scaling"),
        ("fp8_rowwise:scale=pow", "scale=pow: unknown scale rule.*pow2"),
        ("fp8_cscale:bias=200", "between 2.-126 and 2.126"),
        ("fp8_block:gradients=e5m3", "gradients=e5m3: unknown format"),
        ("fp8_block:gradients=e8m0", "e8m0 holds scales"),
        ("nvfp4:head=fp9", "unknown recipe 'fp9'"),
        ("nvfp4:bf16_last=2.5", "bf16_last=2.5 is neither"),
        ("nvfp4:hadamard=3", "got 3"),
        ("nvfp4:rounding=up", "unknown rounding 'up'"),
        ("fp8_block:forward=fp8", "forward=fp8: expected bf16, got 'fp8'"),
        ("fp8_block:forward=bf16,backward=bf16", "backward=bf16: .* nothing: that is 'bf16'"),
        ("fp4_mixed:forward=bf16,fp4_tile=row", "fp4_tile=row: no cast"),
        ("fp4_mixed:fp4_tile=row,forward=bf16", "fp4_tile=row: no cast"),
        ("fp8_rowwise_wgrad_bf16:only=wgrad_x", "only=wgrad_x: .* would quantize nothing"),
        ("fp8_block:only=wgrd", "only=wgrd: unknown cast or GEMM 'wgrd'; did you mean 'wgrad'"),
        ("fp8_rowwise_wgrad_bf16:wgrad=bf16", "wgrad=bf16: no cast"),
        ("fp8_rowwise_wgrad_bf16:wgrad_x=bf16", "wgrad_x=bf16: no cast"),
        ("fp4_naive:dgrad_g=fp8", "dgrad_g=fp8: expected bf16, got 'fp8'"),
        ("fp4_naive:only=fwd_x,fwd_x=bf16", "fwd_x=bf16: .* would quantize nothing"),
        ("nvfp4:wgrad_x=bf16", "wgrad rotates its operands by hadamard=1 and 16"),
        ("fp8_block:formats=ocp", "formats=ocp: expected fnuz or e3m2"),
        ("fp4_naive:formats=fnuz", "formats=fnuz: no cast"),
        ("fp4_naive:fp4_tile=token", "fp4_tile=token: .* in wgrad only: add wgrad_tile=token"),
        ("fp8_delayed:wgrad_tile=token", "wgrad_tile=token: no cast"),
        ("fp8_cscale:wgrad_tile=token", "wgrad_tile=token: no cast"),
        ("fp8_delayed:wgrad_g_tile=block128", "wgrad_g_tile=block128: no cast"),
        ("fp8_block:wgrad_g_tile=block", "unknown tile 'block'; did you mean 'block128'"),
        ("fp8_amax:qkv=fused", "qkv=fused: expected qkv=shared"),
        ("fp8_block:qkv=shared", "qkv=shared: no cast of 'fp8_block' has one current scale"),
        ("fp8_delayed:qkv=shared", "qkv=shared: no cast of 'fp8_delayed' has one current scale"),
        ("fp8_amax:qkv=shared,only=wgrad_x", "qkv=shared: no cast"),
    ],
)
def test_options_that_cannot_be_honored_are_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        as_policy(spec)


# Schedules ----------------------------------------------------------------------------------------


def test_stages_begin_after_their_share_of_the_steps():
    schedule = PrecisionSchedule(((0.0, "fp4_mixed"), (0.9, "bf16")))
    assert schedule.begins(150) == (0, 135) and schedule.begins(7) == (0, 6)
    names = [schedule.policy_of(step, 10).name for step in range(1, 11)]
    assert names == ["fp4_mixed"] * 9 + ["bf16"]
    assert schedule == PrecisionSchedule(((0, POLICIES["fp4_mixed"]), (0.9, POLICIES["bf16"])))


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((), r"begin at 0.0, got \[\]"),
        (((0.1, "bf16"),), r"begin at 0.0, got \[0.1\]"),
        (((0.0, "bf16"), (1.0, "nvfp4")), "stay below 1"),
        (((0.0, "bf16"), (0.5, "nvfp4"), (0.5, "bf16")), "increase"),
        (((0.0, "bf16"), (0.5, "nvfp4"), (0.4, "bf16")), "increase"),
        (((0.0, "bf17"),), "unknown policy 'bf17'"),
    ],
)
def test_schedules_that_make_no_sense(stages, message):
    with pytest.raises(ValueError, match=message):
        PrecisionSchedule(stages)


def test_a_stage_without_a_step_is_refused():
    schedule = PrecisionSchedule(((0.0, "fp4_mixed"), (0.99, "bf16")))
    with pytest.raises(ValueError, match=r"a stage gets none of the 10 steps.*\(0, 10\)"):
        schedule.begins(10)
    with pytest.raises(ValueError, match=r"a stage gets none.*\(0, 0\)"):
        PrecisionSchedule(((0.0, "bf16"), (0.01, "nvfp4"))).begins(10)


def test_a_config_may_leave_out_the_first_stage_but_not_contradict_it():
    whole = PrecisionSchedule(((0.0, "fp4_mixed"), (0.9, "bf16")))
    assert as_schedule("fp4_mixed", ((0.9, "bf16"),)) == whole
    assert as_schedule("fp4_mixed", [[0.0, "fp4_mixed"], [0.9, "bf16"]]) == whole  # from JSON
    assert as_schedule("bf16", ()).stages == ((0.0, POLICIES["bf16"]),)
    with pytest.raises(ValueError, match="precision='bf16' contradicts .*'fp4_mixed'"):
        as_schedule("bf16", ((0.0, "fp4_mixed"), (0.9, "bf16")))
