"""TODO docstring."""

import dataclasses
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.data.loader import Batch
from fp8jax.lookup import unknown

Rows = dict[str, np.ndarray]


_STALL = 3600.0  # seconds, unless somebody gives up before


_NO_SPACE = 4096  # bytes that a file may have on the full disk


def _nan_loss(rows: Rows) -> Rows:
    return rows | {"weights": np.full_like(rows["weights"], np.nan)}


def _inf_gradient(rows: Rows) -> Rows:
    return rows | {INJECTED: np.full_like(rows["weights"], 2)}  # the second layer


def _spike(rows: Rows) -> Rows:
    """Targets that are rare in text: of bytes, control characters for letters."""
    return rows | {"targets": rows["targets"].max() - rows["targets"]}


def _source_raises(rows: Rows) -> Rows:
    raise OSError("the data source failed, as --inject asked for")


def _source_stalls(rows: Rows) -> Rows:
    time.sleep(_STALL)
    return rows


def _kill(checkpoints: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _terminate(checkpoints: Path) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _flip_byte(checkpoints: Path) -> None:
    """One bit in the middle of the largest file of the newest checkpoint."""
    newest = max((p for p in checkpoints.iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
    largest = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def _fill_disk(checkpoints: Path) -> None:
    """No file may grow beyond a few kilobytes from now on: writing fails as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (_NO_SPACE, hard))


# kind -> what happens to the rows of its steps, in the data source
OF_ROWS: dict[str, Callable[[Rows], Rows]] = {
    "nan_loss": _nan_loss,
    "inf_gradient": _inf_gradient,
    "spike": _spike,
    "source_raises": _source_raises,
    "source_stalls": _source_stalls,
}


# kind -> what happens once its step was dispatched (and saved, if it is one to save at; the save
# still runs in the background)
OF_STEPS: dict[str, Callable[[Path], None]] = {
    "kill": _kill,
    "sigterm": _terminate,
    "corrupt_checkpoint": _flip_byte,
    "full_disk": _fill_disk,
}


@dataclasses.dataclass(frozen=True)
class Fault:
    kind: str
    step: int
    count: int

    def hits(self, step: int) -> bool:
        return self.step <= step < self.step + self.count


@dataclasses.dataclass(frozen=True)
class Faults:
    """What `--inject` asks for; nothing by default."""

    faults: tuple[Fault, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Faults":
        """Raises ValueError for an unknown kind and for a step or count below 1."""
        found = []
        for part in text.split(",") if text else ():
            kind, _, place = part.partition("@")
            step, times, count = place.partition("x")
            if kind not in OF_ROWS and kind not in OF_STEPS:
                raise unknown("fault", kind, [*OF_ROWS, *OF_STEPS])
            numbers = [step, count] if times else [step]
            if not all(n.isdecimal() and int(n) for n in numbers):
                raise ValueError(f"inject={part!r}: expected {kind}@STEP or {kind}@STEPxCOUNT")
            found.append(Fault(kind, int(step), int(count) if times else 1))
        return cls(tuple(found))

    def batches(self, rows: Iterator[Rows], first: int) -> Iterator[Rows]:
        """The rows of the steps from `first` on, with their faults."""
        marked = any(fault.kind == "inf_gradient" for fault in self.faults)
        for step, batch in enumerate(rows, start=first):
            if marked:  # in every batch, or the programs would differ
                batch = batch | {INJECTED: np.zeros_like(batch["weights"])}
            for fault in self.faults:
                if fault.kind in OF_ROWS and fault.hits(step):
                    batch = OF_ROWS[fault.kind](batch)
            yield batch

    def after(self, step: int, checkpoints: Path, wait: Callable[[], Any]) -> None:
        """What is due once `step` was dispatched; `wait` returns when checkpoints are on disk."""
        for fault in self.faults:
            if fault.kind in OF_STEPS and fault.hits(step):
                if fault.kind == "corrupt_checkpoint":
                    wait()
                OF_STEPS[fault.kind](checkpoints)


# A fault on purpose -------------------------------------------------------------------------------

INJECTED = "injected"  # entry of a batch with a fault: [B, L], the layer counted from 1, else zeros


def inject_gradient(grads: Any, batch: Batch) -> Any:
    """The gradients; with a fault in the batch, infinite ones of that layer's mlp/down."""
    if INJECTED not in batch:
        return grads
    layer = jnp.max(batch[INJECTED]).astype(jnp.int32)

    def leaf(path, g):
        if jax.tree_util.keystr(path, simple=True, separator="/") != "layers/mlp/down/kernel":
            return g
        hit = jnp.arange(g.shape[0]).reshape(-1, *[1] * (g.ndim - 1)) == layer - 1
        return jnp.where(hit, jnp.inf, g)

    return jax.tree_util.tree_map_with_path(leaf, grads)
