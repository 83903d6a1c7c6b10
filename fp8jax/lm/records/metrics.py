"""Records the progress of a run: on the display, in TensorBoard and in three files of JSON lines.

    metrics.jsonl    one object per step: `step`, `time`, then its scalars
    samples.jsonl    one object per sample text: `step` and `text`
    events.jsonl     what happened and why (lm/records/events.py)

`step` counts finished optimizer steps. When the files are opened, metrics and samples of steps
later than the step that the run resumes from are dropped: after a crash and a resume they read as
those of one uninterrupted run. Lines of events.jsonl are never dropped. jsonl.py says how numbers
are written. Without `time` (ISO 8601, UTC) and the speeds, metrics of equal runs are equal bytes.
"""

import datetime
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import jax
from absl import logging

from fp8jax.lm.records.display import Display
from fp8jax.lm.records.event_words import in_words
from fp8jax.lm.records.events import Event
from fp8jax.lm.records.jsonl import append_line, keep_lines
from fp8jax.lm.records.sinks import Sink
from fp8jax.lm.records.tensorboard import Curves, tag


class Metrics:
    """Writes a run's scalars, samples and events; a context manager.

    In a multi-host run only the first process writes. On the others all methods do nothing.

    Attributes:
      damaged: file name -> what was wrong with lines of it that were dropped.
      missing: (first, last) step of each gap in the metrics of the steps up to `start_step`.
    """

    damaged: dict[str, list[str]]
    missing: list[tuple[int, int]]

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        *,
        num_steps: int,
        start_step: int = 0,
        sink: Sink | None = None,
    ):
        """Opens the files in `workdir`, and creates the directory if it does not exist.

        Args:
          workdir: the run's directory.
          num_steps: the step at which the run ends.
          start_step: the step that the run resumes from, in [0, num_steps]; 0 for a fresh run.
            Metrics and samples of later steps are dropped: a killed run wrote them after its last
            checkpoint, or this run before a rollback. A fresh run drops all. Damaged lines and an
            incomplete last one are dropped too.
          sink: takes the scalars as well (sinks.py), None for none; closed with the files.

        Raises:
          ValueError: start_step is out of range.
        """
        if not 0 <= start_step <= num_steps:
            raise ValueError(f"{start_step=} must lie between 0 and {num_steps=}")
        self.damaged, self.missing = {}, []
        self._writes = jax.process_index() == 0
        if not self._writes:
            return
        directory = Path(workdir)
        directory.mkdir(parents=True, exist_ok=True)
        paths = [directory / f"{name}.jsonl" for name in ("metrics", "samples", "events")]
        if start_step:
            self._keep_until(start_step, *paths[:2])
        else:
            for path in paths[:2]:
                path.unlink(missing_ok=True)
        self._note_damage(paths[2], keep_lines(paths[2], lambda line: True))
        self._metrics_file, self._events_file = _opened(paths[0]), _opened(paths[2])
        # Most runs draw no samples, and have no file of them.
        self._samples = paths[1]
        self._samples_file: BinaryIO | None = None
        self._curves = Curves(directory / "tensorboard", start_step + 1 if start_step else 0)
        self._sink = sink
        self._display = Display(num_steps)

    def _keep_until(self, start_step: int, metrics: Path, samples: Path) -> None:
        """Drops the lines of later steps, and notes what is damaged or missing."""
        newest = 0

        def keep(line: dict[str, Any]) -> bool:
            nonlocal newest
            step = line["step"]
            if step > start_step:
                return False
            if step > newest + 1:
                self.missing.append((newest + 1, step - 1))
            newest = max(newest, step)
            return True

        self._note_damage(metrics, keep_lines(metrics, keep))
        if newest < start_step:
            self.missing.append((newest + 1, start_step))
        self._note_damage(samples, keep_lines(samples, lambda line: line["step"] <= start_step))

    def _note_damage(self, path: Path, problems: list[str]) -> None:
        if problems:
            self.damaged[path.name] = problems

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, step: int, scalars: Mapping[str, float | int | None]) -> None:
        """Writes the scalars of one finished step.

        Args:
          step: the number of finished steps.
          scalars: Python numbers by name. None, for a number that is not known here, is written
            as null. `mfu` is a fraction of 1. TensorBoard gets only finite numbers.

        Raises:
          OSError: the line could not be written (because the disk is full, say). The message names
            the file.
        """
        if not self._writes:
            return
        append_line(self._metrics_file, {"step": step, "time": _now(), **scalars})
        self.curves(step, scalars)
        self._display.show(step, scalars)

    def curves(self, step: int, scalars: Mapping[str, float | int | None]) -> None:
        """Writes the finite ones of some scalars to TensorBoard and to the sink alone."""
        if not self._writes:
            return
        finite = {k: v for k, v in scalars.items() if v is not None and math.isfinite(v)}
        self._curves.scalars(step, {tag(name): value for name, value in finite.items()})
        if self._sink is not None:
            self._sink.log(finite, step)

    def describe(self, step: int, what: str, text: str) -> None:
        """Writes what the run is to TensorBoard alone, such as its config, as preformatted text."""
        if self._writes:
            lines = "\n".join(f"    {line}" for line in text.splitlines())
            self._curves.text(step, what, lines)

    def sample(self, step: int, text: str) -> None:
        """Writes and logs a text that the model generated after `step` steps.

        Raises:
          OSError: as `write`.
        """
        if not self._writes:
            return
        if self._samples_file is None:
            self._samples_file = _opened(self._samples)
        append_line(self._samples_file, {"step": step, "text": text})
        self._curves.text(step, "sample", text)
        self.say(f"step {step}: sample:\n{text}")

    def event(self, step: int, kind: Event, **fields: Any) -> None:
        """Writes what happened after `step` steps, and says it in words (event_words.py).

        Args:
          step: the number of finished steps.
          kind: lm/records/events.py.
          **fields: the fields of the event. A value that JSON cannot represent is written as its
            str().

        Raises:
          OSError: as `write`.
        """
        if not self._writes:
            return
        append_line(self._events_file, {"time": _now(), "step": step, "kind": kind, **fields})
        if words := in_words(kind, fields):
            self.say(f"step {step}: {words}")

    def say(self, text: str) -> None:
        """Logs a text, above the progress bar if there is one."""
        if self._writes:
            logging.info("%s", text)

    def say_last(self, text: str) -> None:
        """Logs a text after the last step's line."""
        if self._writes:
            self._display.close()
            self.say(text)

    def close(self) -> None:
        """Shows the last step on the display, and closes all files."""
        if self._writes:
            self._display.close()
            self._metrics_file.close()
            self._events_file.close()
            if self._samples_file is not None:
                self._samples_file.close()
            if self._sink is not None:
                self._sink.finish()
            self._curves.close()


def _opened(path: Path) -> BinaryIO:
    """Opens a file of lines, unbuffered: write() returns when the line is there, or raises."""
    return open(path, "ab", buffering=0)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
