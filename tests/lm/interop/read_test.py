"""Folders that are damaged or hold another model: refused before anything is allocated."""

import errno
import json
import os
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from fp8jax.lm.interop import convert, read
from fp8jax.lm.interop.byte_tokenizer_json import byte_level_bpe
from fp8jax.lm.interop.config_json import to_model_config
from fp8jax.lm.interop.read import TensorFiles, check_tensors, grouped
from fp8jax.lm.interop.trained import load_model
from fp8jax.lm.mesh import MeshAxes, make_mesh
from tests.support.hf_folders import config_json, tensors, write_folder

CONFIG = config_json("qwen2")  # tied


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "hf", CONFIG, tensors(CONFIG), files=3)


@pytest.fixture
def nothing_is_allocated(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("an array was allocated")

    monkeypatch.setattr(read.jax, "make_array_from_callback", fail)


@pytest.fixture
def refused(folder, tmp_path, nothing_is_allocated):
    """A function that checks how the folder is refused, and that no conversion is left."""

    def refused(message):
        with pytest.raises(ValueError, match=message) as error:
            convert.import_folder(f"hf:{folder}", tmp_path / "workdir")
        assert "\n" not in str(error.value)
        assert [path.name for path in tmp_path.iterdir()] == ["hf"]

    return refused


def shards(folder):
    return sorted(folder.glob("*.safetensors"))


def test_all_tensors_that_do_not_fit_are_listed_at_once(folder, refused):
    arrays = tensors(CONFIG)
    for name in [name for name in arrays if name.endswith("up_proj.weight")]:
        del arrays[name]
    arrays["model.norm.weight"] = arrays["model.norm.weight"][:-1]
    arrays["model.layers.1.self_attn.q_proj.bias"] = np.zeros(32, np.int32)
    arrays["model.layers.7.mlp.up_proj.weight"] = np.zeros((3, 3), np.float32)
    arrays["model.layers.1.self_attn.o_proj.bias"] = np.zeros(32, np.float32)
    shutil.rmtree(folder)
    write_folder(folder, CONFIG, arrays, files=2)
    for message in (
        r"missing: model.layers.\[0-1\].mlp.up_proj.weight; ",
        r"not part of the model: model.layers.1.self_attn.o_proj.bias, model.layers.7.mlp.up_proj",
        r"model.norm.weight has shape \[31\] instead of \[32\]",
        r"model.layers.1.self_attn.q_proj.bias has dtype I32, not one of F32, F16, BF16",
    ):
        refused(message)


def test_a_truncated_file(folder, refused):
    path = shards(folder)[1]
    path.write_bytes(path.read_bytes()[:-1])
    refused("model-00002-of-00003.safetensors is damaged or no safetensors file: .*not fully cover")


def test_a_file_of_another_kind(folder, refused):
    shards(folder)[0].write_bytes(b"PK\x03\x04 a pickle of torch")
    refused("model-00001-of-00003.safetensors is damaged or no safetensors file")


def test_a_file_that_nobody_may_read(folder, refused, monkeypatch):
    """root may read every file, so the refusal of the system is put in its place."""

    def denied(path, *args, open=Path.open, **kwargs):
        if path.name == "model-00002-of-00003.safetensors":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return open(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", denied)
    refused("model-00002-of-00003.safetensors cannot be read: Permission denied$")


def test_a_folder_in_the_place_of_a_file(folder, refused):
    (folder / read.SINGLE).mkdir()
    refused("/model.safetensors cannot be read: Is a directory$")


def test_a_missing_file(folder, refused):
    shards(folder)[2].unlink()
    refused("index.json names files that are missing: model-00003-of-00003.safetensors$")


def test_an_index_of_tensors_that_no_file_has(folder, refused):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.layers.9.up"] = shards(folder)[0].name
    path.write_text(json.dumps(index))
    refused("names tensors that no file has: model.layers.9.up$")


@pytest.mark.parametrize("weight_map", [{}, {"a": "../other.safetensors"}, ["a"], {"a": 3}])
def test_an_index_without_a_map_of_files(folder, refused, weight_map):
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": weight_map}))
    refused("weight_map must map tensors to files of the folder")


def test_a_tensor_in_two_files(folder, refused):
    name = next(iter(json.loads((folder / read.INDEX).read_text())["weight_map"]))
    for path in shards(folder)[1:]:
        save_file({name: np.zeros(3, np.float32)}, path)
    refused(f"{re.escape(name)} is in another file of the folder, too")


def test_no_index_no_files_and_pickles(folder, refused):
    (folder / "model.safetensors.index.json").unlink()
    refused("has neither model.safetensors nor .*index.json, although it has model-00001-of-00003")
    for path in shards(folder):
        path.unlink()
    refused("has neither model.safetensors nor model.safetensors.index.json$")
    (folder / "pytorch_model.bin").write_bytes(b"")
    refused("pytorch_model.bin would have to be unpickled, which may run any code")


def test_a_flipped_byte_in_a_folder_that_fp8jax_wrote(folder, tmp_path):
    convert.export(f"hf:{folder}", tmp_path / "out", "bf16")
    path = tmp_path / "out/model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="out: changed since it was saved: model.safetensors"):
        load_model(f"hf:{tmp_path}/out")


def test_a_tied_head_that_is_not_the_embedding(folder, refused):
    arrays = tensors(CONFIG)
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].copy()
    arrays["lm_head.weight"][5, 7] += 1
    shutil.rmtree(folder)
    write_folder(folder, CONFIG, arrays)
    refused("ties the head to the embedding, but lm_head.weight differs from model.embed_tokens")


def test_a_vocabulary_that_is_smaller_than_the_tokenizers(folder, refused):
    byte_level_bpe().save(str(folder / "tokenizer.json"))
    refused("vocab_size=32 of the model is less than the tokenizer's 258")


@pytest.mark.full
def test_a_tokenizer_may_have_special_tokens_without_a_row(tmp_path):
    config = config_json("qwen2", vocab_size=258)
    folder = write_folder(tmp_path / "hf", config, tensors(config))
    words = byte_level_bpe()
    words.add_special_tokens(["<image>"])
    words.save(str(folder / "tokenizer.json"))
    trained = load_model(f"hf:{folder}")
    assert trained.tokenizer.vocab_size == trained.model.config.vocab_size == 258


def test_only_the_slices_of_a_shard_are_read(folder, monkeypatch):
    """Of each kernel, a device of a mesh of 8 asks for an eighth, in one piece for each layer."""
    asked = {}

    def counted(self, name, index, whole=TensorFiles.read):
        part = whole(self, name, index)
        asked[name] = asked.get(name, 0) + part.size
        assert part.size * 8 == np.prod(self.shapes[name]) or part.ndim == 1, name
        return part

    monkeypatch.setattr(TensorFiles, "read", counted)
    load_model(f"hf:{folder}", mesh=make_mesh(MeshAxes(fsdp=4, tensor=2)))
    files = TensorFiles(folder)
    for name, size in asked.items():
        if len(files.shapes[name]) > 1:
            assert size == np.prod(files.shapes[name]), name
    assert jax.device_count() == 8


def test_names_without_a_prefix_are_found():
    for prefix in ("model.", ""):
        files = Shapes(tensors(CONFIG, prefix=prefix))
        assert check_tensors(files, to_model_config(CONFIG)) == prefix


class Shapes:
    """Files of which only the headers are looked at."""

    def __init__(self, arrays):
        self.folder = Path("folder")
        self.shapes = {name: array.shape for name, array in arrays.items()}
        self.dtypes = dict.fromkeys(arrays, "BF16")

    def read(self, name, index):
        raise NotImplementedError


def test_numbers_of_layers_are_joined():
    names = [f"h.{i}.ln.weight" for i in (0, 1, 2, 5)] + ["wte.weight", "h.3.mlp.bias"]
    assert grouped(names) == "wte.weight, h.[0-2,5].ln.weight, h.3.mlp.bias"
