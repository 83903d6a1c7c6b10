"""Graphcore's figures: the scaling bias of each tensor, in training and in inference (2309.17224).

The bias b of a tensor is the largest integer with which amax * 2^b fits its format. A constant
scale has to serve all of them, so what matters is how far they spread over layers, linears and
steps.
"""

import collections
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from fp8jax.lm.figures.grids import OPERANDS, Grid, grids, linears_of, own_rows, short
from fp8jax.lm.figures.run_files import RunFiles
from fp8jax.lm.figures.style import NothingToDraw, Style, panels, style
from fp8jax.telemetry.rows import Row, Table

_SPREAD = 0.6  # of the lines at one integer, so that layers of equal bias are told apart
_LEAST_SPAN = 6.0  # binades of an axis
_LABEL = "scaling bias, log2"


def scaling_bias(run: RunFiles, *, dark: bool = False) -> Any:
    """Returns Graphcore's figure of training: the bias of each weight, activation and gradient.

    One row of panels for each linear, one column for each operand, one line for each layer over the
    steps. Biases are integers. Layers with the same bias are drawn beside each other, the first
    layer lowest, within 0.3 of the integer.

    Args:
      run: a run with telemetry.
      dark: whether to draw for dark pages.

    Returns:
      A `matplotlib.figure.Figure`.

    Raises:
      NothingToDraw: the run has no telemetry.
      ImportError: matplotlib is not installed.

    Example:
      >>> layer = nn.Sequential([fp8jax.nn.Dense(4, "fp8_current"), nn.relu])
      >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 8)))
      >>> loss = lambda variables, x: layer.apply(variables, x).mean()
      >>> table = fp8jax.telemetry.measure(loss, variables, jnp.ones((2, 8)))
      >>> run = fp8jax.figures.RunFiles(path=Path("runs/a"), name="a", telemetry=table)
      >>> figure = fp8jax.figures.scaling_bias(run)
      >>> len(figure.axes)  # x, w and g of one linear, and the colors of the layers
      4
    """
    rows = own_rows(run)
    found = grids(rows, lambda row: row.bias, worse=min)
    linears = linears_of(rows)
    columns = [name for name in OPERANDS if any(row.operand == name for row in rows)]
    with style(dark=dark) as look:
        figure, axes = panels(
            len(linears), len(columns), height=0.9 + 0.95 * len(linears), sharex=True, sharey="col"
        )
        layers = max((grid.layers for grid in found.values()), key=len)
        shades = look.shades(len(layers))
        for i, linear in enumerate(linears):
            for axis, operand in zip(axes[i], columns, strict=True):
                if (linear, operand) in found:
                    _draw_layers(axis, found[linear, operand], shades, look)
                else:
                    axis.set_visible(False)
            axes[i][0].set_ylabel(short(linear))
        for axis, operand in zip(axes[0], columns, strict=True):
            axis.set_title(f"{OPERANDS[operand]}, {_formats(rows, operand)}")
        for axis, operand in zip(axes[-1], columns, strict=True):
            axis.set_xlabel("step")
            axis.set_ylim(*_limits([grid for key, grid in found.items() if key[1] == operand]))
        figure.supylabel(_LABEL)
        _layer_key(figure, axes, layers, shades)
        figure.suptitle(f"{run.name}: scaling bias of each tensor", x=0.01, ha="left")
    return figure


def _limits(shown: Sequence[Grid]) -> tuple[float, float]:
    """The limits of a column: some integers wide, so that offsets do not look like differences."""
    values = np.concatenate([grid.values.ravel() for grid in shown])
    values = values[~np.isnan(values)]
    if not len(values):
        return -_LEAST_SPAN / 2, _LEAST_SPAN / 2
    low, high = values.min() - 0.5, values.max() + 0.5
    more = max(0.0, _LEAST_SPAN - (high - low)) / 2
    return low - more, high + more


def _draw_layers(axis: Any, grid: Grid, shades: Any, look: Style) -> None:
    count = len(grid.layers)
    outside = count == 1 and grid.layers[0] < 0
    marker = "o" if len(grid.steps) < 3 else ""  # lines of one point would not show
    for i, values in enumerate(grid.values):
        offset = _SPREAD * (i / (count - 1) - 0.5) if count > 1 else 0.0
        color = look.text if outside else shades(i)
        axis.plot(grid.steps, values + offset, color=color, marker=marker, linewidth=0.9)
    axis.yaxis.get_major_locator().set_params(integer=True)
    axis.grid(axis="y", color=look.muted, linewidth=0.3, alpha=0.5)


def _formats(rows: Sequence[Row], operand: str) -> str:
    """The formats that the biases of an operand refer to, in words."""
    names = {row.format for row in rows if row.operand == operand}
    if names == {None}:
        return "of E5M2" if operand == "g" else "of E4M3"
    return ", ".join(sorted(name.upper() for name in names if name is not None))


def _layer_key(figure: Any, axes: Any, layers: Sequence[int], shades: Any) -> None:
    """Draws the colors of the layers."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm

    edges = np.arange(len(layers) + 1) - 0.5
    key = ScalarMappable(norm=BoundaryNorm(edges, len(layers)), cmap=shades)
    bar = figure.colorbar(key, ax=axes, label="layer", aspect=25, pad=0.01, shrink=0.4)
    shown = range(0, len(layers), 1 + (len(layers) - 1) // 12)
    bar.set_ticks(list(shown), labels=[str(layers[i]) for i in shown])
    bar.outline.set_visible(False)


def scaling_bias_by_linear(rows: Table | Sequence[Row], *, dark: bool = False) -> Any:
    """Returns Graphcore's figure of inference: how the biases of each linear type are distributed.

    For each type of linear and each operand, the area of a mark at an integer says how many of its
    tensors have this bias; the bar is their median.

    Args:
      rows: such as those of a file that `experiments.evaluate --telemetry` wrote,
        `fp8jax.telemetry.read(PATH)`. Rows of several layers and steps count as tensors each.
      dark: whether to draw for dark pages.

    Returns:
      A `matplotlib.figure.Figure`.

    Raises:
      NothingToDraw: no row has a bias.
      ImportError: matplotlib is not installed.

    Example:
      >>> layer = nn.Sequential([fp8jax.nn.Dense(4, "fp8_current"), nn.relu])
      >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 8)))
      >>> loss = lambda variables, x: layer.apply(variables, x).mean()
      >>> table = fp8jax.telemetry.measure(loss, variables, jnp.ones((2, 8)))
      >>> figure = fp8jax.figures.scaling_bias_by_linear(table)
      >>> figure.axes[-1].get_xlabel()
      'linear'
    """
    kept = [
        row
        for row in (rows.rows if isinstance(rows, Table) else rows)
        if row.operand in OPERANDS and row.bias is not None and not row.what_if
    ]
    if not kept:
        raise NothingToDraw("no row of telemetry has a scaling bias")
    # A recipe may cast an operand more than once: the first cast stands for the tensor.
    tensors = {(row.step, row.layer, row.linear, row.operand): row for row in reversed(kept)}
    linears = linears_of(kept)
    operands = [name for name in OPERANDS if any(row.operand == name for row in kept)]
    found: dict[tuple[str, str], list[int]] = {}
    for row in tensors.values():
        if row.bias is not None:
            found.setdefault((row.linear, row.operand), []).append(row.bias)
    with style(dark=dark) as look:
        figure, ((axis,),) = panels(1, 1, height=2.8)
        for index, operand in enumerate(operands):
            dodge = 0.26 * (index - (len(operands) - 1) / 2)
            keys = [(linear, operand) for linear in linears]
            biases = [found[key] if key in found else [] for key in keys]
            label = f"{OPERANDS[operand]}, {_formats(kept, operand)}"
            _draw_counts(axis, biases, dodge, look, index, label)
        axis.set_xticks(range(len(linears)), [short(name).replace(" ", "\n") for name in linears])
        axis.yaxis.get_major_locator().set_params(integer=True)
        axis.grid(axis="y", color=look.muted, linewidth=0.3, alpha=0.5)
        axis.set_xlabel("linear")
        axis.set_ylabel(_LABEL)
        axis.set_title("Scaling biases by linear; the area of a mark is the number of tensors")
        axis.margins(y=0.12)
        figure.legend(loc="outside lower center", ncols=3)
    return figure


def _draw_counts(
    axis: Any, biases: Sequence[Sequence[int]], dodge: float, look: Style, index: int, label: str
) -> None:
    """Draws the distribution of one operand in each linear, beside x = 0, 1, ..."""
    line = look.line(index)
    places, heights, areas = [], [], []
    for x, values in enumerate(biases):
        for bias, count in sorted(collections.Counter(values).items()):
            places.append(x + dodge)
            heights.append(bias)
            areas.append(count)
        if values:
            middle = statistics.median(values)
            axis.plot([x + dodge - 0.1, x + dodge + 0.1], [middle] * 2, color=look.text, lw=1.0)
    scale = 90 / max(map(len, biases))
    axis.scatter(
        places,
        heights,
        s=[max(6.0, scale * count) for count in areas],
        color=line["color"],
        marker=line["marker"],
        alpha=0.75,
        linewidths=0,
    )
    axis.scatter([], [], s=20, color=line["color"], marker=line["marker"], label=label)
