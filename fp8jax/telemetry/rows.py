"""One row of telemetry: what one cast did to one operand of one linear, in plain numbers.

`rows_of` derives them, on the host, from the maxima and sums that a program returned
(gemm/probe.py). A `Table` holds the rows of one or more steps.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from fp8jax.gemm.probe import COUNTS, PEAKS, Probe, row_names
from fp8jax.numerics.formats import FORMATS, Format
from fp8jax.numerics.recipe import Recipe
from fp8jax.text_table import aligned

NO_LAYER = -1  # of linears outside the stack of layers, and of models without one
HIDDEN_CAST = ""  # the cast of a row that only has an amax: the output of SwiGLU


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What one cast did in one step. None where a number does not exist, as in high precision.

    Attributes:
      step: of the run, counted from 1; 0 outside of training.
      layer: index of the layer, from 0; -1 for linears outside a stack of layers.
      linear: path of the module, such as "layers/mlp/down".
      operand: "x", "w" or "g"; "hidden" for the output of the MLP's activation (SwiGLU's, say).
      cast: a field of `Recipe`: "fwd_x", "dgrad_g" and so on. Only a "hidden" row has none: "".
      what_if: whether the cast is that of the what-if recipe, which did not compute the step.
      recipe: its name.
      format: a key of `FORMATS`, None for high precision.
      elements, nonzero: of the operand, over all microbatches and devices.
      amax: max|operand|, before any Hadamard transform.
      scale: the largest of the scales, x ≈ codes * scale, of tiles that hold a nonzero element.
      smallest_scale: the smallest of them.
      bias: Graphcore's scaling bias (arXiv 2309.17224), the largest integer b with which amax * 2^b
        still fits the format: floor(log2(max / amax)), their FP8-AMAX without a margin. Of the
        whole tensor, whatever the tiles; 0 for an amax of 0. In high precision, that of their
        formats: E4M3 for x and w, E5M2 for g.
      underflow: share of the nonzero elements whose code is zero.
      saturation: share of all elements that lie beyond the format's maximum after scaling, by more
        than the rounding of the scale, and were clipped.
      sqnr_db: 10 log10(sum of x^2 / sum of (x - codes * scale)^2); inf without any error.
      delay: log2(delayed scale / scale of the current amax), for delayed casts. Below zero values
        may saturate; above it the lower end of the format is lost.

    Example:
      >>> layer, x = fp8jax.nn.Dense(4, "fp8_current"), jnp.ones((2, 8))
      >>> loss = lambda variables: layer.apply(variables, x).mean()
      >>> table = fp8jax.telemetry.measure(loss, layer.init(jax.random.key(0), x))
      >>> row = table.rows[0]
      >>> row.operand, row.cast, row.format, row.elements, row.amax, row.bias, row.underflow
      ('x', 'fwd_x', 'e4m3', 16, 1.0, 8, 0.0)
    """

    step: int
    layer: int
    linear: str
    operand: str
    cast: str
    what_if: bool
    recipe: str
    format: str | None
    elements: int
    nonzero: int
    amax: float
    scale: float | None
    smallest_scale: float | None
    bias: int | None
    underflow: float | None
    saturation: float | None
    sqnr_db: float | None
    delay: float | None


FIELDS = tuple(field.name for field in dataclasses.fields(Row))


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of telemetry; `pandas.DataFrame(table.columns())` is a data frame of them.

    Attributes:
      rows: in the order of steps, layers and linears.

    Example:
      >>> layer, x = fp8jax.nn.Dense(4, "fp8_current"), jnp.ones((2, 8))
      >>> loss = lambda variables: layer.apply(variables, x).mean()
      >>> table = fp8jax.telemetry.measure(loss, layer.init(jax.random.key(0), x))
      >>> table.columns()["cast"]
      ['fwd_x', 'fwd_w', 'dgrad_g', 'dgrad_w', 'wgrad_x', 'wgrad_g']
      >>> [row.format for row in table.where(lambda row: row.operand == "g").rows]
      ['e5m2', 'e5m2']
    """

    rows: tuple[Row, ...]

    def columns(self) -> dict[str, list[Any]]:
        """Returns the values of each field of `Row`, field -> list."""
        return {name: [getattr(row, name) for row in self.rows] for name in FIELDS}

    def where(self, keep: Callable[[Row], bool]) -> "Table":
        """Returns the rows for which `keep` is true."""
        return Table(tuple(row for row in self.rows if keep(row)))

    def __str__(self) -> str:
        """A text table for people: one line a row, without the what-if rows' repetition."""
        cells: list[tuple[str, ...]] = [("layer", "linear", "cast", "recipe", "format", *_SHOWN)]
        for row in self.rows:
            layer = "" if row.layer == NO_LAYER else str(row.layer)
            recipe = f"what if {row.recipe}" if row.what_if else row.recipe
            shown = [_text(getattr(row, name)) for name in _SHOWN]
            cast = row.cast or row.operand
            cells.append((layer, row.linear, cast, recipe, row.format or "", *shown))
        return "\n".join(aligned(cells, right={0, *range(5, 5 + len(_SHOWN))}))


_SHOWN = ("amax", "scale", "bias", "underflow", "saturation", "sqnr_db", "delay")


def _text(value: float | int | None) -> str:
    return "" if value is None else f"{value:.4g}"


def rows_of(
    statistics: Probe, linear: str, recipes: Sequence[Recipe], *, step: int, layers: Sequence[int]
) -> list[Row]:
    """Returns the rows of one linear in each of its layers.

    Args:
      statistics: NumPy arrays with one leading axis of layers.
      recipes: those that ran, one for each layer.
      layers: their indices.

    Casts that no GEMM made, in a branch that was not taken or in a forward pass, have no row.
    """
    found = []
    names = row_names(statistics.what_if)
    for i, (layer, recipe) in enumerate(zip(layers, recipes, strict=True)):
        for j, full_name in enumerate(names):
            prefix, _, name = full_name.rpartition(".")
            one = statistics.what_if if prefix else recipe
            assert one is not None  # row_names has no what-if rows without a recipe
            numbers = _numbers(statistics.peaks[i, j], statistics.sums[i, j], one, name)
            if numbers:
                found.append(
                    Row(
                        step=step,
                        layer=layer,
                        linear=linear,
                        operand=name[-1],
                        cast=name,
                        what_if=bool(prefix),
                        recipe=one.name,
                        **numbers,
                    )
                )
    return found


def hidden_row(amax: float, linear: str, *, step: int, layer: int, recipe: str) -> Row:
    """Returns the row of the output of an MLP's activation, of which only the amax is known."""
    nothing: dict[str, Any] = dict.fromkeys(FIELDS)
    return Row(
        **nothing
        | dict(
            step=step,
            layer=layer,
            linear=linear,
            operand="hidden",
            cast=HIDDEN_CAST,
            what_if=False,
            recipe=recipe,
            elements=0,
            nonzero=0,
            amax=amax,
        )
    )


def _numbers(peaks: np.ndarray, sums: np.ndarray, recipe: Recipe, name: str) -> dict[str, Any]:
    """Returns the fields of a row that are measured; {} if nothing was."""
    counts = dict(zip(COUNTS, _counts(sums), strict=True))
    if not counts["elements"]:
        return {}
    signal, noise = map(float, sums[2 * len(COUNTS) :])
    peak = dict(zip(PEAKS, map(float, peaks), strict=True))
    cast = recipe.by_name()[name]
    numbers: dict[str, Any] = dict.fromkeys(
        ("format", "scale", "smallest_scale", "underflow", "saturation", "sqnr_db", "delay")
    )
    numbers |= {
        "elements": counts["elements"],
        "nonzero": counts["nonzero"],
        "amax": peak["amax"],
        "bias": scaling_bias(peak["amax"], graphcore_format(name) if cast is None else cast.format),
    }
    if cast is None:
        return numbers
    numbers |= {
        "format": cast.format.name,
        "scale": peak["scale"] or None,
        "smallest_scale": _inverse(peak["inverse_scale"]),
        "underflow": counts["underflow"] / max(counts["nonzero"], 1),
        "saturation": counts["saturated"] / counts["elements"],
        "sqnr_db": _decibels(signal, noise),
    }
    if cast.delayed:
        numbers["delay"] = _log2_ratio(peak["scale"], peak["current_scale"])
    return numbers


def _counts(sums: np.ndarray) -> Iterable[int]:
    for high, low in sums[: 2 * len(COUNTS)].reshape(-1, 2):
        yield int(high) * 4096 + int(low)


def _inverse(x: float) -> float | None:
    """1 / x as float32 has it, back from the reciprocal of a scale; NaN stays NaN."""
    return float(np.float32(1) / np.float32(x)) if x else None


def _decibels(signal: float, noise: float) -> float | None:
    """The ratio in decibels; None of a tensor of zeros."""
    if signal == 0 and noise == 0:
        return None
    if math.isnan(signal) or math.isnan(noise) or signal == 0:
        return math.nan
    return math.inf if noise == 0 else 10 * math.log10(signal / noise)


def _log2_ratio(a: float, b: float) -> float:
    return math.log2(a / b) if 0 < a < math.inf and 0 < b < math.inf else math.nan


def graphcore_format(cast: str) -> Format:
    """The format in which Graphcore's recipes hold the operand of a cast such as "dgrad_g"."""
    return FORMATS["e5m2" if cast.endswith("g") else "e4m3"]


def scaling_bias(amax: float, fmt: Format) -> int | None:
    """Returns Graphcore's scaling bias, see `Row`; None for an amax that is not finite."""
    if not math.isfinite(amax):
        return None
    return math.frexp(fmt.max / amax)[1] - 1 if amax else 0


def forward_only(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows of a forward pass: without those of the casts that only a gradient makes."""
    return [row for row in rows if row.cast in ("fwd_x", "fwd_w", "")]
