"""From a Hugging Face folder to a workdir, and back.

A converted workdir holds

    checkpoints/0     the parameters in float32, and a meta that names the folder
    config.json       where they come from
    hugging_face/     the folder's small files: config.json, tokenizer, chat template

Weights stay in the memory of the host. They are held once: as float32, and beside them the tensors
of one file.
"""

import os
from pathlib import Path

import jax

from fp8jax.device.mesh import MeshAxes, make_mesh
from fp8jax.interop.export import export_model
from fp8jax.interop.folders import HUGGING_FACE, as_folder, copy_small_files
from fp8jax.interop.trained import TrainedModel, load_model
from fp8jax.interop.write import MAX_SHARD_BYTES, new_folder, refuse_existing, write_json
from fp8jax.records.checkpoint import Checkpointer
from fp8jax.records.run_checkpoint import CHECKPOINT_VERSION, CONVERTED_FROM, NAMES, PARAMS


def import_folder(source: str, workdir: Path) -> TrainedModel:
    """Makes a workdir of a Hugging Face folder `hf:DIR`; returns its model.

    Raises:
      ValueError: the folder holds no model that is supported, or one that is damaged.
      FileExistsError: the workdir exists.
    """
    folder = as_folder(source)
    if folder is None:
        raise ValueError(f"{source!r} is no Hugging Face folder: give hf:DIR")
    refuse_existing(workdir)  # before the long work
    trained = load_model(source, mesh=_host())
    where = os.path.abspath(folder)
    meta = {
        "version": CHECKPOINT_VERSION, CONVERTED_FROM: where,
        NAMES: {"prefix": trained.prefix, "stored_head": trained.stored_head},
    }  # fmt: skip
    with new_folder(workdir) as made:
        with Checkpointer(made / "checkpoints", every=1, keep=1, keep_best=0) as checkpointer:
            checkpointer.save(0, {PARAMS: trained.variables["params"]}, meta, None)
        copy_small_files(folder, made / HUGGING_FACE, words=True)
        write_json(made / "config.json", {CONVERTED_FROM: where})
    return trained


def export(
    source: str, target: Path, fmt: str, *, scales: str | None = None, step: int | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> tuple[str, ...]:  # fmt: skip
    """Writes the model of a workdir or of `hf:DIR` as a Hugging Face folder; returns notes.

    Raises:
      ValueError: see `load_model` and `export_model`.
      FileExistsError: the target exists.
    """
    refuse_existing(target)  # before the long work
    trained = load_model(source, step=step, mesh=_host())
    return export_model(trained, target, fmt, scales=scales, max_shard_bytes=max_shard_bytes)


def _host() -> jax.sharding.Mesh:
    """The mesh of one processor: conversions take no accelerator's memory."""
    return make_mesh(MeshAxes(), jax.local_devices(backend="cpu")[:1])
