"""What is read of a run's directory, whatever is in it."""

import json

import pytest

from fp8jax.lm.figures.run_files import has_ended, read_run
from fp8jax.lm.records.events import Event
from fp8jax.lm.records.metrics import Metrics
from fp8jax.numerics.names import as_recipe
from fp8jax.telemetry.files import StepFiles
from fp8jax.telemetry.rows import hidden_row


def row(step):
    return hidden_row(2.0, "layers/mlp", step=step, layer=0, recipe=as_recipe("fp8_block").name)


@pytest.fixture
def run(tmp_path):
    """The directory of a finished run of two steps, as the writers of the library leave it."""
    with Metrics(tmp_path, num_steps=2) as metrics:
        metrics.event(0, Event.START, jax="0.10.2")
        for step in (1, 2):
            metrics.write(step, {"loss": 3.0 - step})
        metrics.event(2, Event.END, reason="finished")
    tmp_path.joinpath("config.json").write_text('{"precision": "fp8_block"}')
    tmp_path.joinpath("precision.txt").write_text("GEMMs of a training step\n")
    tmp_path.joinpath("data.txt").write_text("source  split\n")
    StepFiles(tmp_path, 0).write(2, [row(2)])
    return tmp_path


def test_a_finished_run_has_everything(run):
    found = read_run(run)
    assert found.missing == ()
    assert found.path == run and found.name == run.name
    assert [(line["step"], line["loss"]) for line in found.metrics] == [(1, 2.0), (2, 1.0)]
    assert [event["kind"] for event in found.events] == ["start", "end"] and has_ended(found.events)
    assert found.config == {"precision": "fp8_block"}
    assert found.telemetry.rows == (row(2),)
    assert found.precision == "GEMMs of a training step" and found.data == "source  split"


def test_half_a_last_line_and_broken_lines_are_left_out(run):
    log = run / "metrics.jsonl"
    log.write_bytes(b'\0\0\0\n[1]\n{"loss": 2.0}\n' + log.read_bytes() + b'{"step": 3, "lo')
    found = read_run(run)
    assert [line["step"] for line in found.metrics] == [1, 2]
    first, second, third = found.missing
    assert first.startswith("metrics.jsonl:1: not JSON") and "metrics.jsonl:2: not a JSON" in second
    assert third == "metrics.jsonl: 1 line without step. Left out."


def test_a_run_of_an_older_version_lacks_files(tmp_path):
    line = {"step": 1, "loss": 2.0}
    tmp_path.joinpath("metrics.jsonl").write_text(json.dumps(line) + "\n")
    found = read_run(tmp_path)
    assert found.metrics == [line]
    assert (found.config, found.telemetry, found.precision, found.events) == (None, None, None, [])
    said = " ".join(found.missing)
    for part in (
        "no events.jsonl",
        "no config.json",
        "no precision.txt",
        "no data.txt",
        "no telemetry",
    ):
        assert f"There is {part}" in said


def test_a_run_that_has_just_started(tmp_path):
    with Metrics(tmp_path, num_steps=2):
        found = read_run(tmp_path)
    assert found.metrics == [] and not has_ended(found.events)
    assert "metrics.jsonl has no lines yet." in found.missing


def test_what_cannot_be_read_is_said(run):
    run.joinpath("config.json").write_text('{"precision": ')
    telemetry = run / "telemetry"
    whole = telemetry.joinpath("step_000000002.parquet").read_bytes()
    telemetry.joinpath("step_000000004.parquet").write_bytes(whole[: len(whole) // 2])
    found = read_run(run)
    assert found.config is None and found.telemetry.rows == (row(2),)
    assert found.missing[0].startswith("config.json is not JSON")
    assert found.missing[1].startswith("telemetry/step_000000004.parquet cannot be read")


def test_a_run_ends_after_its_last_start():
    def kinds(*names):
        return [{"step": 0, "kind": name} for name in names]

    assert has_ended(kinds("start", "end")) and has_ended(kinds("end"))
    assert not has_ended(kinds("start", "end", "start", "resume"))
    assert not has_ended(kinds("start")) and not has_ended([])


def test_what_is_no_run_is_refused(tmp_path):
    tmp_path.joinpath("config.json").write_text("{}")  # as a Hugging Face folder has
    with pytest.raises(ValueError, match="is not the directory of a run: it has no metrics.jsonl"):
        read_run(tmp_path)
    with pytest.raises(NotADirectoryError, match="config.json is a file"):
        read_run(tmp_path / "config.json")
    with pytest.raises(FileNotFoundError, match="no such directory"):
        read_run(tmp_path / "none")
