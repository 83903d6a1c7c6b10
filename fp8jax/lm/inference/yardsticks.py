"""What predicts a text without a language model, in bits per byte: gzip, and a bigram of bytes.

Both are of the bytes that a model's bits per byte are of, the targets of the held-out rows. gzip
sees these alone. The bigram has counted the training rows: so it is what a model knows that looks
at one byte.
"""

import gzip
import itertools
import math
from typing import NamedTuple

import numpy as np

from fp8jax.lm.data.byte_tokenizer import Tokenizer
from fp8jax.lm.data.rows import Rows

_MOST_TOKENS = 2**22  # of the training rows: 64 for each of the bigram's numbers


class Yardsticks(NamedTuple):
    """Bits per byte of a text by what is no language model."""

    gzip: float
    bigram: float


def yardsticks(training: Rows, held_out: Rows, tokenizer: Tokenizer) -> Yardsticks:
    """Returns both numbers for the targets of the held-out rows.

    Raises ValueError if they have no text.
    """
    text = text_of(held_out, tokenizer)
    if not text:
        raise ValueError("the held-out rows have no text")
    first = -(-_MOST_TOKENS // len(training[0]["tokens"]))
    return Yardsticks(
        gzip=8 * len(gzip.compress(text, mtime=0)) / len(text),
        bigram=bigram_bits(text_of(training, tokenizer, rows_at_most=first), text),
    )


def text_of(rows: Rows, tokenizer: Tokenizer, *, rows_at_most: int | None = None) -> bytes:
    """Returns what the targets of the rows spell, without special tokens."""
    targets = [
        row["targets"][row["weights"] > 0]
        for row in itertools.islice((rows[i] for i in range(len(rows))), rows_at_most)
    ]
    return tokenizer.decode(np.concatenate(targets)).encode()


def bigram_bits(training: bytes, text: bytes) -> float:
    """Returns the bits per byte of a text by a bigram of bytes that has counted another text.

    Each byte has one more successor than it was seen with, which is any byte, as often as the text
    has it; and each byte was seen once more than it was. So nothing has a probability of zero.
    """
    seen, read = (np.frombuffer(each, np.uint8).astype(np.int64) for each in (training, text))
    pairs = np.bincount(256 * seen[:-1] + seen[1:], minlength=2**16).reshape(256, 256)
    single = np.bincount(seen, minlength=256) + 1
    share = single / single.sum()
    after = (pairs + share) / (pairs.sum(axis=1, keepdims=True) + 1)
    p = np.concatenate([share[read[:1]], after[read[:-1], read[1:]]])
    return float(-np.log(p).sum() / math.log(2) / len(read))
