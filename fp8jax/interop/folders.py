"""The small files of a Hugging Face folder, and models that are named by such a folder: hf:DIR."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8jax.interop.config_json import load_json, to_model_config
from fp8jax.model.config import ModelConfig
from fp8jax.model.models import model_config, with_overrides

HUGGING_FACE = "hugging_face"  # the folder of a workdir that keeps the small files

_SHAPE = ("config.json", "generation_config.json")
_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def as_folder(spec: str) -> Path | None:
    """Returns the folder that `hf:DIR` names, and None for every other spec.

    Raises:
      ValueError: DIR is empty, missing, or not a folder.
    """
    kind, colon, path = spec.partition(":")
    if not (kind == "hf" and colon):
        return None
    folder = Path(os.path.expanduser(path))
    if not path:
        raise ValueError("hf: needs a folder: give hf:DIR")
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise ValueError(f"{spec}: {folder} {what}")
    return folder


def shape_of_model(name: str, overrides: Mapping[str, Any]) -> ModelConfig:
    """Returns the shape of a model of `MODELS`, or of the config.json of `hf:DIR`.

    Args:
      overrides: fields that replace those of the model; None keeps the model's own.

    Raises:
      ValueError: there is no such model or folder, or the fields contradict each other.
    """
    folder = as_folder(name)
    if folder is None:
        return model_config(name, dict(overrides))
    path = folder / "config.json"
    return with_overrides(to_model_config(load_json(path), str(path)), overrides)


def small_file(folder: Path, name: str) -> Path | None:
    """Returns the path of a file of the folder, None if there is none."""
    return folder / name if (folder / name).is_file() else None


def copy_small_files(source: Path, target: Path, *, words: bool) -> None:
    """Copies config.json and generation_config.json, and the tokenizer's files if `words`."""
    target.mkdir(parents=True, exist_ok=True)
    for name in (*_SHAPE, *(_TOKENIZER if words else ())):
        if (found := small_file(source, name)) is not None:
            shutil.copyfile(found, target / name)


def copy_tokenizer(path: Path, target: Path) -> None:
    """Copies a tokenizer.json of any name and folder, and the files beside it that belong to it."""
    target.mkdir(parents=True, exist_ok=True)
    for name in _TOKENIZER[1:]:
        if (found := small_file(path.parent, name)) is not None:
            shutil.copyfile(found, target / name)
    shutil.copyfile(path, target / "tokenizer.json")
