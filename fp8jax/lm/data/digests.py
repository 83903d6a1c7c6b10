"""Hashes of the files of a corpus, kept beside the tokens, so that a later start reads no text.

A hash that is kept counts as long as the file is the same by its size, its number, and the times of
its content and of any change, which no program can set back. Times are coarse, so a file that
changed just before it was read is not kept: another edit could leave the same time.
"""

import contextlib
import hashlib
import json
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8jax.lm.data.cache_folder import turn
from fp8jax.lm.data.files import BYTE_ORDER_MARKS
from fp8jax.lm.data.urls import as_path, changed_at, is_url, size_of

FOLDER = ".digests"  # in the cache: one file for each set of files

_SETTLED_NS = 2 * 10**9

Digest = list[str]


def digests(
    files: Sequence[Sequence[Path]], cache_dir: str | os.PathLike[str]
) -> list[list[Digest]]:
    """Returns suffix and SHA-256 of each file; the suffix may decide how it is decompressed.

    A third entry marks files with a byte order mark, which caches of older versions kept as text.
    One process of a file system reads the files, and the others wait for its hashes.

    Raises:
      ValueError: the cache is a URL, where no lock can be held.
    """
    if is_url(cache_dir):
        raise ValueError(f"cache_dir={cache_dir} is a URL: name a folder of a mounted file system")
    paths = sorted({_absolute(path) for each in files for path in each})
    name = hashlib.sha256("\0".join(paths).encode("utf-8", "surrogateescape")).hexdigest()
    kept = Path(cache_dir).expanduser() / FOLDER / f"{name[:16]}.json"
    found = _kept(kept, paths)
    if len(found) < len(paths):
        with turn(kept.with_suffix(".lock"), "the hashes of the texts") as waited:
            if waited:
                found = _kept(kept, paths)
            if len(found) < len(paths):
                found = {path: found[path] if path in found else _read(path) for path in paths}
                _keep(kept, found)
    return [[found[_absolute(path)]["digest"] for path in each] for each in files]


def _kept(kept: Path, paths: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns what is kept of the files that have not changed since."""
    try:
        entries = json.loads(kept.read_text(encoding="utf-8"))
        return {
            path: entries[path]
            for path in paths
            if path in entries and entries[path]["file"] == _file(path)
        }
    except (OSError, ValueError, KeyError, TypeError):  # nothing, or damaged: read again
        return {}


def _absolute(path: Path) -> str:
    return os.fspath(path) if is_url(path) else os.path.abspath(path)


def _file(path: str) -> list[int]:
    """Returns size, number and times of a file."""
    if is_url(path):  # a store replaces an object as a whole
        url = as_path(path)
        return [size_of(url), 0, 0, int(changed_at(url) * 10**9)]
    return _numbers(os.stat(path))


def _numbers(stat: os.stat_result) -> list[int]:
    return [stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]


def _read(path: str) -> dict[str, Any]:
    """Returns the digest of a file, and what tells it from the file after a change."""
    now = time.time_ns()
    with as_path(path).open("rb") as file:
        numbers = _file(path) if is_url(path) else _numbers(os.fstat(file.fileno()))
        mark = ["without mark"] if file.read(4).startswith(BYTE_ORDER_MARKS) else []
        file.seek(0)
        digest = [Path(path).suffix, hashlib.file_digest(file, "sha256").hexdigest(), *mark]
    settled = now - max(numbers[2:]) > _SETTLED_NS
    return {"file": numbers, "digest": digest, "settled": settled}


def _keep(kept: Path, found: dict[str, dict[str, Any]]) -> None:
    """Writes the entries of settled files, in one step; a cache that cannot be written is none."""
    entries = {path: each for path, each in found.items() if each["settled"]}
    new = kept.with_name(f".writing-{socket.gethostname()}-{os.getpid()}")
    with contextlib.suppress(OSError):
        new.write_text(json.dumps(entries), encoding="utf-8")
        os.replace(new, kept)
