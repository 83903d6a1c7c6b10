"""Models of workdirs in object stores: S3 as moto serves it on loopback."""

from pathlib import Path

import jax
import numpy as np
import pytest

from fp8jax.lm.data import stored_folders
from fp8jax.lm.data.tokenizers import tokenizer
from fp8jax.lm.interop import stored_workdirs
from fp8jax.lm.interop.byte_tokenizer_json import byte_level_bpe
from fp8jax.lm.interop.folders import HUGGING_FACE, keep_small_files, shape_of_model
from fp8jax.lm.interop.initial_weights import InitialWeights
from fp8jax.lm.interop.trained import load_model
from fp8jax.lm.records.checkpoint import DamagedError
from fp8jax.lm.training.build import build
from fp8jax.lm.training.initial_state import InitialState
from tests.support.hf_folders import config_json, tensors, write_folder
from tests.support.runs import tiny
from tests.support.stores import BUCKET, forget_listings, s3_store, upload
from tests.support.untrained import write_checkpoints


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("http://a/run", "http:// is not read. There are: gs://, s3://"),
        ("s3:///run", "expected s3://BUCKET/…, got s3:///run"),
        ("hf:http://a/model", "http:// is not read. There are: gs://, s3://"),
    ],
)
def test_urls_that_are_refused(source, message):
    with pytest.raises(ValueError, match=message):
        load_model(source)


@pytest.mark.full
def test_a_model_and_a_tokenizer_of_a_store_are_those_of_the_folder(monkeypatch, tmp_path):
    config = config_json("qwen3", vocab_size=264)
    folder = write_folder(tmp_path / "model", config, tensors(config), files=2)
    byte_level_bpe().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    monkeypatch.setattr(stored_folders, "CACHE", str(tmp_path / "cache"))
    url, here = f"hf:s3://{BUCKET}/models/m", f"hf:{folder}"

    def copied() -> set[str]:
        (copy,) = (path for path in (tmp_path / "cache").iterdir() if path.name.startswith("m-"))
        return {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()}

    with s3_store(monkeypatch) as store:
        stored_folders._listed.cache_clear()
        upload(store, folder, "models/m")
        assert shape_of_model(url, {}) == shape_of_model(here, {})
        weights = {name for name in copied() if name.endswith((".safetensors", ".bin"))}
        assert not weights and "additional_chat_templates/tool_use.jinja" in copied()
        there, whole = load_model(url), load_model(here)
        jax.tree.map(np.testing.assert_array_equal, there.variables, whole.variables)
        assert len([name for name in copied() if name.endswith(".safetensors")]) == 2
        spec = f"bpe:s3://{BUCKET}/models/m/tokenizer.json"
        for name in (url, spec):
            assert tokenizer(name).fingerprint == tokenizer(here).fingerprint
        keep_small_files({"model": url, "tokenizer": spec}, tmp_path / "run")
        kept = {path.name for path in (tmp_path / "run" / HUGGING_FACE).iterdir()}
        assert kept >= {"config.json", "tokenizer.json", "chat_template.jinja"}
        with pytest.raises(ValueError, match=f"s3://{BUCKET}/none is not a folder"):
            load_model(f"hf:s3://{BUCKET}/none")
        assert "pytorch_model.bin" not in copied()
        stored_folders._listed.cache_clear()


@pytest.mark.full
def test_a_workdir_in_a_store_is_that_workdir(data, monkeypatch, tmp_path):
    config = tiny(data, precision="fp8_delayed", num_steps=3)
    write_checkpoints(tmp_path / "run", config, (2, 3), position=None)
    monkeypatch.setattr(stored_workdirs, "CACHE", str(tmp_path / "cache"))
    url = f"s3://{BUCKET}/runs/mine"

    def copies() -> list[Path]:
        return sorted((tmp_path / "cache").glob("mine-*"))

    with s3_store(monkeypatch) as store:
        upload(store, tmp_path / "run", "runs/mine")
        # Half a step, of an upload that was killed.
        store.put_object(Bucket=BUCKET, Key="runs/mine/checkpoints/4/params/x", Body=b"")
        for step in (None, 2):
            there, here = load_model(url, step=step), load_model(str(tmp_path / "run"), step=step)
            jax.tree.map(np.testing.assert_array_equal, there.variables, here.variables)
            assert (there.step, there.record, there.name) == (here.step, here.record, url)
        two, three = copies()
        for copy, step in ((two, "2"), (three, "3")):
            items = [path.name for path in (copy / "checkpoints" / step).iterdir() if path.is_dir()]
            assert sorted(items) == ["histories", "meta", "params"]  # no optimizer's state
        load_model(url)
        assert copies() == [two, three]
        weights = InitialWeights(f"{url}/", here.model.config)
        weights.check()
        abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
            there.variables["params"],
        )
        newest = load_model(str(tmp_path / "run")).variables["params"]
        jax.tree.map(np.testing.assert_array_equal, weights.read(abstract), newest)
        run = build(config)
        for step in (None, 2):
            name, folder = (s if step is None else f"{s}@{step}" for s in (url, tmp_path / "run"))
            states = [InitialState.parse(str(s)).read(run) for s in (name, folder)]
            params, opt_states = zip(
                *((state.arrays["params"], state.arrays["state"]["opt_state"]) for state in states),
                strict=True,
            )
            jax.tree.map(np.testing.assert_array_equal, *params)
            jax.tree.map(np.testing.assert_array_equal, *opt_states)
            assert states[0].meta == states[1].meta
        with pytest.raises(ValueError, match="mine has no checkpoint of step 1: name the workdir"):
            load_model(url, step=1)
        with pytest.raises(ValueError, match="none has no checkpoints: name the workdir"):
            load_model(f"s3://{BUCKET}/none")
        # What changes in the store is copied anew, and its hash checked.
        params = tmp_path / "run" / "checkpoints" / "3" / "params"
        largest = max((p for p in params.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
        key = f"runs/mine/{largest.relative_to(tmp_path / 'run').as_posix()}"
        store.put_object(Bucket=BUCKET, Key=key, Body=largest.read_bytes()[:-1] + b"\0\0")
        forget_listings()
        with pytest.raises(DamagedError, match="changed since it was saved: params/"):
            load_model(url)
