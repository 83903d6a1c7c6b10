"""The KV cache: keys and values of the tokens so far, and attention of new queries against them.

Legend: B rows, L new tokens, S slots of a row, N query heads, K key and value heads, G query heads
that share a key head, H head size.

A token's position in its row is its slot. So a query at position t sees the slots 0 to t, whatever
other rows hold, and slots that hold nothing yet are never seen.

Slots lie next to each other for each head, [B, K, S, H], since attention multiplies one such matrix
for each row and key head: GPUs would first transpose the whole cache from any other order.

FP8 caches hold E4M3 codes and one float32 scale for each token and head, as `quantize` gives them.
The scale is constant along H, so it multiplies the score of a key, and the weight of a value.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from fp8jax.device import hardware
from fp8jax.lm.mesh import constrain
from fp8jax.lm.model.config import ModelConfig
from fp8jax.lookup import lookup
from fp8jax.numerics.formats import FORMATS
from fp8jax.numerics.quantization import quantize_unchecked
from fp8jax.numerics.tiles import ROW

_CODES = FORMATS["e4m3"]

# Name -> dtype of keys and values; those of 8 bits have scales.
CACHES: dict[str, Any] = {"bf16": jnp.bfloat16, "fp32": jnp.float32, "fp8": _CODES.dtype}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVCache:
    """The keys and values of one layer; with a leading axis, of all layers.

    Attributes:
      keys, values: [B, K, S, H] in a dtype of `CACHES`.
      key_scales, value_scales: float32 [B, K, S]; None for dtypes that need none.
      fresh: whether all slots are empty. Static: the first tokens of a row then attend to each
        other by an attention of training, and their rounded copies are read later only.
    """

    keys: Any  # arrays, or abstract ones
    values: Any
    key_scales: Any = None
    value_scales: Any = None
    fresh: bool = dataclasses.field(default=False, metadata={"static": True})


Caches = KVCache | tuple[KVCache, ...]  # of all layers: one stack, or one for each layer


def empty_cache(
    config: ModelConfig, rows: int, slots: int, kind: str = "bf16", *, unrolled: bool = False
) -> Caches:
    """Returns the fresh cache of a model: a stack of all layers, or a tuple of layers.

    `Transformer` scans over a stack, and each step then copies it as a whole. It runs the layers of
    a tuple one after the other, in place, which takes longer to compile.

    Args:
      rows, slots: B and S.
      kind: a key of `CACHES`.
      unrolled: whether to return a tuple.

    Raises:
      ValueError: the kind is unknown, or there are fewer learned positions than slots.
    """
    dtype = lookup("KV cache", kind, CACHES)
    config.check_length(slots)
    shape = (rows, config.n_kv_heads, slots, config.head_dim)

    def zeros(*leading: int) -> KVCache:
        codes = [jnp.zeros((*leading, *shape), dtype) for _ in range(2)]
        scaled = dtype == _CODES.dtype
        scales = [jnp.ones((*leading, *shape[:-1]), jnp.float32) if scaled else None] * 2
        return KVCache(
            keys=codes[0], values=codes[1], key_scales=scales[0], value_scales=scales[1], fresh=True
        )

    if unrolled:
        return tuple(zeros() for _ in range(config.n_layers))
    return zeros(config.n_layers)


def slots_of(cache: Caches) -> int:
    """Returns S, the slots of each row."""
    return (cache[0] if isinstance(cache, tuple) else cache).keys.shape[-2]


def written(
    cache: KVCache,
    k_BLKH: Float[Array, "B L K H"],
    v_BLKH: Float[Array, "B L K H"],
    positions_BL: Int[Array, "B L"],
    real_BL: Bool[Array, "B L"],
) -> KVCache:
    """Returns one layer's cache with new tokens in the slots of their positions.

    Args:
      positions_BL: a fresh cache takes 0 to L - 1 in each row.
      real_BL: tokens that are not real (padding) are not written; a fresh cache takes them, too,
        since no query sees them before the row's next tokens have replaced them.
    """
    slots = cache.keys.shape[-2]
    slots_BL = jnp.where(real_BL, positions_BL, slots)  # behind the last slot: dropped
    rows_B1 = jnp.arange(len(slots_BL))[:, None]

    def put(old: Array, new_BLK: Array) -> Array:
        if cache.fresh:
            new = new_BLK.swapaxes(1, 2).astype(old.dtype)
            new = lax.dynamic_update_slice(old, new, (0,) * old.ndim)
        else:
            new = old.at[rows_B1, :, slots_BL].set(
                new_BLK.astype(old.dtype), mode="drop", unique_indices=True
            )
        return constrain(new, "batch", "kv_heads", "length", *[None] * (new.ndim - 3))

    k, key_scale_BLK = _encoded(k_BLKH, cache)
    v, value_scale_BLK = _encoded(v_BLKH, cache)
    keys, values = put(cache.keys, k), put(cache.values, v)
    if cache.key_scales is None or cache.value_scales is None:
        return KVCache(keys=keys, values=values)
    return KVCache(
        keys=keys,
        values=values,
        key_scales=put(cache.key_scales, key_scale_BLK),
        value_scales=put(cache.value_scales, value_scale_BLK),
    )


def _encoded(x_BLKH: Array, cache: KVCache) -> tuple[Array, Any]:
    """Returns x as the cache stores it, and its scales [B, L, K], None without."""
    if cache.key_scales is None:
        return x_BLKH, None
    q = quantize_unchecked(x_BLKH, _CODES, ROW)
    # Without the barrier, XLA may skip the rounding where it sees that the codes are widened again.
    return lax.optimization_barrier(q.values), q.scale[..., 0]


def attend_cached(
    q_BLNH: Float[Array, "B L N H"],
    cache: KVCache,
    positions_BL: Int[Array, "B L"],
    window: Any = None,
) -> Float[Array, "B L N H"]:
    """Returns attention of the queries to the slots up to their own positions, in q's dtype.

    With a window, to the last `window` of these slots only.

    Scores and softmax are float32; keys and values are not repeated for the heads that share them.
    The cache already holds the queries' own tokens.
    """
    batch, length, heads, head_dim = q_BLNH.shape
    kv_heads, slots = cache.keys.shape[1:3]
    dtype = q_BLNH.dtype
    q_BLKGH = q_BLNH.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
    s_BKGLS = _products("blkgh,bksh->bkgls", q_BLKGH, cache.keys.astype(dtype)) * head_dim**-0.5
    if cache.key_scales is not None:
        s_BKGLS *= cache.key_scales[:, :, None, None, :]
    seen_BLS = jnp.arange(slots)[None, None, :] <= positions_BL[:, :, None]
    if window is not None:
        seen_BLS &= jnp.arange(slots)[None, None, :] > positions_BL[:, :, None] - window
    s_BKGLS = jnp.where(seen_BLS[:, None, None], s_BKGLS, -jnp.inf)
    p_BKGLS = jax.nn.softmax(s_BKGLS, axis=-1)
    if cache.value_scales is not None:
        p_BKGLS *= cache.value_scales[:, :, None, None, :]
    y_BLKGH = _products("bkgls,bksh->blkgh", p_BKGLS.astype(dtype), cache.values.astype(dtype))
    return y_BLKGH.astype(dtype).reshape(q_BLNH.shape)


def _products(equation: str, a: Array, b: Array) -> Array:
    """Returns jnp.einsum(equation, a, b) in float32."""
    if hardware.platform() == "cpu":  # where some of these shapes have no product of bfloat16
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None  # no TF32
    return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=jnp.float32)
