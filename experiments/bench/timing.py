"""Contestants timed in turns, and the pages and figures that come of it.

A device's clock moves with its temperature and with what ran before. So whatever is compared runs
in one process and in turns: each round gives every contestant a batch of calls, and the median of
its rounds is its time. The calls of a batch are dispatched one after the other and waited for once,
as a training loop does it, so that the host's work overlaps with the device's.

A contestant that cannot run, be it refused, not installed or out of memory, is reported with the
reason, and the others go on. Between its turns it holds its operands only: results are dropped
before the next call, and what it had in memory goes when the race ends.
"""

import concurrent.futures
import dataclasses
import gc
import importlib.metadata
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

_MOST_CALLS = 1000  # a batch


_PACKAGES = (
    "jax", "jaxlib", "flax", "nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-cublas-cu12",
    "nvidia-cudnn-cu12", "torch", "torchao",
)  # fmt: skip


def _nothing() -> None:
    pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """Something to time.

    Attributes:
      call: dispatches it once.
      wait: returns when the result of the last call is there.
      close: called once nothing refers to the program any more.
      items: equal pieces of work in a call; times are of one.
      bytes: the memory that its row shows, None for none.
    """

    call: Callable[[], Any]
    wait: Callable[[Any], Any] = jax.block_until_ready
    close: Callable[[], None] = _nothing
    items: int = 1
    bytes: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """What came of a contestant.

    Attributes:
      seconds: median over the rounds; NaN where it did not run to the end.
      spread: (slowest - fastest) / median.
      bytes: as its `Program` says.
      reason: why it did not run, "" where it did.
    """

    seconds: float = math.nan
    spread: float = 0.0
    bytes: int | None = None
    reason: str = ""


Entrants = Mapping[str, Callable[[], Program]]


Race = Callable[[Entrants], dict[str, Timing]]


def race(
    entrants: Entrants,
    *,
    rounds: int = 7,
    seconds: float = 0.1,
    threads: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Times all entrants in turns.

    Args:
      entrants: name -> what makes the program, compiled or not; may raise.
      rounds: batches of each.
      seconds: length of a batch, which has one call at least.
      threads: programs made at a time, before any of them is called.
      clock: seconds since some moment.
    """
    programs: dict[str, Program] = {}
    calls: dict[str, int] = {}
    times: dict[str, list[float]] = {name: [] for name in entrants}
    reasons: dict[str, str] = {}

    def attempt(name: str, turn: Callable[[str], None]) -> None:
        try:
            turn(name)
        except Exception as error:  # a peer may raise anything; its row says what
            text = " ".join(str(error).split())
            reasons[name] = f"{type(error).__name__}: {text[:200]}"
        if name in reasons:
            _close(programs, name)

    def prepare(name: str) -> None:
        programs[name] = made[name].result()
        _batch(programs[name], 2, clock)  # the first call may compile
        once = _batch(programs[name], 1, clock) * programs[name].items
        calls[name] = max(1, min(_MOST_CALLS, round(seconds / max(once, 1e-9))))

    def time_batch(name: str) -> None:
        times[name].append(_batch(programs[name], calls[name], clock))

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        made = {name: pool.submit(entrant) for name, entrant in entrants.items()}
    for name in entrants:
        attempt(name, prepare)
    for _ in range(rounds):
        for name in list(programs):
            attempt(name, time_batch)
    found = {
        name: Timing(reason=reasons[name])
        if name in reasons
        else _timing(times[name], programs[name].bytes)
        for name in entrants
    }
    for name in list(programs):
        _close(programs, name)
    return found


def _timing(times: list[float], size: int | None) -> Timing:
    median = statistics.median(times)
    spread = (max(times) - min(times)) / median if median else 0.0
    return Timing(seconds=median, spread=spread, bytes=size)


def _batch(program: Program, calls: int, clock: Callable[[], float]) -> float:
    """Seconds of an item of the program's work, from `calls` calls."""
    out = None
    begin = clock()
    for _ in range(calls):
        out = None  # its memory may be taken by the next call's
        out = program.call()
    program.wait(out)
    return (clock() - begin) / calls / program.items


def _close(programs: dict[str, Program], name: str) -> None:
    close = programs.pop(name).close if name in programs else _nothing
    gc.collect()
    close()


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


def replace_section(page: str, name: str, text: str) -> str:
    """`page` with `text` as its section of that name, at its place or at the end.

    Raises ValueError where the section begins and does not end.
    """
    begin, end = f"<!-- section: {name} -->\n", f"<!-- end: {name} -->\n"
    before, found, rest = page.partition(begin)
    if not found:
        return f"{page.rstrip()}\n\n{begin}\n{text}\n{end}"
    _, closed, after = rest.partition(end)
    if not closed:
        raise ValueError(f"the page's section {name!r} has no end: {end.strip()}")
    return f"{before}{begin}\n{text}\n{end}{after}"


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
