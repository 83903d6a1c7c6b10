"""The tables of docs/recipes.md, made from the code.

`fill_page` writes five tables: the casts of each recipe, its quantization noise, the policies and
what they would cost, the devices on which a recipe runs natively, and the options of a policy name.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from experiments.markdown import markdown_table, replace_between
from experiments.study.cost_model import Speeds, relative_cost
from fp8jax.device import xla
from fp8jax.device.hardware import DEVICES, Device
from fp8jax.gemm.backends.choice import BACKENDS, choose_backend
from fp8jax.gemm.backends.refusals import exact_in_bf16, kernels_refuse
from fp8jax.gemm.dot import dot_general
from fp8jax.gemm.histories.amax_history import init_state
from fp8jax.gemm.vjp import KEY_ORDER
from fp8jax.lm.model.models import MODELS
from fp8jax.numerics.accumulation import ACCUMULATION_OPTIONS
from fp8jax.numerics.cast_options import OPTIONS, Option
from fp8jax.numerics.names import as_policy
from fp8jax.numerics.policy import POLICIES, Policy
from fp8jax.numerics.recipe import Cast, Recipe
from fp8jax.numerics.recipes import RECIPES
from fp8jax.numerics.scales import SCALES, Constant, Delayed
from fp8jax.numerics.tiles import ROW, TENSOR

# recipe -> arXiv number of the paper that it follows most closely. The page lists the titles.
PAPERS = {
    "bf16": "1905.12322",
    "fp8_delayed": "2209.05433",
    "fp8_current": "2507.16099",
    "fp8_amax": "2309.17224",
    "fp8_cscale": "2309.17224",
    "fp8_rowwise": "2507.16099",
    "fp8_rowwise_wgrad_bf16": "2507.16099",
    "fp8_block": "2412.19437",
    "fp8_block_ue8m0": "2509.22536",
    "mxfp8": "2506.08027",
    "fp4_block": "2502.11458",
    "fp4_weights": "2412.19437",
    "fp4_naive": "2502.11458",
    "nvfp4": "2509.25149",
    "nvfp4_unbiased": "2601.22813",
    "nvfp4_4over6": "2512.02010",
    "quartet2": "2601.22813",
    "tetrajet2": "2510.27527",
    "mxfp4": "2509.25149",
}


# Other readings of a paper whose costs differ: policies with options. The FP4 paper's input
# gradient is in FP8 in `fp4_mixed`.
READINGS = ("fp4_mixed:dgrad=bf16",)


# Matrix units at twice and four times the speed of BF16, and at speeds closer to measured ones.
SPEEDS = (Speeds(), Speeds(fp8=1.4, fp4=2.0))


def fill_page(page: str) -> str:
    """Returns the page with new tables, each between <!-- table: NAME --> and <!-- end -->.

    Raises:
      ValueError: the page lacks these lines for a table, or PAPERS lacks a recipe.
    """
    if missing := RECIPES.keys() - PAPERS.keys():
        raise ValueError(f"PAPERS must say where these recipes come from: {sorted(missing)}")
    for name, text in _tables().items():
        begin, end = f"<!-- table: {name} -->", "<!-- end -->"
        replaced = replace_between(page, begin, end, text)
        if replaced is None:
            raise ValueError(f"the page has no place for a table: {begin} and {end} are missing")
        page = replaced
    return page


def _tables() -> dict[str, str]:
    """Returns the Markdown of each table by its name."""
    operands = [operand.replace("_", " ") for operand in KEY_ORDER]
    costs = [f"cost at 1 : {speeds.fp8:g} : {speeds.fp4:g}" for speeds in SPEEDS]
    return {
        "casts": markdown_table(
            ["recipe", *operands, "scale", "amax", "paper"],
            [_cast_row(name, recipe) for name, recipe in RECIPES.items()],
        ),
        "noise": markdown_table(
            ["recipe", "y", "dx", "dw"],
            [_noise_row(name, recipe) for name, recipe in RECIPES.items()],
        ),
        "policies": markdown_table(
            ["policy", "rules", "BF16 layers", *costs],
            [_policy_row(name, as_policy(name)) for name in (*POLICIES, *READINGS)],
        ),
        "options": markdown_table(
            ["option", "what it says", "taken by"],
            [
                *(_option_row(key, option) for key, option in OPTIONS.items()),
                *(_accumulation_row(key) for key in ACCUMULATION_OPTIONS),
            ],
        ),
        "native": _native_table(),
    }


# Casts --------------------------------------------------------------------------------------------


def _format_cell(cast: Cast | None) -> str:
    """Returns format and tile of a cast, such as "e2m1 1x16, H16, sr"."""
    if cast is None:
        return "BF16"
    names = {TENSOR: "tensor", ROW: "row"}
    tile = f"{cast.tile.free}x{cast.tile.contract}"
    parts = [f"{cast.format.name} {names[cast.tile] if cast.tile in names else tile}"]
    if cast.requantizes:
        parts.append("again")
    if cast.hadamard > 1:
        parts.append(f"H{cast.hadamard}{'±' if cast.redrawn else ''}")
    if cast.rounding == "stochastic":
        parts.append("sr")
    return ", ".join(parts)


def _scale_cell(cast: Cast) -> str:
    if isinstance(cast.scale, Constant):
        return f"2^{math.log2(cast.scale.value):g}"
    named = (f"`{name}`" for name, rule in SCALES.items() if rule == cast.rule)
    return next(named, repr(cast.rule))


def _amax_cell(cast: Cast) -> str:
    if isinstance(cast.scale, Delayed):
        return f"{cast.scale.amax} of {cast.scale.history} steps"
    return {"current": "its own", "constant": "–"}[cast.timing]


def _cast_row(name: str, recipe: Recipe) -> list[str]:
    paper = f"[{PAPERS[name]}](https://arxiv.org/abs/{PAPERS[name]})"
    formats = [_format_cell(getattr(recipe, operand)) for operand in KEY_ORDER]
    scales = ", ".join(dict.fromkeys(map(_scale_cell, recipe.casts))) or "–"
    amaxes = ", ".join(dict.fromkeys(map(_amax_cell, recipe.casts))) or "–"
    return [f"`{name}`", *formats, scales, amaxes, paper]


# Noise --------------------------------------------------------------------------------------------


def sqnr(recipe: Recipe, seed: int = 0) -> dict[str, float]:
    """Returns the ratio of signal to quantization noise of y, dx and dw, in dB.

    The operands are normal: x [512, 1024] and g [512, 1024] in bfloat16, w [1024, 1024] in float32.
    """
    rng = np.random.default_rng(seed)
    x, w, g = (
        jnp.asarray(rng.standard_normal(shape, np.float32) * np.float32(sigma), dtype)
        for shape, sigma, dtype in (
            ((512, 1024), 1.0, jnp.bfloat16),
            ((1024, 1024), 0.02, jnp.float32),
            ((512, 1024), 1e-4, jnp.bfloat16),
        )
    )
    # A delayed recipe takes the tensors' own amaxes: a history of such tensors holds about these.
    recipe = recipe.current()
    dot = functools.partial(
        dot_general,
        dimension_numbers=(((1,), (0,)), ((), ())),
        recipe=recipe,
        backend="emulated",
        state=init_state(recipe),
        key=jax.random.key(seed),
    )

    def products(x, w, g):
        y, vjp = jax.vjp(dot, x, w)
        return y, *vjp(g)

    results = jax.jit(products, compiler_options=xla.compiler_options())(x, w, g)
    x64, w64, g64 = (np.asarray(operand, np.float64) for operand in (x, w, g))
    exact = (x64 @ w64, g64 @ w64.T, x64.T @ g64)
    ratios = {}
    for name, result, expected in zip(("y", "dx", "dw"), results, exact, strict=True):
        noise = np.asarray(result, np.float64) - expected
        ratios[name] = float(20 * np.log10(np.linalg.norm(expected) / np.linalg.norm(noise)))
    return ratios


def _noise_row(name: str, recipe: Recipe) -> list[str]:
    # Above 100 dB, the noise is that of float32 sums, whose order depends on the machine.
    return [f"`{name}`", *("> 100" if v > 100 else f"{v:.1f}" for v in sqnr(recipe).values())]


# Native backends ----------------------------------------------------------------------------------


def _exact_in_bf16(recipe: Recipe, device: Device) -> bool:
    """Whether the recipe's GEMMs run on a GPU's BF16 unit, which multiplies them exactly."""
    backend, pairs = choose_backend(None, recipe, device).name, recipe.gemms.values()
    has_unit = device.capability is not None and device.capability >= (8, 0)
    if not has_unit or backend == "xla":
        return False
    exact = []
    for lhs, rhs in pairs:
        if lhs is None or rhs is None:
            return False
        in_fp8 = backend == "pallas" and kernels_refuse(lhs, rhs, "fast") is None
        exact.append(exact_in_bf16(lhs, rhs) and not in_fp8)
    return all(exact)


def _native_table() -> str:
    """Returns the table of recipes by device, and the reasons that its numbered cells refer to."""
    reasons: dict[str | None, int] = {}

    def cell(recipe: Recipe, device: Device) -> str:
        if _exact_in_bf16(recipe, device):
            return "bf16"
        if choose_backend(None, recipe, device).name != "emulated":
            return "yes"
        reason = BACKENDS["xla"].refuses(recipe, device) if device.fp8 else "no FP8 matrix unit"
        return str(reasons.setdefault(reason, len(reasons) + 1))

    rows = [[f"`{r.name}`", *(cell(r, d) for d in DEVICES)] for r in RECIPES.values() if r.casts]
    text = markdown_table(["recipe", *(device.kind for device in DEVICES)], rows)
    return "\n".join([text, *(f"{number}. {reason}" for reason, number in reasons.items()), ""])


# Policies and options -----------------------------------------------------------------------------


def _recipe_name(recipe: Recipe) -> str:
    """Returns the recipe's name, or those of the two recipes that it combines."""
    if recipe.name in RECIPES:
        return f"`{recipe.name}`"
    fwd = next(r for r in RECIPES.values() if r.gemms["fwd"] == recipe.gemms["fwd"])
    bwd = next(r for r in RECIPES.values() if r.with_forward(fwd) == recipe)
    return f"`{fwd.name}` forward, `{bwd.name}` backward"


def _policy_row(name: str, policy: Policy) -> list[str]:
    base, _, options = name.partition(":")
    if options:
        rules = f"those of `{base}`, with `{options}`"
    else:
        rules = "; ".join(f"`{pattern}`: {_recipe_name(of)}" for pattern, of in policy.rules)
    ends = {"first": policy.bf16_first, "last": policy.bf16_last}
    exempt = [f"{end} {n:.0%}" if n < 1 else f"{end} {n}" for end, n in ends.items() if n]
    costs = [relative_cost(policy, MODELS["llama2_7b"], 4096, speeds) for speeds in SPEEDS]
    # Rounded before they are printed: the last bit of a sum differs between Python 3.11 and 3.12.
    printed = [f"{round(100 * cost, 9):.1f}%" for cost in costs]
    return [f"`{name}`", rules, ", ".join(exempt) or "–", *printed]


def _option_row(key: str, option: Option) -> list[str]:
    """Returns the row of an option that changes casts."""

    def takes(recipe: Recipe) -> bool:
        return any(
            cast is not None and option.applies(name, cast)
            for name, cast in recipe.by_name().items()
        )

    return [f"`{key}`", option.help, _takers(takes)]


def _accumulation_row(key: str) -> list[str]:
    gemms, words = ACCUMULATION_OPTIONS[key]
    takers = _takers(lambda recipe: any(recipe.gemms[name].sums_codes for name in gemms))
    return [f"`{key}`", words, takers]


def _takers(takes: Callable[[Recipe], bool]) -> str:
    """Returns the recipes that take an option; a long list is given by exclusion."""
    takers: list[str] = []
    others: list[str] = []
    for recipe in RECIPES.values():
        (takers if takes(recipe) else others).append(f"`{recipe.name}`")
    return f"all but {', '.join(others)}" if len(takers) > len(others) else ", ".join(takers)
