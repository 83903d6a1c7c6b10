"""Amax histories, by hand."""

import jax.numpy as jnp
import numpy as np

from fp8jax.gemm.histories.amax_history import (
    merge_history,
    record_amax,
    self_seeded,
)


def test_history_rolls_and_ignores_what_is_not_finite():
    h = jnp.zeros(3)
    steps = [
        (2.0, [2, 0, 0]),
        (5.0, [5, 2, 0]),
        (np.inf, [5, 5, 2]),
        (np.nan, [5, 5, 5]),
        (1.0, [1, 5, 5]),
    ]
    for amax, expected in steps:
        h = record_amax(h, jnp.float32(amax))
        np.testing.assert_array_equal(h, expected)


def test_a_history_that_received_nothing_stays():
    old = jnp.asarray([[3.0, 2.0], [3.0, 2.0], [3.0, 2.0], [0.0, 0.0]])
    new = jnp.asarray([[4.0, 3.0], [0.0, 0.0], [-np.inf, -np.inf], [0.0, 0.0]])
    np.testing.assert_array_equal(merge_history(old, new), [[4, 3], [3, 2], [3, 2], [0, 0]])


def test_each_history_of_several_experts_and_layers_stays_or_changes_by_itself():
    old, new = jnp.full((2, 3, 4), 2.0), jnp.zeros((2, 3, 4)).at[1, 2].set(5.0)
    merged = merge_history(old, new)
    np.testing.assert_array_equal(merged, old.at[1, 2].set(5.0))


def test_a_history_with_one_entry_is_not_empty():
    histories = {"x": jnp.asarray([0.0, 3.0, 0.0]), "w": jnp.zeros(3)}
    for operand, expected in ({"x": [0, 3, 0], "w": [7, 7, 7]}).items():
        read = self_seeded(histories, operand, jnp.float32(7))
        np.testing.assert_array_equal(read[operand], expected)
