"""Names of tokenizers to tokenizers."""

import dataclasses

import pytest

from fp8jax.lm.data.byte_tokenizer import ByteTokenizer
from fp8jax.lm.data.tokenizers import TOKENIZERS, tokenizer


def test_specs(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="unknown tokenizer 'byte'; did you mean 'bytes'"):
        tokenizer("byte")
    with pytest.raises(ValueError, match="unknown tokenizer 'qqq'. There are: bytes, bpe"):
        tokenizer("qqq")
    with pytest.raises(ValueError, match="bytes takes no argument, got 'utf-16'"):
        tokenizer("bytes:utf-16")
    for spec in ("bpe", "bpe:"):
        with pytest.raises(ValueError, match="bpe needs the path of a tokenizer.json"):
            tokenizer(spec)

    @dataclasses.dataclass(frozen=True)
    class Words(ByteTokenizer):
        words: str

    monkeypatch.setitem(TOKENIZERS, "words", Words)
    assert tokenizer("words:a:b").words == "a:b"
