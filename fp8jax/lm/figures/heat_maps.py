"""Heat maps of what casts lose, by linear and operand, over layers and steps."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fp8jax.lm.figures.grids import OPERANDS, Grid, grids, linears_of, own_rows, short
from fp8jax.lm.figures.run_files import RunFiles
from fp8jax.lm.figures.style import NothingToDraw, Style, panels, style
from fp8jax.telemetry.rows import Row

_LEAST = 1e-3  # percent: less than that, and zero, has the color of the background


def underflow(run: RunFiles, *, dark: bool = False) -> Any:
    """Returns heat maps of the share of nonzero elements that a cast turns into zero, in percent.

    One panel for each linear and operand, layers over steps; the worst cast where a recipe casts an
    operand more than once. Blank below 0.001%, hatched where nothing is cast. Colors span the
    decades of this run's shares, so that they differ: compare two runs by the numbers at the bar.

    Args:
      run: a run with telemetry.
      dark: whether to draw for dark pages.

    Returns:
      A `matplotlib.figure.Figure`.

    Raises:
      NothingToDraw: the run has no telemetry, or casts nothing.
      ImportError: matplotlib is not installed.

    Example:
      >>> layer = nn.Sequential([fp8jax.nn.Dense(4, "fp8_current"), nn.relu])
      >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 8)))
      >>> loss = lambda variables, x: layer.apply(variables, x).mean()
      >>> table = fp8jax.telemetry.measure(loss, variables, jnp.ones((2, 8)))
      >>> run = fp8jax.figures.RunFiles(path=Path("runs/a"), name="a", telemetry=table)
      >>> figure = fp8jax.figures.underflow(run)
      >>> figure.axes[0].get_xlabel()
      'step'
    """
    return _heat_maps(run, "underflow", "underflow, % of nonzero elements", dark)


def saturation(run: RunFiles, *, dark: bool = False) -> Any:
    """Returns heat maps of the share of elements that a cast clips, in percent; as `underflow`.

    Args:
      run: a run with telemetry.
      dark: whether to draw for dark pages.

    Returns:
      A `matplotlib.figure.Figure`.

    Raises:
      NothingToDraw: the run has no telemetry, or casts nothing.
      ImportError: matplotlib is not installed.

    Example:
      >>> layer = nn.Sequential([fp8jax.nn.Dense(4, "fp8_current"), nn.relu])
      >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 8)))
      >>> loss = lambda variables, x: layer.apply(variables, x).mean()
      >>> table = fp8jax.telemetry.measure(loss, variables, jnp.ones((2, 8)))
      >>> run = fp8jax.figures.RunFiles(path=Path("runs/a"), name="a", telemetry=table)
      >>> figure = fp8jax.figures.saturation(run)
      >>> figure.axes[0].get_xlabel()
      'step'
    """
    return _heat_maps(run, "saturation", "saturation, % of elements", dark)


def _heat_maps(run: RunFiles, field: str, label: str, dark: bool) -> Any:
    from matplotlib.colors import LogNorm

    rows = own_rows(run)
    found = grids(rows, lambda row: _percent(getattr(row, field)))
    if all(np.isnan(grid.values).all() for grid in found.values()):
        raise NothingToDraw(f"{run.name} casts nothing to FP8 or FP4: it has no {field}")
    linears = linears_of(rows)
    columns = [name for name in OPERANDS if any(key[1] == name for key in found)]
    with style(dark=dark) as look:
        figure, axes = panels(
            len(linears), len(columns), height=0.9 + _panel_height(rows) * len(linears), sharex=True
        )
        norm = LogNorm(*_decades(found.values()))
        for i, linear in enumerate(linears):
            for axis, operand in zip(axes[i], columns, strict=True):
                if (linear, operand) in found:
                    image = _draw(axis, found[linear, operand], norm, look)
                else:
                    axis.set_visible(False)
            axes[i][0].set_ylabel(short(linear).replace(" ", "\n"))
            for axis in axes[i][1:]:
                axis.tick_params(labelleft=False)
        for axis, operand in zip(axes[0], columns, strict=True):
            axis.set_title(OPERANDS[operand])
        for axis in axes[-1]:
            axis.set_xlabel("step")
        figure.supylabel("layer")
        bar = figure.colorbar(image, ax=axes, label=label, aspect=30, pad=0.01, shrink=0.7)
        bar.ax.yaxis.set_major_formatter("{x:g}")
        bar.outline.set_visible(False)
        title = f"{run.name}: {field} of each cast; blank: below {_LEAST:g}%"
        figure.suptitle(title, x=0.01, ha="left")
    return figure


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _decades(found: Iterable[Grid]) -> tuple[float, float]:
    """Powers of ten around all shares that are shown, in percent."""
    shares = np.concatenate([grid.values.ravel() for grid in found])
    shown = shares[shares >= _LEAST]  # neither nan
    if not len(shown):
        return _LEAST, 100.0
    low = math.floor(math.log10(shown.min()))
    high = math.ceil(math.log10(shown.max()))
    return 10.0**low, 10.0 ** max(high, low + 1)


def _panel_height(rows: Sequence[Row]) -> float:
    """Inches: enough that layers can be told apart, on one page."""
    layers = len({row.layer for row in rows})
    return min(1.4, max(0.7, 0.08 * layers))


def _draw(axis: Any, grid: Grid, norm: Any, look: Style) -> Any:
    """Draws one panel. Each cell is centered on its step; a hatch shows through where none is."""
    count = len(grid.layers)
    axis.patch.set_hatch("////")
    values = np.ma.masked_invalid(np.maximum(grid.values, _LEAST / 2))  # a logarithm of zero
    image = axis.pcolormesh(
        _edges(grid.steps),
        np.arange(count + 1) - 0.5,
        values,
        norm=norm,
        cmap=look.heat(),
        rasterized=True,
    )
    shown = range(0, count, 1 + (count - 1) // 6)
    axis.set_yticks(
        list(shown), ["–" if grid.layers[i] < 0 else str(grid.layers[i]) for i in shown]
    )
    return image


def _edges(steps: Sequence[int]) -> np.ndarray:
    """Returns the borders of cells around the steps, [len(steps) + 1]."""
    centers = np.asarray(steps, float)
    if len(centers) == 1:
        return centers[0] + np.array([-0.5, 0.5])
    middles = (centers[1:] + centers[:-1]) / 2
    return np.concatenate([[2 * centers[0] - middles[0]], middles, [2 * centers[-1] - middles[-1]]])
