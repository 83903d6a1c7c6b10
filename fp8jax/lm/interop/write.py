"""Writes new folders whole or not at all, and tensors as safetensors files with an index.

A folder is made beside its target under another name and renamed at the end. So Ctrl-C, an error or
a full disk leaves nothing under the target's name.
"""

import contextlib
import json
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file
from tqdm import tqdm

from fp8jax.lm.data.hub import INDEX
from fp8jax.lm.interop.read import SINGLE
from fp8jax.lm.records.checkpoint_files import HASHES, hash_files

MAX_SHARD_BYTES = 5_000_000_000  # of a file, as in transformers

Tensors = Mapping[str, Callable[[], np.ndarray]]  # name -> a function that makes the tensor


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Gives a folder to write in, which becomes `target` when the context ends without an error.

    Raises:
      FileExistsError: the target exists.
      ValueError: the target ends in `..`.
      OSError: the folder beside it cannot be made.
    """
    refuse_existing(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.unfinished-{uuid.uuid4().hex[:8]}")
    try:
        unfinished.mkdir()
        yield unfinished
        refuse_existing(target)  # another program may have made it since
        unfinished.rename(target)
    except BaseException:  # Ctrl-C, too
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def refuse_existing(target: Path) -> None:
    """Raises FileExistsError if there is something under the target's name, ValueError for `..`."""
    if target.name == "..":  # which would make the folder before it
        raise ValueError(f"{target} ends in '..': name the folder that is to be made")
    if target.exists() or target.is_symlink():
        raise FileExistsError(f"{target} exists and is not overwritten")


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tensors(
    folder: Path, tensors: Tensors, *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Writes tensors in their order as safetensors files, with their hashes.

    One file is called model.safetensors; several have an index. No more than one file's tensors
    are held at a time.

    Args:
      max_shard_bytes: a file ends before the tensor with which it would become larger.

    Raises:
      ValueError: max_shard_bytes is not positive.
      OSError: a file cannot be written, because the disk is full, say.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"{max_shard_bytes=} must be positive")
    shards: list[list[str]] = []
    total = 0
    for shard in _shards(tensors, max_shard_bytes):
        # The pointers of arrays are written: they must be in order, without gaps.
        arrays = {name: np.ascontiguousarray(array) for name, array in shard.items()}
        _save(arrays, folder / f"{len(shards)}.safetensors")
        shards.append(list(arrays))
        total += sum(array.nbytes for array in arrays.values())
        shard.clear()  # before the next file's tensors are made
        arrays.clear()
    count = len(shards)
    files = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    files = [SINGLE] if count == 1 else files
    for i, file in enumerate(files):
        (folder / f"{i}.safetensors").rename(folder / file)
    if len(files) > 1:
        where = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    write_json(folder / HASHES, hash_files(folder, files))
    for file in files:  # safetensors lets only their owner read them
        shutil.copymode(folder / HASHES, folder / file)


def _save(arrays: dict[str, np.ndarray], path: Path) -> None:
    try:
        save_file(arrays, path, metadata={"format": "pt"})
    except SafetensorError as error:  # of the system's calls
        raise OSError(f"{path} cannot be written: {error}") from error


def _shards(tensors: Tensors, max_bytes: int) -> Iterator[dict[str, np.ndarray]]:
    """Makes the tensors, with a progress bar on a terminal; gives those of one file at a time."""
    shard: dict[str, np.ndarray] = {}
    size = 0
    for name, make in tqdm(tensors.items(), desc="writing", unit="tensor", disable=None):
        array = make()
        if shard and size + array.nbytes > max_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = array
        size += array.nbytes
    yield shard
