"""TODO docstring."""

import dataclasses

from fp8jax.lookup import lookup
from fp8jax.numerics.formats import FORMATS
from fp8jax.numerics.recipe import Cast, Recipe
from fp8jax.numerics.scales import SCALES, Constant, Pow2, ScaleRule
from fp8jax.numerics.tiles import BLOCK128, MX32, NV16, ROW, TILE128, NV16x16, Tile

HISTORY = 16  # steps; see above


CSCALE_BIAS = 6  # see above


HADAMARD = 16  # elements that NVFP4's rotation mixes


E4M3, E5M2, E2M1 = (FORMATS[name] for name in ("e4m3", "e5m2", "e2m1"))


def _recipe(name: str, x: Cast, w: Cast | None = None, g: Cast | None = None) -> Recipe:
    """One cast an operand, the same in both of its products; w and g are cast as x if not given."""
    w, g = w or x, g or x
    return Recipe(name=name, fwd_x=x, fwd_w=w, dgrad_g=g, dgrad_w=w, wgrad_x=x, wgrad_g=g)


def _per_tensor(name: str, **fields) -> Recipe:
    """One scale a tensor: E4M3 for weights and activations, E5M2 for gradients."""
    return _recipe(name, Cast(format=E4M3, **fields), g=Cast(format=E5M2, **fields))


def _blocks(name: str, scale: ScaleRule) -> Recipe:
    """1x128 tiles, and 128x128 blocks for weights."""
    tile = Cast(format=E4M3, tile=TILE128, scale=scale)
    return _recipe(name, tile, w=dataclasses.replace(tile, tile=BLOCK128))


def _fp4_training(name: str, tile: Tile, block: Tile, scale: ScaleRule) -> Recipe:
    """NVIDIA's methods: weights in `block`, stochastic gradients, wgrad's operands rotated."""
    x = Cast(format=E2M1, tile=tile, scale=scale)
    g = dataclasses.replace(x, rounding="stochastic")
    recipe = _recipe(name, x, w=dataclasses.replace(x, tile=block), g=g)
    rotated = [dataclasses.replace(cast, hadamard=HADAMARD) for cast in (x, g)]
    return dataclasses.replace(recipe, wgrad_x=rotated[0], wgrad_g=rotated[1])


def _table() -> tuple[Recipe, ...]:
    block = _blocks("fp8_block", SCALES["fp32"])
    naive = _recipe("fp4_naive", Cast(format=E2M1, tile=TILE128))
    row = _recipe("fp8_rowwise", Cast(format=E4M3, tile=ROW))
    constant = Constant(2.0**-CSCALE_BIAS)
    return (
        Recipe(name="bf16"),
        _per_tensor("fp8_delayed", timing="delayed", history=HISTORY),
        _per_tensor("fp8_current"),
        _per_tensor("fp8_amax", scale=Pow2()),
        _per_tensor("fp8_cscale", timing="constant", scale=constant),
        row,
        dataclasses.replace(
            row, name="fp8_rowwise_wgrad_bf16", dgrad_w=Cast(format=E4M3), wgrad_x=None,
            wgrad_g=None,
        ),
        block,
        _blocks("fp8_block_ue8m0", SCALES["e8m0"]),
        _recipe("mxfp8", Cast(format=E4M3, tile=MX32, scale=SCALES["e8m0"])),
        dataclasses.replace(block.with_forward(naive), name="fp4_block"),
        naive,
        _fp4_training("nvfp4", NV16, NV16x16, SCALES["nvfp4"]),
        _fp4_training("mxfp4", MX32, MX32, SCALES["e8m0"]),
    )  # fmt: skip


RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _table()}


HIGH_PRECISION = RECIPES["bf16"]


def as_recipe(recipe: str | Recipe) -> Recipe:
    """`recipe`, resolved if it is a name. Raises ValueError for an unknown one."""
    return recipe if isinstance(recipe, Recipe) else lookup("recipe", recipe, RECIPES)
