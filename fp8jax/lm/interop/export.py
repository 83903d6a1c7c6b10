"""Takes a trained model out, to a Hugging Face folder in one of `EXPORTS`' formats.

    bf16, float32, float16           the weights, rounded to nearest
    fp8_block, compressed_tensors    codes and scales for servers (fp8_format.py), the rest in bf16

A format is a function of the model and its tensors in float32. It says at once what it refuses,
before anything is written, and gives functions that make the tensors one by one.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from fp8jax.lm.data.bpe import BPETokenizer
from fp8jax.lm.data.byte_tokenizer import ByteTokenizer, Tokenizer
from fp8jax.lm.interop.byte_tokenizer_json import byte_level_bpe, tokenizer_config
from fp8jax.lm.interop.config_json import family_for, load_json, to_config_json, to_model_config
from fp8jax.lm.interop.folders import copy_small_files, end_ids, small_file
from fp8jax.lm.interop.fp8_format import FP8_FORMATS, fp8_tensors, plan_export
from fp8jax.lm.interop.tensor_names import HEAD, names_for, tensors_of
from fp8jax.lm.interop.trained import TrainedModel
from fp8jax.lm.interop.write import MAX_SHARD_BYTES, Tensors, new_folder, write_json, write_tensors
from fp8jax.lm.model.config import ModelConfig
from fp8jax.lookup import lookup

QUANTIZATION = "quantization_config"  # the key of config.json that a format of FP8 sets
QUANTIZATIONS = (QUANTIZATION, "compression_config")  # and that of old files


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """What a format writes.

    Attributes:
      tensors: name -> a function that makes the tensor; called once each, in this order.
      config: keys of config.json that the format sets.
      notes: lines for people.
    """

    tensors: Tensors
    config: Mapping[str, Any]
    notes: tuple[str, ...] = ()


# (the model, its tensors in float32, the rule of scales or None) -> what is written
Format = Callable[[TrainedModel, Tensors, str | None], Export]


def _rounded(name: str, dtype: Any) -> Format:
    """A format that rounds all tensors to a dtype; `name` is torch's."""
    dtype = np.dtype(dtype)

    def export(trained: TrainedModel, tensors: Tensors, scales: str | None) -> Export:
        if scales is not None:
            raise ValueError(f"scales={scales} is for FP8 formats: {name} has none")
        made = {key: _cast(key, make, dtype) for key, make in tensors.items()}
        return Export(tensors=made, config={"dtype": name})

    return export


def _cast(name: str, make: Callable[[], np.ndarray], dtype: np.dtype) -> Callable[[], np.ndarray]:
    def cast() -> np.ndarray:
        array = make()
        with np.errstate(over="ignore"):
            rounded = array.astype(dtype)
        if (lost := ~np.isfinite(rounded)).any():
            if not np.isfinite(array).all():
                raise ValueError(f"{name} has NaN or infinities: nothing to export")
            largest = np.abs(array[lost]).max()
            raise ValueError(f"{name} has the value {largest:g}, too large for {dtype.name}")
        return rounded

    return cast


def _quantized(fmt: str) -> Format:
    def export(trained: TrainedModel, tensors: Tensors, scales: str | None) -> Export:
        plan = plan_export(
            trained.model.config,
            trained.model.resolved_policy,
            fmt,
            scales=scales,
            prefix=prefix_of(trained),
        )
        rounded = {
            name: make if name in plan.casts else _cast(name, make, np.dtype(ml_dtypes.bfloat16))
            for name, make in tensors.items()
        }
        config = {"dtype": "bfloat16", QUANTIZATION: plan.quantization_config()}
        return Export(tensors=fp8_tensors(plan, rounded), config=config, notes=plan.notes)

    return export


EXPORTS: dict[str, Format] = {
    "bf16": _rounded("bfloat16", ml_dtypes.bfloat16),
    "float32": _rounded("float32", np.float32),
    "float16": _rounded("float16", np.float16),
    **{fmt: _quantized(fmt) for fmt in FP8_FORMATS},
}


def export_model(
    trained: TrainedModel,
    target: Path,
    fmt: str,
    *,
    scales: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    stop_ids: Sequence[int] = (),
) -> tuple[str, ...]:
    """Writes a Hugging Face folder; returns the format's notes.

    Weights may lie on any mesh; one tensor at a time is gathered. Names of tensors and the small
    files are those of the folder that the model came from, if it came from one.

    Args:
      scales: of FP8 formats, a key of `SCALE_RULES` (fp8_format.py); None for the format's own.
      stop_ids: ids that end a text besides those that the model came with, such as the one that
        ends an assistant's turn; servers read them from generation_config.json.

    Raises:
      ValueError: the format is unknown or refuses the model; no architecture of Hugging Face
        computes what it does.
      FileExistsError: the target exists.
    """
    make = lookup("export format", fmt, EXPORTS)
    config = config_of(trained)
    export = make(trained, float32_tensors(trained), scales)
    with new_folder(target) as folder:
        write_tensors(folder, export.tensors, max_shard_bytes=max_shard_bytes)
        _write_small_files(trained, folder)
        if stop_ids:
            _add_stop_ids(trained, folder, stop_ids)
        write_json(folder / "config.json", _with_keys(config, export.config))
    return export.notes


def float32_tensors(trained: TrainedModel) -> Tensors:
    """Returns name -> a function that makes the tensor, in float32 and Hugging Face's layout."""
    model = trained.model.config
    leaves = {
        jax.tree_util.keystr(keys, simple=True, separator="/"): leaf
        for keys, leaf in jax.tree_util.tree_leaves_with_path(trained.variables["params"])
    }
    tensors = dict(tensors_of(model, leaves.__getitem__, prefix_of(trained)))
    if trained.stored_head:
        tensors[HEAD] = lambda: np.asarray(leaves["embedding"])
    return tensors


def prefix_of(trained: TrainedModel) -> str:
    """Returns what the names of tensors begin with: as in the folder that the model came from."""
    own = names_for(trained.model.config).prefix
    return own if trained.prefix is None else trained.prefix


def config_of(trained: TrainedModel) -> dict[str, Any]:
    """Returns the model's config.json, without the keys that a format sets.

    It is the one that the model came from, as long as it describes this model; else a new one.

    Raises:
      ValueError: no architecture of Hugging Face computes what the model does.
    """
    model = trained.model.config
    family_for(model)
    kept = None if trained.files is None else small_file(trained.files, "config.json")
    if kept is not None:
        config = load_json(kept)
        if to_model_config(config, str(kept)) == _as_hugging_face(model):
            own = _special_ids(trained.tokenizer)
            # None where the run has another tokenizer than the folder (`keep_small_files`).
            ids = {key: own[key] for key in own if key in config and config[key] is None}
            left = {key: value for key, value in config.items() if key not in QUANTIZATIONS}
            return left if trained.record is None else left | ids
    length = 2048 if trained.record is None else trained.record["seq_len"]
    config = to_config_json(model, max_length=length)
    return config | _special_ids(trained.tokenizer)


def _as_hugging_face(model: ModelConfig) -> ModelConfig:
    """Smooth-SwiGLU is SwiGLU for those who do not quantize."""
    if model.mlp == "smooth_swiglu":
        return dataclasses.replace(model, mlp="swiglu")
    return model


def _special_ids(text_tokenizer: Tokenizer | None) -> dict[str, int]:
    return (
        {}
        if text_tokenizer is None
        else {"bos_token_id": text_tokenizer.bos, "eos_token_id": text_tokenizer.eos}
    )


def _with_keys(config: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Sets keys of a config.json; dtype under its older name, too, if it has that name."""
    added = dict(keys)
    if "torch_dtype" in config and "dtype" in keys:
        added["torch_dtype"] = keys["dtype"]
        if "dtype" not in config:
            del added["dtype"]
    return {**config, **added}


def _add_stop_ids(trained: TrainedModel, folder: Path, stop_ids: Sequence[int]) -> None:
    assert trained.tokenizer is not None  # whose ids they are
    path = folder / "generation_config.json"
    ends = end_ids(folder, trained.model.config.vocab_size) or [trained.tokenizer.eos]
    if more := [token for token in stop_ids if token not in ends]:
        write_json(path, load_json(path) | {"eos_token_id": [*ends, *more]})


def _write_small_files(trained: TrainedModel, folder: Path) -> None:
    """Writes the tokenizer's files and generation_config.json."""
    text_tokenizer = trained.tokenizer
    if trained.files is not None:
        copy_small_files(
            trained.files, folder, with_tokenizer=not isinstance(text_tokenizer, ByteTokenizer)
        )
    if isinstance(text_tokenizer, ByteTokenizer):
        byte_level_bpe().save(str(folder / "tokenizer.json"))
    elif isinstance(text_tokenizer, BPETokenizer) and small_file(folder, "tokenizer.json") is None:
        # The run is older than its copy of the tokenizer, or has none.
        text_tokenizer.backend.save(str(folder / "tokenizer.json"))
    if text_tokenizer is not None and small_file(folder, "tokenizer_config.json") is None:
        backend = (
            text_tokenizer.backend if isinstance(text_tokenizer, BPETokenizer) else byte_level_bpe()
        )
        begin, end = (
            backend.id_to_token(text_tokenizer.bos),
            backend.id_to_token(text_tokenizer.eos),
        )
        assert begin is not None and end is not None
        write_json(folder / "tokenizer_config.json", tokenizer_config(begin, end))
    if text_tokenizer is not None and small_file(folder, "generation_config.json") is None:
        vocab_size = trained.model.config.vocab_size
        ends = [] if trained.files is None else end_ids(trained.files, vocab_size)
        ids: dict[str, Any] = {**_special_ids(text_tokenizer)}
        if ends:
            ids["eos_token_id"] = ends if len(ends) > 1 else ends[0]
        write_json(folder / "generation_config.json", ids)
