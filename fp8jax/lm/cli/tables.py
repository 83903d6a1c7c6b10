"""The numbers of the page: facts of each run side by side, casts of each linear, events."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fp8jax.lm.cli.compare import all_keys, differences, other_validation, why_not
from fp8jax.lm.cli.first_look import number, own_events
from fp8jax.lm.figures.memory import KINDS, unit_of
from fp8jax.lm.figures.run_files import RunFiles
from fp8jax.lm.records.events import Event
from fp8jax.telemetry.rows import NO_LAYER, Row

NOT_RECORDED = "not recorded"
_MOST_EVENTS = 200


@dataclasses.dataclass(frozen=True)
class Table:
    """Texts: a header, and rows of which the first cell names the row.

    Attributes:
      name: what a screen reader says it is.
      note: a sentence below it, "" for none.
    """

    name: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def _side_by_side(
    name: str, runs: Sequence[RunFiles], facts: Mapping[str, Callable[[RunFiles], str]]
) -> Table:
    """A row for each fact that a run has, a column for each run."""
    rows = [[label, *(find(run) or NOT_RECORDED for run in runs)] for label, find in facts.items()]
    kept = [row for row in rows if set(row[1:]) != {NOT_RECORDED}]
    return Table(name, ["", *(run.name for run in runs)], kept)


# Runs ---------------------------------------------------------------------------------------------


def summary(runs: Sequence[RunFiles]) -> Table:
    """Returns what one compares first: loss, gap, time, throughput and memory of each run."""
    facts: dict[str, Callable[[RunFiles], str]] = {
        "precision": _precision,
        "validation loss, nats a token": lambda run: _float(_last_valid(run), ".4f"),
    }
    if len(runs) > 1:
        facts[f"above that of {runs[0].name}"] = lambda run: (
            "–" if run is runs[0] else gap(run, runs[0])
        )
    facts |= {
        "ms a step, median": _median("step_s", ",.1f", 1e3),
        "tokens a second, median": _median("tokens_per_s", ",.0f"),
        "memory of a step on a device, GiB": _step_memory,
    }
    return _side_by_side("In short", runs, facts)


def _precision(run: RunFiles) -> str:
    keys = all_keys(run)
    said = _text(_last_event(run, Event.START, "policies"))
    return said or (keys["precision"].strip("'") if "precision" in keys else "")


def _last_valid(run: RunFiles, name: str = "valid_loss") -> float | None:
    """The last validation's value, which may be NaN; None without any."""
    values = [value for line in run.metrics if (value := number(line, name)) is not None]
    return values[-1] if values else None


def _median(name: str, pattern: str, scale: float = 1.0) -> Callable[[RunFiles], str]:
    """The median of a metric, which leaves out what compiles and other rare delays."""

    def find(run: RunFiles) -> str:
        values = _finite(run, name)
        return _float(scale * statistics.median(values), pattern) if values else ""

    return find


def _step_memory(run: RunFiles) -> str:
    largest = _largest_stage(run)
    return f"{largest['total'] / 2**30:,.3f}" if largest else ""


def _largest_stage(run: RunFiles) -> Mapping[str, int]:
    """The memory by kind of the stage that takes most; {} if none was recorded."""
    stages = [e["memory"] for e in run.events if e["kind"] == Event.STAGE and "memory" in e]
    return max(stages, key=lambda memory: memory["total"], default={})


def overview(runs: Sequence[RunFiles]) -> Table:
    """Returns what each run trained, where."""

    def key(name: str) -> Callable[[RunFiles], str]:
        return lambda run: all_keys(run)[name].strip("'") if name in all_keys(run) else ""

    def started(name: str) -> Callable[[RunFiles], str]:
        return lambda run: _text(_last_event(run, Event.START, name))

    return _side_by_side(
        "What the runs are",
        runs,
        {
            "precision": _precision,
            "model": key("model"),
            "parameters": started("parameters"),
            "data": key("data"),
            "tokenizer": key("tokenizer"),
            "steps": lambda run: _steps(run, key("num_steps")(run)),
            "rows in a step": key("batch_size"),
            "tokens in a row": key("seq_len"),
            "devices": started("devices"),
            "JAX": started("jax"),
        },
    )


def config(runs: Sequence[RunFiles]) -> Table:
    """Returns the keys of the config in which the runs differ."""
    rows = [
        [key, *(value or NOT_RECORDED for value in values)]
        for key, values in differences(runs).items()
    ]
    return Table("Keys of the config that differ", ["", *(run.name for run in runs)], rows)


def _steps(run: RunFiles, planned: str) -> str:
    done = f"{run.metrics[-1]['step']:,}" if run.metrics else "0"
    return f"{done} of {int(planned):,}" if planned.isdigit() else done


# Loss, speed, memory ------------------------------------------------------------------------------


def losses(runs: Sequence[RunFiles]) -> Table:
    """Returns losses, and how far they are above those of the first run where they compare."""
    baseline = runs[0]

    def training(run: RunFiles) -> float | None:
        values = _finite(run, "loss")
        return statistics.fmean(values[-max(1, len(values) // 20) :]) if values else None

    def best(run: RunFiles) -> str:
        found = [
            (value, line["step"])
            for line in run.metrics
            if (value := number(line, "valid_loss")) is not None and math.isfinite(value)
        ]
        return f"{min(found)[0]:.4f}, step {min(found)[1]:,}" if found else ""

    facts: dict[str, Callable[[RunFiles], str]] = {
        "training loss, last twentieth, nats a token": lambda run: _float(training(run), ".4f"),
        "last validation loss, nats a token": lambda run: _float(_last_valid(run), ".4f"),
        "best validation loss": best,
        "last validation, bits a byte": lambda run: _float(
            _last_valid(run, "valid_bits_per_byte"), ".4f"
        ),
    }
    if len(runs) > 1:
        name = f"validation loss above that of {baseline.name}"
        facts[name] = lambda run: "0" if run is baseline else gap(run, baseline)
    return _side_by_side("Losses", runs, facts)


def gap(run: RunFiles, baseline: RunFiles) -> str:
    """Returns the gap of validation losses at the last common step, in percent; "" if unknown."""
    if why_not(run, baseline):
        return "does not compare"
    own, other = (
        {
            line["step"]: value
            for line in each.metrics
            if (value := number(line, "valid_loss")) is not None
        }
        for each in (run, baseline)
    )
    common = own.keys() & other.keys()
    if not common:
        return ""
    step = max(common)
    if not math.isfinite(own[step]) or not math.isfinite(other[step]):
        return f"not finite at step {step:,}"
    rows = ", on other rows" if other_validation(run, baseline) else ""
    return f"{100 * (own[step] / other[step] - 1):+.2f}% at step {step:,}{rows}"


def speeds(runs: Sequence[RunFiles]) -> Table:
    """Returns step times and throughput."""

    def slow(run: RunFiles) -> str:
        values = sorted(_finite(run, "step_s"))
        return f"{1e3 * values[int(0.95 * (len(values) - 1))]:,.1f}" if values else ""

    def compiled(kind: Event) -> Callable[[RunFiles], str]:
        def find(run: RunFiles) -> str:
            found = {  # stages that compile together say one time each, that of all of them
                event["step"]: seconds
                for event in own_events(run.events)
                if event["kind"] == kind and (seconds := number(event, "compile_s")) is not None
            }
            return f"{sum(found.values()):.1f}" if found else ""

        return find

    def whole(run: RunFiles) -> str:
        return _float(number({"s": _last_event(run, Event.END, "seconds")}, "s"), ",.1f")

    return _side_by_side(
        "Speed",
        runs,
        {
            "tokens a second, median": _median("tokens_per_s", ",.0f"),
            "step, median, ms": _median("step_s", ",.1f", 1e3),
            "step, slower than 95% of steps, ms": slow,
            "share of the peak FLOP/s (MFU), median, %": _median("mfu", ".2f", 100),
            "compiling steps, s": compiled(Event.STAGE),
            # In a thread beside the steps': the two do not add up.
            "compiling telemetry meanwhile, s": compiled(Event.TELEMETRY),
            "whole last start of the program, s": whole,
        },
    )


def memory(runs: Sequence[RunFiles]) -> Table:
    """Returns the peak of device memory, which CPUs do not report, and each kind of a step's."""

    def peak(run: RunFiles) -> str:
        values = _finite(run, "peak_memory_bytes")
        return f"{max(values) / 2**30:.3f}" if values else ""

    def of_largest(kind: str) -> Callable[[RunFiles], str]:
        def find(run: RunFiles) -> str:
            largest = _largest_stage(run)
            return f"{largest[kind] / unit:,.3g}" if kind in largest else ""

        return find

    totals = [stage["total"] for run in runs if (stage := _largest_stage(run))]
    unit, label = unit_of(max(totals, default=0))
    kinds = KINDS | {"total": "all that XLA allocates"}
    facts = {f"{name}, {label}": of_largest(kind) for kind, name in kinds.items()}
    return _side_by_side("Memory", runs, {"peak of a device, GiB": peak} | facts)


# Telemetry ----------------------------------------------------------------------------------------


def worst_casts(run: RunFiles) -> Table | None:
    """Returns the worst cast of each operand of each linear, at the last sampled step.

    None without telemetry.
    """
    if run.telemetry is None:
        return None
    step = max(row.step for row in run.telemetry.rows)
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in run.telemetry.rows:
        if row.step == step and not row.what_if and row.operand != "hidden":
            groups.setdefault((row.linear, row.operand), []).append(row)
    rows = [
        [
            f"{operand} of {linear}",
            ", ".join(sorted({row.format or "high precision" for row in group})),
            _worst(group, "amax", max, lambda x: f"{x:.3g}"),
            _worst(group, "underflow", max, _share),
            _worst(group, "saturation", max, _share),
            _worst(group, "sqnr_db", min, lambda x: f"{x:.1f}"),
            _worst(group, "delay", min, lambda x: f"{round(x, 2) + 0:.2f}"),  # + 0: no minus zero
        ]
        for (linear, operand), group in groups.items()
    ]
    header = ["tensor", "format", "amax", "underflow", "saturation", "SQNR, dB", "delay, log2"]
    # BF16 has no casts to measure, current scaling no delay.
    kept = [i for i in range(len(header)) if any(row[i] != "–" for row in rows)]
    header, rows = [header[i] for i in kept], [[row[i] for i in kept] for row in rows]
    layers = any(row.layer != NO_LAYER for row in run.telemetry.rows)
    note = "Largest amax, underflow and saturation, smallest SQNR and delay of all layers and casts"
    note += "; the layer is in parentheses." if layers else "."
    return Table(f"{run.name}: worst casts of step {step:,}", header, rows, note)


def _worst(
    group: Sequence[Row], field: str, pick: Callable[..., Row], text: Callable[[float], str]
) -> str:
    """The worst value of a field, and in which layer it is unless all have the same."""
    known = [row for row in group if getattr(row, field) is not None]
    if not known:
        return "–"
    broken = [row for row in known if math.isnan(getattr(row, field))]  # the worst of all
    worst = broken[0] if broken else pick(known, key=lambda row: getattr(row, field))
    shown = text(getattr(worst, field))
    same = len({text(getattr(row, field)) for row in known}) == 1
    return shown if same or worst.layer == NO_LAYER else f"{shown} ({worst.layer})"


def _share(value: float) -> str:
    return f"{100 * value:.2g}%"


def what_if(run: RunFiles) -> list[str]:
    """Returns sentences on how the casts of the what-if recipe compare, over all sampled steps."""
    if run.telemetry is None:
        return []
    casts: dict[tuple[Any, ...], dict[bool, Row]] = {}
    for row in run.telemetry.rows:
        casts.setdefault((row.step, row.layer, row.linear, row.cast), {})[row.what_if] = row
    said = []
    for operand, word in {"x": "activations", "w": "weights", "g": "gradients"}.items():
        both = [pair for pair in casts.values() if len(pair) == 2 and pair[True].operand == operand]
        decibels = [(pair[True].sqnr_db, pair[False].sqnr_db) for pair in both]
        gains = [
            other - own
            for other, own in decibels
            if other is not None and own is not None and math.isfinite(other - own)
        ]
        if gains:
            middle = statistics.median(gains)
            recipe = next(iter(both))[True].recipe
            better = f"{abs(middle):.1f} dB {'less' if middle > 0 else 'more'} noise"
            if abs(middle) < 0.05:
                better = "as much noise"
            share = sum(gain > 0 for gain in gains) / len(gains)
            said.append(
                f"{recipe} would cast {word} with {better} in the median, and with less noise in"
                f" {share:.0%} of all casts."
            )
    return said


# Events -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Happened:
    """An event: in which step, what kind, when in UTC ("" if unknown), and its own fields."""

    step: int
    kind: str
    time: str
    text: str


def events(run: RunFiles) -> list[Happened]:
    """Returns what happened, without checkpoints; of very many, the first and the last ones."""
    shown = [event for event in run.events if event["kind"] != Event.CHECKPOINT]
    if len(shown) > _MOST_EVENTS:
        shown = [*shown[: _MOST_EVENTS // 2], *shown[-_MOST_EVENTS // 2 :]]
    return [
        Happened(event["step"], event["kind"].replace("_", " "), _when(event), _fields(event))
        for event in shown
    ]


def unlisted_events(run: RunFiles) -> str:
    """Returns a sentence on the events that `events` leaves out, "" if there are none."""
    saved = sum(event["kind"] == Event.CHECKPOINT for event in run.events)
    middle = max(0, len(run.events) - saved - _MOST_EVENTS)
    said = f"Checkpoints written: {saved}." if saved else ""
    if middle:
        said += f" {middle:,} events in the middle are only in events.jsonl."
    return said.strip()


def _when(event: Mapping[str, Any]) -> str:
    return str(event["time"])[:19].replace("T", " ") if "time" in event else ""


def _fields(event: Mapping[str, Any]) -> str:
    own = {k: v for k, v in event.items() if k not in ("time", "step", "kind")}
    return "; ".join(f"{name.replace('_', ' ')}: {_text(value)}" for name, value in own.items())


# Cells --------------------------------------------------------------------------------------------


def _last_event(run: RunFiles, kind: str, name: str) -> Any:
    found = [event[name] for event in run.events if event["kind"] == kind and name in event]
    return found[-1] if found else None


def _finite(run: RunFiles, name: str) -> list[float]:
    values: Iterable[float | None] = (number(line, name) for line in run.metrics)
    return [value for value in values if value is not None and math.isfinite(value)]


def _float(value: float | None, pattern: str) -> str:
    return "" if value is None else format(value, pattern)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        if isinstance(value, Mapping):
            return ", ".join(f"{name} {_text(each)}" for name, each in value.items())
        if isinstance(value, list):
            return ", ".join(map(_text, value))
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
