"""GNMR's promotions: which layers ran in high precision, and when (2606.00539)."""

from collections.abc import Mapping, Sequence
from typing import Any

from fp8jax.lm.figures.run_files import RunFiles
from fp8jax.lm.figures.style import NothingToDraw, panels, style
from fp8jax.lm.records.events import Event


def promotions(run: RunFiles, *, dark: bool = False) -> Any:
    """Returns the layers that GNMR promoted over the steps: a bar while a layer was promoted.

    Args:
      run: a run with `--config.gnmr`.
      dark: whether to draw for dark pages.

    Returns:
      A `matplotlib.figure.Figure`.

    Raises:
      NothingToDraw: the run has promoted no layer.
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
        raise NothingToDraw(f"{run.name} has promoted no layer")
    with style(dark=dark) as look:
        top = max(stretches)
        figure, ((axis,),) = panels(1, 1, height=min(5.0, 1.2 + 0.2 * (top + 1)))
        for layer, spans in stretches.items():
            # A bar from the middle before its first step to the middle after its last.
            bars = [(begin - 0.5, end - begin) for begin, end in spans]
            axis.broken_barh(bars, (layer - 0.35, 0.7), color=look.colors[0], linewidth=0)
        axis.set_xlim(0.5, last + 0.5)
        axis.set_ylim(-0.6, top + 0.6)
        axis.set_yticks(range(0, top + 1, 1 + top // 20))
        axis.set_xlabel("step")
        axis.set_ylabel("layer")
        steps = sum(end - begin for spans in stretches.values() for begin, end in spans)
        axis.set_title(f"{run.name}: promoted layers; {steps:,} steps, summed over layers")
    return figure


def promoted_stretches(
    events: Sequence[Mapping[str, Any]], last: int
) -> dict[int, list[tuple[int, int]]]:
    """Returns layer -> its stretches of promoted steps, [first, end), by layer.

    Args:
      events: lines of events.jsonl. Those of a run before it resumed from an earlier step are not
        counted twice.
      last: the last step of the run, with which open stretches end.
    """
    changes: dict[int, frozenset[int]] = {}
    for event in events:
        if event["kind"] == Event.START:
            # What a killed run did after its checkpoint is done again, and a program that starts
            # says at its first step which layers are promoted.
            changes = {step: layers for step, layers in changes.items() if step <= event["step"]}
            changes[event["step"] + 1] = frozenset()
        elif event["kind"] == Event.PROMOTION and "layers" in event:
            changes[event["step"]] = frozenset(event["layers"])
    stretches: dict[int, list[tuple[int, int]]] = {}
    changes = {step: layers for step, layers in sorted(changes.items()) if step <= last}
    ends = [*changes, last + 1]
    for begin, end in zip(ends[:-1], ends[1:], strict=True):
        for layer in changes[begin]:
            spans = stretches.setdefault(layer, [])
            joined = spans.pop()[0] if spans and spans[-1][1] == begin else begin
            spans.append((joined, end))
    return dict(sorted(stretches.items()))
