"""Recipes: which operand of which product is cast to what. Data, no code.

A linear layer is three products. With x [M, K], w [K, N] and g = dL/dy [M, N]:

    fwd     y  = x  w        contracts K      x by fwd_x      w by fwd_w
    dgrad   dx = g  w^T      contracts N      g by dgrad_g    w by dgrad_w
    wgrad   dw = x^T g       contracts M      x by wgrad_x    g by wgrad_g

A `Recipe` is the six casts; None leaves an operand in high precision. An operand is cast anew for
each product, from the high-precision source, unless its two casts would give the same codes (one
scale for the whole tensor).

A `Cast` says format, tile, scale rule and *timing*, where the amax comes from:

    current   from the tensor itself, now
    delayed   from the amaxes of the last `history` steps, kept as state: their maximum, or the
              newest
    seeding   current, and also written to the history: what `seeding()` makes of delayed
    constant  nowhere: the scale is a given number

A delayed recipe's very first step runs with `seeding()`: an empty history says nothing about
the tensors, and a scale of 1 flushes most of a language model's gradients to zero. That is a
second program rather than a condition in the first, so the steady step pays nothing for it.

Sources, and what they leave open (policy.py makes the other readings options of a name):

    fp8_amax    Graphcore, arXiv 2309.17224: a power-of-two bias from the current amax. Margin 0;
                the paper is said to take 3 (`margin=3`), which a re-implementation found unstable.
    fp8_cscale  the same with one constant bias. CSCALE_BIAS is the middle of the interval in which
                small models train here (docs/log.md); no constant is right for every model.
    fp8_block   DeepSeek-V3 (2412.19437) and InfiR2 (2509.22536): E4M3 everywhere. InfiR2 compares
                float32 scales with powers of two, fp8_block_ue8m0, which its scripts run.
    fp8_rowwise torchao's recipe of that name, with float32 scales; there they are powers of two
                (`scale=pow2`). fp8_rowwise_wgrad_bf16 is its rowwise_with_gw_hp: the weight
                gradient in high precision, the weight of dgrad with one scale.
    fp8_delayed TransformerEngine's delayed scaling. It keeps 1024 amaxes; here they are 16, which
                follow the decay of gradients sooner (`history=1024`; `amax=newest`; `margin=1`).
    mxfp8       NVIDIA, 2506.08027: E4M3 also for gradients, scales rounded up. The OCP standard
                rounds them down and saturates the largest values (`scale=e8m0_floor`).
    nvfp4       NVIDIA, 2509.25149: 16 x 16 blocks for weights, so that forward and dgrad see the
                same ones; a random rotation of wgrad's operands; gradients rounded stochastically.
                It leaves about 15% of the linears in BF16: the policy nvfp4_mixed.
    mxfp4       the same methods with MX tiles: what that paper compares with.
    fp4_block   2502.11458, FP4 forward, FP8 backward. Its block size and its backward format are
                not known: tiles of 128, and the backward of fp8_block. fp4_naive is what it argues
                against: FP4 everywhere, rounded to nearest.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from fp8jax.lookup import unknown
from fp8jax.numerics.formats import FORMATS, ROUNDINGS, Format
from fp8jax.numerics.hadamard import check_hadamard
from fp8jax.numerics.scales import SCALES, Constant, NvFp4, ScaleRule
from fp8jax.numerics.tiles import TENSOR, Tile

TIMINGS = ("current", "delayed", "seeding", "constant")


AMAXES = ("max", "newest")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cast:
    """How one operand of one product is quantized.

    Attributes:
      format: one of `FORMATS`.
      tile: elements that share a scale.
      scale: one of `SCALES`, `Pow2(margin)` or `Constant(value)`.
      timing: one of `TIMINGS`.
      history: how many amaxes a delayed cast keeps; 0 for the others.
      amax: of a history, "max" or the "newest".
      rounding: "nearest" or "stochastic".
      hadamard: elements along the contraction that a random rotation mixes before the cast
        (scaling.py); 1 for none. Both operands of a product are rotated or none.
    """

    format: Format
    tile: Tile = TENSOR
    scale: ScaleRule = SCALES["fp32"]
    timing: str = "current"
    history: int = 0
    amax: str = "max"
    rounding: str = "nearest"
    hadamard: int = 1

    def __post_init__(self):
        if self.timing not in TIMINGS:
            raise unknown("timing", self.timing, TIMINGS)
        if self.rounding not in ROUNDINGS:
            raise unknown("rounding", self.rounding, ROUNDINGS)
        if self.amax not in AMAXES:
            raise unknown("amax of a history", self.amax, AMAXES)
        check_hadamard(self.hadamard)
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
        if self.amax != "max" and not self.delayed:
            raise ValueError(f"amax={self.amax!r} is of a history: contradicts {self.timing=}")
        if self.hadamard > 1 and self.timing != "current":
            raise ValueError(
                f"hadamard={self.hadamard} contradicts timing={self.timing!r}: amaxes are those of"
                " the tensor, not of its rotation"
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


class GemmCasts(NamedTuple):
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
        for name, pair in self.gemms.items():
            sizes = [1 if cast is None else cast.hadamard for cast in pair]
            if sizes[0] != sizes[1]:
                raise ValueError(
                    f"{name} rotates its operands by hadamard={sizes[0]} and {sizes[1]}: only equal"
                    " rotations cancel in the product"
                )

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
    def gemms(self) -> dict[str, GemmCasts]:
        """fwd (x, w), dgrad (g, w) and wgrad (x, g)."""
        return {
            "fwd": GemmCasts(self.fwd_x, self.fwd_w),
            "dgrad": GemmCasts(self.dgrad_g, self.dgrad_w),
            "wgrad": GemmCasts(self.wgrad_x, self.wgrad_g),
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

    @property
    def same_x(self) -> bool:
        """Whether products with one x quantize it alike: none of its casts draws."""
        casts = (self.fwd_x, self.wgrad_x)
        return all(cast is None or cast.rounding == "nearest" for cast in casts)

    def map(self, change: Callable[[str, Cast], Cast]) -> "Recipe":
        """The recipe with each cast replaced by change(its name, such as "dgrad_g", the cast)."""
        casts = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        casts.pop("name")
        new = {name: cast and change(name, cast) for name, cast in casts.items()}
        return Recipe(**new, name=self.name)

    def seeding(self) -> "Recipe":
        """The same, its delayed casts taking the current amax and still writing histories."""
        return self.map(lambda _, cast: cast.seeding())

    def with_forward(self, other: "Recipe") -> "Recipe":
        """This backward with the forward casts of another recipe."""
        return dataclasses.replace(self, fwd_x=other.fwd_x, fwd_w=other.fwd_w, name="custom")
