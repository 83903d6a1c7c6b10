"""Reports: tables of timed contestants, and the pages and figures that keep them.

A page is a Markdown file with one section for each report. Beside it lies a JSON file of figures:
single numbers such as a speedup, with the command that measured them.
"""

import dataclasses
import importlib.metadata
import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import jax

from experiments.bench.timing import Timing
from experiments.markdown import markdown_table, replace_section

_PACKAGES = (
    "jax", "jaxlib", "flax", "nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-cublas-cu12",
    "nvidia-cudnn-cu12", "torch", "torchao",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One contestant of a table.

    Attributes:
      case: what was computed, such as a shape.
      name: the contestant.
      timing: of one piece of work.
      work: FLOPs or bytes of one piece of work; NaN if neither says anything.
      limit: seconds that the measured limits of the device allow; NaN for none.
      baseline: seconds of the contestant to compare with; NaN for none.
      note: further results, in words.
    """

    case: str
    name: str
    timing: Timing
    work: int | float = math.nan
    limit: float = math.nan
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
    """

    title: str
    rate: str
    rows: Sequence[Row]
    figures: Mapping[str, float]
    notes: Sequence[str] = ()

    def table(self) -> str:
        """Returns the table in Markdown, without the columns that are empty in all rows."""
        unit = {"TFLOP/s": 1e12, "GB/s": 1e9}[self.rate]
        header = ["case", "contestant", "ms", "spread", self.rate, "of the limit", "against BF16",
                  "GiB", "note"]  # fmt: skip
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
    """Replaces the report's section in PATH.md, and merges its figures into PATH.json.

    PATH.json maps a figure's name to {"value": …, "command": …}. Other sections and figures stay.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    page, figures = path.parent / f"{path.name}.md", path.parent / f"{path.name}.json"
    text = page.read_text(encoding="utf-8") if page.exists() else f"# Benchmarks: {path.name}\n"
    page.write_text(replace_section(text, section, report.section(command)), encoding="utf-8")
    merged = json.loads(figures.read_text(encoding="utf-8")) if figures.exists() else {}
    merged |= {name: {"value": v, "command": command} for name, v in report.known.items()}
    figures.write_text(json.dumps(merged, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def mean_ratio(pairs: Iterable[tuple[float, float]]) -> float:
    """Returns the geometric mean of a / b over the pairs of two positive numbers; NaN for none."""
    ratios = [a / b for a, b in pairs if a > 0 and b > 0]  # NaN is not positive
    return statistics.geometric_mean(ratios) if ratios else math.nan
