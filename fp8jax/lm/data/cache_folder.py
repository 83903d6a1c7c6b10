"""A folder of files that are computed once: built in a scratch folder, and renamed in one step.

The name of a folder is a hash of everything on which its files depend, so a folder that exists has
the right files. Its manifest holds their sizes, by which a folder that was damaged later is noticed
and built again.
"""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import logging

MANIFEST = "manifest.json"

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
    return _build(folder, write, check) if stats is None else stats


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
