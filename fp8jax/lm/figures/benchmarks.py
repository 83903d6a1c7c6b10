"""Figures of benchmarks, from the tables that `experiments.bench --output` writes as JSON."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fp8jax.lm.figures.style import NothingToDraw, Style, panels, style

Benchmark = str | os.PathLike[str] | Mapping[str, Any]  # NAME_tables.json, or what it holds

_WHOLE = "optimizer"  # the contestant whose time is a part of the others'
_WITHOUT = ", no optimizer"
_PARTS = ("matmuls", "attention", _WHOLE)
_LABELS = {
    "matmuls": "matmuls, at the device's measured rate",
    "attention": "attention, as measured alone",
    _WHOLE: "optimizer, as measured alone",
}
_REST = "the rest: casts, norms, matmuls below that rate"
_ROOFS = {"bf16": "-", "fp8": "--"}
_HATCHES = ("", "//", "xx", "--")


def step_breakdown(
    benchmark: Benchmark, *, sections: Sequence[str] = (), dark: bool = False
) -> Any:
    """Returns what a training step's time goes to, one panel for each shape, in milliseconds.

    Matmuls are shown with the time that they would take at the measured rate of plain matmuls in
    their precision, attention with its own measured time, and all else is the rest.

    Args:
      benchmark: the path of NAME_tables.json, or what it holds.
      sections: those to draw; by default all that have such rows.
      dark: whether to draw for dark pages.

    Returns:
      A `matplotlib.figure.Figure`.

    Raises:
      NothingToDraw: no row has parts: a benchmark of steps writes them.
      KeyError: an unknown section.
      ImportError: matplotlib is not installed.

    Example:
      >>> row = {
      ...     "case": "d1024", "name": "bf16", "seconds": 3e-3, "limit": 2e-3, "baseline": None,
      ...     "parts": {"matmuls": 1.5e-3, "attention": 0.5e-3}, "note": "",
      ... }
      >>> figure = fp8jax.figures.step_breakdown({"step": {"rows": [row]}})
      >>> figure.axes[0].get_xlabel()
      'time of a step, ms'
    """
    cases: dict[str, dict[str, _Step]] = {}
    for section, table in _tables(benchmark, sections).items():
        for case, rows in _cases(table).items():
            cases[f"{case}, section {section}" if case in cases else case] = rows
    if not cases:
        raise NothingToDraw("no step was measured: python -m experiments.bench step --output=DIR")
    with style(dark=dark) as look:
        heights = [0.6 + 0.26 * len(rows) for rows in cases.values()]
        figure, axes = panels(
            len(cases), 1, height=0.6 + sum(heights), gridspec_kw={"height_ratios": heights}
        )
        for axis, (case, rows) in zip(axes[:, 0], cases.items(), strict=True):
            _draw_steps(axis, rows, look)
            axis.set_title(case)
            axis.set_xlabel("time of a step, ms")
        entries: dict[str, Any] = {}
        for axis in axes[:, 0]:
            handles, labels = axis.get_legend_handles_labels()
            entries |= dict(zip(labels, handles, strict=True))
        figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=2)
    return figure


def _tables(benchmark: Benchmark, sections: Sequence[str] = ()) -> Mapping[str, Any]:
    if isinstance(benchmark, Mapping):
        found = benchmark
    else:
        found = json.loads(Path(benchmark).read_text(encoding="utf-8"))
    return {name: found[name] for name in sections} if sections else found


class _Step(NamedTuple):
    """A step in milliseconds: all of it, and by part, with the rest."""

    whole: float
    parts: dict[str, float]


def _cases(table: Mapping[str, Any]) -> dict[str, dict[str, _Step]]:
    """Returns case -> contestant -> its step, of a table."""
    cases: dict[str, dict[str, _Step]] = {}
    timed = [row for row in table["rows"] if row["seconds"] is not None]
    for row in timed:
        if not row["parts"]:
            continue
        parts = dict(row["parts"])
        whole = [r["seconds"] for r in timed if (r["case"], r["name"]) == (row["case"], _WHOLE)]
        if whole and row["name"].endswith(_WITHOUT):
            continue
        if whole:
            parts[_WHOLE] = whole[0]
        parts[_REST] = max(0.0, row["seconds"] - sum(parts.values()))
        found = {name: 1e3 * seconds for name, seconds in parts.items()}
        cases.setdefault(row["case"], {})[row["name"]] = _Step(1e3 * row["seconds"], found)
    return cases


def _draw_steps(axis: Any, rows: Mapping[str, _Step], look: Style) -> None:
    for y, (whole, parts) in enumerate(rows.values()):
        left = 0.0
        for i, name in enumerate((*_PARTS, _REST)):
            if name in parts:
                axis.barh(
                    y,
                    parts[name],
                    0.7,
                    left=left,
                    color=look.colors[i],
                    hatch=_HATCHES[i],
                    edgecolor=look.background,
                    linewidth=0,
                    label=_LABELS[name] if name in _LABELS else name,
                )
                left += parts[name]
        axis.text(left, y, f" {whole:.4g}", va="center", fontsize=7)
    axis.set_yticks(range(len(rows)), list(rows))
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.margins(x=0.08)


def roofline(benchmark: Benchmark, *, sections: Sequence[str] = (), dark: bool = False) -> Any:
    """Returns the roofline of a device with the measured GEMMs under it.

    FLOP/s over the FLOPs for each byte of operands and results, both logarithmic. The roofs are the
    measured rates of plain matmuls in BF16 and in FP8, and of a device copy.

    Args:
      benchmark: the path of NAME_tables.json, or what it holds.
      sections: those to draw, by default all that have such rows. The roofs are those of the first.
      dark: whether to draw for dark pages.

    Returns:
      A `matplotlib.figure.Figure`.

    Raises:
      NothingToDraw: no row has FLOPs and bytes, or no limits were measured: a benchmark of GEMMs
        writes them.
      KeyError: an unknown section.
      ImportError: matplotlib is not installed.

    Example:
      >>> limits = {"bf16": 8e14, "fp8": 1.5e15, "copy": 4e12}
      >>> row = {
      ...     "case": "8k", "name": "JAX bf16", "seconds": 1e-3, "work": 7e11, "moved": 4e8,
      ...     "note": "",
      ... }
      >>> figure = fp8jax.figures.roofline({"gemm": {"limits": limits, "rows": [row]}})
      >>> figure.axes[0].get_xscale()
      'log'
    """
    tables = [
        table
        for table in _tables(benchmark, sections).values()
        if table["limits"] and any(_point(row) for row in table["rows"])
    ]
    if not tables:
        raise NothingToDraw("no GEMM was measured: python -m experiments.bench gemm --output=DIR")
    series: dict[str, list[tuple[float, float]]] = {}
    for table in tables:
        for row in table["rows"]:
            if point := _point(row):
                series.setdefault(row["name"], []).append(point)
    with style(dark=dark) as look:
        figure, ((axis,),) = panels(1, 1, height=3.6)
        _draw_roofs(axis, tables[0]["limits"], [x for xs in series.values() for x, _ in xs], look)
        for i, (name, points) in enumerate(series.items()):
            line = look.line(i) | {"linestyle": "", "label": name}
            axis.plot(*zip(*points, strict=True), **line)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_xlabel("arithmetic intensity, FLOP/byte")
        axis.set_ylabel("TFLOP/s")
        figure.legend(loc="outside right upper")
    return figure


def _point(row: Mapping[str, Any]) -> tuple[float, float] | None:
    """Returns (FLOP/byte, TFLOP/s) of a row; None if either is not known."""
    if not (row["seconds"] and row["work"] and row["moved"]):
        return None
    return row["work"] / row["moved"], row["work"] / row["seconds"] / 1e12


def _draw_roofs(
    axis: Any, limits: Mapping[str, float], xs_of_points: Sequence[float], look: Style
) -> None:
    """Draws the roofs, from half the intensity at which the first one turns flat."""
    shown = {name: dashes for name, dashes in _ROOFS.items() if {name, "copy"} <= limits.keys()}
    corners = {name: limits[name] / limits["copy"] for name in shown}
    low, high = min([*corners.values(), *xs_of_points]) / 2, 1.5 * max(xs_of_points)
    for name, dashes in shown.items():
        xs = sorted({low, min(corners[name], high), high})
        ys = [min(limits[name], x * limits["copy"]) / 1e12 for x in xs]
        axis.plot(xs, ys, color=look.muted, linestyle=dashes, linewidth=1.0)
        text = f"{name.upper()} {limits[name] / 1e12:,.4g} TFLOP/s"
        axis.text(high, ys[-1], text, ha="right", va="bottom", color=look.muted)
    axis.set_xlim(low, high)
