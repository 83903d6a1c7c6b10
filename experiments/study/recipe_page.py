"""TODO docstring."""

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.markdown import markdown_table
from experiments.study.cost_model import Speeds, relative_cost
from fp8jax.device import xla
from fp8jax.device.hardware import DEVICES, Device
from fp8jax.linear.amax_history import init_state
from fp8jax.linear.backends import BACKENDS, choose_backend
from fp8jax.linear.dot import dot_general
from fp8jax.linear.vjp import KEY_ORDER
from fp8jax.model.models import MODELS
from fp8jax.numerics.policy import POLICIES, Policy
from fp8jax.numerics.policy_options import OPTIONS, Option
from fp8jax.numerics.recipe import Cast, Recipe
from fp8jax.numerics.recipes import RECIPES
from fp8jax.numerics.scales import SCALES, Constant
from fp8jax.numerics.tiles import ROW, TENSOR

# The tables of docs/recipes.md --------------------------------------------------------------------

PAPERS = {  # recipe -> arXiv number of the paper that it follows most closely; the page has titles
    "bf16": "1905.12322", "fp8_delayed": "2209.05433", "fp8_current": "2507.16099",
    "fp8_amax": "2309.17224", "fp8_cscale": "2309.17224", "fp8_rowwise": "2507.16099",
    "fp8_rowwise_wgrad_bf16": "2507.16099", "fp8_block": "2412.19437",
    "fp8_block_ue8m0": "2509.22536", "mxfp8": "2506.08027", "fp4_block": "2502.11458",
    "fp4_naive": "2502.11458", "nvfp4": "2509.25149", "mxfp4": "2509.25149",
}  # fmt: skip


SPEEDS = (Speeds(), Speeds(fp8=1.4, fp4=2.0))


def _codes(cast: Cast | None) -> str:
    if cast is None:
        return "BF16"
    size = {cast.tile: f"{cast.tile.free}x{cast.tile.contract}"} | {TENSOR: "tensor", ROW: "row"}
    marks = [f"H{cast.hadamard}"] * (cast.hadamard > 1) + ["sr"] * (cast.rounding == "stochastic")
    return ", ".join([f"{cast.format.name} {size[cast.tile]}", *marks])


def _scale(cast: Cast) -> str:
    if isinstance(cast.scale, Constant):
        return f"2^{math.log2(cast.scale.value):g}"
    named = (f"`{name}`" for name, rule in SCALES.items() if rule == cast.scale)
    return next(named, repr(cast.scale))


def _amax(cast: Cast) -> str:
    own = {"current": "its own", "constant": "–"}
    return f"{cast.amax} of {cast.history} steps" if cast.delayed else own[cast.timing]


def _cast_row(name: str, recipe: Recipe) -> list[str]:
    casts = [_codes(getattr(recipe, operand)) for operand in KEY_ORDER]
    shared = [", ".join(dict.fromkeys(map(cell, recipe.casts))) or "–" for cell in (_scale, _amax)]
    return [f"`{name}`", *casts, *shared, f"[{PAPERS[name]}](https://arxiv.org/abs/{PAPERS[name]})"]


def sqnr(recipe: Recipe, seed: int = 0) -> dict[str, float]:
    """Signal to quantization noise of y, dx and dw in dB, on normal data (docs/recipes.md)."""
    rng = np.random.default_rng(seed)
    x, w, g = (
        jnp.asarray(rng.standard_normal(shape, np.float32) * np.float32(sigma), dtype)
        for shape, sigma, dtype in (
            ((512, 1024), 1.0, jnp.bfloat16), ((1024, 1024), 0.02, jnp.float32),
            ((512, 1024), 1e-4, jnp.bfloat16),
        )
    )  # fmt: skip
    recipe = recipe.seeding()  # a history of such tensors holds about this amax

    dot = functools.partial(
        dot_general, dimension_numbers=(((1,), (0,)), ((), ())), recipe=recipe, backend="emulated",
        state=init_state(recipe), key=jax.random.key(seed),
    )  # fmt: skip

    def products(x, w, g):
        y, vjp = jax.vjp(dot, x, w)
        return y, *vjp(g)

    got = jax.jit(products, compiler_options=xla.compiler_options())(x, w, g)
    x64, w64, g64 = (np.asarray(operand, np.float64) for operand in (x, w, g))
    exact, norm = (x64 @ w64, g64 @ w64.T, x64.T @ g64), np.linalg.norm
    return {
        name: float(20 * np.log10(norm(e) / norm(np.asarray(y, np.float64) - e)))
        for name, y, e in zip(("y", "dx", "dw"), got, exact, strict=True)
    }


def _noise_row(name: str, recipe: Recipe) -> list[str]:
    # Above 100 dB is the order of float32 sums, which another machine has otherwise.
    return [f"`{name}`", *("> 100" if v > 100 else f"{v:.1f}" for v in sqnr(recipe).values())]


def _native() -> str:
    """Recipes by devices, and what the numbers in the cells stand for."""
    reasons: dict[str | None, int] = {}

    def cell(recipe: Recipe, device: Device) -> str:
        if choose_backend(None, recipe, device).name != "emulated":
            return "yes"
        reason = BACKENDS["xla"].refuses(recipe, device) if device.fp8 else "no FP8 matrix unit"
        return str(reasons.setdefault(reason, len(reasons) + 1))

    rows = [[f"`{r.name}`", *(cell(r, d) for d in DEVICES)] for r in RECIPES.values() if r.casts]
    text = markdown_table(["recipe", *(device.kind for device in DEVICES)], rows)
    return "\n".join([text, *(f"{number}. {reason}" for reason, number in reasons.items()), ""])


def _recipe_name(recipe: Recipe) -> str:
    """The name of a table's recipe, or of the two that it is put together from."""
    if recipe.name in RECIPES:
        return f"`{recipe.name}`"
    fwd = next(r for r in RECIPES.values() if r.gemms["fwd"] == recipe.gemms["fwd"])
    bwd = next(r for r in RECIPES.values() if r.with_forward(fwd) == recipe)
    return f"`{fwd.name}` forward, `{bwd.name}` backward"


def _policy_row(name: str, policy: Policy) -> list[str]:
    rules = "; ".join(f"`{pattern}`: {_recipe_name(recipe)}" for pattern, recipe in policy.rules)
    ends = {"first": policy.bf16_first, "last": policy.bf16_last}
    exempt = [f"{end} {n:.0%}" if n < 1 else f"{end} {n}" for end, n in ends.items() if n]
    costs = [relative_cost(policy, MODELS["llama2_7b"], 4096, speeds) for speeds in SPEEDS]
    # Rounded first: the last bit of a sum differs between Python 3.11 and 3.12.
    printed = (f"{round(100 * cost, 9):.1f}%" for cost in costs)
    return [f"`{name}`", rules, ", ".join(exempt) or "–", *printed]


def _option_row(key: str, option: Option) -> list[str]:
    takes: dict[bool, list[str]] = {True: [], False: []}
    for recipe in RECIPES.values():
        casts = [(operand, getattr(recipe, operand)) for operand in KEY_ORDER]
        taken = any(cast is not None and option.takes(operand, cast) for operand, cast in casts)
        takes[taken].append(f"`{recipe.name}`")
    most = len(takes[True]) > len(takes[False])
    return [f"`{key}`", option.help, ("all but " if most else "") + ", ".join(takes[not most])]


def fill_page(page: str) -> str:
    """The page with its tables made anew, each between <!-- table: NAME --> and <!-- end -->.

    Raises ValueError where one has no place, or a recipe no paper.
    """
    if missing := RECIPES.keys() - PAPERS.keys():
        raise ValueError(f"PAPERS must say where these recipes come from: {sorted(missing)}")
    operands = [operand.replace("_", " ") for operand in KEY_ORDER]
    costs = [f"cost at 1 : {speeds.fp8:g} : {speeds.fp4:g}" for speeds in SPEEDS]
    rows: list[tuple[str, list[str], Callable[..., list[str]], Mapping[str, Any]]] = [
        ("casts", ["recipe", *operands, "scale", "amax", "paper"], _cast_row, RECIPES),
        ("noise", ["recipe", "y", "dx", "dw"], _noise_row, RECIPES),
        ("policies", ["policy", "rules", "BF16 layers", *costs], _policy_row, POLICIES),
        ("options", ["option", "what it says", "taken by"], _option_row, OPTIONS),
    ]
    tables = {
        name: markdown_table(header, itertools.starmap(row, entries.items()))
        for name, header, row, entries in rows
    }
    tables["native"] = _native()
    for name, text in tables.items():
        begin, end = f"<!-- table: {name} -->\n", "<!-- end -->\n"
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"the page has no place for a table: {begin.strip()} … {end.strip()}")
        page = f"{before}{begin}\n{text}\n{end}{after}"
    return page
