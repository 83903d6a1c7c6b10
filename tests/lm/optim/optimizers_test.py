"""Optimizers against a recursion written by hand, schedules at points computed by hand."""

import math
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from fp8jax.lm.optim.config import OptimizerConfig
from fp8jax.lm.optim.moment_formats import MOMENTS
from fp8jax.lm.optim.optimizers import (
    OPTIMIZERS,
    is_matrix,
    make_optimizer,
    restart_schedule,
    schedule_steps,
)
from fp8jax.lm.optim.oscillation import ResetState
from fp8jax.lm.optim.schedules import SCHEDULES
from fp8jax.lm.optim.stosign import V2_DECAY
from fp8jax.numerics.formats import FORMATS, cast
from tests.support.optimizers import CONFIG, configured, nested

WARMING = sorted(SCHEDULES.keys() - {"decay"})  # schedules with a warm-up


def named(name: str, **changes) -> OptimizerConfig:
    """Of an optimizer, without the weight decay that some refuse."""
    decay = 0.0 if name in ("adam", "sgd", "adafactor") else CONFIG.weight_decay
    return configured(**dict(name=name, weight_decay=decay) | changes)


def optimizer_and_schedule(config: OptimizerConfig):
    """An optimizer whose update takes the config's own numbers, and the schedule. Compiled, the
    schedule by itself as in a run: operation by operation, each one is compiled for each shape."""
    optimizer, schedule = make_optimizer(config)
    compiled, rate = jax.jit(optimizer.update), jax.jit(schedule)

    def update(grads, state, params):
        numbers = dict(learning_rate=rate(schedule_steps(state)), clip_norm=config.clip_norm)
        return compiled(grads, state, params, **numbers)

    return optax.GradientTransformation(jax.jit(optimizer.init), update), rate


apply_updates = jax.jit(optax.apply_updates)


def schedule_of(**changes):
    """finished steps -> learning rate, as float."""
    schedule = jax.jit(make_optimizer(configured(**changes))[1])
    return lambda count: float(schedule(jnp.asarray(count, jnp.int32)))


# Shaped like a model: stacked kernels and norms, an embedding, a bias, a norm of one axis.
DECAYED = ("embedding", "layers/mlp/up/kernel", "lm_head/kernel")
PLAIN = ("final_norm/scale", "layers/mlp_norm/scale", "lm_head/bias")
LEAF_SHAPES = dict(
    zip((*DECAYED, *PLAIN), [(5, 3), (2, 3, 4), (3, 5), (3,), (2, 3), (5,)], strict=True)
)


def random_leaves(seed: int, size=1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {k: (size * rng.normal(size=s)).astype(np.float32) for k, s in LEAF_SHAPES.items()}


# AdamW --------------------------------------------------------------------------------------------


def adamw_by_hand(params, gradients, c: OptimizerConfig, rates):
    """Algorithm 2 of arXiv 1711.05101 after clipping, in float64, with an error bound a leaf.

    The bound, in units of 2^-24 and to first order. One step's update is lr * (m / sqrt(v) + decay
    * p). With b2 = 0.95 the bias correction 1 - b2^t is at least 0.05, so a rounding of b2^t is
    worth 20 units of it, of its root 10; that of b1 = 0.9 is worth 10. Clipping, moments, root,
    quotient and products are 40 roundings of them or fewer, the schedule is 20. The moment's
    roundings count relative to its sum of |g|, since g may cancel in m. Then the sum p + update
    rounds once, relative to p. Errors do not grow from step to step but add up.
    """
    m = {k: np.zeros(p.shape) for k, p in params.items()}
    m_abs, v, bound = ({k: np.zeros(p.shape) for k, p in params.items()} for _ in range(3))
    p = {k: np.asarray(value, np.float64) for k, value in params.items()}
    clipped = []
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        norm = math.sqrt(sum(float(np.sum(np.square(x, dtype=np.float64))) for x in g.values()))
        clipped.append(norm > c.clip_norm)
        shrink = min(1.0, c.clip_norm / norm)
        for k in p:
            x = shrink * np.asarray(g[k], np.float64)
            m[k] = c.b1 * m[k] + (1 - c.b1) * x
            m_abs[k] = c.b1 * m_abs[k] + (1 - c.b1) * np.abs(x)
            v[k] = c.b2 * v[k] + (1 - c.b2) * x * x
            root = np.sqrt(v[k] / (1 - c.b2**t)) + c.eps
            decay = c.weight_decay if k in DECAYED else 0.0
            update = m[k] / (1 - c.b1**t) / root + decay * p[k]
            size = m_abs[k] / (1 - c.b1**t) / root + decay * np.abs(p[k])
            p[k] = p[k] - rate * update
            bound[k] += (80 * rate * size + np.abs(p[k]) + rate * size) * 2.0**-24
    return p, bound, clipped


@pytest.mark.parametrize("schedule", WARMING)
def test_five_steps_of_adamw(schedule):
    c = configured(schedule=schedule)
    params = random_leaves(0)
    # Global norms from about 0.7 to 20: some are clipped, some are not.
    gradients = [random_leaves(10 + t, size) for t, size in enumerate([0.1, 3, 0.2, 1, 0.1])]
    optimizer, rate = optimizer_and_schedule(c)
    ours = nested(params)
    state = optimizer.init(ours)
    for g in gradients:
        updates, state = optimizer.update(nested(g), state, ours)
        ours = apply_updates(ours, updates)
    rates = [float(rate(jnp.asarray(t))) for t in range(5)]
    expected, bound, clipped = adamw_by_hand(params, gradients, c, rates)
    assert set(clipped) == {True, False}
    for (path, got), want, limit in zip(
        jax.tree_util.tree_leaves_with_path(ours),
        jax.tree.leaves(nested(expected)),
        jax.tree.leaves(nested(bound)),
        strict=True,
    ):
        assert got.dtype == jnp.float32
        assert (np.abs(np.asarray(got, np.float64) - want) <= limit).all(), path
    for moment in jax.tree.leaves(state):
        assert moment.dtype in (jnp.float32, jnp.int32)


def test_weight_decay_is_for_kernels_and_embeddings():
    mask = is_matrix(nested({k: np.zeros(s) for k, s in LEAF_SHAPES.items()}))
    assert mask == nested({k: k in DECAYED for k in LEAF_SHAPES})


def test_without_a_gradient_only_decay_moves_a_parameter():
    """p - lr * decay * p for kernels and embeddings; norms, stacked ones too, keep every bit."""
    optimizer, rate = optimizer_and_schedule(CONFIG)
    leaves = random_leaves(0)
    params = nested(leaves)
    zeros = jax.tree.map(np.zeros_like, leaves)
    updates, _ = optimizer.update(nested(zeros), optimizer.init(params), params)
    new = apply_updates(params, updates)
    shrink = 1 - float(rate(jnp.asarray(0))) * CONFIG.weight_decay
    expected = {k: p * shrink if k in DECAYED else p for k, p in leaves.items()}
    # Three roundings of the update, far below p, and one of the sum.
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(nested(expected)), strict=True)
    for name, (got, want) in zip(sorted(LEAF_SHAPES), pairs, strict=True):
        tolerance = 2.0**-23 if name in DECAYED else 0
        np.testing.assert_allclose(got, want, rtol=tolerance, err_msg=name)


def test_clipping_leaves_what_is_short_enough_and_shrinks_what_is_not():
    """Seen through the first moment of the first step, (1 - b1) * clipped."""
    params = {"kernel": jnp.ones(4)}
    optimizer, _ = optimizer_and_schedule(CONFIG)

    def first_moment(g):
        _, state = optimizer.update({"kernel": g}, optimizer.init(params), params)
        (mu,) = [x for x in jax.tree.leaves(optax.tree.get(state, "mu"))]
        return np.asarray(mu) / np.float32(1 - CONFIG.b1)

    short = jnp.asarray([0.5, -0.5, 0.5, 0.5])  # norm 1
    np.testing.assert_allclose(first_moment(short), short, rtol=3 * 2.0**-24)
    long = 8 * short  # norm 8: shrunk to 1.5
    np.testing.assert_allclose(first_moment(long), 1.5 * short, rtol=6 * 2.0**-24)


# Gradients in E5M2 --------------------------------------------------------------------------------


def first_momentum(g, **changes):
    """The momentum after one step of the gradients g, divided by 1 - b1."""
    params = {"kernel": jnp.ones(len(g))}
    optimizer, _ = optimizer_and_schedule(configured(name="signum", b1=0.5, **changes))
    grads = {"kernel": jnp.asarray(g, jnp.float32)}
    _, state = optimizer.update(grads, optimizer.init(params), params)
    return np.asarray(optax.tree.get(state, "mu")["kernel"]) / np.float32(0.5)


def test_gradients_are_rounded_to_e5m2_after_clipping():
    """(3.3, 4.4) is clipped from 5.5 to 1.5: (0.9, 1.2), whose neighbors in E5M2 are 0.875 and 1,
    1 and 1.25. Rounded first, it would end beside them, since 3.5 and 4 have another norm."""
    assert first_momentum([3.3, 4.4], gradients="e5m2").tolist() == [0.875, 1.25]
    short = np.float32([0.9, -1e-3, 3e-6, 2.0**-17, 1.5 * 2.0**-17, 0.0])  # norm below 1.5
    assert (first_momentum(short) == short).all()
    expected = short.astype(ml_dtypes.float8_e5m2).astype(np.float32)
    rounded = first_momentum(short, gradients="e5m2")
    assert (rounded == expected).all() and rounded[2:].tolist() == [0.0, 0.0, 2.0**-16, 0.0]


def test_xla_does_not_undo_the_rounding_of_gradients():
    """Where it may, as on GPUs, it drops a conversion to E5M2 and back; a barrier lies between."""
    optimizer, _ = optimizer_and_schedule(configured(gradients="e5m2"))
    params = {"kernel": jnp.ones(4)}
    lowered = jax.jit(optimizer.update).lower(params, optimizer.init(params), params).as_text()
    (barrier,) = [line for line in lowered.splitlines() if "optimization_barrier" in line]
    assert barrier.endswith("tensor<4xf8E5M2>")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_is_not_saturated(bad):
    assert np.isnan(first_momentum([bad, 1.0], gradients="e5m2")[0])


def test_a_checkpoint_loads_with_gradients_in_either_format():
    params = {"kernel": jnp.ones(4)}
    plain, rounding = (make_optimizer(configured(gradients=g))[0] for g in ("float32", "e5m2"))
    assert jax.tree.structure(plain.init(params)) == jax.tree.structure(rounding.init(params))


# Master weights in bfloat16 -----------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bfloat16_parameters_get_the_update_of_their_values(name):
    """State and updates are float32, and equal those of the same values in float32."""
    optimizer, _ = optimizer_and_schedule(named(name))
    narrow = nested({k: p.astype(jnp.bfloat16) for k, p in random_leaves(0).items()})
    wide = jax.tree.map(lambda leaf: leaf.astype(np.float32), narrow)
    grads = nested(random_leaves(1))
    got, want = (optimizer.update(grads, optimizer.init(p), p) for p in (narrow, wide))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == other.dtype != jnp.bfloat16
        np.testing.assert_array_equal(one, other)
    stored = jax.tree.leaves(apply_updates(narrow, got[0]))
    expected = jax.tree.leaves(apply_updates(wide, want[0]))
    for one, other in zip(stored, expected, strict=True):
        assert one.dtype == jnp.bfloat16
        np.testing.assert_array_equal(one, other.astype(jnp.bfloat16))


@pytest.mark.parametrize(("rate", "still"), [(1e-4, 2.0**-5), (1e-6, 2.0**-11)])
def test_bfloat16_weights_above_a_limit_do_not_move(rate, still):
    """The limits of master_weights.py: half the distance to the next number is above the rate."""
    bits = np.arange(0x3F81, dtype=np.uint16)  # all from 0 to 1
    p = jnp.asarray(bits.view(ml_dtypes.bfloat16))
    for sign in (1.0, -1.0):
        moved = np.asarray(optax.apply_updates(p, jnp.full(p.shape, sign * rate)) != p)
        assert not moved[np.asarray(p > still)].any()
        assert moved[np.asarray(p < still / 2)].all()


# Schedules ----------------------------------------------------------------------------------------

# A learning rate is a float32 product of a few float32 numbers, one of them a cosine.
CLOSE = dict(rel=8 * 2.0**-24, abs=8 * 2.0**-24 * CONFIG.learning_rate)


@pytest.mark.parametrize("schedule", WARMING)
@pytest.mark.parametrize("warmup", [1, 2, 7])
def test_the_warmup_starts_at_one_share_and_ends_at_the_peak(schedule, warmup):
    rate = schedule_of(schedule=schedule, warmup_steps=warmup, decay_fraction=0.2)
    for finished in range(warmup):
        assert rate(finished) == pytest.approx(0.02 * (finished + 1) / warmup, **CLOSE)


@pytest.mark.parametrize("schedule", sorted(set(WARMING) - {"constant"}))
@pytest.mark.parametrize("warmup", [0, 1, 6])
@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
def test_the_last_step_has_the_final_rate(schedule, warmup, final):
    rate = schedule_of(schedule=schedule, warmup_steps=warmup, final_fraction=final)
    assert rate(9) == pytest.approx(final * 0.02, **CLOSE)


def test_linear_and_constant_point_by_point():
    """After two steps of warm-up 7/8 ... 0/8 of the way from the final rate to the peak, or all."""
    line, level = (schedule_of(schedule=name) for name in ("linear", "constant"))
    for finished in range(2, 10):
        left = (9 - finished) / 8
        assert line(finished) == pytest.approx(0.02 * (0.1 + 0.9 * left), **CLOSE)
        assert level(finished) == pytest.approx(0.02, **CLOSE)


def test_cosine_point_by_point():
    """Two steps of warm-up, then 0.1 + 0.9 * (1 + cos(pi * u)) / 2, u = 1/8 ... 8/8."""
    rate = schedule_of()
    assert rate(0) == pytest.approx(0.01, **CLOSE)
    assert rate(1) == pytest.approx(0.02, **CLOSE)
    assert rate(5) == pytest.approx(0.02 * 0.55, **CLOSE)  # half way: the mean of 1 and 0.1
    assert rate(3) == pytest.approx(0.02 * (0.1 + 0.45 * (1 + math.sqrt(0.5))), **CLOSE)
    assert rate(7) == pytest.approx(0.02 * (0.1 + 0.45 * (1 - math.sqrt(0.5))), **CLOSE)
    assert rate(9) == pytest.approx(0.002, **CLOSE)
    rates = [rate(n) for n in range(1, 10)]
    assert rates == sorted(rates, reverse=True)


def test_wsd_is_flat_and_then_decays():
    """20 steps, warm-up 4, the last 0.3 * 20 = 6 decay: steps 4 to 14 are at the peak, step 17 is
    half way down, step 20 at the end."""
    rate = schedule_of(schedule="wsd", num_steps=20, warmup_steps=4)
    assert [rate(n) for n in range(3, 14)] == [pytest.approx(0.02, **CLOSE)] * 11
    assert rate(14) < 0.02 * (1 - 0.05)  # 0.1 + 0.45 * (1 + cos(pi / 6)) = 0.9397
    assert rate(14) == pytest.approx(0.02 * (0.1 + 0.45 * (1 + math.sqrt(0.75))), **CLOSE)
    assert rate(16) == pytest.approx(0.02 * 0.55, **CLOSE)
    assert rate(18) == pytest.approx(0.02 * (0.1 + 0.45 * (1 - math.sqrt(0.75))), **CLOSE)
    assert rate(19) == pytest.approx(0.002, **CLOSE)


def test_a_decay_of_its_own_is_the_last_phase_of_wsd():
    whole = schedule_of(schedule="wsd", num_steps=20, warmup_steps=4)  # the last 6 steps decay
    alone = schedule_of(schedule="decay", num_steps=6, warmup_steps=0)
    assert [alone(n) for n in range(6)] == [whole(14 + n) for n in range(6)]
    for warmup in (dict(warmup_steps=2), dict(warmup_steps=0, warmup_fraction=0.2)):
        with pytest.raises(ValueError, match="schedule=decay .* has no warm-up of 2 steps: set"):
            configured(schedule="decay", **warmup)


@pytest.mark.parametrize(("share", "steps"), [(0.0, 0), (0.05, 2), (0.5, 20), (1.0, 4)])
def test_a_warmup_may_be_a_share_of_the_run(share, steps):
    config = configured(warmup_fraction=share, warmup_steps=7, num_steps=40)
    assert config.warmup == steps  # the whole run does not fit: a tenth


def test_the_schedule_restarts_and_all_else_stays():
    optimizer, _ = optimizer_and_schedule(configured())
    params = {"kernel": jnp.ones((2, 3))}
    state = optimizer.init(params)
    for _ in range(3):
        _, state = optimizer.update(params, state, params)
    again = restart_schedule(state)
    assert (schedule_steps(state), schedule_steps(again)) == (3, 0)
    adam, restarted = (optax.tree.get(s, "mu") for s in (state, again))
    jax.tree.map(np.testing.assert_array_equal, adam, restarted)
    assert sum(int(leaf) for leaf in jax.tree.leaves(again) if leaf.ndim == 0) == 3  # Adam's count
    # What resets oscillating weights begins at a share of the new schedule's steps.
    resets = (params, ResetState(jnp.int32(3), params, params))
    kept, (step, *sums) = restart_schedule(resets)
    assert step == 0 and all(tree["kernel"] is params["kernel"] for tree in (kept, *sums))


def test_wsd_without_a_decay_stays_at_the_peak():
    rate = schedule_of(schedule="wsd", decay_fraction=0.0)
    assert [rate(n) for n in range(1, 10)] == [pytest.approx(0.02, **CLOSE)] * 9


def test_wsd_phases_may_touch():
    rate = schedule_of(schedule="wsd", warmup_steps=7)  # 7 + 0.3 * 10 = 10
    assert rate(6) == pytest.approx(0.02, **CLOSE)
    assert rate(7) == pytest.approx(0.02 * (0.1 + 0.45 * 1.5), **CLOSE)  # cos(pi / 3) = 0.5


@pytest.mark.parametrize(
    ("changes", "warmup"),
    [
        (dict(warmup_steps=9), 9),  # the last step does not warm up
        (dict(warmup_steps=10), 1),  # a tenth of 10 steps
        (dict(warmup_steps=2000, num_steps=59), 5),
        (dict(warmup_steps=1, num_steps=1), 0),
        (dict(schedule="wsd", warmup_steps=7), 7),  # 7 + 0.3 * 10 = 10
        (dict(schedule="wsd", warmup_steps=8), 1),
        (dict(schedule="wsd", warmup_steps=8, decay_fraction=0.95), 0),  # round(9.5) = 10 decay
        (dict(schedule="wsd", warmup_steps=9, decay_fraction=0.0), 9),
    ],
)
def test_a_warmup_that_does_not_fit_takes_a_tenth_of_the_run(changes, warmup):
    c = configured(**changes)
    assert c.warmup == warmup
    rate = schedule_of(**changes)
    # The peak comes with the last step of the warm-up and not before.
    rates = [rate(n) for n in range(c.num_steps)]
    assert rates == sorted(rates[:warmup]) + sorted(rates[warmup:], reverse=True)
    if warmup:
        assert rates[warmup - 1] == pytest.approx(0.02, **CLOSE) and max(rates) == rates[warmup - 1]


# Signs --------------------------------------------------------------------------------------------


def test_signum_is_the_sign_of_the_momentum():
    """Six steps in float64; signs of momenta that float32 may round across zero are left out."""
    c = configured(name="signum", weight_decay=0.0, clip_norm=1e9)
    optimizer, rate = optimizer_and_schedule(c)
    params = {"kernel": jnp.zeros((20, 50))}
    state, m, rng = optimizer.init(params), np.zeros((20, 50)), np.random.default_rng(0)
    for t in range(6):
        g = rng.normal(size=m.shape).astype(np.float32)
        updates, state = optimizer.update({"kernel": jnp.asarray(g)}, state, params)
        m = c.b1 * m + (1 - c.b1) * g
        sure = np.abs(m) > 1e-6
        assert sure.mean() > 0.99
        expected = np.float32(-rate(jnp.asarray(t))) * np.sign(m)
        assert (np.asarray(updates["kernel"])[sure] == expected[sure]).all()


@pytest.mark.parametrize("moments", [name for name in MOMENTS if name != "fp8"])
@pytest.mark.parametrize(("name", "decay"), [("stosignsgd", 1.0), ("stosignsgd_v2", V2_DECAY)])
def test_the_largest_magnitude_is_float32_where_rounding_is_to_nearest(name, decay, moments):
    """One gradient and three zeros: |g|, and |g| decay^3 in three float32 products. The momentum
    halves in each step, and rounding adds a sixteenth at most, so it stays below. No g is large
    enough for E4M3 without a scale, in which all of them are zero."""
    c = configured(name=name, moments=moments, b1=0.5, clip_norm=1e9)
    optimizer, _ = optimizer_and_schedule(c)
    params = {"kernel": jnp.zeros((2, 128))}
    g = np.random.default_rng(0).uniform(5e-5, 1e-4, size=(2, 128)).astype(np.float32)
    state, expected = optimizer.init(params), np.abs(g)
    _, state = optimizer.update({"kernel": jnp.asarray(g)}, state, params)
    for _ in range(3):
        _, state = optimizer.update({"kernel": jnp.zeros_like(g)}, state, params)
        expected = np.float32(decay) * expected
    assert 0 < np.abs(g).max() < FORMATS["e4m3"].tiny / 2
    np.testing.assert_array_equal(optax.tree.get(state, "bound")["kernel"], expected)


def test_the_largest_magnitude_decays_by_stochastic_rounding():
    """400 steps in "fp8", 2%, in the mean of 2^12 elements. A step's rounding has a variance of at
    most 5e-5 G * G / 8, the first one's of (G / 16)^2: (0.080 G)^2 together, 1.3e-3 of the mean."""
    c = configured(name="stosignsgd_v2", moments="fp8", b1=0.5, clip_norm=1e9)
    optimizer, _ = optimizer_and_schedule(c)
    params = {"kernel": jnp.zeros((32, 128))}
    update = jax.jit(lambda g, state: optimizer.update({"kernel": g}, state, params)[1])
    g = jnp.asarray(np.random.default_rng(0).uniform(0.5, 1, (32, 128)), jnp.float32)
    state = update(g, optimizer.init(params))
    for _ in range(400):
        state = update(jnp.zeros_like(g), state)
    bound = MOMENTS["fp8"].decode(optax.tree.get(state, "bound")["kernel"])
    expected = V2_DECAY**400 * np.mean(np.asarray(g, np.float64))
    assert np.mean(np.asarray(bound, np.float64)) == pytest.approx(expected, rel=5 * 1.3e-3)


def test_the_decay_of_the_second_version_needs_float32():
    """0.99995 x, rounded to E4M3 or bfloat16, is x for every normal x: v2 would be v1."""
    e4m3 = np.arange(0x08, 0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert (cast(V2_DECAY * jnp.asarray(e4m3), "e4m3").astype(jnp.float32) == e4m3).all()
    bf16 = np.arange(0x0080, 0x7F80, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    # 2^-126 decays to a subnormal, which XLA flushes to zero.
    decayed = (V2_DECAY * jnp.asarray(bf16[1:])).astype(jnp.bfloat16)
    assert (decayed.astype(jnp.float32) == bf16[1:]).all()
    x = np.geomspace(1e-8, 1, 1000).astype(np.float32)
    decay = 1 - np.asarray(V2_DECAY * jnp.asarray(x), np.float64) / x
    # The product and the constant round once each, by 2^-24 at most: 0.24% of 5e-5.
    np.testing.assert_allclose(decay, 5e-5, rtol=2 * 2.0**-24 / 5e-5)


@pytest.mark.parametrize(("name", "decay"), [("stosignsgd", 1.0), ("stosignsgd_v2", V2_DECAY)])
def test_stosignsgd_equals_the_algorithm(name, decay):
    """Algorithms 3 and 11 in float64, with the noise of the seed, the step and the leaf. An element
    whose sign the rounding to float32 may turn is left out: few are."""
    c = configured(name=name, weight_decay=0.3, clip_norm=1e9, seed=7)
    optimizer, rate = optimizer_and_schedule(c)
    params = random_leaves(0)
    state, given = optimizer.init(nested(params)), nested(params)
    x = {k: v.astype(np.float64) for k, v in params.items()}
    m, bound = ({k: np.zeros(v.shape) for k, v in params.items()} for _ in range(2))
    order = [path for path, _ in flat_paths(given)]

    @jax.jit
    def noise_of(t):
        key = jax.random.fold_in(jax.random.key(7), t)
        return {
            k: jax.random.uniform(jax.random.fold_in(key, i), LEAF_SHAPES[k], minval=-1.0)
            for i, k in enumerate(order)
        }

    for t in range(6):
        g = random_leaves(10 + t)
        updates, state = optimizer.update(nested(g), state, given)
        given = apply_updates(given, updates)
        noises = jax.device_get(noise_of(t))
        for k in order:
            m[k] = g[k] if t == 0 else c.b1 * m[k] + (1 - c.b1) * g[k]
            bound[k] = np.maximum(decay * bound[k], np.abs(m[k]))
            noise = noises[k]
            sign = np.sign(m[k] + bound[k] * np.asarray(noise, np.float64))
            sure = np.abs(m[k] + bound[k] * noise) > 1e-5 * bound[k]
            lr = float(rate(t))
            decayed = c.weight_decay * x[k] if k in DECAYED else 0.0
            x[k] = x[k] - lr * sign - lr * decayed
            assert sure.mean() > 0.9
            got = np.asarray(dict(flat_paths(given))[k])
            np.testing.assert_allclose(got[sure], x[k][sure], rtol=1e-5, atol=1e-6)
            x[k] = got.astype(np.float64)  # where a sign was turned, go on from it


def flat_paths(tree) -> list[tuple[str, jax.Array]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


@pytest.mark.parametrize("name", ["stosignsgd", "stosignsgd_v2", "sign_adamw"])
def test_the_mean_of_the_signs_is_the_mean_update(name):
    """Over n rows with the same gradients, within five standard errors, 1 / sqrt(n) each: m / G of
    StoSignSGD, and Adam's update where that is at most 1."""
    rows, rng = 20_000, np.random.default_rng(0)
    columns = [rng.normal(size=16).astype(np.float32) for _ in range(3)]
    params = {"kernel": np.zeros((rows, 16), np.float32)}

    def last(name):
        core, _ = OPTIMIZERS[name](configured(name=name))
        state, step = jax.jit(core.init)(params), jax.jit(core.update)
        for g in columns:
            update, state = step({"kernel": np.tile(g, (rows, 1))}, state, params)
        return update["kernel"], state

    signs, state = last(name)
    assert set(np.unique(signs)) <= {-1.0, 0.0, 1.0}
    if name == "sign_adamw":
        expected = last("adamw")[0][0]
    else:
        expected = state.mu["kernel"][0] / state.bound["kernel"][0]
    error = np.mean(np.asarray(signs, np.float64), axis=0) - np.clip(expected, -1, 1)
    assert np.abs(error).max() <= 5 / np.sqrt(rows)
    assert np.abs(expected).min() < 0.5 < np.abs(expected).max()


@pytest.mark.parametrize("name", ["stosignsgd", "sign_adamw"])
def test_signs_do_not_depend_on_the_mesh(name):
    optimizer, _ = optimizer_and_schedule(configured(name=name))
    params = {"kernel": jnp.ones((16, 8))}
    grads = {"kernel": jnp.asarray(np.random.default_rng(0).normal(size=(16, 8)), jnp.float32)}
    whole, _ = optimizer.update(grads, optimizer.init(params), params)
    mesh = jax.make_mesh((8,), ("fsdp",))
    cut = jax.device_put(grads, jax.NamedSharding(mesh, jax.P("fsdp")))
    other, _ = optimizer.update(cut, optimizer.init(params), params)
    np.testing.assert_array_equal(whole["kernel"], other["kernel"])


# Every optimizer ----------------------------------------------------------------------------------


def _left_by_signs(goal, curvature) -> float:
    """The expected loss after the 300 steps below, of one leaf."""
    rate = schedule_of(learning_rate=0.05, num_steps=300, warmup_steps=10, final_fraction=1e-4)
    error, variance = np.asarray(goal, np.float64), np.zeros(goal.shape)
    for t in range(300):
        kept = 1 - np.minimum(rate(t) / np.abs(goal), 1)
        error, variance = error * kept, variance * kept**2 + rate(t) ** 2
    return float(np.sum(np.asarray(curvature) * (error**2 + variance)) / 2)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adafactor"])
def test_convergence_on_a_quadratic_without_recompiling(name):
    """Not of Adafactor, whose steps are shares of a leaf's own size: test_three_steps_of_optax.

    sum a (p - q)^2 / 2 with curvatures a from 0.1 to 10. An optimizer with steps near the
    learning rate, 0.05, covers the distances of 2 and less within 40 of the 300 steps; the decay
    of the rate to 1e-4 of that damps what remains: a thousandth of the loss is easy. The wrong
    sign, or no step, is not.

    StoSignSGD's mean step is rate * m / G with G the first gradient, a |q|: a share rate / |q| of
    the way, with a variance of at most rate^2. What both leave is computed; three times that is
    far out for forty elements."""
    c = configured(
        name=name,
        learning_rate=0.05,
        num_steps=300,
        warmup_steps=10,
        weight_decay=0.0,
        final_fraction=1e-4,
        clip_norm=1e3,
    )
    optimizer, _ = optimizer_and_schedule(c)
    rng = np.random.default_rng(0)
    goal = {
        "kernel": jnp.asarray(rng.uniform(-2, 2, (4, 8)), jnp.float32),
        "scale": jnp.asarray(rng.uniform(-2, 2, 8), jnp.float32),
    }
    curvature = {
        "kernel": jnp.asarray(np.geomspace(0.1, 10, 32).reshape(4, 8), jnp.float32),
        "scale": jnp.ones(8),
    }

    def loss(params):
        terms = jax.tree.map(lambda p, q, a: jnp.sum(a * (p - q) ** 2) / 2, params, goal, curvature)
        return sum(jax.tree.leaves(terms))

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = jax.tree.map(jnp.zeros_like, goal)
    state, first = optimizer.init(params), loss(params)
    for _ in range(300):
        params, state, value = step(params, state)
    allowed = 1e-3 * first
    if name.startswith("stosignsgd"):
        allowed = 3 * sum(map(_left_by_signs, *map(jax.tree.leaves, (goal, curvature))))
    assert value < allowed < 0.05 * first
    assert step._cache_size() == 1  # nothing of the state changed its type after the first step


# Optax's own, and the user's ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("adam", lambda c: optax.adam(c.learning_rate, c.b1, c.b2, c.eps)),
        ("sgd", lambda c: optax.sgd(c.learning_rate, momentum=c.b1)),
        ("adafactor", lambda c: optax.adafactor(c.learning_rate, weight_decay_rate=None)),
    ],
)
def test_three_steps_of_optax(name, whole):
    """Products in another order: a few roundings of float32 a step."""
    c = named(name, schedule="constant", warmup_steps=0, clip_norm=1e9)
    ours, theirs = optimizer_and_schedule(c)[0], whole(c)
    params = nested(random_leaves(0))
    states, values = [each.init(params) for each in (ours, theirs)], [params, params]
    for step in range(1, 4):
        grads = nested(random_leaves(step))
        for i, each in enumerate((ours, theirs)):
            updates, states[i] = each.update(grads, states[i], values[i])
            values[i] = optax.apply_updates(values[i], updates)
    for one, other in zip(*map(jax.tree.leaves, values), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-7)


_OWN = """
import optax

def twice(config):
    return optax.scale(2.0)

def half(config):
    return lambda step: config.learning_rate / 2

number = 3

def none(config):
    return number
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "of_a_user.py").write_text(_OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("of_a_user", None)


def test_an_optimizer_and_a_schedule_of_a_user(own_module):
    c = configured(name="of_a_user:twice", schedule="of_a_user:half", clip_norm=1e9)
    optimizer, schedule = optimizer_and_schedule(c)
    params, grads = ({"scale": jnp.asarray(x)} for x in ([3.0], [0.25]))
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    assert schedule(0) == 0.01
    np.testing.assert_allclose(updates["scale"], -0.01 * 2 * 0.25)  # no decay: it is no matrix


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(name="of_a_user:twic"), "unknown optimizer of module 'of_a_user': 'twic'; did you"),
        (dict(name="not_there:twice"), "'not_there:twice': Python finds no module 'not_there'"),
        (dict(name="of_a_user:twice", moments="fp8"), "moments=fp8: optimizer of_a_user:twice"),
        (dict(name="adafactor", weight_decay=0.0, moments="fp8"), "moments=fp8: optimizer adaf"),
        (dict(name="adam"), "optimizer adam has no weight decay, got weight_decay=0.3"),
        (dict(schedule="of_a_user:hal"), "unknown schedule of module 'of_a_user': 'hal'"),
    ],
)
def test_what_a_user_s_own_cannot_be(own_module, changes, message):
    with pytest.raises(ValueError, match=message):
        make_optimizer(configured(**changes))


def test_what_returns_no_optimizer_is_refused(own_module):
    with pytest.raises(TypeError, match="optimizer of_a_user:none returned no optax"):
        make_optimizer(configured(name="of_a_user:none"))


# Bad configurations -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(warmup_steps=-1), "warmup_steps=-1 is negative"),
        (dict(num_steps=0), "num_steps=0 must be at least 1"),
        (dict(decay_fraction=1.5), r"decay_fraction=1.5 does not lie in \[0, 1\]"),
        (dict(final_fraction=-0.1), r"final_fraction=-0.1 does not lie in \[0, 1\]"),
        (dict(final_fraction=math.nan), "final_fraction=nan"),
        (dict(learning_rate=0.0), "learning_rate=0.0 must be positive and finite"),
        (dict(learning_rate=-0.1), "learning_rate=-0.1 must be positive and finite"),
        (dict(learning_rate=math.nan), "learning_rate=nan must be positive and finite"),
        (dict(eps=math.inf), "eps=inf must be positive and finite"),
        (dict(eps=0.0), "eps=0.0 must be positive and finite"),
        (dict(b1=1.5), r"b1=1.5 does not lie in \[0, 1\)"),
        (dict(b2=1.0), r"b2=1.0 does not lie in \[0, 1\)"),
        (dict(b2=math.nan), r"b2=nan does not lie in \[0, 1\)"),
        (dict(weight_decay=-1.0), "weight_decay=-1.0 must be finite and not negative"),
        (dict(weight_decay=math.nan), "weight_decay=nan must be finite and not negative"),
        (dict(clip_norm=0.0), "clip_norm=0.0 must be positive"),
        (dict(clip_norm=math.nan), "clip_norm=nan must be positive"),
        (dict(name="adam_w"), "unknown optimizer 'adam_w'; did you mean 'adamw'"),
        (dict(moments="fp8_coad"), "unknown moment format 'fp8_coad'; did you mean 'fp8_coat'"),
        (dict(gradients="e5m3"), "unknown gradient format 'e5m3'; did you mean 'e5m2'"),
        (
            dict(gradients="e5m2", clip_norm=6e4),
            "clip_norm=60000.0 lets gradients pass that gradients='e5m2' would saturate at 57344.0",
        ),
        (dict(schedule="cosin"), "unknown schedule 'cosin'; did you mean 'cosine'"),
    ],
)
def test_bad_configurations_raise_with_their_values(changes, message):
    with pytest.raises(ValueError, match=message):
        make_optimizer(configured(**changes))
