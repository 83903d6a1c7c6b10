"""Text to rows to batches: every token once, the same order every time, every bad input refused.

`write_generated_text` is for other tests too: they need text, and the library has none to give.
"""

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from fp8jax import data as data_lib
from fp8jax.data import (
    MIN_DOCUMENT_BYTES,
    PackedRows,
    TokenStream,
    build_corpus,
    parse_sources,
    train_batches,
    valid_batches,
)
from fp8jax.text import ByteTokenizer

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
    rows = PackedRows([stream_of(["ab", "c"])], seq_len=4)
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
    rows = PackedRows([stream_of(["abcd", "ab"])], seq_len=3)
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
    rows = list(PackedRows([stream], seq_len=seq_len))
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
    rows = list(PackedRows([stream_of(generated_text(documents=20))], seq_len=seq_len))
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


def test_streams_never_share_a_row():
    first, second = stream_of(["abc"]), stream_of(["de", "f"])
    rows = PackedRows([first, second], seq_len=4)
    alone = [*PackedRows([first], seq_len=4), *PackedRows([second], seq_len=4)]
    assert len(rows) == len(alone)
    for left, right in zip(rows, alone, strict=True):
        assert_rows_equal(left, right)
    for index in (-1, len(rows)):
        with pytest.raises(IndexError, match=f"row {index} of {len(rows)}"):
            rows[index]


def test_seq_len_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="seq_len must be at least 1, got 0"):
        PackedRows([stream_of(["abc"])], seq_len=0)
    with pytest.raises(ValueError, match="seq_len must be at least 1, got -1"):
        build(write_generated_text(tmp_path), tmp_path, seq_len=-1)


# Corpora.


def build(data: str, cache: Path, *, seq_len=32, valid_fraction=0.2, tokenizer=BYTES):
    return build_corpus(
        data, tokenizer, seq_len=seq_len, valid_fraction=valid_fraction, cache_dir=cache / "cache"
    )


def documents_of(rows: PackedRows) -> list[str]:
    """The documents back from the rows."""
    inputs = np.concatenate([row["tokens"][row["segments"] > 0] for row in rows])
    begins = np.flatnonzero(inputs == BOS)
    return [BYTES.decode(part) for part in np.split(inputs, begins[1:])]


def test_all_documents_arrive_once_in_order(tmp_path):
    texts = generated_text(documents=100)
    corpus = build(write_jsonl(tmp_path / "a.jsonl", texts), tmp_path)
    (valid,) = corpus.valid.values()
    train, valid = documents_of(corpus.train), documents_of(valid)
    assert sorted(train + valid) == sorted(texts)
    assert train == [text for text in texts if text in train]
    assert valid == [text for text in texts if text in valid]
    (stats,) = corpus.stats
    assert stats.documents == {"train": len(train), "valid": len(valid)}
    assert stats.bytes == {"train": len("".join(train)), "valid": len("".join(valid))}
    assert stats.tokens["train"] == stats.bytes["train"] + 2 * len(train)
    assert 5 < len(valid) < 40  # a fifth of a hundred, give or take


def test_adding_a_document_moves_no_other(tmp_path):
    texts = generated_text(documents=60)
    before = build(write_jsonl(tmp_path / "a.jsonl", texts), tmp_path)
    more = ["A new first document.", *texts[:30], "Another one in between.", *texts[30:]]
    after = build(write_jsonl(tmp_path / "a.jsonl", more), tmp_path)
    for split in ("train", "valid"):
        old, new = (
            documents_of(c.train if split == "train" else c.valid["jsonl-a"])
            for c in (before, after)
        )
        assert old == [text for text in new if text in texts]


def test_duplicates_stay_on_one_side(tmp_path):
    texts = generated_text(documents=40) * 2
    corpus = build(write_jsonl(tmp_path / "a.jsonl", texts), tmp_path)
    assert not set(documents_of(corpus.train)) & set(documents_of(corpus.valid["jsonl-a"]))


def test_several_sources(tmp_path):
    first = write_generated_text(tmp_path, seed=1)
    for number, text in enumerate(generated_text(documents=50, seed=2)):
        (tmp_path / f"{number:03}.txt").write_text(text)
    corpus = build(f"{first}, notes=text:{tmp_path}/*.txt", tmp_path)
    assert list(corpus.valid) == ["jsonl-generated-1", "notes"]
    alone = [build(first, tmp_path), build(f"notes=text:{tmp_path}/*.txt", tmp_path)]
    rows = itertools.chain(*(corpus.train for corpus in alone))
    for left, right in zip(corpus.train, rows, strict=True):
        assert_rows_equal(left, right)
    for name, single in zip(corpus.valid, alone, strict=True):
        assert documents_of(corpus.valid[name]) == documents_of(single.valid[name])
    assert len({corpus.fingerprint, alone[0].fingerprint, alone[1].fingerprint}) == 3
    table = corpus.summary()
    for stats in corpus.stats:
        assert f"{stats.tokens['train']:,}" in table
    assert "skipped 0 of 50 files (not UTF-8) and 0 documents under 16 bytes" in table


def test_line_ends_and_separators_are_text(tmp_path):
    texts = [
        "one\u2028two\r\nthree\u0085four",
        "second document \x1e here",
        "third one, plain text",
    ]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    path = tmp_path / "a.jsonl"
    path.write_bytes(("\r\n \n" + "\r\n\n".join(lines)).encode())  # blank lines, none at the end
    with path.open("rb") as file:
        assert list(data_lib.SOURCES["jsonl"].documents(file)) == texts
    path.write_bytes(texts[0].encode())
    with path.open("rb") as file:
        assert list(data_lib.SOURCES["text"].documents(file)) == texts[:1]


def test_large_vocabularies_are_stored_in_32_bits(tmp_path):
    class Wide(ByteTokenizer):
        fingerprint = "wide"

        def __init__(self):
            for name, value in {"vocab_size": 70_000, "bos": 69_998, "eos": 69_999}.items():
                object.__setattr__(self, name, value)

        def encode(self, text):
            return super().encode(text) + 69_000

    wide = Wide()
    spec = write_generated_text(tmp_path)
    row = build(spec, tmp_path, tokenizer=wide).train[0]
    narrow = build(spec, tmp_path).train[0]
    text = narrow["tokens"] < 256
    np.testing.assert_array_equal(row["tokens"][text], narrow["tokens"][text] + 69_000)
    assert row["tokens"][0] == 69_998


def test_python_stdlib():
    (source,) = parse_sources("python_stdlib")
    root = Path(sysconfig.get_path("stdlib"))
    relative = [path.relative_to(root) for path in source.files]
    assert source.name == "python_stdlib"
    assert sum(path.stat().st_size for path in source.files) > 5e6
    assert relative == sorted(relative, key=Path.as_posix)
    assert {Path("ast.py"), Path("json/decoder.py"), Path("unittest/mock.py")} <= set(relative)
    folders = {part for path in relative for part in path.parts[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "__pycache__"}


def test_python_stdlib_builds(tmp_path, capsys):
    corpus = build("python_stdlib", tmp_path, seq_len=512, valid_fraction=0.05)
    assert corpus.stats[0].bytes["train"] > 5e6
    assert "import " in documents_of(corpus.valid["python_stdlib"])[0]
    assert capsys.readouterr().err == ""  # no progress bar where stderr is no terminal


# The cache.


class CountingTokenizer(ByteTokenizer):
    """Counts calls, and does `hook(call number)` before each."""

    def __init__(self, hook=lambda call: None):
        super().__init__()
        object.__setattr__(self, "calls", 0)
        object.__setattr__(self, "hook", hook)

    def encode(self, text):
        object.__setattr__(self, "calls", self.calls + 1)
        self.hook(self.calls)
        return super().encode(text)


def rebuilds(data: str, cache: Path, **options) -> bool:
    """Whether building tokenises anything; checks that the result is right either way."""
    counting = CountingTokenizer()
    corpus = build(data, cache, tokenizer=counting, **options)
    fresh = cache / "fresh"
    for left, right in zip(corpus.train, build(data, fresh, **options).train, strict=True):
        assert_rows_equal(left, right)
    shutil.rmtree(fresh)
    return counting.calls > 0


def test_cache_is_used(tmp_path):
    spec = write_generated_text(tmp_path)
    assert rebuilds(spec, tmp_path)
    assert not rebuilds(spec, tmp_path)
    assert not rebuilds(spec, tmp_path, seq_len=7)  # streams do not depend on it
    assert rebuilds(spec, tmp_path, valid_fraction=0.3)
    assert rebuilds(f"other={spec}", tmp_path)


def test_cache_of_a_corpus_that_moved_is_used(tmp_path):
    before = build(write_generated_text(tmp_path), tmp_path)
    (tmp_path / "elsewhere").mkdir()
    moved = f"jsonl:{shutil.move(tmp_path / 'generated-0.jsonl', tmp_path / 'elsewhere')}"
    assert not rebuilds(moved, tmp_path)
    assert build(moved, tmp_path).fingerprint == before.fingerprint


def test_an_edit_in_place_is_noticed(tmp_path):
    spec = write_generated_text(tmp_path)
    before = build(spec, tmp_path)
    path = tmp_path / "generated-0.jsonl"
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    content = path.read_bytes()
    path.write_bytes(content.replace(b".", b"!", 1))  # same size
    os.utime(path, ns=times)  # and the same date
    assert rebuilds(spec, tmp_path)
    assert build(spec, tmp_path).fingerprint != before.fingerprint
    path.write_bytes(content)
    assert not rebuilds(spec, tmp_path)  # the old streams are still there


def truncate(path: Path):
    os.truncate(path, path.stat().st_size - 2)


@pytest.mark.parametrize(
    ("pattern", "damage"),
    [
        ("*.train.tokens", truncate),
        ("*.valid.starts", truncate),
        ("*.train.starts", Path.unlink),
        ("manifest.json", Path.unlink),
        ("manifest.json", truncate),
        ("manifest.json", lambda path: path.write_text("{}")),
        ("manifest.json", lambda path: path.write_text("[]")),
        (".", lambda path: shutil.rmtree(path) or path.write_text("a file, not a folder")),
    ],
)
def test_a_damaged_cache_is_rebuilt(tmp_path, caplog, pattern, damage):
    spec = write_generated_text(tmp_path, documents=60)
    build(spec, tmp_path)
    (folder,) = (tmp_path / "cache").iterdir()
    damage(folder if pattern == "." else next(folder.glob(pattern)))
    assert rebuilds(spec, tmp_path)
    assert "is damaged and will be rebuilt" in caplog.text
    assert not rebuilds(spec, tmp_path)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [folder.name]


def test_an_interrupted_build_leaves_nothing(tmp_path):
    spec = write_generated_text(tmp_path)

    def interrupt(call):
        if call == 50:
            assert len(list((tmp_path / "cache").iterdir())) == 1  # the scratch folder
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(spec, tmp_path, tokenizer=CountingTokenizer(interrupt))
    assert list((tmp_path / "cache").iterdir()) == []
    assert rebuilds(spec, tmp_path)


@pytest.mark.parametrize("damaged", [False, True])
def test_two_builds_at_once(tmp_path, damaged):
    spec = write_generated_text(tmp_path)

    def build_meanwhile(call):
        if call == 50:
            build(spec, tmp_path)
            if damaged:
                truncate(next((tmp_path / "cache").glob("*/*.tokens")))

    corpus = build(spec, tmp_path, tokenizer=CountingTokenizer(build_meanwhile))
    assert not rebuilds(spec, tmp_path)
    assert len(documents_of(corpus.train)) == corpus.stats[0].documents["train"]
    assert len(list((tmp_path / "cache").iterdir())) == 1


# What is refused or skipped.


def test_names_of_sources(tmp_path):
    for name in ("books-1.jsonl", "books-2.jsonl", "été.jsonl"):
        (tmp_path / name).write_text("")

    def names(data):
        return [source.name for source in parse_sources(data.replace("DIR", str(tmp_path)))]

    assert names("jsonl:DIR/books-*.jsonl") == ["jsonl-books"]
    assert names("jsonl:DIR/*.jsonl,python_stdlib") == ["jsonl", "python_stdlib"]
    assert names("text:DIR/books-1.jsonl, b.2=text:DIR/books-2.*") == ["text-books-1", "b.2"]
    (tmp_path / "k=v").mkdir()
    (tmp_path / "k=v" / "été.txt").write_text("")
    assert names("text:DIR/k=v/été.txt") == ["text-t"]  # an "=" of the glob names nothing
    assert names("text:DIR/**/*.txt,x=text:DIR/**/**/*.txt") == ["text", "x"]
    (source,) = parse_sources(f"text:{tmp_path}/**/**/*.txt")
    assert len(source.files) == 1  # that such a glob finds twice


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("jsnol:DIR/a.txt", "unknown source 'jsnol'; did you mean 'jsonl'"),
        ("x=python_stdlb", "unknown source 'python_stdlb'; did you mean 'python_stdlib'"),
        ("", "unknown source ''. There are: python_stdlib, text, jsonl"),
        ("text:DIR/a.txt,", "unknown source ''"),
        ("text:DIR/none-*.txt", r"no file matches '.*none-\*\.txt'"),
        ("text:DIR", "no file matches"),
        ("text", "no file matches '', the argument of the source 'text'"),
        ("jsonl:", "no file matches ''"),
        ("python_stdlib:3.11", "takes no argument, got '3.11'"),
        ("text:DIR/a.txt,text:DIR/a.*", "two sources are called {'text-a'}"),
        ("x=text:DIR/a.txt,x=python_stdlib", "two sources are called {'x'}.*NAME=text:GLOB"),
        ("../x=text:DIR/a.txt", "source name '../x'"),
        ("=text:DIR/a.txt", "source name ''"),
        ("a b=text:DIR/a.txt", "source name 'a b'"),
    ],
)
def test_bad_specs(tmp_path, data, message):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match=message):
        parse_sources(data.replace("DIR", str(tmp_path)))


@pytest.mark.parametrize(
    "line",
    [
        '{"text": "no end',
        "not json",
        '{"txt": "another key"}',
        '{"text": 3}',
        '{"text": null}',
        '["text"]',
        '"text"',
        "3",
        r'{"text": "a lone surrogate: \ud800"}',
        '{"text": "two on"} {"text": "one line"}',
    ],
)
def test_a_bad_line_of_json_is_named(tmp_path, line):
    good = json.dumps({"text": "a document that is fine"})
    (tmp_path / "a.jsonl").write_text(f"{good}\n\n{line}\n{good}\n")
    with pytest.raises(ValueError, match=r'a\.jsonl, line 3: expected {"text": "…"}, got '):
        build(f"jsonl:{tmp_path}/a.jsonl", tmp_path)
    assert list((tmp_path / "cache").iterdir()) == []


def test_files_that_are_not_utf8_are_skipped_and_named(tmp_path, caplog):
    for number, text in enumerate(generated_text(documents=40)):
        (tmp_path / f"{number:02}.txt").write_text(text)
    wanted = build(f"x=text:{tmp_path}/*.txt", tmp_path)
    (tmp_path / "latin.txt").write_bytes("é, and enough text beyond it".encode("latin-1"))
    (tmp_path / "cut.txt").write_bytes(b"ends in mid-character, at \xc3")
    (tmp_path / "short-1.txt").write_text("x" * (MIN_DOCUMENT_BYTES - 1))
    (tmp_path / "short-2.txt").write_text("")
    corpus = build(f"x=text:{tmp_path}/*.txt", tmp_path)
    (stats,) = corpus.stats
    assert (stats.files, stats.not_utf8, stats.too_short) == (44, 2, 2)
    assert "latin.txt: it is not UTF-8" in caplog.text and "cut.txt" in caplog.text
    assert documents_of(corpus.train) == documents_of(wanted.train)


def test_utf8_is_checked_across_pieces(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"x" * (2**20 - 1) + "é".encode())
    assert data_lib._is_utf8(path)
    path.write_bytes(b"x" * (2**20 - 1) + b"\xc3x")
    assert not data_lib._is_utf8(path)


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


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 5.0, float("nan")])
def test_bad_fractions(tmp_path, fraction):
    with pytest.raises(ValueError, match=f"between 0 and 1, got {fraction}"):
        build(write_generated_text(tmp_path), tmp_path, valid_fraction=fraction)


# Batches.


def numbered(count: int) -> list[dict[str, np.ndarray]]:
    """Rows that say which they are."""
    return [
        {"tokens": np.full(3, i, np.int32), "weights": np.ones(3, np.float32)} for i in range(count)
    ]


def take(rows, count: int, **options) -> list[int]:
    """The numbers of the rows in the first `count` training batches."""
    batches = train_batches(rows, **options)
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
    first = list(itertools.islice(whole, 50))
    resumed = train_batches(corpus.train, seed=0, batch_size=6, start_row=6 * 20)
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
    batches = train_batches(numbered(10), seed=0, batch_size=2)
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


def test_ctrl_c_ends_the_program():
    program = """
from tests.data_test import numbered, train_batches
batches = train_batches(numbered(10), seed=0, batch_size=2)
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
    assert process.stdout.readline() == "(2, 3)\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGINT
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert errors.count("Traceback") == 1  # and nothing about threads


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
        train_batches(numbered(10), seed=0, **options)
    with pytest.raises(ValueError, match=message):
        valid_batches(numbered(10), **options)


def test_bad_training_batches():
    with pytest.raises(ValueError, match="start_row must not be negative, got -1"):
        train_batches(numbered(10), seed=0, batch_size=2, start_row=-1)
    for seed in (-1, 2**32):
        with pytest.raises(ValueError, match=rf"seed must be in \[0, 2\^32\), got {seed}"):
            train_batches(numbered(10), seed=seed, batch_size=2)
    for batches in (
        lambda: train_batches([], seed=0, batch_size=2),
        lambda: valid_batches([], batch_size=2),
    ):
        with pytest.raises(ValueError, match="no rows to batch"):
            batches()
