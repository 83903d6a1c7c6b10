"""`stored` wraps an optax transformation so that its moments take one or two bytes an element.

Each update decodes the moments to float32, lets optax update them in float32, and encodes them
again. The parameter update itself is computed from the float32 moments. moment_formats.py has the
formats.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.linen import Partitioned
from jax import lax
from jaxtyping import Array, Int

from fp8jax.lm.mesh import RULES
from fp8jax.lm.optim.moment_formats import E4M3, GroupedMoment, MomentFormat
from fp8jax.numerics.formats import cast


class StoredState(NamedTuple):
    """The state of `stored`: finished steps, and the inner state with its moments encoded."""

    step: Int[Array, ""]
    inner: Any


def _is_box(leaf: Any) -> bool:
    return isinstance(leaf, Partitioned)


def _is_coded(leaf: Any) -> bool:
    return isinstance(leaf, GroupedMoment)


def _group_size(leaf: Any, fmt: MomentFormat) -> int:
    """The number of elements along the last axis of a parameter that share a scale.

    `leaf` is an array, or an array boxed with logical axis names.
    """
    if not _is_box(leaf):
        return min(fmt.group, leaf.shape[-1])
    length = leaf.unbox().shape[-1]
    axis = leaf.names[-1]
    if axis is None or RULES[axis] is None:  # no mesh shards it
        return min(fmt.group, length)
    # Groups of one size that divides the axis: where the mesh divides their number, none is cut.
    return math.gcd(fmt.cut_group, length)


def _encode(fmt: MomentFormat, tree: Any, groups: list[int], second: bool, key: Array) -> Any:
    """Encodes a tree of moments. The arrays that a boxed leaf becomes are boxed in the same way.

    Args:
      groups: the group size of each leaf.
      second: whether these are second moments.
      key: folded with the index of each leaf, for stochastic rounding.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_box)
    coded = []
    for i, (leaf, group) in enumerate(zip(leaves, groups, strict=True)):
        x = leaf.unbox() if _is_box(leaf) else leaf
        arrays = fmt.encode(x, group, jax.random.fold_in(key, i))
        if second and fmt.positive:
            arrays = _without_underflow(arrays, x)
        if _is_box(leaf):
            arrays = jax.tree.map(leaf.replace_boxed, arrays)
        coded.append(arrays)
    return jax.tree.unflatten(treedef, coded)


def _without_underflow(e: GroupedMoment, x: jax.Array) -> GroupedMoment:
    """Replaces the zero codes of positive elements of x by the smallest positive code."""
    smallest = cast(jnp.float32(E4M3.tiny), E4M3)
    return GroupedMoment(
        jnp.where((e.values == 0) & (x > 0), smallest, e.values), e.shared, e.group
    )


def stored(
    inner: optax.GradientTransformation,
    fmt: MomentFormat,
    *,
    moments: Mapping[str, bool],
    seed: int,
) -> optax.GradientTransformation:
    """Returns `inner` with its moments stored in a format between steps.

    Args:
      inner: an optax transformation whose state is a named tuple.
      fmt: an entry of `MOMENTS`; with "float32", `inner` itself is returned.
      moments: the fields of the state to encode, each a tree like the parameters; the value says
        whether it is a second moment, which is never negative.
      seed: seeds stochastic rounding.
    """
    if fmt.name == "float32":
        return inner

    def encode_moments(state: Any, groups: list[int], step: jax.Array) -> StoredState:
        encoded = {}
        for i, (field, second) in enumerate(moments.items()):
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), i)
            encoded[field] = _encode(fmt, getattr(state, field), groups, second, key)
        return StoredState(step, state._replace(**encoded))

    def init(params: Any) -> StoredState:
        groups = [_group_size(leaf, fmt) for leaf in jax.tree.leaves(params, is_leaf=_is_box)]
        # The barrier hides the zeros from XLA, which would encode them while it compiles and take
        # minutes for that.
        state, step = lax.optimization_barrier((inner.init(params), jnp.zeros((), jnp.int32)))
        return encode_moments(state, groups, step)

    def update(updates: Any, state: StoredState, params: Any = None) -> tuple[Any, StoredState]:
        treedef, decoded = jax.tree.structure(updates), {}
        for field in moments:
            coded = jax.tree.leaves(getattr(state.inner, field), is_leaf=_is_coded)
            groups = [leaf.group if _is_coded(leaf) else 0 for leaf in coded]
            arrays = [fmt.decode(leaf) for leaf in coded]
            decoded[field] = jax.tree.unflatten(treedef, arrays)
        updates, new = inner.update(updates, state.inner._replace(**decoded), params)
        return updates, encode_moments(new, groups, state.step + 1)

    return optax.GradientTransformation(init, update)
