"""TODO docstring."""

import concurrent.futures
import hashlib
import json
import os
from pathlib import Path

from absl import logging

HASHES = "sha256.json"


def list_files(path: Path) -> list[str]:
    """All files of a step but the hashes, relative to it."""
    files = [file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()]
    return sorted(file for file in files if not file.startswith(HASHES))


def hash_files(path: Path, files: list[str]) -> dict[str, str]:
    def sha256(name: str) -> str:
        with open(path / name, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    # Hashing lets go of the interpreter lock, so that threads use the cores.
    with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        return dict(zip(files, pool.map(sha256, files), strict=True))


def find_damage(path: Path, part: str) -> str | None:
    """What the hashes of a step say against it; None where it is sound or has no hashes.

    Looks at the files below `part`, "" for all.
    """
    if not (path / HASHES).exists():
        logging.info("checkpoint %s has no hashes: only Orbax checks it", path)
        return None
    try:
        listed = json.loads((path / HASHES).read_text())
        expected = {name: listed[name] for name in listed.keys() if name.startswith(part)}
        if missing := sorted(expected.keys() - set(list_files(path))):
            return f"missing: {', '.join(missing)}"
        found = hash_files(path, sorted(expected))
    except (OSError, ValueError, AttributeError) as error:
        return f"its files cannot be checked: {short_error(error)}"
    if changed := [name for name in found if found[name] != expected[name]]:
        return f"changed since it was saved: {', '.join(changed)}"
    return None


def short_error(error: Exception) -> str:
    """TensorStore's messages run over pages."""
    return f"{type(error).__name__}: {error}"[:300]
