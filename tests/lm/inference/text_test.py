"""Growing texts: what may be shown, and where they end."""

from unittest import mock

import numpy as np
import pytest
import tokenizers

from fp8jax.lm.data.byte_tokenizer import ByteTokenizer
from fp8jax.lm.inference.generate import Generator
from fp8jax.lm.inference.sampling import Sampling
from fp8jax.lm.inference.text import GrowingText, complete_text, stream_text
from tests.support.tiny_models import tiny_model

BYTES = ByteTokenizer()


def growing(*stops: str) -> GrowingText:
    return GrowingText(BYTES, stops, (BYTES.eos,))


def test_a_stop_string_may_span_pieces_and_is_never_shown():
    text = growing("END", "stop")
    shown = []
    for piece in ("a st", "oking E", "N", "D and more"):
        text.add(BYTES.encode(piece))
        shown.append(text.fresh())
    assert shown == ["a ", "stoking ", "", ""]
    text.add(BYTES.encode("dropped"))
    text.close()
    found = text.completion()
    assert (found.text, found.ended_by) == ("a stoking ", "stop string")
    assert bytes(found.ids).decode() == "a stoking END and more"


def test_the_first_of_several_stop_strings_counts():
    text = growing("b", "ab")
    text.add(BYTES.encode("xxabxx"))
    assert text.completion().text == "xx"


def test_half_a_character_waits_for_the_rest():
    text = growing()
    shown = []
    for byte in [*"ä€x".encode(), 0xE2]:
        text.add(np.array([byte]))
        shown.append(text.fresh())
    assert shown == ["", "ä", "", "", "€", "x", ""]
    text.close()
    assert text.fresh() == "\ufffd" and text.completion().ended_by == "length"


def test_a_stop_id_ends_a_text():
    text = growing("zz")
    text.add(np.array([*BYTES.encode("yz"), BYTES.eos]))
    assert text.fresh() == "yz"  # the beginning of a stop string that nothing will complete
    assert text.completion().ended_by == "stop id"


def sentencepiece_style():
    """Tokens that begin with their space, which a decoder takes from the first of them."""
    pieces = ["<s>", "</s>", "<turn>", "▁", "▁hello", "▁world", "▁w", "orld"]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({piece: i for i, piece in enumerate(pieces)}, "<s>")
    )
    decoders = tokenizers.decoders
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(pieces[:2])
    made.add_tokens(["<turn>"])
    words = mock.Mock(eos=1)
    words.decode = made.decode
    return words


@pytest.mark.parametrize("prompt, text", [([0, 4], " world"), ([0], "world"), ([], "world")])
def test_the_space_of_a_first_token_stays_behind_a_prompt(prompt, text):
    growing = GrowingText(sentencepiece_style(), (), (1,), prompt)
    growing.add(np.array([6]))
    growing.add(np.array([7, 1]))
    assert growing.completion().text == text
    assert growing.completion().ids == (6, 7, 1)


def test_a_stop_string_may_begin_with_that_space():
    growing = GrowingText(sentencepiece_style(), (" world",), (1,), [0, 4])
    growing.add(np.array([5, 4]))
    assert (growing.completion().text, growing.ended_by) == ("", "stop string")


def test_a_stop_id_is_no_text():
    """Also of a token that the tokenizer does not call special."""
    growing = GrowingText(sentencepiece_style(), (), (1, 2), [0, 4])
    growing.add(np.array([4, 2]))
    assert (growing.completion().text, growing.ended_by) == (" hello", "stop id")


@pytest.fixture(scope="module")
def generator():
    model, variables = tiny_model(vocab_size=BYTES.vocab_size)
    return Generator(model, variables, vocab_size=BYTES.vocab_size, max_length=64, cache="fp32")


def test_texts_end_by_themselves(generator):
    prompts = [[BYTES.bos, *BYTES.encode(text)] for text in ("a", "bc")]
    sampling = Sampling(temperature=0)
    plain = complete_text(generator, BYTES, prompts, sampling, 30)
    assert [one.ended_by for one in plain] == ["length"] * 2
    stop = plain[0].text[4:6]
    ended = complete_text(generator, BYTES, prompts, sampling, 30, stop_strings=[stop])
    for one, whole in zip(ended, plain, strict=True):
        assert one.text == whole.text.partition(stop)[0]
        assert one.ended_by == ("stop string" if stop in whole.text else "length")
        assert one.ids == whole.ids[: len(one.ids)]
    assert len(ended[0].ids) < 30
    shown = ["", ""]
    for texts in stream_text(generator, BYTES, prompts, sampling, 30, stop_strings=[stop]):
        shown = [one + text.fresh() for one, text in zip(shown, texts, strict=True)]
    assert shown == [one.text for one in ended]
    with pytest.raises(ValueError, match="a stop string is empty"):
        complete_text(generator, BYTES, prompts, sampling, 30, stop_strings=[""])
