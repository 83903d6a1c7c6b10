"""Which linears gain by a recipe at their size, predicted from a table measured on an H200.

A linear of K inputs and N outputs multiplies in proportion to M K N, M being the tokens of a device
and microbatch, and quantises in proportion to M K + K N + M N. So large ones gain, and small ones
lose: their casts and launches take longer than the matrix unit saves. Where the border lies, only a
clock says. `h200_gains.json` has times in microseconds of one linear alone: forward, gradients of
input and weight, and the quantisation of x and g from bfloat16 and of w from float32, by the
fastest backend, each beside BF16 in the same process (experiments/bench/size_gains.py measures it
anew).

Between the measured sizes the logarithm of a time is linear in the logarithms of M, K and N. Any
power law is met exactly, so both ends are: time in proportion to the work, and none but launches.
So is the gain t_bf16 / t, both times being of the same points. Beyond the table its edge counts,
which flatters what is smaller, and the print says so. A linear and its transpose do the same three
products with forward and input gradient exchanged: the table has K <= N only. It knows nothing of
neighbours (queries, keys and values share one quantised x) or of waiting for other devices.

A formula from the peak rates was rejected: it needs as many fitted constants as the table has
columns, and cannot know what a launch costs. Timing at the start of a run was rejected, too: its
numerics would hang on the noise of a clock.

By default nothing is changed, only printed: a config's bits must not depend on the device, and a
policy named fp8 must be fp8. `size_gate=True` leaves the losers in BF16; what compares precisions
refuses it (experiments/study/studies.py).
"""

import bisect
import dataclasses
import functools
import importlib.resources
import itertools
import json
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fp8jax.device import hardware
from fp8jax.lookup import lookup
from fp8jax.model.config import ModelConfig
from fp8jax.numerics.policy import Policy
from fp8jax.numerics.recipe import E5M2, HIGH_PRECISION, HISTORY, RECIPES, Cast, Recipe
from fp8jax.numerics.scaling import E8M0, SCALES, Fp32, Pow2

COLUMNS = ("recipe kind", "m", "k", "n", "bf16_us", "us")


KINDS = {  # kind -> the recipe that was measured
    "delayed": "fp8_delayed",
    "current": "fp8_current",
    "block": "fp8_block",
    "row": "fp8_rowwise",
}


_DEVICES = ("H100", "H200")  # the same chip, but for its memory


_CUTS_INPUTS = ("layers/attention/o", "layers/mlp/down")  # over `tensor` devices; others: outputs


Shape = tuple[int, int, int]


def kind(recipe: Recipe) -> str | None:
    """The key of `KINDS` that takes as long as this recipe, None where none was measured."""
    plain = recipe.map(_timed)
    return next((k for k, name in KINDS.items() if RECIPES[name].map(_timed) == plain), None)


def _timed(operand: str, cast: Cast) -> Cast:
    """The cast with one value for what takes no time: rules of float32 scales, which entries of a
    history count, and the FP8 format of gradients where products take either."""
    if isinstance(cast.scale, Fp32 | Pow2) or cast.scale == E8M0():
        cast = dataclasses.replace(cast, scale=SCALES["fp32"])
    if cast.delayed:
        cast = dataclasses.replace(cast, history=HISTORY, amax="max")
    if operand.endswith("_g") and cast.format.bits == 8 and cast.tile.contract is None:
        cast = dataclasses.replace(cast, format=E5M2)
    return cast


# The table ----------------------------------------------------------------------------------------


class Gain(NamedTuple):
    """Time in BF16 over time in the recipe, and whether the size lies beyond the table."""

    value: float
    beyond: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """Measured gains.

    Attributes:
      device: on which.
      gains: key of `KINDS` -> (M, K, N) with K <= N -> log2 of the gain.
    """

    device: str
    gains: Mapping[str, Mapping[Shape, float]]

    def __post_init__(self):
        for name, points in self.gains.items():
            lookup("kind of recipe", name, KINDS)
            rows, sides = _axes(points)
            if wrong := sorted(set(grid(rows, sides)) ^ points.keys()):
                raise ValueError(f"the gains of {name!r} are no full grid of M and K <= N: {wrong}")

    def gain(self, recipe: Recipe, shape: Shape) -> Gain | None:
        """That of a linear of so many (tokens, inputs, outputs); None where nothing is known."""
        name = kind(recipe)
        if name is None or name not in self.gains:
            return None
        points = self.gains[name]
        rows, sides = _axes(points)
        axes, log2 = (rows, sides, sides), 0.0
        for corner in itertools.product(*map(_around, shape, axes)):
            (m, k, n), shares = zip(*corner, strict=True)
            log2 += math.prod(shares) * points[m, min(k, n), max(k, n)]
        beyond = any(
            not known[0] <= size <= known[-1] for size, known in zip(shape, axes, strict=True)
        )
        return Gain(2.0**log2, beyond)


def grid(rows: Iterable[int], sides: Iterable[int]) -> list[Shape]:
    """Every (M, K, N) with M of `rows`, and K <= N of `sides`, which ascend."""
    pairs = itertools.combinations_with_replacement(sides, 2)
    return [(m, k, n) for m, (k, n) in itertools.product(rows, pairs)]


def _axes(points: Iterable[Shape]) -> tuple[list[int], list[int]]:
    """The measured M, and the measured K and N."""
    shapes = list(points)
    return sorted({m for m, _, _ in shapes}), sorted({side for p in shapes for side in p[1:]})


def _around(size: int, known: Sequence[int]) -> list[tuple[int, float]]:
    """The one or two measured sizes around `size`, or the edge, and their shares in it."""
    size = min(max(size, known[0]), known[-1])
    above = bisect.bisect_left(known, size)
    if known[above] == size:
        return [(size, 1.0)]
    low, high = known[above - 1], known[above]
    share = math.log(size / low) / math.log(high / low)
    return [(low, 1 - share), (high, share)]


def parse(text: str) -> Table:
    """The table of such a file as `h200_gains.json`.

    Raises:
      ValueError: other columns, an unknown kind, or one whose points are no full grid.
    """
    found = json.loads(text)
    if tuple(found["columns"]) != COLUMNS:
        raise ValueError(f"expected the columns {COLUMNS}, got {found['columns']}")
    gains: dict[str, dict[Shape, float]] = {}
    for name, m, k, n, bf16, us in found["rows"]:
        gains.setdefault(name, {})[m, k, n] = math.log2(bf16 / us)
    return Table(device=found["device"], gains=gains)


@functools.cache
def shipped() -> Table:
    """The table that is installed with the library."""
    return parse(
        importlib.resources.files("fp8jax.analysis").joinpath("h200_gains.json").read_text("utf-8")
    )


# The gate -----------------------------------------------------------------------------------------


class Gated(NamedTuple):
    """What a stage trains, and for people what the table says of it, "" if nothing is quantised."""

    policy: Policy
    report: str


def size_gate(
    policy: Policy,
    config: ModelConfig,
    *,
    tokens: int,
    tensor: int,
    backend: str | None,
    leave: bool,
    table: Table | None = None,
) -> Gated:
    """The policy, with the linears that are predicted to gain less than 1 in BF16 if `leave`.

    Args:
      policy: of one stage; recipes that the table does not have are left alone.
      config: shapes of the model.
      tokens: of a device and microbatch.
      tensor: devices that share heads and hidden units.
      backend: the run's; the table has the fastest, which is None.
      leave: whether losers stay in BF16, or are only named.
      table: None for the one that is shipped.

    Raises:
      ValueError: `leave` on a device that the table is not of, or with an empty table.
    """
    table = shipped() if table is None else table
    if leave:
        _require(table)
    rows, losers = [], []
    for path, (k, n) in config.linears.items():
        recipe = policy.recipe(path)
        if not recipe.casts:
            continue
        k, n = (k // tensor, n) if path in _CUTS_INPUTS else (k, n // tensor)
        gain = table.gain(recipe, (tokens, k, n)) if backend is None else None
        rows.append((path, recipe.name, f"{tokens} x {k} x {n}", _said(gain)))
        if gain is not None and gain.value < 1:
            losers.append(path)
    if not rows:
        return Gated(policy, "")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"Gains over BF16, policy {policy.name}, of a linear alone on {table.device}:"]
    lines += ["  ".join(("", *map(str.ljust, row, widths))).rstrip() for row in rows]
    named, verdict = ", ".join(losers) or "none", ""
    if leave:
        verdict = f"Left in BF16: {named}."
        rules = (*((path, HIGH_PRECISION) for path in losers), *policy.rules)
        policy = dataclasses.replace(policy, rules=rules, name=f"{policy.name} (gated)")
    elif losers:
        verdict = f"Slower than BF16: {named}. --config.size_gate=True leaves them in BF16."
    return Gated(policy, "\n".join([*lines, *textwrap.wrap(verdict, 100)]))


def _said(gain: Gain | None) -> str:
    if gain is None:
        return "not in the table"
    return f"{gain.value:.3f}x" + (", beyond the table: its edge" if gain.beyond else "")


def is_measured_here() -> bool:
    """Whether this process runs on the chip that the shipped table is of."""
    return any(name in hardware.device().kind for name in _DEVICES)


def _require(table: Table) -> None:
    """Raises ValueError where the table cannot decide for this device."""
    here = hardware.device().kind
    if not is_measured_here():
        raise ValueError(
            f"size_gate=True decides by times of {table.device}, and this is {here}: they say"
            " nothing of it"
        )
    if not table.gains:
        raise ValueError("size_gate=True: the table h200_gains.json is empty, nothing was measured")
