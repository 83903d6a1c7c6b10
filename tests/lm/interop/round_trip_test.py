"""Hugging Face -> fp8jax -> Hugging Face: every tensor, name and key is the same."""

import gc
import json
import os
import resource
import weakref
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from fp8jax.lm.interop import convert
from fp8jax.lm.interop.export import EXPORTS, export_model
from fp8jax.lm.interop.fp8_format import FP8_FORMATS
from fp8jax.lm.interop.initial_weights import InitialWeights
from fp8jax.lm.interop.trained import load_model
from fp8jax.lm.interop.write import new_folder, write_tensors
from fp8jax.lm.mesh import MeshAxes, make_mesh
from fp8jax.lm.records.checkpoint import Checkpointer
from fp8jax.lm.records.differences import abstract_leaf
from tests.support.hf_folders import BF16, config_json, tensors, write_folder
from tests.support.hf_vectors import MODELS


def read(folder: Path) -> dict[str, np.ndarray]:
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="np") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}
    return found


def assert_same(theirs: dict, ours: dict) -> None:
    assert theirs.keys() == ours.keys()
    for name, array in theirs.items():
        assert array.dtype == ours[name].dtype, name
        assert array.tobytes() == ours[name].tobytes() and array.shape == ours[name].shape, name


# The others have the tensors of one of these; config_json_test.py has their keys.
TENSORS = ("gpt2", "llama_yarn", "qwen2", "qwen3", "phi3", "gemma3")


@pytest.mark.parametrize(
    "family",
    [name if name in TENSORS else pytest.param(name, marks=pytest.mark.full) for name in MODELS],
)
def test_every_tensor_and_key_returns(family, tmp_path):
    config = config_json(family, torch_dtype="bfloat16", vocab_size=37, eos_token_id=[3, 4])
    arrays = tensors(config)
    folder = write_folder(tmp_path / "hf", config, arrays)
    convert.import_folder(f"hf:{folder}", tmp_path / "workdir")
    convert.export(str(tmp_path / "workdir"), tmp_path / "back", "bf16", max_shard_bytes=9000)
    assert_same(arrays, read(tmp_path / "back"))
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == arrays.keys()
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in arrays.values())
    sizes = [path.stat().st_size for path in (tmp_path / "back").glob("*.safetensors")]
    assert len(sizes) > 2 and max(sizes) < 9000 + 4096  # with the header


@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_other_names_and_a_stored_head_return_and_buffers_do_not(family, tmp_path):
    """A checkpoint of the bare model, with the head that is tied, and with buffers."""
    config = config_json(family)
    arrays = tensors(config, prefix="")
    at = "h.0.attn" if family == "gpt2" else "layers.0.self_attn"
    embedding = arrays["wte.weight" if family == "gpt2" else "embed_tokens.weight"]
    buffer = "bias" if family == "gpt2" else "rotary_emb.inv_freq"
    arrays["lm_head.weight"] = embedding.copy()
    folder = write_folder(
        tmp_path / "hf", config, arrays | {f"{at}.{buffer}": np.ones((1, 1, 4, 4), np.float32)}
    )
    convert.import_folder(f"hf:{folder}", tmp_path / "workdir")
    convert.export(str(tmp_path / "workdir"), tmp_path / "back", "bf16")
    assert_same(arrays, read(tmp_path / "back"))


@pytest.mark.parametrize("dtype", sorted(EXPORTS.keys() - FP8_FORMATS.keys()))
def test_each_dtype_returns_from_a_mesh_of_eight(dtype, tmp_path):
    theirs = {"bf16": BF16, "float16": np.float16, "float32": np.float32}[dtype]
    config = config_json("llama")
    arrays = tensors(config, theirs)
    folder = write_folder(tmp_path / "hf", config, arrays, files=2)
    mesh = make_mesh(MeshAxes(fsdp=4, tensor=2))
    trained = load_model(f"hf:{folder}", mesh=mesh)
    export_model(trained, tmp_path / "back", dtype)
    assert_same(arrays, read(tmp_path / "back"))
    name = "bfloat16" if dtype == "bf16" else dtype
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config | {"dtype": name}


def test_weights_are_rounded_to_nearest_and_too_large_ones_are_refused(tmp_path):
    config = config_json("llama") | {"dtype": "float32", "torch_dtype": "float32"}
    arrays = tensors(config, np.float32)
    arrays["model.norm.weight"][3] = 7e4
    folder = write_folder(tmp_path / "hf", config, arrays)
    convert.export(f"hf:{folder}", tmp_path / "bf16", "bf16")
    expected = {name: array.astype(ml_dtypes.bfloat16) for name, array in arrays.items()}
    assert_same(expected, read(tmp_path / "bf16"))
    written = json.loads((tmp_path / "bf16/config.json").read_text())
    assert written["dtype"] == written["torch_dtype"] == "bfloat16"
    with pytest.raises(ValueError, match="model.norm.weight has the value 70000, too large for fl"):
        convert.export(f"hf:{folder}", tmp_path / "float16", "float16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bf16", "hf"]


def readers(workdir, sound):
    """What reads the weights of a workdir, which are of the same model as `sound`."""
    shapes = jax.tree.map(abstract_leaf, sound.variables["params"])
    initial = InitialWeights(str(workdir), sound.model.config)
    return (lambda: load_model(str(workdir)), lambda: initial.read(shapes))


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path):
    """All of them, from a folder and from a workdir, and before a step of training."""
    config = config_json("qwen2")  # tied
    arrays = tensors(config, np.float32)
    spec = f"hf:{write_folder(tmp_path / 'hf', config, arrays)}"
    sound = convert.import_folder(spec, tmp_path / "workdir")
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1)]
    arrays[names[0]][3, 1], arrays[names[1]][0, 0] = np.nan, -np.inf
    arrays["model.embed_tokens.weight"][2, 2] = np.nan
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].copy()
    write_folder(tmp_path / "hf", config, arrays)
    bad = ("NaN or infinities in ", "embed_tokens.weight", r"model.layers.[0-1].mlp.up_proj.weight")
    shapes = jax.tree.map(abstract_leaf, sound.variables["params"])
    for refused in (
        lambda: convert.import_folder(spec, tmp_path / "new"),
        lambda: convert.export(spec, tmp_path / "new", "bf16"),
        lambda: InitialWeights(spec, sound.model.config).read(shapes),
    ):
        with pytest.raises(ValueError) as error:
            refused()
        assert all(text in str(error.value) for text in bad), error.value
    assert sorted(os.listdir(tmp_path)) == ["hf", "workdir"]

    params = sound.variables["params"]
    params["final_norm"]["scale"] = params["final_norm"]["scale"].at[1].set(np.inf)
    with Checkpointer(tmp_path / "workdir/checkpoints", every=1, keep=1, keep_best=0) as written:
        _, meta = written.read_meta()
        written.save(1, {"params": params}, meta, None)
    for refused in readers(tmp_path / "workdir", sound):
        with pytest.raises(ValueError, match="workdir has NaN or infinities in final_norm/scale$"):
            refused()
    with pytest.raises(ValueError, match="model.norm.weight has NaN or infinities: nothing to exp"):
        export_model(sound, tmp_path / "new", "float16")


@pytest.mark.full
def test_a_checkpoint_that_is_removed_while_it_is_read(tmp_path, monkeypatch):
    """As a run that goes on removes old ones: an older one would be taken without a word."""
    config = config_json("qwen2")
    folder = write_folder(tmp_path / "hf", config, tensors(config))
    sound = convert.import_folder(f"hf:{folder}", tmp_path / "workdir")
    with Checkpointer(tmp_path / "workdir/checkpoints", every=1, keep=2, keep_best=0) as written:
        _, meta = written.read_meta()
        written.save(1, {"params": sound.variables["params"]}, meta, None)
    restore = Checkpointer.restore

    def restore_older(self, items, *, at_most, only):
        return restore(self, items, at_most=at_most - 1, only=only)

    monkeypatch.setattr(Checkpointer, "restore", restore_older)
    for read_it in readers(tmp_path / "workdir", sound):
        with pytest.raises(ValueError, match="workdir: checkpoint 1 was removed while it was read"):
            read_it()


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "there" / "target"
    with pytest.raises(KeyboardInterrupt):
        with new_folder(target) as folder:
            write_tensors(folder, {"a": lambda: np.zeros(3)})
            assert not target.exists()
            raise KeyboardInterrupt
    assert os.listdir(target.parent) == []
    with new_folder(target) as folder:
        (folder / "file").write_text("")
    assert os.listdir(target.parent) == ["target"] and os.listdir(target) == ["file"]
    with pytest.raises(FileExistsError, match="target exists and is not overwritten"):
        with new_folder(target):
            pass
    with pytest.raises(FileExistsError):  # made while the folder was written
        with new_folder(tmp_path / "late"):
            (tmp_path / "late").mkdir()
    assert sorted(os.listdir(tmp_path)) == ["late", "there"]


def test_a_full_disk_is_an_error_of_the_system(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match=r"0.safetensors cannot be written: .*File too large"):
            with new_folder(tmp_path / "target") as folder:
                write_tensors(folder, {"a": lambda: np.zeros(1000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == []


@pytest.mark.filterwarnings("ignore:coroutine")  # of Orbax, which leaves some unawaited
def test_a_workdir_on_a_full_disk_is_one_error_and_leaves_nothing(tmp_path, capfd, caplog):
    config = config_json("llama", vocab_size=4096)
    folder = write_folder(tmp_path / "hf", config, tensors(config, np.float32))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(OSError, match=r"workdir cannot be written: File too large$"):
            convert.import_folder(f"hf:{folder}", tmp_path / "workdir")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == ["hf"]
    assert "Traceback" not in capfd.readouterr().err and not caplog.records
    gc.collect()  # or they would be collected in another test, whose error it would be


def test_a_tensor_that_lies_transposed_is_written_in_order(tmp_path):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    write_tensors(tmp_path, {"a": lambda: array.T, "b": lambda: array[:, ::2]})
    assert_same({"a": array.T.copy(), "b": array[:, ::2].copy()}, read(tmp_path))


def test_the_tensors_of_one_file_are_held_at_a_time(tmp_path):
    """And the first of the next, with which the file would be too large."""
    made = []

    def make(i):
        assert sum(one() is not None for one in made) <= 2
        array = np.full(10, i, np.float32)
        made.append(weakref.ref(array))
        return array

    write_tensors(tmp_path, {str(i): lambda i=i: make(i) for i in range(6)}, max_shard_bytes=80)
    assert len(list(tmp_path.glob("model-0000?-of-00003.safetensors"))) == 3
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 6 * 10 * 4
    assert_same({str(i): np.full(10, i, np.float32) for i in range(6)}, read(tmp_path))
