"""The gate, a selection bit for bit; the spike detector; the ladder."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fp8jax.stability.bad_steps import ACCEPTED, NON_FINITE, SPIKE, is_finite, select_if
from fp8jax.stability.ladder import STOP, Ladder
from fp8jax.stability.spikes import SpikeDetector, judge
from fp8jax.stability.swiglu_growth import growing

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
    losses[[15, 17]] = 9.0
    assert [i for i, v in enumerate(verdicts(losses)) if v] == [17]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(window=7, deviations=6.0), "spike_window=7 must be at least 8"),
        (dict(window=8, deviations=0.0), "spike_deviations=0.0 must be positive"),
        (dict(window=8, deviations=float("nan")), "spike_deviations=nan must be positive"),
    ],
)
def test_thresholds_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SpikeDetector(**settings)


# The ladder ---------------------------------------------------------------------------------------


def test_rungs_are_tried_in_their_order_within_their_budgets():
    ladder = Ladder.parse("repeat:2,skip:1,rollback:1")
    assert ladder.waits and not Ladder.parse("skip:9").waits and not Ladder().waits
    none = {"repeat": 0, "skip": 0, "rollback": 0}
    assert ladder.next(none, ()) == "repeat"
    assert ladder.next(none, {"repeat"}) == "skip"
    assert ladder.next(none | {"repeat": 2}, ()) == "skip"
    assert ladder.next(none | {"skip": 1}, {"repeat"}) == "rollback"
    assert ladder.next({"repeat": 2, "skip": 1, "rollback": 1}, ()) == STOP
    assert Ladder.parse("").next({}, ()) == STOP


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ignore:3", "'ignore' is none of repeat, skip, rollback"),
        ("skip", "skip needs a budget, as in skip:10"),
        ("skip:0", "skip needs a budget"),
        ("skip:-1", "skip needs a budget"),
        ("skip:all", "skip needs a budget"),
        ("skip:1,skip:2", "names a rung twice"),
        ("skip:1,", "'' is none of"),
    ],
)
def test_a_ladder_that_means_nothing_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Ladder.parse(text)


# What grows for long ------------------------------------------------------------------------------


def test_growth_is_five_rises_in_a_row_and_fourfold():
    slow, steady = [1.0, 1.2, 1.4, 1.6, 1.8, 2.0], [7.0] * 6
    fast = [1.0, 1.5, 2.0, 3.0, 4.0, 4.5]
    dip = [1.0, 9.0, 8.0, 16.0, 32.0, 64.0]
    validations = list(zip(slow, fast, steady, dip, strict=True))
    assert growing(validations) == [1]
    assert growing(validations[1:]) == []  # too few
    assert growing([(0.1, 0.1, 0.1, 0.1), *validations]) == [1]  # only the last six count
    assert growing([(x,) for x in (1.0, 2.0, 4.0, float("nan"), 16.0, 32.0)]) == []
    assert growing([]) == []
