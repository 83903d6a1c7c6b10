"""What the tests rely on: programs that are compiled once, and the budget of the default tier."""

import jax
import jax.numpy as jnp
import pytest

from tests.support import shared_programs, tiers

pytest_plugins = ["pytester"]


def compiled(function, *arguments):
    return jax.jit(function).lower(*arguments).compile().runtime_executable()


def test_equal_programs_are_compiled_once():
    first, again, other = (
        compiled(lambda x, by=by: jnp.sin(x) * by, jnp.ones(7)) for by in (2.0, 2.0, 3.0)
    )
    assert first is again and first is not other


@pytest.mark.counts_compilations
def test_programs_are_compiled_again_where_a_test_counts_them():
    first, again = (compiled(lambda x: jnp.sin(x) * 2, jnp.ones(7)) for _ in range(2))
    assert first is not again


def test_programs_of_other_devices_or_options_are_others():
    x = jnp.ones(7)
    here, there = (jax.device_put(x, device) for device in jax.devices()[:2])
    programs = [compiled(lambda x: jnp.sin(x) * 5, place) for place in (here, there)]
    lowered = jax.jit(lambda x: jnp.sin(x) * 5).lower(here)
    options = {"xla_allow_excess_precision": False}
    programs.append(lowered.compile(compiler_options=options).runtime_executable())
    assert len(set(map(id, programs))) == 3


def test_programs_that_call_python_are_always_compiled():
    def function(x):
        return jax.pure_callback(lambda x: x + 1, jax.ShapeDtypeStruct((7,), x.dtype), x)

    before = len(shared_programs._programs)
    compiled(function, jnp.ones(7))
    assert len(shared_programs._programs) == before


def test_a_program_is_compiled_while_another_is_lowered():
    """Here the numbering of the random bits of a shape that the process has not drawn before."""
    with jax.ensure_compile_time_eval():
        drawn = jax.jit(lambda key: jax.random.bits(key, (3, 5, 7, 11)))(jax.random.key(0))
    assert drawn.shape == (3, 5, 7, 11)


# The budget ---------------------------------------------------------------------------------------

TABLE = {"a::x": 500.0, "a::y": 400.0, "a::z": 0.1}


def test_costs_as_recorded_are_no_complaint():
    assert tiers.complaints(TABLE, TABLE) == []
    slower = {name: 3 * seconds for name, seconds in TABLE.items()}
    assert tiers.complaints(TABLE, slower) == []


def test_an_unknown_function_is_named():
    (line,) = tiers.complaints(TABLE, TABLE | {"b::new": 0.1})
    assert line.startswith("b::new is not in seconds.json")


def test_a_table_beyond_the_budget_is_refused():
    lines = tiers.complaints(TABLE | {"a::z": 200.0}, {"a::x": 1.0, "a::y": 1.0, "a::z": 1.0})
    assert lines[0].startswith("the default tier takes 1100 s by seconds.json, more than 1000 s")


def test_a_function_that_grew_beyond_the_budget_is_found_on_a_slow_machine():
    """Three functions say that the machine is half as fast; the fourth takes 200 times as long."""
    table = {"a::w": 250.0, "a::x": 250.0, "a::y": 250.0, "a::z": 2.0}
    measured = {name: 2 * seconds for name, seconds in table.items()}
    assert tiers.complaints(table, measured) == []
    (line,) = tiers.complaints(table, measured | {"a::z": 800.0})
    assert line.startswith("the default tier took 1150 s on a machine as fast as that of")


TESTS = """
import pytest

@pytest.mark.parametrize("x", range(3))
def test_cheap(x):
    pass

def test_dear():
    pass

@pytest.mark.full
def test_moved():
    pass

def test_skipped():
    pytest.skip("not here")  # a skipped test costs nothing: it must not enter the table
"""
CONFTEST = """
from tests.support import tiers
from tests.support.tiers import pytest_addoption

def pytest_configure(config):
    config.pluginmanager.register(tiers.Costs(config.rootpath / "seconds.json"))
"""


def test_the_table_sets_the_tiers_and_ci_keeps_them(pytester, monkeypatch):
    monkeypatch.setenv("CI", "true")
    pytester.makeini("[pytest]\nmarkers = full: dear\n    quick: cheap")
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(made_up_test=TESTS)
    dear = "made_up_test.py::test_dear"
    (pytester.path / "seconds.json").write_text(f'{{"{dear}": 9}}')
    unknown = pytester.inline_run("-p", "no:xdist", "-m", "not full")
    assert unknown.ret == pytest.ExitCode.TESTS_FAILED  # test_cheap is not in the table
    pytester.inline_run("-p", "no:xdist", "--record-seconds")
    table = tiers.read_table(pytester.path / "seconds.json")
    names = {"test_cheap", "test_dear", "test_moved"}
    assert table.keys() == {f"made_up_test.py::{name}" for name in names}
    assert pytester.inline_run("-p", "no:xdist", "-m", "not full").ret == pytest.ExitCode.OK
    tiers.write_table(table | {dear: 9.0}, pytester.path / "seconds.json")
    pytester.inline_run("-p", "no:xdist", "-m", "quick").assertoutcome(passed=3)  # test_cheap
