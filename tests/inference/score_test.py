"""Likelihoods of given text against a softmax of the model's logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.inference.score import log_likelihoods, score
from fp8jax.model import chunked_loss
from tests.support.tiny_models import tiny_model

TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 0, 0]], np.int32)
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1, 0, 0]], np.int32)


def documents(tokens, segments):
    """(row, begin, ids) of each document."""
    for row, (ids, numbers) in enumerate(zip(tokens, segments, strict=True)):
        for number in sorted({*numbers.tolist()} - {0}):
            (at,) = np.nonzero(numbers == number)
            yield row, at[0], ids[at]


def expected(model, variables, segments):
    """Each document by itself."""
    log_p, best = np.zeros(TOKENS.shape), np.zeros(TOKENS.shape, bool)
    for row, begin, ids in documents(TOKENS, segments):
        one = jnp.asarray(ids)[None]
        logits = model.apply(variables, one, jnp.ones_like(one), jnp.arange(len(ids))[None])[0]
        p = np.asarray(jax.nn.log_softmax(logits))
        for i, token in enumerate(ids[1:]):
            log_p[row, begin + i + 1] = p[i, token]
            best[row, begin + i + 1] = p[i].argmax() == token
    return log_p, best


@pytest.mark.parametrize("chunked", [False, True])
def test_scores_are_log_probabilities_within_documents(chunked, monkeypatch):
    if chunked:  # four positions at a time: 2 rows of 32 words, 4 bytes each
        monkeypatch.setattr(chunked_loss, "CHUNK_BYTES", 4 * 2 * 32 * 4)
    model, variables = tiny_model()
    found = score(model, variables, jnp.asarray(TOKENS), jnp.asarray(SEGMENTS))
    log_p, best = expected(model, variables, SEGMENTS)
    # Float32 sums in another order: logits reach 30, and each is off by a few units of 2^-24 of it.
    np.testing.assert_allclose(found.log_p_BL, log_p, atol=1e-4)
    np.testing.assert_array_equal(found.best_BL, best)
    assert (log_p < 0).sum() == 11  # 2 + 4 + 5 tokens that follow another


def test_scores_through_a_cache():
    """In float32 those of one pass; in FP8, other ones, but near."""
    model, variables = tiny_model()
    ones = np.where(SEGMENTS > 0, 1, 0)
    arguments = model, variables, jnp.asarray(TOKENS), jnp.asarray(ones)
    plain = log_likelihoods(*arguments)
    np.testing.assert_allclose(log_likelihoods(*arguments, cache="fp32"), plain, atol=1e-4)
    fp8 = log_likelihoods(*arguments, cache="fp8")
    assert 1e-3 < np.abs(fp8 - plain).max() < 1.0


def test_no_token_after_padding_counts():
    """Padding carries zeros: with one scale for a tensor, other ids there would change scales."""
    model, variables = tiny_model("gpt2_tiny", "fp8_current", jnp.bfloat16)
    other = np.where(SEGMENTS == 0, 23, TOKENS)
    ours, theirs = (
        log_likelihoods(model, variables, jnp.asarray(tokens), jnp.asarray(SEGMENTS))
        for tokens in (TOKENS, other)
    )
    np.testing.assert_array_equal(ours, theirs)
    assert (np.asarray(ours)[SEGMENTS == 0] == 0).all()
