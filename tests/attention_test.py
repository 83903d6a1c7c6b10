"""Attention against plain NumPy in float64: causal, within documents, grouped heads.

One suite for all implementations. cuDNN's needs a GPU: it takes part in the tests in bfloat16,
which is what it has.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax import attention, runtime
from fp8jax.attention import ATTENTIONS, choose_attention, dot_product_attention

B, T, N, H = 2, 12, 4, 8
# Documents of unlike lengths, a row of one document, and padding (0) at the end of the first.
SEGMENTS = np.array([[1] * 3 + [2] * 6 + [0] * 3, [1] * 12], np.int32)

# With 5 keys in a block the reference has three blocks of which the last is not full, and some
# queries see nothing of the first.
ON_A_CPU = ["xla", "reference", "reference/5"]
ANYWHERE = [*ON_A_CPU, pytest.param("cudnn", marks=pytest.mark.gpu)]
on_a_cpu = pytest.mark.parametrize("name", ON_A_CPU, indirect=True)
anywhere = pytest.mark.parametrize("name", ANYWHERE, indirect=True)


@pytest.fixture
def name(request, monkeypatch):
    """An implementation; after a slash, how many keys a block of the reference has."""
    name, _, size = request.param.partition("/")
    if size:
        monkeypatch.setattr(attention, "BLOCK", int(size))
    return name


def attention_of(name: str):
    """Traced anew, since `BLOCK` is read then."""
    return jax.jit(functools.partial(dot_product_attention, implementation=name))


def gradients_of(name: str):
    """(q, k, v, segments, dy) -> y, dq, dk, dv."""

    def f(q, k, v, segments, dy):
        attend = functools.partial(dot_product_attention, implementation=name)
        y, vjp = jax.vjp(lambda *args: attend(*args, segments), q, k, v)
        return y, *vjp(dy)

    return jax.jit(f)


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


def float32_units(kv_heads: int, larger: int = 1) -> float:
    """How many units of 2^-24 a weight, computed in float32, may be off by, relatively.

    A score is a sum of H products, off by H + 1 roundings of its magnitude S at most; its
    exponential is off by as much, relatively, and by 2 more (exp, subtraction of the maximum).
    Numerator and denominator, each a sum of T such terms: 2 * ((H + 1) * S + 2 * S + T + 4).
    The blockwise sums round twice more for each block: within the T."""
    return 2 * ((H + 3) * larger * largest_score(kv_heads) + T + 4)


# Forward ------------------------------------------------------------------------------------------


@on_a_cpu
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_float32_equals_numpy(name, kv_heads):
    """Relative to the largest |v|."""
    q, k, v = inputs(kv_heads)
    y = attention_of(name)(q, k, v, SEGMENTS)
    assert y.dtype == jnp.float32 and y.shape == q.shape
    bound = float32_units(kv_heads) * 2.0**-24 * np.abs(v).max()
    assert np.abs(y - in_numpy(q, k, v, SEGMENTS)).max() <= bound


@anywhere
def test_bfloat16_in_and_out_and_scores_in_float32(name):
    """The inputs are bfloat16 numbers. Rounded, each by 2^-8 relative at most, are the weights
    and the result; both errors are under 2^-8 times the weighted sum of |v|. Scores rounded to
    bfloat16 break this bound, which the last line shows."""
    q, k, v = (jnp.asarray(a, jnp.bfloat16) for a in inputs(2))
    q = 8 * q  # scores of 30 and more
    y = attention_of(name)(q, k, v, SEGMENTS)
    assert y.dtype == jnp.bfloat16
    exact = in_numpy(q, k, v, SEGMENTS)
    magnitude = in_numpy(q, k, np.abs(np.asarray(v, np.float32)), SEGMENTS)
    in_float32 = float32_units(2, larger=8) * 2.0**-24
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
    assert np.abs(difference).max() <= float32_units(2) * 2.0**-24 * np.abs(v).max()


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
        pytest.param("cudnn", jnp.bfloat16, marks=pytest.mark.gpu),
    ],
    indirect=["name"],
)
def test_padding_is_finite_forward_and_backward(name, dtype):
    """A whole row of padding, and padding at an end: its values are not used, but a NaN among
    them would reach the gradients of all. (cuDNN takes no float32.)"""
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


def gradients_in_numpy(q, k, v, segments, dy):
    """[(gradient, what its terms' magnitudes sum to)] for q, k and v, in float64."""
    q, k, v, dy = (np.asarray(a, np.float64) for a in (q, k, v, dy))
    group, length = q.shape[2] // k.shape[2], q.shape[1]
    k, v = (np.repeat(a, group, axis=2) for a in (k, v))
    seen = segments[:, None, :, None] == segments[:, None, None, :]
    seen = seen & np.tri(length, dtype=bool)
    s = np.where(seen, np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[3]), -np.inf)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)

    def backward(q, k, v, dy, sign):
        dp = np.einsum("btnh,bsnh->bnts", dy, v)
        delta = np.sum(p * dp, axis=-1, keepdims=True)
        ds = p * (dp - sign * delta) / np.sqrt(q.shape[3])
        ungroup = lambda a: a.reshape(*a.shape[:2], -1, group, a.shape[3]).sum(axis=3)  # noqa: E731
        dq = np.einsum("bnts,bsnh->btnh", ds, k)
        dk = ungroup(np.einsum("bnts,btnh->bsnh", ds, q))
        return dq, dk, ungroup(np.einsum("bnts,btnh->bsnh", p, dy))

    magnitudes = backward(*map(np.abs, (q, k, v, dy)), sign=-1)
    return list(zip(backward(q, k, v, dy, sign=1), magnitudes, strict=True))


def cotangent(seed=7) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(B, T, N, H)).astype(np.float32)


@on_a_cpu
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_float32_gradients_equal_numpy(name, kv_heads):
    """ds holds a weight twice (once in delta), sums of H and of T terms, and then there is one of
    T * N terms: 2 * units + 2 * (H + T) + T * N roundings of the sums of magnitudes."""
    args = (*inputs(kv_heads), SEGMENTS, cotangent())
    units = 2 * float32_units(kv_heads) + 2 * (H + T) + T * N
    _, *got = gradients_of(name)(*args)
    for gradient, (exact, magnitude) in zip(got, gradients_in_numpy(*args), strict=True):
        assert (np.abs(gradient - exact) <= units * 2.0**-24 * magnitude).all()


@anywhere
def test_bfloat16_gradients_equal_numpy(name):
    """Rounded to bfloat16, by 2^-9 each, are the weights, dp, the output in delta, ds and the
    result, if at all: 5 roundings, and one more for what they do to each other."""
    q, k, v, dy = (jnp.asarray(a, jnp.bfloat16) for a in (*inputs(2), cotangent()))
    units = 2 * float32_units(2) + 2 * (H + T) + T * N
    bound = 6 * 2.0**-9 + units * 2.0**-24
    _, *got = gradients_of(name)(q, k, v, SEGMENTS, dy)
    for gradient, (exact, magnitude) in zip(
        got, gradients_in_numpy(q, k, v, SEGMENTS, dy), strict=True
    ):
        assert gradient.dtype == jnp.bfloat16
        assert (np.abs(np.asarray(gradient, np.float64) - exact) <= bound * magnitude).all()


@pytest.mark.parametrize("block", [1, 4, 5, 12, 128])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_the_reference_in_float64_has_the_gradients_of_the_plain_formula(
    monkeypatch, block, kv_heads
):
    """Blocks of one key, of a divisor of the length and not, of all keys and more. The bound of
    float32 has fewer than 1500 units, of 2^-53 here: 2e-13 of the sums of magnitudes."""
    monkeypatch.setattr(attention, "BLOCK", block)
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


# Memory -------------------------------------------------------------------------------------------


def temporary_bytes(name: str, length: int) -> int:
    """What forward and backward need besides arguments and results, as compiled."""
    q = jax.ShapeDtypeStruct((1, length, 2, H), jnp.float32)
    k = jax.ShapeDtypeStruct((1, length, 1, H), jnp.float32)
    segments = jax.ShapeDtypeStruct((1, length), jnp.int32)
    return (
        gradients_of(name).lower(q, k, k, segments, q).compile().memory_analysis()
    ).temp_size_in_bytes


def test_memory_grows_with_the_length_in_the_reference_and_with_its_square_in_xla():
    """Four times the length is 4 times the memory and 16 times: told apart at 8. XLA keeps few or
    many of the T x T arrays at once, but one for each of the two heads at least."""
    reference, xla = (
        [temporary_bytes(name, length) for length in (512, 1024, 2048)]
        for name in ("reference", "xla")
    )
    assert reference[2] < 8 * reference[0] and xla[2] > 8 * xla[0]
    assert sorted(reference) == reference and sorted(xla) == xla
    assert reference[2] < 2 * 2048**2 * 4 < xla[2]


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
    monkeypatch.setattr(runtime, "compute_capability", lambda: None)
    monkeypatch.setattr(runtime, "device_kind", lambda: "cpu")
    q, k, v = (jnp.asarray(a, jnp.bfloat16) for a in inputs(2))
    with pytest.raises(NotImplementedError, match="'cudnn' cannot run here: .*8.0 .*got cpu"):
        dot_product_attention(q, k, v, jnp.asarray(SEGMENTS), implementation="cudnn")


@pytest.mark.parametrize(
    ("capability", "shape", "message"),
    [
        ((7, 5), dict(), "compute capability 8.0 or later, got some GPU"),
        ((9, 0), dict(dtype=jnp.float32), "takes bfloat16 and float16, got float32"),
        ((9, 0), dict(head_dim=60), "multiple of 8 up to 256, got 60"),
        ((9, 0), dict(head_dim=264), "multiple of 8 up to 256, got 264"),
        ((8, 0), dict(head_dim=136), "multiple of 8 up to 128, got 136"),
        ((9, 0), dict(length=63), "even length, got 63"),
    ],
)
def test_cudnn_refuses_with_reason_and_numbers(monkeypatch, capability, shape, message):
    monkeypatch.setattr(runtime, "compute_capability", lambda: capability)
    monkeypatch.setattr(runtime, "device_kind", lambda: "some GPU")
    with pytest.raises(NotImplementedError, match=message):
        choose_attention("cudnn", queries(**shape))


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_cudnn_takes_the_usual_shapes(monkeypatch, capability):
    monkeypatch.setattr(runtime, "compute_capability", lambda: capability)
    for dtype in (jnp.bfloat16, jnp.float16):
        for head_dim in (64, 128):
            chosen = choose_attention("cudnn", queries(dtype, head_dim=head_dim))
            assert chosen is ATTENTIONS["cudnn"]


def test_none_is_xla_and_unknown_names_raise_with_the_near_ones():
    assert choose_attention(None, queries()) is ATTENTIONS["xla"]
    with pytest.raises(ValueError, match="unknown attention 'cuddn'.*'cudnn'"):
        choose_attention("cuddn", queries())
    q, k, v = map(jnp.asarray, inputs(2))
    with pytest.raises(ValueError, match="unknown attention 'referense'.*'reference'"):
        dot_product_attention(q, k, v, jnp.asarray(SEGMENTS), implementation="referense")
