"""Runs of whole epochs: their steps, their end, and resuming inside epoch 3."""

import json
import shutil

import numpy as np
import pytest

from fp8jax.lm.training import loop
from fp8jax.lm.training.epochs import read_corpus, require_same_epochs, with_steps
from fp8jax.lm.training.loop import train_and_evaluate
from fp8jax.lm.training.settings import check_numbers
from tests.support.chats import pairs, write_chats
from tests.support.runs import numbers, one_layer, tiny


def chat_run(folder, **changes):
    """A config of 4 epochs, and batches that do not divide the rows."""
    spec = write_chats(folder, pairs(60))
    config = one_layer((spec, str(folder / "cache")), model_overrides__vocab_size=384)
    config.tokenizer = f"bpe:{folder}/tokenizer.json"
    config.update(
        seq_len=160,
        num_epochs=4,
        num_steps=7,
        batch_size=16,
        optimizer=dict(warmup_steps=1),
        valid=dict(fraction=0.1, every=100),
        checkpoint=dict(every=1, keep=99),
    )
    config.update(changes)
    return config


def test_steps_of_epochs(tmp_path):
    config = chat_run(tmp_path)
    counted, corpus = with_steps(config)
    rows = len(corpus.train)
    assert 4 * rows % 16  # the last batch has empty rows
    assert counted.num_steps == -(-4 * rows // 16) and config.num_steps == 7
    config.num_epochs = None
    assert with_steps(config) == (config, None)


def test_epochs_of_text(data):
    counted, corpus = with_steps(tiny(data, num_epochs=1, num_steps=1))
    assert counted.num_steps == -(-len(corpus.train) // 16)


def test_weights_have_no_epochs(tmp_path):
    config = chat_run(tmp_path)
    config.data = f"a=2*{config.data}"
    with pytest.raises(ValueError, match=r"num_epochs=4 .* \['a'\] have weights"):
        with_steps(config)
    with pytest.raises(ValueError, match="num_epochs=0 must be at least 1"):
        with_steps(chat_run(tmp_path, num_epochs=0))


@pytest.mark.parametrize(
    "key", ["data", "batch_size", "seed", "num_epochs", "(contents of the data)"]
)
def test_what_decides_the_examples_must_not_change(key):
    require_same_epochs(["optimizer.learning_rate: 0.1 -> 0.2"])
    with pytest.raises(ValueError, match="reads every example equally often"):
        require_same_epochs(["optimizer.learning_rate: 0.1 -> 0.2", f"{key}: 1 -> 2"])


def test_a_run_resumes_inside_epoch_3(tmp_path, monkeypatch):
    """Its batches and numbers are those of a run that never stopped; a smaller batch is refused."""
    config = chat_run(tmp_path)
    batches: list[dict[str, np.ndarray]] = []

    def recorded(iterator, timeout):
        for batch in iterator:
            batches.append(batch)
            yield batch

    monkeypatch.setattr(loop, "TimedIterator", recorded)
    train_and_evaluate(config, str(tmp_path / "run"))
    whole, seen = numbers(tmp_path / "run"), list(batches)
    run = loop.build(config)
    corpus = read_corpus(run.settings, run.tokenizer)
    rows, steps = len(corpus.train), len(whole)
    assert whole[-1]["rows/chat-chats"] == 4 * rows < 16 * steps
    assert json.loads((tmp_path / "run/config.json").read_text())["num_steps"] == steps
    stopped = 2 * rows // 16 + 1
    assert 2 * rows < 16 * stopped < 3 * rows
    for step in range(stopped + 1, steps + 1):
        shutil.rmtree(tmp_path / f"run/checkpoints/{step}")
    smaller = chat_run(tmp_path, batch_size=8)
    smaller.resume_with_changes = True
    with pytest.raises(ValueError, match="cannot after batch_size: 16 -> 8"):
        train_and_evaluate(smaller, str(tmp_path / "run"))
    batches.clear()
    train_and_evaluate(config, str(tmp_path / "run"))
    assert numbers(tmp_path / "run") == whole
    for left, right in zip(seen[stopped:], batches, strict=True):
        for key in left:
            np.testing.assert_array_equal(left[key], right[key])


@pytest.mark.parametrize(
    "key", ["valid__every", "checkpoint__every", "optimizer__clip_norm", "seed"]
)
def test_a_key_without_a_value_is_refused(key, data):
    config = tiny(data, **{key: None})
    with pytest.raises(ValueError, match=f"^{key.replace('__', '.')}=None: it must have a value"):
        check_numbers(config)
    config = tiny(data, num_steps=None, num_epochs=2)
    check_numbers(config)
