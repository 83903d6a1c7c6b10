"""Recipes and policies: which operand is cast to what, and which module does it. Data, no code.

A linear layer is three products. With x [M, K], w [K, N] and g = dL/dy [M, N]:

    fwd     y  = x  w        contracts K      x by fwd_x      w by fwd_w
    dgrad   dx = g  w^T      contracts N      g by dgrad_g    w by dgrad_w
    wgrad   dw = x^T g       contracts M      x by wgrad_x    g by wgrad_g

A `Recipe` is the six casts; None leaves an operand in high precision. An operand is cast anew for
each product unless its two casts would give the same codes (one scale for the whole tensor).

A `Cast` says format, tile, scale rule and *timing*, where the amax comes from:

    current   from the tensor itself, now
    delayed   the maximum of the amaxes of the last `history` steps, kept as state
    seeding   current, and also written to the history: what `seeding()` makes of delayed
    constant  nowhere: the scale is a given number

A delayed recipe's very first step runs with `seeding()`: an empty history says nothing about
the tensors, and a scale of 1 flushes most of a language model's gradients to zero. That is a
second program rather than a condition in the first, so the steady step pays nothing for it.

A `Policy` maps module paths to recipes: an ordered list of (pattern, recipe), the first match
wins, what no pattern matches stays in high precision, and the first and last layers can be exempt.
Patterns are shell-style (`layers/mlp/*`) and never hold a layer's index: layers are one stack.

Where the published recipes leave something open: TransformerEngine's delayed scaling keeps 1024
amaxes; here it is 16, which follows the decay of gradients sooner (a field of the cast). The FP4
paper (arXiv 2502.11458) gives neither its block size nor its backward format: `fp4_block` has
1x128 tiles in the forward, and InfiR2's E4M3 blocks in the backward.
"""

import dataclasses
import fnmatch
from collections.abc import Iterable
from typing import Any, NamedTuple

from fp8jax.formats import FORMATS, ROUNDINGS, Format
from fp8jax.names import lookup, unknown
from fp8jax.scaling import (
    BLOCK128,
    SCALES,
    TENSOR,
    TILE128,
    Constant,
    NvFp4,
    ScaleRule,
    Tile,
)

TIMINGS = ("current", "delayed", "seeding", "constant")
HISTORY = 16  # steps; see above


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cast:
    """How one operand of one product is quantised.

    Attributes:
      format: one of `FORMATS`.
      tile: elements that share a scale.
      scale: one of `SCALES`, `Pow2(margin)` or `Constant(value)`.
      timing: one of `TIMINGS`.
      history: how many amaxes a delayed cast keeps; 0 for the others.
      rounding: "nearest" or "stochastic".
    """

    format: Format
    tile: Tile = TENSOR
    scale: ScaleRule = SCALES["fp32"]
    timing: str = "current"
    history: int = 0
    rounding: str = "nearest"

    def __post_init__(self):
        if self.timing not in TIMINGS:
            raise unknown("timing", self.timing, TIMINGS)
        if self.rounding not in ROUNDINGS:
            raise unknown("rounding", self.rounding, ROUNDINGS)
        if not self.format.signed:
            raise ValueError(f"{self.format.name} holds scales, not values")
        if self.history < 0 or self.delayed != (self.history > 0):
            raise ValueError(
                f"timing={self.timing!r} contradicts history={self.history}: delayed casts keep at"
                " least one amax, others none"
            )
        if self.delayed and (self.tile != TENSOR or isinstance(self.scale, Constant | NvFp4)):
            raise ValueError(
                "a history holds one amax for the whole tensor: delayed scaling contradicts"
                f" tile={self.tile}, scale={self.scale}"
            )
        if (self.timing == "constant") != isinstance(self.scale, Constant):
            raise ValueError(f"timing={self.timing!r} contradicts scale={self.scale}")
        if self.timing == "constant" and self.tile != TENSOR:
            raise ValueError(f"one constant serves the whole tensor, got tile={self.tile}")
        if isinstance(self.scale, NvFp4) and self.format is not FORMATS["e2m1"]:
            raise ValueError(f"scale rule nvfp4 is for e2m1, got format={self.format.name}")

    @property
    def delayed(self) -> bool:
        """Whether it writes an amax history."""
        return self.timing in ("delayed", "seeding")

    @property
    def separable(self) -> bool:
        """Whether the scale can be multiplied after the product: constant along the contraction."""
        return self.tile.contract is None and not isinstance(self.scale, NvFp4)

    def seeding(self) -> "Cast":
        return dataclasses.replace(self, timing="seeding") if self.delayed else self


class Product(NamedTuple):
    """The casts of one product's two operands, None for high precision."""

    lhs: Cast | None
    rhs: Cast | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """The six casts of a linear layer; hashable, equal when the casts are."""

    fwd_x: Cast | None = None
    fwd_w: Cast | None = None
    dgrad_g: Cast | None = None
    dgrad_w: Cast | None = None
    wgrad_x: Cast | None = None
    wgrad_g: Cast | None = None
    name: str = dataclasses.field(default="custom", compare=False)

    def __post_init__(self):
        for operand, casts in self._operands().items():
            lengths = {cast.history for cast in casts if cast.delayed}
            if len(lengths) > 1:
                raise ValueError(f"{operand} has one history, but its casts ask for {lengths}")

    def _operands(self) -> dict[str, tuple[Cast, ...]]:
        pairs = {
            "x": (self.fwd_x, self.wgrad_x),
            "w": (self.fwd_w, self.dgrad_w),
            "g": (self.dgrad_g, self.wgrad_g),
        }
        return {name: tuple(c for c in pair if c is not None) for name, pair in pairs.items()}

    @property
    def casts(self) -> tuple[Cast, ...]:
        return tuple(cast for pair in self._operands().values() for cast in pair)

    @property
    def products(self) -> dict[str, Product]:
        """fwd (x, w), dgrad (g, w) and wgrad (x, g)."""
        return {
            "fwd": Product(self.fwd_x, self.fwd_w),
            "dgrad": Product(self.dgrad_g, self.dgrad_w),
            "wgrad": Product(self.wgrad_x, self.wgrad_g),
        }

    @property
    def histories(self) -> dict[str, int]:
        """operand -> length of its amax history, for the operands that keep one."""
        return {
            operand: max(cast.history for cast in casts)
            for operand, casts in self._operands().items()
            if any(cast.delayed for cast in casts)
        }

    @property
    def stochastic(self) -> bool:
        """Whether a key is needed."""
        return any(cast.rounding == "stochastic" for cast in self.casts)

    def seeding(self) -> "Recipe":
        """The same, its delayed casts taking the current amax and still writing histories."""
        new: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            new[field.name] = value.seeding() if isinstance(value, Cast) else value
        return Recipe(**new)


def _per_tensor(name: str, *, timing: str, history: int = 0) -> Recipe:
    """One float32 scale a tensor: E4M3 for weights and activations, E5M2 for gradients."""
    e4m3 = Cast(format=FORMATS["e4m3"], timing=timing, history=history)
    e5m2 = dataclasses.replace(e4m3, format=FORMATS["e5m2"])
    return Recipe(
        name=name, fwd_x=e4m3, fwd_w=e4m3, dgrad_g=e5m2, dgrad_w=e4m3, wgrad_x=e4m3, wgrad_g=e5m2
    )


def _blocks(name: str, *, scale: ScaleRule) -> Recipe:
    """DeepSeek-V3's and InfiR2's granularity: 1x128 tiles and 128x128 weight blocks, E4M3."""
    tile = Cast(format=FORMATS["e4m3"], tile=TILE128, scale=scale)
    block = dataclasses.replace(tile, tile=BLOCK128)
    return Recipe(
        name=name,
        fwd_x=tile,
        fwd_w=block,
        dgrad_g=tile,
        dgrad_w=block,
        wgrad_x=tile,
        wgrad_g=tile,
    )


def _fp4_forward(name: str, backward: Recipe) -> Recipe:
    """E2M1 in tiles of 1x128 for the forward product, `backward` for the other two."""
    tile = Cast(format=FORMATS["e2m1"], tile=TILE128)
    return dataclasses.replace(backward, name=name, fwd_x=tile, fwd_w=tile)


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(name="bf16"),
        _per_tensor("fp8_delayed", timing="delayed", history=HISTORY),
        _per_tensor("fp8_current", timing="current"),
        _blocks("fp8_block", scale=SCALES["fp32"]),
        _blocks("fp8_block_ue8m0", scale=SCALES["e8m0"]),
        _fp4_forward("fp4_block", _blocks("", scale=SCALES["fp32"])),
    )
}
HIGH_PRECISION = RECIPES["bf16"]


def as_recipe(recipe: str | Recipe) -> Recipe:
    """`recipe`, resolved if it is a name. Raises ValueError for an unknown one."""
    return recipe if isinstance(recipe, Recipe) else lookup("recipe", recipe, RECIPES)


# Policies -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Policy:
    """Which module gets which recipe.

    Attributes:
      rules: (shell-style pattern over module paths, recipe), first match wins.
      bf16_first, bf16_last: that many layers at either end run in high precision.
      name: for logs and errors; not part of its identity.
    """

    rules: tuple[tuple[str, Recipe], ...]
    bf16_first: int = 0
    bf16_last: int = 0
    name: str = dataclasses.field(default="custom", compare=False)

    def __post_init__(self):
        if min(self.bf16_first, self.bf16_last) < 0:
            raise ValueError(f"negative: {self.bf16_first=}, {self.bf16_last=}")

    def recipe(self, path: str) -> Recipe:
        """The recipe of the module at `path`, such as "layers/mlp/down"."""
        for pattern, recipe in self.rules:
            if fnmatch.fnmatchcase(path, pattern):
                return recipe
        return HIGH_PRECISION

    def check(self, paths: Iterable[str], num_layers: int) -> None:
        """Raises ValueError for a rule that no path matches (a typo would leave those modules in
        high precision without a word), and for more exempt layers than there are."""
        paths = list(paths)
        for pattern, _ in self.rules:
            if not fnmatch.filter(paths, pattern):
                raise ValueError(
                    f"policy {self.name!r}: rule {pattern!r} matches no module. "
                    f"There are: {', '.join(paths)}"
                )
        if self.bf16_first + self.bf16_last > num_layers:
            raise ValueError(
                f"policy {self.name!r}: {self.bf16_first} first and {self.bf16_last} last layers"
                f" in high precision, of {num_layers}"
            )

    @property
    def delayed(self) -> bool:
        """Whether any module keeps amax histories, so that a first step has to seed them."""
        return any(recipe.histories for _, recipe in self.rules)

    @property
    def stochastic(self) -> bool:
        """Whether any module needs a key."""
        return any(recipe.stochastic for _, recipe in self.rules)

    def seeding(self) -> "Policy":
        """The policy of the first step after initialisation or after a switch to this policy."""
        rules = tuple((pattern, recipe.seeding()) for pattern, recipe in self.rules)
        return dataclasses.replace(self, rules=rules)

    def without_exemptions(self) -> "Policy":
        """The policy of the layers between the first and the last."""
        return dataclasses.replace(self, bf16_first=0, bf16_last=0)


# Embedding, LM head, norms and the attention core match none of these: they stay in BF16.
POLICIES: dict[str, Policy] = {
    **{name: Policy((("layers/*", recipe),), name=name) for name, recipe in RECIPES.items()},
    "fp4_mixed": Policy(
        (("layers/mlp/*", RECIPES["fp4_block"]), ("layers/attention/*", RECIPES["fp8_block"])),
        name="fp4_mixed",
    ),
}


def as_policy(policy: str | Policy) -> Policy:
    """`policy`, resolved if it is a name. Raises ValueError for an unknown one."""
    return policy if isinstance(policy, Policy) else lookup("policy", policy, POLICIES)
