"""Flash attention over several tiles and documents, in Pallas' interpreter, on a mesh, on a GPU.

lm/model/attention_test.py tests it with all other implementations, on rows of one tile.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from fp8jax.lm.flash import backward, forward
from fp8jax.lm.flash.attention import flash_attention, visible_bounds
from tests.support.attention import forward_in_numpy, gradients_in_numpy
from tests.support.interpreter import interpreting, lower, needs_pallas

ANYWHERE = pytest.mark.parametrize(
    "where",
    [
        pytest.param("interpreter", marks=needs_pallas),
        pytest.param("gpu", marks=pytest.mark.gpu),
    ],
)
# A document that ends within a tile, one of a single token, one that begins at a tile's first
# position, one over two tiles, and padding. Rows of 320 positions end within the third tile.
LENGTHS = (100, 1, 27, 150, 42)
DOCUMENTS = np.repeat(np.array([1, 2, 3, 4, 0]), LENGTHS)


def attend_and_differentiate(q, k, v, segments, dy, window=None):
    y, vjp = jax.vjp(lambda *args: flash_attention(*args, segments, window), q, k, v)
    return y, *vjp(dy)


def run(where, *args):
    if where == "gpu":
        return jax.jit(attend_and_differentiate)(*args)
    with interpreting():
        return jax.block_until_ready(attend_and_differentiate(*args))


def inputs(heads, key_heads, head_dim, segments, seed=0):
    rng = np.random.default_rng(seed)
    sizes = (heads, key_heads, key_heads, heads)
    drawn = (rng.normal(size=(*segments.shape, n, head_dim)) for n in sizes)
    q, k, v, dy = (jnp.asarray(a, jnp.bfloat16) for a in drawn)
    return q, k, v, jnp.asarray(segments, jnp.int32), dy


def float32_units(q, k, length) -> float:
    """As in attention_test.py, and for the hardware's exponential (2^-22 + |x| 2^-24).

    A weight is off by the error of its score, H + 2 roundings of at most the largest score, by that
    of the exponential, and by those of the sum of weights: twice, for numerator and denominator.
    """
    norms = [np.linalg.norm(np.asarray(a, np.float64), axis=-1).max() for a in (q, k)]
    largest = norms[0] * norms[1] / np.sqrt(q.shape[3])
    return 2 * ((q.shape[3] + 3 + 2) * largest + length + 8)


@ANYWHERE
@pytest.mark.parametrize(
    ("heads", "key_heads", "head_dim", "window"),
    [
        (2, 1, 128, None),
        (2, 2, 40, None),
        (2, 1, 64, 70),  # ends within a block
        pytest.param(2, 1, 64, 1, marks=pytest.mark.full),
        pytest.param(2, 1, 64, 128, marks=pytest.mark.full),  # at the border of one
    ],
    ids=str,
)
def test_documents_over_several_tiles_equal_numpy(where, heads, key_heads, head_dim, window):
    """Roundings to bfloat16, 2^-9 each: for y of the weights and of the result, and one for what
    they do to each other; for gradients as in attention_test.py, six."""
    segments = np.stack([DOCUMENTS, np.ones_like(DOCUMENTS)])
    q, k, v, ids, dy = inputs(heads, key_heads, head_dim, segments)
    length = segments.shape[1]
    units = float32_units(q, k, length)
    limits = () if window is None else (jnp.int32(window),)
    y, *gradients = run(where, q, k, v, ids, dy, *limits)
    exact, magnitude = forward_in_numpy(q, k, v, ids, window)
    bound = 3 * 2.0**-9 + units * 2.0**-24
    assert (np.abs(np.asarray(y, np.float64) - exact) <= bound * magnitude).all()
    terms = 2 * units + 2 * (head_dim + length) + length * heads
    bound = 6 * 2.0**-9 + terms * 2.0**-24
    expected = gradients_in_numpy(q, k, v, np.asarray(ids), dy, window)
    for got, (exact, magnitude) in zip(gradients, expected, strict=True):
        assert got.dtype == jnp.bfloat16
        assert (np.abs(np.asarray(got, np.float64) - exact) <= bound * magnitude).all()


@ANYWHERE
def test_blocks_of_other_documents_are_not_read(where):
    """NaN in a document that shares no block with the next one reaches none of its results.

    Blocks have 128 keys in the forward, and 64 keys or queries in the backward."""
    segments = np.repeat(np.array([1, 2]), (128, 192))[None]
    args = inputs(2, 1, 64, segments)
    expected = run(where, *args)
    first = jnp.arange(320)[None, :, None, None] < 128
    q, k, v, ids, dy = (
        a if a.ndim == 2 else jnp.where(first, jnp.nan, a).astype(a.dtype) for a in args
    )
    for got, want in zip(run(where, q, k, v, ids, dy), expected, strict=True):
        np.testing.assert_array_equal(got[:, 128:], want[:, 128:])
        assert np.isnan(np.asarray(got[:, :128], np.float32)).all()


@pytest.mark.gpu
def test_the_same_bits_twice():
    """Long rows, so that many thread blocks run at a time."""
    segments = np.sort(np.random.default_rng(1).integers(1, 9, (2, 4096)), axis=1)
    args = inputs(16, 4, 128, segments)
    once, again = run("gpu", *args), run("gpu", *args)
    for a, b in zip(once, again, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@needs_pallas
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_lowers_for_a_gpu(dtype, head_dim):
    """The interpreter takes bfloat16 only; the compiler's first half checks shapes and layouts."""
    q, k = (jax.ShapeDtypeStruct((2, 384, n, head_dim), dtype) for n in (4, 2))
    text = lower(attend_and_differentiate, q, k, k, jax.ShapeDtypeStruct((2, 384), jnp.int32), q)
    assert text.count("mosaic_gpu") >= 3


def test_bounds_of_documents_by_hand():
    segments = jnp.asarray([[1, 1, 2, 0, 0], [3, 1, 1, 1, 3]])
    begin, end = visible_bounds(segments)
    np.testing.assert_array_equal(begin, [[0, 0, 2, 3, 3], [0, 1, 1, 1, 4]])
    np.testing.assert_array_equal(end, [[2, 2, 3, 5, 5], [1, 4, 4, 4, 5]])
    begin, end = visible_bounds(segments, 2)
    np.testing.assert_array_equal(begin, [[0, 0, 2, 3, 3], [0, 1, 1, 2, 4]])
    np.testing.assert_array_equal(end, [[2, 2, 3, 5, 5], [1, 3, 4, 4, 5]])


# On a mesh ----------------------------------------------------------------------------------------
#
# In the kernels' place, as in partition_test.py: functions of all their operands that add small
# integers, so that every result is exact.


def _to_queries(x_BTKH, q):
    return jnp.repeat(x_BTKH, q.shape[2] // x_BTKH.shape[2], axis=2)


def _to_keys(x_BTNH, k):
    return x_BTNH.reshape(*x_BTNH.shape[:2], k.shape[2], -1, x_BTNH.shape[3]).sum(axis=3)


def _by_query(x_BTNH):
    return x_BTNH.astype(jnp.float32).sum(axis=3).transpose(0, 2, 1)


def _to_heads(x_BNT, dtype):
    return x_BNT.transpose(0, 2, 1)[..., None].astype(dtype)


def _forward(q, k, v, begin_BT, scale):
    y = q + 2 * _to_queries(k, q) - _to_queries(v, q) + begin_BT[:, :, None, None].astype(q.dtype)
    return y, _by_query(q)


def _gradient_q(q, k, v, y, dy, lse, begin_BT, scale):
    dq = q - y + dy + _to_queries(k + v, q) + _to_heads(lse, q.dtype) % 4
    return dq + begin_BT[:, :, None, None].astype(q.dtype), _by_query(dy)


def _gradient_kv(q, k, v, dy, lse, delta, end_BT, scale):
    both = _to_keys(_to_heads(lse - delta, q.dtype) % 4 + q, k)
    return both + k, _to_keys(dy, k) - v + end_BT[:, :, None, None].astype(q.dtype)


def integers(heads, key_heads, segments):
    q, k, v, ids, dy = inputs(heads, key_heads, 64, segments)
    return *(jnp.round(2 * x) for x in (q, k, v)), ids, jnp.round(2 * dy)


@pytest.fixture
def plain(monkeypatch):
    monkeypatch.setattr(forward, "forward", _forward)
    monkeypatch.setattr(backward, "gradient_q", _gradient_q)
    monkeypatch.setattr(backward, "gradient_kv", _gradient_kv)


@pytest.mark.parametrize(("rows", "heads"), [("a", "b"), (("a", "b"), None), (None, "a")], ids=str)
@pytest.mark.usefixtures("plain")
def test_rows_and_heads_are_sharded(rows, heads):
    """Each device attends to its rows and heads: no bit differs, and nothing is communicated."""
    segments = np.tile(np.repeat([1, 2], (50, 78)), (4, 1))
    args = integers(8, 4, segments)
    expected = jax.jit(attend_and_differentiate)(*args)
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=auto, devices=jax.devices()[:4])
    wide, narrow = P(rows, None, heads), P(rows)
    specs = [narrow if a.ndim == 2 else wide for a in args]
    with jax.set_mesh(mesh):
        given = [jax.device_put(a, s) for a, s in zip(args, specs, strict=True)]
        compiled = jax.jit(attend_and_differentiate).lower(*given).compile()
        got = compiled(*given)
    for a, b in zip(got, expected, strict=True):
        assert a.sharding.spec[0] == rows
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    text = compiled.as_text()
    assert not [word for word in ("all-gather", "all-reduce", "all-to-all") if f" {word}(" in text]


@pytest.mark.usefixtures("plain")
def test_heads_that_do_not_divide_are_gathered():
    """Three key heads on two devices."""
    args = integers(6, 3, np.ones((2, 128), np.int64))
    expected = jax.jit(attend_and_differentiate)(*args)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("a",), axis_types=auto, devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        q = jax.device_put(args[0], P(None, None, "a"))
        got = jax.jit(attend_and_differentiate)(q, *args[1:])
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
