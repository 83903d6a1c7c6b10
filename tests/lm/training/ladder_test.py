"""The ladder of recovery: its rungs, their order and their budgets."""

import pytest

from fp8jax.lm.training.ladder import STOP, Ladder


def test_rungs_are_tried_in_their_order_within_their_budgets():
    ladder = Ladder.parse("repeat:2,skip:1,rollback:1")
    assert ladder.waits and not Ladder.parse("skip:9").waits and not Ladder().waits
    none = {"repeat": 0, "skip": 0, "rollback": 0}
    assert ladder.next(none, ()) == "repeat"
    assert ladder.next(none, {"repeat"}) == "skip"
    assert ladder.next(none | {"repeat": 2}, ()) == "skip"
    assert ladder.next(none | {"skip": 1}, {"repeat"}) == "rollback"
    assert ladder.next({"repeat": 2, "skip": 1, "rollback": 1}, ()) == STOP
    assert Ladder.parse("").next({}, ()) == STOP


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ignore:3", "'ignore' is none of repeat, skip, rollback"),
        ("skip", "skip needs a budget, as in skip:10"),
        ("skip:0", "skip needs a budget"),
        ("skip:-1", "skip needs a budget"),
        ("skip:all", "skip needs a budget"),
        ("skip:1,skip:2", "names a rung twice"),
        ("skip:1,", "'' is none of"),
    ],
)
def test_a_ladder_that_means_nothing_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Ladder.parse(text)
