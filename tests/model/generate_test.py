"""Generation against the loop that a reader would write, and the draws it makes."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.model.generate import generate
from fp8jax.model.models import MODELS
from fp8jax.model.transformer import Transformer

CONFIG = dataclasses.replace(
    MODELS["llama_tiny"], vocab_size=24, d_model=32, n_layers=2, d_ff=48, head_dim=8
)
PROMPT = np.array([3, 1, 4], np.int32)


def model_and_variables():
    model = Transformer(CONFIG, dtype=jnp.float32)
    ids = jnp.zeros((1, 1), jnp.int32)
    variables = jax.jit(model.init)(jax.random.key(0), ids, ids, ids)
    # Unlike logits: at initialization all tokens are nearly as likely.
    return model, jax.tree.map(lambda p: 8 * p, nn.meta.unbox(variables))


MODEL, VARIABLES = model_and_variables()


def generated(num_tokens: int, temperature: float, num_words: int = 24, seed: int = 0):
    run = jax.jit(
        lambda variables, prompt: generate(
            MODEL, variables, prompt, num_tokens=num_tokens, temperature=temperature,
            num_words=num_words, key=jax.random.key(seed),
        )
    )  # fmt: skip
    return np.asarray(run(VARIABLES, PROMPT))


def logits_after(tokens: np.ndarray) -> np.ndarray:
    """Of the next token, from a row that holds just these."""
    row = jnp.asarray(tokens)[None]
    logits = MODEL.apply(VARIABLES, row, jnp.ones_like(row), jnp.arange(row.shape[1])[None])
    return np.asarray(logits[0, -1])


def test_at_temperature_zero_each_token_is_the_likeliest_after_those_before_it():
    tokens = generated(8, temperature=0.0)
    assert tokens.shape == (11,) and tokens.dtype == np.int32
    assert np.array_equal(tokens[:3], PROMPT)
    assert len(set(tokens[3:].tolist())) > 1  # otherwise a constant would do
    for at in range(3, 11):
        logits = logits_after(tokens[:at])
        # Rounding differs with the length of the row: a near tie may go the other way.
        assert logits[tokens[at]] >= logits.max() - 1e-3 * np.abs(logits).max()


def test_draws_follow_key_and_temperature():
    warm = generated(32, temperature=1.0)
    assert np.array_equal(warm, generated(32, temperature=1.0))
    assert not np.array_equal(warm, generated(32, temperature=1.0, seed=1))
    # So cold that only the likeliest is left.
    assert np.array_equal(generated(8, temperature=1e-4), generated(8, temperature=0.0))


def test_draws_have_the_probabilities_of_the_logits():
    """One token each from 4,000 keys: every frequency within 5 standard deviations,
    5 sqrt(p (1 - p) / 4000), of its probability; under 2e-5 of such tests would fail by chance."""
    n = 4000
    one = jax.jit(
        jax.vmap(
            lambda key: generate(
                MODEL, VARIABLES, jnp.asarray(PROMPT), num_tokens=1, temperature=4.0,
                num_words=24, key=key,
            )[-1]
        )
    )  # fmt: skip
    tokens = np.asarray(one(jax.random.split(jax.random.key(0), n)))
    p = np.asarray(jax.nn.softmax(logits_after(PROMPT) / 4.0), np.float64)
    assert p.max() < 0.9 and (p > 0.05).sum() >= 3
    frequency = np.bincount(tokens, minlength=24) / n
    assert (np.abs(frequency - p) <= 5 * np.sqrt(p * (1 - p) / n) + 1e-3).all()


def test_padding_of_the_vocabulary_is_never_drawn():
    assert generated(64, temperature=100.0, num_words=5)[3:].max() == 4


@pytest.mark.parametrize(
    ("prompt", "kwargs", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([1], dict(num_tokens=-1), "num_tokens=-1"),
        ([1], dict(temperature=-0.5), "temperature=-0.5"),
    ],
)
def test_bad_arguments_raise(prompt, kwargs, message):
    good = dict(num_tokens=1, temperature=1.0, num_words=24, key=jax.random.key(0))
    with pytest.raises(ValueError, match=message):
        generate(MODEL, VARIABLES, jnp.asarray(prompt, jnp.int32), **(good | kwargs))
