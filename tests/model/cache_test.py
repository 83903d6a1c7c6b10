"""The cache: what is written where, and attention against it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.model.attention import dot_product_attention
from fp8jax.model.cache import KVCache, attend_cached, empty_cache, written
from fp8jax.model.models import MODELS
from fp8jax.numerics.formats import cast
from fp8jax.numerics.quantization import quantize
from tests.support import arrays

B, L, S, N, K, H = 2, 3, 8, 4, 2, 16
CONFIG = dataclasses.replace(MODELS["llama_tiny"], n_layers=1, n_kv_heads=K, head_dim=H)


def layer(kind: str, fresh: bool) -> KVCache:
    (cache,) = empty_cache(CONFIG, B, S, kind, unrolled=True)
    return dataclasses.replace(cache, fresh=fresh)


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(arrays.normal(shape, seed))


@pytest.mark.parametrize("kind", ["bf16", "fp32", "fp8"])
def test_tokens_are_written_to_their_slots(kind):
    k, v = normal(0, B, L, K, H), normal(1, B, L, K, H)
    positions = jnp.array([[2, 3, 4], [6, 7, 8]])  # the last one lies behind the last slot
    real = jnp.array([[True, True, False], [True, True, True]])
    got = written(layer(kind, fresh=False), k, v, positions, real)
    assert not got.fresh
    for given, stored, scales in (
        (k, got.keys, got.key_scales), (v, got.values, got.value_scales)
    ):  # fmt: skip
        if kind == "fp8":
            q = quantize(given, "e4m3", "row")
            given, given_scales = q.values, q.scale[..., 0]
        for row, token, slot in ((0, 0, 2), (0, 1, 3), (1, 0, 6), (1, 1, 7)):
            expected = given[row, token].astype(stored.dtype)
            np.testing.assert_array_equal(stored[row, :, slot], expected)
            if kind == "fp8":
                np.testing.assert_array_equal(scales[row, :, slot], given_scales[row, token])
        untouched = [(0, slot) for slot in (0, 1, 4, 5, 6, 7)] + [(1, slot) for slot in range(6)]
        for row, slot in untouched:
            assert not np.asarray(stored[row, :, slot].astype(jnp.float32)).any()


def test_attention_to_the_cache_is_attention():
    """Float32, grouped heads; rows of different lengths, and a slot with numbers nobody may see."""
    q, k, v = normal(0, B, S, N, H), normal(1, B, S, K, H), normal(2, B, S, K, H)
    every = jnp.broadcast_to(jnp.arange(S), (B, S))
    whole = dot_product_attention(q, k, v, jnp.ones((B, S), jnp.int32), implementation="xla")
    cache = written(layer("fp32", fresh=True), k, v, every, every >= 0)
    at = jnp.array([[1, 2], [5, 6]])
    some_q = jnp.take_along_axis(q, at[..., None, None], axis=1)
    expected = jnp.take_along_axis(whole, at[..., None, None], axis=1)
    # (c): sums of at most 16 products in float32, in another order.
    np.testing.assert_allclose(attend_cached(some_q, cache, at), expected, atol=2e-6)


def test_scales_of_the_cache_are_those_of_the_codes():
    """Powers of two as scales of whole numbers: a cache of the products has no other rounding. (c):
    float32 sums in another order."""
    codes = jax.random.randint(jax.random.key(0), (2, B, K, S, H), -8, 9).astype(jnp.float32)
    scales = 2.0 ** jax.random.randint(jax.random.key(1), (2, B, K, S), -3, 1)
    narrow = KVCache(
        keys=cast(codes[0], "e4m3"), values=cast(codes[1], "e4m3"), key_scales=scales[0],
        value_scales=scales[1],
    )  # fmt: skip
    wide = KVCache(keys=codes[0] * scales[0][..., None], values=codes[1] * scales[1][..., None])
    q = normal(3, B, L, N, H)
    at = jnp.array([[2, 3, 4], [5, 6, 7]])
    np.testing.assert_allclose(
        attend_cached(q, narrow, at), attend_cached(q, wide, at), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_an_fp8_cache_is_off_by_the_rounding_of_e4m3(dtype):
    """(c): codes of E4M3 are off by at most 2^-4 relative (and 2^-10 of a head's amax where they
    are subnormal). A score s = q k / 4 moves by d = 2^-4 |q| |k| / 4 at most, a weight by the
    factor e^(2 d), and the sum of values by another 2^-4; bfloat16 adds less than 2^-6."""
    q, k, v = (normal(i, B, S, heads, H).astype(dtype) for i, heads in enumerate((N, K, K)))
    every = jnp.broadcast_to(jnp.arange(S), (B, S))
    caches = [
        dataclasses.replace(
            written(layer(kind, fresh=True), k, v, every, every >= 0), fresh=False
        )
        for kind in ("fp32", "fp8")
    ]  # fmt: skip
    exact, fp8 = (np.asarray(attend_cached(q, c, every), np.float64) for c in caches)
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
