"""GNMR's promotions: what ran in high precision, and when (2606.00539)."""

from collections.abc import Mapping, Sequence
from typing import Any

from fp8jax.lm.figures.run_files import RunFiles
from fp8jax.lm.figures.style import NothingToDraw, panels, style
from fp8jax.lm.records.events import Event

UNITS = {"layers", "linears"}  # fields of a promotion's event: one of them


def promotions(run: RunFiles, *, dark: bool = False) -> Any:
    """Returns what GNMR promoted over the steps: a bar while a layer or linear was promoted.

    Args:
      run: a run with `--config.gnmr`.
      dark: whether to draw for dark pages.

    Returns:
      A `matplotlib.figure.Figure`.

    Raises:
      NothingToDraw: the run has promoted nothing.
      ImportError: matplotlib is not installed.

    Example:
      >>> event = {"step": 2, "kind": "promotion", "layers": [0, 3]}
      >>> run = fp8jax.figures.RunFiles(
      ...     path=Path("runs/a"), name="a", metrics=[{"step": 4}], events=[event]
      ... )
      >>> fp8jax.figures.promotions(run).axes[0].get_title(loc="left")
      'a: promoted layers; 6 steps, summed over layers'
    """
    last = max([line["step"] for line in run.metrics], default=0)
    stretches = promoted_stretches(run.events, last)
    if not stretches:
        raise NothingToDraw(f"{run.name} has promoted nothing")
    linears = [each for each in stretches if isinstance(each, str)]
    # A layer's place is its number, so that layers that never were promoted have theirs.
    places = [linears.index(each) if isinstance(each, str) else each for each in stretches]
    kind = "linear" if linears else "layer"
    with style(dark=dark) as look:
        top = max(places)
        figure, ((axis,),) = panels(1, 1, height=min(5.0, 1.2 + 0.2 * (top + 1)))
        for place, spans in zip(places, stretches.values(), strict=True):
            # A bar from the middle before its first step to the middle after its last.
            bars = [(begin - 0.5, end - begin) for begin, end in spans]
            axis.broken_barh(bars, (place - 0.35, 0.7), color=look.colors[0], linewidth=0)
        axis.set_xlim(0.5, last + 0.5)
        axis.set_ylim(-0.6, top + 0.6)
        ticks = range(0, top + 1, 1 + top // 20)
        axis.set_yticks(ticks, [linears[tick] for tick in ticks] if linears else None)
        axis.xaxis.get_major_locator().set_params(integer=True)  # no step 2.5
        axis.set_xlabel("step")
        axis.set_ylabel(kind)
        steps = sum(end - begin for spans in stretches.values() for begin, end in spans)
        axis.set_title(f"{run.name}: promoted {kind}s; {steps:,} steps, summed over {kind}s")
    return figure


def promoted_stretches(
    events: Sequence[Mapping[str, Any]], last: int
) -> dict[int | str, list[tuple[int, int]]]:
    """Returns the stretches of promoted steps, [first, end), of each layer or linear, in order.

    Args:
      events: lines of events.jsonl. Those of a run before it resumed from an earlier step are not
        counted twice.
      last: the last step of the run, with which open stretches end.
    """
    changes: dict[int, frozenset[int | str]] = {}
    for event in events:
        if event["kind"] == Event.START:
            # What a killed run did after its checkpoint is done again, and a program that starts
            # says at its first step what is promoted.
            changes = {step: each for step, each in changes.items() if step <= event["step"]}
            changes[event["step"] + 1] = frozenset()
        elif event["kind"] == Event.PROMOTION and (kind := UNITS & event.keys()):
            changes[event["step"]] = frozenset(event[kind.pop()])
    stretches: dict[int | str, list[tuple[int, int]]] = {}
    changes = {step: each for step, each in sorted(changes.items()) if step <= last}
    ends = [*changes, last + 1]
    for begin, end in zip(ends[:-1], ends[1:], strict=True):
        for each in changes[begin]:
            spans = stretches.setdefault(each, [])
            joined = spans.pop()[0] if spans and spans[-1][1] == begin else begin
            spans.append((joined, end))
    return dict(sorted(stretches.items(), key=lambda item: _in_order(item[0])))


def _in_order(unit: int | str) -> tuple[int, str]:
    """A layer's number; of a linear such as "10/mlp/down" its layer's, then its name."""
    layer, _, linear = str(unit).partition("/")
    return int(layer), linear
