"""Workdirs in object stores, `gs://…` and `s3://…`, to read: copied, then read here.

Of a checkpoint the items asked for are copied, with the hashes of their files, which are checked
here as those of any checkpoint. A step without hashes does not count: they are uploaded last
(lm/training/stored_run.py). Nothing is written there.
"""

import hashlib
import json
from collections.abc import Collection, Iterator
from pathlib import Path

from absl import logging

from fp8jax.lm.data.cache_folder import LOCKS, turn
from fp8jax.lm.data.urls import as_path, changed_at, copy_files, is_url, size_of, store_errors
from fp8jax.lm.interop.folders import HUGGING_FACE
from fp8jax.lm.interop.write import new_folder
from fp8jax.lm.records.checkpoint_files import HASHES

CACHE = "~/.cache/fp8jax/workdirs"  # nothing deletes the copies

_META = "meta"  # the checkpointer's own item


def local_workdir(source: str, items: Collection[str] | None, step: int | None = None) -> Path:
    """Returns the path of a workdir: for a URL that of a copy of what is read of it.

    Args:
      source: a path, or a URL.
      items: of the checkpoint, that are copied; None for all.
      step: of the checkpoint; None for the newest, even if it turns out damaged.

    Raises:
      ValueError: the store does not give it, or has no such checkpoint; or the copy cannot be
        written.
    """
    if not is_url(source):
        return Path(source)
    with store_errors(source):
        root = as_path(source.rstrip("/"))
        folder = root / "checkpoints"
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        uploaded = (name for name in names if name.isdigit() and (folder / name / HASHES).exists())
        steps = [int(name) for name in uploaded]
        found = max(steps, default=None) if step is None else step
        if found not in steps:
            what = "checkpoints" if step is None else f"checkpoint of step {step}"
            raise ValueError(f"{source} has no {what}: name the workdir of a run")
        files = [path for path in [root / "config.json"] if path.exists()]
        files += _below(root / HUGGING_FACE)
        for path in (folder / str(found)).iterdir():
            if not path.is_dir():
                files.append(path)
            elif items is None or path.name in (*items, _META):
                files += _below(path)
        stats = [[str(path), size_of(path), changed_at(path)] for path in files]
        digest = hashlib.sha256(json.dumps([source, sorted(stats)]).encode()).hexdigest()
        cache = Path(CACHE).expanduser()
        copy = cache / f"{root.name}-{found}-{digest[:16]}"
        with turn(cache / LOCKS / copy.name, f"a copy of {source}"):
            if not copy.exists():
                logging.info("%s: copying step %d to %s", source, found, copy)
                with new_folder(copy) as new:
                    copy_files(files, root, new)
        return copy


def _below(folder: Path) -> Iterator[Path]:
    """Yields the files of a folder, and of those in it; none of one that does not exist."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir():
            yield from _below(path)
        else:
            yield path
