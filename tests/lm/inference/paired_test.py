"""Standard errors, alone and of differences on the same items."""

import math

import numpy as np
import pytest

from fp8jax.lm.inference.paired import Estimate, Measured, difference, measured, ratio

RNG = np.random.default_rng(0)
A = RNG.normal(2.0, 1.0, 50)
B = A + RNG.normal(0.5, 0.01, 50)  # mostly the same noise
ONES = np.ones(50)


def test_a_mean_has_the_usual_error():
    value, error = ratio(A, ONES)
    np.testing.assert_allclose((value, error), (A.mean(), A.std(ddof=1) / 50**0.5), rtol=1e-12)


def test_a_ratio_has_the_error_of_its_draws():
    # Linear in the weights: the ratio is exact for every draw, and the error is zero.
    weights = RNG.integers(1, 9, 50).astype(float)
    assert ratio(3 * weights, weights) == pytest.approx((3.0, 0.0), abs=1e-12)
    # Over many draws, the errors' mean is the spread of the ratios; 20% covers 400 draws.
    draws = []
    for _ in range(400):
        weights = RNG.integers(1, 9, 100).astype(float)
        draws.append(ratio(RNG.normal(2, 1, 100) * weights, weights))
    values, errors = np.array(draws).T
    assert abs(errors.mean() / values.std() - 1) < 0.2


def test_one_item_has_no_error():
    value, error = ratio(A[:1], ONES[:1])
    assert value == A[0] and math.isnan(error)


def test_a_difference_is_paired():
    a, b = measured(A, ONES), measured(B, ONES)
    value, error = difference(b, a)
    np.testing.assert_allclose(value, (B - A).mean(), rtol=1e-12)
    np.testing.assert_allclose(error, (B - A).std(ddof=1) / 50**0.5, rtol=1e-9)
    assert error < 0.02 * a.estimate.error  # two separate errors would hide it


def test_perplexities():
    a, b = (measured(x, ONES, exponential=True) for x in (A, B))
    np.testing.assert_allclose(a.estimate.value, np.exp(A.mean()), rtol=1e-12)
    np.testing.assert_allclose(
        a.estimate.error, np.exp(A.mean()) * A.std(ddof=1) / 50**0.5, rtol=1e-12
    )
    value, error = difference(b, a)
    np.testing.assert_allclose(value, np.exp(B.mean()) - np.exp(A.mean()), rtol=1e-12)
    np.testing.assert_allclose(error, np.exp(B.mean()) * (B - A).std(ddof=1) / 50**0.5, rtol=1e-9)


def test_what_cannot_be_paired():
    bare = Measured(estimate=Estimate(1.0, 0.1))
    assert difference(bare, measured(A, ONES)) is None
    with pytest.raises(ValueError, match="on 50 and 49 items are not of the same"):
        difference(measured(A, ONES), measured(A[1:], ONES[1:]))
