"""Small Hugging Face folders, written without torch: weights of tests/support/hf_vectors.py."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from fp8jax.lm.interop.config_json import to_model_config
from fp8jax.lm.interop.tensor_names import names_for, tensor_shapes
from tests.support.hf_vectors import MODELS, weight

BF16 = np.dtype(ml_dtypes.bfloat16)
_SUFFIX = {"GPT2": "GPT2LMHeadModel"}
_TYPES = {"Gemma3": "gemma3_text"}


def config_json(family: str, **changes) -> dict:
    """The config.json of a model of hf_vectors.py; a change to None leaves a key out."""
    name, fields = MODELS[family]
    architecture = _SUFFIX[name] if name in _SUFFIX else f"{name}ForCausalLM"
    model_type = _TYPES[name] if name in _TYPES else name.lower()
    config = {"architectures": [architecture], "model_type": model_type, **fields, **changes}
    return {key: value for key, value in config.items() if value is not None}


def tensors(config: dict, dtype=BF16, prefix: str | None = None) -> dict[str, np.ndarray]:
    """Weights by name; float32 ones are those of hf_vectors.py."""
    model = to_model_config(config)
    own = names_for(model).prefix
    shapes = tensor_shapes(model, own)
    made = {name: weight(name, shape).astype(dtype) for name, shape in shapes.items()}
    return {own_to(name, own, prefix): array for name, array in made.items()}


def own_to(name: str, own: str, prefix: str | None) -> str:
    return name if prefix is None else prefix + name.removeprefix(own)


def write_folder(folder: Path, config: dict, arrays: dict[str, np.ndarray], files: int = 1) -> Path:
    """A folder with config.json and the tensors, in one file or several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if files == 1:
        save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = sorted(arrays)
    where = {}
    for i in range(files):
        file = f"model-{i + 1:05}-of-{files:05}.safetensors"
        part = {name: arrays[name] for name in names[i::files]}
        save_file(part, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    total = sum(array.nbytes for array in arrays.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
