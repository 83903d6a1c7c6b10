"""Token streams to packed rows: every token once, each document apart from the others."""

import random

import numpy as np
import pytest

from fp8jax.lm.data.rows import PackedRows
from tests.support.rows import BOS, EOS, assert_rows_equal, stream_of
from tests.support.text import generated_text

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


def test_without_document_masking_a_row_is_one_document():
    stream = stream_of(["ab", "c"])
    first, last = PackedRows(stream, seq_len=4, document_masking=False)
    assert first["positions"].tolist() == [0, 1, 2, 3]
    assert first["weights"].tolist() == [1, 1, 1, 1]  # EOS -> BOS of the next document, too
    assert last["segments"].tolist() == [1, 1, 1, 0]
    assert last["positions"].tolist() == [0, 1, 2, 0]
    assert last["weights"].tolist() == [1, 1, 0, 0]  # padding, and no target of the last token


@pytest.mark.parametrize("seq_len", [1, 5, 64, 1000])
def test_document_masking_changes_no_token(seq_len):
    stream = stream_of(generated_text(documents=20))
    kept, joined = (PackedRows(stream, seq_len=seq_len, document_masking=m) for m in (True, False))
    for apart, one in zip(kept, joined, strict=True):
        for key in ("tokens", "targets"):
            np.testing.assert_array_equal(apart[key], one[key])
        used = apart["segments"] > 0
        np.testing.assert_array_equal(one["segments"], used)
        np.testing.assert_array_equal(one["positions"], np.arange(seq_len) * used)
    targets = sum(int(row["weights"].sum()) for row in joined)
    assert targets == len(stream.tokens) - 1  # each token but the first, exactly once


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
