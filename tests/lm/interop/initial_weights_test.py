"""Runs of a model `hf:DIR`, and runs that start from given weights."""

import dataclasses
import json
import shutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest
from tokenizers import Tokenizer

from fp8jax.lm.data.bpe import load_bpe
from fp8jax.lm.data.tokenizers import tokenizer
from fp8jax.lm.interop import convert
from fp8jax.lm.interop.byte_tokenizer_json import byte_level_bpe, tokenizer_config
from fp8jax.lm.interop.folders import (
    HUGGING_FACE,
    end_ids,
    keep_small_files,
    shape_of_model,
)
from fp8jax.lm.interop.initial_weights import InitialWeights
from fp8jax.lm.interop.trained import load_model
from fp8jax.lm.interop.write import write_json
from fp8jax.lm.model.transformer import Transformer, abstract_variables
from fp8jax.lm.records.jsonl import read_jsonl
from fp8jax.lm.training import loop
from fp8jax.lm.training.build import build
from fp8jax.lm.training.loop import train_and_evaluate
from tests.support.chat_templates import write_chat_folder
from tests.support.hf_folders import BF16, config_json, tensors, write_folder
from tests.support.runs import tiny
from tests.support.untrained import write_checkpoints

VOCAB = 264  # the byte tokenizer's 258, and a multiple of 8 devices


@pytest.fixture
def folder(tmp_path):
    """A small Qwen 3 in two files, with the byte tokenizer."""
    config = config_json("qwen3", vocab_size=VOCAB, num_attention_heads=8, num_key_value_heads=8)
    folder = write_folder(tmp_path / "hf", config, tensors(config, BF16), files=2)
    byte_level_bpe().save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tokenizer_config(*special_tokens()))
    return folder


def special_tokens() -> tuple[str, str]:
    made = byte_level_bpe()
    return made.id_to_token(256), made.id_to_token(257)


def run_of(data, **changes) -> ml_collections.ConfigDict:
    config = tiny(data, num_steps=2, optimizer__warmup_steps=1, valid__batches=1, **changes)
    for name in config.model_overrides:
        config.model_overrides[name] = None
    return config


@pytest.mark.parametrize(("kind", "master"), [("hf", "bfloat16"), ("workdir", "float32")])
def test_step_0_has_the_weights_on_the_runs_mesh(kind, master, data, folder, tmp_path):
    source = f"hf:{folder}"
    if kind == "workdir":
        convert.import_folder(source, tmp_path / "workdir")
        source = str(tmp_path / "workdir")
    config = run_of(
        data,
        model=f"hf:{folder}",
        initial_weights=source,
        mesh="fsdp",
        optimizer__master_weights=master,
    )
    run = build(config)
    run.initial_weights.check()
    state, abstract = run.stages[0].programs.initialize(), run.stages[0].state
    expected = load_model(f"hf:{folder}").variables["params"]
    for leaf, shape, theirs in zip(
        *map(jax.tree.leaves, (state.params, abstract.params, expected)), strict=True
    ):
        assert (leaf.dtype, leaf.sharding) == (shape.dtype, shape.sharding)
        np.testing.assert_array_equal(leaf.astype(jnp.float32), theirs)
    # All else is as without them.
    config.initial_weights = ""
    other = build(config).stages[0].programs.initialize()
    assert state.key == other.key
    for name in ("step", "opt_state"):
        jax.tree.map(np.testing.assert_array_equal, *(getattr(s, name) for s in (state, other)))


def on_a_device(leaf) -> jax.ShapeDtypeStruct:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=device)


def test_a_model_of_another_layout_reads_the_names_of_the_folder(tmp_path):
    """Phi 3 joins linears in its tensors; a Llama of the same shape has the same parameters."""
    config = config_json("phi3", sliding_window=None, rope_parameters=None)
    folder = write_folder(tmp_path, config, tensors(config))
    theirs = shape_of_model(f"hf:{folder}", {})
    ours = dataclasses.replace(theirs, joined_projections=False)
    trees = []
    for model in (theirs, ours):
        initial = InitialWeights(f"hf:{folder}", model)
        initial.check()
        params = nn.meta.unbox(abstract_variables(Transformer(model))["params"])
        trees.append(initial.read(jax.tree.map(on_a_device, params)))
    jax.tree.map(np.testing.assert_array_equal, *trees)


def test_a_run_on_a_folder_needs_it_no_more_once_trained(data, folder, tmp_path):
    """Step 1 has the loss of the given weights; the workdir keeps all small files; and what was
    trained goes back under the same config.json and tokenizer."""
    spec = f"hf:{folder}"
    config = run_of(
        data,
        model=spec,
        initial_weights=spec,
        tokenizer=f"bpe:{folder}/tokenizer.json",
        optimizer__learning_rate=1e-30,
        optimizer__weight_decay=0.0,
    )
    train_and_evaluate(config, str(tmp_path / "run"))
    before = load_model(spec)
    config_file = (folder / "config.json").read_text()
    _check_that_changes_are_recorded(config, folder, tmp_path)
    shutil.rmtree(folder)
    after = load_model(str(tmp_path / "run"))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-20), after.variables, before.variables
    )
    assert after.tokenizer.fingerprint == before.tokenizer.fingerprint
    convert.export(str(tmp_path / "run"), tmp_path / "out", "bf16")
    exported = json.loads((tmp_path / "out/config.json").read_text())
    assert exported == json.loads(config_file) | {"dtype": "bfloat16"}
    words = Tokenizer.from_file(str(tmp_path / "out/tokenizer.json"))
    assert words.encode("Hé").ids == list("Hé".encode())


def test_an_export_names_the_ids_of_the_tokenizer_that_trained(data, folder, tmp_path):
    """And not those of the folder that the shape is of, whose tokenizer is another."""
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", config | {"bos_token_id": 7, "eos_token_id": [101, 32]})
    write_json(folder / "generation_config.json", {"eos_token_id": [101, 32]})
    write_checkpoints(tmp_path / "run", run_of(data, model=f"hf:{folder}"), [1])
    keep_small_files({"model": f"hf:{folder}", "tokenizer": "bytes"}, tmp_path / "run")
    assert end_ids(tmp_path / "run" / HUGGING_FACE, VOCAB) == []
    convert.export(str(tmp_path / "run"), tmp_path / "out", "bf16")
    for name in ("config.json", "generation_config.json"):
        exported = json.loads((tmp_path / "out" / name).read_text())
        assert (exported["bos_token_id"], exported["eos_token_id"]) == (256, 257), name


def _check_that_changes_are_recorded(config, folder, tmp_path):
    """Resumes a copy of the run, whose last step it has trained, after config.json has changed."""
    changed = json.loads((folder / "config.json").read_text()) | {"rms_norm_eps": 0.5}
    write_json(folder / "config.json", changed)
    shutil.copytree(tmp_path / "run", tmp_path / "changed")
    config = config.copy_and_resolve_references()
    config.resume_with_changes = True
    train_and_evaluate(config, str(tmp_path / "changed"))
    events = read_jsonl(tmp_path / "changed" / "events.jsonl")
    (resume,) = (event for event in events if event["kind"] == "resume")
    assert resume["changes"] == [f"hf:{folder}: norm_eps: 0.001 -> 0.5"]


def test_a_folder_that_changes_under_a_run_is_refused(data, folder, tmp_path):
    config = run_of(data, model=f"hf:{folder}")
    kept = tmp_path / "run" / HUGGING_FACE
    kept.mkdir(parents=True)
    shutil.copy(folder / "config.json", kept)
    changed = json.loads((folder / "config.json").read_text())
    changed["rope_parameters"]["rope_theta"] = 5e5
    write_json(folder / "config.json", changed)
    with pytest.raises(
        ValueError, match=r"no longer the model .*: rope_theta: 10000.0 -> 500000.0"
    ):
        train_and_evaluate(config, str(tmp_path / "run"))
    config.resume_with_changes = True
    changes = loop._model_changes(build(config), str(tmp_path / "run"))
    assert changes == [f"hf:{folder}: rope_theta: 10000.0 -> 500000.0"]


def test_weights_of_another_shape_are_refused_with_all_that_differ(folder):
    model = shape_of_model(f"hf:{folder}", {"n_layers": 3, "vocab_size": 300})
    with pytest.raises(ValueError) as refused:
        InitialWeights(f"hf:{folder}", model).check()
    assert f"embedding: ({VOCAB}, 32) instead of (300, 32)" in str(refused.value)
    assert "layers/mlp/up/kernel: (2, 32, 48) instead of (3, 32, 48)" in str(refused.value)


def test_other_fields_and_another_tokenizer_are_a_warning(folder, tmp_path, caplog):
    model = shape_of_model(f"hf:{folder}", {"rope_theta": 1e6})
    own = tokenizer(f"hf:{folder}")
    InitialWeights(f"hf:{folder}", model).check(own)
    assert "rope_theta: 10000.0 -> 1000000.0" in caplog.text
    assert "tokenizer" not in caplog.text
    InitialWeights(f"hf:{folder}", model).check(tokenizer("bytes"))  # whose ids are the same
    assert "tokenizer" not in caplog.text
    learned = write_chat_folder(tmp_path, "")
    InitialWeights(f"hf:{folder}", model).check(load_bpe(learned / "tokenizer.json"))
    assert "another tokenizer, whose ids mean other text: 256 of 280 ids" in caplog.text
    (folder / "tokenizer.json").write_text("{}")
    InitialWeights(f"hf:{folder}", model).check(own)
    assert "cannot be compared: " in caplog.text
