"""From a Hugging Face folder to a workdir, and back.

A converted workdir holds

    checkpoints/0     the parameters in float32, and a meta that names the folder
    config.json       where they come from
    hugging_face/     the folder's small files: config.json, tokenizer, chat template

Weights stay in the memory of the host. They are held once: as float32, and beside them the tensors
of one file.
"""

import atexit
import contextlib
import logging as python_logging
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from fp8jax.lm.data.hub import as_folder
from fp8jax.lm.interop.export import export_model
from fp8jax.lm.interop.folders import HUGGING_FACE, copy_small_files
from fp8jax.lm.interop.trained import TrainedModel, load_model
from fp8jax.lm.interop.write import MAX_SHARD_BYTES, new_folder, refuse_existing, write_json
from fp8jax.lm.mesh import MeshAxes, make_mesh
from fp8jax.lm.records.checkpoint import Checkpointer
from fp8jax.lm.records.checkpoint_files import short_error
from fp8jax.lm.records.deferred_signals import deferred_signals
from fp8jax.lm.records.run_checkpoint import CHECKPOINT_VERSION, CONVERTED_FROM, NAMES, PARAMS


def import_folder(source: str, workdir: Path) -> TrainedModel:
    """Makes a workdir of a Hugging Face folder `hf:DIR`; returns its model.

    Raises:
      ValueError: the folder holds no model that is supported, or one that is damaged.
      FileExistsError: the workdir exists.
      OSError: it cannot be written, because the disk is full, say.
    """
    folder = as_folder(source)
    if folder is None:
        raise ValueError(f"{source!r} is no Hugging Face folder: give hf:DIR")
    refuse_existing(workdir)  # before the long work
    trained = load_model(source, mesh=_host())
    where = os.path.abspath(folder)
    meta = {
        "version": CHECKPOINT_VERSION,
        CONVERTED_FROM: where,
        NAMES: {"prefix": trained.prefix, "stored_head": trained.stored_head},
    }
    with _quiet_writers(), new_folder(workdir) as made:
        try:
            _write_checkpoint(made / "checkpoints", trained.variables["params"], meta)
        except OSError as error:
            _remove(made)
            raise OSError(f"{workdir} cannot be written: {error}") from error
        copy_small_files(folder, made / HUGGING_FACE, with_tokenizer=True)
        write_json(made / "config.json", {CONVERTED_FROM: where})
    return trained


def _write_checkpoint(directory: Path, params: Any, meta: Mapping[str, Any]) -> None:
    """Writes the checkpoint of step 0. Signals take effect when it is written.

    Raises OSError with the reason if it cannot be written.
    """
    with deferred_signals():
        try:
            with Checkpointer(directory, every=1, keep=1, keep_best=0) as checkpointer:
                checkpointer.save(0, {PARAMS: params}, meta, None)
        except Exception as error:
            raise OSError(_reason(error)) from error


def _remove(folder: Path) -> None:
    """Removes a folder in which TensorStore still writes after an error.

    What it has begun to write cannot be canceled, and makes the folder anew. So the folder is
    removed until it has stayed away for half a second, and once more when the process ends.
    """
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    away = 0
    for _ in range(200):
        away = 0 if folder.exists() else away + 1
        if away == 5:
            return
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.1)


def _reason(error: Exception) -> str:
    """Returns what the system said; TensorStore's messages repeat long paths around it."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    return short_error(error) if code is None else os.strerror(int(code[1]))


@contextlib.contextmanager
def _quiet_writers() -> Iterator[None]:
    """Silences what is logged of an error besides raising it.

    Orbax logs it with its traceback in each of its threads. TensorStore tells event loops that are
    closed by then that its other writes have ended.
    """
    logger, before = python_logging.getLogger("absl"), sys.unraisablehook

    def is_not_orbax(record: python_logging.LogRecord) -> bool:
        return "/orbax/" not in record.pathname

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    logger.addFilter(is_not_orbax)
    sys.unraisablehook = hook
    try:
        yield
    finally:
        logger.removeFilter(is_not_orbax)
        sys.unraisablehook = before


def export(
    source: str,
    target: Path,
    fmt: str,
    *,
    scales: str | None = None,
    step: int | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    stop_ids: Callable[[TrainedModel], Sequence[int]] = lambda trained: (),
) -> tuple[str, ...]:
    """Writes the model of a workdir or of `hf:DIR` as a Hugging Face folder; returns notes.

    Args:
      stop_ids: what `export_model` takes, of the model that was read.

    Raises:
      ValueError: see `load_model` and `export_model`.
      FileExistsError: the target exists.
    """
    refuse_existing(target)  # before the long work
    trained = load_model(source, step=step, mesh=_host())
    return export_model(
        trained,
        target,
        fmt,
        scales=scales,
        max_shard_bytes=max_shard_bytes,
        stop_ids=stop_ids(trained),
    )


def _host() -> jax.sharding.Mesh:
    """The mesh of one processor: conversions take no accelerator's memory."""
    return make_mesh(MeshAxes(), jax.local_devices(backend="cpu")[:1])
