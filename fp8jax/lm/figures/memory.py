"""A figure of what the memory of a training step is taken by."""

from collections.abc import Mapping
from typing import Any

from fp8jax.lm.figures.run_files import RunFiles
from fp8jax.lm.figures.style import NothingToDraw, panels, style
from fp8jax.lm.records.events import Event

KINDS = {
    "weights": "weights",
    "optimizer": "optimizer state",
    "histories": "FP8 histories",
    "batch": "batch",
    "gradients": "gradients, float32",
    "activations": "activations and work space",
}
_HATCHES = ("", "//", "xx", "--", "\\\\", "++")


def memory_by_kind(*runs: RunFiles, dark: bool = False) -> Any:
    """Returns the memory of each run's and stage's training step on each device, by kind, in GiB.

    The thick line is what XLA allocates in all: less than the kinds add up to where it does not
    hold all gradients at once. The dashed line is the largest peak that the device reported, with
    the programs of validation and initialization.

    Args:
      runs: their events have the memory of each stage.
      dark: whether to draw for dark pages.

    Returns:
      A `matplotlib.figure.Figure`.

    Raises:
      NothingToDraw: the runs are of a version that did not record it.
      ImportError: matplotlib is not installed.

    Example:
      >>> kinds = ["weights", "optimizer", "histories", "batch", "gradients", "activations"]
      >>> memory = dict.fromkeys([*kinds, "total"], 2**30)
      >>> stage = {"step": 0, "kind": "stage", "policy": "fp8_block", "memory": memory}
      >>> run = fp8jax.figures.RunFiles(path=Path("runs/a"), name="a", events=[stage])
      >>> fp8jax.figures.memory_by_kind(run).axes[0].get_xlabel()
      'memory on each device, GiB'
    """
    rows = [row for run in runs for row in _stages(run, named=len(runs) > 1)]
    if not rows:
        names = " and ".join(run.name for run in runs)
        raise NothingToDraw(f"{names} did not record memory by kind: an older version wrote them")
    unit, label = unit_of(max(memory["total"] for _, memory, _ in rows))
    with style(dark=dark) as look:
        figure, ((axis,),) = panels(1, 1, height=1.2 + 0.5 * len(rows))
        for row, (_, memory, peak) in enumerate(rows):
            left = 0.0
            for i, (kind, name) in enumerate(KINDS.items()):
                axis.barh(
                    row,
                    memory[kind] / unit,
                    0.6,
                    left=left,
                    color=look.colors[i],
                    hatch=_HATCHES[i],
                    edgecolor=look.background,
                    linewidth=0,
                    label=None if row else name,
                )
                left += memory[kind] / unit
            total = memory["total"] / unit
            axis.vlines(total, row - 0.38, row + 0.38, color=look.text, linewidth=2)
            if peak is not None:
                place = (peak / unit, row - 0.38, row + 0.38)
                said = None if row else "peak of the device"
                axis.vlines(*place, color=look.muted, linestyle="--", label=said)
            axis.text(max(total, left), row, f"  {total:.3g}", va="center")
        axis.set_yticks(range(len(rows)), [name for name, _, _ in rows])
        axis.set_ylim(len(rows) - 0.4, -0.6)
        axis.margins(x=0.1)
        axis.set_xlabel(f"memory on each device, {label}")
        axis.set_title("memory of a training step; thick line: all that XLA allocates")
        figure.legend(loc="outside lower center", ncols=3)
    return figure


def _stages(run: RunFiles, *, named: bool) -> list[tuple[str, Mapping[str, int], int | None]]:
    """The name of each stage, its memory by kind, and the largest peak that the device reported."""
    stages = {
        event["policy"]: event["memory"]
        for event in run.events
        if event["kind"] == Event.STAGE and {"policy", "memory"} <= event.keys()
    }
    name = "peak_memory_bytes"
    peaks = [line[name] for line in run.metrics if name in line and line[name] is not None]
    return [
        (_label(run.name, policy) if named else policy, memory, max(peaks, default=None))
        for policy, memory in stages.items()
    ]


def _label(name: str, policy: str) -> str:
    """Run and policy; the run alone if it is named by its policy, such as runs/fp8_block."""
    return name if policy in name.split("/") else f"{name}, {policy}"


def unit_of(size: int) -> tuple[int, str]:
    """Returns the bytes of the unit in which a size is shown, and its name."""
    return (2**30, "GiB") if size >= 2**30 else (2**20, "MiB")
