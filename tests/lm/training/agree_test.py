"""What processes must have in common: threads of one process on JAX's own coordinator."""

import concurrent.futures
import contextlib
import itertools
import threading

import jax
import pytest

from configs import base
from fp8jax.device import processes
from fp8jax.lm.records import workdir_lock
from fp8jax.lm.training import agree
from fp8jax.lm.training.agree import (
    DisagreeError,
    FailedElsewhereError,
    config_facts,
    lock_together,
    together,
)
from tests.support.coordinator import joined


class Calls(threading.local):
    """A counter for each thread."""

    def begin(self):
        self._numbers = itertools.count(1)

    def __next__(self):
        return next(self._numbers)


@pytest.fixture
def in_each(monkeypatch):
    """A function that calls others, each in a process of its own; what they return or raise."""
    monkeypatch.setattr(agree, "_calls", Calls())
    monkeypatch.setattr(processes, "host", lambda: f"node{processes.index()}")

    def run(*calls):
        def one(index):
            agree._calls.begin()  # a thread that is done may be another process next
            with be(index):
                try:
                    return calls[index]()
                except Exception as error:
                    return error

        with joined(len(calls)) as be, concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
            return list(pool.map(one, range(len(calls))))

    return run


def stating(**facts):
    return lambda: together("things", lambda: len(facts), lambda _: facts)


def failing(error):
    def fail():
        raise error

    return lambda: together("things", fail)


def test_a_process_by_itself_just_works():
    assert together("things", lambda: 5, lambda _: pytest.fail("it states nothing")) == 5


def test_equal_facts_pass_again_and_again(in_each):
    def twice():
        return stating(a="1", b="2")(), stating(a="2")()

    assert in_each(twice, twice, twice) == [(2, 1)] * 3


def test_a_difference_ends_all_with_one_line(in_each):
    got = in_each(stating(a="1", b="2"), stating(a="1", b="2"), stating(a="3", c="4"))
    assert [type(error) for error in got] == [DisagreeError] * 3
    assert {str(error) for error in got} == {
        "the processes differ: a is 1 in process 0 on node0 and 3 in process 2 on node2; "
        "b is 2 in process 0 on node0 and (missing) in process 2 on node2; "
        "c is (missing) in process 0 on node0 and 4 in process 2 on node2"
    }


def test_long_differences_are_counted(in_each):
    many = {f"key{i}": "1" for i in range(9)}
    (error, _) = in_each(stating(**many), stating())
    assert str(error).endswith("; and 3 more") and str(error).count("; ") == 6


@pytest.mark.parametrize("index", [0, 2])
def test_a_failure_in_one_is_said_by_all(index, in_each):
    """Also while another one still works."""
    calls = [stating(a="1")] * 3
    calls[index] = failing(OSError("no such\nfile"))
    got = in_each(*calls)
    line = f"process {index} on node{index}: no such file"
    for i, error in enumerate(got):
        kind, text = (OSError, "no such\nfile") if i == index else (FailedElsewhereError, line)
        assert (type(error), str(error)) == (kind, text)


def test_who_is_waited_for_is_said(in_each, monkeypatch, capsys):
    monkeypatch.setattr(agree, "SAY_EVERY_S", 0.2)
    released = threading.Event()

    def slow():
        together("tokens", lambda: released.wait(1))

    in_each(slow, lambda: together("tokens", lambda: None), slow)
    said = capsys.readouterr().err.splitlines()
    assert said and all(
        line.startswith("waiting: process 1 on node1, for tokens of") for line in said
    )


# What the run states ------------------------------------------------------------------------------


def test_a_config_differs_by_key_and_may_have_its_own_cache(monkeypatch):
    config = base.get_config()
    facts = config_facts(config)
    config.optimizer.learning_rate, config.cache_dir = 5e-3, "/scratch"
    other = config_facts(config)
    assert facts.keys() == other.keys()
    assert [key for key in facts if facts[key] != other[key]] == ["config.optimizer.learning_rate"]
    assert other["config.optimizer.learning_rate"] == "0.005"


def test_code_libraries_flags_and_options_are_stated(monkeypatch, tmp_path):
    monkeypatch.setenv("XLA_FLAGS", "--b --xla_force_host_platform_device_count=2 --a=1")
    facts = agree._code_facts()
    assert facts["jax"] == jax.__version__ and facts["jax_enable_x64"] == "False"
    assert facts["XLA_FLAGS"] == "--a=1 --b"
    package = tmp_path / "fp8jax"
    (package / "lm" / "training").mkdir(parents=True)
    file = package / "lm" / "training" / "agree.py"
    file.write_text("a")
    monkeypatch.setattr(agree, "__file__", str(file))
    first = agree._code_facts()["code of fp8jax"]
    (package / "more.py").write_text("")
    assert agree._code_facts()["code of fp8jax"] != first != facts["code of fp8jax"]


# The workdir --------------------------------------------------------------------------------------


@pytest.fixture
def as_many(monkeypatch):
    """The lock knows of processes what the store does."""
    monkeypatch.setattr(workdir_lock.jax, "process_index", processes.index)


def held(workdir):
    def hold():
        with contextlib.ExitStack() as stack:
            lock_together(stack, str(workdir))
            return sorted(path.name for path in workdir.glob("*"))

    return hold


@pytest.mark.usefixtures("as_many")
def test_one_process_holds_the_lock_of_a_shared_workdir(in_each, tmp_path):
    workdir = tmp_path / "a" / "run"
    for names in in_each(held(workdir), held(workdir)):
        assert names[-1:] == ["lock"] and all(name.startswith(".seen-") for name in names[:-1])
    assert [path.name for path in workdir.iterdir()] == ["lock"]


@pytest.mark.usefixtures("as_many")
def test_a_workdir_that_is_not_shared_ends_all(in_each, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    got = in_each(held(here), held(there))
    assert [type(error) for error in got] == [DisagreeError] * 2
    wrong = (
        f"workdir is shared in process 0 on node0 and not shared ({there}) in process 1 on node1"
    )
    assert {str(error) for error in got} == {f"the processes differ: {wrong}"}
    assert [path.name for path in here.iterdir()] == ["lock"] and not there.exists()


@pytest.mark.usefixtures("as_many")
def test_a_lock_that_another_run_holds_ends_all(in_each, tmp_path):
    with workdir_lock.lock_workdir(tmp_path):
        mine, other = in_each(held(tmp_path), held(tmp_path))
    assert type(mine) is BlockingIOError and "another program (process " in str(mine)
    assert str(other) == f"process 0 on node0: {mine}"
