"""The gate of a step: which steps are finite, and a selection bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fp8jax.lm.stability.bad_steps import is_finite, select_if

# Bit patterns that arithmetic would not keep: NaNs with payloads, both zeros, subnormals,
# infinities, and a float32 at the edge of overflow.
BITS = np.array(
    [0x7FC01234, 0xFFC00001, 0x00000000, 0x80000000, 0x00000001, 0x7F800000, 0x7F7FFFFF],
    np.uint32,
)


def trees():
    """Two trees with the dtypes of a train state: float32, bfloat16, int32 and a PRNG key."""

    def tree(bits, seed):
        words = jnp.asarray(bits)
        return {
            "params": {"w": jax.lax.bitcast_convert_type(words, jnp.float32)},
            "moment": jnp.asarray([np.inf, 0.0, 3e-39, seed], jnp.bfloat16),
            "step": jnp.asarray(seed, jnp.int32),
            "key": jax.random.key(seed),
        }

    return tree(BITS, 7), tree(BITS ^ np.uint32(0x80000000), 8)


def bits(leaf) -> np.ndarray:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).view(f"u{leaf.dtype.itemsize}")


@pytest.mark.parametrize("accept", [True, False])
def test_the_gate_selects_bit_for_bit(accept):
    new, old = trees()
    got = jax.jit(select_if)(jnp.asarray(accept), new, old)
    chosen, other = (new, old) if accept else (old, new)
    assert jax.tree.structure(got) == jax.tree.structure(new)
    for result, wanted, unwanted in zip(*map(jax.tree.leaves, (got, chosen, other)), strict=True):
        assert result.dtype == wanted.dtype
        np.testing.assert_array_equal(bits(result), bits(wanted))
        assert (bits(result) != bits(unwanted)).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("accept", [True, False])
def test_what_was_rejected_does_not_leak(bad, accept):
    """0 * NaN is NaN: a gate made of products would fail here, in either direction."""
    good, poison = jnp.arange(4.0), jnp.full(4, bad)
    pair = (good, poison) if accept else (poison, good)
    np.testing.assert_array_equal(jax.jit(select_if)(jnp.asarray(accept), *pair), good)


def test_the_rejected_leaf_does_not_leak_into_a_gradient_of_the_accepted():
    """Where the gate stands inside something differentiated, the selected leaf's gradient is 1
    and the rejected one's 0, not 0 * inf."""
    accept = jnp.asarray(False)
    grads = jax.grad(lambda n, o: jnp.sum(select_if(accept, n, o)), argnums=(0, 1))
    new, old = grads(jnp.full(3, jnp.nan), jnp.ones(3))
    np.testing.assert_array_equal(new, np.zeros(3))
    np.testing.assert_array_equal(old, np.ones(3))


@pytest.mark.parametrize("loss", [0.0, -1.0, 3e38, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("norm", [0.0, 3e38, np.nan, np.inf])
def test_a_step_is_finite_when_both_signals_are(loss, norm):
    got = is_finite(jnp.float32(loss), jnp.float32(norm))
    assert got.shape == () and bool(got) == (np.isfinite(loss) and np.isfinite(norm))


@pytest.mark.parametrize("where", [0, 5, 9])
def test_one_nan_among_all_gradients_shows_in_the_norm(where):
    """What the docstring of is_finite relies on."""
    leaves = jnp.ones(10).at[where].set(jnp.nan)
    norm = optax.tree.norm({"a": leaves[:4], "b": leaves[4:]})
    assert not is_finite(jnp.float32(1), norm)
