"""Sources to a corpus: one set of rows for each source, and what has nothing to give."""

import numpy as np
import pytest

from fp8jax.lm.data.loader import train_batches
from fp8jax.lm.data.rows import PackedRows
from fp8jax.lm.sources import SOURCES
from tests.support.rows import BOS, EOS, assert_rows_equal, build, stream_of
from tests.support.text import write_generated_text


def test_seq_len_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="seq_len must be at least 1, got 0"):
        PackedRows(stream_of(["abc"]), seq_len=0)
    with pytest.raises(ValueError, match="seq_len must be at least 1, got -1"):
        build(write_generated_text(tmp_path), tmp_path, seq_len=-1)


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


def test_validation_always_keeps_documents_apart(tmp_path):
    data = write_generated_text(tmp_path)
    apart, joined = (build(data, tmp_path, document_masking=m) for m in (True, False))
    (name,) = apart.valid
    for left, right in zip(apart.valid[name], joined.valid[name], strict=True):
        assert_rows_equal(left, right)
    assert apart.fingerprint == joined.fingerprint
    assert max(row["segments"].max() for row in apart.train.rows[name]) > 1
    assert max(row["segments"].max() for row in joined.train.rows[name]) == 1


def test_rows_that_validate_have_segments_where_those_that_train_have_none(tmp_path):
    corpus = build(write_generated_text(tmp_path), tmp_path, document_masking=False)
    largest = [
        max(row["segments"].max() for row in rows)
        for split in (corpus.train.rows, corpus.valid)
        for rows in split.values()
    ]
    assert largest[0] == 1 < largest[1]


def test_summary(tmp_path):
    specs = [write_generated_text(tmp_path, seed=seed) for seed in (1, 2)]
    corpus = build(f"a=0.75*{specs[0]}, b=0.25*{specs[1]}", tmp_path)
    assert corpus.train.schedule == {"a": 3, "b": 1}
    table = corpus.summary()
    for stats in corpus.stats:
        assert f"{stats.tokens['train']:,}" in table
    assert "  75.00%" in table and "  25.00%" in table
    assert "skipped 0 of 1 files (not UTF-8) and 0 documents under 16 bytes" in table


def test_one_big_file_trains_and_the_summary_says_how(tmp_path):
    text = "".join(f"line {i} of a text of one file\n" for i in range(3000))
    (tmp_path / "big.txt").write_text(text)
    corpus = build(f"text:{tmp_path}/big.txt", tmp_path)
    assert len(corpus.train) and len(corpus.valid["text-big"])
    size = corpus.stats[0].piece_size
    assert (
        "its documents were too few to hold any out: they are cut into pieces of up to "
        f"{size:,} characters" in corpus.summary()
    )


def test_weights_leave_the_fingerprint_alone(tmp_path):
    specs = [write_generated_text(tmp_path, seed=seed) for seed in (1, 2)]
    data = ["{},{}", "2*{},1*{}", "0.1*{},0.9*{}"]
    corpora = [build(spec.format(*specs), tmp_path) for spec in data]
    assert len({corpus.fingerprint for corpus in corpora}) == 1
    assert len({tuple(corpus.train.schedule.values()) for corpus in corpora}) == 3
    assert len(list((tmp_path / "cache").glob("corpus-*"))) == 1


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
        build(f"x=text:{tmp_path}/*.txt", tmp_path, bad_examples="skip")


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
