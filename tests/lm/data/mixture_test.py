"""Mixtures of sources: exact shares in every cycle, and the same order after any resume."""

import itertools
import json
from fractions import Fraction

import grain
import numpy as np
import pytest

from fp8jax.lm.data.loader import train_batches
from fp8jax.lm.data.mixture import Mixture, Position
from tests.support.rows import numbered

# Mixtures.


def mixture_of(*weights: str, rows: tuple[int, ...] = (70, 110, 50)) -> Mixture:
    """Sources a, b, …; their rows say (source, row). (Grain is slow where there are few.)"""
    names = "abcdefgh"[: len(rows)]
    sources = {
        name: [{"tokens": np.array([number, i], np.int32)} for i in range(count)]
        for number, (name, count) in enumerate(zip(names, rows, strict=True))
    }
    if not weights:
        return Mixture(sources)
    sources = dict(itertools.islice(sources.items(), len(weights)))
    return Mixture(sources, dict(zip(sources, map(Fraction, weights), strict=True)))


def sequence(mixture: Mixture, count: int, position: Position | None = None, seed: int = 3):
    """The (source, row) of the next `count` positions."""
    read = mixture.reader(mixture.start() if position is None else position, seed=seed)
    return [tuple(read(n)["tokens"].tolist()) for n in range(count)]


def dealt(proportions: list[int]) -> list[int]:
    """The sources of a cycle by exact arithmetic."""
    places = [
        (Fraction(2 * k + 1, 2 * p), source)
        for source, p in enumerate(proportions)
        for k in range(p)
    ]
    return [source for _, source in sorted(places)]


MIXTURES = [
    (("0.7", "0.3"), [7, 3]),
    (("1", "2"), [1, 2]),
    (("2", "1"), [2, 1]),
    (("0.5", "0.5"), [1, 1]),
    (("0.333", "0.667"), [333, 667]),
    (("1", "1", "1"), [1, 1, 1]),
    (("10", "0.25", "3"), [40, 1, 12]),
    (("6", "10", "15"), [6, 10, 15]),
    (("5",), [1]),
    ((), [7, 11, 5]),
]


@pytest.mark.parametrize(("weights", "proportions"), MIXTURES)
def test_mixtures_are_exact(weights, proportions):
    mixture = mixture_of(*weights)
    assert list(mixture.schedule.values()) == proportions
    cycle, start = sum(proportions), mixture.start()
    count = max(2 * cycle + cycle // 2 + 3, 250)
    found = sequence(mixture, count)
    assert [source for source, _ in found] == (dealt(proportions) * count)[:count]

    counts = dict.fromkeys(mixture.rows, 0)
    for g, (source, _) in enumerate(found):
        if g < 100 or g % 97 == 0:  # it takes some microseconds each
            assert mixture.counts(start, g) == mixture.counts(start.advanced(g)) == counts
        # Before time t source s has p_s * t rows give or take a half, and all have g, give or
        # take a half a source.
        for number, name in enumerate(mixture.rows):
            share = proportions[number] / cycle
            assert abs(counts[name] - share * g) <= 0.5 + share * len(proportions) / 2
        counts[list(mixture.rows)[source]] += 1

    # An epoch of a source has each of its rows once, whatever the others do.
    for number, rows in enumerate(mixture.rows.values()):
        own = [row for source, row in found if source == number]
        for first in range(0, len(own), len(rows)):
            epoch = own[first : first + len(rows)]
            assert len(set(epoch)) == len(epoch)


def test_the_example_of_the_docstring():
    mixture = mixture_of("2", "1")
    assert [source for source, _ in sequence(mixture, 7)] == [0, 1, 0, 0, 1, 0, 0]


def test_counts_far_out():
    mixture = mixture_of("0.7", "0.3")
    far = mixture.start().advanced(10**15 + 7)
    counts = mixture.counts(far, 10)
    assert sum(counts.values()) == 10**15 + 17
    assert abs(counts["a"] - Fraction(7, 10) * (10**15 + 17)) < 1
    assert len(sequence(mixture, 3, far)) == 3


def test_the_order_within_a_mixture_is_pinned():
    # As test_the_order_is_pinned: the first source has the order that it has alone.
    found = sequence(mixture_of("1", "1", rows=(8, 8)), 16, seed=0)
    assert [row for source, row in found if source == 0] == [1, 2, 4, 5, 3, 7, 0, 6]
    assert [row for source, row in found if source == 1] == [1, 6, 0, 7, 2, 3, 5, 4]


@pytest.mark.parametrize("first", [0, 5, 1234])
@pytest.mark.parametrize("num_epochs", [None, 2])
def test_rows_are_those_of_an_independent_computation(first, num_epochs):
    proportions, sizes, base, seed, count = [7, 3], [70, 110], [13, 48], 3, 400
    mixture = mixture_of("0.7", "0.3")
    position = Position(
        schedule=mixture.schedule, base=dict(zip("ab", base, strict=True)), rows=first
    )
    seeds = [seed, int(np.random.SeedSequence([seed, 1]).generate_state(1)[0])]
    orders = [
        grain.MapDataset.range(size).seed(own).shuffle().repeat()
        for size, own in zip(sizes, seeds, strict=True)
    ]
    sources = np.resize(dealt(proportions), first + count)
    given = np.eye(2, dtype=int)[sources].cumsum(0) - 1 + base  # rows of each source until then
    expected = []
    for source, numbers in zip(sources[first:], given[first:], strict=True):
        k = int(numbers[source])
        ended = num_epochs is not None and k >= num_epochs * sizes[source]
        expected.append((0, 0) if ended else (source, orders[source][k]))
    read = mixture.reader(position, seed=seed, num_epochs=num_epochs)
    for n in (*range(count), 17, 0, count - 1):  # in order, then at random
        assert tuple(read(n)["tokens"].tolist()) == expected[n]


@pytest.mark.parametrize("weights", [("0.7", "0.3"), ("6", "10", "15"), ()])
def test_mixtures_resume_anywhere(weights):
    mixture = mixture_of(*weights)
    whole = sequence(mixture, 90)
    for start in (*range(34), 60, 71):
        saved = json.loads(json.dumps(mixture.start().advanced(start).to_json(), sort_keys=True))
        position = mixture.start(saved)
        assert position == mixture.start().advanced(start)
        assert sequence(mixture, 12, position) == whole[start : start + 12]


@pytest.mark.parametrize(("batch_size", "process_count"), [(1, 1), (4, 2), (12, 4)])
def test_mixtures_resume_with_other_batches(batch_size, process_count):
    mixture = mixture_of("0.7", "0.3")
    position = mixture.start(mixture.start().advanced(17).to_json())
    shares = []
    for index in range(process_count):
        batches = train_batches(
            mixture,
            seed=3,
            batch_size=batch_size,
            position=position,
            process_index=index,
            process_count=process_count,
        )
        shares.append([batch["tokens"] for batch in itertools.islice(batches, 3)])
        batches.close()
    joined = np.concatenate(shares, axis=1).reshape(-1, 2)
    assert [*map(tuple, joined.tolist())] == sequence(mixture, 60)[17 : 17 + 3 * batch_size]


@pytest.mark.parametrize("switch", [0, 1, 2, 9, 10, 23, 50])
def test_changed_weights_continue_each_source(switch):
    before, after = mixture_of("0.7", "0.3"), mixture_of("1", "4")
    found = sequence(before, switch)
    position = after.start(before.start().advanced(switch).to_json())
    assert (position.rows, position.schedule) == (0, {"a": 1, "b": 4})
    assert position.base == before.counts(before.start(), switch)
    found += sequence(after, 50, position)
    assert sum(after.counts(position, 50).values()) == switch + 50
    # A second change, back to where it was, and nothing is forgotten.
    position = before.start(position.advanced(50).to_json())
    found += sequence(before, 50, position)
    assert sum(before.counts(position, 50).values()) == len(found)
    for number, name in enumerate("ab"):
        own = [row for source, row in found if source == number]
        assert len(own) == before.counts(position, 50)[name]
        alone = mixture_of("1", "1")  # whose order of each source does not depend on weights
        order = [row for source, row in sequence(alone, 2 * len(own)) if source == number]
        assert own == order


def named(rows: int, number: int) -> list[dict[str, np.ndarray]]:
    return [{"tokens": np.array([number, i], np.int32)} for i in range(rows)]


def test_sources_come_and_go():
    a, b, c = named(70, 0), named(70, 1), named(50, 2)
    found = {0: [], 1: [], 2: []}
    position, total = Mixture({"a": a}).start(), 0
    stages = [{"a": a}, {"a": a, "b": b}, {"b": b}, {"c": c, "b": b}, {"b": b, "c": c, "a": a}]
    for rows, count in zip(stages, (40, 90, 50, 110, 200), strict=True):
        mixture = Mixture(rows)
        position = mixture.start(json.loads(json.dumps(position.to_json(), sort_keys=True)))
        for source, row in sequence(mixture, count, position):
            found[source].append(row)
        position, total = position.advanced(count), total + count
        counts = mixture.counts(position)
        assert sum(counts.values()) == total
        assert {"abc".index(name): n for name, n in counts.items()} == {
            source: len(rows) for source, rows in found.items() if "abc"[source] in position.base
        }
    assert list(position.base) == ["a", "b", "c"]
    # Each source kept its place, hence its order, and lost and repeated no row on the way.
    whole = Mixture({"a": a, "b": b, "c": c}, dict.fromkeys("abc", Fraction(1)))
    order = sequence(whole, 900)
    for number, rows in found.items():
        assert rows == [row for source, row in order if source == number][: len(rows)]
    assert found[1][:20] != found[0][:20]  # same number of rows, other order


def test_a_position_belongs_to_its_mixture():
    mixture, other = mixture_of("1", "2"), mixture_of("2", "1")
    for use in (
        lambda: other.counts(mixture.start()),
        lambda: other.reader(mixture.start(), seed=0),
        lambda: train_batches(other, seed=0, batch_size=1, position=mixture.start()),
    ):
        with pytest.raises(
            ValueError, match="schedule {'a': 1, 'b': 2}, not to this mixture's, {'a'"
        ):
            use()


@pytest.mark.parametrize(
    "saved",
    [
        {},
        {"rows": 3},
        {"schedule": [["a", 1]], "base": [["a", 0]], "rows": -1},
        {"schedule": [["a", 1]], "base": [["a", 0]], "rows": 1.0},
        {"schedule": [["a", 1]], "base": [["b", 0]], "rows": 1},
        {"schedule": [["a", "1"]], "base": [["a", 0]], "rows": 1},
        {"schedule": [["a", 0]], "base": [["a", 0]], "rows": 1},
        {"schedule": [], "base": [], "rows": 1},
        {"schedule": 3, "base": [], "rows": 1},
    ],
)
def test_bad_positions(saved):
    with pytest.raises(ValueError, match="not a position of the data: {"):
        mixture_of("1", "2").start(saved)


def test_bad_mixtures():
    with pytest.raises(ValueError, match="no rows to batch$"):
        Mixture({})
    with pytest.raises(ValueError, match="no rows to batch in b$"):
        Mixture({"a": numbered(1), "b": []})
    for weights in ({"a": Fraction(0)}, {"b": Fraction(1)}, {}):
        with pytest.raises(
            ValueError, match=r"expected a positive weight for each of \['a'\], got"
        ):
            Mixture({"a": numbered(1)}, weights)
    with pytest.raises(
        ValueError,
        match="takes 1,000,000,000 rows, {'a': 123456789, 'b': 876543211}, .* 67,108,864",
    ):
        mixture_of("0.123456789", "0.876543211")


def test_large_cycles_are_dealt_exactly():
    """Times are floats: equal ones must tie, different ones must not."""
    mixture = mixture_of("300001", "300003")
    start = mixture.start()
    for g in (1, 2, 299_999, 300_002, 300_003, 600_003):
        a, b = mixture.counts(start, g).values()
        # The last of the g came before or with the next of the other, ties going to a.
        assert a + b == g
        if b:
            assert Fraction(2 * b - 1, 2 * 300003) < Fraction(2 * a + 1, 2 * 300001)
        if a:
            assert Fraction(2 * a - 1, 2 * 300001) <= Fraction(2 * b + 1, 2 * 300003)
