"""What the console says of an event; events.jsonl has its fields."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fp8jax.lm.records.events import Cause, Event

_Fields = Mapping[str, Any]


def in_words(kind: Event, fields: _Fields) -> str:
    """Returns an event as a sentence without its end; "" for one that is said elsewhere."""
    return _WORDS[kind](fields) if kind in _WORDS else ""


def _resumed(fields: _Fields) -> str:
    seeding = "; the next step seeds its amax histories" if fields["seeding"] else ""
    changes = "".join(f"; changed: {change}" for change in fields["changes"])
    return f"the run goes on from here{seeding}{changes}"


def _switched(fields: _Fields) -> str:
    seeding = ", and seeds its amax histories" if fields["seeding"] else ""
    return f"the next step trains in {fields['to']} instead of {fields['from']}{seeding}"


def _promoted(fields: _Fields) -> str:
    kind = "linears" if "linears" in fields else "layers"
    which = ", ".join(map(str, fields[kind])) or "none"
    return f"{kind} in high precision from here on: {which}"


def _growing(fields: _Fields) -> str:
    return f"SwiGLU outputs keep growing in layers {', '.join(map(str, fields['amaxes']))}"


def _ranges(steps: Iterable[tuple[int, int]]) -> str:
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in steps)


def _rejected(remedy: str) -> Callable[[_Fields], str]:
    def say(fields: _Fields) -> str:
        why = "a spike" if fields["cause"] == Cause.SPIKE else "not finite"
        return f"loss {fields['loss']:g}, grad_norm {fields['grad_norm']:g}: {why}; {remedy}"

    return say


_WORDS: dict[Event, Callable[[_Fields], str]] = {
    Event.CHECKPOINT: lambda fields: f"saving {fields['path']}",
    Event.RESUME: _resumed,
    Event.ALREADY_FINISHED: lambda fields: (
        f"num_steps={fields['num_steps']} leaves nothing to train"
    ),
    Event.STOPPED: lambda fields: f"stopped by {fields['signal']}, with its state saved",
    Event.FAILED: lambda fields: f"all processes leave: {fields['reason']}",
    Event.DATA_FAILED: lambda fields: f"no batch came: {fields['reason']}",
    Event.DAMAGED_LINES: lambda fields: (
        f"{fields['file']} had damaged lines, which are left out: {', '.join(fields['lines'])}"
    ),
    Event.MISSING_STEPS: lambda fields: (
        f"metrics.jsonl has no lines of steps {_ranges(fields['steps'])}; the checkpoint is sound"
    ),
    Event.DAMAGED_CHECKPOINT: lambda fields: (
        f"this checkpoint is damaged, an older one is read instead: {fields['reason']}"
    ),
    Event.BEST_CHECKPOINT: lambda fields: (
        f"the best checkpoint on disk, valid_loss {fields['valid_loss']:.4f}"
    ),
    Event.PRECISION_SWITCH: _switched,
    Event.TELEMETRY: lambda fields: f"compiled what samples casts in {fields['compile_s']:.1f} s",
    Event.PROFILED: lambda fields: f"the trace is in {fields['directory']}",
    Event.PROMOTION: _promoted,
    Event.SWIGLU_GROWS: _growing,
    Event.OVERFLOW: lambda fields: (
        f"gradients overflowed under loss_scale={fields['loss_scale']:g}, which is halved; the"
        " batch is left out"
    ),
    Event.REPEAT: _rejected("the step is repeated"),
    Event.SKIP: _rejected("the batch is skipped"),
    Event.ROLLBACK: _rejected("back to the newest checkpoint"),
    Event.STOP: _rejected("the run ends"),
}
