"""From one step to the next: parameters through an optimizer, histories by their own rule.

The gradient of a history is its next value (amax_history.py). So a step has to treat two kinds of
leaves differently. Whatever else is done to a tree of gradients is wrong for histories: clipping,
weight decay, averaging, unscaling a loss. `update` separates them::

    state = fp8jax.init_update(optimizer, variables)

    @jax.jit
    def step(variables, state, batch):
        loss, gradients = jax.value_and_grad(loss_of)(variables, batch)
        variables, state, faults = fp8jax.update(optimizer, variables, state, gradients)
        return variables, state, loss, faults

    variables, state, loss, faults = step(variables, state, batch)
    fp8jax.histories.raise_if(faults)

A tree is one of flax's variables, {"params": ..., HISTORIES: ...}, or holds such trees in dicts.

The next value of a history must be the old one, shifted by one entry. Entries that are a multiple
of the old ones were added by JAX; others were changed on the way. An amax that was averaged cannot
be told from a right one (docs/your_model.md lists what cannot be detected).
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float, Int

from fp8jax.gemm.histories.amax_history import HISTORIES, SEED_ENTRIES, combine_max, merge_history
from fp8jax.gemm.histories.trees import (
    check_branch,
    check_extra,
    check_leading_axis,
    check_loss,
    check_no_histories_inside,
    check_no_nnx,
    check_optimizer,
    check_same_leaves,
    mapping_like,
    require_state_of,
    structured_like,
)
from fp8jax.lookup import brief

Optimizer: TypeAlias = optax.GradientTransformation | optax.MultiSteps

EMPTY_FOR = 3  # updates after which a history that is still empty is worth a warning

# What may be wrong with the next value of a history.
SOUND, EMPTY, CHANGED, SUMMED, NOT_AN_AMAX = range(5)

_FAULTS = {
    CHANGED: (
        "was changed between gradient and update: clip, scale, decay and average gradients of"
        " parameters only (fp8jax.histories.split takes histories out)"
    ),
    SUMMED: (
        "was added up by JAX: the module is called more than once under nn.remat or nn.jit (wrap"
        " the model in fp8jax.nn.max_combining), under jax.checkpoint or jax.jit around its apply"
        " (convert the histories by fp8jax.nn.to_max_combining where the loss begins), or in NNX"
        " (use fp8jax.nnx.value_and_grad inside nnx.jit), or gradients of microbatches were added"
        " (use fp8jax.histories.merge or fp8jax.nnx.merge)"
    ),
    NOT_AN_AMAX: (
        "has a negative entry or NaN: a tensor of the step had NaN, or an optimizer has changed the"
        " history (use fp8jax.update)"
    ),
}


# Taking apart and putting together ----------------------------------------------------------------


def split(tree: Any) -> tuple[Any, Any]:
    """Returns a tree without its histories, and its histories alone.

    Args:
      tree: variables or gradients of a linen model, dicts of dicts.

    Returns:
      (rest, histories), for `join`, of the types of the tree's dicts; histories is {} if there are
      none.

    Raises:
      TypeError: for histories inside a list or a TrainState, and for those of an NNX model or its
        gradients.

    Example:
      >>> history = {"x_amax_history": jnp.zeros(2)}
      >>> variables = {"params": {"kernel": 1.0}, fp8jax.nn.HISTORIES: history}
      >>> rest, histories = fp8jax.histories.split(variables)
      >>> rest, list(histories) == [fp8jax.nn.HISTORIES]
      ({'params': {'kernel': 1.0}}, True)
    """
    if not isinstance(tree, Mapping):
        check_no_histories_inside(tree)
        return tree, {}
    rest, histories = {}, {}
    for name, branch in tree.items():
        if name == HISTORIES:
            histories[name] = branch
            continue
        check_no_nnx(name)
        rest[name], inside = split(branch)
        if inside:
            histories[name] = inside
    return mapping_like(tree, rest), mapping_like(tree, histories) if histories else {}


def join(rest: Any, histories: Any) -> Any:
    """Returns the tree that `split` has taken apart.

    Args:
      rest, histories: the results of `split`, or trees like them.

    Returns:
      One tree of dicts, of the types that `rest` has.

    Raises:
      KeyError: the histories belong to a branch that `rest` does not have.

    Example:
      >>> fp8jax.histories.join(*fp8jax.histories.split({"params": {"kernel": 1.0}}))
      {'params': {'kernel': 1.0}}
    """
    if not histories:
        return rest
    joined = dict(rest)
    for name, branch in histories.items():
        if name != HISTORIES:
            check_branch(rest, name)
        joined[name] = branch if name == HISTORIES else join(rest[name], branch)
    return mapping_like(rest, joined)


# One tree from several ----------------------------------------------------------------------------


def merge(gradients: Any, *more: Any) -> Any:
    """Returns the gradients of several microbatches as one: sums, and maxima of histories.

    Args:
      gradients, more: trees of the same structure and shapes, each with gradients of parameters and
        next histories.

    Returns:
      A tree like each of them.

    Raises:
      ValueError: the trees differ.

    Example:
      >>> def gradients(dw, newest):
      ...     history = {"x_amax_history": jnp.array([newest, 1.0])}
      ...     return {"params": {"kernel": jnp.array(dw)}, fp8jax.nn.HISTORIES: history}
      >>> merged = fp8jax.histories.merge(gradients(0.5, 3.0), gradients(0.25, 2.0))
      >>> merged["params"]["kernel"].item(), merged[fp8jax.nn.HISTORIES]["x_amax_history"]
      (0.75, Array([3., 1.], dtype=float32))
    """
    for other in more:
        check_same_leaves("gradients to merge", gradients, other, "take both from one model")
        (rest, histories), (more_rest, more_histories) = split(gradients), split(other)
        more_rest = structured_like(rest, more_rest)
        more_histories = structured_like(histories, more_histories)
        merged = join(
            jax.tree.map(jnp.add, rest, more_rest), combine_max(histories, more_histories)
        )
        gradients = structured_like(gradients, merged)
    return gradients


def merge_stacked(gradients: Any) -> Any:
    """Returns gradients with a leading axis as one: means over it, and maxima of histories.

    Args:
      gradients: a tree whose leaves have a leading axis of microbatches, as of `jax.vmap` or
        `lax.scan`; histories are [microbatches, ..., H].

    Returns:
      The tree without that axis.

    Raises:
      ValueError: a leaf has no leading axis.

    Example:
      >>> history = {"x_amax_history": jnp.array([[3.0, 1.0], [2.0, 1.0]])}
      >>> stacked = {"params": {"kernel": jnp.array([0.5, 0.25])}, fp8jax.nn.HISTORIES: history}
      >>> merged = fp8jax.histories.merge_stacked(stacked)
      >>> merged["params"]["kernel"].item(), merged[fp8jax.nn.HISTORIES]["x_amax_history"]
      (0.375, Array([3., 1.], dtype=float32))
    """
    rest, histories = split(gradients)
    check_leading_axis(rest, axes=1)
    check_leading_axis(histories, axes=2)
    return join(
        jax.tree.map(lambda g: jnp.mean(g, axis=0), rest),
        jax.tree.map(lambda h: jnp.max(h, axis=0), histories),
    )


def merge_devices(gradients: Any, axis_name: str | tuple[str, ...]) -> Any:
    """Returns means over mapped axes, and maxima of histories; for `jax.shard_map`.

    Args:
      gradients: the gradients of one device, with its next histories. `jax.grad` of replicated
        parameters inside `shard_map` gives sums over devices, which need no merging.
      axis_name: of the mapped axes, one name or several.

    Returns:
      A tree like `gradients`, equal on all devices.

    Raises:
      ValueError: there is no mapped axis of that name here, or a gradient is equal on all devices
        of it already.

    Example:
      `jax.vmap` with a name stands for two devices here:

      >>> history = {"x_amax_history": jnp.array([[3.0, 1.0], [2.0, 1.0]])}
      >>> devices = {"params": {"kernel": jnp.array([0.5, 0.25])}, fp8jax.nn.HISTORIES: history}
      >>> merge = lambda g: fp8jax.histories.merge_devices(g, "data")
      >>> merged = jax.vmap(merge, axis_name="data")(devices)
      >>> merged["params"]["kernel"]
      Array([0.375, 0.375], dtype=float32)
      >>> merged[fp8jax.nn.HISTORIES]["x_amax_history"]
      Array([[3., 1.],
             [3., 1.]], dtype=float32)
    """
    rest, histories = split(gradients)
    try:
        _refuse_sums(rest, axis_name)
        return join(lax.pmean(rest, axis_name), lax.pmax(histories, axis_name))
    except NameError:  # JAX: unbound axis name
        raise ValueError(
            f"{axis_name=} is no mapped axis here: call merge_devices inside jax.shard_map over"
            " that axis"
        ) from None


def _refuse_sums(gradients: Any, axis_name: str | tuple[str, ...]) -> None:
    """Raises ValueError for gradients that JAX has summed over mapped axes: their mean is the sum.

    JAX says so inside `shard_map` with check_vma=True alone.
    """
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    tracked = {name for name in names if name in _varying(lax.axis_index(name))}
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        if missing := tracked - _varying(leaf):
            raise ValueError(
                f"the gradient {jax.tree_util.keystr(path)} is equal on all devices along"
                f" {sorted(missing)}: jax.grad of replicated parameters inside shard_map has summed"
                " it. Take the gradient of lax.pmean(loss), which needs no merging"
            )


def _varying(x: Array) -> frozenset[str]:
    """As gemm/sharding/manual_axes.py has it; histories import nothing of sharding."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


# A step -------------------------------------------------------------------------------------------


def next_histories(histories: Any, gradients: Any) -> Any:
    """Returns the histories of the next step, given the gradients with respect to them.

    A history that recorded nothing, as in a branch not taken, keeps its value.
    """
    return jax.tree.map(merge_history, histories, gradients)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Faults:
    """What `update` has found; `raise_if` reads it.

    Attributes:
      kinds: a tree like the histories, int32 without their last axis: SOUND, EMPTY and so on.
      updates: int32, the updates made so far; [S] if `lax.scan` has stacked those of S steps.
    """

    kinds: Any
    updates: Int[Array, "*S"]


class UpdateState(NamedTuple):
    """What `update` carries from step to step; a pytree that `flax.serialization` writes, too.

    Attributes:
      optimizer: the optimizer's state, of the parameters alone.
      updates: int32, the updates made so far.
    """

    optimizer: Any
    updates: Int[Array, ""]


def init_update(optimizer: Optimizer, variables: Any) -> UpdateState:
    """Returns the state of `update` before the first step.

    Args:
      optimizer: from optax; `optax.MultiSteps` too.
      variables: parameters and histories.

    Returns:
      An `UpdateState`: the optimizer's state, of the parameters alone, and the number of updates.

    Raises:
      TypeError: for what is not an optimizer.

    Example:
      >>> variables = fp8jax.nn.Dense(4).init(jax.random.key(0), jnp.ones((2, 8)))
      >>> state = fp8jax.init_update(optax.sgd(0.1, momentum=0.9), variables)
      >>> [leaf.shape for leaf in jax.tree.leaves(state.optimizer)], state.updates.item()
      ([(8, 4)], 0)
    """
    check_optimizer(optimizer)
    return UpdateState(optimizer.init(split(variables)[0]), jnp.zeros((), jnp.int32))


def update(
    optimizer: Optimizer, variables: Any, state: UpdateState, gradients: Any, **extra: Any
) -> tuple[Any, UpdateState, Faults]:
    """Applies one step of the optimizer to the parameters, and gives histories their next values.

    Args:
      optimizer: sees parameters only.
      variables: parameters and histories.
      state: from `init_update`, or from the last step.
      gradients: a tree like `variables`, from `jax.grad` with respect to all of them.
      extra: what else the optimizer's update takes, such as `value` of
        `optax.contrib.reduce_on_plateau`. It gets trees without their histories, and functions of
        all variables, such as `value_fn` of `optax.lbfgs`, as functions of the parameters.

    Returns:
      The next variables and state, and what is wrong with the histories, for `raise_if`.

    Raises:
      TypeError: for what is not an optimizer, a state that is not from `init_update` or `update`,
        and extra arguments for an optimizer that takes none.
      ValueError: the gradients have no histories, or others than the variables; the state is of
        another optimizer or of other variables.

    Example:
      >>> layer, x, optimizer = fp8jax.nn.Dense(4), jnp.ones((2, 8)), optax.sgd(0.1)
      >>> variables = layer.init(jax.random.key(0), x)
      >>> state = fp8jax.init_update(optimizer, variables)
      >>> gradients = jax.grad(lambda variables: layer.apply(variables, x).mean())(variables)
      >>> variables, state, faults = fp8jax.update(optimizer, variables, state, gradients)
      >>> variables[fp8jax.nn.HISTORIES]["x_amax_history"][:2], state.updates.item()
      (Array([1., 0.], dtype=float32), 1)
      >>> fp8jax.update(optimizer, variables, state, {"params": gradients["params"]})
      Traceback (most recent call last):
          ...
      ValueError: the gradients lack amax history g_amax_history, ...: differentiate with respect
      to all variables, not to the parameters alone
    """
    (params, histories), (grads, new) = split(variables), split(gradients)
    require_same_histories(histories, new)
    check_optimizer(optimizer)
    if not isinstance(state, UpdateState):
        raise TypeError(f"state must come from fp8jax.init_update or update, got {brief(state)}")
    check_same_leaves(
        "variables and gradients", params, grads, "differentiate with respect to all variables"
    )
    check_same_leaves("histories and their gradients", histories, new, "use one recipe for both")
    check_extra(optimizer, extra)
    grads, new = structured_like(params, grads), structured_like(histories, new)
    seen = {name: _of_parameters(value, histories) for name, value in extra.items()}
    try:
        updates, inner = optimizer.update(grads, state.optimizer, params, **seen)
    except (AttributeError, TypeError, ValueError):  # optax does not name what is wrong
        require_state_of(optimizer, params, state.optimizer)
        raise
    count = state.updates + 1
    faults = Faults(jax.tree.map(history_fault, histories, new), count)
    following = join(optax.apply_updates(params, updates), next_histories(histories, new))
    return structured_like(variables, following), UpdateState(inner, count), faults


def _of_parameters(value: Any, histories: Any) -> Any:
    """Returns an extra argument as an optimizer takes it that sees parameters alone."""
    if not callable(value):
        return split(value)[0]

    def function(params: Any, *args: Any, **kwargs: Any) -> Any:
        return value(join(params, histories), *args, **kwargs)

    return function


def require_same_histories(
    histories: Any,
    gradients: Any,
    remedy: str = "differentiate with respect to all variables, not to the parameters alone",
) -> None:
    """Raises ValueError if two trees of dicts do not hold the same histories.

    Args:
      remedy: what to do if the gradients lack histories.
    """
    ours, theirs = set(_paths(histories)), set(_paths(gradients))
    if missing := sorted(ours - theirs):
        raise ValueError(f"the gradients lack {_named(missing)}: {remedy}")
    if unknown := sorted(theirs - ours):
        raise ValueError(f"the gradients have {_named(unknown)}, which the variables lack")


def history_fault(old: Float[Array, "*L H"], new: Float[Array, "*L H"]) -> Int[Array, "*L"]:
    """Returns what is wrong with the next value of each history, SOUND if nothing is."""
    nothing = jnp.all((new == 0) | (new == -jnp.inf), axis=-1)  # a GEMM that did not run
    before, after = old[..., :-1], new[..., 1:]
    moved = jnp.any(before != after, axis=-1)
    bad = ~jnp.all(old >= 0, axis=-1) | ~(nothing | jnp.all(new >= 0, axis=-1))
    # The last one that holds counts.
    kind = jnp.where(nothing & jnp.all(old == 0, axis=-1), EMPTY, SOUND)
    kind = jnp.where(~nothing & moved, CHANGED, kind)
    kind = jnp.where(~nothing & moved & _is_multiple(before, after), SUMMED, kind)
    return jnp.where(bad, NOT_AN_AMAX, kind).astype(jnp.int32)


def _is_multiple(before: Float[Array, "*L H"], after: Float[Array, "*L H"]) -> Array:
    """Returns whether `after` is `before` times a whole number above 1, to rounding."""
    # A history of one entry has none before it.
    largest, new = (jnp.max(x, axis=-1, keepdims=True, initial=0) for x in (before, after))
    factor = jnp.round(new / jnp.where(largest > 0, largest, 1))
    return jnp.all((factor > 1) & (jnp.abs(after - factor * before) <= 1e-5 * after), axis=-1)


class HistoryError(ValueError):
    """Amax histories are not the amaxes of their operands."""


def raise_if(faults: Faults) -> None:
    """Reads the faults of an update, or of several that `lax.scan` has stacked; waits for them.

    Warns once, after the third update, of histories that are still empty: a layer of zeros has such
    histories, and so has a layer that no gradient reaches.

    Args:
      faults: from `fp8jax.update` or `fp8jax.nnx.update`.

    Raises:
      HistoryError: for histories that are wrong, with their modules; a ValueError.
      TypeError: for what is not the faults of an update, and inside `jax.jit`.

    Example:
      >>> layer, x, optimizer = fp8jax.nn.Dense(4), jnp.ones((2, 8)), optax.sgd(0.1)
      >>> variables = layer.init(jax.random.key(0), x)
      >>> state = fp8jax.init_update(optimizer, variables)
      >>> gradients = jax.grad(lambda variables: layer.apply(variables, x).mean())(variables)
      >>> *_, faults = fp8jax.update(optimizer, variables, state, gradients)
      >>> fp8jax.histories.raise_if(faults)
      >>> scaled = jax.tree.map(lambda g: -2 * g, gradients)
      >>> *_, faults = fp8jax.update(optimizer, variables, state, scaled)
      >>> fp8jax.histories.raise_if(faults)
      Traceback (most recent call last):
          ...
      fp8jax.gemm.histories.updates.HistoryError: amax history g_amax_history, ... has a negative
      entry or NaN: a tensor of the step had NaN, or an optimizer has changed the history (use
      fp8jax.update)
    """
    if not isinstance(faults, Faults):
        raise TypeError(f"raise_if takes the faults that update returns, got {brief(faults)}")
    if isinstance(faults.updates, jax.core.Tracer):
        raise TypeError("raise_if reads the faults on the host: return them from jit, then call it")
    kinds, updates = jax.device_get((faults.kinds, faults.updates))
    paths = _paths(kinds)
    leaves = jax.tree.leaves(kinds)

    def with_kind(kind: int) -> list[str]:
        return [path for path, leaf in zip(paths, leaves, strict=True) if kind in leaf]

    lines = [f"{_named(with_kind(k))} {text}" for k, text in _FAULTS.items() if with_kind(k)]
    if lines:
        raise HistoryError("; ".join(lines))
    leaves = [leaf[updates == EMPTY_FOR] for leaf in leaves]  # only the kinds of that update
    if empty := with_kind(EMPTY):
        warnings.warn(
            f"{_named(empty)} is still empty after {EMPTY_FOR} updates: its operand is all zeros,"
            " or no gradient reaches it",
            stacklevel=2,
        )


def _paths(histories: Any) -> list[str]:
    """Returns the path of each history, such as "mlp/Dense_0/x_amax_history"."""
    return [
        "/".join(str(key.key) for key in path if key.key != HISTORIES)
        for path, _ in jax.tree.leaves_with_path(histories)
    ]


def _named(paths: list[str]) -> str:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return f"amax history {', '.join(paths[:3])}{more}"


# Before the first step ----------------------------------------------------------------------------


def seed(loss: Callable[..., Any], variables: Any, *args: Any, has_aux: bool = False) -> Any:
    """Returns the variables with new histories, of the amaxes of one evaluation of the loss.

    Each cast of that evaluation takes its scale from its operand's own amax, also in modules that
    are `seeded`. Call it before the first step.

    Args:
      loss: (variables, ...) -> a scalar, or (scalar, anything) with `has_aux`.
      variables: parameters and histories; the histories' values do not matter.
      args: what else the loss takes, such as a first batch.
      has_aux: whether the loss returns (scalar, anything).

    Returns:
      A tree like `variables`, with the same parameters.

    Raises:
      TypeError: the loss returns no scalar, or with `has_aux` no pair.

    Example:
      >>> layer = fp8jax.nn.Dense(4, "fp8_delayed:history=2", seeded=True)
      >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 8)))
      >>> loss = lambda variables, x: layer.apply(variables, x).mean()
      >>> variables = fp8jax.histories.seed(loss, variables, jnp.full((2, 8), 3.0))
      >>> variables[fp8jax.nn.HISTORIES]["x_amax_history"]
      Array([3., 0.], dtype=float32)
    """
    rest, histories = split(variables)
    empty = jax.tree.map(
        lambda h: jnp.zeros((*h.shape[:-1], h.shape[-1] + SEED_ENTRIES), h.dtype), histories
    )

    def loss_of(histories):
        result = loss(join(rest, histories), *args)
        return check_loss(result, has_aux)

    filled = next_histories(empty, jax.jit(jax.grad(loss_of))(empty))
    return join(rest, jax.tree.map(lambda h: h[..., :-SEED_ENTRIES], filled))
