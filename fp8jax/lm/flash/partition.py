"""The kernels of flash attention on a mesh: each device attends to its own rows and heads."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from fp8jax.kernels.mesh_call import call_on_mesh, each_shard
from fp8jax.lm.flash import backward, forward

_CODE = Path(__file__).parent

# Flash attention: b rows, t positions, k key heads, g query heads of each key head, h head size.
# Only rows and key heads are sharded: a shard of any other dimension would have to be all of it.
_QUERIES, _KEYS, _BY_QUERY, _BY_POSITION = "btkgh", "btkh", "bkgt", "bt"


def _attention_on_mesh(
    kernel: Callable[..., Any],
    operands: tuple[jax.Array, ...],
    letters: tuple[str, ...],
    results: tuple[str, ...],
    scale: float,
) -> Any:
    """Calls a kernel of flash attention, which takes and gives query heads as one dimension."""
    _, length, _, group, head_dim = operands[0].shape
    multiples = {"b": 1, "k": 1, "t": length, "g": group, "h": head_dim}
    # The same function of the module each time, so that equal calls are traced once.
    merging = functools.partial(_with_merged_heads, kernel, letters, results, group, scale=scale)
    # The shardings of the first two operands decide: the queries' and the keys'.
    return call_on_mesh(
        each_shard(merging), operands, letters, results, multiples, sources=2, code=(_CODE,)
    )


def _with_merged_heads(
    kernel: Callable[..., Any],
    letters: tuple[str, ...],
    results: tuple[str, ...],
    group: int,
    *operands: jax.Array,
    scale: float,
) -> tuple[jax.Array, ...]:
    """Calls a kernel; query heads are two dimensions of the operands and of its results."""
    merged = [_merge_heads(x, of) for x, of in zip(operands, letters, strict=True)]
    found = zip(kernel(*merged, scale=scale), results, strict=True)
    return tuple(_split_heads(x, of, group) for x, of in found)


def _merge_heads(x: jax.Array, letters: str) -> jax.Array:
    if "g" not in letters:
        return x
    at = letters.index("k")
    return x.reshape(*x.shape[:at], -1, *x.shape[at + 2 :])


def _split_heads(x: jax.Array, letters: str, group: int) -> jax.Array:
    if "g" not in letters:
        return x
    at = letters.index("k")
    return x.reshape(*x.shape[:at], -1, group, *x.shape[at + 1 :])


def flash_forward(
    q_BTKGH: Float[Array, "B T K G H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    begin_BT: Int[Array, "B T"],
    scale: float,
) -> tuple[Float[Array, "B T K G H"], Float[Array, "B K G T"]]:
    """`forward.forward` on a mesh, with query heads as [K, G]."""
    return _attention_on_mesh(
        forward.forward,
        (q_BTKGH, k_BTKH, v_BTKH, begin_BT),
        (_QUERIES, _KEYS, _KEYS, _BY_POSITION),
        (_QUERIES, _BY_QUERY),
        scale,
    )


def flash_gradient_q(
    q, k, v, y, dy, lse, begin_BT: Int[Array, "B T"], scale: float
) -> tuple[Float[Array, "B T K G H"], Float[Array, "B K G T"]]:
    """`backward.gradient_q` on a mesh, with query heads as [K, G]."""
    return _attention_on_mesh(
        backward.gradient_q,
        (q, k, v, y, dy, lse, begin_BT),
        (_QUERIES, _KEYS, _KEYS, _QUERIES, _QUERIES, _BY_QUERY, _BY_POSITION),
        (_QUERIES, _BY_QUERY),
        scale,
    )


def flash_gradient_kv(
    q, k, v, dy, lse, delta, end_BT: Int[Array, "B T"], scale: float
) -> tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]]:
    """`backward.gradient_kv` on a mesh, with query heads as [K, G]."""
    return _attention_on_mesh(
        backward.gradient_kv,
        (q, k, v, dy, lse, delta, end_BT),
        (_QUERIES, _KEYS, _KEYS, _QUERIES, _BY_QUERY, _BY_QUERY, _BY_POSITION),
        (_KEYS, _KEYS),
        scale,
    )
