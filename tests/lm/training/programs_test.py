"""Programs that compile in a thread, while a run prepares its start."""

import threading
import time

import pytest

from fp8jax.lm.records.jsonl import read_jsonl
from fp8jax.lm.training import loop, new_programs, programs
from fp8jax.lm.training.build import build
from fp8jax.lm.training.loop import train_and_evaluate
from fp8jax.lm.training.programs import Compilation
from fp8jax.numerics.policy import POLICIES
from tests.support.runs import ONE_LINEAR, one_layer, tiny


def test_a_run_compiles_its_programs_once(data, tmp_path, monkeypatch):
    """A fresh run begins when it is made, a resumed one when it knows what it needs. A run's clock
    begins before that: the seconds of a run contain those of its compilation."""
    calls, compiling, began = [], [], []

    def compile_programs(run, stage, names):
        compiling.append(time.perf_counter())
        calls.append((stage.policy.name, *names))
        return original(run, stage, names)

    def report_start(tools, now, *others):
        began.append(now.clock)
        original_report(tools, now, *others)

    original, original_report = programs.compile_programs, loop._report_start
    monkeypatch.setattr(loop, "_report_start", report_start)
    monkeypatch.setattr(programs, "compile_programs", compile_programs)
    monkeypatch.setattr(new_programs, "compile_programs", compile_programs)
    monkeypatch.setitem(POLICIES, "one_linear", ONE_LINEAR)
    config = one_layer(data, precision="one_linear", num_steps=5)
    train_and_evaluate(config, str(tmp_path / "run"))
    assert calls == [("one_linear", "seed_step", "step")] and began[0] < compiling[0]
    config.num_steps = 6
    config.resume_with_changes = True
    train_and_evaluate(config, str(tmp_path / "run"))
    assert calls[1:] == [("one_linear", "step")]


def test_an_error_of_the_thread_ends_the_run(data, tmp_path, monkeypatch):
    def fail(*_):
        raise NotImplementedError("no such kernel")

    monkeypatch.setattr(programs, "compile_programs", fail)
    with pytest.raises(NotImplementedError, match="no such kernel"):
        train_and_evaluate(tiny(data), str(tmp_path / "run"))


@pytest.mark.parametrize("found", [True, False], ids=["found", "failed"])
def test_gemms_are_found_beside_the_first_steps(data, tmp_path, monkeypatch, found):
    """They are found after the last step is dispatched; the run's end waits for them, and raises
    what finding them raised."""
    dispatched, trained = [], threading.Event()

    def find(*arguments):
        assert trained.wait(60), "the run waited before its last step"
        if not found:
            raise NotImplementedError("no such text")
        return original_find(*arguments)

    def dispatch(now):
        dispatched.append(now.step)
        out = original_dispatch(now)
        if now.step == 3:
            trained.set()
        return out

    original_find, original_dispatch = new_programs._find, loop._dispatch
    monkeypatch.setattr(new_programs, "_find", find)
    monkeypatch.setattr(loop, "_dispatch", dispatch)
    config = one_layer(data, num_steps=3)
    if not found:
        with pytest.raises(NotImplementedError, match="no such text"):
            train_and_evaluate(config, str(tmp_path))
        end = read_jsonl(tmp_path / "events.jsonl")[-1]
        assert (end["kind"], end["reason"], end["step"]) == ("end", "NotImplementedError", 3)
        return
    train_and_evaluate(config, str(tmp_path))
    assert dispatched == [1, 2, 3]
    (event,) = (e for e in read_jsonl(tmp_path / "events.jsonl") if e["kind"] == "precision")
    assert event["step"] in (2, 3)
    assert (tmp_path / "precision.txt").read_text().startswith("GEMMs of a training step, policy")


def test_its_programs_are_those_of_the_stage(data):
    run = build(one_layer(data))
    compiled, seconds = Compilation(run, run.stages[0], ["step", "eval_step"]).result()
    assert list(compiled) == ["step", "eval_step"] and seconds > 0
    assert "jit_step" in compiled["step"].as_text()
