"""Conversations that nothing can be learned from: each an error, or counted, named and left out."""

import logging
import shutil

import numpy as np
import pytest

from fp8jax.lm.corpus import build_corpus
from fp8jax.lm.data.bad_examples import Reason
from fp8jax.lm.data.tokenizers import tokenizer
from tests.support.chat_templates import CHATML, THINKING
from tests.support.chats import chat_corpus, pairs, write_chats


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **others):
    return {"role": "assistant", "content": content, **others}


CALL = {"type": "function", "function": {"name": "sum", "arguments": {}}}

# Refuses one conversation, leaves out one, and supervises all of another.
TEMPLATE = (
    "{% if messages[0].content == 'refuse' %}{{ raise_exception('no') }}{% endif %}"
    "{% if messages[0].content == 'nothing' %}{{ 'text' }}"
    "{% elif messages[0].content == 'everything' %}"
    "{% generation %}{{ messages[1].content }}{% endgeneration %}"
    "{% else %}{% for message in messages %}{{ '<|im_start|>' + message.role }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}{% endif %}"
)

BAD = [
    ("{", Reason.NOT_JSON),
    ('"text"', Reason.NO_CONVERSATION),
    ({"messages": [user("a"), assistant("b")], "tools": 1}, Reason.NO_CONVERSATION),
    ({"messages": [{"role": "judge", "content": ""}]}, Reason.ROLE),
    ({"messages": [user("a"), assistant("", tool_calls=[CALL]), user("b")]}, Reason.TOOLS),
    ({"messages": [user("a")]}, Reason.NO_TURN),
    ({"messages": [user("a"), assistant("b"), user("c")]}, Reason.ENDS_WITH_OTHER),
    ({"messages": [user("a"), assistant("")]}, Reason.BLANK),
    ({"prompt": "a", "response": ""}, Reason.BLANK),
    ({"prompt": "\ufdd0", "response": "b"}, Reason.NOT_TEXT),
    ({"prompt": "refuse", "response": "b"}, Reason.TEMPLATE),
    ({"messages": [user("a"), assistant("", tool_calls=[CALL])]}, Reason.TEMPLATE),
    ({"prompt": "nothing", "response": "b"}, Reason.SUPERVISION),
    ({"prompt": "everything", "response": "b"}, Reason.SUPERVISION),
]


@pytest.mark.parametrize(("line", "reason"), BAD)
def test_a_bad_line_is_an_error_or_counted(tmp_path, line, reason, caplog):
    lines = [*pairs(30), line, *pairs(10, seed=1)]
    with pytest.raises(ValueError, match=r"chats.jsonl, line 31: .*bad_examples=skip leaves"):
        chat_corpus(tmp_path, lines, TEMPLATE)
    with caplog.at_level(logging.WARNING, logger="absl"):
        (stats,) = chat_corpus(tmp_path, lines, TEMPLATE, bad_examples="skip").stats
    assert sum(stats.conversations.values()) == 40
    assert stats.bad.counts == {reason: 1}
    assert "'chat-chats': bad conversations skipped: 1 (" in caplog.text
    assert f"{tmp_path}/chats.jsonl, line 31: " in caplog.text


def examples_of(corpus):
    (train,), (valid,) = corpus.train.rows.values(), corpus.valid.values()
    return [
        each.examples[i][0].tolist() for each in (train, valid) for i in range(len(each.examples))
    ]


def test_many_bad_lines(tmp_path, caplog):
    """The good ones are as if they were alone; the counts stand in data.txt and on the console."""
    lines = [line for line, _ in BAD]
    with caplog.at_level(logging.WARNING, logger="absl"):
        corpus = chat_corpus(
            tmp_path, [*lines[:7], *pairs(40), *lines[7:]], TEMPLATE, bad_examples="skip"
        )
    alone = chat_corpus(tmp_path / "alone", pairs(40), TEMPLATE)
    assert examples_of(corpus) == examples_of(alone)
    assert "bad conversations" not in alone.summary() + alone.stats[0].brief()
    (stats,) = corpus.stats
    assert set(stats.bad.counts) == set(Reason) - {Reason.TURNS}
    expected = f"bad conversations skipped: {len(BAD)} (not JSON: 1, no conversation: 2, unknown"
    assert expected in corpus.summary() and expected in stats.brief()
    assert all(f"chats.jsonl, line {i}: " in caplog.text for i in (1, 2, 3))
    assert "line 4: " not in caplog.text and "; and 11 more" in caplog.text


def test_a_turn_that_cannot_be_found(tmp_path):
    thought = [user("a"), assistant("<think>b</think>c"), user("d"), assistant("e")]
    lines = [*pairs(20), {"messages": thought}]
    (stats,) = chat_corpus(tmp_path, lines, THINKING, bad_examples="skip").stats
    assert stats.bad.counts == {Reason.TURNS: 1}


def test_all_turns_of_a_bad_conversation_are_left_out(tmp_path):
    template = "{% if messages | length > 3 %}{{ raise_exception('long') }}{% endif %}" + CHATML
    turns = [user("a"), assistant("b"), user("c"), assistant("d")]
    spec = write_chats(tmp_path, [*pairs(20), {"messages": turns}], template)
    (stats,) = build_corpus(
        f"{spec}#turns",
        tokenizer(f"bpe:{tmp_path}/tokenizer.json"),
        seq_len=160,
        valid_fraction=0.2,
        cache_dir=tmp_path / "cache",
        bad_examples="skip",
    ).stats
    assert sum(stats.examples.values()) == 20 and stats.bad.counts == {Reason.TEMPLATE: 1}


def test_the_cache_of_a_run_that_skips(tmp_path, caplog):
    """It serves no run that refuses, and names files by their present paths."""
    lines = [*pairs(20), "{"]
    built = chat_corpus(tmp_path / "a", lines, bad_examples="skip", cache_dir=tmp_path / "cache")
    shutil.move(tmp_path / "a", tmp_path / "b")
    with caplog.at_level(logging.WARNING, logger="absl"):
        cached = chat_corpus(
            tmp_path / "b", lines, bad_examples="skip", cache_dir=tmp_path / "cache"
        )
    assert len(list((tmp_path / "cache").glob("chats-*"))) == 1
    assert cached.fingerprint == built.fingerprint
    assert cached.stats[0].bad.counts == built.stats[0].bad.counts == {Reason.NOT_JSON: 1}
    np.testing.assert_equal(examples_of(cached), examples_of(built))
    assert f"{tmp_path}/b/chats.jsonl, line 21: not JSON" in caplog.text
    with pytest.raises(ValueError, match="b/chats.jsonl, line 21: not JSON.*bad_examples=skip"):
        chat_corpus(tmp_path / "b", lines, cache_dir=tmp_path / "cache")


def test_nothing_is_left(tmp_path):
    lines = [{"messages": [user("a")]}] * 3 + ["{"]
    with pytest.raises(
        ValueError,
        match=r"^source 'chat-chats': no conversation is left; bad conversations skipped: 4 \(no "
        r"turn of the assistant: 3, not JSON: 1\); the first: .*chats.jsonl, line 1: the assistant",
    ):
        chat_corpus(tmp_path, lines, bad_examples="skip")


def test_unknown_answers(tmp_path):
    with pytest.raises(ValueError, match="unknown bad_examples 'drop'"):
        chat_corpus(tmp_path, pairs(20), bad_examples="drop")
