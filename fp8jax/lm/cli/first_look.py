"""What to look at first in a run, in words: tensors out of line, stops, spikes, recovery."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fp8jax.lm.figures.run_files import RunFiles, has_ended
from fp8jax.lm.records.events import Cause, Event
from fp8jax.telemetry.outliers import Finding, out_of_line

_RUNGS = {
    Event.REPEAT: "the batch was repeated in high precision",
    Event.SKIP: "the batch was skipped",
    Event.ROLLBACK: "the run went back to a checkpoint",
    Event.STOP: "the run stopped",
}
_CAUSES = {Cause.SPIKE: "a loss spike", Cause.NON_FINITE: "not finite"}
_FINISHED, _STOPPED = "finished", "stopped"

# A loss is a spike by the rule of lm/stability/spikes.py, with its defaults.
_WINDOW, _DEVIATIONS, _NORMAL, _SLACK = 64, 6.0, 1.4826, 1 / 50
_RISEN = 0.05  # a run whose loss ends this share above its lowest has diverged
_NOISE, _MANY = 4.0, 20  # unless batches differ so much: deviations, where there are many losses


@dataclasses.dataclass(frozen=True)
class Note:
    """Something that happened in a step, as a sentence."""

    step: int
    text: str


@dataclasses.dataclass(frozen=True)
class FirstLook:
    """What to look at first.

    Attributes:
      state: how the run ended, or that it goes on.
      stopped: whether it ended before its last step.
      sound: whether it finished, and nothing below was found.
      tensors: out of line, the first one first; None without telemetry.
      sampled: the number of sampled steps.
      steps: what happened to steps, by step.
      recorded: whether there are events, without which nothing is known of rejected steps.
    """

    state: str
    stopped: bool
    sound: bool
    tensors: list[Finding] | None
    sampled: int
    steps: list[Note]
    recorded: bool


def first_look(run: RunFiles) -> FirstLook:
    """Returns what to look at first in a run."""
    events = own_events(run.events)
    tensors = None if run.telemetry is None else out_of_line(run.telemetry.rows)
    steps = [*_rejected(events), *_others(events), *_loss_notes(run.metrics, events)]
    state, ended = _state(run, events)
    return FirstLook(
        state=state,
        stopped=ended == _STOPPED,
        sound=ended == _FINISHED and not (steps or tensors),
        tensors=tensors,
        sampled=0 if run.telemetry is None else len({row.step for row in run.telemetry.rows}),
        steps=sorted(steps, key=lambda note: note.step),
        recorded=bool(events),
    )


def own_events(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the events without those of earlier runs in this directory that began anew since."""
    begin = 0
    for index, event in enumerate(events):
        if event["kind"] == Event.START and event["step"] == 0:
            begin = index
    return list(events[begin:])


def number(line: Mapping[str, Any], name: str) -> float | None:
    """Returns a number of a line, None if it is not there; it may be infinite or NaN."""
    value = line[name] if name in line else None
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    return value if isinstance(value, int | float) else None


def _state(run: RunFiles, events: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """How the run ended, in words, and as `_FINISHED`, `_STOPPED` or "", where nothing says so."""
    last = max([line["step"] for line in [*run.metrics, *events]], default=0)
    known = run.config is not None and "num_steps" in run.config
    steps = f"step {last:,}" + (f" of {run.config['num_steps']:,}" if known and run.config else "")
    ends = [event for event in events if event["kind"] == Event.END]
    if has_ended(events) and ends:
        reason = ends[-1]["reason"] if "reason" in ends[-1] else "ended"
        if reason == _FINISHED:
            return f"finished at {steps}", _FINISHED
        return f"stopped at {steps} ({reason})", _STOPPED
    if Event.START not in {event["kind"] for event in events}:
        return f"reached {steps}; how it ended is not recorded", ""
    times = [line["time"] for line in [*run.metrics[-1:], *events[-1:]] if "time" in line]
    when = f", last written {max(times)[:16].replace('T', ' ')} UTC" if times else ""
    return f"has not ended: it still runs, or was killed; {steps}{when}", ""


def _rejected(events: Sequence[Mapping[str, Any]]) -> list[Note]:
    """Rejected steps and what was done; one note for all of a kind and cause, at their first."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for event in events:
        if event["kind"] in _RUNGS:
            cause = str(event["cause"]) if "cause" in event else ""
            groups.setdefault((event["kind"], cause), []).append(event)
    notes = []
    for (kind, cause), same in groups.items():
        first = same[0]
        what = _CAUSES[Cause(cause)] if cause in set(Cause) else cause or "a cause not recorded"
        values = [
            f"{name} {value:.4g}"
            for name in ("loss", "grad_norm")
            if (value := number(first, name)) is not None
        ]
        text = f"rejected, {what} ({', '.join(values)}); {_RUNGS[Event(kind)]}"
        if "first" in first and first["first"]:
            text += f"; the first tensor that was not finite: {first['first']}"
        if len(same) > 1:
            text += f"; {len(same) - 1} more like it, the last at step {same[-1]['step']:,}"
        notes.append(Note(first["step"], text))
    return notes


def _others(events: Sequence[Mapping[str, Any]]) -> list[Note]:
    notes = []
    for event in events:
        kind, step = event["kind"], event["step"]
        if kind in (Event.DATA_FAILED, Event.DAMAGED_CHECKPOINT):
            what = "no data" if kind == Event.DATA_FAILED else "a damaged checkpoint"
            notes.append(Note(step, f"{what}: {event['reason'] if 'reason' in event else ''}"))
        elif kind == Event.SWIGLU_GROWS and "amaxes" in event:
            layers = ", ".join(event["amaxes"])
            notes.append(
                Note(
                    step,
                    f"the SwiGLU output of layers {layers} grew at each of several validations",
                )
            )
    return [*notes, *_promotions(events, "layer"), *_promotions(events, "linear")]


def _promotions(events: Sequence[Mapping[str, Any]], unit: str) -> list[Note]:
    """A note at the first promotion of a unit, with all that were promoted; none without one."""
    promoted = [e for e in events if e["kind"] == Event.PROMOTION and f"{unit}s" in e]
    promoted = [event for event in promoted if event[f"{unit}s"]]
    if not promoted:
        return []
    units = {each for event in promoted for each in event[f"{unit}s"]}
    listed = sorted(map(str, units), key=lambda each: int(each.partition("/")[0]))
    which = f"{unit}{'s' if len(listed) > 1 else ''} {', '.join(listed)}"
    text = f"the first promotion of {unit}s to higher precision; in all, {which}"
    return [Note(promoted[0]["step"], text)]


# The curve of losses ------------------------------------------------------------------------------


def _loss_notes(
    metrics: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]
) -> list[Note]:
    told = {event["step"] for event in events if event["kind"] in _RUNGS}
    losses = {
        line["step"]: loss
        for line in metrics
        if line["step"] not in told and (loss := number(line, "loss")) is not None
    }
    finite = {step: loss for step, loss in losses.items() if math.isfinite(loss)}
    validated = {
        line["step"]: value for line in metrics if (value := number(line, "valid_loss")) is not None
    }
    valid = {step: value for step, value in validated.items() if math.isfinite(value)}
    notes = [
        Note(step, f"the {name} loss is {values[step]}")
        for name, values, known in (
            ("training", losses, finite),
            ("validation", validated, valid),
        )
        for step in [step for step in values if step not in known][:1]
    ]
    return notes + spikes(finite) + _risen(finite, "training") + _risen(valid, "validation")


def spikes(losses: Mapping[int, float]) -> list[Note]:
    """Returns the spikes that nothing rejected, neighbors as one.

    Args:
      losses: step -> loss, finite.
    """
    window: list[float] = []
    notes: list[Note] = []
    group: list[tuple[int, float]] = []
    above = 0.0

    def close() -> None:
        if group:
            first, peak = group[0][0], max(group, key=lambda each: each[1])
            steps = "" if len(group) == 1 else f" over {len(group)} steps"
            notes.append(
                Note(
                    first,
                    f"the training loss spikes to {peak[1]:.4g}{steps}, from a median of"
                    f" {above:.4g}; nothing rejected it (recovery.spike_window is a detector)",
                )
            )
            group.clear()

    for step, loss in losses.items():
        seen = window[-_WINDOW:]
        middle = statistics.median(seen) if seen else loss
        spread = _NORMAL * statistics.median(abs(x - middle) for x in seen) if seen else 0.0
        enough = len(seen) >= _WINDOW // 2
        if enough and loss > middle + max(_DEVIATIONS * spread, _SLACK * middle):
            if not group:
                above = middle
            group.append((step, loss))
            if len(group) == _WINDOW // 2:  # it stays there: the new level
                window = [loss for _, loss in group]
                close()
        else:
            window.append(loss)
            close()
    close()
    return notes


def _risen(losses: Mapping[int, float], name: str) -> list[Note]:
    """A note if the losses end well above their lowest; training losses as means of a twentieth."""
    values, steps = list(losses.values()), list(losses)
    window = max(1, len(values) // 20) if name == "training" else 1
    means = [
        (statistics.fmean(values[end - window : end]), steps[end - 1])
        for end in range(window, len(values) + 1)
    ]
    if not means:
        return []
    lowest, step = min(means)
    last, end = means[-1]
    allowed = _RISEN * abs(lowest)
    if name == "training" and len(values) >= _MANY:
        changes = [abs(b - a) for a, b in itertools.pairwise(values)]
        deviation = _NORMAL * statistics.median(changes) / math.sqrt(2)  # of a loss
        allowed = max(allowed, _NOISE * deviation * math.sqrt(2 / window))  # of two means
    if last <= lowest + allowed:
        return []
    return [
        Note(
            step,
            f"the {name} loss was lowest, {lowest:.4g}, and rose to {last:.4g} by step {end:,}",
        )
    ]
