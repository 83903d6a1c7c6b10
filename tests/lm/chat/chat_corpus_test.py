"""Files of conversations to rows: what is read, counted, shown and refused."""

import datetime
import json
import logging

import numpy as np
import pytest

from fp8jax.lm.chat import chat_corpus as chats
from fp8jax.lm.chat import chat_template
from fp8jax.lm.corpus import build_corpus
from fp8jax.lm.data.bpe import load_bpe
from fp8jax.lm.data.tokenizers import tokenizer
from fp8jax.lm.sources import training_documents
from tests.support.chat_templates import BRACKETS, CHATML, HEADERS, SPECIAL, THINKING
from tests.support.chats import chat_corpus, pairs, write_chats
from tests.support.text import write_generated_text


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **others):
    return {"role": "assistant", "content": content, **others}


def rows_of(corpus, split="train"):
    (source,) = (corpus.train.rows if split == "train" else corpus.valid).values()
    return source


def all_examples(corpus):
    """(ids, supervised) of all examples, of both splits."""
    found = [rows_of(corpus, split).examples for split in ("train", "valid")]
    return [each[i] for each in found for i in range(len(each))]


def test_counts_of_a_source(tmp_path):
    corpus = chat_corpus(tmp_path, pairs(100))
    (stats,) = corpus.stats
    bpe = load_bpe(tmp_path / "tokenizer.json")
    template = chat_template.load_chat_template(tmp_path, bpe)
    rendered = [
        template.example([user(line["prompt"]), assistant(line["response"])]) for line in pairs(100)
    ]
    assert sum(stats.conversations.values()) == 100
    assert sum(stats.tokens.values()) == sum(len(example.ids) for example in rendered)
    assert sum(stats.supervised.values()) == sum(example.mask.sum() for example in rendered)
    weights = [
        row["weights"].sum() for split in ("train", "valid") for row in rows_of(corpus, split)
    ]
    assert sum(weights) == sum(stats.supervised.values())
    for split in ("train", "valid"):
        rows = list(rows_of(corpus, split))
        assert stats.rows[split] == len(rows)
        filled = np.mean([row["segments"] > 0 for row in rows])
        assert stats.fill[split] == pytest.approx(filled)
    head, train, valid, long = corpus.summary().split("\n")
    assert head.split()[2:] == "conversations examples tokens supervised rows fill share".split()
    assert train.split()[2:7] == [
        f"{n['train']:,}"
        for n in (stats.conversations, stats.examples, stats.tokens, stats.supervised, stats.rows)
    ]
    assert long.strip() == "no example was longer than a row of 160 tokens"


def test_the_first_examples_are_shown(tmp_path):
    messages = [user("Hi"), assistant("Hello"), user("Bye"), assistant("x" * 600)]
    corpus = chat_corpus(tmp_path, [{"messages": messages}] * 2 + pairs(40), seq_len=900)
    place, text = corpus.first[0]
    assert place == f"{tmp_path}/chats.jsonl, line 1"
    shown = text.replace("x" * 193, "…")
    assert (
        shown
        == (
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n>>>Hello<|im_end|><<<\n"
            "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n>>>"
        )
        + shown.rpartition(">>>")[2]
    )
    assert " […] " in shown and shown.endswith("<|im_end|><<<\n")
    assert text.count("x") == 400 - len("<|im_end|>")


@pytest.mark.parametrize(("sources", "shown"), [(1, "aaa"), (2, "aba"), (3, "abc"), (4, "abc")])
def test_the_sources_are_shown_in_turn(tmp_path, sources, shown):
    specs = [f"{name}={write_chats(tmp_path / name, pairs(40))}" for name in "abcd"[:sources]]
    corpus = build_corpus(
        ",".join(specs),
        tokenizer(f"bpe:{tmp_path}/a/tokenizer.json"),
        seq_len=160,
        valid_fraction=0.2,
        cache_dir=tmp_path / "cache",
    )
    places = [place.removeprefix(f"{tmp_path}/") for place, _ in corpus.first]
    assert [place[0] for place in places] == list(shown)
    # Each of a source is another one, and the first of them the first that trains.
    assert len(set(places)) == 3
    first = [text for _, text in corpus.first]
    assert first[0].startswith("<|im_start|>user\nsay 0")
    assert all(">>>no " in text and text.endswith("<|im_end|><<<\n") for text in first)


def test_pairs_are_messages(tmp_path):
    line = {"prompt": "Why?", "response": "So.", "answer": 3}
    messages = {"messages": [user("Why?"), assistant("So.")]}
    left, right = (
        chat_corpus(tmp_path / name, [*pairs(40), each])
        for name, each in (("a", line), ("b", messages))
    )
    for (ids, mask), (others, other_mask) in zip(*map(all_examples, (left, right)), strict=True):
        np.testing.assert_array_equal(ids, others)
        np.testing.assert_array_equal(mask, other_mask)


def test_turns_are_examples(tmp_path):
    messages = [user("Hi"), assistant("Hello"), user("Bye"), assistant("So long.")]
    lines = [{"messages": [*messages[:3], assistant(f"no {i}")]} for i in range(40)]
    spec = write_chats(tmp_path, lines, THINKING)
    bpe = tokenizer(f"bpe:{tmp_path}/tokenizer.json")
    settings = dict(seq_len=160, valid_fraction=0.2, cache_dir=tmp_path / "cache")
    with pytest.raises(ValueError, match="chats.jsonl, line 1: .* differently"):
        build_corpus(spec, bpe, **settings)
    (stats,) = build_corpus(f"{spec}#turns", bpe, **settings).stats
    assert sum(stats.conversations.values()) == 40 and sum(stats.examples.values()) == 80
    for split in ("train", "valid"):  # the turns of a conversation stay together
        assert stats.examples[split] == 2 * stats.conversations[split]


def test_the_split_is_that_of_the_tokenizers_documents(tmp_path):
    spec = write_chats(tmp_path, pairs(60))
    documents = list(training_documents(spec, 0.2))
    corpus = chat_corpus(tmp_path, pairs(60))
    assert len(documents) == corpus.stats[0].conversations["train"]


def test_a_date_in_a_template_never_changes(tmp_path, monkeypatch):
    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2031, 1, 2)

    first = chat_corpus(tmp_path, pairs(40), HEADERS, seq_len=256)
    monkeypatch.setattr(datetime, "datetime", Later)
    again = chat_corpus(tmp_path, pairs(40), HEADERS, seq_len=256, cache_dir=tmp_path / "another")
    assert first.fingerprint == again.fingerprint
    assert "26 Jul 2024" in first.first[0][1] and first.first == again.first


def test_the_cache_follows_files_and_template(tmp_path, monkeypatch):
    first = chat_corpus(tmp_path, pairs(40))
    other = chat_corpus(tmp_path, pairs(40), CHATML.replace("'\\n'", "'\\n\\n'"))
    edited = chat_corpus(tmp_path, pairs(41))
    assert len({corpus.fingerprint for corpus in (first, other, edited)}) == 3
    monkeypatch.setattr(chat_template.ChatTemplate, "example", None)  # would fail
    cached = chat_corpus(tmp_path, pairs(40), seq_len=200)
    assert (
        cached.fingerprint == first.fingerprint and cached.stats[0].tokens == first.stats[0].tokens
    )


# Long examples -----------------------------------------------------------------------------------

LONG = [
    *pairs(60),
    {"prompt": "long", "response": "no " * 200},
    {"prompt": "endless " * 100, "response": "no"},
]


def test_long_examples_are_an_error(tmp_path):
    with pytest.raises(
        ValueError, match=r"(is|are) longer than a row of seq_len=160 .*jsonl, line 6[12]"
    ):
        chat_corpus(tmp_path, LONG)


def test_long_examples_are_skipped(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="absl"):
        corpus = chat_corpus(tmp_path, LONG, long_examples="skip")
    (stats,) = corpus.stats
    assert sum(stats.skipped.values()) == 2 and sum(stats.conversations.values()) == 60
    assert "line 61" in caplog.text and "line 62" in caplog.text
    assert "2 skipped, 0 cut" in corpus.summary() and "2 skipped, 0 cut" in stats.brief()


def test_long_examples_are_cut(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="absl"):
        corpus = chat_corpus(tmp_path, LONG, long_examples="cut")
    whole = chat_corpus(tmp_path, LONG, seq_len=2048).stats[0]
    (stats,) = corpus.stats
    # Of the second nothing of the assistant's is left.
    assert sum(stats.cut.values()) == 1 and sum(stats.skipped.values()) == 1
    ids = max(all_examples(corpus), key=lambda example: len(example[0]))[0]
    assert len(ids) == 161  # 160 inputs, and the last target
    spelled = max(
        all_examples(chat_corpus(tmp_path, LONG[:61], seq_len=2048)), key=lambda e: len(e[0])
    )
    assert sum(stats.cut_tokens.values()) == len(spelled[0]) - 161
    assert sum(whole.conversations.values()) == 62
    cut_off = f"1 skipped, 1 cut, tokens cut off: {sum(stats.cut_tokens.values()):,}"
    assert cut_off in corpus.summary()


def test_only_examples_that_are_cut_are_called_cut(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="absl"):
        chat_corpus(tmp_path, [*LONG[:60], LONG[61]], long_examples="cut")
    assert "skipped, since no turn" in caplog.text and "cut: " not in caplog.text


# What is refused ---------------------------------------------------------------------------------

CALL = {"type": "function", "function": {"name": "sum", "arguments": {}}}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ('"text"', "expected"),
        ({"prompt": "Why?"}, "expected"),
        ({"prompt": "Why?", "response": " "}, "response must be a text"),
        ({"prompt": 3, "response": "x"}, "prompt must be a text"),
        ({"messages": [user("Hi")]}, "the assistant has no turn"),
        ({"messages": [user("Hi"), assistant("a"), user("b")]}, "the last turn is the user's"),
        ({"messages": [{"role": "judge", "content": ""}]}, "has the role 'judge'"),
        (
            {"messages": [user("a"), assistant(None, tool_calls=[CALL]), user("b")]},
            "calls 1 tool, but 0 results follow",
        ),
        ({"messages": [user("Hi"), assistant("a")], "tools": "sum"}, "tools must be a list"),
        ({"messages": [user("Hi"), assistant("")]}, "message 2, the assistant's, is blank"),
        ({"messages": [assistant(" \n"), user("Hi"), assistant("a")]}, "message 1, .* is blank"),
        ({"messages": [user("Hi"), assistant("", tool_calls=[])]}, "message 2, .* is blank"),
    ],
)
def test_bad_lines(tmp_path, line, message):
    with pytest.raises(ValueError, match=f"chats.jsonl, line 21: .*{message}"):
        chat_corpus(tmp_path, [*pairs(20), line])


def test_a_template_that_raises(tmp_path):
    template = "{% if messages[0].content == 'say 7' %}{{ raise_exception('no\\n7') }}{% endif %}"
    lines = [{"prompt": f"say {i}", "response": "no"} for i in range(20)]
    with pytest.raises(
        ValueError, match="chats.jsonl, line 8: .* refuses the conversation: .*no 7"
    ):
        chat_corpus(tmp_path, lines, template + CHATML)


CALLING = "{% for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}"


def test_an_end_with_calls_that_the_template_renders(tmp_path):
    template = CHATML.replace(
        "message.content + '<|im_end|>\\n' }}",
        "(message.content or '') }}" + CALLING + "{{ '<|im_end|>\\n' }}",
    )
    ends = {"messages": [user("Hi"), assistant(None, tool_calls=[CALL])]}
    corpus = chat_corpus(tmp_path, [ends, *pairs(20)], template)
    assert sum(corpus.stats[0].conversations.values()) == 21


@pytest.mark.parametrize("each_turn", ["", "#turns"])
@pytest.mark.parametrize(
    ("content", "rendered", "message"),
    [
        # None + text
        (None, "message.content", "refuses the conversation: TypeError: .*"),
        ("", "message.content", "message 2 calls tools, and .* does not render the calls: take"),
        (None, "(message.content or '')", "message 2 calls tools, and .* does not render"),
        (None, "(message.content | string)", "message 2 calls tools, and .* does not render"),
    ],
)
def test_an_end_with_calls_that_the_template_does_not_render(
    tmp_path, content, rendered, message, each_turn
):
    template = CHATML.replace("message.content", rendered)
    ends = {"messages": [user("Hi"), assistant(content, tool_calls=[CALL])]}
    spec = write_chats(tmp_path, [*pairs(20), ends], template)
    settings = dict(seq_len=160, valid_fraction=0.2, cache_dir=tmp_path / "cache")
    with pytest.raises(ValueError, match=f"^{tmp_path}/chats.jsonl, line 21: .*{message}") as error:
        build_corpus(spec + each_turn, tokenizer(f"bpe:{tmp_path}/tokenizer.json"), **settings)
    assert "\n" not in str(error.value)


def test_all_or_nothing_supervised(tmp_path):
    nothing = (
        "{{ messages[0].content }}{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    )
    with pytest.raises(ValueError, match="line 1: none of the .* tokens are the assistant's"):
        chat_corpus(tmp_path, pairs(20), nothing)
    everything = "{% generation %}{{ messages[1].content }}{% endgeneration %}"
    with pytest.raises(ValueError, match="line 1: all of the .* tokens are the assistant's"):
        chat_corpus(tmp_path, pairs(20), everything)
    first = "{% generation %}{{ messages[1].content }}{% endgeneration %}{{ messages[0].content }}"
    with pytest.raises(ValueError, match="line 1: only the first token is the assistant's"):
        chat_corpus(tmp_path, [pair | {"response": "o"} for pair in pairs(20)], first)


def test_tokenizers_that_do_not_fit(tmp_path):
    spec = write_chats(tmp_path, pairs(20))
    settings = dict(seq_len=160, valid_fraction=0.2, cache_dir=tmp_path / "cache")
    with pytest.raises(ValueError, match="tokenizer is bytes: take bpe:FOLDER"):
        build_corpus(spec, tokenizer("bytes"), **settings)
    bpe = tokenizer(f"bpe:{tmp_path}/tokenizer.json")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.pop("chat_template")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="has no chat template.*: take the tokenizer of a model"):
        build_corpus(spec, bpe, **settings)
    (tmp_path / "chat_template.jinja").write_text(CHATML.replace("im_end", "im_over"))
    with pytest.raises(ValueError, match=r"writes <\|im_over\|>, which the tokenizer in"):
        build_corpus(spec, bpe, **settings)
    config["eos_token"] = "[END]"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text(BRACKETS)
    with pytest.raises(ValueError, match=r"writes \[END\], which the tokenizer in"):
        build_corpus(spec, bpe, **settings)


@pytest.mark.parametrize("template", [CHATML, HEADERS, THINKING, BRACKETS])
def test_templates_whose_tokens_are_there(tmp_path, template):
    spec = write_chats(tmp_path, pairs(20), template)
    assert spec and SPECIAL
    chats.chat_template(tokenizer(f"bpe:{tmp_path}/tokenizer.json"))


def test_bad_sources(tmp_path):
    spec = write_chats(tmp_path, pairs(20))
    bpe = tokenizer(f"bpe:{tmp_path}/tokenizer.json")
    settings = dict(seq_len=160, valid_fraction=0.2, cache_dir=tmp_path / "cache")
    with pytest.raises(ValueError, match=r"\(chat-chats\) and text \(.*\) do not mix in a run"):
        build_corpus(f"{spec},{write_generated_text(tmp_path)}", bpe, **settings)
    with pytest.raises(ValueError, match="expected chat:GLOB or chat:GLOB#turns, got #turn"):
        build_corpus(f"{spec}#turn", bpe, **settings)
    with pytest.raises(ValueError, match="unknown long_examples 'drop'"):
        build_corpus(spec, bpe, long_examples="drop", **settings)
    with pytest.raises(ValueError, match="its valid split has no conversation, of 20 in all"):
        build_corpus(spec, bpe, **(settings | {"valid_fraction": 1e-9}))


def test_one_long_example_is_named_in_the_singular(tmp_path):
    with pytest.raises(ValueError, match=r"^1 of \d+ examples is longer than a row of"):
        chat_corpus(tmp_path, LONG[:61])


def test_an_empty_file(tmp_path):
    with pytest.raises(ValueError, match="'chat-chats' has no conversations: its files are empty"):
        chat_corpus(tmp_path, [])


def test_no_example_is_left(tmp_path):
    with pytest.raises(ValueError, match="'chat-chats': all .* are longer than .* left out"):
        chat_corpus(tmp_path, pairs(20), seq_len=8, long_examples="skip")
