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
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import jax
import tensorboardX
import tqdm
from absl import logging

_SECONDS_BETWEEN_LINES = 10.0


_NON_FINITE = ("NaN", "Infinity", "-Infinity")


def _thousands(value: float) -> str:
    """12345.6 as 12.3k."""
    for factor, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.1f}{suffix}"
    return f"{value:.0f}"


# The scalars that the display shows, in this order; files and TensorBoard get all of them.
_SHOWN: dict[str, Callable[[float], str]] = {
    "loss": lambda x: f"loss {x:.4f}",
    "valid_loss": lambda x: f"valid_loss {x:.4f}",
    "valid_bits_per_byte": lambda x: f"valid_bits_per_byte {x:.4f}",
    "grad_norm": lambda x: f"grad_norm {x:.2f}",
    "learning_rate": lambda x: f"lr {x:.1e}",
    "tokens_per_s": lambda x: f"{_thousands(x)} tok/s",
    "mfu": lambda x: f"mfu {100 * x:.1f}%",
    "step_s": lambda x: f"{x:.3f} s/step",
    "peak_memory_bytes": lambda x: f"mem {x / 2**30:.1f} GiB",
}


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
            _keep_lines(path, lambda line: 0 < start_step and line["step"] <= start_step)
        _keep_lines(paths[2], lambda line: True)
        # Unbuffered: a line is in the file when write() returns, or the error is raised there.
        self._metrics_file, self._samples_file, self._events_file = (
            open(path, "ab", buffering=0) for path in paths
        )
        # TensorBoard files cannot be cut; they say from which step on older points do not count.
        self._tensorboard = tensorboardX.SummaryWriter(
            str(directory / "tensorboard"), purge_step=start_step + 1 if start_step else 0
        )
        self._display = _Display(num_steps, start_step)

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
        _append(self._metrics_file, {"step": step, **scalars})
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
        _append(self._samples_file, {"step": step, "text": text})
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
        _append(self._events_file, {"time": now, "step": step, "kind": kind, **fields})
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


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads one of a run's files of JSON lines, also of a run that is still being written.

    Returns:
      One dict a line, in the file's order, with non-finite numbers as floats where they are a
      line's own values (inside lists and objects they stay strings). A torn last line,
      without a newline, is left out.

    Raises:
      ValueError: a whole line is no JSON object; the message names file and line.
    """
    return [parsed for _, parsed in _whole_lines(Path(path))]


def _whole_lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Each line that ends in a newline, as bytes and parsed."""
    lines = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            break
        try:
            parsed = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(parsed, dict):
            raise ValueError(f"{path}:{number}: not a JSON object: {parsed!r}")
        for name, value in parsed.items():
            if isinstance(value, str) and value in _NON_FINITE:
                parsed[name] = float(value)
        lines.append((line, parsed))
    return lines


def _keep_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Cuts a file down to the whole lines that `keep` wants, byte for byte and atomically."""
    if not path.exists():
        return
    kept = b"".join(line for line, parsed in _whole_lines(path) if keep(parsed))
    if len(kept) == path.stat().st_size:
        return
    copy = path.with_name(path.name + ".tmp")
    with open(copy, "wb") as file:
        file.write(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(copy, path)


def _finite(value: Any) -> Any:
    """The same with each non-finite float as the string that stands for it."""
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    return value


def _append(file: BinaryIO, record: Mapping[str, Any]) -> None:
    """Writes one line at once; an error names the file."""
    line = json.dumps(_finite(record), allow_nan=False, default=str).encode() + b"\n"
    try:
        written = file.write(line)
    except OSError as error:
        raise OSError(error.errno, f"cannot write: {error.strerror}", file.name) from error
    if written != len(line):
        raise OSError(f"only {written} of {len(line)} bytes of a line fitted into {file.name}")


class _Display:
    """A bar where a person looks on, now and then a plain line elsewhere; both on stderr."""

    def __init__(self, num_steps: int, start_step: int):
        self._num_steps = num_steps
        self._bar = None
        if sys.stderr.isatty():
            self._bar = tqdm.tqdm(
                total=num_steps, initial=start_step, unit="step", dynamic_ncols=True
            )
        # Step and time of the first step shown: what came before it is compilation.
        self._first: tuple[int, float] | None = None
        self._last_shown = -math.inf
        self._not_shown: str | None = None

    def show(self, step: int, scalars: Mapping[str, float | int | None]) -> None:
        values = {name: scalars[name] for name in _SHOWN if name in scalars}
        parts = [_SHOWN[name](value) for name, value in values.items() if value is not None]
        if self._bar is not None:
            self._bar.set_postfix_str("  ".join(parts), refresh=False)
            self._bar.update(step - self._bar.n)
            return
        now = time.monotonic()
        if self._first is None:
            self._first = (step, now)
        elif step > self._first[0]:
            rate = (now - self._first[1]) / (step - self._first[0])
            left = datetime.timedelta(seconds=round(rate * (self._num_steps - step)))
            parts.append(f"left {left}")
        line = "  ".join([f"step {step}/{self._num_steps}", *parts])
        validated = any(name.startswith("valid") for name in scalars)
        due = now - self._last_shown >= _SECONDS_BETWEEN_LINES
        if due or validated or step >= self._num_steps:
            print(line, file=sys.stderr, flush=True)
            self._last_shown, self._not_shown = now, None
        else:
            self._not_shown = line

    def aside(self) -> Any:
        """A context in which other lines may be written to the terminal."""
        # external_write_mode takes the bar away and draws it again; it works without one too.
        return tqdm.tqdm.external_write_mode(file=sys.stderr)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._not_shown is not None:
            print(self._not_shown, file=sys.stderr, flush=True)
            self._not_shown = None
