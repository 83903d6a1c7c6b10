"""Rows of a user's own tokens: what they are, what is refused, a run that resumes to the bit."""

import shutil

import grain
import numpy as np
import pytest

from fp8jax import train_and_evaluate
from fp8jax.lm.data.token_rows import split_rows
from tests.support.runs import numbers, one_layer

_IDS = np.random.default_rng(0).integers(0, 200, (90, 65))


def test_a_row_is_one_document():
    rows, fingerprint = split_rows(_IDS[:, :5], seq_len=4, valid_fraction=0.1, vocab_size=200)
    assert (len(rows["train"]), len(rows["valid"])) == (81, 9)
    row = rows["valid"][0]
    assert row["tokens"].tolist() == _IDS[81, :4].tolist()
    assert row["targets"].tolist() == _IDS[81, 1:5].tolist()
    assert row["positions"].tolist() == [0, 1, 2, 3]
    assert row["segments"].tolist() == row["weights"].tolist() == [1, 1, 1, 1]
    other = _IDS[:, :5].copy()
    other[0, 0] += 1
    _, changed = split_rows(other, seq_len=4, valid_fraction=0.1, vocab_size=201)
    assert changed != fingerprint


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (_IDS, r"element 0 of the data is int64\[65\], and no array of seq_len \+ 1 = 5 token ids"),
        (_IDS[:, :5] / 2, r"element 0 of the data is float64\[5\], and no array"),
        ([[1, 2, 3, 4, 5], "text!"], "element 1 of the data is 'text!', and no array"),
        (_IDS[:, :5] + 1, "but the tokenizer has 200: set config.tokenizer"),
        (_IDS[:1, :5], "the data has 1 elements: give at least two"),
        (grain.MapDataset.source(_IDS[:, :5]).repeat(), "and no endless ones"),
    ],
)
def test_what_is_no_rows_of_tokens_is_refused(data, message):
    with pytest.raises(ValueError, match=message):
        split_rows(data, seq_len=4, valid_fraction=0.1, vocab_size=200)


def test_a_run_resumes_to_the_bit_and_refuses_other_rows(data, tmp_path):
    config = one_layer(data, num_steps=6, valid__every=6, checkpoint__every=3)
    rows = grain.MapDataset.source(_IDS).seed(1).shuffle()
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_and_evaluate(config, str(whole), data=rows)
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoints" / "6")
    with pytest.raises(ValueError, match="contents of the data"):
        train_and_evaluate(config, str(parts), data=list(_IDS))
    train_and_evaluate(config, str(parts), data=rows)
    assert numbers(parts) == numbers(whole)
    assert '"data": "own"' in (whole / "config.json").read_text()
    assert (whole / "data.txt").read_text().splitlines()[1].split() == [
        "own",
        "train",
        "81",
        "5,184",
        "100.00%",
    ]
