"""TODO docstring."""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

_NON_FINITE = ("NaN", "Infinity", "-Infinity")


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads one of a run's files of JSON lines, also of a run that is still being written.

    Returns:
      One dict a line, in the file's order, with non-finite numbers as floats where they are a
      line's own values (inside lists and objects they stay strings). A torn last line,
      without a newline, is left out.

    Raises:
      ValueError: a whole line is no JSON object; the message names file and line.
    """
    return [parsed for _, parsed in whole_lines(Path(path))]


def whole_lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
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


def keep_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Cuts a file down to the whole lines that `keep` wants, byte for byte and atomically."""
    if not path.exists():
        return
    kept = b"".join(line for line, parsed in whole_lines(path) if keep(parsed))
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


def append_line(file: BinaryIO, record: Mapping[str, Any]) -> None:
    """Writes one line at once; an error names the file."""
    line = json.dumps(_finite(record), allow_nan=False, default=str).encode() + b"\n"
    try:
        written = file.write(line)
    except OSError as error:
        raise OSError(error.errno, f"cannot write: {error.strerror}", file.name) from error
    if written != len(line):
        raise OSError(f"only {written} of {len(line)} bytes of a line fitted into {file.name}")
