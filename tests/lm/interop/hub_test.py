"""Models, tokenizers and data from Hugging Face's hub: tests/support/hub.py on loopback."""

import re

import huggingface_hub
import jax
import numpy as np
import pytest
from huggingface_hub import constants

from fp8jax.lm.data import hub as hub_names
from fp8jax.lm.data.files import Tally
from fp8jax.lm.data.tokenizers import tokenizer
from fp8jax.lm.interop.byte_tokenizer_json import byte_level_bpe, tokenizer_config
from fp8jax.lm.interop.folders import HUGGING_FACE, keep_small_files, shape_of_model
from fp8jax.lm.interop.initial_weights import InitialWeights
from fp8jax.lm.interop.trained import load_model
from fp8jax.lm.interop.write import write_json
from fp8jax.lm.sources import parse_sources
from tests.support.commands import run_command, tiny_run
from tests.support.hf_folders import config_json, tensors, write_folder
from tests.support.hub import hub
from tests.support.text import generated_text, write_jsonl

SMALL = ["config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"]
SHARDS = [f"model-{i:05}-of-00002.safetensors" for i in (1, 2)]


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A hub with a model of two revisions, and a data set; and an empty cache."""
    model = config_json("qwen3", vocab_size=264)
    folder = write_folder(tmp_path / "model", model, tensors(model), files=2)
    byte_level_bpe().save(str(folder / "tokenizer.json"))
    ids = byte_level_bpe().id_to_token
    write_json(folder / "tokenizer_config.json", tokenizer_config(ids(256), ids(257)))
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    (folder / "original").mkdir()
    (folder / "original" / "config.json").write_text("{}")
    second = config_json("llama", vocab_size=77)
    write_folder(tmp_path / "second", second, tensors(second))
    data = tmp_path / "data"
    (data / "en" / "old").mkdir(parents=True)
    for path, text in [("en/a.jsonl", "a"), ("en/b.jsonl", "b"), ("en/old/c.jsonl", "c")]:
        write_jsonl(data / path, [text * 50])
    with hub() as served:
        served.folders = {
            ("models", "org/tiny", "main"): folder,
            ("models", "org/tiny", "refs/pr/1"): tmp_path / "second",
            ("models", "org/single", "main"): tmp_path / "second",
            ("datasets", "org/texts", "main"): data,
        }
        template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.chdir(tmp_path)
        hub_names._download.cache_clear()
        yield served
        hub_names._download.cache_clear()
        huggingface_hub.close_session()


def test_a_model_is_that_of_the_folder_and_nothing_else_is_downloaded(server, tmp_path):
    shape = shape_of_model("hf:org/tiny", {})
    assert shape == shape_of_model(f"hf:{tmp_path}/model", {})
    assert server.downloads() == SMALL  # no weights, for a shape
    trained, here = load_model("hf:org/tiny"), load_model(f"hf:{tmp_path}/model")
    jax.tree.map(np.testing.assert_array_equal, trained.variables, here.variables)
    assert trained.tokenizer.fingerprint == here.tokenizer.fingerprint
    assert server.downloads() == sorted([*SMALL, *SHARDS])
    asked = len(server.asked)
    InitialWeights("hf:org/tiny", shape).check()
    assert len(server.asked) == asked  # all that it needs is here


def test_revisions_and_a_single_file(server, monkeypatch):
    commit, said = server.commit("models", "org/tiny", "refs/pr/1"), []
    monkeypatch.setattr(hub_names.logging, "info", lambda text, *given: said.append(text % given))
    for name in ("hf:org/tiny@refs/pr/1", f"hf:org/tiny@{commit}", "hf:org/single"):
        assert shape_of_model(name, {}).vocab_size == 77
    assert f"hf:org/tiny@refs/pr/1 is commit {commit}; @{commit} keeps it" in said
    assert not any(text.startswith(f"hf:org/tiny@{commit} is") for text in said)
    shape = shape_of_model("hf:org/single", {})
    InitialWeights("hf:org/single", shape).check()
    assert "model.safetensors" in server.downloads()
    with pytest.raises(ValueError, match="revision v9, did not come from .*: it has no such rev"):
        shape_of_model("hf:org/tiny@v9", {})


def test_a_folder_here_goes_first(server, tmp_path):
    model = config_json("llama", vocab_size=55)
    write_folder(tmp_path / "org" / "tiny", model, tensors(model))
    assert shape_of_model("hf:org/tiny", {}).vocab_size == 55
    load_model("hf:org/tiny")
    for path in (tmp_path / "none", "./org/none", "~/none", "none", "a/b/c"):
        with pytest.raises(ValueError, match="does not exist"):
            shape_of_model(f"hf:{path}", {})
    assert not server.asked


def test_without_a_connection_the_cache_is_taken_or_all_is_said(server, monkeypatch, tmp_path):
    first = shape_of_model("hf:org/tiny", {})
    hub_names._download.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert shape_of_model("hf:org/tiny", {}) == first
    expected = (
        f"hf:org/single: no folder org/single is here, and the model org/single, revision main, "
        f"did not come from {server.url}: HF_HUB_OFFLINE is set. The cache {tmp_path}/cache does "
        "not have it either; without a connection, copy the files and name their path"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        shape_of_model("hf:org/single", {})
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set"):
        load_model("hf:org/tiny")  # its weights are not there
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    huggingface_hub.close_session()
    assert shape_of_model("hf:org/tiny", {}) == first
    with pytest.raises(ValueError, match="from http://127.0.0.1:9: ConnectError: .*refused"):
        shape_of_model("hf:org/single", {})


def test_what_the_hub_refuses(server):
    with pytest.raises(ValueError, match="org/none, .*: there is none, or it is private and HF_TO"):
        shape_of_model("hf:org/none", {})
    server.gated.add("org/single")
    with pytest.raises(ValueError, match="org/single, .*: it is given on request: ask on its page"):
        shape_of_model("hf:org/single", {})


def test_tokenizers_and_their_files_in_a_workdir(server, tmp_path):
    theirs, here = tokenizer("hf:org/tiny"), tokenizer(f"hf:{tmp_path}/model")
    same = tokenizer(f"bpe:{tmp_path}/model/tokenizer.json")
    assert theirs.fingerprint == here.fingerprint == same.fingerprint
    keep_small_files({"model": "hf:org/tiny", "tokenizer": "hf:org/tiny"}, tmp_path / "run")
    kept = sorted(path.name for path in (tmp_path / "run" / HUGGING_FACE).iterdir())
    assert kept == ["config.json", "tokenizer.json", "tokenizer_config.json"]
    with pytest.raises(ValueError, match="hf: needs a folder: give hf:DIR, or hf:ORG/NAME"):
        tokenizer("hf")


def test_data(server):
    def texts(spec):
        (source,) = parse_sources(spec)
        return [text[0] for text in source.reader.documents(Tally())]

    assert texts("jsonl:hf:org/texts/en/*.jsonl") == ["a", "b"]
    assert server.downloads() == ["en/a.jsonl", "en/b.jsonl"]
    assert texts("jsonl:hf:org/texts@main/**/*.jsonl#text") == ["a", "b", "c"]
    (source,) = parse_sources("jsonl:hf:org/texts/en/b.jsonl")
    assert source.name == "jsonl-b"
    with pytest.raises(ValueError, match="no file matches 'hf:org/texts/de/"):
        parse_sources("jsonl:hf:org/texts/de/*.jsonl")
    with pytest.raises(ValueError, match="expected hf:ORG/NAME.*/GLOB, a data set .* got hf:org/t"):
        parse_sources("jsonl:hf:org/texts")
    with pytest.raises(ValueError, match="^hf:org/none/x: the dataset org/none, .* there is none"):
        parse_sources("text:hf:org/none/x")


@pytest.mark.full
def test_a_program_trains_on_all_three(server, monkeypatch, tmp_path):
    texts = generated_text(documents=200)
    write_jsonl(server.folders["datasets", "org/texts", "main"] / "long.jsonl", texts)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "its_cache"))
    flags = tiny_run(
        ("jsonl:hf:org/texts/long.jsonl", str(tmp_path / "tokens")),
        tmp_path / "run",
        model="hf:org/tiny",
        initial_weights="hf:org/tiny",
        tokenizer="hf:org/tiny",
        num_steps=2,
        optimizer__warmup_steps=1,
    )
    done = run_command("train", *(f for f in flags if "model_overrides" not in f))
    assert done.returncode == 0, done.stderr
    assert f"hf:org/tiny is commit {server.commit('models', 'org/tiny')}" in done.stderr
    trained = load_model(str(tmp_path / "run"))
    assert trained.step == 2
    assert trained.tokenizer.fingerprint == tokenizer("hf:org/tiny").fingerprint
