"""What a run says while it runs: a progress display, TensorBoard, and three files of JSON lines,
metrics.jsonl, samples.jsonl and events.jsonl.

`metrics.jsonl` holds one object a line, `step` first. Floats are written with all their digits
(Python's repr), so that two runs can be compared bit for bit; JSON has no non-finite numbers, so
they are the strings "NaN", "Infinity" and "-Infinity", which `read_jsonl` turns back into floats.

A run that is killed and resumed leaves metrics and samples that read as one uninterrupted run:
`step` counts finished optimizer steps, and lines beyond the step resumed from are dropped when the
files are opened.
`events.jsonl` says what happened and why; its lines are never dropped.
"""

import datetime
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import tensorboardX
from absl import logging

from fp8jax.records.display import Display
from fp8jax.records.jsonl import append_line, keep_lines


class Metrics:
    """Writes a run's scalars and events; a context manager.

    On every process but the first of a multi-host run all methods do nothing.
    """

    def __init__(self, workdir: str | os.PathLike[str], *, num_steps: int, start_step: int = 0):
        """Opens the files of `workdir`, made if missing.

        Args:
          workdir: the run's directory.
          num_steps: the step at which the run ends.
          start_step: the step resumed from, in [0, num_steps]: metrics and samples of a greater
            step, written by a killed run after its last checkpoint or before a rollback, are
            dropped, and so is a torn last line. At 0 the run is fresh: all are dropped.

        Raises:
          ValueError: start_step is out of range, or a file holds a line that is no JSON.
        """
        if not 0 <= start_step <= num_steps:
            raise ValueError(f"{start_step=} must lie between 0 and {num_steps=}")
        self._writes = jax.process_index() == 0
        if not self._writes:
            return
        directory = Path(workdir)
        directory.mkdir(parents=True, exist_ok=True)
        paths = [directory / f"{name}.jsonl" for name in ("metrics", "samples", "events")]
        for path in paths[:2]:
            keep_lines(path, lambda line: 0 < start_step and line["step"] <= start_step)
        keep_lines(paths[2], lambda line: True)
        # Unbuffered: a line is in the file when write() returns, or the error is raised there.
        self._metrics_file, self._samples_file, self._events_file = (
            open(path, "ab", buffering=0) for path in paths
        )
        # TensorBoard files cannot be cut; they say from which step on older points do not count.
        self._tensorboard = tensorboardX.SummaryWriter(
            str(directory / "tensorboard"), purge_step=start_step + 1 if start_step else 0
        )
        self._display = Display(num_steps, start_step)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, step: int, scalars: Mapping[str, float | int | None]) -> None:
        """Writes the scalars of one finished step.

        Args:
          step: the number of finished steps.
          scalars: Python numbers by name; None, for "unknown here", is written as null. `mfu` is a
            fraction of 1. TensorBoard gets finite numbers only.

        Raises:
          OSError: the line could not be written (a full disk); the message names the file.
        """
        if not self._writes:
            return
        append_line(self._metrics_file, {"step": step, **scalars})
        for name, value in scalars.items():
            if value is not None and math.isfinite(value):
                self._tensorboard.add_scalar(name, value, step)
        self._display.show(step, scalars)

    def sample(self, step: int, text: str) -> None:
        """Writes and logs a text that the model of that step made.

        Raises:
          OSError: the line could not be written (a full disk); the message names the file.
        """
        if not self._writes:
            return
        append_line(self._samples_file, {"step": step, "text": text})
        self._tensorboard.add_text("sample", text, step)
        with self._display.aside():
            logging.info("step %d: a sample:\n%s", step, text)

    def event(self, step: int, kind: str, **fields: Any) -> None:
        """Writes and logs what happened after `step` steps: resume, skip, rollback, …

        Args:
          step: the number of finished steps.
          kind: one word that names the event.
          **fields: what JSON can hold; anything else is written as its str().

        Raises:
          OSError: the line could not be written (a full disk); the message names the file.
        """
        if not self._writes:
            return
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        append_line(self._events_file, {"time": now, "step": step, "kind": kind, **fields})
        said = "".join(f"  {name}={value}" for name, value in fields.items())
        with self._display.aside():
            logging.info("step %d: %s%s", step, kind, said)

    def close(self) -> None:
        """Shows the last step and closes all files."""
        if self._writes:
            self._display.close()
            self._tensorboard.close()
            self._metrics_file.close()
            self._samples_file.close()
            self._events_file.close()
