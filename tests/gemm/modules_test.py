"""Amax histories through reuse, scan, vmap, remat, sharding and flax's own TrainState.

Every expected amax is computed by hand from the inputs, and histories combine by maximum.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import fp8jax.nn as fnn
from fp8jax.gemm.histories.amax_history import HISTORIES, max_combining
from fp8jax.gemm.modules import Dense, Einsum, Fp8DotGeneral
from fp8jax.numerics.recipes import RECIPES
from tests.support.arrays import normal

DELAYED = RECIPES["fp8_delayed"]
H = DELAYED.histories["x"]
OLD = np.arange(H, 0, -1, dtype=np.float32) / 100  # below every amax of these tests


@pytest.mark.full
def test_parameters_are_of_float32_in_double_precision_too():
    with jax.enable_x64(True):
        x = jnp.ones((2, 8), jnp.bfloat16)
        for module in (Dense(4, DELAYED, use_bias=True), Einsum("ab,bc->ac", (8, 4), DELAYED)):
            variables = module.init(jax.random.key(0), x)
            assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype(jnp.float32)}


def with_old_histories(variables):
    """The same variables with each history filled with `OLD`."""
    fill = lambda h: jnp.asarray(np.broadcast_to(OLD, h.shape))  # noqa: E731
    return {**variables, HISTORIES: jax.tree.map(fill, variables[HISTORIES])}


def initial(model, *inputs):
    return jax.jit(model.init)(jax.random.key(0), *inputs)


def new_histories(model, variables, *inputs):
    """The gradient of the sum of the outputs with respect to the histories."""

    def loss(histories):
        out = model.apply({**variables, HISTORIES: histories}, *inputs)
        return jnp.sum(out.astype(jnp.float32))

    return jax.jit(jax.grad(loss))(variables[HISTORIES])


def expected(amax: float) -> np.ndarray:
    return np.concatenate([[np.float32(amax)], OLD[:-1]])


class Twice(nn.Module):
    """One layer, called on x and then on 10 x."""

    @nn.compact
    def __call__(self, x):
        dense = Dense(8)
        return dense(x) + dense(10 * x)


class Stock(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(32, dot_general_cls=Fp8DotGeneral)(x)
        return nn.Dense(8, dot_general_cls=Fp8DotGeneral)(nn.relu(x))


def data(shape=(4, 8), seed=0):
    return jnp.asarray(normal(shape, seed))


def test_one_call_writes_the_three_histories():
    x = data()
    model = Dense(8)
    variables = with_old_histories(initial(model, x))
    new = new_histories(model, variables, x)
    kernel = variables["params"]["kernel"]
    np.testing.assert_array_equal(new["x_amax_history"], expected(jnp.abs(x).max()))
    np.testing.assert_array_equal(new["w_amax_history"], expected(jnp.abs(kernel).max()))
    np.testing.assert_array_equal(new["g_amax_history"], expected(1.0))


def test_reuse_combines_by_maximum_behind_the_door():
    x = data()
    model = max_combining(Twice)()
    variables = with_old_histories(initial(model, x))
    assert jax.tree.structure(variables) == jax.tree.structure(
        jax.eval_shape(Twice().init, jax.random.key(0), x)
    )
    assert all(h.dtype == jnp.float32 for h in jax.tree.leaves(variables))
    new = new_histories(model, variables, x)["Dense_0"]
    np.testing.assert_array_equal(new["x_amax_history"], expected(10 * jnp.abs(x).max()))


def test_max_combining_changes_no_initial_value_and_needs_jit():
    x, wrapped = data(), max_combining(Twice)()
    variables = wrapped.init(jax.random.key(3), x)
    jax.tree.map(np.testing.assert_array_equal, variables, Twice().init(jax.random.key(3), x))
    y, again = wrapped.init_with_output(jax.random.key(3), x)
    np.testing.assert_array_equal(y, wrapped.apply(variables, x))
    jax.tree.map(np.testing.assert_array_equal, variables, again)
    with pytest.raises(ValueError, match="put jax.jit around jax.grad"):
        jax.grad(lambda v: jnp.sum(wrapped.apply(v, x)))(variables)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return 2 * Dense(8, kernel_init=nn.initializers.normal(0.3))(x), None


class Scanned(nn.Module):
    remat: bool = False
    share: bool = False

    @nn.compact
    def __call__(self, x):
        layer = nn.remat(Layer, prevent_cse=False) if self.remat else Layer
        axes = (
            dict(variable_broadcast=("params", HISTORIES))
            if self.share
            else dict(variable_axes={"params": 0, HISTORIES: 0})
        )
        split = {"params": not self.share}
        return nn.scan(layer, split_rngs=split, length=3, **axes)()(x, None)[0]


def layer_inputs(params, histories, x, share):
    """What each of the three layers receives, layer by layer."""
    params, histories = jax.device_get((params, histories))
    apply = jax.jit(lambda layer, x: Layer().apply(layer, x, None)[0])
    inputs = []
    for i in range(3):
        pick = (lambda a: a) if share else (lambda a, i=i: a[i])
        inputs.append(x)
        layer = {"params": jax.tree.map(pick, params), HISTORIES: jax.tree.map(pick, histories)}
        x = apply(layer, x)
    return inputs


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("share", [False, True])
def test_scan_over_layers(remat, share):
    x = data()
    door = max_combining(Scanned)(remat=remat, share=share)
    variables = with_old_histories(initial(door, x))
    (inner,) = variables["params"].values()
    (histories,) = variables[HISTORIES].values()
    amaxes = [float(jnp.abs(v).max()) for v in layer_inputs(inner, histories, x, share)]
    assert len({round(a, 4) for a in amaxes}) == 3
    (new,) = new_histories(door, variables, x).values()
    got = new["Dense_0"]["x_amax_history"]
    if share:
        np.testing.assert_allclose(got, expected(max(amaxes)), rtol=1e-6)
    else:
        np.testing.assert_allclose(got, [expected(a) for a in amaxes], rtol=1e-6)


def test_vmap_keeps_one_history_an_instance():
    x = data((3, 4, 8)) * jnp.asarray([1.0, 10.0, 100.0]).reshape(3, 1, 1)
    ensemble = nn.vmap(
        Dense, variable_axes={"params": 0, HISTORIES: 0}, split_rngs={"params": True}
    )
    model = ensemble(8)
    variables = with_old_histories(initial(model, x))
    new = new_histories(model, variables, x)["x_amax_history"]
    np.testing.assert_array_equal(new, [expected(jnp.abs(v).max()) for v in x])


def test_a_sharded_batch_gives_the_histories_of_one_device():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x = data((64, 8))
    model = Dense(8)
    variables = with_old_histories(initial(model, x))
    sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    one, eight = (new_histories(model, variables, v) for v in (x, sharded))
    jax.tree.map(np.testing.assert_array_equal, one, eight)


def cosine(a, b) -> float:
    a, b = (np.concatenate([np.ravel(v) for v in jax.tree.leaves(t)]) for t in (a, b))
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def gradients(model, variables, x, y):
    def loss(variables):
        return 1e-4 * jnp.mean((model.apply(variables, x) - y) ** 2)

    return jax.jit(jax.grad(loss))(variables)


def test_the_first_step_seeds_and_the_second_uses_the_histories():
    """Loss scaled to language-model size, where an empty history flushes gradients."""
    x, y = data((64, 16)), data((64, 8), 1)

    class Net(nn.Module):
        recipe: object
        seeded: bool = True

        @nn.compact
        def __call__(self, x):
            x = Dense(32, self.recipe, seeded=self.seeded)(x)
            return Dense(8, self.recipe, seeded=self.seeded)(nn.relu(x))

    variables = initial(Net(DELAYED), x)
    exact = gradients(Net("bf16"), {"params": variables["params"]}, x, y)["params"]
    seeded = gradients(Net(DELAYED, seeded=False), variables, x, y)
    assert cosine(seeded["params"], exact) >= 0.99
    steady = gradients(Net(DELAYED), {**variables, HISTORIES: seeded[HISTORIES]}, x, y)
    assert cosine(steady["params"], exact) >= 0.99
    unseeded = gradients(Net(DELAYED), variables, x, y)
    flushed = [np.mean(np.asarray(g) == 0) for g in jax.tree.leaves(unseeded["params"])]
    assert max(flushed) > 0.5  # what an empty history does to gradients of this size


def test_stock_dense_in_a_stock_train_state_trains():
    x, w = data((64, 16)), data((16, 8), 1)
    y = x @ w

    model, first = Stock(), None
    variables = initial(model, x)
    state = TrainState.create(apply_fn=model.apply, params=variables, tx=optax.adam(1e-2))

    @jax.jit
    def step(state):
        def loss(variables):
            return jnp.mean((state.apply_fn(variables, x) - y) ** 2)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    for _ in range(100):
        state, value = step(state)
        first = value if first is None else first
    assert value < 0.1 * first
    history = state.params[HISTORIES]["Dense_0"]["Fp8DotGeneral_0"]["x_amax_history"]
    np.testing.assert_array_equal(history, np.full(H, jnp.abs(x).max()))


def test_dense_and_einsum_agree_and_keep_the_activations_dtype():
    x = data((2, 3, 8)).astype(jnp.bfloat16)
    dense, einsum = Dense(6, "fp8_current"), Einsum("bsd,df->bsf", (8, 6), "fp8_current")
    variables = initial(dense, x)
    assert variables["params"]["kernel"].dtype == jnp.float32
    y = jax.jit(dense.apply)(variables, x)
    assert y.dtype == jnp.bfloat16 and y.shape == (2, 3, 6)
    np.testing.assert_array_equal(y, jax.jit(einsum.apply)(variables, x))
    biased = Dense(6, "fp8_current", use_bias=True)
    with_bias = {"params": {**variables["params"], "bias": np.full(6, 2.0, np.float32)}}
    np.testing.assert_array_equal(
        jax.jit(biased.apply)(with_bias, x), np.asarray(y) + y.dtype.type(2)
    )


def test_bf16_dense_keeps_no_state_and_equals_flax():
    x = data((5, 8))
    model = Dense(6, "bf16")
    variables = initial(model, x)
    assert set(variables) == {"params"}
    flaxs = nn.Dense(6, use_bias=False)
    ours, theirs = (jax.jit(each.apply)(variables, x) for each in (model, flaxs))
    np.testing.assert_array_equal(ours, theirs)


def test_a_precision_that_cannot_be_honored_is_refused():
    layer = nn.Dense(4, precision="highest", dot_general_cls=Fp8DotGeneral)
    with pytest.raises(ValueError, match="the recipe decides.*highest"):
        layer.init(jax.random.key(0), data())
    with pytest.raises(ValueError, match="unknown recipe"):
        fnn.Dense(4, "fp9").init(jax.random.key(0), data())
