"""Injects faults into a run, to test or demonstrate what docs/reliability.md claims: `--inject`.

    KIND@STEP[xCOUNT], separated by commas:    nan_loss@12,spike@30x10,kill@50

Steps count from 1. A fault acts in one of three places: on the rows of a batch (`OF_ROWS`), after a
step has been dispatched (`OF_STEPS`), or, for `inf_gradient`, on gradients inside the compiled step
(`inject_gradient`). Without `--inject` none of this runs, and the compiled step is the same as
without this module.
"""

import dataclasses
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.lookup import unknown

Rows = dict[str, np.ndarray]

# The entry of a batch that marks a faulty layer: [B, L], the layer counted from 1; zeros for none.
INJECTED = "injected"

_STALL = 3600.0  # seconds; the loop's own time limit should end the run earlier
_NOBODY = 65534  # the user without rights
_NO_SPACE = 4096  # the largest size of a file on the simulated full disk, in bytes


def _nan_loss(rows: Rows) -> Rows:
    return rows | {"weights": np.full_like(rows["weights"], np.nan)}


def _inf_gradient(rows: Rows) -> Rows:
    return rows | {INJECTED: np.full_like(rows["weights"], 2)}  # the second layer


def _spike(rows: Rows) -> Rows:
    """Mirrors the token ids of the targets, so that byte targets become bytes rare in text."""
    return rows | {"targets": rows["targets"].max() - rows["targets"]}


def _source_raises(rows: Rows) -> Rows:
    raise OSError("the data source failed because of --inject=source_raises")


def _source_stalls(rows: Rows) -> Rows:
    time.sleep(_STALL)
    return rows


def _kill(checkpoints: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(checkpoints: Path) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _raise(checkpoints: Path) -> None:
    raise LookupError("a hook failed because of --inject=hook_raises")


def _hang(checkpoints: Path) -> None:
    time.sleep(_STALL)


def _terminate(checkpoints: Path) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _flip_byte(checkpoints: Path) -> None:
    """Flips one bit in the middle of the largest file of the newest checkpoint."""
    newest = max((p for p in checkpoints.iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
    largest = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def _make_read_only(checkpoints: Path) -> None:
    """Lets this process write to the run no longer. The superuser, who may, becomes another."""
    if os.geteuid() == 0:
        os.seteuid(_NOBODY)
    else:
        for folder in (checkpoints, checkpoints.parent):
            folder.chmod(0o500)


def _fill_disk(checkpoints: Path) -> None:
    """Limits every file to `_NO_SPACE` bytes from now on, so that writes fail as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (_NO_SPACE, hard))


# kind -> the function that changes the rows of its steps. It runs in the data source.
OF_ROWS: dict[str, Callable[[Rows], Rows]] = {
    "nan_loss": _nan_loss,
    "inf_gradient": _inf_gradient,
    "spike": _spike,
    "source_raises": _source_raises,
    "source_stalls": _source_stalls,
}


# kind -> the function that runs once its step has been dispatched. If the step is one to save at,
# its save has started too, and may still be running in the background.
OF_STEPS: dict[str, Callable[[Path], None]] = {
    "kill": _kill,
    "stop": _stop,
    "hook_raises": _raise,
    "hangs": _hang,
    "read_only": _make_read_only,
    "sigterm": _terminate,
    "corrupt_checkpoint": _flip_byte,
    "full_disk": _fill_disk,
}


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault: its kind, its first step and the number of steps it lasts."""

    kind: str
    step: int
    count: int

    def hits(self, step: int) -> bool:
        return self.step <= step < self.step + self.count


@dataclasses.dataclass(frozen=True)
class Faults:
    """The faults of `--inject`; none by default."""

    faults: tuple[Fault, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Faults":
        """Parses the value of `--inject`; "" is no faults.

        Raises:
          ValueError: a kind is unknown, or a step or count is not a whole number of at least 1.
        """
        faults = []
        for part in text.split(",") if text else ():
            kind, _, place = part.partition("@")
            step, times, count = place.partition("x")
            if kind not in OF_ROWS and kind not in OF_STEPS:
                raise unknown("fault", kind, [*OF_ROWS, *OF_STEPS])
            numbers = [step, count] if times else [step]
            if not all(n.isdecimal() and int(n) for n in numbers):
                raise ValueError(f"inject={part!r}: expected {kind}@STEP or {kind}@STEPxCOUNT")
            faults.append(Fault(kind, int(step), int(count) if times else 1))
        return cls(tuple(faults))

    def batches(self, rows: Iterator[Rows], first: int) -> Iterator[Rows]:
        """Yields the batches of `rows` with their faults; the first belongs to step `first`."""
        marked = any(fault.kind == "inf_gradient" for fault in self.faults)
        for step, batch in enumerate(rows, start=first):
            if marked:  # in every batch: with and without the mark the step compiles differently
                batch = batch | {INJECTED: np.zeros_like(batch["weights"])}
            for fault in self.faults:
                if fault.kind in OF_ROWS and fault.hits(step):
                    batch = OF_ROWS[fault.kind](batch)
            yield batch

    def after(self, step: int, checkpoints: Path, wait: Callable[[], Any]) -> None:
        """Runs the faults of `step`. Call it once the step has been dispatched.

        Args:
          step: the step, counted from 1.
          checkpoints: the directory of the checkpoints.
          wait: returns when all checkpoints are on disk.
        """
        for fault in self.faults:
            if fault.kind in OF_STEPS and fault.hits(step):
                if fault.kind == "corrupt_checkpoint":
                    wait()
                OF_STEPS[fault.kind](checkpoints)


def inject_gradient(grads: Any, batch: Mapping[str, jax.Array]) -> Any:
    """Returns `grads`, made infinite in mlp/down of the layer that `batch` marks (if it does)."""
    if INJECTED not in batch:
        return grads
    layer = jnp.max(batch[INJECTED]).astype(jnp.int32)

    def leaf(path, g):
        if jax.tree_util.keystr(path, simple=True, separator="/") != "layers/mlp/down/kernel":
            return g
        hit = jnp.arange(g.shape[0]).reshape(-1, *[1] * (g.ndim - 1)) == layer - 1
        return jnp.where(hit, jnp.inf, g)

    return jax.tree_util.tree_map_with_path(leaf, grads)
