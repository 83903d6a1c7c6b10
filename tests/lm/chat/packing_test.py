"""Slots, rows and epochs: the table of the docstring, and what holds for any sizes."""

from pathlib import Path

import numpy as np
import pytest

from fp8jax.lm.chat.examples import Examples
from fp8jax.lm.chat.packing import ExampleRows, pack, slot_sizes


def examples_of(sizes, supervised=None) -> Examples:
    """Examples that take so many places; token t of example i is 1000 i + t."""
    lengths = np.array(sizes, np.int64) + 1
    begins = np.cumsum(lengths) - lengths
    tokens = np.concatenate([1000 * i + np.arange(n) for i, n in enumerate(lengths)])
    return Examples(
        tokens=tokens.astype(np.uint32),
        begins=begins,
        lengths=lengths,
        supervised=np.ones(len(tokens), bool) if supervised is None else np.array(supervised),
        files=np.zeros(len(sizes), np.int64),
        lines=np.arange(1, len(sizes) + 1),
        paths=(Path("a.jsonl"),),
    )


def lengths_of_chats(count, seed=0):
    """Sizes as of worked solutions: log-normal, from a few tokens to thousands."""
    rng = np.random.default_rng(seed)
    return np.clip(np.exp(rng.normal(5.5, 0.9, count)), 4, 4096).astype(np.int64)


def test_rows_of_the_docstring():
    rows = ExampleRows(
        examples_of([3, 2], [False, False, True, True, False, True, True]), seq_len=6
    )
    (row,) = rows
    assert row["tokens"].tolist() == [0, 1, 2, 1000, 1001, 0]
    assert row["targets"].tolist() == [1, 2, 3, 1001, 1002, 0]
    assert row["weights"].tolist() == [0, 1, 1, 1, 1, 0]
    assert row["segments"].tolist() == [1, 1, 1, 2, 2, 0]
    assert row["positions"].tolist() == [0, 1, 2, 0, 1, 0]


def test_slots_of_the_docstring():
    rows = ExampleRows(examples_of([3, 2, 2, 1, 1]), seq_len=4)
    assert [rows.members(i) for i in range(3)] == [[0, 3], [1, 2], [4]]
    dealt = {tuple(map(tuple, map(epoch.members, range(3)))) for epoch in epochs(rows, 40)}
    # Of two examples of size 2 and two of size 1, each pair has two orders.
    assert dealt == {((0, a), b, (7 - a,)) for a in (3, 4) for b in ((1, 2), (2, 1))}


def epochs(rows, count, seed=(0,)):
    return [rows.epoch(number, seed) for number in range(count)]


@pytest.mark.parametrize("seq_len", [4096, 5000])
def test_every_epoch_holds_every_example_once(seq_len):
    sizes = lengths_of_chats(3000)
    rows = ExampleRows(examples_of(sizes), seq_len=seq_len)
    orders = []
    for epoch in [rows, *epochs(rows, 3)]:
        members = [epoch.members(i) for i in range(len(rows))]
        orders.append(sum(members, []))
        assert sorted(orders[-1]) == list(range(3000))
        assert max(sum(sizes[row]) for row in members) <= seq_len
    # Only rows in which every size occurs once among all examples keep their company.
    first, second = (
        {frozenset(row) for row in map(epoch.members, range(len(rows))) if len(row) > 1}
        for epoch in epochs(rows, 2)
    )
    assert len(first & second) < 0.06 * len(first)
    assert rows.fill() > 0.97
    assert len(rows) >= -(-sizes.sum() // seq_len)


def test_an_epoch_depends_on_seed_and_number_only():
    left, right = (ExampleRows(examples_of(lengths_of_chats(50)), seq_len=4096) for _ in range(2))
    np.testing.assert_array_equal(left.epoch(7, (1, 0)).dealt, right.epoch(7, (1, 0)).dealt)
    others = [left.epoch(8, (1, 0)), left.epoch(7, (2, 0)), left.epoch(7, (1, 1))]
    assert all((left.epoch(7, (1, 0)).dealt != other.dealt).any() for other in others)
    # A resumed run relies on it: should NumPy draw otherwise, this has to be known.
    same = ExampleRows(examples_of([4] * 8), seq_len=4)
    assert same.epoch(2, (3, 0)).dealt.tolist() == [5, 2, 1, 7, 6, 0, 3, 4]


@pytest.mark.parametrize("seq_len", [1, 100, 1000, 1001, 32_768])
def test_slots_are_hardly_larger_than_examples(seq_len):
    sizes = np.arange(1, seq_len + 1)
    slots = slot_sizes(sizes, seq_len)
    assert (slots >= sizes).all() and (slots <= seq_len).all() and (np.diff(slots) >= 0).all()
    assert (slots[:128] == sizes[:128]).all()
    assert ((slots - sizes) * 64 < sizes).all()
    assert len(set(slots.tolist())) <= 128 + 64 * max(0, (seq_len - 1).bit_length() - 7)


def test_packing_is_best_fit():
    # 6 leaves 4, 5 leaves 5, the first 4 fits best beside the 6, and 3 beside the 5.
    assert pack([6, 5, 4, 3, 3], 10).tolist() == [0, 1, 0, 1, 2]
    assert pack([10, 10], 10).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("slots", "message"), [([1, 2], "sorted"), ([11, 2], "do not fit"), ([2, 0], "do not fit")]
)
def test_bad_slots(slots, message):
    with pytest.raises(ValueError, match=message):
        pack(slots, 10)


def test_bad_examples():
    with pytest.raises(ValueError, match="no examples"):
        ExampleRows(examples_of([1]).only(np.array([False])), seq_len=4)
    with pytest.raises(ValueError, match="takes 5 places, more than a row of seq_len=4"):
        ExampleRows(examples_of([3, 5]), seq_len=4)
    with pytest.raises(IndexError, match="row 1 of 1"):
        ExampleRows(examples_of([1]), seq_len=4)[1]
