"""Draws: which tokens may come, how often, and from which key."""

import jax
import numpy as np
import pytest

from fp8jax.lm.inference.sampling import Sampling, draw
from tests.support.arrays import normal

DRAW = jax.jit(draw)
LOGITS = np.log(np.array([0.05, 0.4, 0.15, 0.3, 0.1], np.float32))


def drawn(sampling: Sampling, logits=LOGITS) -> np.ndarray:
    """The tokens that 4000 keys draw from the same logits."""
    keys = jax.random.split(jax.random.key(0), 4000)
    rows = np.broadcast_to(np.asarray(logits, np.float32), (4000, len(logits)))
    return np.asarray(DRAW(sampling.rule(), rows, keys))


def kept_probabilities(p: np.ndarray, tokens: list[int]) -> np.ndarray:
    kept = np.where(np.isin(np.arange(len(p)), tokens), p, 0)
    return kept / kept.sum()


@pytest.mark.parametrize(
    "settings, tokens",
    [
        ({}, [0, 1, 2, 3, 4]),
        (dict(top_k=2), [1, 3]),
        (dict(top_k=99), [0, 1, 2, 3, 4]),
        (dict(top_p=0.75), [1, 2, 3]),  # 0.4 + 0.3 do not suffice
        (dict(top_p=0.69), [1, 3]),
        (dict(top_p=1e-6), [1]),
        (dict(top_p=1.0), [0, 1, 2, 3, 4]),
        (dict(top_k=3, top_p=0.81), [1, 3]),  # of the three, 0.4 and 0.3 are 82%
    ],
)
def test_frequencies_are_the_probabilities_of_the_kept_tokens(settings, tokens):
    """Each within 5 standard deviations, 5 sqrt(p (1 - p) / n); under 1e-6 of such tests would fail
    by chance."""
    found = np.bincount(drawn(Sampling(**settings)), minlength=5) / 4000
    p = kept_probabilities(np.exp(LOGITS), tokens)
    assert (np.abs(found - p) <= 5 * np.sqrt(p * (1 - p) / 4000)).all()


def test_temperature_divides_logits():
    hot = np.bincount(drawn(Sampling(temperature=2.0)), minlength=5) / 4000
    p = np.sqrt(np.exp(LOGITS))
    p /= p.sum()
    assert (np.abs(hot - p) <= 5 * np.sqrt(p * (1 - p) / 4000)).all()
    assert set(drawn(Sampling(temperature=0))) == {1}
    assert set(drawn(Sampling(temperature=1e-3))) == {1}
    assert set(drawn(Sampling(temperature=1e-30), LOGITS * 1e7)) == {1}


def test_of_equal_tokens_the_first_are_kept():
    logits = np.array([0.0, 1.0, 1.0, 1.0, 0.0], np.float32)
    assert set(drawn(Sampling(top_k=2), logits)) == {1, 2}
    assert set(drawn(Sampling(top_p=0.5), logits)) == {1, 2}


def test_a_draw_depends_on_its_key_and_its_logits_only():
    keys = jax.random.split(jax.random.key(3), 6)
    logits = normal((6, 50), seed=4)
    rule = Sampling(top_k=20, top_p=0.9).rule()
    together = DRAW(rule, logits, keys)
    for row in range(6):
        alone = DRAW(rule, logits[row : row + 1], keys[row : row + 1])
        assert alone[0] == together[row]


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(temperature=-1.0), "temperature=-1.0 must be 0, or between 1e-30 and 1e"),
        (dict(temperature=1e-40), "temperature=1e-40 must be 0, or between"),
        (dict(temperature=1e39), "temperature=1e.39 must be 0, or between"),
        (dict(temperature=float("nan")), "temperature=nan"),
        (dict(top_k=0), "top_k=0 must be at least 1"),
        (dict(top_p=0.0), "top_p=0.0 must be above 0 and at most 1"),
        (dict(top_p=1.5), "top_p=1.5"),
        (dict(temperature=0.0, top_k=3), "temperature=0 .* top_k=3 has no effect"),
        (dict(temperature=0.0, top_p=0.5), "temperature=0 .* top_p=0.5 has no effect"),
    ],
)
def test_bad_numbers_raise(settings, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)
