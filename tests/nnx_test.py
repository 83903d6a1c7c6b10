"""NNX modules: equal to linen's, their histories under NNX's transformations, what is refused."""

import functools
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import fp8jax
from fp8jax.gemm.histories.amax_history import HISTORIES
from fp8jax.gemm.histories.updates import HistoryError, raise_if
from fp8jax.nnx import (
    AmaxHistory,
    Fp8DotGeneral,
    Linear,
    grad,
    keep_master,
    merge,
    seed,
    update,
    value_and_grad,
)
from tests.support.arrays import normal

DELAYED = "fp8_delayed:history=4"
STEPS = 6  # more than a history has entries


def data(i=0, rows=16, width=32, dtype=jnp.float32):
    return jnp.asarray(normal((rows, width), i), dtype)


def sgd(model, tx=None):
    return nnx.Optimizer(model, optax.sgd(1e-3) if tx is None else tx, wrt=nnx.Param)


def square(model, *args):
    return jnp.sum(model(*args) ** 2)


def histories_of(state):
    """Path -> history, of a model or a state."""
    leaves = nnx.to_flat_state(nnx.filter_state(nnx.state(state), AmaxHistory))
    return {path: np.asarray(variable[...]) for path, variable in leaves}


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@nnx.jit(static_argnames=("loss", "differentiate"))
def step(model, optimizer, *args, loss=square, differentiate=value_and_grad):
    value, gradients = differentiate(loss)(model, *args)
    return value, update(model, optimizer, gradients)


def run(model, optimizer, steps, loss=square):
    losses = []
    for i in steps:
        value, faults = step(model, optimizer, data(i), loss=loss)
        raise_if(faults)
        losses.append(float(value))
    return losses


class MLP(nnx.Module):
    def __init__(self, recipe=DELAYED, rngs=None):
        rngs = nnx.Rngs(0) if rngs is None else rngs
        self.up = Linear(32, 64, recipe, use_bias=False, rngs=rngs)
        self.down = Linear(64, 32, recipe, use_bias=False, rngs=rngs)

    def __call__(self, x, keys=(None, None)):
        return self.down(nnx.relu(self.up(x, key=keys[0])), key=keys[1])


class LinenMLP(nn.Module):
    recipe: str

    @nn.compact
    def __call__(self, x, keys):
        x = nn.relu(fp8jax.nn.Dense(64, self.recipe, name="up")(x, keys[0]))
        return fp8jax.nn.Dense(32, self.recipe, name="down")(x, keys[1])


# Equal to linen -----------------------------------------------------------------------------------


@pytest.mark.optimized_too
@pytest.mark.parametrize(
    "recipe",
    [
        "fp8_delayed",
        "fp8_block",
        "nvfp4",
        # Without histories and keys, as blocks.
        pytest.param("fp8_current", marks=pytest.mark.full),
    ],
)
def test_losses_and_histories_equal_linens_bit_for_bit(recipe):
    def error(y, x):
        return jnp.mean((y - jnp.flip(x, -1)) ** 2)

    def loss_of(model, x, keys):
        return error(model(x, keys), x)

    @jax.jit
    def linen_step(variables, state, x, keys):
        def loss_of(variables):
            return error(linen.apply(variables, x, keys), x)

        loss, gradients = jax.value_and_grad(loss_of)(variables)
        return loss, *fp8jax.update(tx, variables, state, gradients)

    model, linen, tx = MLP(recipe), LinenMLP(recipe), optax.adam(1e-2)
    optimizer = sgd(model, tx)
    keys = jax.random.split(jax.random.key(7), (STEPS, 2))
    variables = jax.jit(linen.init)(jax.random.key(0), data(), keys[0])
    kernels = {name: {"kernel": getattr(model, name).kernel[...]} for name in ("up", "down")}
    variables, state = dict(variables) | {"params": kernels}, None
    state = fp8jax.init_update(tx, variables)
    for i in range(STEPS):
        expected, variables, state, _ = linen_step(variables, state, data(i), keys[i])
        loss, faults = step(model, optimizer, data(i), keys[i], loss=loss_of)
        raise_if(faults)
        assert loss == expected
    found = {path[0] + path[-1]: value for path, value in histories_of(model).items()}
    ours = variables[HISTORIES] if HISTORIES in variables else {}
    assert bool(found) == (recipe == "fp8_delayed")
    assert_equal(found, {layer + name: h for layer in ours for name, h in ours[layer].items()})
    assert faults.updates == optimizer.step[...] == STEPS


@pytest.mark.optimized_too
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_flaxs_own_linear_computes_what_ours_does(dtype):
    ours = Linear(32, 8, DELAYED, rngs=nnx.Rngs(0))
    stock = nnx.Linear(
        32, 8, dot_general=Fp8DotGeneral(DELAYED), promote_dtype=keep_master, rngs=nnx.Rngs(0)
    )
    x, gradients = data(dtype=dtype), []
    for model in (ours, stock):
        assert nnx.eval_shape(model, x).dtype == dtype
        gradients.append(nnx.jit(grad(square))(model, x))
    assert_equal(*(nnx.to_pure_dict(g) for g in gradients))
    dw = np.asarray(gradients[0]["kernel"][...])
    assert dw.dtype == np.float32
    # Not rounded to the activations' dtype on its way.
    assert (dw != dw.astype(jnp.bfloat16).astype(np.float32)).any()


def test_layers_have_options():
    layer = Linear(
        32,
        8,
        "fp8_current",
        backend="xla",
        dtype=jnp.bfloat16,
        use_bias=False,
        preferred_element_type=jnp.float32,
        rngs=nnx.Rngs(0),
    )
    assert layer(data()).dtype == jnp.float32 and layer.bias is None
    assert_equal(layer(data()), layer(data(dtype=jnp.bfloat16)))
    with pytest.raises(ValueError, match="drop precision"):
        Linear(32, 8, precision="highest", rngs=nnx.Rngs(0))(data())
    with pytest.raises(TypeError, match="dot_general"):
        Linear(32, 8, dot_general=jax.lax.dot_general, rngs=nnx.Rngs(0))


def test_importing_the_library_does_not_import_nnx():
    code = "import sys, fp8jax; assert 'flax.nnx' not in sys.modules; fp8jax.nnx.Linear"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_linen_model_may_contain_nnx_layers():
    model = nnx.bridge.to_linen(Linear, 32, 8, DELAYED)
    variables = jax.jit(model.init)(jax.random.key(0), data())
    assert {"params", HISTORIES} <= set(variables)
    variables = {name: variables[name] for name in ("params", HISTORIES)}
    gradients = jax.jit(jax.grad(lambda v: jnp.sum(model.apply(v, data()) ** 2)))(variables)
    state = fp8jax.init_update(optax.sgd(1e-3), variables)
    variables, _, faults = fp8jax.update(optax.sgd(1e-3), variables, state, gradients)
    raise_if(faults)
    amaxes = {float(h[0]) for h in jax.tree.leaves(variables[HISTORIES])}
    assert float(jnp.abs(data()).max()) in amaxes


# What moves histories, and what does not ----------------------------------------------------------


def test_plain_gradients_leave_histories_and_are_refused():
    model = MLP()
    optimizer, before = sgd(model), histories_of(model)
    gradients = nnx.jit(nnx.grad(square))(model, data())
    optimizer.update(model, gradients)
    assert_equal(before, histories_of(model))
    with pytest.raises(ValueError, match="lack amax history .*down/dot_general.*value_and_grad"):
        update(model, optimizer, gradients)
    assert optimizer.step[...] == 1  # refused before anything has moved


def test_wrong_arguments_of_an_update_are_refused_before_anything_has_moved():
    model, x = Linear(8, 4, DELAYED, rngs=nnx.Rngs(0)), jnp.ones((2, 8))
    other = Linear(8, 4, "fp8_delayed:history=7", rngs=nnx.Rngs(0))
    optimizer, kernel = sgd(model), model.kernel[...]
    gradients = grad(square)(model, x)
    for args, error, message in (
        ((optimizer, grad(square)(other, x)), ValueError, r"has shape .* in the first and \(7,\)"),
        ((optax.sgd(0.1), gradients), TypeError, "use nnx.Optimizer"),
        ((model, gradients), TypeError, "use nnx.Optimizer"),
        ((optimizer, value_and_grad(square)(model, x)), TypeError, "pass the second result"),
    ):
        with pytest.raises(error, match=message):
            update(model, *args)
    assert_equal(model.kernel[...], kernel)
    assert optimizer.step[...] == 0


def test_an_optimizer_that_has_histories_is_refused():
    model = MLP()
    for wrt in (nnx.Variable, (nnx.Param, AmaxHistory)):
        optimizer = nnx.Optimizer(model, optax.sgd(1e-3), wrt=wrt)
        with pytest.raises(ValueError, match="optimizer's wrt=.* has amax histories"):
            update(model, optimizer, nnx.jit(grad(square))(model, data()))


def test_histories_still_empty_after_three_updates_are_named():
    model = MLP()
    model.unused = Linear(8, 8, DELAYED, rngs=nnx.Rngs(1))
    optimizer = sgd(model)
    for _ in range(2):
        raise_if(step(model, optimizer, data())[1])
    with pytest.warns(UserWarning, match="unused/dot_general/.* is still empty after 3 updates"):
        raise_if(step(model, optimizer, data())[1])


@pytest.mark.parametrize(
    ("treat", "message"),
    [(lambda a: 2.0 * a, "was added up by JAX"), (lambda a: a / 1024, "was changed between")],
)
def test_what_was_done_to_gradients_is_named(treat, message):
    model = MLP()
    optimizer = sgd(model)
    run(model, optimizer, range(2))
    gradients = jax.tree.map(treat, nnx.jit(grad(square))(model, data()))
    with pytest.raises(HistoryError, match=f"down/dot_general/g_amax_history.*{message}"):
        raise_if(update(model, optimizer, gradients))


def test_microbatches_add_up_with_the_largest_amaxes():
    model = MLP()
    optimizer = sgd(model)
    run(model, optimizer, range(2))
    gradients_of = nnx.jit(grad(square))
    whole = gradients_of(model, data())
    merged = merge(*(gradients_of(model, part) for part in (data()[:8], data()[8:])))
    found, expected = histories_of(merged), histories_of(whole)
    assert found.keys() == expected.keys()
    for path in (("up", "dot_general", f"{operand}_amax_history") for operand in "xw"):
        np.testing.assert_array_equal(found[path], expected[path])
    parts = [gradients_of(model, part) for part in (data()[:8], data()[8:])]
    added = sum(part["up"]["kernel"][...] for part in parts)
    np.testing.assert_array_equal(merged["up"]["kernel"][...], added)
    raise_if(update(model, optimizer, merged))


def test_functions_of_linen_s_histories_refuse_those_of_nnx():
    """They would average histories, or leave them empty."""
    model = MLP()
    gradients = nnx.jit(grad(square))(model, data())
    stacked = jax.tree.map(lambda a: jnp.stack([a, a]), gradients)
    histories = fp8jax.histories
    for refused in (
        lambda: histories.split(gradients),
        lambda: histories.split(nnx.to_pure_dict(gradients)),
        lambda: histories.merge(gradients, gradients),
        lambda: histories.merge_stacked(stacked),
        lambda: histories.seed(square, model, data()),
        lambda: histories.split([model]),
    ):
        with pytest.raises(TypeError, match="'._amax_history' is not in .*fp8jax.nnx.merge"):
            refused()
    assert histories.split(nnx.filter_state(gradients, nnx.Param))[1] == {}


def test_what_flax_takes_and_this_does_not_is_named():
    model = MLP()
    with pytest.raises(TypeError, match=r"must be an int or several, got DiffState.*wrt"):
        value_and_grad(square, argnums=nnx.DiffState(0, nnx.Param))
    both = nnx.ModelAndOptimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    with pytest.raises(TypeError, match="use nnx.Optimizer.*got an nnx.ModelAndOptimizer"):
        update(model, both, nnx.state(model))


def test_two_models_are_differentiated_at_once():
    models = MLP(), MLP(rngs=nnx.Rngs(1))

    def loss_of(first, x, second):
        return square(first, x) + square(second, x)

    both = nnx.jit(grad(loss_of, argnums=(0, 2)))(models[0], data(), models[1])
    for model, gradients in zip(models, both, strict=True):
        alone = nnx.jit(grad(square))(model, data())
        assert_equal(histories_of(gradients), histories_of(alone))


def test_a_seeded_model_starts_with_its_amaxes():
    model = nnx.Linear(32, 8, dot_general=Fp8DotGeneral(DELAYED, seeded=True), rngs=nnx.Rngs(0))
    kernel = np.asarray(model.kernel[...])
    seed(square, model, data())
    np.testing.assert_array_equal(kernel, model.kernel[...])
    found = {path[-1]: history[0] for path, history in histories_of(model).items()}
    assert found["x_amax_history"] == jnp.abs(data()).max()
    assert found["w_amax_history"] == np.abs(kernel).max()
    assert found["g_amax_history"] > 0
    run(model, sgd(model), range(3))


# Several calls ------------------------------------------------------------------------------------


class Repeated(nnx.Module):
    """x -> 2 layer(x), three times, in several ways."""

    def __init__(self, how):
        self.how = how
        self.layer = Linear(32, 32, DELAYED, use_bias=False, rngs=nnx.Rngs(0))

    def __call__(self, x):
        once = {"remat": nnx.remat, "jit": nnx.jit, "scan over remat": nnx.remat}.get(self.how)
        body = (lambda x, layer: layer(x) * 2) if once is None else once(lambda x, m: m(x) * 2)
        if "scan" in self.how:
            axes = {"in_axes": (nnx.Carry, None), "out_axes": nnx.Carry}
            return nnx.scan(body, length=3, **axes)(x, self.layer)
        if self.how == "fori_loop":
            layer_x = nnx.fori_loop(0, 3, lambda _, c: (c[0], body(c[1], c[0])), (self.layer, x))
            return layer_x[1]
        for _ in range(3):
            x = body(x, self.layer)
        return x


@nnx.jit
def amaxes_of(layer, x):
    """The largest input and the largest weight of three calls of one layer, as in `Repeated`."""
    inputs = [x, 2 * layer(x), 2 * layer(2 * layer(x))]
    return jnp.abs(jnp.stack(inputs)).max(), jnp.abs(layer.kernel[...]).max()


WAYS = ["called", "remat", "jit", "scan", "scan over remat", "fori_loop"]


@pytest.mark.full
@pytest.mark.parametrize("how", WAYS)
def test_seeding_takes_the_largest_amax_of_all_calls(how):
    """Where each call has arrays of its own, JAX would add their answers."""
    model = Repeated(how)
    x, w = jax.device_get(amaxes_of(model.layer, data(0)))
    fp8jax.nnx.seed(lambda model, x: model(x).mean(), model, data(0))
    found = {path[-1]: history for path, history in histories_of(model).items()}
    np.testing.assert_allclose(found["x_amax_history"][0], x, rtol=1e-6)
    np.testing.assert_allclose(found["w_amax_history"][0], w, rtol=1e-6)


@pytest.mark.parametrize("how", WAYS)
def test_the_history_is_the_largest_amax_of_all_calls(how):
    model, expected = Repeated(how), []
    optimizer = sgd(model, optax.sgd(1e-5))
    for i in range(6):
        expected.insert(0, jax.device_get(amaxes_of(model.layer, data(i))))
        run(model, optimizer, [i])
    found = {path[-1]: history for path, history in histories_of(model).items()}
    x, w = np.transpose(expected[:4])
    np.testing.assert_allclose(found["x_amax_history"], x, rtol=1e-6)
    np.testing.assert_array_equal(found["w_amax_history"], w.astype(np.float32))


def flaxs_own(loss):
    return nnx.value_and_grad(loss, argnums=nnx.DiffState(0, (nnx.Param, AmaxHistory)))


@pytest.mark.parametrize("how", WAYS)
def test_what_flaxs_own_gradient_adds_up_is_found(how):
    model = Repeated(how)
    optimizer = sgd(model)
    raise_if(step(model, optimizer, data(), differentiate=flaxs_own)[1])
    _, faults = step(model, optimizer, data(), differentiate=flaxs_own)
    if how == "called":
        return raise_if(faults)
    with pytest.raises(HistoryError, match="was added up by JAX.*fp8jax.nnx.value_and_grad"):
        raise_if(faults)


def test_outside_jit_one_call_is_right_and_a_second_is_refused():
    model = Linear(32, 32, DELAYED, use_bias=False, rngs=nnx.Rngs(0))
    under_jit = nnx.jit(grad(square))(model, data())
    assert_equal(histories_of(grad(square)(model, data())), histories_of(under_jit))
    with pytest.raises(ValueError, match="called more than once outside jax.jit"):
        grad(square)(Repeated("called"), data())


def test_vmap_of_the_input_alone_is_refused():
    def loss_of(model, x):
        return jnp.sum(nnx.vmap(lambda m, row: m(row), in_axes=(None, 0))(model, x[:, None]) ** 2)

    with pytest.raises((TypeError, ValueError), match="fp8_meta32|maps the input of a module"):
        nnx.jit(grad(loss_of))(Linear(32, 8, DELAYED, rngs=nnx.Rngs(0)), data())


@pytest.mark.parametrize("taken", [True, False])
def test_a_branch_not_taken_keeps_its_history(taken):
    def loss_of(model, x):
        return jnp.sum(nnx.cond(taken, lambda m, x: m(x), lambda m, x: 2 * x, model, x) ** 2)

    model = Linear(32, 32, DELAYED, rngs=nnx.Rngs(0))
    nnx.update(model, jax.tree.map(lambda h: h + 3, nnx.state(model, AmaxHistory)))
    _, faults = step(model, sgd(model), data(), loss=loss_of)
    raise_if(faults)
    assert all((history[0] != 3) == taken for history in histories_of(model).values())


class Stack(nnx.Module):
    """Three layers with stacked variables, in a scan."""

    def __init__(self, recipe=DELAYED, remat=False):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def layers(rngs):
            return Linear(32, 32, recipe, rngs=rngs)

        self.remat, self.layers = remat, layers(nnx.Rngs(params=0, fp8=1))

    def __call__(self, x):
        body = nnx.remat(self.one) if self.remat else self.one
        return nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)

    @staticmethod
    def one(x, layer):
        return 2 * layer(x)


@pytest.mark.parametrize("remat", [False, True])
def test_stacked_layers_have_the_histories_of_separate_ones(remat):
    class Separate(nnx.Module):
        def __init__(self, stack):
            self.layers = nnx.List([Linear(32, 32, DELAYED, rngs=nnx.Rngs(0)) for _ in range(3)])
            for i, layer in enumerate(self.layers):
                nnx.update(layer, jax.tree.map(lambda a, i=i: a[i], nnx.state(stack.layers)))

        def __call__(self, x):
            for layer in self.layers:
                x = 2 * layer(x)
            return x

    stack = Stack(remat=remat)
    separate = Separate(stack)
    for model in (stack, separate):
        run(model, sgd(model, optax.sgd(1e-5)), range(6))
    ours = histories_of(separate)
    for path, history in histories_of(stack).items():
        assert history.shape == (3, 4)
        for i in range(3):
            np.testing.assert_allclose(history[i], ours["layers", i, *path[1:]], rtol=1e-5)


# Stochastic rounding ------------------------------------------------------------------------------


def test_a_missing_stream_is_named():
    for rngs in (None, nnx.Rngs(params=0)):
        dot = Fp8DotGeneral("nvfp4", rngs=rngs)
        with pytest.raises(ValueError, match="needs a key.* stream 'fp8'.*nnx.Rngs.*fp8=1"):
            nnx.Linear(32, 32, dot_general=dot, rngs=nnx.Rngs(0))(data())
    model, key = Linear(32, 32, "nvfp4", rngs=nnx.Rngs(params=0)), jax.random.key(0)
    assert nnx.eval_shape(lambda m: m(data(), key=key), model).shape == (16, 32)


@pytest.mark.parametrize("streams", [{"params": 0, "fp8": 1}, {"default": 0}])
def test_each_step_and_each_layer_draws_keys_of_its_own(streams):
    model = MLP("nvfp4", rngs=nnx.Rngs(**streams))
    gradients_of = nnx.jit(grad(square))
    first, second = (np.asarray(gradients_of(model, data())["up"]["kernel"][...]) for _ in "ab")
    assert (first != second).any()
    drawn = [layer.dot_general.stream() for layer in (model.up, model.down)]
    assert not jnp.array_equal(*map(jax.random.key_data, drawn))
    assert all(layer.dot_general.stream.count[...] == 3 for layer in (model.up, model.down))


@pytest.mark.parametrize("remat", [False, True])
def test_stacked_layers_round_stochastically(remat):
    stack = Stack("nvfp4", remat)
    losses = run(stack, sgd(stack, optax.sgd(1e-6)), [0, 0, 0])
    assert np.isfinite(losses).all()
    (count,) = {int(c) for c in stack.layers.dot_general.stream.count[...]}
    assert count >= 3


# Checkpoints --------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [DELAYED, "nvfp4"])
def test_a_checkpoint_continues_bit_for_bit(tmp_path, recipe):
    def fresh(at):
        model = MLP(recipe, rngs=nnx.Rngs(at))
        return model, sgd(model, optax.adam(1e-2))

    model, optimizer = fresh(0)
    run(model, optimizer, range(3))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", nnx.to_pure_dict(nnx.state((model, optimizer))))
        checkpointer.wait_until_finished()
        other = fresh(1)
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, nnx.to_pure_dict(nnx.state(other)))
        nnx.update(other, checkpointer.restore(tmp_path / "saved", like))
    expected = run(model, optimizer, range(3, 8))
    assert run(*other, range(3, 8)) == expected
    assert_equal(histories_of(other[0]), histories_of(model))


# Flax's attention ---------------------------------------------------------------------------------


def attention(**hooks):
    return nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0), **hooks)


def attend(model, x):
    return jnp.sum(model(x[None]) ** 2)


def test_attention_with_an_instance_for_each_layer():
    model = attention()
    layers = {name: getattr(model, name) for name in ("query", "key", "value", "out")}
    for layer in layers.values():
        layer.dot_general = nnx.data(Fp8DotGeneral(DELAYED))
    kernels = {name: float(jnp.abs(layer.kernel[...]).max()) for name, layer in layers.items()}
    run(model, sgd(model), [0], attend)
    found = histories_of(model)
    assert len(found) == 12
    for name in layers:
        assert found[name, "dot_general", "w_amax_history"][0] == np.float32(kernels[name])


def test_attention_with_one_instance_for_three_layers_takes_their_maximum():
    model = attention(qkv_dot_general=Fp8DotGeneral(DELAYED))
    layers = (model.query, model.key, model.value)
    largest = max(float(jnp.abs(layer.kernel[...]).max()) for layer in layers)
    run(model, sgd(model), [0], attend)
    found = {path[-1]: history[0] for path, history in histories_of(model).items()}
    assert len(histories_of(model)) == 3
    assert found["w_amax_history"] == np.float32(largest)


def test_a_class_can_have_no_histories():
    def with_class(recipe):
        cls = functools.partial(Fp8DotGeneral, recipe)
        return attention(qkv_dot_general_cls=cls, out_dot_general_cls=cls)

    model, exact = with_class("fp8_current"), attention()
    run(model, sgd(model), [0], attend)
    assert (with_class("fp8_current")(data()[None]) != exact(data()[None])).any()
    for refused in (with_class(DELAYED), attention(out_dot_general_cls=Fp8DotGeneral)):
        gradients = nnx.jit(grad(attend))(refused, data())
        with pytest.raises(ValueError, match="module '.*' has a dot_general_cls with amax hist"):
            update(refused, sgd(refused), gradients)
