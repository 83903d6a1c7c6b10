"""The spike detector, on losses made by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.lm.stability.bad_steps import ACCEPTED, NON_FINITE, SPIKE
from fp8jax.lm.stability.spikes import SpikeDetector, judge

# Spikes -------------------------------------------------------------------------------------------


def verdicts(losses, norms=None, *, window=32, deviations=6.0) -> list[int]:
    detector = SpikeDetector(window=window, deviations=deviations)
    norms = np.ones(len(losses)) if norms is None else norms

    def step(seen, pair):
        verdict, seen = judge(detector, seen, *pair)
        return seen, verdict

    pairs = jnp.asarray(losses, jnp.float32), jnp.asarray(norms, jnp.float32)
    return jax.lax.scan(step, detector.init(), pairs)[1].tolist()


def falling(n=200) -> np.ndarray:
    """Losses as they are: a decline with noise."""
    noise = np.random.default_rng(0).normal(0.0, 0.03, n)
    return 2.0 + 4.0 / np.sqrt(1.0 + np.arange(n)) + noise


def test_ordinary_losses_are_accepted():
    assert set(verdicts(falling())) == {ACCEPTED}
    assert set(verdicts(np.full(100, 2.5))) == {ACCEPTED}  # no deviation at all
    assert set(verdicts(np.full(100, 2.5) + 0.04 * (np.arange(100) == 60))) == {ACCEPTED}  # < 2%


@pytest.mark.parametrize("length", [1, 10, 60])
def test_a_spike_is_rejected_for_all_its_steps_and_nothing_else_is(length):
    losses = falling()
    losses[100 : 100 + length] += 2.0
    expected = [SPIKE if 100 <= i < 100 + length else ACCEPTED for i in range(200)]
    assert verdicts(losses) == expected


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_non_finite_loss_among_200_disturbs_no_decision(bad):
    """And a spike 50 steps after it is seen as if it had not been."""
    losses = falling()
    losses[150] += 2.0
    without = verdicts(np.delete(losses, 100))
    losses[100] = bad
    found = verdicts(losses)
    assert found[100] == NON_FINITE and found[150] == SPIKE
    assert found[:100] + found[101:] == without


def test_the_smallest_window_judges_from_its_fifth_loss_on():
    assert verdicts([9.0, 1.0, 1.0, 2.0, 99.0], window=8)[3:] == [ACCEPTED, SPIKE]


def test_a_gradient_norm_that_is_not_finite_is_a_class_of_its_own():
    losses, norms = falling(60), np.ones(60)
    norms[50] = np.inf
    found = verdicts(losses, norms)
    assert found[50] == NON_FINITE and set(found) == {ACCEPTED, NON_FINITE}


def test_the_limit_is_of_median_and_mad():
    """By numpy, from the last `window` accepted losses, for losses just below and above."""
    losses = falling(64)[32:]
    median = np.median(losses)
    limit = median + 6 * 1.4826 * np.median(np.abs(losses - median))
    assert limit > 1.02 * median
    assert verdicts([*losses, limit - 1e-3])[-1] == ACCEPTED
    assert verdicts([*losses, limit + 1e-3])[-1] == SPIKE


def test_nothing_is_judged_before_half_a_window():
    losses = np.full(32, 2.0)
    losses[[15, 16]] = 9.0
    assert [i for i, v in enumerate(verdicts(losses)) if v] == [16]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(window=7, deviations=6.0), "recovery.spike_window=7 must be at least 8"),
        (dict(window=8, deviations=0.0), "recovery.spike_deviations=0.0 must be positive"),
        (dict(window=8, deviations=float("nan")), "recovery.spike_deviations=nan must be positive"),
    ],
)
def test_thresholds_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SpikeDetector(**settings)
