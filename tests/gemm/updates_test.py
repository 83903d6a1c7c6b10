"""The update of parameters and histories, and what it says of a tree that was treated as one."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

from fp8jax.gemm.histories.amax_history import HISTORIES
from fp8jax.gemm.histories.updates import (
    HistoryError,
    init_update,
    join,
    merge,
    merge_devices,
    merge_stacked,
    raise_if,
    split,
    update,
)
from fp8jax.gemm.modules import Dense
from tests.support.arrays import normal

SGD = optax.sgd(0.1)
sgd_update = jax.jit(functools.partial(update, SGD))
LAYER = Dense(8, "fp8_delayed:history=4")


def data(scale=1.0, seed=0):
    return jnp.asarray(np.float32(scale) * normal((16, 8), seed))


@functools.cache
def fresh():
    return jax.jit(LAYER.init)(jax.random.key(0), data())


@jax.jit
def gradients_of(variables, x):
    return jax.grad(lambda v: jnp.sum(LAYER.apply(v, x) ** 2))(variables)


@functools.cache
def after(steps):
    """Variables after some sound steps."""
    variables = fresh()
    state = init_update(SGD, variables)
    for i in range(steps):
        gradients = gradients_of(variables, data(seed=i))
        variables, state, faults = sgd_update(variables, state, gradients)
        raise_if(faults)
    return variables


def try_update(gradients, variables=None):
    variables = after(2) if variables is None else variables
    raise_if(sgd_update(variables, init_update(SGD, variables), gradients)[2])


# Taking apart -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tree",
    [
        {"params": {"a": 1}, HISTORIES: {"a": {"x": 2}}},
        {"params": {"a": 1}},
        {HISTORIES: {"x": 2}},
        {"actor": {"params": {"a": 1}, HISTORIES: {"x": 2}}, "critic": {"params": {"b": 3}}},
        {},
    ],
)
def test_split_and_join_are_inverse(tree):
    rest, histories = split(tree)
    assert join(rest, histories) == tree
    assert 2 not in jax.tree.leaves(rest)
    assert set(jax.tree.leaves(histories)) <= {2}


@pytest.mark.parametrize("rest", [{}, {"other": {}}])
def test_histories_of_another_tree_are_refused(rest):
    with pytest.raises(
        KeyError, match="has no 'layer', .* pass both results of fp8jax.histories.split"
    ):
        join(rest, {"layer": {HISTORIES: {"x_amax_history": 1}}})


# A step -------------------------------------------------------------------------------------------


def test_parameters_follow_the_optimizer_alone_and_histories_are_the_gradients():
    variables, optimizer = after(2), optax.adamw(1e-2, weight_decay=0.3)
    gradients = gradients_of(variables, data())
    following, state, faults = update(
        optimizer, variables, init_update(optimizer, variables), gradients
    )
    raise_if(faults)
    params, grads = variables["params"], gradients["params"]
    changes, inner = optimizer.update(
        {"params": grads}, optimizer.init({"params": params}), {"params": params}
    )
    expected = optax.apply_updates({"params": params}, changes)["params"]
    jax.tree.map(np.testing.assert_array_equal, following["params"], expected)
    jax.tree.map(np.testing.assert_array_equal, following[HISTORIES], gradients[HISTORIES])
    jax.tree.map(np.testing.assert_array_equal, state.optimizer, inner)
    assert state.updates == 1


def test_every_optimizer_sees_parameters_only():
    """Labels, masks and multi-steps of optax meet no history."""
    variables = after(1)
    labels = lambda params: jax.tree.map(lambda _: "all", params)  # noqa: E731
    for optimizer in (
        optax.multi_transform({"all": optax.adam(1e-3)}, labels),
        optax.MultiSteps(optax.adam(1e-3), every_k_schedule=2),
        optax.chain(
            optax.clip_by_global_norm(1e-3), optax.add_decayed_weights(0.1), optax.ema(0.9)
        ),
    ):
        state = init_update(optimizer, variables)
        stepped = variables
        step = jax.jit(functools.partial(update, optimizer))
        for i in range(4):
            gradients = gradients_of(stepped, data(seed=i))
            stepped, state, faults = step(stepped, state, gradients)
            raise_if(faults)
            jax.tree.map(np.testing.assert_array_equal, stepped[HISTORIES], gradients[HISTORIES])


def test_a_state_of_another_optimizer_or_model_is_refused():
    variables, x, adam = fresh(), data(), optax.adam(1e-3)
    gradients = gradients_of(variables, x)
    of_params = init_update(adam, variables["params"])
    for state in (init_update(optax.sgd(1e-3), variables), of_params):
        with pytest.raises(ValueError, match="the state is of another optimizer or of other var"):
            update(adam, variables, state, gradients)


def test_gradients_without_histories_are_refused():
    variables = after(1)
    gradients = gradients_of(variables, data())
    with pytest.raises(
        ValueError, match="gradients lack amax history .*x_amax_history.*all variab"
    ):
        try_update({"params": gradients["params"]}, variables)
    with pytest.raises(ValueError, match="have amax history .*, which the variables lack"):
        try_update(gradients, {"params": variables["params"]})


@pytest.mark.parametrize(
    ("treat", "message"),
    [
        (lambda g: jax.tree.map(lambda a: 2.0 * a, g), "was added up by JAX"),
        (lambda g: jax.tree.map(lambda a: a + a + a, g), "was added up by JAX"),
        (lambda g: jax.tree.map(lambda a: a / 1024, g), "was changed between gradient and update"),
        (lambda g: optax.clip_by_global_norm(0.1).update(g, None)[0], "was changed between"),
        (lambda g: jax.tree.map(lambda a: a - 0.01, g), "negative entry or NaN|was changed"),
        (lambda g: jax.tree.map(lambda a: a * jnp.nan, g), "negative entry or NaN"),
    ],
    ids=["sum of 2", "sum of 3", "unscaled loss", "clipped", "decayed", "NaN"],
)
def test_what_was_done_to_histories_is_named(treat, message):
    variables = after(2)
    with pytest.raises(HistoryError, match=f"amax history g_amax_history, .*{message}"):
        try_update(treat(gradients_of(variables, data())), variables)


def test_an_optimizer_on_the_whole_tree_is_found_by_the_next_update():
    variables = after(2)
    whole = optax.adam(1.0)
    changes, _ = whole.update(gradients_of(variables, data()), whole.init(variables), variables)
    broken = optax.apply_updates(variables, changes)
    with pytest.raises(HistoryError, match="has a negative entry or NaN"):
        try_update(gradients_of(broken, data()), broken)
    # And before: the modules' results are NaN.
    assert jnp.isnan(LAYER.apply(broken, data())).all()


def test_a_sound_history_is_no_fault():
    variables = after(5)
    for x in (data(), data(0.0), data(1e-20), data(1e20)):
        try_update(gradients_of(variables, x), variables)


@pytest.mark.full
def test_a_history_of_one_entry_is_no_fault():
    model, x = Dense(4, recipe="fp8_delayed:history=1"), data()
    variables, optimizer = model.init(jax.random.key(0), x), optax.sgd(0.1)
    state = init_update(optimizer, variables)
    for _ in range(3):
        gradients = jax.grad(lambda v: jnp.mean(model.apply(v, x) ** 2))(variables)
        variables, state, faults = update(optimizer, variables, state, gradients)
        raise_if(faults)
    histories = jax.tree.leaves(variables[HISTORIES])
    assert [history.shape for history in histories] == [(1,)] * 3
    assert jnp.max(jnp.abs(x)) in jnp.concatenate(histories)


def test_one_of_several_stacked_layers_is_found():
    variables = after(2)
    stacked = jax.tree.map(lambda a: np.stack([a, a, a]), variables)
    gradients = jax.tree.map(lambda a: np.stack([a, a, a]), gradients_of(variables, data()))
    twice = np.float32([1, 2, 1])
    broken = jax.tree.map(lambda a: a * twice.reshape(3, *[1] * (a.ndim - 1)), gradients)
    try_update(gradients, stacked)
    with pytest.raises(HistoryError, match="was added up"):
        try_update(broken, stacked)


def test_histories_still_empty_after_three_updates_are_named_once():
    variables = fresh()
    nothing = jax.tree.map(np.zeros_like, variables)
    state, said = init_update(SGD, variables), []
    for _ in range(5):
        variables, state, faults = sgd_update(variables, state, nothing)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            raise_if(faults)
        said.append([str(warning.message) for warning in caught])
    assert [len(lines) for lines in said] == [0, 0, 1, 0, 0]
    assert "g_amax_history, w_amax_history, x_amax_history is still empty" in said[2][0]


# One tree from several ----------------------------------------------------------------------------


def whole_and_parts():
    """Variables, the gradient of a batch, and those of its two halves."""
    variables, x = after(3), data(seed=9)
    return (
        variables,
        gradients_of(variables, x),
        [gradients_of(variables, p) for p in (x[:8], x[8:])],
    )


def test_microbatches_add_up_with_the_largest_amaxes():
    variables, whole, parts = whole_and_parts()
    merged = merge(*parts)
    for operand in "xw":
        name = f"{operand}_amax_history"
        np.testing.assert_array_equal(merged[HISTORIES][name], whole[HISTORIES][name])
    kernel = sum(part["params"]["kernel"] for part in parts)
    np.testing.assert_array_equal(merged["params"]["kernel"], kernel)
    try_update(merged, variables)
    with pytest.raises(HistoryError, match="was added up"):
        try_update(jax.tree.map(jnp.add, *parts), variables)


def test_stacked_microbatches_are_averaged_with_the_largest_amaxes():
    variables, _, parts = whole_and_parts()
    merged = merge_stacked(jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts))
    added = merge(*parts)
    jax.tree.map(np.testing.assert_array_equal, merged[HISTORIES], added[HISTORIES])
    np.testing.assert_allclose(merged["params"]["kernel"], added["params"]["kernel"] / 2, rtol=1e-6)
    try_update(merged, variables)


def test_devices_are_averaged_with_the_largest_amaxes():
    variables, _, parts = whole_and_parts()
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)

    def on_each(gradients):
        return merge_devices(jax.tree.map(lambda leaf: leaf[0], gradients), "data")

    merged = jax.shard_map(
        on_each, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec()
    )(stacked)
    jax.tree.map(np.testing.assert_array_equal, merged, merge_stacked(stacked))
    try_update(merged, variables)


def test_gradients_that_shard_map_has_summed_are_refused():
    """Their mean over devices is their sum: as many times too large as there are devices."""
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    x = jnp.arange(8.0).reshape(4, 2)

    def loss(params, x):
        return jnp.mean((x @ params["kernel"]) ** 2)

    def on_each(take):
        specs = dict(in_specs=(PartitionSpec(), PartitionSpec("data")), out_specs=PartitionSpec())
        return jax.shard_map(take, mesh=mesh, **specs)({"kernel": jnp.ones(2)}, x)

    with pytest.raises(ValueError, match=r"\['kernel'\] is equal on all devices along \['data'\]"):
        on_each(lambda params, x: merge_devices(jax.grad(loss)(params, x), "data"))
    mean = lambda params, x: jax.lax.pmean(loss(params, x), "data")  # noqa: E731
    np.testing.assert_allclose(
        on_each(jax.grad(mean))["kernel"], jax.grad(loss)({"kernel": jnp.ones(2)}, x)["kernel"]
    )
