"""The named recipes, `RECIPES`.

Each follows a paper or a library. Where the source leaves a choice open, the other choices are
options of the recipe's name (cast_options.py), given in parentheses:

    fp8_amax    Graphcore, arXiv 2309.17224: a power-of-two bias from the current amax, with margin
                0. In the authors' code (popxl-addons) biases are within 31, and gradients alone
                have a margin of 3 (`margin=3`). Its other metric is `scale=mse`. Queries, keys and
                values are one tensor there, with one bias (the policy's option `qkv=shared`).
                Formats with the largest number 240, theirs, are `formats=fnuz`.
    fp8_cscale  The same with one constant bias, of gradients less 3 in their code (`margin=3`).
                CSCALE_BIAS is the middle of the interval in which models of up to 0.4M parameters
                train with 2,048 tokens a step. Gradients of larger steps are too small for it
                (docs/results/cscale_bias.md). No constant is right for every model.
    fp8_block   DeepSeek-V3 (2412.19437) and InfiR2 (2509.22536): E4M3 everywhere. InfiR2 compares
                float32 scales with power-of-two scales. Its scripts run the latter, which is
                fp8_block_ue8m0.
    fp8_rowwise torchao's recipe of that name with float32 scales; torchao uses powers of two
                (`scale=pow2`). fp8_rowwise_wgrad_bf16 is its rowwise_with_gw_hp: wgrad in high
                precision, and one scale for the weight of dgrad.
    fp8_delayed TransformerEngine's delayed scaling. Its history holds 1024 amaxes. Here it holds
                16, which follow the decay of gradients sooner (`history=1024`, `amax=newest`,
                `margin=1`). It also splits the sums of dgrad and wgrad on Hopper, which all
                recipes here leave to the matrix unit (`dgrad_accumulation=split,
                wgrad_accumulation=split`; accumulation.py). So do torchao's recipes.
    mxfp8       NVIDIA, 2506.08027: E4M3 also for gradients, scales rounded up. The OCP standard
                rounds scales down and saturates the largest values (`scale=e8m0_floor`).
    fp4_weights After DeepSeek-V4, which does so to its experts after pre-training (the policy
                deepseek_v4): weights in MXFP4, all else as in fp8_block_ue8m0. dgrad multiplies the
                weights of the forward, in FP8 blocks, which hold MXFP4 exactly where the scales of
                a block are close. Gradients go straight through to the master weights, which end as
                MXFP4.
    nvfp4       NVIDIA, 2509.25149: 16 x 16 blocks for weights, so that forward and dgrad use the
                same quantized weights; a random Hadamard transform of wgrad's operands; stochastic
                rounding of gradients. The paper leaves about 15% of the linears in BF16: that is
                the policy nvfp4_mixed.
                Its stochastic rounding clips the maxima of tiles (scales.py): E[q] / x of them is
                0.989, the projection on x 0.9965.
    nvfp4_unbiased  nvfp4 whose gradients have scales 17/16 as large, which clip nothing.
    nvfp4_4over6    2512.02010: nvfp4_unbiased, in which the tiles of weights and activations take
                the better of two scales, by squared errors as in the authors' code (by default
                TransformerEngine compares absolute ones). The authors also choose for gradients,
                between two stochastic roundings; that is biased.
    quartet2    2601.22813: forward with four-over-six in tiles of 1x16; MS-EDEN for all operands of
                the backward, which are those of the quantized forward, rotated by H32 with new
                signs.
    tetrajet2   2510.27527: scales of 1x128 times those of 1x16; stochastic rounding of all operands
                of the backward, rotated by H16 with new signs; quantized again as in quartet2. The
                outer scale is a power of two here. Its channels of outliers in FP8 are not here;
                its reset of oscillating weights is the optimizer's (lm/optim).
    mxfp4       The methods of nvfp4 with MX tiles, which that paper compares with. There the
                transform has 32 elements (`hadamard=32`), and weights have square blocks.
    fp4_block   2502.11458: FP4 forward, FP8 backward. The paper does not state its block size and
                its backward format; here they are tiles of 128 and the backward of fp8_block. Its
                input gradient may be meant in FP8, as here, or in BF16 (`dgrad=bf16`).
    fp4_naive   The baseline of that paper: FP4 everywhere, rounded to nearest. One scale a token is
                `fp4_tile=row,wgrad_tile=token`. The stress test of 2606.00539 has only the
                activations saved for wgrad in 4 bits: `only=wgrad_x,wgrad_tile=token`.
"""

import dataclasses
from typing import Any

from fp8jax.lookup import Table
from fp8jax.numerics.formats import FORMATS
from fp8jax.numerics.recipe import Cast, Recipe
from fp8jax.numerics.scales import SCALES, Constant, Delayed, Pow2, ScaleRule
from fp8jax.numerics.tiles import BLOCK128, MX32, NV16, ROW, TILE128, NV16x16, Tile

HISTORY = 16  # amaxes, one per step, in fp8_delayed
CSCALE_BIAS = 6  # fp8_cscale's scale is 2^-6
HADAMARD = 16  # elements that NVFP4's Hadamard transform mixes

E4M3, E5M2, E2M1 = (FORMATS[name] for name in ("e4m3", "e5m2", "e2m1"))


def _recipe(name: str, x: Cast, w: Cast | None = None, g: Cast | None = None) -> Recipe:
    """Returns a recipe with one cast per operand, for both of its GEMMs; w and g default to x's."""
    w, g = w or x, g or x
    return Recipe(name=name, fwd_x=x, fwd_w=w, dgrad_g=g, dgrad_w=w, wgrad_x=x, wgrad_g=g)


def _per_tensor(name: str, **fields) -> Recipe:
    """Returns a recipe with one scale per tensor: E4M3 weights and activations, E5M2 gradients."""
    return _recipe(name, Cast(format=E4M3, **fields), g=Cast(format=E5M2, **fields))


def _blocks(name: str, scale: ScaleRule) -> Recipe:
    """Returns an E4M3 recipe with 1x128 tiles, and 128x128 blocks for weights."""
    tile = Cast(format=E4M3, tile=TILE128, scale=scale)
    return _recipe(name, tile, w=dataclasses.replace(tile, tile=BLOCK128))


def _fp4_training(name: str, tile: Tile, block: Tile, scale: ScaleRule) -> Recipe:
    """Returns an FP4 recipe with NVIDIA's methods.

    Weights are quantized in tiles of `block`, gradients are rounded stochastically, and wgrad's
    operands are Hadamard-transformed.
    """
    x = Cast(format=E2M1, tile=tile, scale=scale)
    g = dataclasses.replace(x, rounding="stochastic")
    recipe = _recipe(name, x, w=dataclasses.replace(x, tile=block), g=g)
    rotated = [dataclasses.replace(cast, hadamard=HADAMARD) for cast in (x, g)]
    return dataclasses.replace(recipe, wgrad_x=rotated[0], wgrad_g=rotated[1])


def _of_forward(name: str, forward: Cast, w: Cast, backward: Cast) -> Recipe:
    """Returns an FP4 recipe with one cast for all operands of the backward.

    What the forward multiplied is quantized again, so that gradients are those of its result.
    """
    again = dataclasses.replace(backward, requantizes=True)
    return Recipe(
        name=name,
        fwd_x=forward,
        fwd_w=w,
        dgrad_g=backward,
        dgrad_w=again,
        wgrad_x=again,
        wgrad_g=backward,
    )


def _fp4_weights(fp8: Recipe, w: Cast) -> Recipe:
    """Returns `fp8` with the weights `w` in the forward, and the same ones in dgrad."""
    assert fp8.dgrad_w is not None
    again = dataclasses.replace(fp8.dgrad_w, requantizes=True)
    return dataclasses.replace(fp8, fwd_w=w, dgrad_w=again, name="fp4_weights")


def _variants_of_nvfp4(nvfp4: Recipe) -> tuple[Recipe, ...]:
    def unbiased(name: str, cast: Cast) -> Cast:
        if cast.rounding == "nearest":
            return cast
        return dataclasses.replace(cast, scale=SCALES["unbiased"])

    def better(name: str, cast: Cast) -> Cast:
        if cast.rounding == "stochastic":
            return cast
        return dataclasses.replace(cast, scale=SCALES["4over6"])

    first = dataclasses.replace(nvfp4.map(unbiased), name="nvfp4_unbiased")
    four_over_six = Cast(format=E2M1, tile=NV16, scale=SCALES["4over6"])
    outer = Cast(format=E2M1, tile=NV16, scale=SCALES["outer128"])
    drawn: dict[str, Any] = dict(rounding="stochastic", redrawn=True)
    eden = Cast(format=E2M1, tile=NV16, scale=SCALES["eden"], hadamard=32, **drawn)
    unclipped = SCALES["outer128_unbiased"]
    jet = Cast(format=E2M1, tile=NV16, scale=unclipped, hadamard=16, **drawn)
    return (
        first,
        dataclasses.replace(first.map(better), name="nvfp4_4over6"),
        _of_forward("quartet2", four_over_six, four_over_six, eden),
        _of_forward("tetrajet2", outer, outer, jet),
    )


def _all_recipes() -> tuple[Recipe, ...]:
    block = _blocks("fp8_block", SCALES["fp32"])
    ue8m0 = _blocks("fp8_block_ue8m0", SCALES["e8m0"])
    mx = Cast(format=E2M1, tile=MX32, scale=SCALES["e8m0"])
    naive = _recipe("fp4_naive", Cast(format=E2M1, tile=TILE128))
    row = _recipe("fp8_rowwise", Cast(format=E4M3, tile=ROW))
    constant = Constant(2.0**-CSCALE_BIAS)
    nvfp4 = _fp4_training("nvfp4", NV16, NV16x16, SCALES["nvfp4"])
    return (
        Recipe(name="bf16"),
        _per_tensor("fp8_delayed", scale=Delayed(HISTORY)),
        _per_tensor("fp8_current"),
        _per_tensor("fp8_amax", scale=Pow2()),
        _per_tensor("fp8_cscale", scale=constant),
        row,
        dataclasses.replace(
            row,
            name="fp8_rowwise_wgrad_bf16",
            dgrad_w=Cast(format=E4M3),
            wgrad_x=None,
            wgrad_g=None,
        ),
        block,
        ue8m0,
        _recipe("mxfp8", Cast(format=E4M3, tile=MX32, scale=SCALES["e8m0"])),
        dataclasses.replace(block.with_forward(naive), name="fp4_block"),
        _fp4_weights(ue8m0, mx),
        naive,
        nvfp4,
        *_variants_of_nvfp4(nvfp4),
        _fp4_training("mxfp4", MX32, MX32, SCALES["e8m0"]),
    )


RECIPES: Table[Recipe] = Table("recipe", {recipe.name: recipe for recipe in _all_recipes()})
"""The recipes by name; the guide of recipes has the casts and the paper of each.

Wherever a recipe is expected, its name will do, with options behind a colon. An unknown name raises
ValueError with similar names.

Example:
  >>> list(fp8jax.RECIPES)
  ['bf16', 'fp8_delayed', 'fp8_current', 'fp8_amax', 'fp8_cscale', 'fp8_rowwise',
   'fp8_rowwise_wgrad_bf16', 'fp8_block', 'fp8_block_ue8m0', 'mxfp8', 'fp4_block', 'fp4_weights',
   'fp4_naive', 'nvfp4', 'nvfp4_unbiased', 'nvfp4_4over6', 'quartet2', 'tetrajet2', 'mxfp4']
  >>> print(fp8jax.RECIPES["fp8_delayed"].table())
  cast     format  tile    scale  timing              rounding  Hadamard
  fwd_x    e4m3    tensor  fp32   delayed, max of 16  nearest   -
  fwd_w    e4m3    tensor  fp32   delayed, max of 16  nearest   -
  dgrad_g  e5m2    tensor  fp32   delayed, max of 16  nearest   -
  dgrad_w  e4m3    tensor  fp32   delayed, max of 16  nearest   -
  wgrad_x  e4m3    tensor  fp32   delayed, max of 16  nearest   -
  wgrad_g  e5m2    tensor  fp32   delayed, max of 16  nearest   -
  >>> fp8jax.init_state("fp8_delayed:history=4")["x"]
  Array([0., 0., 0., 0.], dtype=float32)
"""
HIGH_PRECISION = RECIPES["bf16"]
