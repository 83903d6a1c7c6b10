"""Epochs of conversations and text: each example once in each, and the same from any position."""

import collections
import itertools
import json

import numpy as np
import pytest

from fp8jax.lm.corpus import build_corpus
from fp8jax.lm.data.loader import train_batches
from fp8jax.lm.data.tokenizers import tokenizer
from tests.support.chats import chat_corpus, pairs, write_chats

SEQ_LEN = 160


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Two sources of different sizes, whose examples all differ."""
    folder = tmp_path_factory.mktemp("chats")
    write_chats(folder, [])
    for name, count, seed in (("a", 150, 0), ("b", 40, 1)):
        lines = [
            json.dumps({**each, "prompt": name + each["prompt"]}) for each in pairs(count, seed)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return build_corpus(
        f"a=chat:{folder}/a.jsonl,b=chat:{folder}/b.jsonl",
        tokenizer(f"bpe:{folder}/tokenizer.json"),
        seq_len=SEQ_LEN,
        valid_fraction=0.1,
        cache_dir=folder / "cache",
    )


def members(row):
    """The examples of a row, as tuples of their inputs and last targets."""
    found = []
    for segment in range(1, row["segments"].max() + 1):
        here = row["segments"] == segment
        found.append((*row["tokens"][here].tolist(), int(row["targets"][here][-1])))
    return found


def read(corpus, count, batch_size=1, rows_before=0, **options):
    """`count` rows from a position on, one by one."""
    position = corpus.train.start(corpus.train.start().advanced(rows_before).to_json())
    batches = train_batches(
        corpus.train, seed=4, batch_size=batch_size, position=position, **options
    )
    rows = []
    for batch in itertools.islice(batches, -(-count // batch_size)):
        rows += [{k: v[i] for k, v in batch.items()} for i in range(batch_size)]
    batches.close()
    return rows[:count]


def expected(corpus):
    """Every training example, as `members` has them."""
    found = collections.Counter()
    for rows in corpus.train.rows.values():
        found.update(tuple(rows.examples[i][0].tolist()) for i in range(len(rows.examples)))
    return found


def test_every_epoch_holds_every_example_once(corpus):
    size, wanted = len(corpus.train), expected(corpus)
    assert max(wanted.values()) == 1
    rows = read(corpus, 3 * size)
    for number in range(3):
        epoch = rows[number * size : (number + 1) * size]
        assert collections.Counter(sum(map(members, epoch), [])) == wanted
    orders = [sum(map(members, rows[n * size : (n + 1) * size]), []) for n in range(3)]
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("batch_size", [1, 4, 7])
def test_a_run_resumes_inside_epoch_3(corpus, batch_size):
    """With any batch size; the conversations are rendered anew."""
    size = len(corpus.train)
    whole = read(corpus, 4 * size)
    for before in (2 * size, 2 * size + 5, 3 * size - 1):
        rest = read(corpus, 4 * size - before, batch_size, before)
        for left, right in zip(whole[before:], rest, strict=True):
            for key in left:
                np.testing.assert_array_equal(left[key], right[key])


def test_a_run_of_epochs_ends_with_empty_rows(corpus):
    size, wanted = len(corpus.train), expected(corpus)
    rows = read(corpus, 2 * size + 9, batch_size=5, num_epochs=2)
    seen = collections.Counter(sum(map(members, rows), []))
    assert seen == collections.Counter({example: 2 for example in wanted})
    for row in rows[2 * size :]:
        assert not any(value.any() for value in row.values())
    assert all(row["weights"].any() for row in rows[: 2 * size])


def test_processes_share_the_rows(corpus):
    whole = read(corpus, 40, batch_size=4)
    halves = [
        train_batches(corpus.train, seed=4, batch_size=4, process_index=i, process_count=2)
        for i in range(2)
    ]
    for step in range(10):
        joined = [next(half)["tokens"] for half in halves]
        mine = np.stack([row["tokens"] for row in whole[4 * step : 4 * step + 4]])
        np.testing.assert_array_equal(np.concatenate(joined), mine)
    for half in halves:
        half.close()


def test_weights_mix_conversations(corpus, tmp_path):
    again = chat_corpus(tmp_path, pairs(60))
    assert again.train.schedule == {"chat-chats": 1}
    spec = f"chat:{tmp_path}/chats.jsonl"
    mixed = build_corpus(
        f"a=3*{spec},b=1*{spec}",
        tokenizer(f"bpe:{tmp_path}/tokenizer.json"),
        seq_len=SEQ_LEN,
        valid_fraction=0.1,
        cache_dir=tmp_path / "cache",
    )
    assert mixed.train.schedule == {"a": 3, "b": 1} and list(mixed.valid) == ["a", "b"]
