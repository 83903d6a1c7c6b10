"""Attention against plain NumPy in float64: causal, within documents, grouped heads.

One suite for all implementations. cuDNN's and ours for Hopper need a GPU: they take part in the
tests in bfloat16, which is what they have, ours in Pallas' interpreter, too
(tests/lm/flash/attention_test.py has more). all_bf16_attention_test.py has those that round scores.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from fp8jax.device import hardware, xla
from fp8jax.kernels import requirements
from fp8jax.lm.model import blockwise_attention
from fp8jax.lm.model.attention import (
    ATTENTIONS,
    Implementation,
    choose_attention,
    dot_product_attention,
    fastest_attention,
    reference,
)
from fp8jax.lm.model.blockwise_attention import Rounded, RowMax
from fp8jax.lm.training.build import build
from tests.support.attention import forward_in_numpy, gradients_in_numpy
from tests.support.interpreter import interpreting, needs_pallas

B, T, N, H = 2, 12, 4, 8
# Documents of unlike lengths, a row of one document, and padding (0) at the end of the first.
SEGMENTS = np.array([[1] * 3 + [2] * 6 + [0] * 3, [1] * 12], np.int32)

# With 5 keys in a block the reference has three blocks of which the last is not full, and some
# queries see nothing of the first.
ON_A_CPU = ["xla", "reference", "reference/5", "stabilized/5"]
ROUNDED = ["reference_bf16/5", "stabilized_bf16/5"]  # in float32 these are the two without _bf16
FUSED = [
    pytest.param("cudnn", marks=pytest.mark.gpu),
    pytest.param("flash", marks=pytest.mark.gpu),
    pytest.param("flash/interpreted", marks=needs_pallas),
]
ANYWHERE = [*ON_A_CPU, *ROUNDED, *FUSED]
on_a_cpu = pytest.mark.parametrize("name", ON_A_CPU, indirect=True)
anywhere = pytest.mark.parametrize("name", ANYWHERE, indirect=True)


@pytest.fixture
def name(request, monkeypatch):
    """An implementation; after a slash, how many keys a block of the reference has."""
    name, _, how = request.param.partition("/")
    if how == "interpreted":
        with interpreting():
            yield name
        return
    if how:
        monkeypatch.setattr(blockwise_attention, "BLOCK", int(how))
    yield name


def attention_of(name: str | Implementation):
    return _compiled(_attend, name)


def gradients_of(name: str | Implementation):
    """(q, k, v, segments, dy) -> y, dq, dk, dv."""
    return _compiled(_differentiate, name)


def _compiled(f, name: str | Implementation):
    if name == "flash":  # in the interpreter or not, which decides what is traced
        return jax.jit(functools.partial(f, name))
    return _compiled_once(f, name, blockwise_attention.BLOCK)


@functools.cache
def _compiled_once(f, name: str | Implementation, block: int):
    """`BLOCK` is read while f is traced, so that there is one function for each."""
    return jax.jit(functools.partial(f, name))


def _attend(name, q, k, v, segments):
    return dot_product_attention(q, k, v, segments, implementation=name)


def _differentiate(name, q, k, v, segments, dy):
    y, vjp = jax.vjp(lambda *args: _attend(name, *args, segments), q, k, v)
    return y, *vjp(dy)


def inputs(kv_heads: int, seed=0) -> tuple[np.ndarray, ...]:
    """q, k, v in float32; scores q k^T / sqrt(H) of size 2 or so: far from uniform weights."""
    rng = np.random.default_rng(seed)
    sizes = (N, kv_heads, kv_heads)
    q, k, v = (rng.normal(size=(B, T, heads, H)).astype(np.float32) for heads in sizes)
    return 2 * q, k, v


def in_numpy(q, k, v, segments, round_scores=lambda s: s) -> np.ndarray:
    """One query at a time, in float64, over the keys that it may see."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    group = q.shape[2] // k.shape[2]
    out = np.zeros_like(q)
    for b, t, n in np.ndindex(*q.shape[:3]):
        seen = [s for s in range(t + 1) if segments[b, s] == segments[b, t]]
        scores = np.array([q[b, t, n] @ k[b, s, n // group] for s in seen]) / np.sqrt(q.shape[3])
        scores = round_scores(scores)
        weights = np.exp(scores - scores.max())
        out[b, t, n] = weights / weights.sum() @ v[b, seen, n // group]
    return out


@functools.cache
def largest_score(kv_heads: int) -> float:
    q, k, _ = inputs(kv_heads)
    return float(np.linalg.norm(q, axis=-1).max() * np.linalg.norm(k, axis=-1).max() / np.sqrt(H))


def beta_of(name: str) -> float:
    return RowMax().beta if name.startswith("stabilized") else 1.0


def float32_units(kv_heads: int, larger: float = 1, beta: float = 1.0) -> float:
    """How many units of 2^-24 a weight, computed in float32, may be off by, relatively.

    A score is a sum of H products, off by H + 1 roundings of its magnitude S at most; its
    exponential is off by as much, relatively, and by 2 more (exp, subtraction of the maximum).
    Numerator and denominator, each a sum of T such terms: 2 * ((H + 1) * S + 2 * S + T + 4).
    The blockwise sums round twice more for each block: within the T. A stabilized row subtracts
    beta * S at most instead of S."""
    return 2 * ((H + 2 + beta) * larger * largest_score(kv_heads) + T + 4)


# Forward ------------------------------------------------------------------------------------------


@on_a_cpu
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_float32_equals_numpy(name, kv_heads):
    """Relative to the largest |v|."""
    q, k, v = inputs(kv_heads)
    y = attention_of(name)(q, k, v, SEGMENTS)
    assert y.dtype == jnp.float32 and y.shape == q.shape
    bound = float32_units(kv_heads, beta=beta_of(name)) * 2.0**-24 * np.abs(v).max()
    assert np.abs(y - in_numpy(q, k, v, SEGMENTS)).max() <= bound


@anywhere
def test_bfloat16_in_and_out_and_scores_in_float32(name):
    """The inputs are bfloat16 numbers. Rounded, each by 2^-9 relative at most, are the weights, the
    result, and in two of them a block's product; each error is under 2^-9 times the weighted sum
    of |v|, and a fourth is for what they do to each other. Scores rounded to bfloat16 break this
    bound, which the last line shows."""
    q, k, v = (jnp.asarray(a, jnp.bfloat16) for a in inputs(2))
    q = 8 * q  # scores of 30 and more
    y = attention_of(name)(q, k, v, SEGMENTS)
    assert y.dtype == jnp.bfloat16
    exact = in_numpy(q, k, v, SEGMENTS)
    magnitude = in_numpy(q, k, np.abs(np.asarray(v, np.float32)), SEGMENTS)
    in_float32 = float32_units(2, larger=8, beta=beta_of(name)) * 2.0**-24
    bound = (2 + 2.0**-8) * 2.0**-8 * magnitude + in_float32 * np.abs(v).max().astype(np.float64)
    assert (np.abs(np.asarray(y, np.float64) - exact) <= bound).all()

    def round_scores(scores):
        return scores.astype(jnp.bfloat16).astype(np.float64)

    assert (np.abs(in_numpy(q, k, v, SEGMENTS, round_scores) - exact) > bound).any()


@on_a_cpu
def test_grouped_heads_are_repeated_heads(name):
    """Query head n reads the key and value head n // (N / K). Same sums: as in NumPy's test."""
    q, k, v = inputs(2)
    repeated = (np.repeat(a, N // 2, axis=2) for a in (k, v))
    attend = attention_of(name)
    difference = attend(q, k, v, SEGMENTS) - attend(q, *repeated, SEGMENTS)
    bound = float32_units(2, beta=beta_of(name)) * 2.0**-24 * np.abs(v).max()
    assert np.abs(difference).max() <= bound


@on_a_cpu
@pytest.mark.parametrize("poison", [1e30, -1e30])
def test_what_is_not_seen_does_not_count_at_all(name, poison):
    """Keys and values of later positions and other documents, however large, change no bit."""
    q, k, v = inputs(2)
    attend = attention_of(name)
    reference = np.asarray(attend(q, k, v, SEGMENTS))
    for at in range(T):
        k2, v2 = k.copy(), v.copy()
        k2[:, at], v2[:, at] = poison, poison
        got = np.asarray(attend(q, k2, v2, SEGMENTS))
        sees = (np.arange(T) >= at) & (SEGMENTS == SEGMENTS[:, at : at + 1])
        np.testing.assert_array_equal(got[~sees], reference[~sees])
        assert (got[sees] != reference[sees]).any(axis=(-1, -2)).all()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((n, jnp.float32) for n in ON_A_CPU),
        *((n, jnp.bfloat16) for n in ON_A_CPU),
        *(pytest.param(*p.values, jnp.bfloat16, marks=p.marks) for p in FUSED),
    ],
    indirect=["name"],
)
def test_padding_is_finite_forward_and_backward(name, dtype):
    """A whole row of padding, and padding at an end: its values are not used, but a NaN among
    them would reach the gradients of all. (Fused kernels take no float32.)"""
    q, k, v = (jnp.asarray(a, dtype) for a in inputs(2))
    segments = jnp.asarray(np.stack([np.zeros(T, np.int32), SEGMENTS[0]]))
    for value in gradients_of(name)(q, k, v, segments, jnp.ones_like(q)):
        assert value.dtype == dtype
        assert np.isfinite(np.asarray(value, np.float32)).all()


@on_a_cpu
def test_a_first_token_is_its_own_value(name):
    """It sees itself only: weight 1, exactly."""
    q, k, v = inputs(2)
    y = attention_of(name)(q, k, v, SEGMENTS)
    for row, at in [(0, 0), (0, 3), (0, 9), (1, 0)]:
        np.testing.assert_array_equal(y[row, at], np.repeat(v[row, at], N // 2, axis=0))


# Backward -----------------------------------------------------------------------------------------


def cotangent(seed=7) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(B, T, N, H)).astype(np.float32)


@on_a_cpu
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_float32_gradients_equal_numpy(name, kv_heads):
    """ds holds a weight twice (once in delta), sums of H and of T terms, and then there is one of
    T * N terms: 2 * units + 2 * (H + T) + T * N roundings of the sums of magnitudes."""
    args = (*inputs(kv_heads), SEGMENTS, cotangent())
    units = 2 * float32_units(kv_heads, beta=beta_of(name)) + 2 * (H + T) + T * N
    _, *got = gradients_of(name)(*args)
    for gradient, (exact, magnitude) in zip(got, gradients_in_numpy(*args), strict=True):
        assert (np.abs(gradient - exact) <= units * 2.0**-24 * magnitude).all()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("xla", jnp.float32),
        ("reference/5", jnp.float32),
        pytest.param("reference", jnp.float32, marks=pytest.mark.full),
        pytest.param("stabilized/5", jnp.float32, marks=pytest.mark.full),
        # The interpreter has its own in lm/flash/attention_test.py.
        *(pytest.param(*p.values, jnp.bfloat16, marks=p.marks) for p in FUSED[:2]),
    ],
    indirect=["name"],
)
def test_windows_equal_a_mask_in_numpy(name, dtype):
    """Forward and backward, in packed rows with padding; the bounds are those of the tests of all
    keys. The window is traced, as where layers are unlike; one that hides nothing changes no bit,
    a window of 1 leaves each token its own value."""
    q, k, v, dy = (jnp.asarray(a, dtype) for a in (*inputs(2), cotangent()))
    units = 2 * float32_units(2, beta=beta_of(name)) + 2 * (H + T) + T * N
    bound = units * 2.0**-24 + (0 if dtype == jnp.float32 else 6 * 2.0**-9)

    @jax.jit
    def run(q, k, v, window):
        def attend(q, k, v):
            return dot_product_attention(
                q, k, v, jnp.asarray(SEGMENTS), window=window, implementation=name
            )

        y, vjp = jax.vjp(attend, q, k, v)
        return y, *vjp(dy)

    for window in (1, 4, 5):
        y, *got = run(q, k, v, window)
        exact, magnitude = forward_in_numpy(q, k, v, SEGMENTS, window)
        assert (np.abs(np.asarray(y, np.float64) - exact) <= bound * magnitude).all()
        expected = gradients_in_numpy(q, k, v, SEGMENTS, dy, window)
        for gradient, (exact, magnitude) in zip(got, expected, strict=True):
            error = np.abs(np.asarray(gradient, np.float64) - exact)
            assert (error <= bound * magnitude).all(), window
        if window == 1:
            np.testing.assert_array_equal(y, np.repeat(np.asarray(v), N // 2, axis=2))
    for got, every in zip(run(q, k, v, T), run(q, k, v, None), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(every))


@anywhere
def test_bfloat16_gradients_equal_numpy(name):
    """Rounded to bfloat16, by 2^-9 each, are the weights, dp, the output in delta, ds and the
    result, if at all: 5 roundings, and one more for what they do to each other. Where a block's
    product is rounded, the output is twice."""
    q, k, v, dy = (jnp.asarray(a, jnp.bfloat16) for a in (*inputs(2), cotangent()))
    units = 2 * float32_units(2, beta=beta_of(name)) + 2 * (H + T) + T * N
    roundings = 7 if name.endswith("_bf16") else 6
    bound = roundings * 2.0**-9 + units * 2.0**-24
    _, *got = gradients_of(name)(q, k, v, SEGMENTS, dy)
    for gradient, (exact, magnitude) in zip(
        got, gradients_in_numpy(q, k, v, SEGMENTS, dy), strict=True
    ):
        assert gradient.dtype == jnp.bfloat16
        assert (np.abs(np.asarray(gradient, np.float64) - exact) <= bound * magnitude).all()


@pytest.mark.parametrize(("block", "kv_heads"), [(1, 2), (4, 1), (5, 1), (5, 2), (12, 2), (128, 1)])
def test_the_reference_in_float64_has_the_gradients_of_the_plain_formula(
    monkeypatch, block, kv_heads
):
    """Blocks of one key, of a divisor of the length and not, of all keys and more. The bound of
    float32 has fewer than 1500 units, of 2^-53 here: 2e-13 of the sums of magnitudes."""
    monkeypatch.setattr(blockwise_attention, "BLOCK", block)
    assert 2 * float32_units(kv_heads) + 2 * (H + T) + T * N < 1500
    args = [np.asarray(a, np.float64) for a in (*inputs(kv_heads), cotangent())]
    with jax.enable_x64(True):
        q, k, v, dy = map(jnp.asarray, args)
        y, *got = gradients_of("reference")(q, k, v, jnp.asarray(SEGMENTS), dy)
        assert y.dtype == jnp.float64
        assert np.abs(y - in_numpy(*args[:3], SEGMENTS)).max() <= 2e-13 * np.abs(args[2]).max()
        expected = gradients_in_numpy(*args[:3], SEGMENTS, args[3])
        for gradient, (exact, magnitude) in zip(got, expected, strict=True):
            assert gradient.dtype == jnp.float64
            assert (np.abs(gradient - exact) <= 2e-13 * magnitude).all()


@anywhere
def test_documents_in_a_row_do_not_feel_each_other(name):
    """Another first document, and another gradient of it: not one bit of the second's outputs and
    gradients changes, nor of the padding behind. (A row of 12 is one block of the fused kernels,
    whose dq is else summed over blocks in any order.)"""
    one = [jnp.asarray(a, jnp.bfloat16) for a in (*inputs(2), cotangent())]
    fresh = [jnp.asarray(a, jnp.bfloat16) for a in (*inputs(2, seed=1), cotangent(8))]
    first = jnp.asarray(SEGMENTS == 1).at[1].set(False)[:, :, None, None]
    run = gradients_of(name)
    other = [jnp.where(first, 4 * b, a) for a, b in zip(one, fresh, strict=True)]
    befores, afters = (run(*a[:3], SEGMENTS, a[3]) for a in (one, other))
    for before, after in zip(befores, afters, strict=True):
        before, after = (np.asarray(a, np.float32) for a in (before, after))
        np.testing.assert_array_equal(after[0, 3:], before[0, 3:])
        np.testing.assert_array_equal(after[1], before[1])
        assert (after[0, 1:3] != before[0, 1:3]).any(axis=(-1, -2)).all()  # token 0 has dq = 0


# The row-max fix ----------------------------------------------------------------------------------

HEADS, LENGTH, SIZE = 400, 24, 16


def rows_with_two_maxima(others: tuple[float, float], base: float = 0.0) -> list[jax.Array]:
    """q, k, v and dy [HEADS, LENGTH, 1, SIZE]: each query's largest score, base + 2 to 6, is that
    of the keys 0 and 1, whose values are -1 to -2; the others' scores are 9 to 13 lower, and their
    values in -`others`."""
    rng = np.random.default_rng(0)
    draw = lambda *bounds, size=1: rng.uniform(*bounds, (HEADS, LENGTH, 1, size))  # noqa: E731
    tied = (np.arange(LENGTH) < 2)[None, :, None, None]
    root = np.sqrt(SIZE)  # by which scores are divided
    ones, rest = np.ones((HEADS, LENGTH, 1, 1)), np.zeros((HEADS, LENGTH, 1, SIZE - 4))
    # A score is base, its first eight bits, more bits, and what is lower.
    parts = [base * ones, draw(2, 6), draw(0, 1 / 32), ones]
    q = np.concatenate([*(root * part for part in parts), rest], axis=-1)
    k = np.concatenate([ones, ones, ones, np.where(tied, 0, -draw(9, 13)), rest], axis=-1)
    v = -np.where(tied, draw(1, 2, size=SIZE), draw(*others, size=SIZE))
    return [jnp.asarray(a, jnp.bfloat16) for a in (q, k, v, -draw(1, 2, size=SIZE))]


@functools.cache
def as_in_training(implementation: str | Implementation):
    attend = functools.partial(_attend, implementation)
    return jax.jit(attend, compiler_options=xla.compiler_options())


def lean(implementation: str | Implementation, inputs: list[jax.Array]) -> list[tuple]:
    """(mean, its standard error) of the errors of the output, away from zero, and of delta =
    rowsum(dy * output), over queries that see both maxima and one key more. The queries of a head
    share their values: a head counts as one observation."""
    q, k, v, dy = inputs
    segments = np.ones((HEADS, LENGTH), np.int32)
    y = np.asarray(as_in_training(implementation)(q, k, v, segments), np.float64)
    q, k, v, dy = (np.asarray(a, np.float64)[:, :, 0] for a in inputs)
    s = np.einsum("bth,bsh->bts", q, k) / np.sqrt(SIZE)
    s = np.where(np.tri(LENGTH, dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    exact = p / p.sum(axis=-1, keepdims=True) @ v
    error = (y[:, :, 0] - exact)[:, 2:]
    observations = [-error.mean(axis=(1, 2)), (dy[:, 2:] * error).sum(axis=-1).mean(axis=-1)]
    return [(x.mean(), x.std() / np.sqrt(HEADS)) for x in observations]


ALIKE, LARGER = (1, 2), (2, 4)  # the other keys' values, next to the maxima's


@pytest.mark.parametrize(
    ("without", "fixed", "others", "biased"),
    [
        ("reference_bf16", "stabilized_bf16", ALIKE, True),
        ("reference_bf16", "stabilized_bf16", LARGER, True),
        ("reference_all_bf16", "stabilized_all_bf16", ALIKE, True),
        ("reference", "stabilized", ALIKE, False),
        ("reference", "stabilized", LARGER, True),
    ],
)
def test_shared_row_maxima_bias_the_output_and_the_fix_removes_it(without, fixed, others, biased):
    """The failing case of arXiv 2510.04212. Two values of 1 to 2 are multiples of 2^-7, so that
    their sum is one, and for every other pair half way between two bfloat16 numbers, of which 2 to
    4 holds multiples of 2^-6. The other keys add 22 * e^-9 * 2 < 2^-7 at most, away from zero: the
    product of the block is rounded up by 2^-7, or down by nothing but that rest. Divided by l = 2
    it is a bfloat16 number, and what l has above 2, less than 22 * e^-9, takes under half a unit
    from that: it stays. On average the output is off by 2^-7 / 2 / 2 = 2^-9, and delta by 2^-9
    times 16 dimensions of mean 1.5. (The exact output differs from (v0 + v1) / 2 by a weighted
    difference of values, which is zero on average where they are alike.)

    In float32 sums a rest with values alike pushes the output up as often as down. Larger ones
    push it up, whence the rounding of the output itself has a bias; both are positive then."""
    inputs = rows_with_two_maxima(others)
    for expected, (mean, error) in zip((1, SIZE * 1.5), lean(without, inputs), strict=True):
        assert (mean > 10 * error) if biased else (abs(mean) < 4 * error)
        if without.endswith("_bf16") and others == ALIKE:
            assert abs(mean - expected * 2.0**-9) < 4 * error
    for mean, error in lean(fixed, inputs):
        assert abs(mean) < 4 * error


@pytest.mark.parametrize("fix", [RowMax(), RowMax(beta=7.0)])
def test_the_fix_has_no_bias_at_scores_beyond_its_limit(fix):
    """52 to 56, where e^(r - beta r) is no longer a float32 number, or less than is given to it. A
    limit that does not depend on r brings the whole bias back: its p is 2^-63 in every row."""
    inputs = rows_with_two_maxima(ALIKE, base=50.0)
    for expected, (mean, error) in zip((1, 24), lean("reference_bf16", inputs), strict=True):
        assert abs(mean - expected * 2.0**-9) < 4 * error
    for mean, error in lean(reference(fix, rounded=Rounded.PRODUCTS), inputs):
        assert abs(mean) < 4 * error


@pytest.mark.parametrize(
    ("scores", "beta", "raised"),
    [
        ([3, 3, -np.inf], 2.0, 6.0),
        ([3, 1, 3], 7.0, 21.0),
        ([-3, -4, -3], 2.0, 0.0),
        ([3, 2, 1], 2.0, 3.0),
        ([3, 3 - 0.75e-3, 1], 2.0, 6.0),
        ([3, 3 - 1.25e-3, 1], 2.0, 3.0),
        ([0, 0, -1], 2.0, 0.0),
        ([-np.inf] * 3, 2.0, -np.inf),
        # Quarters of the exponents, 126 ln 2 / 4 = 21.83: two and what is beyond them, less one.
        ([60, 60, 0], 2.0, 60 + 60 - 21.834),
        ([10, 10, 0], 7.0, 10 + 60 - 21.834),
        ([-50, -50, -60], 7.0, -50 + 50 - 21.834),
    ],
)
def test_a_row_max_by_hand(scores, beta, raised):
    """Exact but where the limit comes in, of which five digits are given."""
    s = jnp.asarray(scores, jnp.float32)
    got = float(RowMax(beta=beta).raised(s, jnp.max(s), jnp.bfloat16))
    assert got == raised if abs(raised) in (0, 3, 6, 21, np.inf) else abs(got - raised) < 2e-3


@pytest.mark.parametrize(("beta", "larger"), [(2.0, 1), (8.0, 1), (8.0, 32)])
def test_any_row_max_is_the_same_softmax_in_float64(monkeypatch, beta, larger):
    """Forward and gradients. All keys share the maximum of so large a tolerance; scores 32 times
    as large are beyond the limit. Bounds as for float32, in units of 2^-53, and below 1e-12 of the
    sums of magnitudes where the scores are not enlarged."""
    monkeypatch.setattr(blockwise_attention, "BLOCK", 5)
    units = 2 * float32_units(2, larger, beta) + 2 * (H + T) + T * N
    assert units * 2.0**-53 < 1e-12 * larger
    q, k, v = inputs(2)
    args = [np.asarray(a, np.float64) for a in (larger * q, k, v, cotangent())]
    with jax.enable_x64(True):
        q, k, v, dy = map(jnp.asarray, args)
        fixed = reference(RowMax(beta=beta, tolerance=1e6))
        plain = gradients_of("reference")(q, k, v, jnp.asarray(SEGMENTS), dy)
        got = gradients_of(fixed)(q, k, v, jnp.asarray(SEGMENTS), dy)
        assert all((a != b).any() for a, b in zip(got, plain, strict=True))  # it did something
        sums = [in_numpy(*args[:2], np.abs(args[2]), SEGMENTS)]
        sums += [magnitude for _, magnitude in gradients_in_numpy(*args[:3], SEGMENTS, args[3])]
        for a, b, magnitude in zip(got, plain, sums, strict=True):
            assert (np.abs(a - b) <= 2 * units * 2.0**-53 * magnitude).all()


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_any_row_max_is_the_same_softmax_in_float32(kv_heads):
    """As `test_float32_equals_numpy`, with all keys sharing the maximum."""
    q, k, v = inputs(kv_heads)
    y = attention_of(reference(RowMax(tolerance=1e6)))(q, k, v, SEGMENTS)
    bound = float32_units(kv_heads, beta=2.0) * 2.0**-24 * np.abs(v).max()
    assert np.abs(y - in_numpy(q, k, v, SEGMENTS)).max() <= bound


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("score", [1e4, 50.0, 1e-30, 0.0, -50.0, -1e4])
def test_rows_that_share_one_score_are_means_however_large_it_is(dtype, score):
    """All keys tied, in blocks of 5; padding and whole rows of it as well. Weights of p = e^-44 and
    such are equal, so that they cancel: the output is the mean of values that bfloat16 holds, but
    for the roundings of p, of the rounded products (T of 5 keys: none has more than 3 blocks), of
    o / l and of sums of T float32 terms. Gradients are finite."""
    rng = np.random.default_rng(0)
    root = np.sqrt(H)
    side = np.sqrt(abs(score) * root / H)
    k = jnp.full((B, T, 1, H), side, dtype)
    q = jnp.full((B, T, N, H), np.sign(score) * side, dtype)
    v = jnp.asarray(rng.normal(size=(B, T, 1, H)), dtype)
    segments = np.stack([np.zeros(T, np.int32), SEGMENTS[0]])
    fixed = reference(RowMax(), rounded=Rounded.PRODUCTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise_attention, "BLOCK", 5)
        y, *gradients = gradients_of(fixed)(q, k, v, segments, jnp.ones_like(q))
    zeros = np.zeros_like(q, np.float64)
    expected = in_numpy(zeros, np.zeros_like(k, np.float64), v, segments)
    magnitude = in_numpy(zeros, np.zeros_like(k, np.float64), np.abs(v), segments)
    unit = float(jnp.finfo(dtype).eps) / 2
    # A float16 p of e^-4.9 is normal, its products with small values need not be: 2^-24 / p.
    absolute = 2.0**-24 * np.exp(4.9) if dtype == jnp.float16 else 0.0
    bound = (4 * unit + 2 * T * 2.0**-24) * magnitude + absolute
    assert (np.abs(np.asarray(y, np.float64) - expected) <= bound).all()
    for gradient in gradients:
        assert np.isfinite(np.asarray(gradient, np.float32)).all()


# Memory -------------------------------------------------------------------------------------------


def temporary_bytes(name: str, length: int) -> int:
    """What forward and backward need besides arguments and results, as compiled."""
    q = jax.ShapeDtypeStruct((1, length, 2, H), jnp.float32)
    k = jax.ShapeDtypeStruct((1, length, 1, H), jnp.float32)
    segments = jax.ShapeDtypeStruct((1, length), jnp.int32)
    return (
        gradients_of(name).lower(q, k, k, segments, q).compile().memory_analysis()
    ).temp_size_in_bytes


@pytest.mark.optimized_too
def test_memory_grows_with_the_length_in_the_reference_and_with_its_square_in_xla():
    """Four times the length is 4 times the memory and 16 times: told apart at 8. XLA keeps few or
    many of the T x T arrays at once, but one for each of the two heads at least."""
    reference, xla = (
        [temporary_bytes(name, length) for length in (512, 2048)] for name in ("reference", "xla")
    )
    assert reference[0] < reference[1] < 8 * reference[0] and xla[1] > 8 * xla[0]
    assert reference[1] < 2 * 2048**2 * 4 < xla[1]


# On a GPU -----------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_cudnn_equals_xla_on_rows_of_several_blocks():
    """Documents that end within blocks and between them, heads of 64. Both are within 2 roundings
    of 2^-9 for weights and result, as measured by the weighted sum of |v|; each of the gradients
    within 6, of the sums of magnitudes."""
    rng, length = np.random.default_rng(0), 512
    draw = lambda heads: rng.normal(size=(2, length, heads, 64))  # noqa: E731
    q, k, v, dy = (jnp.asarray(draw(heads), jnp.bfloat16) for heads in (4, 2, 2, 4))
    ends = np.array([[70, 128, 300, 480], [1, 2, 255, 511]])
    segments = 1 + (np.arange(length)[None, :, None] >= ends[:, None]).sum(axis=-1)
    segments = np.where(np.arange(length) >= ends[:, -1:], 0, segments).astype(np.int32)
    magnitude = gradients_in_numpy(q, k, v, segments, dy)
    sums = [in_numpy(q, k, np.abs(np.asarray(v, np.float32)), segments)]
    sums += [total for _, total in magnitude]
    fused, plain = (gradients_of(name)(q, k, v, segments, dy) for name in ("cudnn", "xla"))
    for a, b, total, roundings in zip(fused, plain, sums, (3, 6, 6, 6), strict=True):
        difference = np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64))
        assert (difference <= 2 * roundings * 2.0**-9 * total).all()


# Refusals -----------------------------------------------------------------------------------------


def queries(dtype=jnp.bfloat16, length=64, head_dim=64):
    return jax.ShapeDtypeStruct((2, length, 4, head_dim), dtype)


def test_cudnn_on_a_cpu_says_which_device_this_is(monkeypatch):
    monkeypatch.setattr(hardware, "compute_capability", lambda: None)
    monkeypatch.setattr(hardware, "device_kind", lambda: "cpu")
    q, k, v = (jnp.asarray(a, jnp.bfloat16) for a in inputs(2))
    with pytest.raises(NotImplementedError, match="'cudnn' cannot run here: .*8.0 .*got cpu"):
        dot_product_attention(q, k, v, jnp.asarray(SEGMENTS), implementation="cudnn")


@pytest.mark.parametrize(
    ("capability", "shape", "message"),
    [
        ((7, 5), dict(), "compute capability 8.0 or later, got some GPU"),
        ((9, 0), dict(dtype=jnp.float32), "needs bfloat16 or float16, got float32"),
        ((9, 0), dict(head_dim=60), "multiple of 8 up to 256, got 60"),
        ((9, 0), dict(head_dim=264), "multiple of 8 up to 256, got 264"),
        ((8, 0), dict(head_dim=136), "multiple of 8 up to 128, got 136"),
        ((9, 0), dict(length=63), "even length, got 63"),
    ],
)
def test_cudnn_refuses_with_reason_and_numbers(monkeypatch, capability, shape, message):
    monkeypatch.setattr(hardware, "compute_capability", lambda: capability)
    monkeypatch.setattr(hardware, "device_kind", lambda: "some GPU")
    with pytest.raises(NotImplementedError, match=message):
        choose_attention("cudnn", queries(**shape))


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_cudnn_takes_the_usual_shapes(monkeypatch, capability):
    monkeypatch.setattr(hardware, "compute_capability", lambda: capability)
    for dtype in (jnp.bfloat16, jnp.float16):
        for head_dim in (64, 128):
            chosen = choose_attention("cudnn", queries(dtype, head_dim=head_dim))
            assert chosen is ATTENTIONS["cudnn"]


@pytest.mark.parametrize(
    "changes",
    [
        dict(beta=1.0),
        dict(beta=-2.0),
        dict(beta=np.inf),
        dict(beta=np.nan),
        dict(tolerance=-1e-3),
        dict(tolerance=np.inf),
        dict(tolerance=np.nan),
    ],
)
def test_a_row_max_out_of_range_is_refused_with_its_values(changes):
    ((name, value),) = changes.items()
    with pytest.raises(ValueError, match=f"beta must be above 1, .*{name}={value}"):
        RowMax(**changes)


def test_implementations_are_objects_that_compare_by_value():
    """They are attributes of modules and static arguments: an equal one compiles nothing anew."""
    one, other = reference(RowMax(beta=3.0)), reference(RowMax(beta=3.0))
    assert one is not other and one == other and hash(one) == hash(other)
    assert (
        reference() == ATTENTIONS["reference"] and reference(RowMax()) == ATTENTIONS["stabilized"]
    )
    different = {one, *ATTENTIONS.values(), reference(RowMax(tolerance=0.0))}
    assert len(different) == 2 + len(ATTENTIONS)
    q, k, v = (jnp.asarray(a) for a in inputs(2))
    traces = []

    @functools.partial(jax.jit, static_argnames="implementation")
    def attend(q, implementation):
        traces.append(implementation)
        segments = jnp.asarray(SEGMENTS)
        return dot_product_attention(q, k, v, segments, implementation=implementation)

    named = attend(q, "stabilized")
    np.testing.assert_array_equal(attend(q, reference(RowMax())), named)
    np.testing.assert_array_equal(attend(q, reference(RowMax())), named)
    assert traces == ["stabilized", ATTENTIONS["stabilized"]]
    assert choose_attention(one, queries()) is one
    never = dataclasses.replace(one, refuses=lambda q: "it never runs")
    with pytest.raises(NotImplementedError, match="cannot run here: it never runs"):
        dot_product_attention(q, k, v, jnp.asarray(SEGMENTS), implementation=never)


def run_config(**changes):
    """A small run on one device."""
    config = base.get_config()
    config.model_overrides.update(d_model=32, n_layers=2, n_heads=2, n_kv_heads=2, d_ff=64)
    config.update(seq_len=32, **changes)
    return build(config, jax.devices()[:1]).stages[0]


def test_a_config_names_the_implementation_and_changes_its_row_max():
    names = ("stabilized", "stabilized_bf16", "stabilized_all_bf16")
    for name, rounded in zip(names, Rounded, strict=True):
        assert run_config(attention=name).model.attention == ATTENTIONS[name]
        changed = run_config(attention=name, attention_beta=7.0, attention_tie_tolerance=0.0)
        fix = RowMax(beta=7.0, tolerance=0.0)
        assert changed.model.attention == reference(fix, rounded=rounded)
    tolerance = run_config(attention="stabilized", attention_tie_tolerance=1.0)
    assert tolerance.model.attention == reference(RowMax(tolerance=1.0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(attention="reference", attention_beta=7.0), "attention_beta=7.0 .*got .*'reference'"),
        (dict(attention_tie_tolerance=0.1), "tolerance=0.1 apply to .*'stabilized'.*got .*None"),
        (dict(attention="stabilized", attention_beta=0.5), "beta must be above 1.*beta=0.5"),
        (dict(attention="stabilised"), "unknown attention 'stabilised'.*'stabilized'"),
    ],
)
def test_a_config_that_cannot_be_honored_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        run_config(**changes)


def test_none_is_xla_and_unknown_names_raise_with_the_near_ones():
    assert choose_attention(None, queries()) is ATTENTIONS["xla"]
    with pytest.raises(ValueError, match="unknown attention 'cuddn'.*'cudnn'"):
        choose_attention("cuddn", queries())
    q, k, v = map(jnp.asarray, inputs(2))
    with pytest.raises(ValueError, match="unknown attention 'referense'.*'reference'"):
        dot_product_attention(q, k, v, jnp.asarray(SEGMENTS), implementation="referense")


@pytest.mark.parametrize(
    "version, fastest", [(12_080, "cudnn"), (12_090, "cudnn"), (12_091, "flash"), (13_000, "flash")]
)
def test_flash_is_not_chosen_with_a_ptxas_that_miscompiles_it(monkeypatch, version, fastest):
    monkeypatch.setattr(requirements, "jax_too_old", lambda: None)
    monkeypatch.setattr(hardware, "device", lambda: hardware.Device("gpu", "H200", (9, 0)))
    monkeypatch.setattr(hardware, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(hardware, "cuda_version", lambda: version)
    assert fastest_attention(jax.ShapeDtypeStruct((1, 128, 4, 64), jnp.bfloat16)) == fastest
