"""Every mutant still fits the library; and what the kill table is computed with."""

import collections

import pytest

from tests.mutants import table
from tests.mutants.later import LATER
from tests.mutants.library import LIBRARY_MUTANTS
from tests.mutants.mutant import KINDS, Mutant, StaleMutant, check, place
from tests.mutants.past import PAST
from tests.mutants.planted import PLANTED
from tests.support import ROOT

ALL = [*LIBRARY_MUTANTS, *PLANTED, *PAST]


def test_all_mutants_fit_and_compile():
    for mutant in ALL:
        check(ROOT, mutant)
    assert len({mutant.name for mutant in ALL}) == len(ALL)


def test_the_list_covers_each_folder_and_kind():
    folders = collections.Counter(
        place(ROOT, each).path.rpartition("/")[0] for each in LIBRARY_MUTANTS
    )
    # Sharding is two functions of a line each, a folder of `gemm` since the mutants were written.
    small = {"fp8jax", "fp8jax/lm", "fp8jax/gemm/sharding"}
    library = {
        path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "fp8jax").rglob("__init__.py")
    }
    assert all(folders[folder] >= 3 for folder in library - small), folders
    assert {mutant.kind for mutant in LIBRARY_MUTANTS} == set(KINDS)
    assert len(LIBRARY_MUTANTS) == 120 + len(LATER) and len(LATER) >= 15
    assert len(PLANTED) == 10 and len(PAST) >= 10


@pytest.mark.parametrize(
    "symbol, before, after, message",
    [
        ("Pow2.__cal__", "a", "b", "defined nowhere"),
        ("_parse", "a", "b", "jsonl.py:.*sinks.py:"),
        ("jsonl:_parse", "nothing of this kind", "b", "occurs 0 times in jsonl:_parse"),
        ("summary:record", "newest", "b", "occurs . times"),
        ("summary:record", "newest = jnp", "newest = (jnp", "does not compile"),
        ("summary:record", "newest = jnp", "newest  = jnp", "changes nothing"),
    ],
)
def test_a_mutant_that_does_not_fit_is_named(symbol, before, after, message):
    mutant = Mutant(symbol, "sign", before, after)
    with pytest.raises(StaleMutant, match=f"(?s){symbol}.*{message}"):
        check(ROOT, mutant)


def entry(*killers, left=0):
    return {"killed_by": dict.fromkeys(killers, "failed"), "tried": 3, "left": left, "seconds": 1.0}


def test_an_expensive_function_leaves_only_if_two_that_stay_kill_its_mutants():
    seconds = {"cheap": 0.1, "also_cheap": 0.2, "nine": 9.0, "ten": 10.0, "twenty": 20.0}
    choose = lambda **kills: table.choose(kills, seconds, over=5.0)  # noqa: E731
    assert choose(a=entry("cheap", "also_cheap")).leave == ["nine", "ten", "twenty"]
    assert choose(a=entry("cheap", "nine")).stay == {"nine": ["a"]}
    assert choose(a=entry("nine", "ten"), b=entry("ten")).leave == ["twenty"]
    # Twenty covers three mutants for the price of two.
    both = choose(
        a=entry("nine", "twenty", "cheap"), b=entry("ten", "twenty", "cheap"), c=entry("twenty")
    )
    assert both.stay == {"twenty": ["a", "b", "c"]}


def test_figures_of_a_table():
    kills = {"a": entry("fast", "slow"), "b": entry("slow"), "c": entry(), "d": entry("fast", "x")}
    found = table.figures(kills, {"fast", "x"})
    assert found.killed == ["a", "b", "d"] and found.default == ["a", "d"]
    assert found.two == ["d"] and found.survived == ["c"]
    assert table.finished(kills["c"]) and not table.finished(entry("fast", left=2))


def test_what_left_the_default_kills_nothing_that_two_that_stay_do_not():
    outside = lambda *killers, left=0: {"outside": entry(*killers, left=left)}  # noqa: E731
    kills = {
        "two": entry("fast", "x") | outside("slow"),
        "kept by one": entry("fast") | outside("slow", left=3),
        "kept by none": entry() | outside("slow"),
        "of no one outside": entry("fast") | outside(),
        "half tried": entry("fast") | outside(left=1),
        "not tried": entry("fast"),
    }
    found = table.figures(kills, {"fast", "x"})
    assert found.rule == ["kept by one", "kept by none"]
    assert found.unknown == ["half tried", "not tried"] and not found.survived
