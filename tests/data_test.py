"""Streams to rows to batches: every token once, exact mixtures, the same order every time.

`write_generated_text` is for other tests too: they need text, and the library has none to give.
"""

import itertools
import json
import random
import signal
import subprocess
import sys
import threading
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from fp8jax.data.byte_tokenizer import ByteTokenizer
from fp8jax.data.corpus import build_corpus
from fp8jax.data.loader import train_batches, valid_batches
from fp8jax.data.mixture import Mixture, Position
from fp8jax.data.rows import PackedRows
from fp8jax.data.sources import SOURCES
from fp8jax.data.token_cache import TokenStream

BYTES = ByteTokenizer()
BOS, EOS = BYTES.bos, BYTES.eos


def generated_text(*, documents: int, seed: int = 0, words: int = 40) -> list[str]:
    """Documents of words that a small model can learn: each word fixes the next but for a few."""
    rng = random.Random(seed)
    vocabulary = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(64)]
    texts = []
    for _ in range(documents):
        word, text = rng.randrange(64), []
        for _ in range(rng.randint(words // 2, words)):
            text.append(vocabulary[word])
            word = (5 * word + rng.choice((1, 1, 1, 7))) % 64
        texts.append(" ".join(text) + ".")
    return texts


def write_jsonl(path: Path, texts: list[str]) -> str:
    """Writes the documents; returns the source's spec."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return f"jsonl:{path}"


def write_generated_text(folder: Path, *, documents: int = 200, seed: int = 0) -> str:
    """Writes generated documents; returns the spec to give as the config key `data`."""
    return write_jsonl(
        folder / f"generated-{seed}.jsonl", generated_text(documents=documents, seed=seed)
    )


def stream_of(texts: list[str]) -> TokenStream:
    parts = [np.concatenate([[BOS], BYTES.encode(text), [EOS]]) for text in texts]
    lengths = [0, *itertools.accumulate(map(len, parts))]
    return TokenStream(
        tokens=np.concatenate(parts).astype(np.uint16), starts=np.array(lengths[:-1], np.int64)
    )


def assert_rows_equal(left, right):
    assert left.keys() == right.keys()
    for key in left:
        assert left[key].dtype == right[key].dtype
        np.testing.assert_array_equal(left[key], right[key])


# Packing.


def test_packing_by_hand():
    a, b, c = b"abc"
    rows = PackedRows(stream_of(["ab", "c"]), seq_len=4)
    assert len(rows) == 2
    expected = [
        {
            "tokens": [BOS, a, b, EOS],
            "targets": [a, b, EOS, BOS],
            "segments": [1, 1, 1, 1],
            "positions": [0, 1, 2, 3],
            "weights": [1, 1, 1, 0],
        },
        {
            "tokens": [BOS, c, EOS, 0],
            "targets": [c, EOS, 0, 0],
            "segments": [1, 1, 1, 0],
            "positions": [0, 1, 2, 0],
            "weights": [1, 1, 0, 0],
        },
    ]
    for row, wanted in zip(rows, expected, strict=True):
        dtypes = dict.fromkeys(wanted, np.int32) | {"weights": np.float32}
        assert_rows_equal(row, {key: np.array(wanted[key], dtypes[key]) for key in wanted})


def test_a_document_cut_by_a_row_starts_again_at_position_zero():
    a, b, c, d = b"abcd"
    rows = PackedRows(stream_of(["abcd", "ab"]), seq_len=3)
    # ^abc|d$^ab$: row 1 begins in mid-document, and its first target weighs 1 all the same.
    assert rows[1]["tokens"].tolist() == [c, d, EOS]
    assert rows[1]["targets"].tolist() == [d, EOS, BOS]
    assert rows[1]["positions"].tolist() == [0, 1, 2]
    assert rows[1]["weights"].tolist() == [1, 1, 0]
    assert rows[0]["weights"].tolist() == [1, 1, 1]  # b -> c crosses the rows' border
    assert rows[2]["segments"].tolist() == [1, 1, 1]
    assert len(rows) == 3  # 10 tokens: the last EOS is a target only


@pytest.mark.parametrize("seq_len", [1, 2, 3, 5, 8, 13, 64, 97, 1000])
def test_every_token_and_every_step_exactly_once(seq_len):
    rng = random.Random(seq_len)
    texts = ["".join(rng.choices("xyz", k=rng.randint(1, 40))) for _ in range(30)]
    stream = stream_of(texts)
    total = len(stream.tokens)
    rows = list(PackedRows(stream, seq_len=seq_len))
    assert len(rows) == max(1, -(-(total - 1) // seq_len))

    inputs = np.concatenate([row["tokens"][row["segments"] > 0] for row in rows])
    # All tokens in order; the very last EOS may be left out, as it predicts nothing.
    assert len(inputs) in (total, total - 1)
    np.testing.assert_array_equal(inputs, stream.tokens[: len(inputs)])

    weighted = [
        (int(row["tokens"][t]), int(row["targets"][t]))
        for row in rows
        for t in np.flatnonzero(row["weights"])
    ]
    steps = []
    for text in texts:
        ids = [BOS, *text.encode(), EOS]
        steps += zip(ids[:-1], ids[1:], strict=True)
    assert weighted == steps


@pytest.mark.parametrize("seq_len", [1, 4, 31, 300])
def test_invariants_of_a_row(seq_len):
    rows = list(PackedRows(stream_of(generated_text(documents=20)), seq_len=seq_len))
    for number, row in enumerate(rows):
        tokens, segments, positions = row["tokens"], row["segments"], row["positions"]
        assert all(value.shape == (seq_len,) for value in row.values())
        used = int((segments > 0).sum())
        if number < len(rows) - 1:
            assert used == seq_len
        assert segments[0] == 1
        assert set(np.diff(segments[:used]).tolist()) <= {0, 1}
        # A segment begins where BOS stands, and only there, but for the row's first.
        np.testing.assert_array_equal(np.diff(segments[:used]) == 1, tokens[1:used] == BOS)
        for segment in range(1, segments.max() + 1):
            inside = np.flatnonzero(segments == segment)
            np.testing.assert_array_equal(positions[inside], np.arange(len(inside)))
        # The target is the next input; it weighs nothing exactly after an EOS and in the padding.
        np.testing.assert_array_equal(row["targets"][: used - 1], tokens[1:used])
        np.testing.assert_array_equal(row["weights"], (segments > 0) & (tokens != EOS))
        for value in row.values():
            assert not value[used:].any()


def test_rows_out_of_range():
    rows = PackedRows(stream_of(["abc", "de"]), seq_len=4)
    for index in (-1, len(rows)):
        with pytest.raises(IndexError, match=f"row {index} of {len(rows)}"):
            rows[index]


def test_seq_len_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="seq_len must be at least 1, got 0"):
        PackedRows(stream_of(["abc"]), seq_len=0)
    with pytest.raises(ValueError, match="seq_len must be at least 1, got -1"):
        build(write_generated_text(tmp_path), tmp_path, seq_len=-1)


# Corpora.


def build(data: str, cache: Path, *, seq_len=32, valid_fraction=0.2, tokenizer=BYTES):
    return build_corpus(
        data, tokenizer, seq_len=seq_len, valid_fraction=valid_fraction, cache_dir=cache / "cache"
    )


def test_sources_never_share_a_row(tmp_path):
    specs = [write_generated_text(tmp_path, seed=seed) for seed in (1, 2)]
    both, *alone = (build(spec, tmp_path) for spec in (", ".join(specs), *specs))
    assert list(both.valid) == list(both.train.rows) == ["jsonl-generated-1", "jsonl-generated-2"]
    assert len(both.train) == sum(len(corpus.train) for corpus in alone)
    for corpus in alone:
        (name,) = corpus.valid
        for rows, single in (
            (both.train.rows[name], corpus.train.rows[name]),
            (both.valid[name], corpus.valid[name]),
        ):
            for left, right in zip(rows, single, strict=True):
                assert_rows_equal(left, right)


def test_summary(tmp_path):
    specs = [write_generated_text(tmp_path, seed=seed) for seed in (1, 2)]
    corpus = build(f"a=0.75*{specs[0]}, b=0.25*{specs[1]}", tmp_path)
    assert corpus.train.schedule == {"a": 3, "b": 1}
    table = corpus.summary()
    for stats in corpus.stats:
        assert f"{stats.tokens['train']:,}" in table
    assert "  75.00%" in table and "  25.00%" in table
    assert "skipped 0 of 1 files (not UTF-8) and 0 documents under 16 bytes" in table


def test_weights_leave_the_fingerprint_alone(tmp_path):
    specs = [write_generated_text(tmp_path, seed=seed) for seed in (1, 2)]
    data = ["{},{}", "2*{},1*{}", "0.1*{},0.9*{}"]
    corpora = [build(spec.format(*specs), tmp_path) for spec in data]
    assert len({corpus.fingerprint for corpus in corpora}) == 1
    assert len({tuple(corpus.train.schedule.values()) for corpus in corpora}) == 3
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_new_kind_of_source_gives_rows(tmp_path, monkeypatch):
    class Squares:
        label, reads = "", ()

        def files(self):
            return []

        def documents(self, tally):
            return (" ".join(str(i * j) for j in range(20)) for i in range(200))

    monkeypatch.setitem(SOURCES, "squares", lambda argument: Squares())
    corpus = build(f"3*squares, 1*{write_generated_text(tmp_path)}", tmp_path)
    batches = train_batches(corpus.train, seed=0, batch_size=8)
    batch = next(batches)
    batches.close()
    digits = np.isin(batch["tokens"], [BOS, EOS, *b"0123456789 "]).all(axis=1)
    assert digits.sum() == 6


def test_nothing_left(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff" * 100)
    (tmp_path / "b.txt").write_text("short")
    with pytest.raises(
        ValueError,
        match=(
            "source 'x': its train split .* 0 of 0 documents and 0 of 0 tokens.*"
            r"skipped 1 of 2 files \(not UTF-8\) and 1 documents under 16 bytes"
        ),
    ):
        build(f"x=text:{tmp_path}/*.txt", tmp_path)


def test_splits_too_small(tmp_path):
    spec = write_generated_text(tmp_path, documents=20)
    total = build(spec, tmp_path).stats[0].tokens
    with pytest.raises(ValueError, match="its valid split .* has 0 of 20 documents and 0 of"):
        build(spec, tmp_path, valid_fraction=1e-9)
    with pytest.raises(ValueError, match="its train split .* has 0 of 20 documents and 0 of"):
        build(spec, tmp_path, valid_fraction=1 - 1e-9)
    fits = min(total.values()) - 1
    assert len(build(spec, tmp_path, seq_len=fits).valid["jsonl-generated-0"]) == 1
    with pytest.raises(ValueError, match=f"one row of seq_len={fits + 1} plus one.* {fits + 1} of"):
        build(spec, tmp_path, seq_len=fits + 1)


# Batches.


def numbered(count: int) -> list[dict[str, np.ndarray]]:
    """Rows that say which they are."""
    return [
        {"tokens": np.full(3, i, np.int32), "weights": np.ones(3, np.float32)} for i in range(count)
    ]


MIXTURE = Mixture({"numbered": numbered(10)})


def take(rows, count: int, *, start_row: int = 0, **options) -> list[int]:
    """The numbers of the rows in the first `count` training batches from a position on."""
    mixture = Mixture({"numbered": rows})
    position = mixture.start().advanced(start_row)
    batches = train_batches(mixture, position=position, **options)
    numbers = [batch["tokens"][:, 0].tolist() for batch in itertools.islice(batches, count)]
    batches.close()
    return sum(numbers, [])


def test_epochs_differ_and_hold_each_row_once():
    rows = numbered(13)
    order = take(rows, 13, seed=3, batch_size=4)
    epochs = [order[i : i + 13] for i in range(0, 52, 13)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(13))
    assert len(set(map(tuple, epochs))) == 4
    assert order != take(rows, 13, seed=4, batch_size=4)
    assert epochs[0] == take(rows, 13, seed=3, batch_size=1)


def test_the_order_is_pinned():
    # A resumed run relies on it: should a new Grain shuffle otherwise, this has to be known.
    pinned = [1, 2, 4, 5, 3, 7, 0, 6, 7, 6, 1, 4, 2, 0, 3, 5]
    assert take(numbered(8), 4, seed=0, batch_size=4) == pinned


@pytest.fixture(scope="module")
def order():
    """The global order of ten rows, one position at a time."""
    return take(numbered(10), 1100, seed=1, batch_size=1)


@pytest.mark.parametrize("process_count", [1, 2, 4])
@pytest.mark.parametrize(
    ("batch_size", "start_row"), [(4, 0), (4, 12), (8, 24), (12, 7), (8, 1001)]
)
def test_order_depends_on_the_position_only(order, batch_size, start_row, process_count):
    shares = [
        take(
            numbered(10),
            3,
            seed=1,
            batch_size=batch_size,
            start_row=start_row,
            process_index=index,
            process_count=process_count,
        )
        for index in range(process_count)
    ]
    # Batches are cut into contiguous slices, one a process.
    joined = np.concatenate([np.reshape(share, (3, -1)) for share in shares], axis=1)
    assert joined.ravel().tolist() == order[start_row : start_row + 3 * batch_size]


def test_batches_of_a_corpus_resume(tmp_path):
    corpus = build(write_generated_text(tmp_path), tmp_path)
    whole = train_batches(corpus.train, seed=0, batch_size=6)
    position = corpus.train.start().advanced(6 * 20)
    first = list(itertools.islice(whole, 50))
    resumed = train_batches(corpus.train, seed=0, batch_size=6, position=position)
    for left, right in zip(first[20:], resumed, strict=False):
        assert_rows_equal(left, right)
    assert {key: value.shape for key, value in first[0].items()} == dict.fromkeys(
        ("tokens", "targets", "segments", "positions", "weights"), (6, 32)
    )
    for batches in (whole, resumed):
        batches.close()


def prefetching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("grain-prefetch")]


@pytest.mark.parametrize("end", ["close", "drop", "unused"])
def test_threads_end(end):
    before = set(prefetching())
    batches = train_batches(MIXTURE, seed=0, batch_size=2)
    if end != "unused":
        next(batches)
        assert set(prefetching()) - before
    if end == "close":
        batches.close()
    else:
        del batches
    deadline = time.monotonic() + 10
    while set(prefetching()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(prefetching()) - before


def _interrupt(process) -> str:
    """Ctrl-C until it ends, and what it wrote to stderr. Once in a few hundred times the interrupt
    comes while Python runs a finaliser, which swallows it: then a user presses again.

    A shell's background jobs, which these tests may be, start with it ignored, and Python leaves it
    so: the child takes it back.
    """
    for _ in range(4):
        process.send_signal(signal.SIGINT)
        try:
            return process.communicate(timeout=10)[1]
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError("it runs on after four interrupts")


def test_ctrl_c_ends_the_program():
    program = """
import signal
from tests.data_test import MIXTURE, train_batches
signal.signal(signal.SIGINT, signal.default_int_handler)
batches = train_batches(MIXTURE, seed=0, batch_size=2)
print(next(batches)["tokens"].shape, flush=True)
for batch in batches:
    pass
"""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", program],
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout.readline() == "(2, 3)\n"
        try:
            errors = _interrupt(process)
        finally:
            process.kill()  # where it did not end, it would load the machine for all other tests
    assert process.returncode == -signal.SIGINT
    assert errors.rstrip().endswith("KeyboardInterrupt")
    lost = errors.count("Exception ignored in")  # by a finaliser, see above
    assert errors.count("Traceback") == 1 + lost  # and nothing about threads


@pytest.mark.parametrize("process_count", [1, 2, 4])
def test_valid_batches(process_count):
    rows = numbered(10)
    shares = [
        list(valid_batches(rows, batch_size=4, process_index=i, process_count=process_count))
        for i in range(process_count)
    ]
    assert [len(share) for share in shares] == [3] * process_count
    whole = [
        {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
        for parts in zip(*shares, strict=True)
    ]
    tokens = np.concatenate([batch["tokens"][:, 0] for batch in whole])
    weights = np.concatenate([batch["weights"][:, 0] for batch in whole])
    assert tokens.tolist() == [*range(10), 0, 0]
    assert weights.tolist() == [1] * 10 + [0, 0]
    assert all(value.shape == (4, 3) for batch in whole for value in batch.values())


def test_valid_batches_may_be_fewer():
    rows = numbered(10)
    assert len(list(valid_batches(rows, batch_size=4, max_batches=2))) == 2
    assert len(list(valid_batches(rows, batch_size=4, max_batches=9))) == 3
    assert len(list(valid_batches(rows, batch_size=5))) == 2
    with pytest.raises(ValueError, match="max_batches must be at least 1 or None, got 0"):
        valid_batches(rows, batch_size=4, max_batches=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 6, "process_count": 4}, "batch_size=6 .* multiple of process_count=4"),
        ({"batch_size": 0}, "batch_size=0 must be a positive multiple"),
        ({"batch_size": 4, "process_count": 2, "process_index": 2}, "process_index=2"),
        ({"batch_size": 4, "process_index": -1}, "process_index=-1"),
        ({"batch_size": 4, "process_count": 0}, "process_count=0"),
    ],
)
def test_bad_batches(options, message):
    with pytest.raises(ValueError, match=message):
        train_batches(MIXTURE, seed=0, **options)
    with pytest.raises(ValueError, match=message):
        valid_batches(numbered(10), **options)


def test_bad_training_batches():
    with pytest.raises(ValueError, match="rows must not be negative, got -1"):
        MIXTURE.start().advanced(-1)
    for seed in (-1, 2**32):
        with pytest.raises(ValueError, match=rf"seed must be in \[0, 2\^32\), got {seed}"):
            train_batches(MIXTURE, seed=seed, batch_size=2)
    with pytest.raises(ValueError, match="no rows to batch"):
        valid_batches([], batch_size=2)


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
            mixture, seed=3, batch_size=batch_size, position=position,
            process_index=index, process_count=process_count,
        )  # fmt: skip
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
