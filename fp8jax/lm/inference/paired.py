"""Measured numbers with standard errors, and differences of two models on the same items.

Two models answer the same questions, so much of what makes an answer right or wrong is common to
both. The standard error of their difference is therefore computed from the differences of each
item, not from two separate errors.
"""

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

Items = Float[np.ndarray, " items"]


class Estimate(NamedTuple):
    """A number and its standard error; the error is NaN where it is unknown."""

    value: float
    error: float


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """A number that was measured on items, such as questions or rows of text.

    Attributes:
      estimate: the number.
      items: what each item contributes; None where the number is no mean of items.
      weights: of the items: the number is sum(items) / sum(weights).
      exponential: whether the number is the exponential of that ratio, as a perplexity is.
    """

    estimate: Estimate
    items: Items | None = None
    weights: Items | None = None
    exponential: bool = False


def ratio(items: Items, weights: Items) -> Estimate:
    """Returns sum(items) / sum(weights); with weights of 1, the mean.

    The items are taken for independent draws. The error is that of a ratio of two means, to first
    order; for weights of 1 it is the usual one, sqrt(variance / items).
    """
    total, count = weights.sum(), len(items)
    value = items.sum() / total
    if count < 2:
        return Estimate(float(value), float("nan"))
    residuals = items - value * weights
    error = np.sqrt(np.sum(residuals**2) * count / (count - 1)) / total
    return Estimate(float(value), float(error))


def measured(items: Items, weights: Items, *, exponential: bool = False) -> Measured:
    """Returns the number of some items, see `Measured`; all errors are to first order."""
    value, error = ratio(items, weights)
    if exponential:
        value, error = float(np.exp(value)), float(np.exp(value)) * error
    return Measured(
        estimate=Estimate(value, error), items=items, weights=weights, exponential=exponential
    )


def difference(a: Measured, b: Measured) -> Estimate | None:
    """Returns a's number minus b's, with the error of the paired items; None if they have none.

    Raises:
      ValueError: they were not measured on the same items.
    """
    if a.items is None or b.items is None or a.weights is None or b.weights is None:
        return None
    if not np.array_equal(a.weights, b.weights):
        raise ValueError(
            f"two measurements on {len(a.weights)} and {len(b.weights)} items are not of the same"
        )
    value, error = ratio(a.items - b.items, a.weights)
    if a.exponential:
        value, error = a.estimate.value - b.estimate.value, a.estimate.value * error
    return Estimate(value, error)
