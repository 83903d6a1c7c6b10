"""A tokenizer made for conversations: its files are read, and masks hold what was answered."""

import argparse
from pathlib import Path

import pytest

from fp8jax.lm.chat.chat_template import load_chat_template
from fp8jax.lm.chat.chat_tokenizer import CHAT_TOKENS, TURN_END, write_chat_tokenizer
from fp8jax.lm.data.tokenizers import tokenizer

TEXT = Path(argparse.__file__).read_text()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The tokenizer and its template, as a run loads them."""
    path = tmp_path_factory.mktemp("chat") / "tokenizer.json"
    write_chat_tokenizer(path, iter([TEXT]), 400)
    words = tokenizer(f"bpe:{path}")
    return words, load_chat_template(path.parent, words)


def test_special_tokens(made):
    words, _ = made
    assert words.vocab_size == 400
    first = [words.backend.id_to_token(index) for index in range(3)]
    assert first == list(CHAT_TOKENS)
    assert (words.bos, words.backend.id_to_token(words.eos)) == (0, TURN_END)
    assert words.decode(words.encode(TEXT)) == TEXT


def test_each_digit_is_a_token(made):
    words, _ = made
    pieces = [words.decode([index]) for index in words.encode("x = 1999 + 2001").tolist()]
    assert [piece for piece in pieces if piece.strip().isdigit()] == list("19992001")


def test_the_answer_and_the_end_of_its_turn_are_supervised(made):
    words, template = made
    question, answer = "How much is 2 + 5?", "2 + 5 = 7\n#### 7"
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    example = template.example(messages)
    assert example.text == (
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
    )
    supervised = example.ids[example.mask]
    assert words.decode(supervised) == answer and supervised[-1] == words.eos
    prompt = template.prompt(messages[:1])
    assert example.ids[: len(prompt)].tolist() == prompt.tolist()
    assert not example.mask[: len(prompt)].any() and example.mask[len(prompt)]


def test_files_are_not_overwritten(made, tmp_path):
    (tmp_path / "chat_template.jinja").write_text("mine")
    with pytest.raises(FileExistsError, match="chat_template.jinja exists and is not overwritten"):
        write_chat_tokenizer(tmp_path / "tokenizer.json", iter([TEXT]), 300)
    assert [path.name for path in tmp_path.iterdir()] == ["chat_template.jinja"]
    with pytest.raises(ValueError, match="must be at least 259: the 256 bytes, <.begin_of_text"):
        write_chat_tokenizer(made[0].folder / "new/other.json", iter([TEXT]), 258)
