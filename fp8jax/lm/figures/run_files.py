"""What a run directory holds, as it is: of any version, half written, or while the run goes on.

Nothing of a run is required here but one of its logs. What cannot be read is left out and said in
`RunFiles.missing`. Those who go on with a run read it strictly (records/, lm/training/resume.py).
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8jax.lm.records.config_keys import with_new_keys
from fp8jax.lm.records.events import Event
from fp8jax.lm.records.jsonl import readable_lines
from fp8jax.telemetry.files import FOLDER, read_rows
from fp8jax.telemetry.rows import Row, Table

_LOGS = ("metrics.jsonl", "events.jsonl")
FILES = (*_LOGS, "config.json", "precision.txt", "data.txt")  # that are read, beside telemetry


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """What was found in the directory of one run.

    Attributes:
      path: the directory.
      name: its last part, for labels.
      config: all keys of the run's config, as that version of fp8jax had them; None if unknown.
      metrics: the lines of metrics.jsonl, by step; each has `step`, an int. Nothing else is sure.
      events: the lines of events.jsonl as they were written; each has `step` and `kind`.
      telemetry: the sampled rows, None if there are none.
      precision: the text of precision.txt: every GEMM of the compiled step; None if unknown.
      data: the text of data.txt: documents, bytes and tokens of each source; None if unknown.
      missing: sentences that say what is not there, and why where that is known.

    Example:
      >>> run = fp8jax.figures.RunFiles(path=Path("runs/a"), name="a", metrics=[{"step": 1}])
      >>> run.config is None
      True
    """

    path: Path
    name: str
    config: Mapping[str, Any] | None = None
    metrics: Sequence[Mapping[str, Any]] = ()
    events: Sequence[Mapping[str, Any]] = ()
    telemetry: Table | None = None
    precision: str | None = None
    data: str | None = None
    missing: tuple[str, ...] = ()


def read_run(workdir: str | os.PathLike[str]) -> RunFiles:
    """Returns what is in a run's directory; what is not there or cannot be read is in `missing`.

    Args:
      workdir: the directory, of a run that has ended or still goes on.

    Returns:
      A `RunFiles`.

    Raises:
      FileNotFoundError: there is no such directory.
      NotADirectoryError: it is a file.
      ValueError: the directory is not that of a run: it has neither metrics.jsonl nor events.jsonl.

    Example:
      >>> folder = Path(tempfile.mkdtemp())
      >>> _ = (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 4.0}\\n')
      >>> run = fp8jax.figures.read_run(folder)
      >>> run.metrics
      [{'step': 1, 'loss': 4.0}]
      >>> run.missing[0]
      'There is no events.jsonl.'
    """
    path = Path(workdir)
    if not path.exists():
        raise FileNotFoundError(f"no such directory: {path}")
    if not path.is_dir():
        raise NotADirectoryError(f"{path} is a file: name the directory of a run")
    require_run(path)
    missing: list[str] = []
    metrics = _log(path / "metrics.jsonl", {"step": int}, missing)
    events = _log(path / "events.jsonl", {"step": int, "kind": str}, missing)
    return RunFiles(
        path=path,
        name=path.resolve().name,
        config=_config(path / "config.json", missing),
        metrics=sorted(metrics, key=lambda line: line["step"]),
        events=events,
        telemetry=_telemetry(path / FOLDER, missing),
        precision=_text(path / "precision.txt", missing),
        data=_text(path / "data.txt", missing),
        missing=tuple(missing),
    )


def require_run(path: Path) -> None:
    """Raises ValueError if a directory, here or in a store, is not that of a run."""
    if not any((path / name).exists() for name in _LOGS):
        raise ValueError(
            f"{path} is not the directory of a run: it has no {' and no '.join(_LOGS)}"
        )


def has_ended(events: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether the last start in events.jsonl has an end: else it goes on or was killed.

    Versions that wrote no starts wrote no ends either: False.
    """
    ends = [event["kind"] == Event.END for event in events]
    starts = [event["kind"] == Event.START for event in events]
    return True in ends and (True not in starts or _last(ends) > _last(starts))


def _last(flags: Sequence[bool]) -> int:
    return max(index for index, flag in enumerate(flags) if flag)


def _log(path: Path, keys: Mapping[str, type], missing: list[str]) -> list[dict[str, Any]]:
    """The lines of a log that have all of `keys`, which are of those types."""
    if not path.exists():
        missing.append(f"There is no {path.name}.")
        return []
    lines, problems = readable_lines(path)
    whole = [line for line in lines if all(k in line and type(line[k]) is keys[k] for k in keys)]
    if lost := len(lines) - len(whole):
        count = "1 line" if lost == 1 else f"{lost} lines"
        problems.append(f"{path.name}: {count} without {' and '.join(keys)}")
    missing += [f"{problem}. Left out." for problem in problems]
    if not whole:
        missing.append(f"{path.name} has no lines yet.")
    return whole


def _config(path: Path, missing: list[str]) -> dict[str, Any] | None:
    text = _text(path, missing)
    if text is None:
        return None
    try:
        config = json.loads(text)
    except ValueError as error:
        missing.append(f"{path.name} is not JSON: {error}.")
        return None
    if not isinstance(config, dict):
        missing.append(f"{path.name} is not a JSON object.")
        return None
    return with_new_keys(config)


def _text(path: Path, missing: list[str]) -> str | None:
    if not path.exists():
        missing.append(f"There is no {path.name}: the run is older, or has not begun to train.")
        return None
    return path.read_text(encoding="utf-8", errors="replace").rstrip("\n")


def _telemetry(folder: Path, missing: list[str]) -> Table | None:
    """The rows of all files that can be read; one may vanish meanwhile if the run resumes."""
    rows: list[Row] = []
    files = sorted(folder.glob("step_*.parquet"))
    for file in files:
        try:
            rows += read_rows(file).rows
        except (OSError, ValueError, TypeError) as error:  # pyarrow's errors are of these classes
            missing.append(f"{FOLDER}/{file.name} cannot be read: {' '.join(str(error).split())}")
    if not files:
        missing.append(
            "There is no telemetry: nothing is known of single tensors. A run that is trained with"
            " --config.telemetry.every=50 samples them."
        )
    return Table(tuple(rows)) if rows else None
