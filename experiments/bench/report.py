"""Reports: tables of timed contestants, and the pages and figures that keep them.

A page is a Markdown file with one section for each report. Beside it lie two JSON files: PATH.json
has figures, single numbers such as a speedup, with the command that measured them; PATH_tables.json
has the rows of the tables, which `fp8jax.figures.step_breakdown` and `roofline` draw.
"""

import dataclasses
import importlib.metadata
import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from experiments.bench.timing import Timing
from experiments.markdown import markdown_table, replace_section

_PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "nvidia-cublas",
    "nvidia-cudnn-cu13",
    "nvidia-cublas-cu12",
    "nvidia-cudnn-cu12",
    "torch",
    "torchao",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One contestant of a table.

    Attributes:
      case: what was computed, such as a shape.
      name: the contestant.
      timing: of one piece of work.
      work: FLOPs or bytes of one piece of work; NaN if neither says anything.
      limit: seconds that the measured limits of the device allow; NaN for none.
      parts: seconds of the limit by what takes them, such as "matmuls"; {} if it is one thing.
      moved: bytes of the operands and results, each once; NaN if they are not known.
      baseline: seconds of the contestant to compare with; NaN for none.
      note: further results, in words.
    """

    case: str
    name: str
    timing: Timing
    work: int | float = math.nan
    limit: float = math.nan
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    moved: int | float = math.nan
    baseline: float = math.nan
    note: str = ""

    def cells(self, unit: float) -> list[str]:
        """Returns the cells of the row; `unit` is FLOP/s or bytes/s. A cell may be empty."""
        t = self.timing
        seconds = t.seconds or math.nan  # a clock may measure nothing
        return [
            self.case,
            self.name,
            _cell(1e3 * t.seconds, "{:.3f}"),
            _cell(math.nan if t.reason else 100 * t.spread, "{:.0f}%"),
            _cell(self.work / seconds / unit, "{:,.4g}"),
            _cell(self.limit / seconds, "{:.1%}"),
            _cell(self.baseline / seconds, "{:.3f}x"),
            "" if t.bytes is None else f"{t.bytes / 2**30:.2f}",
            t.reason or self.note,
        ]

    def record(self) -> dict[str, Any]:
        """Returns the row for JSON: seconds, FLOPs or bytes; null for what is not known."""
        t = self.timing
        numbers = {
            "seconds": t.seconds,
            "spread": math.nan if t.reason else t.spread,
            "work": self.work,
            "limit": self.limit,
            "moved": self.moved,
            "baseline": self.baseline,
        }
        known = {name: None if math.isnan(value) else value for name, value in numbers.items()}
        return {
            "case": self.case,
            "name": self.name,
            **known,
            "parts": dict(self.parts),
            "bytes": t.bytes,
            "note": t.reason or self.note,
        }


def _cell(value: float, text: str) -> str:
    """Returns the formatted value, or "" for NaN."""
    return "" if math.isnan(value) else text.format(value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """One table and its figures.

    Attributes:
      title: of its section.
      rate: unit of work per second, "TFLOP/s" or "GB/s".
      rows: the rows of the table.
      figures: name -> value, such as a speedup; NaN if it was not measured.
      notes: paragraphs above the table.
      limits: of the device, measured: "bf16" and "fp8" in FLOP/s, "copy" in bytes/s; {} for none.
    """

    title: str
    rate: str
    rows: Sequence[Row]
    figures: Mapping[str, float]
    notes: Sequence[str] = ()
    limits: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def record(self, command: str) -> dict[str, Any]:
        """Returns the table for JSON."""
        return {
            "title": self.title,
            "command": command,
            "rate": self.rate,
            "limits": {name: v for name, v in self.limits.items() if not math.isnan(v)},
            "rows": [row.record() for row in self.rows],
        }

    def table(self) -> str:
        """Returns the table in Markdown, without the columns that are empty in all rows."""
        unit = {"TFLOP/s": 1e12, "GB/s": 1e9}[self.rate]
        header = [
            "case",
            "contestant",
            "ms",
            "spread",
            self.rate,
            "of the limit",
            "against BF16",
            "GiB",
            "note",
        ]
        cells = [row.cells(unit) for row in self.rows]
        columns = [i for i in range(len(header)) if any(row[i] for row in cells)]
        return markdown_table(
            [header[i] for i in columns], [[row[i] for i in columns] for row in cells]
        )

    @property
    def known(self) -> dict[str, float]:
        """The figures that were measured, sorted by name."""
        return {name: v for name, v in sorted(self.figures.items()) if not math.isnan(v)}

    def section(self, command: str) -> str:
        """Returns Markdown: title, command, versions, notes, table and figures."""
        figures = "".join(f"- `{name}`: {value:.4g}\n" for name, value in self.known.items())
        parts = [f"## {self.title}", f"```bash\n{command}\n```", versions(), *self.notes]
        return "\n\n".join([*parts, self.table() + (f"\n{figures}" if figures else "")])


def versions() -> str:
    """Returns the device, and the versions of packages and driver, on one line."""
    found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    device = jax.local_devices()[0]
    flags = os.environ["XLA_FLAGS"] if "XLA_FLAGS" in os.environ else ""
    driver = " ".join(device.client.platform_version.split())
    packages = [f"{name} {found[name]}" for name in _PACKAGES if name in found]
    parts = [device.device_kind, *packages, f"platform `{driver}`", f"XLA_FLAGS `{flags.strip()}`"]
    return ", ".join(parts)


def write(path: Path, section: str, report: Report, command: str) -> None:
    """Replaces the report's section in PATH.md, its table in PATH_tables.json, and merges its
    figures into PATH.json.

    PATH.json maps a figure's name to {"value": …, "command": …}; PATH_tables.json maps a section
    to its table. Other sections, tables and figures stay.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    page, figures = path.parent / f"{path.name}.md", path.parent / f"{path.name}.json"
    tables = path.parent / f"{path.name}_tables.json"
    text = page.read_text(encoding="utf-8") if page.exists() else f"# Benchmarks: {path.name}\n"
    page.write_text(replace_section(text, section, report.section(command)), encoding="utf-8")
    measured = {name: {"value": v, "command": command} for name, v in report.known.items()}
    _merge(figures, measured)
    _merge(tables, {section: report.record(command)})


def _merge(path: Path, entries: Mapping[str, Any]) -> None:
    merged = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    text = json.dumps(merged | dict(entries), indent=2, sort_keys=True)
    path.write_text(text + "\n", encoding="utf-8")


def mean_ratio(pairs: Iterable[tuple[float, float]]) -> float:
    """Returns the geometric mean of a / b over the pairs of two positive numbers; NaN for none."""
    ratios = [a / b for a, b in pairs if a > 0 and b > 0]  # NaN is not positive
    return statistics.geometric_mean(ratios) if ratios else math.nan
