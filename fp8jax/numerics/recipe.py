"""Recipes: how each operand of a linear layer's three GEMMs is quantized. Data, no computation.

A linear layer has three GEMMs. With x [M, K], w [K, N] and g = dL/dy [M, N]:

    fwd     y  = x  w        contracts K      x is cast by fwd_x      w by fwd_w
    dgrad   dx = g  w^T      contracts N      g is cast by dgrad_g    w by dgrad_w
    wgrad   dw = x^T g       contracts M      x is cast by wgrad_x    g by wgrad_g

A `Recipe` holds these six casts. None leaves an operand in high precision. Each GEMM quantizes its
operands from the high-precision source. The two GEMMs that read an operand share its quantized
values only where both casts give the same ones (one scale for the whole tensor).

A `Cast` states the format, the tile and the scale, which also says where the amax comes from:

    a rule          the tensor itself: current scaling
    Delayed(...)    a history of the tensor's amaxes in the last steps: their maximum, or the newest
    Constant(s)     no amax: the scale is a given number

An empty history says nothing about the tensors, and a scale of 1 flushes most gradients of a
language model to zero: so GEMMs read an empty history as if it were full of the tensor's own amax,
unless they are promised that none is empty (histories/amax_history.py). `current()` turns delayed
casts into current ones, for tensors of which there is no history at all.

A recipe also says how each FP8 GEMM adds up its products (accumulation.py).

recipes.py holds the named recipes and their sources.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from fp8jax.lookup import brief, unknown
from fp8jax.numerics.accumulation import ACCUMULATIONS, Accumulation
from fp8jax.numerics.describe import cast_words, recipe_rows, recipe_words, scale_name, table
from fp8jax.numerics.formats import FORMATS, ROUNDINGS, Format, as_format, check_holds_values
from fp8jax.numerics.hadamard import check_hadamard
from fp8jax.numerics.scales import (
    SCALES,
    Constant,
    Delayed,
    Eden,
    Mse,
    NvFp4,
    Outer128,
    ScaleRule,
    as_scale_rule,
    refuse_tile,
)
from fp8jax.numerics.tiles import TENSOR, Tile, as_tile

CASTS = ("fwd_x", "fwd_w", "dgrad_g", "dgrad_w", "wgrad_x", "wgrad_g")  # fields of a Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cast:
    """How one operand of one GEMM is quantized.

    Attributes:
      format: a value of `FORMATS`, or its key.
      tile: which elements share a scale: a `Tile`, a key of `TILES`, or (free, contract).
      scale: a value of `SCALES` or its key, or `Pow2(margin)`, of the tensor's own amax;
        `Delayed(history)` for past ones, `Constant(value)` for none.
      rounding: "nearest" or "stochastic". Of the scale rule `Eden` the scales are rounded so, and
        codes to nearest.
      hadamard: how many elements along the contracting axis a random Hadamard transform mixes
        before the cast (hadamard.py); 1 for no transform. The two operands of a GEMM must agree.
      redrawn: whether the transform has new signs in each call, from the key, not fixed ones. The
        two operands of a GEMM must agree.
      requantizes: whether the cast quantizes what the forward GEMM multiplied, and not the source
        of that: gradients are then those of the quantized forward. Of dgrad_w and wgrad_x only.
      shared_scale: whether weights that are multiplied with one x share this scale, as one fused
        weight would (query, key and value, for instance): it comes from their largest amax, for w,
        and from that of their results' gradients, for g. Only for one current scale per tensor.

    Raises:
      TypeError: for fields of another type.
      ValueError: for unknown names, and for settings that contradict each other.

    Example:
      >>> e5m2 = fp8jax.FORMATS["e5m2"]
      >>> fp8jax.Cast(format=e5m2, scale=fp8jax.Delayed(history=16))
      Cast(e5m2 tensor fp32 delayed, max of 16)
      >>> fp8jax.Cast(format=e5m2, tile=fp8jax.ROW, scale=fp8jax.Delayed(history=16))
      Traceback (most recent call last):
          ...
      ValueError: delayed scaling contradicts tile=row: a history holds one amax for the whole
      tensor; use tile=TENSOR
    """

    format: Format
    tile: Tile = TENSOR
    scale: ScaleRule | Delayed = SCALES["fp32"]
    rounding: str = "nearest"
    hadamard: int = 1
    redrawn: bool = False
    requantizes: bool = False
    shared_scale: bool = False

    def __post_init__(self):
        for field, resolve in (("format", as_format), ("tile", as_tile), ("scale", _as_scale)):
            object.__setattr__(self, field, resolve(getattr(self, field)))
        if self.rounding not in ROUNDINGS:
            raise unknown("rounding", self.rounding, ROUNDINGS)
        check_hadamard(self.hadamard)
        check_holds_values(self.format)
        if self.timing == "delayed" and self.tile != TENSOR:
            raise ValueError(
                f"delayed scaling contradicts tile={self.tile}: a history holds one amax for the"
                " whole tensor; use tile=TENSOR"
            )
        if self.timing == "constant" and self.tile != TENSOR:
            raise ValueError(
                f"scale={self.scale} contradicts tile={self.tile}: the constant scales the whole"
                " tensor; use tile=TENSOR"
            )
        if self.hadamard > 1 and self.timing != "current":
            raise ValueError(
                f"hadamard={self.hadamard} contradicts scale={self.scale}: only current scaling"
                " takes the amax of the transformed tensor; use a rule such as Fp32"
            )
        if self.shared_scale and (self.timing, self.tile, self.hadamard) != ("current", TENSOR, 1):
            raise ValueError(
                f"shared_scale=True contradicts scale={self.scale}, tile={self.tile},"
                f" hadamard={self.hadamard}: weights share one current scale for the whole tensor;"
                " use a rule such as Fp32, tile=TENSOR, hadamard=1"
            )
        if isinstance(self.scale, NvFp4) and self.format != FORMATS["e2m1"]:
            raise ValueError(
                f"scale rule {scale_name(self.scale)} needs format e2m1, got"
                f" format={self.format.name}"
            )
        refuse_tile(self.rule, self.tile, hadamard=self.hadamard)
        if isinstance(self.scale, Eden) and not self.redrawn:
            raise ValueError(
                "scale rule eden contradicts redrawn=False: a sum over many calls is right"
                " only if each has signs of its own"
            )
        if self.redrawn and not 1 < self.hadamard <= 32:
            raise ValueError(
                f"redrawn=True needs a Hadamard transform of 2 to 32 elements, got"
                f" hadamard={self.hadamard}"
            )
        if isinstance(self.scale, Mse) and self.shared_scale:
            raise ValueError(
                "scale rule mse contradicts shared_scale=True: each tensor has its errors"
            )
        if self.requantizes and (self.timing != "current" or self.shared_scale):
            raise ValueError(
                f"requantizes=True contradicts scale={self.scale},"
                f" shared_scale={self.shared_scale}: what the"
                " forward multiplied has a current scale of its own"
            )

    def __repr__(self) -> str:
        return f"Cast({cast_words(self)})"

    @property
    def rule(self) -> ScaleRule:
        """The rule that turns an amax into the scale."""
        return self.scale.rule if isinstance(self.scale, Delayed) else self.scale

    @property
    def timing(self) -> str:
        """The timing by which the scale gets its amax, "current", "delayed" or "constant"."""
        if isinstance(self.scale, Delayed):
            return "delayed"
        return "constant" if isinstance(self.scale, Constant) else "current"

    @property
    def delayed(self) -> bool:
        """Whether the cast writes an amax history."""
        return isinstance(self.scale, Delayed)

    @property
    def history(self) -> int:
        """The length of the cast's amax history; 0 without one."""
        return self.scale.history if isinstance(self.scale, Delayed) else 0

    @property
    def separable(self) -> bool:
        """Whether the scale can multiply the GEMM's result.

        It can if it is constant along the contracting axis.
        """
        return self.tile.contract is None and not isinstance(self.scale, NvFp4)

    @property
    def random(self) -> bool:
        """Whether the cast needs a key, to round stochastically or to draw signs."""
        return self.rounding == "stochastic" or self.redrawn

    def exact_in(self, dtype: Any) -> bool:
        """Whether `dtype` holds the operand's numbers exactly: codes times the scales of tiles.

        Scales that are constant along the contracting axis multiply the result instead, and are no
        part of these numbers: those of a separable cast, and the tensor scale of nvfp4. A code of p
        significant bits times a scale of q bits has at most p + q bits, or p if the scale is a
        power of two. Some e2m1 x e4m3 has 2 + 4 = 6 bits between 2^-10 and 2688, within the 8 bits
        and the range of bfloat16.

        Scales that are powers of two have the range of float32, which is that of bfloat16: there
        both hold numbers from 2^-126 on, and devices may flush smaller ones to zero. float16 has
        not that range.
        """
        info, smallest, largest = jnp.finfo(dtype), self.format.tiny, self.format.max
        bits = self.format.mantissa + 1
        if isinstance(self.scale, NvFp4):
            e4m3 = FORMATS["e4m3"]
            bits += e4m3.mantissa + 1
            smallest, largest = smallest * e4m3.tiny, largest * e4m3.max
        if isinstance(self.scale, Outer128) or not (
            self.separable or isinstance(self.scale, NvFp4)
        ):
            power_of_two = self.rule.power_of_two or isinstance(self.scale, Outer128)
            if not power_of_two or info.minexp > jnp.finfo(jnp.float32).minexp:
                return False
            smallest = largest = 1.0
        fits = info.smallest_subnormal <= smallest and largest <= info.max
        return bool(bits <= info.nmant + 1 and fits)

    @property
    def any_axis(self) -> bool:
        """Whether the codes are the same, whichever axis is the contracting one."""
        whole = self.tile == TENSOR and self.rounding == "nearest" and self.hadamard == 1
        return whole and not self.requantizes

    def current(self) -> "Cast":
        """Returns the cast with the scale of the tensor itself if it is delayed, else unchanged."""
        return dataclasses.replace(self, scale=self.rule)


def _as_scale(scale: Any) -> ScaleRule | Delayed:
    """Returns a cast's scale, or the rule of that name; raises as `as_scale_rule` does."""
    return scale if isinstance(scale, Delayed) else as_scale_rule(scale)


class GemmCasts(NamedTuple):
    """The casts of a GEMM's two operands; None is high precision."""

    lhs: Cast | None
    rhs: Cast | None

    @property
    def sums_codes(self) -> bool:
        """Whether the GEMM sums FP8 codes over its whole contracting axis, so that there is a
        choice of accumulation."""
        return all(c is not None and c.format.bits == 8 and c.separable for c in self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the operands of a linear's three GEMMs are quantized; None leaves one in high precision.

    With x [M, K], w [K, N] and g = dL/dy [M, N], fwd is y = x w, dgrad is dx = g w^T, and wgrad is
    dw = x^T g. Recipes are hashable and equal if their casts and accumulation are.

    Attributes:
      fwd_x, fwd_w: the casts of fwd, which contracts K.
      dgrad_g, dgrad_w: the casts of dgrad, which contracts N.
      wgrad_x, wgrad_g: the casts of wgrad, which contracts M.
      accumulation: how each GEMM adds up its products.
      name: for logs and error messages; ignored by == and hash.

    Raises:
      TypeError: for fields of another type.
      ValueError: the casts of one operand have histories of different lengths, the two casts of
        one GEMM have different `hadamard` or `redrawn`, a cast of x has a `shared_scale`, one but
        dgrad_w and wgrad_x requantizes, and for a split accumulation of a GEMM that has no choice
        of accumulation.

    Example:
      >>> tile = fp8jax.Cast(format=fp8jax.FORMATS["e4m3"], tile=fp8jax.TILE128)
      >>> recipe = fp8jax.Recipe(name="forward_only", fwd_x=tile, fwd_w=tile)
      >>> print(recipe.table())
      cast     format          tile     scale  timing   rounding  Hadamard
      fwd_x    e4m3            tile128  fp32   current  nearest   -
      fwd_w    e4m3            tile128  fp32   current  nearest   -
      dgrad_g  high precision
      dgrad_w  high precision
      wgrad_x  high precision
      wgrad_g  high precision
      >>> recipe.wgrad_g is None, recipe.histories, recipe.stochastic
      (True, {}, False)
    """

    fwd_x: Cast | None = None
    fwd_w: Cast | None = None
    dgrad_g: Cast | None = None
    dgrad_w: Cast | None = None
    wgrad_x: Cast | None = None
    wgrad_g: Cast | None = None
    accumulation: Accumulation = Accumulation()
    name: str = dataclasses.field(default="custom", compare=False)

    def __post_init__(self):
        for name, cast in self.by_name().items():
            if not isinstance(cast, Cast | None):
                raise TypeError(
                    f"{name} must be a Cast, or None for high precision, got {brief(cast)}"
                )
        for operand, casts in self._operands().items():
            lengths = {cast.history for cast in casts if cast.delayed}
            if len(lengths) > 1:
                raise ValueError(
                    f"{operand} has one history, but its casts set the lengths {sorted(lengths)}"
                )
        if any(cast.shared_scale for cast in self._operands()["x"]):
            raise ValueError(
                "a cast of x has a shared scale: weights share w's and g's scales; x is one"
            )
        for name, pair in self.gemms.items():
            sizes = [1 if cast is None else cast.hadamard for cast in pair]
            if sizes[0] != sizes[1]:
                raise ValueError(
                    f"{name} rotates its operands by hadamard={sizes[0]} and {sizes[1]}: only equal"
                    " transforms cancel in a GEMM"
                )
            if len({cast is not None and cast.redrawn for cast in pair}) > 1:
                raise ValueError(
                    f"{name} draws signs for one operand only: only equal transforms cancel in a"
                    " GEMM"
                )
        for name, cast in self.by_name().items():
            if cast is not None and cast.requantizes and name not in ("dgrad_w", "wgrad_x"):
                raise ValueError(
                    f"{name} requantizes: the forward multiplies x and w, so only dgrad_w and"
                    " wgrad_x may"
                )
        for name, forward in (("dgrad_w", self.fwd_w), ("wgrad_x", self.fwd_x)):
            self._check_requantized(name, forward)
        self._check_accumulation()

    def _check_requantized(self, name: str, forward: Cast | None) -> None:
        cast = self.by_name()[name]
        if cast is None or not cast.requantizes or forward is None:
            return
        if forward.hadamard > 1:
            raise ValueError(
                f"{name} requantizes what the forward multiplied, which hadamard="
                f"{forward.hadamard} rotates: nothing rotates it back"
            )
        if forward.shared_scale:
            raise ValueError(
                f"{name} requantizes what the forward multiplied, whose scale several weights"
                " share: the gradient would have another"
            )

    def _check_accumulation(self) -> None:
        if not isinstance(self.accumulation, Accumulation):
            raise TypeError(
                f"accumulation must be an Accumulation(fwd, dgrad, wgrad), got"
                f" {brief(self.accumulation)}"
            )
        for name, casts in self.gemms.items():
            how = getattr(self.accumulation, name)
            if how not in ACCUMULATIONS:
                raise unknown(f"accumulation of {name}", how, ACCUMULATIONS)
            if how != "fast" and not casts.sums_codes:
                raise ValueError(
                    f"accumulation={how!r} of {name}: only a GEMM of two FP8 operands, with scales"
                    " that are constant along the contracting axis, has this choice"
                )

    def __repr__(self) -> str:
        return f"Recipe({self.name!r}, {recipe_words(self.by_name(), self.accumulation)})"

    def table(self) -> str:
        """A text table of the casts, for people."""
        return table(recipe_rows(self.by_name(), self.accumulation))

    def by_name(self) -> dict[str, Cast | None]:
        """Returns each cast by the name of its field."""
        return {name: getattr(self, name) for name in CASTS}

    def _operands(self) -> dict[str, tuple[Cast, ...]]:
        """Returns operand "x", "w" or "g" -> the casts of it that quantize."""
        pairs = {
            "x": (self.fwd_x, self.wgrad_x),
            "w": (self.fwd_w, self.dgrad_w),
            "g": (self.dgrad_g, self.wgrad_g),
        }
        return {name: tuple(c for c in pair if c is not None) for name, pair in pairs.items()}

    @property
    def casts(self) -> tuple[Cast, ...]:
        """The casts that quantize, first x's, then w's, then g's."""
        return tuple(cast for pair in self._operands().values() for cast in pair)

    @property
    def gemms(self) -> dict[str, GemmCasts]:
        """The casts of each GEMM, fwd (x, w), dgrad (g, w) and wgrad (x, g)."""
        return {
            "fwd": GemmCasts(self.fwd_x, self.fwd_w),
            "dgrad": GemmCasts(self.dgrad_g, self.dgrad_w),
            "wgrad": GemmCasts(self.wgrad_x, self.wgrad_g),
        }

    @property
    def histories(self) -> dict[str, int]:
        """Operand -> length of its amax history, for the operands that have one."""
        return {
            operand: max(cast.history for cast in casts)
            for operand, casts in self._operands().items()
            if any(cast.delayed for cast in casts)
        }

    @property
    def stochastic(self) -> bool:
        """Whether any cast rounds stochastically or draws signs, so that a key is needed."""
        return any(cast.random for cast in self.casts)

    @property
    def quantizes_x_once(self) -> bool:
        """Whether several GEMMs with the same x may share its quantized values.

        They may unless a cast of x rounds stochastically, with draws of each GEMM. Where it draws
        signs, one draw serves all, as it would for one fused weight.
        """
        casts = (self.fwd_x, self.wgrad_x)
        return all(cast is None or cast.rounding == "nearest" or cast.redrawn for cast in casts)

    @property
    def shares_scales(self) -> bool:
        """Whether weights that are multiplied with one x share a scale."""
        return any(cast.shared_scale for cast in self.casts)

    def map(self, change: Callable[[str, Cast], Cast | None]) -> "Recipe":
        """Returns the recipe with each cast replaced by change(name, cast), name such as "dgrad_g".

        Operands in high precision stay so.
        """
        changed: dict[str, Any] = {
            name: None if cast is None else change(name, cast)
            for name, cast in self.by_name().items()
        }
        return dataclasses.replace(self, **changed)

    def current(self) -> "Recipe":
        """Returns the recipe whose delayed casts take current scales: it has no histories."""
        return self.map(lambda _, cast: cast.current())

    def sharing_scales(self) -> "Recipe":
        """Returns the recipe whose casts of w and g that have one current scale share it."""

        def share(name: str, cast: Cast) -> Cast:
            alone = cast.tile == TENSOR and cast.timing == "current" and cast.hadamard == 1
            return dataclasses.replace(cast, shared_scale=alone and not name.endswith("_x"))

        return self.map(share)

    def with_forward(self, other: "Recipe") -> "Recipe":
        """Returns a recipe with this one's backward and the other's forward."""
        sums = self.accumulation._replace(fwd=other.accumulation.fwd)
        return dataclasses.replace(
            self, fwd_x=other.fwd_x, fwd_w=other.fwd_w, accumulation=sums, name="custom"
        )

    def with_accumulation(self, how: str, gemms: tuple[str, ...]) -> "Recipe":
        """Returns the recipe with that accumulation in those of the GEMMs that have the choice."""
        chosen = {name: how for name in gemms if self.gemms[name].sums_codes}
        return dataclasses.replace(self, accumulation=self.accumulation._replace(**chosen))
