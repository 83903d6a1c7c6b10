"""Runs that go on where they stopped, from every kind of source, with bits equal to never stopping.

A process that dies is in experiments/train_test.py; here the last checkpoint is taken away, which
leaves what a death before it would have left.
"""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fp8jax.lm.records.jsonl import read_jsonl
from fp8jax.lm.records.run_checkpoint import require_version
from fp8jax.lm.training import hooks
from fp8jax.lm.training.loop import train_and_evaluate
from tests.support.runs import numbers, one_layer
from tests.support.text import compressed, generated_text, json_lines, write_generated_text
from tests.support.traced_programs import traced_once


@pytest.fixture(scope="module", autouse=True)
def traced():
    with traced_once():
        yield


def write_zst(folder: Path) -> str:
    content = compressed(json_lines(generated_text(documents=300, seed=1)), ".zst")
    (folder / "a.jsonl.zst").write_bytes(content)
    return f"jsonl:{folder}/a.jsonl.zst"


def write_parquet(folder: Path) -> str:
    table = pa.table({"body": generated_text(documents=300, seed=2)})
    pq.write_table(table, folder / "a.parquet")
    return f"parquet:{folder}/a.parquet#body"


def write_mixture(folder: Path) -> str:
    return f"z=2*{write_zst(folder)},p=1.5*{write_parquet(folder)},t=0.5*tfds:fp8jax_examples"


SPECS = {
    "jsonl.zst": write_zst,
    "parquet": write_parquet,
    "tfds": lambda folder: "tfds:fp8jax_examples@train",
    "mixture": write_mixture,
}


# The mixture reads the other three, and goes on in each.
@pytest.mark.parametrize(
    "kind", [k if k == "mixture" else pytest.param(k, marks=pytest.mark.full) for k in SPECS]
)
def test_a_resumed_run_equals_one_that_never_stopped(kind, tmp_path, data_dir):  # noqa: F811
    spec = SPECS[kind](tmp_path)
    changes = dict(num_steps=5, checkpoint__every=4, valid__every=2)
    config = one_layer((spec, str(tmp_path / "cache")), **changes)
    train_and_evaluate(config, str(tmp_path / "run"))
    whole = numbers(tmp_path / "run")
    assert [line["step"] for line in whole] == list(range(1, 6))
    shutil.rmtree(tmp_path / "run/checkpoints/5")
    train_and_evaluate(config, str(tmp_path / "run"))
    assert numbers(tmp_path / "run") == whole
    (resume,) = [e for e in read_jsonl(tmp_path / "run/events.jsonl") if e["kind"] == "resume"]
    assert resume["step"] == 4 and resume["changes"] == []
    counts = {k.removeprefix("rows/"): n for k, n in whole[-1].items() if k.startswith("rows/")}
    assert sum(counts.values()) == 5 * 16
    if kind == "mixture":
        # A cycle is 4 + 3 + 1 rows; 80 rows are 10 of them.
        assert counts == {"z": 40, "p": 30, "t": 10}


@pytest.mark.full
@pytest.mark.parametrize("precision", ["bf16", "nvfp4_4over6", "quartet2", "tetrajet2"])
def test_muon_and_what_draws_signs_resume_to_the_bit(precision, data, tmp_path):
    """With momentum in 8 bits."""
    changes = dict(num_steps=5, checkpoint__every=4, valid__every=5)
    changes |= dict(optimizer__name="muon", optimizer__moments="int8")
    config = one_layer(data, precision=precision, **changes)
    train_and_evaluate(config, str(tmp_path))
    whole = numbers(tmp_path)
    assert whole[-1]["loss"] < whole[0]["loss"]
    shutil.rmtree(tmp_path / "checkpoints" / "5")
    train_and_evaluate(config, str(tmp_path))
    assert numbers(tmp_path) == whole


def test_other_weights_on_resume_go_on_within_each_source(tmp_path):
    """From 3:1 to 1:3 and a new source: rows add up, the change is recorded."""
    parts = {}
    for name, write in (("z", write_zst), ("p", write_parquet), ("j", write_generated_text)):
        (tmp_path / name).mkdir()
        parts[name] = write(tmp_path / name)
    cache = str(tmp_path / "cache")
    before = one_layer((f"z=3*{parts['z']},p=1*{parts['p']}", cache), num_steps=4)
    first = train_and_evaluate(before, str(tmp_path / "run"))
    assert (first["rows/z"], first["rows/p"]) == (48, 16)
    spec = f"z=1*{parts['z']},p=3*{parts['p']},j=4*{parts['j']}"
    after = one_layer((spec, cache), num_steps=6, resume_with_changes=True)
    last = train_and_evaluate(after, str(tmp_path / "run"))
    assert (last["rows/z"], last["rows/p"], last["rows/j"]) == (48 + 4, 16 + 12, 16)
    assert {"valid_loss/z", "valid_loss/p", "valid_loss/j"} <= last.keys()
    (resume,) = [e for e in read_jsonl(tmp_path / "run/events.jsonl") if e["kind"] == "resume"]
    assert any(line.startswith("data: ") for line in resume["changes"])
    assert json.loads((tmp_path / "run/config.json").read_text())["data"] == spec


def test_a_checkpoint_of_an_older_version_is_refused_and_stays(data, tmp_path, monkeypatch):
    """The first version, whose meta names none, and any other one: by number, before training."""
    config = one_layer(data, num_steps=1, valid__batches=1)
    monkeypatch.setattr(hooks, "CHECKPOINT_VERSION", 1)
    train_and_evaluate(config, str(tmp_path))
    monkeypatch.undo()
    before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    with pytest.raises(ValueError, match=r"step 1 .* has version 1, .* reads version 3: take "):
        train_and_evaluate(config, str(tmp_path))
    with pytest.raises(ValueError, match="has version 1"):
        require_version(1, {"config": {}})
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == before
