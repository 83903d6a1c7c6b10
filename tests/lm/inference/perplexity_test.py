"""Perplexity and bits per byte of text, of a model whose probabilities are known."""

import jax
import numpy as np
import pytest

from fp8jax.lm.data.tokenizers import tokenizer
from fp8jax.lm.inference import memory_check
from fp8jax.lm.inference.perplexity import joined, read_texts, score_texts
from fp8jax.lm.inference.scorer import Scorer
from tests.support.bigrams import WORDS, bigram_model

BYTES = tokenizer("bytes")
TEXTS = {"one": "abcabd", "two": "é is two bytes.\n" * 3}


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """The scores of two files of one document each, in rows of 8 tokens, and log p of bigrams."""
    folder = tmp_path_factory.mktemp("texts")
    for name, text in TEXTS.items():
        (folder / f"{name}.txt").write_text(text)
    data = ",".join(f"{name}=text:{folder}/{name}.txt" for name in TEXTS)
    rows = read_texts(data, BYTES, seq_len=8)
    model, variables, log_p = bigram_model({"a": {"b": 500}, "b": {"c": 100, "d": 50}})
    scores = score_texts(
        model, variables, rows, token_bytes=BYTES.token_bytes, batch_size=3
    )  # two's last batch is padded
    return scores, log_p


@pytest.mark.parametrize("name", TEXTS)
def test_scores_of_each_row(scored, name):
    scores, log_p = scored
    ids = [BYTES.bos, *TEXTS[name].encode(), BYTES.eos]
    nats = -log_p[ids[:-1], ids[1:]]
    ends = range(8, len(nats) + 8, 8)
    rows = [nats[end - 8 : end] for end in ends]
    own = scores[name]
    # Sums of eight float32 logarithms of up to 13.
    np.testing.assert_allclose(own.nats, [row.sum() for row in rows], rtol=1e-6)
    np.testing.assert_array_equal(own.tokens, [len(row) for row in rows])
    assert own.bytes.sum() == len(TEXTS[name].encode()) == own.tokens.sum() - 1  # EOS has none
    np.testing.assert_allclose(own.perplexity().estimate.value, np.exp(nats.mean()), rtol=1e-5)
    bits = nats.sum() / np.log(2) / own.bytes.sum()
    np.testing.assert_allclose(own.bits_per_byte().estimate.value, bits, rtol=1e-6)


def test_sources_together(scored):
    scores, _ = scored
    together = joined(list(scores.values()))
    nats = sum(each.nats.sum() for each in scores.values())
    assert together.nats.sum() == pytest.approx(nats, rel=1e-12)
    assert together.tokens.sum() == sum(len(text.encode()) + 1 for text in TEXTS.values())


def test_a_source_without_documents(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match="source 'x' has no documents"):
        read_texts(f"x=jsonl:{tmp_path}/empty.jsonl", BYTES, seq_len=8)


def test_a_source_without_text(tmp_path):
    """It would have no bytes that bits could be divided by."""
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match=r"source 'x' has no text: its documents \(1\) are empty"):
        read_texts(f"x=text:{tmp_path}/empty.txt", BYTES, seq_len=8)


@pytest.mark.parametrize(
    "rows, length, room, message",
    [
        (10**11, 8, 2**40, "a batch of 100000000000 rows of 8 tokens would take at least"),
        # 4 bytes for each of four ids, and for each of two activations of a width of 258.
        (4, 8, 4 * 8 * (16 + 8 * WORDS) - 1, "0.0 GiB of memory: lower --batch_size or --length"),
        # Attention has 2^32 scores for a row and a head.
        (1, 2**16, 16 * 2**30, "a batch of 1 rows of 65536 tokens would take"),
    ],
)
def test_batches_that_exceed_the_memory_are_refused(monkeypatch, rows, length, room, message):
    monkeypatch.setattr(memory_check, "capacity", lambda: room)
    model, variables, _ = bigram_model({})
    with pytest.raises(ValueError, match=message):
        Scorer(model, variables).program(rows, length)


def test_exhausted_memory_is_one_line():
    said = pytest.raises(MemoryError, match="^memory is exhausted: buy more$")
    with said, memory_check.memory_errors("buy more"):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")
    with (
        pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"),
        memory_check.memory_errors(""),
    ):
        raise jax.errors.JaxRuntimeError("INTERNAL: another one")


def test_each_document_of_a_source_is_a_segment(tmp_path):
    (tmp_path / "two.jsonl").write_text('{"text": "ab"}\n{"text": "cde"}\n')
    (row,) = read_texts(f"x=jsonl:{tmp_path}/two.jsonl", BYTES, seq_len=8)["x"]
    np.testing.assert_array_equal(row["tokens"], [BYTES.bos, *b"ab", BYTES.eos, BYTES.bos, *b"cde"])
    np.testing.assert_array_equal(row["segments"], [1] * 4 + [2] * 4)
    np.testing.assert_array_equal(row["positions"], [0, 1, 2, 3, 0, 1, 2, 3])
    data = f"x=jsonl:{tmp_path}/two.jsonl"
    (row,) = read_texts(data, BYTES, seq_len=7, begin=False)["x"]
    np.testing.assert_array_equal(row["tokens"], [*b"ab", BYTES.eos, *b"cde", BYTES.eos])
    np.testing.assert_array_equal(row["segments"], [1] * 3 + [2] * 4)
