"""Recipes: the table as documented, and every contradiction refused by name."""

import dataclasses
import pickle
import re
import subprocess
import sys

import pytest

from fp8jax.numerics.formats import FORMATS
from fp8jax.numerics.names import as_recipe
from fp8jax.numerics.recipe import Cast, Recipe
from fp8jax.numerics.recipes import CSCALE_BIAS, HIGH_PRECISION, HISTORY, RECIPES
from fp8jax.numerics.scales import SCALES, Constant, Delayed, Pow2
from fp8jax.numerics.tiles import BLOCK128, MX32, NV16, ROW, TENSOR, TILE128, TOKEN, NV16x16
from tests.support import ROOT

E4M3, E5M2, E2M1 = (FORMATS[name] for name in ("e4m3", "e5m2", "e2m1"))
OPERANDS = ("fwd_x", "fwd_w", "dgrad_g", "dgrad_w", "wgrad_x", "wgrad_g")
DELAYED = Cast(format=E4M3, scale=Delayed(4))
CURRENT = Cast(format=E4M3)


# Casts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        (dict(format=E4M3, rounding="stochastc"), ["unknown rounding", "'stochastic'"]),
        (dict(format=FORMATS["e8m0"]), ["e8m0 holds scales"]),
        # One amax a history.
        *[
            (
                dict(format=E4M3, scale=Delayed(4), tile=tile),
                ["delayed scaling", str(tile)],
            )
            for tile in (ROW, TILE128, BLOCK128, MX32)
        ],
        (
            dict(format=E4M3, scale=Constant(2.0), tile=TILE128),
            ["Constant(value=2.0)", str(TILE128)],
        ),
        (dict(format=E4M3, tile=NV16, scale=SCALES["nvfp4"]), ["nvfp4", "e2m1", "format=e4m3"]),
        (dict(format=E2M1, hadamard=12), ["Hadamard", "got 12"]),
        (
            dict(format=E4M3, scale=Delayed(4), hadamard=2),
            ["hadamard=2", "Delayed(history=4"],
        ),
        (
            dict(format=E4M3, scale=Constant(2.0), hadamard=16),
            ["hadamard=16", "Constant(value=2.0)"],
        ),
        (dict(format=E4M3, tile=ROW, shared_scale=True), ["shared_scale=True", "tile=row"]),
        (dict(format=E4M3, shared_scale=True, hadamard=16), ["shared_scale=True", "hadamard=16"]),
        (
            dict(format=E4M3, scale=Delayed(4), shared_scale=True),
            ["shared_scale=True", "Delayed(history=4"],
        ),
    ],
)
def test_contradictions_in_a_cast_name_both_parts(kwargs, named):
    with pytest.raises(ValueError) as error:
        Cast(**kwargs)
    for part in named:
        assert part in str(error.value)


def test_a_changed_copy_of_a_cast_is_checked_too():
    smallest = Cast(format=E4M3, hadamard=2)
    with pytest.raises(ValueError, match="hadamard=2.*Delayed"):
        dataclasses.replace(smallest, scale=Delayed(4))


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        (dict(history=0), ["history=0", "at least one"]),
        (dict(history=-1), ["history=-1", "at least one"]),
        (dict(history=4, amax="mean"), ["unknown amax", "'mean'", "newest"]),
        (dict(history=4, rule=Constant(2.0)), ["Constant(value=2.0)", "delayed scaling"]),
        (dict(history=4, rule=SCALES["nvfp4"]), ["NvFp4()", "delayed scaling"]),
    ],
)
def test_delayed_scaling_needs_a_history_and_a_rule_of_an_amax(kwargs, named):
    with pytest.raises(ValueError) as error:
        Delayed(**kwargs)
    for part in named:
        assert part in str(error.value)


def test_a_scale_says_where_its_amax_comes_from():
    newest = Cast(format=E5M2, scale=Delayed(3, "newest", Pow2(1)))
    constant = Cast(format=E5M2, scale=Constant(2.0))
    assert (newest.timing, newest.history, newest.rule) == ("delayed", 3, Pow2(1))
    assert (constant.timing, constant.history, constant.rule) == ("constant", 0, Constant(2.0))
    assert (CURRENT.timing, CURRENT.history, CURRENT.rule) == ("current", 0, FP32)
    assert newest.current() == Cast(format=E5M2, scale=Pow2(1))
    assert constant.current() == constant and CURRENT.current() == CURRENT


@pytest.mark.parametrize(
    "kwargs",
    [
        dict(format=E4M3),
        dict(format=E4M3, tile=MX32, scale=SCALES["e8m0"]),
        dict(format=E2M1, tile=NV16, scale=SCALES["nvfp4"], rounding="stochastic"),
        dict(format=E5M2, scale=Delayed(1, "newest", Pow2(1))),
        dict(format=E2M1, tile=MX32, scale=SCALES["e8m0_floor"], hadamard=128),
        dict(format=E5M2, scale=Constant(2.0**-8)),
    ],
)
def test_what_does_not_contradict_itself_is_a_cast(kwargs):
    assert dataclasses.replace(Cast(**kwargs)) == Cast(**kwargs)


def test_a_scale_is_separable_if_constant_along_the_contraction():
    tiles = (TENSOR, ROW, TILE128, TOKEN)
    separable = {tile: Cast(format=E4M3, tile=tile).separable for tile in tiles}
    assert separable == {TENSOR: True, ROW: True, TILE128: False, TOKEN: False}
    assert not Cast(format=E2M1, tile=TENSOR, scale=SCALES["nvfp4"]).separable


# Recipes ------------------------------------------------------------------------------------------


def test_weights_do_not_share_x():
    shared = Cast(format=E4M3, shared_scale=True)
    assert (
        Recipe(fwd_w=shared, wgrad_g=shared).shares_scales
        and not Recipe(fwd_w=CURRENT).shares_scales
    )
    for field in ("fwd_x", "wgrad_x"):
        with pytest.raises(ValueError, match="a cast of x has a shared scale"):
            Recipe(**{field: shared})


@pytest.mark.parametrize(
    ("operand", "one", "other"),
    [("x", "fwd_x", "wgrad_x"), ("w", "fwd_w", "dgrad_w"), ("g", "dgrad_g", "wgrad_g")],
)
def test_an_operand_has_one_history(operand, one, other):
    longer = dataclasses.replace(DELAYED, scale=Delayed(7))
    with pytest.raises(ValueError, match=f"{operand} has one history.*(4, 7|7, 4)"):
        Recipe(**{one: DELAYED, other: longer})
    assert Recipe(**{one: DELAYED, other: DELAYED}).histories == {operand: 4}
    assert Recipe(**{one: DELAYED, other: CURRENT}).histories == {operand: 4}
    assert Recipe(**{one: CURRENT, other: longer}).histories == {operand: 7}


def test_operands_may_have_histories_of_unlike_lengths():
    longer = dataclasses.replace(DELAYED, scale=Delayed(7))
    recipe = Recipe(fwd_x=DELAYED, fwd_w=longer, wgrad_g=CURRENT)
    assert recipe.histories == {"x": 4, "w": 7}
    assert recipe.casts == (DELAYED, longer, CURRENT)


@pytest.mark.parametrize(
    ("product", "one", "other"),
    [("fwd", "fwd_x", "fwd_w"), ("dgrad", "dgrad_g", "dgrad_w"), ("wgrad", "wgrad_x", "wgrad_g")],
)
def test_a_rotation_has_to_cancel(product, one, other):
    rotated = dataclasses.replace(CURRENT, hadamard=16)
    for casts in ({one: rotated, other: CURRENT}, {one: rotated}, {other: rotated}):
        with pytest.raises(ValueError, match=f"{product} rotates.*hadamard=(16 and 1|1 and 16)"):
            Recipe(**casts)
    Recipe(**{one: rotated, other: rotated})


FP32, UE8M0 = SCALES["fp32"], SCALES["e8m0"]


def six(x: Cast, w: Cast, g: Cast, **others: Cast | None) -> dict[str, Cast | None]:
    """The casts by name; what differs between an operand's two products is given by name."""
    both = dict(fwd_x=x, fwd_w=w, dgrad_g=g, dgrad_w=w, wgrad_x=x, wgrad_g=g)
    return both | others


def fp8(fmt=E4M3, tile=TENSOR, scale=FP32, **more) -> Cast:
    return Cast(format=fmt, tile=tile, scale=scale, **more)


def fp4(tile, scale=FP32, rounding="nearest", hadamard=1, **more) -> Cast:
    return Cast(format=E2M1, tile=tile, scale=scale, rounding=rounding, hadamard=hadamard, **more)


def backward(scale, hadamard: int) -> dict[str, Cast]:
    """The casts of a backward with one for all operands, and new signs; x and w as multiplied."""
    more = dict(scale=SCALES[scale], rounding="stochastic", hadamard=hadamard, redrawn=True)
    g, again = fp4(NV16, **more), fp4(NV16, requantizes=True, **more)
    return dict(dgrad_g=g, dgrad_w=again, wgrad_x=again, wgrad_g=g)


_DELAYED = dict(scale=Delayed(16))
_CONSTANT = dict(scale=Constant(2.0**-CSCALE_BIAS))
_ROW, _BLOCK = fp8(tile=ROW), fp8(tile=TILE128)
_NV, _MX = SCALES["nvfp4"], MX32
_UNBIASED, _BETTER = SCALES["unbiased"], SCALES["4over6"]
DOCUMENTED = {
    "bf16": dict.fromkeys(OPERANDS),
    "fp8_delayed": six(fp8(**_DELAYED), fp8(**_DELAYED), fp8(E5M2, **_DELAYED)),
    "fp8_current": six(fp8(), fp8(), fp8(E5M2)),
    "fp8_amax": six(fp8(scale=Pow2()), fp8(scale=Pow2()), fp8(E5M2, scale=Pow2())),
    "fp8_cscale": six(fp8(**_CONSTANT), fp8(**_CONSTANT), fp8(E5M2, **_CONSTANT)),
    "fp8_rowwise": six(_ROW, _ROW, _ROW),
    "fp8_rowwise_wgrad_bf16": six(_ROW, _ROW, _ROW, dgrad_w=fp8(), wgrad_x=None, wgrad_g=None),
    "fp8_block": six(_BLOCK, fp8(tile=BLOCK128), _BLOCK),
    "fp8_block_ue8m0": six(
        fp8(tile=TILE128, scale=UE8M0),
        fp8(tile=BLOCK128, scale=UE8M0),
        fp8(tile=TILE128, scale=UE8M0),
    ),
    "mxfp8": six(*[fp8(tile=MX32, scale=UE8M0)] * 3),
    "fp4_block": six(_BLOCK, fp8(tile=BLOCK128), _BLOCK, fwd_x=fp4(TILE128), fwd_w=fp4(TILE128)),
    "fp4_weights": six(
        fp8(tile=TILE128, scale=UE8M0),
        fp8(tile=BLOCK128, scale=UE8M0),
        fp8(tile=TILE128, scale=UE8M0),
        fwd_w=fp4(MX32, UE8M0),
        dgrad_w=fp8(tile=BLOCK128, scale=UE8M0, requantizes=True),
    ),
    "fp4_naive": six(*[fp4(TILE128)] * 3),
    "nvfp4": six(
        fp4(NV16, _NV),
        fp4(NV16x16, _NV),
        fp4(NV16, _NV, "stochastic"),
        wgrad_x=fp4(NV16, _NV, hadamard=16),
        wgrad_g=fp4(NV16, _NV, "stochastic", 16),
    ),
    "nvfp4_unbiased": six(
        fp4(NV16, _NV),
        fp4(NV16x16, _NV),
        fp4(NV16, _UNBIASED, "stochastic"),
        wgrad_x=fp4(NV16, _NV, hadamard=16),
        wgrad_g=fp4(NV16, _UNBIASED, "stochastic", 16),
    ),
    "nvfp4_4over6": six(
        fp4(NV16, _BETTER),
        fp4(NV16x16, _BETTER),
        fp4(NV16, _UNBIASED, "stochastic"),
        wgrad_x=fp4(NV16, _BETTER, hadamard=16),
        wgrad_g=fp4(NV16, _UNBIASED, "stochastic", 16),
    ),
    "quartet2": six(*[fp4(NV16, _BETTER)] * 3, **backward("eden", 32)),
    "tetrajet2": six(*[fp4(NV16, SCALES["outer128"])] * 3, **backward("outer128_unbiased", 16)),
    "mxfp4": six(
        fp4(_MX, UE8M0),
        fp4(_MX, UE8M0),
        fp4(_MX, UE8M0, "stochastic"),
        wgrad_x=fp4(_MX, UE8M0, hadamard=16),
        wgrad_g=fp4(_MX, UE8M0, "stochastic", 16),
    ),
}


def test_every_recipe_is_documented_here_and_knows_its_name():
    assert set(RECIPES) == set(DOCUMENTED)
    assert all(recipe.name == name for name, recipe in RECIPES.items())
    assert HISTORY == 16 and HIGH_PRECISION is RECIPES["bf16"]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_table_of_recipes(name):
    for operand in OPERANDS:
        assert getattr(RECIPES[name], operand) == DOCUMENTED[name][operand], operand


def test_products_pair_the_operands():
    casts = {n: Cast(format=E4M3, scale=Constant(2.0**i)) for i, n in enumerate(OPERANDS)}
    assert Recipe(**casts).gemms == {
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
        dict(scale=Delayed(4)),
    ],
)
@pytest.mark.parametrize("operand", OPERANDS)
def test_every_field_of_every_cast_is_part_of_a_recipes_identity(operand, change):
    one = Recipe(**{operand: CURRENT})
    other = Recipe(**{operand: dataclasses.replace(CURRENT, **change)})
    assert one != other and one != Recipe()
    assert other.stochastic == ("rounding" in change)
    assert bool(other.histories) == (change == dict(scale=Delayed(4)))


@pytest.mark.parametrize("name", RECIPES)
def test_current_changes_the_timing_of_delayed_casts_only(name):
    current = RECIPES[name].current()
    for operand in OPERANDS:
        cast, changed = getattr(RECIPES[name], operand), getattr(current, operand)
        if cast is not None and cast.timing == "delayed":
            assert changed == dataclasses.replace(cast, scale=FP32)
        else:
            assert changed == cast
    assert current.current() == current and current.name == name and not current.histories
    assert (current == RECIPES[name]) == (name != "fp8_delayed")


def test_current_of_a_recipe_with_one_delayed_cast():
    assert Recipe(fwd_x=DELAYED, fwd_w=CURRENT).current() == Recipe(fwd_x=CURRENT, fwd_w=CURRENT)


@pytest.mark.parametrize("name", RECIPES)
def test_histories(name):
    expected = {"x": 16, "w": 16, "g": 16} if name == "fp8_delayed" else {}
    assert RECIPES[name].histories == expected


def test_map_changes_casts_by_name():
    recipe = RECIPES["fp4_block"].map(
        lambda name, cast: dataclasses.replace(cast, format=E5M2) if name == "dgrad_g" else cast
    )
    assert recipe.dgrad_g.format is E5M2 and recipe.wgrad_g == RECIPES["fp4_block"].wgrad_g
    assert recipe.name == "fp4_block" and RECIPES["bf16"].map(lambda *_: CURRENT) == HIGH_PRECISION
    split = RECIPES["fp4_naive"].with_forward(as_recipe("fp8_current:accumulation=split"))
    assert split.accumulation == ("split", "fast", "fast")
    mixed = RECIPES["fp4_naive"].with_forward(RECIPES["fp8_block"])
    assert (mixed.fwd_x, mixed.fwd_w) == (_BLOCK, fp8(tile=BLOCK128))
    assert mixed.gemms["wgrad"] == RECIPES["fp4_naive"].gemms["wgrad"]


def test_what_is_quantized_again_is_neither_rotated_nor_of_a_shared_scale():
    again = Cast(format=E4M3, tile=MX32, scale=SCALES["e8m0"], requantizes=True)
    rotated = Cast(format=E4M3, tile=MX32, scale=SCALES["e8m0"], hadamard=16)
    with pytest.raises(ValueError, match="dgrad_w requantizes .* hadamard=16 rotates"):
        Recipe(fwd_x=rotated, fwd_w=rotated, dgrad_w=again)
    with pytest.raises(ValueError, match="wgrad_x requantizes .* hadamard=16 rotates"):
        Recipe(fwd_x=rotated, fwd_w=rotated, wgrad_x=again)
    shared = Cast(format=E4M3, scale=SCALES["pow2"], shared_scale=True)
    with pytest.raises(ValueError, match="dgrad_w requantizes .* several weights share"):
        Recipe(fwd_w=shared, dgrad_w=again)


def test_a_copied_recipe_is_changed_as_the_recipe_is():
    copied = pickle.loads(pickle.dumps(RECIPES["nvfp4"]))
    assert copied == RECIPES["nvfp4"] and copied.current() == RECIPES["nvfp4"].current()
    assert copied.map(lambda _, cast: dataclasses.replace(cast, rounding="nearest")).casts


def collected(lines: str, name: str) -> set[str]:
    """The tests that have a case of that recipe or policy."""
    cases = re.findall(r"^tests/\w+/(\S+)\[(\S+)\]$", lines, re.M)
    return {test for test, case in cases if name in re.split("[-:]", case)}


def test_a_recipe_is_one_entry():
    """One added on the fly gets a case of every test that walks the tables; dot_test's pass."""
    modules = [
        f"tests/{name}_test.py"
        for name in ("gemm/dot", "numerics/recipe", "numerics/policy", "gemm/sqnr")
    ]
    plugin = [sys.executable, "-m", "pytest", "-p", "tests.support.extra_recipe", "-o", "addopts="]
    options = dict(cwd=ROOT, capture_output=True, text=True)
    chosen = "fp8_tile64 and not sqnr"
    ran = subprocess.run([*plugin, "-q", "-k", chosen, *modules], **options).stdout
    # The same tests as of another recipe that only `emulated` runs and nothing else names.
    assert collected(ran, "fp8_tile64") == collected(ran, "mxfp8") - {
        "recipe_test.py::test_the_table_of_recipes",  # a second list, on purpose
        "dot_test.py::test_blackwells_product_gets_codes_and_scales_in_its_layout",
        "dot_test.py::test_scaled_matmul_computes_what_it_says",
        "dot_test.py::test_exact_on_representable_operands_in_bfloat16",  # one of each kind
        # Of tiles whose scales bfloat16 holds, and of scales that are powers of two.
        "dot_test.py::test_operands_with_few_bits_are_multiplied_in_bfloat16",
        "dot_test.py::test_vmap_over_cotangents_gives_the_gradients_of_each",
        "sqnr_test.py::test_e4m3_in_blocks_gives_at_least_28_dB",
    }
    assert re.search(r"^\d+ passed, \d+ deselected", ran, re.M), ran
    assert int(re.search(r"^(\d+) passed", ran, re.M)[1]) > 20


def test_names_and_objects_resolve_alike():
    assert as_recipe("fp8_block") is RECIPES["fp8_block"] is as_recipe(RECIPES["fp8_block"])
    with pytest.raises(ValueError, match="unknown recipe 'fp8_curent'.*'fp8_current'"):
        as_recipe("fp8_curent")
