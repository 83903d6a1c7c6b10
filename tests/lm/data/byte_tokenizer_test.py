"""The byte tokenizer: every byte, every special id, and what it refuses."""

import dataclasses
import inspect

import numpy as np
import pytest

from fp8jax.lm.data.byte_tokenizer import ByteTokenizer
from fp8jax.lm.data.tokenizers import tokenizer

BYTES = tokenizer("bytes")


@pytest.mark.parametrize("text", ["", "plain", "Füße, 数学, 🙂", "a\r\nb\x00c\u2028d", "\ufeffbom"])
def test_round_trip(text):
    ids = BYTES.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == list(text.encode("utf-8"))
    assert BYTES.decode(ids) == text
    assert BYTES.decode(ids.tolist()) == text
    assert BYTES.token_bytes[ids].sum() == len(text.encode("utf-8"))


def test_special_ids_are_dropped():
    ids = [BYTES.bos, *BYTES.encode("é").tolist(), BYTES.eos]
    assert BYTES.decode(ids) == "é"
    # Also inside a character: they stand for no text at all.
    assert BYTES.decode([0xC3, BYTES.eos, 0xA9]) == "é"


def test_every_id_decodes():
    assert len(BYTES.decode(np.arange(258))) == 128 + 128  # ASCII, and one U+FFFD for each byte
    assert BYTES.decode([0xC3]) == "\ufffd"
    assert BYTES.decode([]) == ""


def test_token_bytes():
    assert BYTES.token_bytes.dtype == np.int32
    assert BYTES.token_bytes.tolist() == [1] * 256 + [0, 0]


@pytest.mark.parametrize("ids", [[258], [-1], [0, 1, 1000]])
def test_ids_outside_the_vocabulary_are_refused(ids):
    with pytest.raises(ValueError, match=r"must be in \[0, 258\)"):
        BYTES.decode(ids)


def test_fractions_are_refused():
    # As a user's list of floats arrives, where the annotation is not checked.
    unchecked = inspect.unwrap(ByteTokenizer.decode)
    with pytest.raises(ValueError, match="whole numbers, got float64"):
        unchecked(BYTES, [1.5])


def test_lone_surrogates_are_refused():
    with pytest.raises(ValueError, match="surrogates"):
        BYTES.encode("\ud800")


def test_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        BYTES.vocab_size = 300
    with pytest.raises(TypeError):
        ByteTokenizer(vocab_size=300)
