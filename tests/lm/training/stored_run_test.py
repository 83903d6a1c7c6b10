"""Runs in object stores: fsspec's store in memory, and S3 as moto serves it on loopback."""

import json
import shutil
import signal
from pathlib import Path

import fsspec
import jax
import numpy as np
import pytest

from fp8jax.lm.data import urls
from fp8jax.lm.interop import stored_workdirs
from fp8jax.lm.interop.trained import load_model
from fp8jax.lm.records.checkpoint_files import HASHES
from fp8jax.lm.training import stored_run as runs
from fp8jax.lm.training.stored_run import CLAIM, stored_run
from tests.support.commands import run_here, tiny_run, train_alone
from tests.support.runs import happened, numbers
from tests.support.stores import BUCKET, forget_listings, s3_store

URL = "memory://bucket/runs/mine"
ROOT = "/bucket/runs/mine"


@pytest.fixture
def store(monkeypatch, tmp_path):
    """An empty store in memory, with copies below tmp_path."""
    monkeypatch.setitem(urls.PACKAGES, "memory", "fsspec")
    monkeypatch.setattr(runs, "CACHE", str(tmp_path / "copies"))
    memory = fsspec.filesystem("memory")
    if memory.exists("/bucket"):
        memory.rm("/bucket", recursive=True)
    return memory


def save(folder: Path, step: int, text: str) -> None:
    """What a committed step looks like, to an uploader."""
    path = folder / "checkpoints" / str(step)
    (path / "params").mkdir(parents=True)
    (path / "params" / "array").write_text(text)
    (path / HASHES).write_text(json.dumps({"params/array": text}))


def stored(store) -> dict[str, str]:
    names = [name.removeprefix(f"{ROOT}/") for name in store.find(ROOT)]
    return {name: store.cat_file(f"{ROOT}/{name}").decode() for name in names if name != CLAIM}


def step_of(text: str, step: int) -> dict[str, str]:
    folder = f"checkpoints/{step}"
    return {
        f"{folder}/params/array": text,
        f"{folder}/{HASHES}": json.dumps({"params/array": text}),
    }


def copies(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "copies").iterdir() if path.is_dir()]


def test_what_is_refused(store):
    with pytest.raises(ValueError, match="expected memory://bucket/NAME, got memory://bucket"):
        with stored_run("memory://bucket/"):
            pass
    with stored_run(URL), pytest.raises(BlockingIOError, match=r"\(process .* trains in .*mine"):
        with stored_run(URL):
            pass


def test_another_machine_goes_on(store, tmp_path):
    with stored_run(URL + "/") as first:
        first.claim()
        (first.folder / "metrics.jsonl").write_text("1")
        (first.folder / "lock").write_text("held")
        (first.folder / "samples.jsonl.tmp").write_text("half")
        save(first.folder, 1, "one")
        first.upload()
        assert stored(store) == {"metrics.jsonl": "1", **step_of("one", 1)}
        (first.folder / "metrics.jsonl").write_text("12")
        (first.folder / "telemetry").mkdir()
        (first.folder / "telemetry" / "step_2").write_text("x")
        save(first.folder, 2, "two")
        shutil.rmtree(first.folder / "checkpoints" / "1")
    assert copies(tmp_path) == []  # all of it is in the store
    assert stored(store) == {"metrics.jsonl": "12", "telemetry/step_2": "x", **step_of("two", 2)}
    store.pipe_file(f"{ROOT}/checkpoints/3/params/array", b"half a step")
    store.pipe_file(f"{ROOT}/notes.txt", b"not of a run")
    with stored_run(URL) as second:
        second.claim()
        names = [path for path in second.folder.rglob("*") if path.is_file()]
        found = {path.relative_to(second.folder).as_posix(): path.read_text() for path in names}
        del found[CLAIM]
        assert found == {"metrics.jsonl": "12", "telemetry/step_2": "x", **step_of("two", 2)}
        save(second.folder, 3, "three")
        second.upload()
        shutil.rmtree(second.folder / "telemetry")
    left = {"metrics.jsonl": "12", "notes.txt": "not of a run"}
    assert stored(store) == {**left, **step_of("two", 2), **step_of("three", 3)}


def test_steps_that_a_run_went_back_behind_are_gone_before_the_next_counts(store, monkeypatch):
    with stored_run(URL) as run:
        run.claim()
        for step in (1, 2, 3):
            save(run.folder, step, f"old {step}")
        run.upload()
        for step in (2, 3):
            shutil.rmtree(run.folder / "checkpoints" / str(step))
        save(run.folder, 2, "new")
        put, before = run._put, []

        def spy(files):
            before.append(stored(store))
            put(files)

        monkeypatch.setattr(run, "_put", spy)
        run.upload()
        assert before[-1] == step_of("old 1", 1)  # a killed upload leaves this
        assert stored(store) == {**step_of("old 1", 1), **step_of("new", 2)}


def test_who_begins_last_owns_the_workdir(store, monkeypatch, tmp_path):
    with pytest.raises(BlockingIOError, match="has begun to train in the workdir .*: this one"):
        with stored_run(URL) as first:
            first.claim()
            save(first.folder, 1, "one")
            first.upload()
            monkeypatch.setattr(runs, "CACHE", str(tmp_path / "elsewhere"))
            with stored_run(URL) as second:
                second.claim()
                save(second.folder, 2, "two")
            save(first.folder, 2, "another")
            first.upload()
    assert stored(store) == {**step_of("one", 1), **step_of("two", 2)}
    # The copy that the first one left is of no use, since another went on.
    monkeypatch.setattr(runs, "CACHE", str(tmp_path / "copies"))
    assert len(copies(tmp_path)) == 1
    with stored_run(URL) as third:
        assert (third.folder / "checkpoints/2/params/array").read_text() == "two"


def test_a_failed_upload_leaves_the_copy_and_the_next_run_goes_on_in_it(store, monkeypatch):
    with pytest.raises(ValueError, match="cannot be reached by fsspec: OSError: gone"):
        with stored_run(URL) as run:
            run.claim()
            save(run.folder, 1, "one")
            run.upload()
            save(run.folder, 2, "two")
            monkeypatch.setattr(
                run, "_upload_step", lambda *_: (_ for _ in ()).throw(OSError("gone"))
            )
    assert stored(store) == step_of("one", 1)
    with stored_run(URL) as run:
        assert (run.folder / "checkpoints/2/params/array").read_text() == "two"
        run.claim()
    assert stored(store) == {**step_of("one", 1), **step_of("two", 2)}


def test_a_run_that_is_refused_changes_nothing(store, tmp_path):
    with pytest.raises(ValueError, match="of the config"):
        with stored_run(URL):
            raise ValueError("of the config")
    assert store.find("/bucket") == [] and copies(tmp_path) == []


@pytest.mark.full
def test_a_killed_run_goes_on_as_if_nothing_had_been(data, monkeypatch, tmp_path):
    """On another machine from the newest step of the store, on this one from its own copy."""
    run_here("train", *tiny_run(data, tmp_path / "whole"))
    with s3_store(monkeypatch) as s3:

        def killed(home: str, *flags: str, code: int) -> str:
            monkeypatch.setenv("HOME", str(tmp_path / home))
            forget_listings()
            process = train_alone(*tiny_run(data, Path("URL")), f"--workdir={url}", *flags)
            _, error = process.communicate(timeout=300)
            assert process.returncode == code, error[-3000:]
            return error

        for where, homes in (("moves", ("a", "b", "c")), ("stays", ("d", "d", "d"))):
            url = f"s3://{BUCKET}/{where}"
            # The save of step 9 has waited for the upload of step 6, and that of 6 for that of 3.
            killed(homes[0], "--inject=kill@7", code=-signal.SIGKILL)
            killed(homes[1], "--inject=kill@11", code=-signal.SIGKILL)
            said = killed(homes[2], code=0)
            assert f"All files are in {url}" in said
            here = tmp_path / where
            for item in s3.list_objects_v2(Bucket=BUCKET, Prefix=f"{where}/")["Contents"]:
                file = tmp_path / item["Key"]
                file.parent.mkdir(parents=True, exist_ok=True)
                s3.download_file(BUCKET, item["Key"], str(file))
            assert numbers(here) == numbers(tmp_path / "whole")
            began = [event["step"] for event in happened(here) if event["kind"] == "resume"]
            assert len(began) == 2 and began[0] >= 3 and began[1] >= 6
            assert [
                p for p in (tmp_path / homes[2]).glob(".cache/fp8jax/runs/*") if p.is_dir()
            ] == []
        monkeypatch.setattr(stored_workdirs, "CACHE", str(tmp_path / "read"))
        forget_listings()
        there, whole = load_model(url), load_model(str(tmp_path / "whole"))
        jax.tree.map(np.testing.assert_array_equal, there.variables, whole.variables)
        assert there.step == whole.step == 12
