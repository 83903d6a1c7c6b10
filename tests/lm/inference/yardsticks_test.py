"""What gzip and a bigram need for a text, against counts and logarithms written out."""

import collections
import gzip
import math

import numpy as np

from fp8jax.lm.data.byte_tokenizer import ByteTokenizer
from fp8jax.lm.data.rows import PackedRows
from fp8jax.lm.data.token_cache import TokenStream
from fp8jax.lm.inference.yardsticks import bigram_bits, text_of, yardsticks

BYTES = ByteTokenizer()


def rows(*texts, seq_len=8):
    documents = [[BYTES.bos, *BYTES.encode(text), BYTES.eos] for text in texts]
    starts = np.cumsum([0, *map(len, documents)])[:-1]
    return PackedRows(
        TokenStream(np.concatenate(documents).astype(np.uint16), starts), seq_len=seq_len
    )


def expected_bits(training: bytes, text: bytes) -> float:
    single = collections.Counter(training)
    pairs = collections.Counter(zip(training, training[1:], strict=False))
    successors = collections.Counter(training[:-1])
    bits, before = 0.0, None
    for byte in text:
        share = (single[byte] + 1) / (len(training) + 256)
        p = share if before is None else (pairs[before, byte] + share) / (successors[before] + 1)
        bits -= math.log2(p)
        before = byte
    return bits / len(text)


def test_a_bigram_counts_pairs():
    training, text = b"abracadabra, abracadabra", b"a bad cab\xff"
    assert abs(bigram_bits(training, text) - expected_bits(training, text)) < 1e-12
    assert bigram_bits(b"ab" * 500, b"ab" * 50) < 0.1  # one byte says the next


def test_the_text_is_that_of_the_targets():
    """Whatever the rows' length, every byte of each document, and nothing else."""
    texts = ("naïve text", "of two documents")
    for seq_len in (1, 8, 64):
        assert text_of(rows(*texts, seq_len=seq_len), BYTES) == "".join(texts).encode()
    assert text_of(rows(*texts), BYTES, rows_at_most=1) == "naïve t".encode()


def test_both_yardsticks_are_of_the_held_out_text():
    training, held_out = "the cat sat on the mat. " * 20, "the cat sat there. " * 20
    found = yardsticks(rows(training), rows(held_out), BYTES)
    text = held_out.encode()
    assert found.gzip == 8 * len(gzip.compress(text, mtime=0)) / len(text)
    assert abs(found.bigram - expected_bits(training.encode(), text)) < 1e-12
