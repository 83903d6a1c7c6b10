"""Detects damaged files of a checkpoint by their SHA-256 hashes.

Orbax 0.12 and TensorStore do not detect all damage (we damaged every file of a checkpoint to see).
They raise an error if a file of array data is cut short or missing. They do not notice a flipped
byte in such a file, because chunks have no checksum: wrong arrays are returned silently. Nor do
they notice a flipped byte within a string of a JSON item.
"""

import concurrent.futures
import hashlib
import json
import os
from pathlib import Path

from absl import logging

HASHES = "sha256.json"  # the file with the hashes, in the directory of each step


def list_files(path: Path) -> list[str]:
    """Returns the paths of all files of a step except `HASHES`, relative to its directory."""
    files = [file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()]
    return sorted(file for file in files if not file.startswith(HASHES))


def hash_files(path: Path, files: list[str]) -> dict[str, str]:
    """Returns the SHA-256 of each of the files below `path`, in hexadecimal digits."""

    def sha256(name: str) -> str:
        with open(path / name, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    # hashlib releases the interpreter lock, so threads run on several cores.
    with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        return dict(zip(files, pool.map(sha256, files), strict=True))


def find_damage(path: Path, part: str | tuple[str, ...]) -> str | None:
    """Compares the files of a step with its hashes.

    Args:
      path: the directory of the step.
      part: only check files whose relative path starts with this, or one of these; "" checks all.

    Returns:
      What is wrong, or None if the files are as they were saved or the step has no hashes.
    """
    if not (path / HASHES).exists():
        logging.info("checkpoint %s has no hashes: only Orbax's own checks apply", path)
        return None
    try:
        listed = json.loads((path / HASHES).read_text())
        expected = {name: listed[name] for name in listed.keys() if name.startswith(part)}
        if missing := sorted(expected.keys() - set(list_files(path))):
            return f"missing: {', '.join(missing)}"
        actual = hash_files(path, sorted(expected))
    except (OSError, ValueError, AttributeError) as error:
        return f"its files cannot be checked: {short_error(error)}"
    if changed := [name for name in actual if actual[name] != expected[name]]:
        return f"changed since it was saved: {', '.join(changed)}"
    return None


def short_error(error: Exception) -> str:
    """Returns an error's type and first 300 characters: TensorStore's messages fill pages."""
    return f"{type(error).__name__}: {error}"[:300]
