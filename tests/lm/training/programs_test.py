"""Programs that compile in threads, while a run prepares its start."""

import threading
import time

import jax
import pytest

from fp8jax.device import hardware
from fp8jax.lm.model.transformer import Transformer
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

    def lower(run, stage, name):
        compiling.append(time.perf_counter())
        calls.append((stage.policy.name, name))
        return original(run, stage, name)

    def report_start(tools, now, *others):
        began.append(now.clock)
        original_report(tools, now, *others)

    original, original_report = programs.lower_program, loop._report_start
    monkeypatch.setattr(hardware, "wake", lambda devices: calls.append(list(devices)))
    monkeypatch.setattr(loop, "_report_start", report_start)
    monkeypatch.setattr(programs, "lower_program", lower)
    monkeypatch.setitem(POLICIES, "one_linear", ONE_LINEAR)
    config = one_layer(data, precision="one_linear", num_steps=5)
    train_and_evaluate(config, str(tmp_path / "run"))
    woken = jax.local_devices()[:1]  # those of its mesh
    assert calls == [woken, ("one_linear", "step"), ("one_linear", "seed_step")]
    assert began[0] < compiling[0]
    config.num_steps = 6
    config.resume_with_changes = True
    train_and_evaluate(config, str(tmp_path / "run"))
    assert calls[3:] == [woken, ("one_linear", "step")]


@pytest.mark.parametrize("what", ["lower_program", "_compile"])
def test_an_error_of_a_program_ends_the_run(data, tmp_path, monkeypatch, what):
    def fail(*_):
        raise NotImplementedError("no such kernel")

    monkeypatch.setattr(programs, what, fail)
    with pytest.raises(NotImplementedError, match="no such kernel"):
        train_and_evaluate(tiny(data), str(tmp_path / "run"))


def test_what_comes_before_the_device_s_first_array_makes_none(data):
    """So that a GPU can get ready meanwhile (`hardware.wake`)."""
    with jax.transfer_guard("disallow_explicit"):
        run = build(one_layer(data, precision="fp8_delayed"))
        for name in programs.training_programs(run.stages[0]):
            programs.lower_program(run, run.stages[0], name)


def test_the_state_of_step_0_is_traced_once(data, monkeypatch):
    traced = []

    def init(model, *arguments):
        traced.append(model)
        return original(model, *arguments)

    original = Transformer.init
    monkeypatch.setattr(Transformer, "init", init)
    run = build(one_layer(data))
    with jax.set_mesh(run.mesh):  # as in the loop
        state = run.stages[0].programs.initialize()
    assert len(traced) == 1 and state.step == 0


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


def test_each_program_compiles_while_the_next_is_lowered(data, monkeypatch):
    """They are lowered in the thread that asks for them, and compiled in others."""
    asking, compiling, lowered = threading.get_ident(), threading.Event(), threading.Event()

    def lower(run, stage, name):
        assert threading.get_ident() == asking
        if name == "eval_step":
            assert compiling.wait(60), "the first program waits until the second is lowered"
            lowered.set()
        return name

    def compile_(name):
        assert threading.get_ident() != asking
        compiling.set()
        assert lowered.wait(60)
        return f"compiled {name}", {"step": 2e9, "eval_step": 1e9}[name]

    monkeypatch.setattr(programs, "lower_program", lower)
    monkeypatch.setattr(programs, "_compile", compile_)
    run = build(one_layer(data))
    begun = Compilation(run, run.stages[0], ["step", "eval_step"])
    compiled, seconds = begun.result()
    assert compiled == {name: f"compiled {name}" for name in ("step", "eval_step")}
    assert seconds == 2e9 - begun._began  # until the last is compiled, not until it is asked for


def test_its_programs_are_those_of_the_stage(data):
    run = build(one_layer(data))
    compiled, seconds = Compilation(run, run.stages[0], ["step", "eval_step"]).result()
    assert list(compiled) == ["step", "eval_step"] and seconds > 0
    assert "jit_step" in compiled["step"].as_text()
