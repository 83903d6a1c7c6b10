"""Optimizer moments that take one or two bytes an element between the steps.

    float32       as optax keeps them
    bf16          rounded to nearest
    fp8           E4M3 with a power of two, one byte, for each group along the last axis
    fp8_coat      E4M3 after COAT's dynamic range expansion (arXiv 2410.19313)
    fp8_unscaled  E4M3 as it is: the momentum of StoSignSGD's paper (arXiv 2604.15416)

`stored` wraps an optax transformation. Its moments are decoded, updated by optax in float32, and
coded again; the update sees the float32 ones.

fp8. A second moment of b2 = 0.95 shrinks by 5% a step where there is no gradient, and codes of
E4M3 lie 6 to 12% apart: rounded to nearest it would never decay. So rounding is stochastic, with a
key of the run's seed, the step and the leaf: the mean over steps is right. A first moment that
underflows is zero. A second one is E4M3's smallest number instead, unless it is exactly zero, since
the update divides by its root: an element whose gradients are below 1/480 of its group's largest
moves less than it would. Roots of second moments (half the binades, twice the rounding error) were
the first choice and did worse (docs/log.md).

fp8_coat. With s0 the geometric mean of a group's largest and smallest magnitudes M and m,

    y = sign(x) (|x| / s0)^k      k = floor(16 log2(448^2 / 2) / log2(M / m)) / 16

stretches (k > 1) or compresses the group to the range of E4M3, and is scaled by (M / s0)^k / 448.
Where M / m nears 1, k would grow without bound: it is at most 16. Zeros are stored exactly and do
not count for m, which in the paper is 1e-30 then and leaves the others no precision.

Groups lie along the last axis, 128 elements of an axis that no mesh cuts, and 32 (COAT: 64, its
scales take more) of one that a mesh may: so that none crosses a shard, and a checkpoint fits every
mesh. That is 1.01 to 1.03 bytes an element, COAT 1.05 to 1.10. A last axis shorter than a group has
one scale for all of it.
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

from fp8jax.device.mesh import RULES
from fp8jax.numerics.formats import cast
from fp8jax.optim.moment_formats import E4M3, GroupedMoment, MomentFormat


class StoredState(NamedTuple):
    """The state of `stored`: finished steps, and the inner state with moments as they are kept."""

    step: Int[Array, ""]
    inner: Any


def _is_box(leaf: Any) -> bool:
    return isinstance(leaf, Partitioned)


def _is_coded(leaf: Any) -> bool:
    return isinstance(leaf, GroupedMoment)


def _group(leaf: Any, fmt: MomentFormat) -> int:
    """Elements of a leaf, boxed with logical axis names or not, that share a scale."""
    name, shape = (leaf.names[-1], leaf.unbox().shape) if _is_box(leaf) else (None, leaf.shape)
    cut = name is not None and RULES[name] is not None
    # Of a cut axis whole groups only: where the mesh divides their number, none lies on two shards.
    return math.gcd(fmt.cut_group, shape[-1]) if cut else min(fmt.group, shape[-1])


def _encode(fmt: MomentFormat, tree: Any, groups: list[int], second: bool, key: Array) -> Any:
    """A tree of moments, as the format keeps them. Boxes stay around what they become."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_box)
    coded = []
    for i, (leaf, group) in enumerate(zip(leaves, groups, strict=True)):
        x = leaf.unbox() if _is_box(leaf) else leaf
        arrays = fmt.encode(x, group, jax.random.fold_in(key, i))
        arrays = _not_zero(arrays, x) if second and fmt.positive else arrays
        coded.append(jax.tree.map(leaf.replace_boxed, arrays) if _is_box(leaf) else arrays)
    return jax.tree.unflatten(treedef, coded)


def _not_zero(e: GroupedMoment, x: jax.Array) -> GroupedMoment:
    """The same, the smallest code where that of a positive x is zero."""
    least = cast(jnp.float32(E4M3.tiny), E4M3)
    return GroupedMoment(jnp.where((e.values == 0) & (x > 0), least, e.values), e.shared, e.group)


def stored(
    inner: optax.GradientTransformation,
    fmt: MomentFormat,
    *,
    moments: Mapping[str, bool],
    seed: int,
) -> optax.GradientTransformation:
    """`inner` with its moments kept in a format.

    Args:
      inner: an optax transformation whose state is a named tuple.
      fmt: an entry of `MOMENTS`; float32 gives `inner` itself.
      moments: the fields of the state that are kept so, each shaped like the parameters, and
        whether it is a second moment, which is never negative.
      seed: of stochastic rounding.
    """
    if fmt.name == "float32":
        return inner

    def keep(state: Any, groups: list[int], step: jax.Array) -> StoredState:
        kept = {}
        for i, (field, second) in enumerate(moments.items()):
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), i)
            kept[field] = _encode(fmt, getattr(state, field), groups, second, key)
        return StoredState(step, state._replace(**kept))

    def init(params: Any) -> StoredState:
        groups = [_group(leaf, fmt) for leaf in jax.tree.leaves(params, is_leaf=_is_box)]
        # Hidden from XLA, which would code all these zeros while it compiles: for minutes.
        zeros = lax.optimization_barrier((inner.init(params), jnp.zeros((), jnp.int32)))
        return keep(zeros[0], groups, zeros[1])

    def update(updates: Any, state: StoredState, params: Any = None) -> tuple[Any, StoredState]:
        treedef, decoded = jax.tree.structure(updates), {}
        for field in moments:
            coded = jax.tree.leaves(getattr(state.inner, field), is_leaf=_is_coded)
            groups = [leaf.group if _is_coded(leaf) else 0 for leaf in coded]
            numbers = [fmt.decode(leaf) for leaf in coded]
            decoded[field] = jax.tree.unflatten(treedef, numbers)
        updates, new = inner.update(updates, state.inner._replace(**decoded), params)
        return updates, keep(new, groups, state.step + 1)

    return optax.GradientTransformation(init, update)
