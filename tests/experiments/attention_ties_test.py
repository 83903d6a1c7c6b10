"""Shared row maxima, counted by hand, in each arithmetic of attention."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.study.attention_ties import ones_per_row, ulps
from fp8jax.lm.model import blockwise_attention
from fp8jax.lm.model.attention import ATTENTIONS


def test_ones_are_counted_by_row():
    below = 1 - 2.0**-9
    p = np.array([[1, 0.5, 1, 1], [1, below, 0, 0], [below, 0, 0, 0.5]])
    assert ones_per_row(p).tolist() == [3, 1, 0]
    assert ones_per_row(p[None, None]).shape == (1, 1, 3)


def test_units_in_the_last_place_count_away_from_zero():
    """bfloat16 has 7 bits behind the point: its unit is 2^-7 from 1 to 2, and 2^-6 from 2 to 4."""
    x, exact = np.array([1 + 2.0**-7, -1 - 2.0**-8, 3.0, -3.0]), np.array([1, -1, 3.25, -2.75])
    assert ulps(x, exact).tolist() == [1, 0.5, -16, 16]


@pytest.mark.parametrize(
    ("name", "ones"),
    [
        ("reference", [1, 1, 1, 2]),
        ("reference_bf16", [1, 1, 1, 2]),
        ("reference_all_bf16", [1, 2, 2, 3]),
        ("stabilized", [1, 1, 1, 0]),
        ("stabilized_bf16", [1, 1, 1, 0]),
        ("stabilized_all_bf16", [1, 0, 0, 0]),
    ],
)
def test_maxima_that_only_bfloat16_scores_share(name, ones):
    """Scores 12, 12 + 1/64, 8 and 12 + 1/64: bfloat16 has only sixteenths there, so that the three
    large ones are 12; float32 tells 12 from the others, and e^(-1/64) is below 1 - 2^-8."""
    k = jnp.asarray([[12, 0, 0, 0], [12, 1, 0, 0], [8, 0, 0, 0], [12, 1, 0, 0]], jnp.bfloat16)
    k = k[None, :, None]
    q = 2 * jnp.asarray([1, 2.0**-6, 0, 0], jnp.bfloat16)  # scores are divided by 2
    q_BTKGH = jnp.broadcast_to(q, (1, 4, 1, 1, 4))
    how = ATTENTIONS[name].attend
    p = blockwise_attention.first_exponentials(how, q_BTKGH, k, jnp.ones((1, 4), jnp.int32))
    assert ones_per_row(p)[0, 0, 0].tolist() == ones
