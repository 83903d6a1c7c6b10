"""TODO docstring."""

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
from experiments.markdown import replace_section

_PACKAGES = (
    "jax", "jaxlib", "flax", "nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-cublas-cu12",
    "nvidia-cudnn-cu12", "torch", "torchao",
)  # fmt: skip


# What is written ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One contestant of a table.

    Attributes:
      case: what was computed, such as a shape.
      name: by whom.
      timing: of one item of work.
      work: FLOPs or bytes of it; NaN where they mean nothing.
      limit: the seconds that the device's measured limits allow; NaN for none.
      baseline: seconds of what it is compared with; NaN for none.
    """

    case: str
    name: str
    timing: Timing
    work: int | float = math.nan
    limit: float = math.nan
    baseline: float = math.nan

    def cells(self, unit: float) -> list[str]:
        t = self.timing
        number = lambda value, text: "" if math.isnan(value) else text.format(value)  # noqa: E731
        return [
            self.case, self.name, number(1e3 * t.seconds, "{:.3f}"),
            number(math.nan if t.reason else 100 * t.spread, "{:.0f}%"),
            number(self.work / t.seconds / unit if t.seconds else math.nan, "{:,.4g}"),
            number(self.limit / t.seconds if t.seconds else math.nan, "{:.1%}"),
            number(self.baseline / t.seconds if t.seconds else math.nan, "{:.3f}x"),
            "" if t.bytes is None else f"{t.bytes / 2**30:.2f}", t.reason,
        ]  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """One table and its figures.

    Attributes:
      title, notes: for people.
      rate: unit of work a second, "TFLOP/s" or "GB/s".
      rows: of the table.
      figures: name -> value, of the bars; NaN for what was not measured.
    """

    title: str
    rate: str
    rows: Sequence[Row]
    figures: Mapping[str, float]
    notes: Sequence[str] = ()

    def table(self) -> str:
        """Markdown; a column that no row fills is left out."""
        unit = {"TFLOP/s": 1e12, "GB/s": 1e9}[self.rate]
        header = ["case", "contestant", "ms", "spread", self.rate, "of the limit", "against BF16",
                  "GiB", "note"]  # fmt: skip
        cells = [row.cells(unit) for row in self.rows]
        kept = [i for i in range(len(header)) if any(row[i] for row in cells)]
        lines = [header, ["---"] * len(header), *cells]
        return "".join(f"| {' | '.join(line[i] for i in kept)} |\n" for line in lines)

    @property
    def known(self) -> dict[str, float]:
        """The figures that were measured."""
        return {name: v for name, v in sorted(self.figures.items()) if not math.isnan(v)}

    def section(self, command: str) -> str:
        """The table with its title, the command, the versions and the figures."""
        figures = "".join(f"- `{name}`: {value:.4g}\n" for name, value in self.known.items())
        parts = [f"## {self.title}", f"```bash\n{command}\n```", versions(), *self.notes]
        return "\n\n".join([*parts, self.table() + (f"\n{figures}" if figures else "")])


def versions() -> str:
    """The device and what runs on it, on one line."""
    found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    device = jax.local_devices()[0]
    flags = os.environ["XLA_FLAGS"] if "XLA_FLAGS" in os.environ else ""
    driver = " ".join(device.client.platform_version.split())
    packages = [f"{name} {found[name]}" for name in _PACKAGES if name in found]
    parts = [device.device_kind, *packages, f"platform `{driver}`", f"XLA_FLAGS `{flags.strip()}`"]
    return ", ".join(parts)


def write(path: Path, section: str, report: Report, command: str) -> None:
    """Replaces the report's section in PATH.md, and merges its figures into PATH.json: name ->
    {"value", "command"}. Other sections and figures stay."""
    path.parent.mkdir(parents=True, exist_ok=True)
    page, figures = path.parent / f"{path.name}.md", path.parent / f"{path.name}.json"
    text = page.read_text(encoding="utf-8") if page.exists() else f"# Benchmarks: {path.name}\n"
    page.write_text(replace_section(text, section, report.section(command)), encoding="utf-8")
    merged = json.loads(figures.read_text(encoding="utf-8")) if figures.exists() else {}
    merged |= {name: {"value": v, "command": command} for name, v in report.known.items()}
    figures.write_text(json.dumps(merged, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def mean_ratio(pairs: Iterable[tuple[float, float]]) -> float:
    """Geometric mean of a / b over the pairs that have both; NaN if none has."""
    found = [a / b for a, b in pairs if a > 0 and b > 0]  # NaN is not
    return statistics.geometric_mean(found) if found else math.nan
