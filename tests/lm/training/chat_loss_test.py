"""The loss of conversations: by hand, packed beside alone, and untouched by what shares a row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.lm.chat.chat_corpus import chat_template
from fp8jax.lm.chat.packing import ExampleRows
from fp8jax.lm.data.tokenizers import tokenizer
from fp8jax.lm.training.step import loss_sum
from tests.support.chats import chat_corpus, pairs
from tests.support.tiny_models import tiny_model

SEQ_LEN = 160


@functools.cache
def model(policy="bf16", dtype=jnp.float32):
    return tiny_model(policy=policy, dtype=dtype, vocab_size=384)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("chats")


@pytest.fixture(scope="module")
def rows(folder):
    """The packed rows of 40 conversations and one by hand."""
    lines = [*pairs(40), {"prompt": "Hi", "response": "Hello"}]
    return list(chat_corpus(folder, lines, seq_len=SEQ_LEN).train.rows.values())[0]


@functools.partial(jax.jit, static_argnums=0)
def loss(transformer, variables, batch):
    return loss_sum(transformer, variables["params"], {}, batch, None)


def losses(row, policy="bf16", dtype=jnp.float32):
    """The sum of the losses of each example of a row."""
    transformer, variables = model(policy, dtype)
    found = []
    for segment in range(1, row["segments"].max() + 1):
        only = row | {"weights": row["weights"] * (row["segments"] == segment)}
        batch = {key: jnp.asarray(value)[None] for key, value in only.items()}
        found.append(float(loss(transformer, variables, batch)))
    return np.array(found)


def test_loss_by_hand(folder, rows):
    """A packed conversation has the sum over exactly the ids that the assistant wrote."""
    template = chat_template(tokenizer(f"bpe:{folder}/tokenizer.json"))
    prompt, turn, rest = (
        template.backend.encode(text, add_special_tokens=False).ids
        for text in (
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
            "Hello<|im_end|>",
            "\n",
        )
    )
    ids = np.array(prompt + turn + rest)
    ones = jnp.ones((1, len(ids)), jnp.int32)
    transformer, variables = model()
    places = jnp.arange(len(ids))[None]
    logits = jax.jit(transformer.apply)(variables, jnp.asarray(ids)[None], ones, places)[0]
    logs = np.asarray(jax.nn.log_softmax(logits))
    by_hand = 0.0
    for place in range(len(prompt), len(prompt) + len(turn)):
        by_hand -= logs[place - 1, ids[place]]
    (index,) = [
        i for i in range(len(rows.examples)) if rows.examples[i][0].tolist() == ids.tolist()
    ]
    ((row, place),) = [
        (row, rows.members(row).index(index))
        for row in range(len(rows))
        if index in rows.members(row)
    ]
    assert len(rows.members(row)) > 1
    np.testing.assert_allclose(losses(rows[row])[place], by_hand, rtol=1e-6)


def alone(rows, index):
    """The row of an example that shares it with none."""
    only = rows.examples.only(np.arange(len(rows.examples)) == index)
    return ExampleRows(only, seq_len=SEQ_LEN)[0]


# Each token's loss has the same bits; only the float32 sum over a row has another order.
@pytest.mark.parametrize(
    ("policy", "dtype"),
    [("bf16", jnp.float32), ("bf16", jnp.bfloat16), ("fp8_block", jnp.bfloat16)],
)
def test_packed_equals_alone(rows, policy, dtype):
    for index in range(min(4, len(rows))):
        singly = [losses(alone(rows, i), policy, dtype)[0] for i in rows.members(index)]
        np.testing.assert_allclose(losses(rows[index], policy, dtype), singly, rtol=1e-6)


@pytest.mark.parametrize(("policy", "dtype"), [("bf16", jnp.float32), ("fp8_block", jnp.float32)])
def test_an_example_changes_no_others_loss(rows, policy, dtype):
    """To the bit, with operands of single tokens too."""
    row = max(rows, key=lambda row: row["segments"].max())
    before = losses(row, policy, dtype)
    assert len(before) > 2
    for segment in (1, 2):
        here = row["segments"] == segment
        other = row | {"tokens": np.where(here, row["tokens"][::-1], row["tokens"])}
        after = losses(other, policy, dtype)
        assert (np.flatnonzero(before != after) == [segment - 1]).all()
        assert before[segment - 1] != after[segment - 1]
