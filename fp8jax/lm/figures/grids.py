"""Telemetry as arrays: for each linear and operand, one number for each layer and sampled step."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from fp8jax.lm.figures.run_files import RunFiles
from fp8jax.lm.figures.style import NothingToDraw
from fp8jax.telemetry.rows import NO_LAYER, Row

OPERANDS = {"w": "weights", "x": "activations", "g": "gradients"}  # the order of the papers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """The numbers of one operand of one linear.

    Attributes:
      layers, steps: ascending.
      values: [layers, steps]; NaN where there is none.
    """

    layers: tuple[int, ...]
    steps: tuple[int, ...]
    values: np.ndarray


def own_rows(run: RunFiles) -> list[Row]:
    """Returns the telemetry of the casts of x, w and g that computed the run.

    Raises NothingToDraw if there is none.
    """
    rows = [] if run.telemetry is None else run.telemetry.rows
    found = [row for row in rows if not row.what_if and row.operand in OPERANDS]
    if not found:
        raise NothingToDraw(
            f"{run.name} has no telemetry: train with --config.telemetry.every=50, for instance"
        )
    return found


def grids(
    rows: Sequence[Row],
    value: Callable[[Row], float | None],
    worse: Callable[[float, float], float] = max,
) -> dict[tuple[str, str], Grid]:
    """Returns (linear, operand) -> its numbers, in the order in which a step computes the linears.

    Args:
      value: of a row; None for none.
      worse: of two numbers of one operand, if a recipe casts it more than once.

    All grids have the same layers and steps, except those of linears outside the stack of layers,
    which have one layer.
    """
    steps = sorted({row.step for row in rows})
    stacked = sorted({row.layer for row in rows if row.layer != NO_LAYER})
    found: dict[tuple[str, str], Grid] = {}
    for row in rows:
        key = row.linear, row.operand
        if key not in found:
            layers = (NO_LAYER,) if row.layer == NO_LAYER else tuple(stacked)
            shape = len(layers), len(steps)
            found[key] = Grid(layers=layers, steps=tuple(steps), values=np.full(shape, np.nan))
        number = value(row)
        if number is None:
            continue
        grid = found[key]
        place = grid.layers.index(row.layer), steps.index(row.step)
        old = grid.values[place]
        grid.values[place] = number if math.isnan(old) else worse(old, number)
    return found


def linears_of(rows: Iterable[Row]) -> list[str]:
    """Returns the paths of linears, in the order of the rows."""
    return list(dict.fromkeys(row.linear for row in rows))


def short(linear: str) -> str:
    """layers/mlp/down -> mlp down"""
    return linear.removeprefix("layers/").replace("/", " ")
