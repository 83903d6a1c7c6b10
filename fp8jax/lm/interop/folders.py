"""The small files of a Hugging Face folder, and models that are named by one, `hf:DIR`."""

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import logging

from fp8jax.lm.data.hub import (
    BESIDE_TOKENIZER,
    SHAPE_FILES,
    TOKENIZER_FILES,
    as_folder,
    tokenizer_json,
)
from fp8jax.lm.interop.config_json import load_json, to_model_config, unknown_keys
from fp8jax.lm.interop.write import write_json
from fp8jax.lm.model.config import ModelConfig
from fp8jax.lm.model.models import model_config, with_overrides
from fp8jax.lm.records.differences import config_difference
from fp8jax.lookup import brief

HUGGING_FACE = "hugging_face"  # the folder of a workdir that keeps the small files
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # of a config.json


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
    config = load_json(path)
    if (folder / "checkpoints").is_dir() and not config.keys() & {"architectures", "model_type"}:
        raise ValueError(f"{name} is a workdir, not a Hugging Face folder: name it without hf:")
    return with_overrides(to_model_config(config, str(path)), overrides)


def warn_of_unknown_keys(name: str) -> None:
    """Logs the keys of the config.json of `hf:DIR` that nobody reads; nothing for other models."""
    folder = as_folder(name)
    if folder is not None and (unknown := unknown_keys(load_json(folder / "config.json"))):
        logging.warning("%s: keys of config.json that are not read: %s", name, ", ".join(unknown))


def small_file(folder: Path, name: str) -> Path | None:
    """Returns the path of a file of the folder, None if there is none."""
    return folder / name if (folder / name).is_file() else None


def copy_small_files(source: Path, target: Path, *, with_tokenizer: bool) -> None:
    """Copies config.json and generation_config.json, and the tokenizer's files if asked for."""
    target.mkdir(parents=True, exist_ok=True)
    for name in (*SHAPE_FILES, *(TOKENIZER_FILES if with_tokenizer else ())):
        if (found := small_file(source, name)) is not None:
            shutil.copyfile(found, target / name)
    if with_tokenizer:
        _copy_further_templates(source, target)


def _copy_further_templates(source: Path, target: Path) -> None:
    for path in source.glob("additional_chat_templates/*.jinja"):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)


def end_ids(folder: Path, vocab_size: int) -> list[int]:
    """Returns the ids that end a text by the folder's generation_config.json, or without one by
    its config.json, as transformers does; [] if neither says.

    Raises ValueError for anything else than an id, a list of ids, or null.
    """
    path = small_file(folder, "generation_config.json") or small_file(folder, "config.json")
    settings = {} if path is None else load_json(path)
    ends = settings["eos_token_id"] if "eos_token_id" in settings else None
    ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        raise ValueError(
            f"{path}: eos_token_id must be ids of tokens, from 0 to {vocab_size - 1}, got "
            f"{brief(ends)}"
        )
    return ids


def keep_small_files(record: Mapping[str, Any], workdir: Path) -> None:
    """Copies what a run's config names by path into the workdir, so that it needs nothing else.

    These are the config.json of a model `hf:DIR`, and the files of a tokenizer `bpe:PATH` or
    `hf:DIR`. The ids of tokens that the folder names are kept only with its own tokenizer.

    Args:
      record: the config as JSON has it.
    """
    kept = workdir / HUGGING_FACE
    folder = as_folder(record["model"])
    if folder is not None and not _same(folder, kept):
        copy_small_files(folder, kept, with_tokenizer=False)
        if not _is_tokenizer_of(folder, record["tokenizer"]):
            _drop_ids(kept)
    if record["tokenizer"].startswith(("bpe:", "hf:")):
        path = tokenizer_json(record["tokenizer"])
        if not _same(path.parent, kept):
            _copy_tokenizer(path, kept)


def kept_differences(record: Mapping[str, Any], workdir: Path) -> list[str]:
    """Returns how the model `hf:DIR` of a config differs from the one that a workdir keeps."""
    kept = workdir / HUGGING_FACE / "config.json"
    if as_folder(record["model"]) is None or not kept.is_file():
        return []
    overrides = record["model_overrides"]
    before = dataclasses.asdict(shape_of_model(f"hf:{kept.parent}", overrides))
    now = dataclasses.asdict(shape_of_model(record["model"], overrides))
    return config_difference(before, now)


def _same(folder: Path, other: Path) -> bool:
    return other.exists() and folder.samefile(other)


def _is_tokenizer_of(folder: Path, name: str) -> bool:
    """Returns whether a tokenizer is the one in the folder."""
    own = small_file(folder, "tokenizer.json")
    if own is None or not name.startswith(("bpe:", "hf:")):
        return False
    return tokenizer_json(name).read_bytes() == own.read_bytes()


def _drop_ids(kept: Path) -> None:
    """Drops from a copy of a folder's files what would be other tokens of another tokenizer."""
    (kept / "generation_config.json").unlink(missing_ok=True)
    config = load_json(kept / "config.json")
    nulls = {key: None for key in _TOKEN_IDS if key in config}
    write_json(kept / "config.json", config | nulls)


def _copy_tokenizer(path: Path, target: Path) -> None:
    """Copies a tokenizer.json of any name, and the files beside it that belong to it."""
    target.mkdir(parents=True, exist_ok=True)
    for name in BESIDE_TOKENIZER:
        if (found := small_file(path.parent, name)) is not None:
            shutil.copyfile(found, target / name)
    shutil.copyfile(path, target / "tokenizer.json")
    _copy_further_templates(path.parent, target)
