"""Amax histories between two steps, by hand."""

import jax.numpy as jnp
import numpy as np

from fp8jax.gemm.histories.amax_history import merge_history


def test_a_history_that_received_nothing_stays():
    old = jnp.asarray([[3.0, 2.0], [3.0, 2.0], [3.0, 2.0], [0.0, 0.0]])
    new = jnp.asarray([[4.0, 3.0], [0.0, 0.0], [-np.inf, -np.inf], [0.0, 0.0]])
    np.testing.assert_array_equal(merge_history(old, new), [[4, 3], [3, 2], [3, 2], [0, 0]])


def test_each_history_of_several_experts_and_layers_stays_or_changes_by_itself():
    old, new = jnp.full((2, 3, 4), 2.0), jnp.zeros((2, 3, 4)).at[1, 2].set(5.0)
    merged = merge_history(old, new)
    np.testing.assert_array_equal(merged, old.at[1, 2].set(5.0))
