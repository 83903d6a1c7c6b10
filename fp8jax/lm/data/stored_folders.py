"""Folders of models and tokenizers in object stores: the files that are asked for, copied here.

A copy's name is a hash of what the store lists, so that a folder with another file has another
copy. A process lists a folder once.
"""

import fnmatch
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from absl import logging

from fp8jax.lm.data.cache_folder import LOCKS, turn
from fp8jax.lm.data.urls import as_path, changed_at, copy_files, size_of, store_errors

CACHE = "~/.cache/fp8jax/folders"  # nothing deletes the copies

_TEMPLATES = "additional_chat_templates"  # the only folder that is looked into


def stored_folder(url: str, wanted: Iterable[str]) -> Path:
    """Returns the copy of a folder in a store, with the files that match, as far as it has them.

    Args:
      url: `s3://BUCKET/FOLDER` or `gs://BUCKET/FOLDER`.
      wanted: names, or patterns of them.

    Raises:
      ValueError: the store does not give the files, or has no such folder; or the copy cannot be
        written.
    """
    with store_errors(url):
        copy, files = _listed(url.rstrip("/"))
        patterns = tuple(wanted)
        names = [name for name in files if any(fnmatch.fnmatch(name, p) for p in patterns)]
        with turn(copy.parent / LOCKS / copy.name, f"a copy of {url}"):
            if missing := [name for name in names if not (copy / name).exists()]:
                logging.info("%s: copying %s to %s", url, ", ".join(missing), copy)
                _bring(missing, files, as_path(url.rstrip("/")), copy)
        return copy


def _bring(names: list[str], files: dict[str, Path], root: Path, copy: Path) -> None:
    """Copies files; each has its name only once it is whole."""
    copy.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=copy.parent) as scratch:
        copy_files([files[name] for name in names], root, Path(scratch))
        for name in names:
            (copy / name).parent.mkdir(exist_ok=True)
            os.replace(Path(scratch, name), copy / name)


@functools.cache
def _listed(url: str) -> tuple[Path, dict[str, Path]]:
    """Returns the place of the copy, and the objects of the folder by name."""
    root = as_path(url)
    if not root.is_dir():
        raise ValueError(f"{url} is not a folder")
    files = {path.name: path for path in root.iterdir() if not path.is_dir()}
    if (root / _TEMPLATES).is_dir():
        files |= {f"{_TEMPLATES}/{path.name}": path for path in (root / _TEMPLATES).iterdir()}
    stats = sorted([name, size_of(path), changed_at(path)] for name, path in files.items())
    digest = hashlib.sha256(json.dumps([url, stats]).encode()).hexdigest()[:16]
    return Path(CACHE).expanduser() / f"{root.name}-{digest}", files
