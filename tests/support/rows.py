"""Rows of tokens, from texts or made by hand."""

import itertools
from pathlib import Path

import numpy as np

from fp8jax.lm.corpus import build_corpus
from fp8jax.lm.data.byte_tokenizer import ByteTokenizer
from fp8jax.lm.data.token_cache import TokenStream

BYTES = ByteTokenizer()
BOS, EOS = BYTES.bos, BYTES.eos


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


# Corpora.


def build(data: str, cache: Path, *, seq_len=32, valid_fraction=0.2, tokenizer=BYTES, **others):
    return build_corpus(
        data,
        tokenizer,
        seq_len=seq_len,
        valid_fraction=valid_fraction,
        cache_dir=cache / "cache",
        **others,
    )


# Batches.


def numbered(count: int) -> list[dict[str, np.ndarray]]:
    """Rows that say which they are."""
    return [
        {"tokens": np.full(3, i, np.int32), "weights": np.ones(3, np.float32)} for i in range(count)
    ]
