"""Writes TensorBoard's files, in the thread that calls and without importing torch.

tensorboardX's own `SummaryWriter` hands events to a thread through a queue of ten. If the disk is
full, that thread ends, and who writes the next ones waits for ever.

tensorboardX imports torch where that is installed, for methods that take tensors. A run writes
Python numbers only, and the import took 4 of the 6 seconds in which a command imports its modules.
"""

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

if "torch" in sys.modules:
    import tensorboardX  # noqa: F401  (the imports below take its modules)
else:
    sys.modules["torch"] = None  # type: ignore[assignment]  # as if it were not installed
    try:
        import tensorboardX  # noqa: F401
    finally:
        del sys.modules["torch"]

from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

_FLUSH_S = 30.0


_SPEED = ("step_s", "tokens_per_s", "mfu", "peak_memory_bytes")


def tag(name: str) -> str:
    """Returns the name of a curve: TensorBoard groups curves by what is before the first slash."""
    if name.startswith("valid_"):
        return f"validation/{name}"
    if "/" in name:
        return name
    return f"speed/{name}" if name in _SPEED else f"training/{name}"


class Curves:
    """One event file of a run, in a directory that is created if it is missing.

    Args:
      first_step: TensorBoard's files cannot be shortened; points from this step on that the
        directory holds already are hidden. 0 for a fresh run.

    Raises, from all methods:
      OSError: the file could not be written (because the disk is full, say).
    """

    def __init__(self, directory: Path, first_step: int):
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._file = EventsWriter(str(directory / "events"))
        self._flushed = time.monotonic()
        self._add(first_step, file_version="brain.Event:2")
        self._add(first_step, session_log=SessionLog(status=SessionLog.START))

    def scalars(self, step: int, values: Mapping[str, float | int]) -> None:
        """Writes the values of a step by their tags."""
        points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(step, summary=Summary(value=points))

    def text(self, step: int, name: str, text: str) -> None:
        """Writes a text, which TensorBoard shows as Markdown."""
        self._add(step, summary=summary.text(name, text))

    def close(self) -> None:
        with self._named():
            self._file.close()

    def _add(self, step: int, **what: Any) -> None:
        with self._named():
            self._file.write_event(Event(step=step, wall_time=time.time(), **what))
            if (now := time.monotonic()) - self._flushed > _FLUSH_S:
                self._file.flush()
                self._flushed = now

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Gives an OSError the directory's name."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._directory)) from error
