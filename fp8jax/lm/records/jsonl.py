"""Files of JSON lines: one JSON object per line, appended while a run goes on.

Floats are written with all their digits (Python's repr), so that two runs can be compared bit for
bit. JSON has no non-finite numbers: they are written as the strings "NaN", "Infinity" and
"-Infinity", which `read_jsonl` converts back to floats.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

_NON_FINITE = ("NaN", "Infinity", "-Infinity")


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads a file of JSON lines; a run may still be writing it.

    Returns:
      One dict per line, in the order of the file. An incomplete last line, without a newline, is
      left out. Non-finite numbers are floats again if they are values of the line's own object;
      inside nested lists and objects they stay strings.

    Raises:
      ValueError: a complete line is not a JSON object. The message names the file and the line.
    """
    return list(each_line(path))


def each_line(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yields what `read_jsonl` returns, and holds one line at a time.

    Raises:
      ValueError: as `read_jsonl`, when it comes to that line.
    """
    for number, line in _whole_lines(Path(path)):
        yield _parse(line, f"{path}:{number}")


def _whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields (number from 1, bytes) of each line that ends with a newline."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                yield number, line


def readable_lines(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns what `read_jsonl` does, without the lines that it would raise for.

    For those who look at a run, and not for those who go on with it.

    Returns:
      The objects, and a message for each line that is not a JSON object. An incomplete last line
      has none: a run may be writing it.
    """
    lines, problems = [], []
    for number, line in _whole_lines(path):
        try:
            lines.append(_parse(line, f"{path.name}:{number}"))
        except ValueError as error:
            problems.append(str(error))
    return lines, problems


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        parsed = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{where}: not a JSON object: {parsed!r}")
    for name, value in parsed.items():
        if isinstance(value, str) and value in _NON_FINITE:
            parsed[name] = float(value)
    return parsed


def keep_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> list[str]:
    """Atomically drops the lines of a file for which `keep` is false.

    Drops damaged lines, too: what is not a JSON object, or lacks a key that `keep` reads; and an
    incomplete last line. The other lines stay the same byte for byte. Does nothing if the file does
    not exist. Reads the file line by line: that of a long run has gigabytes.

    Returns:
      What was wrong with each damaged line but an incomplete last one, with its number.
    """
    if not path.exists():
        return []
    damaged, kept, size = [], bytearray(), 0
    for number, line in _whole_lines(path):
        try:
            keeps = keep(_parse(line, f"line {number}"))
        except (ValueError, KeyError, TypeError) as error:
            keeps = False
            missing = f"line {number}: no {error}"
            damaged.append(missing if isinstance(error, KeyError) else str(error))
        kept.append(keeps)
        size += len(line) * keeps
    if size == path.stat().st_size:
        return damaged
    copy = path.with_name(path.name + ".tmp")
    with open(copy, "wb") as file:
        for (_, line), wanted in zip(_whole_lines(path), kept, strict=True):
            if wanted:
                file.write(line)
        file.flush()
        os.fsync(file.fileno())
    os.replace(copy, path)
    return damaged


def _finite(value: Any) -> Any:
    """Returns `value` with every non-finite float replaced by its string."""
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    return value


def append_line(file: BinaryIO, record: Mapping[str, Any]) -> None:
    """Appends one line in a single write.

    Args:
      file: opened without a buffer.
      record: the object; a value that JSON cannot represent is written as its str().

    Raises:
      OSError: the line could not be written. The message names the file.
    """
    line = json.dumps(_finite(record), allow_nan=False, default=str).encode() + b"\n"
    try:
        written = file.write(line)
    except OSError as error:
        raise OSError(error.errno, f"cannot write: {error.strerror}", file.name) from error
    if written != len(line):
        raise OSError(
            f"wrote only {written} of {len(line)} bytes of a line to {file.name}: is the disk full?"
        )
