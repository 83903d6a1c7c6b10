"""The cache: what is written where, and attention against it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fp8jax.lm.model.attention import dot_product_attention
from fp8jax.lm.model.cache import KVCache, attend_cached, empty_cache, written
from fp8jax.lm.model.models import MODELS
from fp8jax.numerics.quantization import quantize
from tests.support import arrays

B, L, S, N, K, H = 2, 3, 8, 4, 2, 16
CONFIG = dataclasses.replace(MODELS["llama_tiny"], n_layers=1, n_kv_heads=K, head_dim=H)


# Compiled whole: operation by operation, each one is compiled for each shape.
write, attend = jax.jit(written), jax.jit(attend_cached)


def layer(kind: str, fresh: bool) -> KVCache:
    (cache,) = empty_cache(CONFIG, B, S, kind, unrolled=True)
    return dataclasses.replace(cache, fresh=fresh)


def normal(seed: int, *shape: int) -> np.ndarray:
    return arrays.normal(shape, seed)


@pytest.mark.parametrize("kind", ["bf16", "fp32", "fp8"])
def test_tokens_are_written_to_their_slots(kind):
    k, v = normal(0, B, L, K, H), normal(1, B, L, K, H)
    positions = np.array([[2, 3, 4], [6, 7, 8]])  # the last one lies behind the last slot
    real = np.array([[True, True, False], [True, True, True]])
    got = jax.device_get(write(layer(kind, fresh=False), k, v, positions, real))
    quantized = jax.jit(lambda x: quantize(x, "e4m3", "row"))
    assert not got.fresh
    for given, stored, scales in ((k, got.keys, got.key_scales), (v, got.values, got.value_scales)):
        if kind == "fp8":
            q = jax.device_get(quantized(given))
            given, given_scales = q.values, q.scale[..., 0]
        for row, token, slot in ((0, 0, 2), (0, 1, 3), (1, 0, 6), (1, 1, 7)):
            expected = given[row, token].astype(stored.dtype)
            np.testing.assert_array_equal(stored[row, :, slot], expected)
            if kind == "fp8":
                np.testing.assert_array_equal(scales[row, :, slot], given_scales[row, token])
        untouched = [(0, slot) for slot in (0, 1, 4, 5, 6, 7)] + [(1, slot) for slot in range(6)]
        for row, slot in untouched:
            assert not stored[row, :, slot].astype(np.float32).any()


def test_attention_to_the_cache_is_attention():
    """Float32, grouped heads; rows of different lengths, and a slot with numbers nobody may see."""
    q, k, v = normal(0, B, S, N, H), normal(1, B, S, K, H), normal(2, B, S, K, H)
    every = np.broadcast_to(np.arange(S), (B, S))
    attention = jax.jit(functools.partial(dot_product_attention, implementation="xla"))
    whole = np.asarray(attention(q, k, v, np.ones((B, S), np.int32)))
    cache = write(layer("fp32", fresh=True), k, v, every, every >= 0)
    at = np.array([[1, 2], [5, 6]])
    some_q = np.take_along_axis(q, at[..., None, None], axis=1)
    expected = np.take_along_axis(whole, at[..., None, None], axis=1)
    # (c): sums of at most 16 products in float32, in another order.
    np.testing.assert_allclose(attend(some_q, cache, at), expected, atol=2e-6)


@pytest.mark.parametrize("window", [1, 3, S])
def test_a_window_in_the_cache_is_a_mask_in_numpy(window):
    """Several queries at once, as in a chunk of a prompt; (c) as above."""
    q, k, v = normal(0, B, L, N, H), normal(1, B, S, K, H), normal(2, B, S, K, H)
    every = np.broadcast_to(np.arange(S), (B, S))
    cache = write(layer("fp32", fresh=True), k, v, every, every >= 0)
    at = np.array([[1, 2, 3], [5, 6, 7]])
    slots = np.arange(S)
    seen = (slots <= at[..., None]) & (slots > at[..., None] - window)
    wide_k, wide_v = (np.repeat(a, N // K, axis=2).astype(np.float64) for a in (k, v))
    scores = np.einsum("blnh,bsnh->bnls", q.astype(np.float64), wide_k) / H**0.5
    p = np.exp(np.where(seen[:, None], scores, -np.inf))
    expected = np.einsum("bnls,bsnh->blnh", p / p.sum(axis=-1, keepdims=True), wide_v)
    np.testing.assert_allclose(attend(q, cache, at, jnp.int32(window)), expected, atol=2e-6)


def test_scales_of_the_cache_are_those_of_the_codes():
    """Powers of two as scales of whole numbers: a cache of the products has no other rounding. (c):
    float32 sums in another order."""
    rng = np.random.default_rng(0)
    codes = rng.integers(-8, 9, (2, B, K, S, H)).astype(np.float32)
    scales = np.exp2(rng.integers(-3, 1, (2, B, K, S)), dtype=np.float32)
    keys, values = codes.astype(ml_dtypes.float8_e4m3fn)
    narrow = KVCache(keys=keys, values=values, key_scales=scales[0], value_scales=scales[1])
    wide = KVCache(keys=codes[0] * scales[0][..., None], values=codes[1] * scales[1][..., None])
    q = normal(3, B, L, N, H)
    at = np.array([[2, 3, 4], [5, 6, 7]])
    np.testing.assert_allclose(attend(q, narrow, at), attend(q, wide, at), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_an_fp8_cache_is_off_by_the_rounding_of_e4m3(dtype):
    """(c): codes of E4M3 are off by at most 2^-4 relative (and 2^-10 of a head's amax where they
    are subnormal). A score s = q k / 4 moves by d = 2^-4 |q| |k| / 4 at most, a weight by the
    factor e^(2 d), and the sum of values by another 2^-4; bfloat16 adds less than 2^-6."""
    q, k, v = (normal(i, B, S, heads, H).astype(dtype) for i, heads in enumerate((N, K, K)))
    every = np.broadcast_to(np.arange(S), (B, S))
    caches = [
        dataclasses.replace(write(layer(kind, fresh=True), k, v, every, every >= 0), fresh=False)
        for kind in ("fp32", "fp8")
    ]
    exact, fp8 = (np.asarray(attend(q, c, every), np.float64) for c in caches)
    amaxes = [np.abs(np.asarray(x, np.float64)).max() for x in (q, k, v)]
    d = 2**-4 * H * amaxes[0] * amaxes[1] / H**0.5
    bound = (np.exp(2 * d) * (1 + 2**-4 + 2**-6) - 1) * amaxes[2]
    error = np.abs(fp8 - exact)
    assert 1e-4 < error.max() < bound
    # And the mean, of which no bound is needed to see that scales and heads are where they belong.
    assert error.mean() < 0.05 * np.abs(exact).mean() + 0.02


def test_the_names_of_caches():
    with pytest.raises(ValueError, match="unknown KV cache 'int4'"):
        empty_cache(CONFIG, B, S, "int4")
    with pytest.raises(ValueError, match="learned_positions=1024"):
        empty_cache(MODELS["gpt2_tiny"], B, 2048)
