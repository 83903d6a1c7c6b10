"""Models of workdirs in object stores: S3 as moto serves it on loopback."""

from pathlib import Path

import jax
import numpy as np
import pytest

from fp8jax.lm.interop import stored_workdirs
from fp8jax.lm.interop.initial_weights import InitialWeights
from fp8jax.lm.interop.trained import load_model
from fp8jax.lm.records.checkpoint import DamagedError
from tests.support.runs import tiny
from tests.support.stores import BUCKET, forget_listings, s3_store
from tests.support.untrained import write_checkpoints


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("http://a/run", "http:// is not read. There are: gs://, s3://"),
        ("s3:///run", "expected s3://BUCKET/…, got s3:///run"),
        ("hf:s3://data/model", "is a URL: copy it, and name the folder"),
    ],
)
def test_urls_that_are_refused(source, message):
    with pytest.raises(ValueError, match=message):
        load_model(source)


@pytest.mark.full
def test_a_workdir_in_a_store_is_that_workdir(data, monkeypatch, tmp_path):
    config = tiny(data, precision="fp8_delayed", num_steps=3)
    write_checkpoints(tmp_path / "run", config, (2, 3))
    monkeypatch.setattr(stored_workdirs, "CACHE", str(tmp_path / "cache"))
    url = f"s3://{BUCKET}/runs/mine"

    def copies() -> list[Path]:
        return sorted((tmp_path / "cache").glob("mine-*"))

    with s3_store(monkeypatch) as store:
        for path in (tmp_path / "run").rglob("*"):
            if path.is_file():
                key = f"runs/mine/{path.relative_to(tmp_path / 'run').as_posix()}"
                store.upload_file(str(path), BUCKET, key)
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
