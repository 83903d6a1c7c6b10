"""Likelihoods of given text against a softmax of the model's logits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.lm.inference.score import _judged_in_chunks, log_likelihoods, score, score_targets
from fp8jax.lm.model import chunked_loss
from fp8jax.lm.model.cache import empty_cache
from tests.support.arrays import normal
from tests.support.tiny_models import tiny_model

TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 0, 0]], np.int32)
tiny = functools.cache(tiny_model)
likelihoods = jax.jit(log_likelihoods, static_argnums=0, static_argnames="cache")
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1, 0, 0]], np.int32)


def documents(tokens, segments):
    """(row, begin, ids) of each document."""
    for row, (ids, numbers) in enumerate(zip(tokens, segments, strict=True)):
        for number in sorted({*numbers.tolist()} - {0}):
            (at,) = np.nonzero(numbers == number)
            yield row, at[0], ids[at]


@functools.cache
def expected():
    """Each document by itself, at the begin of a row."""
    model, variables = tiny()
    found = list(documents(TOKENS, SEGMENTS))
    rows, real = np.zeros((2, len(found), TOKENS.shape[1]), np.int32)
    for i, (_, _, ids) in enumerate(found):
        rows[i, : len(ids)], real[i, : len(ids)] = ids, 1
    positions = np.broadcast_to(np.arange(TOKENS.shape[1], dtype=np.int32), rows.shape)
    all_logits = np.asarray(jax.jit(model.apply)(variables, rows, real, positions), np.float64)
    log_p, best = np.zeros(TOKENS.shape), np.zeros(TOKENS.shape, bool)
    for (row, begin, ids), logits in zip(found, all_logits, strict=True):
        p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        for i, token in enumerate(ids[1:]):
            log_p[row, begin + i + 1] = p[i, token]
            best[row, begin + i + 1] = p[i].argmax() == token
    return log_p, best


@pytest.mark.parametrize("chunked", [False, True])
def test_scores_are_log_probabilities_within_documents(chunked, monkeypatch):
    if chunked:  # four positions at a time: 2 rows of 32 words, 4 bytes each
        monkeypatch.setattr(chunked_loss, "CHUNK_BYTES", 4 * 2 * 32 * 4)
    model, variables = tiny()
    # A new function, so that it is traced with this size of chunks.
    program = jax.jit(lambda *arguments: score(model, *arguments))
    found = program(variables, jnp.asarray(TOKENS), jnp.asarray(SEGMENTS))
    log_p, best = expected()
    # Float32 sums in another order: logits reach 30, and each is off by a few units of 2^-24 of it.
    np.testing.assert_allclose(found.log_p_BL, log_p, atol=1e-4)
    np.testing.assert_array_equal(found.best_BL, best)
    assert (log_p < 0).sum() == 11  # 2 + 4 + 5 tokens that follow another


def test_logits_in_chunks_are_not_rounded_to_bfloat16():
    """Sums of 64 products: each logit is off by 64 * 2^-24 of the sum of magnitudes, twice in a
    likelihood. In bfloat16 it would be off by 2^-9 of itself."""
    x_BLD = jnp.asarray(normal((2, 8, 64)), jnp.bfloat16)
    w_DV = jnp.asarray(normal((64, 32), 1), jnp.bfloat16)
    targets_BL = np.arange(16, dtype=np.int32).reshape(2, 8)
    log_p_BL, _ = _judged_in_chunks(x_BLD, w_DV, jnp.asarray(targets_BL), 4)
    x, w = (np.asarray(a, np.float64) for a in (x_BLD, w_DV))
    of_target = np.take_along_axis(x @ w, targets_BL[..., None], axis=-1)[..., 0]
    expected = of_target - np.log(np.exp(x @ w).sum(axis=-1))
    bound = 2 * 64 * 2.0**-24 * (np.abs(x) @ np.abs(w)).max() + 2.0**-22 * np.abs(expected).max()
    assert np.abs(np.asarray(log_p_BL, np.float64) - expected).max() <= bound


def test_scores_through_a_cache():
    """In float32 those of one pass; in FP8, other ones, but near: a key or a value is off by 2^-4
    of itself at most, and so are the likelihoods together."""
    model, variables = tiny()
    ones = np.where(SEGMENTS > 0, 1, 0)
    arguments = model, variables, jnp.asarray(TOKENS), jnp.asarray(ones)
    plain = np.asarray(likelihoods(*arguments))
    np.testing.assert_allclose(likelihoods(*arguments, cache="fp32"), plain, atol=1e-4)
    fp8 = np.asarray(likelihoods(*arguments, cache="fp8"))
    assert 1e-3 < np.abs(fp8 - plain).max() < 1.0
    assert np.linalg.norm(fp8 - plain) < 2**-4 * np.linalg.norm(plain)


def test_padding_replaces_no_token_in_a_cache():
    """Its positions are any: here those of the row's first tokens, whose slots it does not take."""
    model, variables = tiny()
    program = jax.jit(lambda *rows: score_targets(model, variables, *rows, cache="fp32"))
    ones = np.where(SEGMENTS > 0, 1, 0)
    behind = np.broadcast_to(np.arange(TOKENS.shape[1], dtype=np.int32), TOKENS.shape)
    scores = [
        np.asarray(program(TOKENS, TOKENS, ones, positions).log_p_BL)[ones > 0]
        for positions in (behind, np.where(ones > 0, behind, behind - 6))
    ]
    np.testing.assert_array_equal(*scores)


def test_rows_of_padding_leave_their_cache_as_it_was():
    model, variables = tiny()
    before = dataclasses.replace(empty_cache(model.config, *TOKENS.shape, "fp32"), fresh=False)
    positions = np.broadcast_to(np.arange(TOKENS.shape[1], dtype=np.int32), TOKENS.shape)
    nothing = np.zeros_like(TOKENS)
    _, after = jax.jit(
        lambda cache: model.apply(variables, TOKENS, nothing, positions, cache=cache)
    )(before)
    jax.tree.map(np.testing.assert_array_equal, after, before)


def test_no_token_after_padding_counts():
    """Padding carries zeros: with one scale for a tensor, other ids there would change scales."""
    model, variables = tiny_model("gpt2_tiny", "fp8_current", jnp.bfloat16)
    other = np.where(SEGMENTS == 0, 23, TOKENS)
    ours, theirs = (
        likelihoods(model, variables, jnp.asarray(tokens), jnp.asarray(SEGMENTS))
        for tokens in (TOKENS, other)
    )
    np.testing.assert_array_equal(ours, theirs)
    assert (np.asarray(ours)[SEGMENTS == 0] == 0).all()
