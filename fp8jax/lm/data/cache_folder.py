"""A folder of files that are computed once: built in a scratch folder, and renamed in one step.

Of all processes of a file system one builds, under a lock, and the others wait for it, and say so.

The name of a folder is a hash of everything on which its files depend, so a folder that exists has
the right files. Its manifest holds their sizes, by which a folder that was damaged later is noticed
and built again.
"""

import contextlib
import fcntl
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from absl import logging

MANIFEST = "manifest.json"
LOCKS = ".locks"  # in the cache: a file for each folder
SAY_EVERY_S = 15.0

_LOOK_EVERY_S = 0.2

Stats = list[dict[str, Any]]


def accept(stats: Stats) -> None:
    """Accepts any statistics."""


def read_or_build(
    folder: Path, write: Callable[[Path], Stats], check: Callable[[Stats], None] = accept
) -> Stats:
    """Returns the statistics of a cached folder, which is built if it is missing or damaged.

    Args:
      folder: its place; the folder above is created if it does not exist.
      write: writes all files into an empty folder, and returns statistics of them as JSON.
      check: raises ValueError if cached statistics show that the files are wrong.
    """
    stats = _read(folder, check)
    if stats is not None:
        return stats
    with turn(folder.parent / LOCKS / folder.name, f"the token cache {folder}") as waited:
        stats = _read(folder, check) if waited else None
        return _build(folder, write, check) if stats is None else stats


@contextlib.contextmanager
def turn(lock: Path, what: str) -> Iterator[bool]:
    """Holds a lock, for which it waits; yields whether it had to.

    On a file system without locks, and where nothing can be written, it holds none: then several
    build, and one is the first to rename.

    Args:
      lock: a file that is nothing but this lock; its folder is created.
      what: what its holder makes, for those who wait.
    """
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError:  # a cache that others have built may be read-only
        yield False
        return
    began, said = time.monotonic(), 0
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                seconds = time.monotonic() - began
                if seconds >= SAY_EVERY_S * said:
                    holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
                    line = f"waiting: {holder or 'another process'} makes {what} ({seconds:.0f} s)"
                    print(line, file=sys.stderr, flush=True)
                    said += 1
                time.sleep(_LOOK_EVERY_S)
            except OSError:
                break
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield said > 0
    finally:
        os.close(descriptor)  # releases the lock


def _read(folder: Path, check: Callable[[Stats], None]) -> Stats | None:
    """Returns the statistics of a cache, or None if there is no cache or it is damaged.

    A damaged cache is logged as a warning.
    """
    if not folder.exists():
        return None
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in manifest["files"]}
        if sizes != manifest["files"]:
            raise ValueError(f"sizes are {sizes}, expected {manifest['files']}")
        check(manifest["stats"])
        return list(manifest["stats"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        logging.warning("the token cache %s is damaged and will be rebuilt: %s", folder, error)
        return None


def _build(folder: Path, write: Callable[[Path], Stats], check: Callable[[Stats], None]) -> Stats:
    """Writes everything into a scratch folder, then renames it to `folder` in one step."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    # If anything ends the build early, Ctrl-C included, the scratch folder is deleted.
    with tempfile.TemporaryDirectory(prefix=".building-", dir=folder.parent) as scratch:
        new = Path(scratch, "corpus")
        new.mkdir()
        stats = write(new)
        manifest = {
            "files": {path.name: path.stat().st_size for path in sorted(new.iterdir())},
            "stats": stats,
        }
        (new / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        try:
            os.rename(new, folder)
        except OSError:
            # `folder` exists. Either another process was faster, and its files are the same, or
            # they are damaged: then they move to the scratch folder and are deleted with it.
            if _read(folder, check) is None:
                os.rename(folder, Path(scratch, "damaged"))
                os.rename(new, folder)
    return stats
