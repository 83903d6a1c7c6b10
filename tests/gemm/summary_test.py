"""What a GEMM reads of a history, and what its answer makes of it, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.gemm.histories.summary import (
    SHORT,
    record,
    self_seeded,
    stored_amax,
    summarize,
)
from fp8jax.numerics.scales import Delayed


def step(history, amax):
    """Returns the next history after a GEMM whose operand has that amax."""
    summary, derivative = jax.vjp(summarize, {"x": history})
    (following,) = derivative(record(summary, "x", jnp.zeros(()), jnp.float32(amax)))
    return following["x"]


def test_history_rolls_and_ignores_what_is_not_finite():
    h = jnp.zeros(3)
    steps = [
        (2.0, [2, 0, 0]),
        (5.0, [5, 2, 0]),
        (np.inf, [5, 5, 2]),
        (np.nan, [5, 5, 5]),
        (1.0, [1, 5, 5]),
        (0.0, [0, 1, 5]),
        (0.0, [0, 0, 1]),
    ]
    for amax, expected in steps:
        h = step(h, amax)
        np.testing.assert_array_equal(h, expected)
    np.testing.assert_array_equal(step(jnp.float32([3]), 2.0), [2])


@pytest.mark.parametrize("length", [1, 2, 3, 13, SHORT, SHORT + 1, 1024])
def test_a_gemm_reads_the_newest_and_the_largest(length):
    histories = np.random.default_rng(0).random((5, length), np.float32)
    summary = summarize(histories)
    for how, expected in ("max", histories.max(axis=1)), ("newest", histories[:, 0]):
        read = stored_amax(summary, Delayed(history=length, amax=how))
        np.testing.assert_array_equal(read, expected)
    assert summary.length == length
    for bad in (np.nan, -1.0):
        histories[2, length // 2] = bad
        broken = np.isnan(summarize(histories).largest)
        np.testing.assert_array_equal(broken, np.arange(5) == 2)


def test_a_newest_amax_of_zero_is_not_read():
    """A step of zeros, such as of an expert without tokens, would give the next a scale of 1."""
    histories = np.float32([[0, 2, 3], [1, 0, 0], [0, 0, 0]])
    for how, expected in ("newest", [3, 1, 0]), ("max", [3, 1, 0]):
        read = stored_amax(summarize(histories), Delayed(history=3, amax=how))
        np.testing.assert_array_equal(read, np.float32(expected))


def test_layers_that_are_summarized_at_once_shift_as_each_alone():
    old = np.random.default_rng(0).random((4, 3), np.float32)
    amaxes = np.float32([2, 0, np.inf, np.nan])
    expected = [step(history, amax) for history, amax in zip(old, amaxes, strict=True)]
    np.testing.assert_array_equal(step(old, amaxes), expected)


@pytest.mark.parametrize("answer", [0.0, -np.inf])
def test_a_gemm_that_did_not_run_leaves_zeros(answer):
    summary, derivative = jax.vjp(summarize, jnp.float32([[3, 2, 1], [0, 0, 0]]))
    (following,) = derivative(jax.tree.map(lambda x: jnp.full_like(x, answer), summary))
    np.testing.assert_array_equal(following, np.zeros((2, 3)))


def test_a_history_with_one_entry_is_not_empty():
    summaries = {k: summarize(jnp.float32(h)) for k, h in {"x": [0, 3, 0], "w": [0, 0, 0]}.items()}
    for operand, expected in {"x": (0, 3), "w": (7, 7)}.items():
        read = self_seeded(summaries, operand, jnp.float32(7))[operand]
        assert (read.newest, read.largest) == expected
    assert self_seeded({}, "x", jnp.float32(7)) == {}


def test_what_an_optimizer_has_changed_is_read_as_nan():
    for history in ([2.0, -3.0, 1.0], [np.nan, 1.0, 1.0]):
        read = self_seeded({"x": summarize(jnp.float32(history))}, "x", jnp.float32(7))["x"]
        assert np.isnan(read.newest) and np.isnan(read.largest)
