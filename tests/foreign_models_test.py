"""Models that are not this library's: stock linen modules with quantized GEMMs, one by one.

`observe` reads what each quantized linear of a model receives, with flax's method interceptors. So
the histories are compared with true amaxes of the same step. docs/your_model.md lists the results.
"""

import contextlib
import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import fp8jax
from fp8jax.nn import HISTORIES, RNG, Fp8DotGeneral, keep_master, max_combining
from tests.support.random_weights import random_weights

DELAYED = "fp8_delayed:history=3"
SGD = optax.sgd(1e-2)
sgd_update = functools.partial(fp8jax.update, SGD)


def hook(recipe=DELAYED):
    return functools.partial(Fp8DotGeneral, recipe)


def dense(features=8, recipe=DELAYED, **fields):
    return nn.Dense(features, dot_general_cls=hook(recipe), **fields)


def data(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def variables_of(model, *args, seed=0):
    """Parameters and histories of a new model, without what only observation needs."""
    shapes = jax.eval_shape(model.init, {"params": jax.random.key(seed)}, *args)
    kept = {name: shapes[name] for name in shapes if name in ("params", HISTORIES)}
    return random_weights(kept, seed)


def mean_square(y):
    return jnp.mean(y.astype(jnp.float32) ** 2)


def loss_of(model, *args, **kwargs):
    return lambda variables: mean_square(model.apply(variables, *args, **kwargs))


# What each linear receives ------------------------------------------------------------------------


def observe(next_fun, args, kwargs, context):
    """Sows the largest |x| and |w| of a linear's calls; adds zeros whose gradient is g."""
    if not isinstance(context.module, Fp8DotGeneral):
        return next_fun(*args, **kwargs)
    for operand, array in zip("xw", args[:2], strict=True):
        amax = jnp.max(jnp.abs(array)).astype(jnp.float32)
        context.module.sow(
            "amaxes", operand, amax, reduce_fn=jnp.maximum, init_fn=lambda: jnp.float32(0)
        )
    return context.module.perturb("g", next_fun(*args, **kwargs))


def observed_gradients(model, g=True):
    """Return (variables, x) -> gradients, and the true amaxes by the names of the histories.

    Args:
      g: whether to observe g, too; not for modules that are called more than once.
    """

    def gradients(variables, zeros, x):
        def loss(variables, zeros):
            with nn.intercept_methods(observe):
                trees = {**variables, "perturbations": zeros} if g else variables
                y, seen = model.apply(trees, x, mutable=["amaxes"])
            return mean_square(y), seen["amaxes"]

        both, amaxes = jax.grad(loss, argnums=(0, 1), has_aux=True)(variables, zeros)
        return both[0], by_name(amaxes, both[1], variables[HISTORIES])

    gradients = jax.jit(gradients)
    return lambda variables, x: gradients(variables, zeros_of(model, x) if g else {}, x)


def zeros_of(model, x):
    def zeros():
        with nn.intercept_methods(observe):
            return model.init(jax.random.key(0), x)["perturbations"]

    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(zeros))


def by_name(amaxes, outputs, histories):
    """Return amaxes in a tree like the histories, without their last axis."""
    true = dict(jax.tree.leaves_with_path(amaxes)) | dict(jax.tree.leaves_with_path(outputs))

    def of(path, history):
        operand = path[-1].key[0]
        key = (*path[:-1], jax.tree_util.DictKey(operand))
        if key not in true:
            return jnp.full(history.shape[:-1], -1.0)  # not observed
        axes = tuple(range(history.ndim - 1, true[key].ndim))
        return jnp.max(jnp.abs(true[key].astype(jnp.float32)), axis=axes)

    return jax.tree_util.tree_map_with_path(of, histories)


def check_histories(model, x, variables=None, g=True, steps=4):
    """Train some steps; histories are the amaxes of the last steps, newest first."""
    variables = variables_of(model, x) if variables is None else variables
    gradients_of, state, seen = observed_gradients(model, g), fp8jax.init_update(SGD, variables), []
    update = jax.jit(sgd_update)
    for _ in range(steps):
        gradients, amaxes = gradients_of(variables, x)
        variables, state, faults = update(variables, state, gradients)
        fp8jax.histories.raise_if(faults)
        seen.insert(0, amaxes)
    flat = [jax.tree.leaves(tree) for tree in seen]
    paths = jax.tree.leaves_with_path(variables[HISTORIES])
    for i, (path, history) in enumerate(paths):
        entries = history.shape[-1]
        expected = np.stack([step[i] for step in flat[:entries]], axis=-1)
        if (expected >= 0).all():
            np.testing.assert_allclose(history, expected, rtol=1e-6, err_msg=str(path))
    assert len(paths) >= 3 and not any((h == 0).any() for _, h in paths)
    return variables


# Models -------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    recipe: str
    width: int = 32

    @nn.compact
    def __call__(self, x):
        y = nn.gelu(dense(self.width, self.recipe)(x))
        return dense(x.shape[-1], self.recipe)(y)


class Mixer(nn.Module):
    """MLP-Mixer, arXiv 2105.01601, on patches [batch, patch, channel]."""

    recipe: str = DELAYED

    @nn.compact
    def __call__(self, x):
        x = dense(16, self.recipe, name="embed")(x)
        tokens = jnp.swapaxes(nn.LayerNorm()(x), 1, 2)
        x = x + jnp.swapaxes(Mlp(self.recipe)(tokens), 1, 2)
        x = x + Mlp(self.recipe)(nn.LayerNorm()(x))
        return dense(8, self.recipe, name="head")(jnp.mean(x, axis=1))


class Vit(nn.Module):
    """A vision transformer, arXiv 2010.11929, on images; the patch embedding stays in BF16."""

    recipe: str = DELAYED

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(16, (4, 4), strides=(4, 4), dtype=jnp.bfloat16, name="embed")(x)
        x = x.reshape(x.shape[0], -1, 16).astype(jnp.float32)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        x = x + nn.MultiHeadDotProductAttention(
            num_heads=2,
            qkv_dot_general_cls=hook(self.recipe),
            out_dot_general_cls=hook(self.recipe),
        )(nn.LayerNorm()(x))
        x = x + Mlp(self.recipe)(nn.LayerNorm()(x))
        return dense(8, self.recipe, name="head")(jnp.mean(x, axis=1))


MODELS = {
    "mlp": (Mlp, (32, 16), 2),
    "mixer": (Mixer, (16, 16, 12), 6),
    "vit": (Vit, (16, 16, 16, 3), 7),
}


@pytest.mark.parametrize(
    "name",
    # The vision transformer has the Mixer's linears, but for those over its patches.
    [pytest.param("mixer", marks=pytest.mark.full), "vit"],
)
def test_histories_of_a_model_are_the_amaxes_of_its_linears(name):
    model, shape, linears = MODELS[name]
    variables = check_histories(model(DELAYED), data(*shape))
    assert len(jax.tree.leaves(variables[HISTORIES])) == 3 * linears


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("mlp", "fp8_block"),
        ("mlp", "nvfp4"),
        ("vit", DELAYED),
        # Its casts are those of delayed scaling; the vision transformer has the Mixer's linears.
        pytest.param("mlp", "fp8_current", marks=pytest.mark.full),
        pytest.param("mixer", DELAYED, marks=pytest.mark.full),
    ],
)
def test_gradients_of_a_model_are_near_those_of_bf16(name, recipe):
    """Within the noise of all GEMMs, if each reaches the gradient undamped and unamplified.

    Each of the three GEMMs of a linear has the noise of docs/recipes.md, which adds in squares.
    """
    model, shape, linears = MODELS[name]
    x, rngs = data(*shape), {RNG: jax.random.key(1)}
    variables = variables_of(model(recipe), x)
    gradients = jax.jit(jax.grad(loss_of(model(recipe), x, rngs=rngs)))(variables)["params"]
    exact = exact_gradients(name)
    decibels = {"nvfp4": 15.1, "fp8_block": 28.6}.get(recipe, 24.6)
    noise = 10 ** (-decibels / 20)
    error = relative_error(gradients, exact)
    assert noise / 10 < error < noise * np.sqrt(3 * linears)


@functools.cache
def exact_gradients(name):
    model, shape, _ = MODELS[name]
    x = data(*shape)
    return jax.jit(jax.grad(loss_of(model("bf16"), x)))(variables_of(model("bf16"), x))["params"]


def relative_error(tree, exact) -> float:
    tree, exact = (np.concatenate([np.ravel(v) for v in jax.tree.leaves(t)]) for t in (tree, exact))
    return float(np.linalg.norm(tree - exact) / np.linalg.norm(exact))


def trained(model, x, y, seeds, steps=40):
    """Return the mean loss of the last ten steps for each seed; all steps are one program."""
    optimizer = optax.adamw(3e-3, weight_decay=0.1)

    def step(carry, i):
        variables, state = carry
        rngs = {RNG: jax.random.fold_in(jax.random.key(7), i)}
        loss = lambda v: mean_square(model.apply(v, x, rngs=rngs) - y)  # noqa: E731
        value, gradients = jax.value_and_grad(loss)(variables)
        variables, state, faults = fp8jax.update(optimizer, variables, state, gradients)
        return (variables, state), (value, faults)

    program = jax.jit(lambda carry: jax.lax.scan(step, carry, jnp.arange(steps))[1])
    losses = []
    for seed in seeds:
        variables = variables_of(model, x, seed=seed)
        values, faults = program((variables, fp8jax.init_update(optimizer, variables)))
        fp8jax.histories.raise_if(faults)  # of all steps
        losses.append(float(jnp.mean(values[-10:])))
    return losses


def test_faults_that_a_scan_has_stacked_are_read_at_once():
    """Histories that are empty in the first two updates only are no reason to warn."""
    variables = variables_of(dense(use_bias=False), data(4, 8))
    filled = jax.tree.map(lambda leaf: leaf.at[..., 0].set(1.0), variables)
    nothing = jax.tree.map(jnp.zeros_like, variables)

    def step(carry, gradients):
        *carry, faults = fp8jax.update(SGD, *carry, gradients)
        return tuple(carry), faults

    for late, warns in ((filled, False), (nothing, True)):
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), nothing, nothing, late, late)
        carry = variables, fp8jax.init_update(SGD, variables)
        (_, state), faults = jax.lax.scan(step, carry, stacked)
        assert state.updates == 4
        with pytest.warns(match="still empty") if warns else contextlib.nullcontext():
            if late is filled:  # the fourth step repeats an entry without a shift
                with pytest.raises(ValueError, match="was changed between gradient and update"):
                    fp8jax.histories.raise_if(faults)
                faults = jax.tree.map(lambda leaf: leaf[:3], faults)
            fp8jax.histories.raise_if(faults)


def test_a_mixer_trains_as_near_to_bf16_as_another_seed():
    x, y = data(16, 16, 12), data(16, 8, seed=1)
    exact = trained(Mixer("bf16"), x, y, range(3))
    (ours,) = trained(Mixer(DELAYED), x, y, [0])
    assert abs(ours - exact[0]) < max(exact) - min(exact)


# Which modules have a hook ------------------------------------------------------------------------


def test_which_stock_modules_take_a_dot_general():
    """docs/your_model.md names them; a new hook in flax fails here."""

    def hooks(module):
        return {f.name for f in dataclasses.fields(module) if f.name.endswith("dot_general_cls")}

    assert hooks(nn.Dense) == hooks(nn.DenseGeneral) == {"dot_general_cls"}
    attention = {"qkv_dot_general_cls", "out_dot_general_cls"}
    assert hooks(nn.MultiHeadDotProductAttention) == hooks(nn.MultiHeadAttention) == attention
    for module in (
        nn.Einsum,
        nn.Embed,
        nn.Conv,
        nn.ConvTranspose,
        nn.ConvLocal,
        nn.LSTMCell,
        nn.OptimizedLSTMCell,
        nn.GRUCell,
        nn.SimpleCell,
        nn.MGUCell,
        nn.ConvLSTMCell,
    ):
        assert not hooks(module)


def test_dense_general_with_several_axes_records_its_amaxes():
    check_histories(nn.DenseGeneral((2, 4), axis=(-2, -1), dot_general_cls=hook()), data(4, 3, 8))
    check_histories(
        nn.DenseGeneral(4, axis=-1, batch_dims=(0,), dot_general_cls=hook()), data(4, 3, 8)
    )


class Cell(nn.RNNCellBase):
    """h' = tanh(h U + x W): what a user writes instead of `nn.SimpleCell`."""

    @nn.compact
    def __call__(self, carry, x):
        h = jnp.tanh(dense(name="h")(carry) + dense(name="i")(x))
        return h, h

    def initialize_carry(self, rng, input_shape):
        return jnp.zeros((*input_shape[:-1], 8))

    num_feature_axes = 1


def test_a_cell_in_an_rnn_records_the_largest_amax_of_all_times():
    x = data(4, 5, 8) * jnp.asarray([1.0, 3.0, 2.0, 9.0, 4.0]).reshape(1, 5, 1)
    model = nn.RNN(Cell(), variable_broadcast=("params", HISTORIES))
    variables = variables_of(model, x)

    @jax.jit
    def gradients_of(variables):
        def loss(variables):
            h = model.apply(variables, x)
            return mean_square(h), jnp.abs(h[:, :-1]).max()  # all but the last enter the next time

        return jax.grad(loss, has_aux=True)(variables)

    state, seen, update = fp8jax.init_update(SGD, variables), [], jax.jit(sgd_update)
    for _ in range(4):
        gradients, amax = gradients_of(variables)
        seen.insert(0, amax)
        variables, state, faults = update(variables, state, gradients)
        fp8jax.histories.raise_if(faults)
    of_x = {
        name: variables[HISTORIES]["cell"][name]["Fp8DotGeneral_0"]["x_amax_history"]
        for name in "hi"
    }
    np.testing.assert_allclose(of_x["h"], seen[:3], rtol=1e-6)
    np.testing.assert_array_equal(of_x["i"], np.full(3, jnp.abs(x).max()))
    with pytest.raises(ValueError, match="name the collection in variable_axes or variable_broad"):
        jax.eval_shape(nn.RNN(Cell()).init, jax.random.key(0), x)


# Dtypes -------------------------------------------------------------------------------------------


def test_keep_master_returns_the_gradient_of_the_accumulator():
    """Without it flax rounds the kernel before the GEMM, and its gradient to BF16 after it."""
    x, kernel, g = data(64, 16), data(16, 8, seed=1), data(64, 8, seed=2)

    def gradient(**fields):
        layer = dense(8, "fp8_current", use_bias=False, dtype=jnp.bfloat16, **fields)
        loss = lambda k: jnp.sum(layer.apply({"params": {"kernel": k}}, x) * g)  # noqa: E731
        return jax.jit(jax.grad(loss))(kernel)

    def accumulated(kernel):
        low = x.astype(jnp.bfloat16)
        y = functools.partial(
            fp8jax.dot_general,
            low,
            dimension_numbers=(((1,), (0,)), ((), ())),
            recipe="fp8_current",
        )
        return jax.vjp(y, kernel)[1](g.astype(jnp.bfloat16))[0]

    rounded, kept = gradient(), gradient(promote_dtype=keep_master)
    exact = jax.jit(accumulated)(kernel)
    np.testing.assert_array_equal(kept, exact)
    np.testing.assert_array_equal(rounded, rounded.astype(jnp.bfloat16))
    assert (kept != kept.astype(jnp.bfloat16)).mean() > 0.9
    np.testing.assert_allclose(rounded, exact, rtol=2**-8)  # half an ulp of BF16


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("recipe", [DELAYED, "fp8_current"])
def test_16_bit_activations_on_backend_xla(recipe, dtype):
    """Results in 16 bits equal those of float32 activations of the same values, rounded."""
    x = data(16, 32).astype(dtype)
    cls = functools.partial(Fp8DotGeneral, recipe, backend="xla")
    layer = nn.Dense(8, use_bias=False, dtype=dtype, promote_dtype=keep_master, dot_general_cls=cls)
    variables = variables_of(layer, x)
    y = jax.jit(layer.apply)(variables, x)
    wide = jax.jit(layer.clone(dtype=jnp.float32).apply)(variables, x.astype(jnp.float32))
    assert y.dtype == dtype
    np.testing.assert_allclose(y.astype(jnp.float32), wide, rtol=2.0 ** -jnp.finfo(dtype).nmant)
    gradients = jax.jit(jax.grad(loss_of(layer, x)))(variables)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
    assert gradients["params"]["kernel"].dtype == jnp.float32


# einsum -------------------------------------------------------------------------------------------


def test_jnp_einsum_takes_symmetric_recipes_in_either_order_of_the_result():
    x, w = data(4, 6, 32), data(32, 8, seed=1)
    symmetric = functools.partial(fp8jax.dot_general, recipe="mxfp8")
    ours = np.asarray(
        jax.jit(lambda x, w: fp8jax.einsum("bsd,df->bsf", x, w, recipe="mxfp8"))(x, w)
    )
    for equation in ("bsd,df->bsf", "bsd,df->fbs"):
        y = jax.jit(functools.partial(jnp.einsum, equation, _dot_general=symmetric))(x, w)
        expected = ours if equation.endswith("bsf") else ours.transpose(2, 0, 1)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
        assert relative_error(y, np.einsum(equation, x, w)) > 1e-3
    asymmetric = functools.partial(fp8jax.dot_general, recipe="fp8_block")
    with pytest.raises(ValueError, match="jnp.einsum may swap its operands: use fp8jax.einsum"):
        jnp.einsum("bsd,df->fbs", x, w, _dot_general=asymmetric)


def test_attention_scores_can_be_quantized_with_a_symmetric_recipe():
    q, k, v = (data(2, 16, 2, 32, seed=s) for s in range(3))
    symmetric = functools.partial(fp8jax.dot_general, recipe="mxfp8")
    attend = functools.partial(nn.dot_product_attention, einsum_dot_general=symmetric)
    error = relative_error(jax.jit(attend)(q, k, v), jax.jit(nn.dot_product_attention)(q, k, v))
    noise = 10 ** (-28.5 / 20)  # of one GEMM; the softmax doubles the error of scores at most
    assert noise / 10 < error < 3 * noise * np.sqrt(2)


# Optimizers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [None, 2], ids=["adamw", "MultiSteps"])
def test_a_train_state_steps_as_update_does(every):
    """flax's own TrainState keeps histories from the optimizer and overwrites them."""
    model, x = Mlp(DELAYED, 16), data(8, 8)
    variables = variables_of(model, x)
    optimizer = optax.adamw(1e-2, weight_decay=0.3)
    if every is not None:
        optimizer = optax.MultiSteps(optimizer, every).gradient_transformation()
    theirs = TrainState.create(apply_fn=model.apply, params=variables, tx=optimizer)
    ours, state = variables, fp8jax.init_update(optimizer, variables)
    gradients_of = jax.jit(jax.grad(loss_of(model, x)))
    their_update = jax.jit(TrainState.apply_gradients)
    update = jax.jit(functools.partial(fp8jax.update, optimizer))
    for step in range(4):
        before = ours["params"]
        theirs = their_update(theirs, grads=gradients_of(theirs.params))
        ours, state, faults = update(ours, state, gradients_of(ours))
        fp8jax.histories.raise_if(faults)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), theirs.params, ours)
        moved = relative_error(ours["params"], before) > 0
        assert moved == (every is None or step % 2 == 1)
    assert all((h > 0).all() for h in jax.tree.leaves(ours[HISTORIES]))  # each call shifts them


class Branches(nn.Module):
    """One of two linears; `branch` is traced."""

    @nn.compact
    def __call__(self, x, branch):
        layers = [dense(name=f"d{i}") for i in range(2)]
        if self.is_initializing():
            return sum(layer(x) for layer in layers)
        return nn.switch(branch, [lambda m, x, i=i: layers[i](x) for i in range(2)], self, x)


def test_a_branch_not_taken_keeps_its_histories_with_update_but_not_in_a_train_state():
    model, x = Branches(), data(4, 8)
    variables = variables_of(model, x, 0)
    gradients_of = jax.jit(lambda v, i: jax.grad(loss_of(model, x, i))(v))
    ours, state = variables, fp8jax.init_update(SGD, variables)
    theirs = TrainState.create(apply_fn=model.apply, params=variables, tx=SGD)
    update = jax.jit(sgd_update)
    for branch in (0, 1, 0):
        ours, state, faults = update(ours, state, gradients_of(ours, branch))
        fp8jax.histories.raise_if(faults)
        theirs = theirs.apply_gradients(grads=gradients_of(theirs.params, branch))
    amax = jnp.abs(x).max()
    for name, calls in (("d0", 2), ("d1", 1)):
        history = ours[HISTORIES][name]["Fp8DotGeneral_0"]["x_amax_history"]
        np.testing.assert_array_equal(history, [amax] * calls + [0] * (3 - calls))
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(ours))
    assert jnp.isnan(theirs.params["params"]["d0"]["kernel"]).all()  # its histories were -inf


# Transformations of modules -----------------------------------------------------------------------


def test_vmapped_experts_have_histories_of_their_own():
    x = data(3, 4, 8) * jnp.asarray([1.0, 10.0, 100.0]).reshape(3, 1, 1)
    experts = nn.vmap(
        nn.Dense,
        variable_axes={"params": 0, HISTORIES: 0, "amaxes": 0, "perturbations": 0},
        split_rngs={"params": True},
    )
    variables = check_histories(experts(8, dot_general_cls=hook()), x)
    history = variables[HISTORIES]["Fp8DotGeneral_0"]["x_amax_history"]
    np.testing.assert_array_equal(history[:, 0], jnp.abs(x).max((1, 2)))


def test_the_gradient_of_vmapped_calls_cannot_share_histories():
    """JAX would sum their cotangents over the axis."""
    x = data(3, 4, 8)
    experts = nn.vmap(
        nn.Dense, variable_axes={"params": 0, HISTORIES: None}, split_rngs={"params": True}
    )(8, dot_general_cls=hook())
    variables = variables_of(experts, x)
    with pytest.raises(ValueError, match="jax.vmap maps the input of a module"):
        jax.eval_shape(jax.grad(loss_of(experts, x)), variables)

    def by_example(model):
        mean = lambda v: jax.vmap(lambda x: loss_of(model, x)(v))(x).mean()  # noqa: E731
        variables = variables_of(model, x)
        return jax.eval_shape(jax.grad(mean), variables)

    with pytest.raises(ValueError, match="jax.vmap maps the input of a module"):
        by_example(dense())
    by_example(dense(recipe="fp8_current"))  # a recipe without histories has nothing to share
    apply = jax.vmap(dense().apply, (None, 0))  # nor has inference
    outputs = jax.eval_shape(apply, variables_of(dense(), x), x)
    assert outputs.shape == (3, 4, 8)


def test_gradients_by_example_merge_to_the_histories_of_the_batch():
    model, x = dense(), data(6, 4, 8)
    variables = variables_of(model, x)
    by_example = jax.jit(jax.vmap(jax.grad(lambda v, x: loss_of(model, x)(v)), (None, 0)))
    gradients = by_example(variables, x)
    of_x = gradients[HISTORIES]["Fp8DotGeneral_0"]["x_amax_history"]
    np.testing.assert_array_equal(of_x[:, 0], jnp.abs(x).max((1, 2)))
    merged = fp8jax.histories.merge_stacked(gradients)
    whole = jax.jit(jax.grad(loss_of(model, x)))(variables)
    for operand in "xw":
        np.testing.assert_array_equal(
            *(g[HISTORIES]["Fp8DotGeneral_0"][f"{operand}_amax_history"] for g in (merged, whole))
        )
    assert relative_error(merged["params"], whole["params"]) < 3 * 10 ** (-24.6 / 20)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + 2 * nn.tanh(dense()(x))


class Loop(nn.Module):
    share: bool

    @nn.compact
    def __call__(self, x):
        axes = {"amaxes": 0, "perturbations": 0}
        if self.share:
            axes = {"variable_axes": axes, "variable_broadcast": ("params", HISTORIES)}
        else:
            axes = {"variable_axes": axes | {"params": 0, HISTORIES: 0}}
        layer = nn.remat(Layer, prevent_cse=False)
        body = lambda m, x, _: (m(x), None)  # noqa: E731
        loop = nn.scan(body, split_rngs={"params": not self.share}, length=3, **axes)
        return loop(layer(name="layer"), x, None)[0]


class RematScan(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.remat_scan(Layer, lengths=(2, 2))(name="layers")(x)


def test_scan_over_remat_has_one_history_a_layer():
    x = data(4, 8)
    for model, layers in ((Loop(share=False), (3,)), (RematScan(), (2, 2))):
        variables = check_histories(model, x)
        (histories,) = variables[HISTORIES].values()
        assert jax.tree.leaves(histories)[0].shape == (*layers, 3)


def test_shared_weights_under_remat_need_max_combining():
    x, variables = data(4, 8), variables_of(Loop(share=True), data(4, 8))
    wrapped = max_combining(Loop)(share=True)
    amax, h = [], x
    layer = {name: tree["layer"] for name, tree in variables.items()}
    apply = jax.jit(Layer().apply)
    for _ in range(3):  # the largest input of the three calls, of the first step
        amax.append(np.abs(h).max())
        h = apply(layer, h)
    after, state = variables, fp8jax.init_update(SGD, variables)
    gradients_of, update = jax.jit(jax.grad(loss_of(wrapped, x))), jax.jit(sgd_update)
    for _ in range(3):
        after, state, faults = update(after, state, gradients_of(after))
        fp8jax.histories.raise_if(faults)
    (of_x,) = [
        leaf
        for path, leaf in jax.tree.leaves_with_path(after[HISTORIES])
        if path[-1].key == "x_amax_history"
    ]
    np.testing.assert_allclose(of_x[-1], max(amax), rtol=1e-6)
    gradients = jax.jit(jax.grad(loss_of(Loop(share=True), x)))(after)
    with pytest.raises(ValueError, match="was added up by JAX.*max_combining"):
        fp8jax.histories.raise_if(update(after, state, gradients)[2])


class While(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = dense(name="layer")
        if self.is_initializing():
            return layer(x)
        step = lambda m, c: (c[0] + 1, m(c[1]))  # noqa: E731
        return nn.while_loop(lambda m, c: c[0] < 3, step, layer, (0, x), broadcast_variables=True)[
            1
        ]


def test_a_while_loop_runs_forward():
    """Its gradient is out of JAX's reach, with any linear."""
    x, variables = data(4, 8), variables_of(While(), data(4, 8))
    layer = {name: tree["layer"] for name, tree in variables.items()}
    expected = x
    for _ in range(3):
        expected = jax.jit(dense().apply)(layer, expected)
    np.testing.assert_allclose(jax.jit(While().apply)(variables, x), expected, rtol=1e-5)
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work for lax.whil"):
        jax.jit(jax.grad(loss_of(While(), x)))(variables)


def test_a_scan_must_split_the_stream_of_stochastic_rounding():
    x = data(4, 8)
    body = lambda m, x, _: (m(x), None)  # noqa: E731

    class Noisy(nn.Module):
        streams: tuple[str, ...]

        @nn.compact
        def __call__(self, x):
            splits = {name: True for name in ("params", *self.streams)}
            loop = nn.scan(body, variable_axes={"params": 0}, split_rngs=splits, length=2)
            return loop(dense(recipe="nvfp4", name="layer"), x, None)[0]

    variables, rngs = variables_of(Noisy((RNG,)), x), {RNG: jax.random.key(1)}
    with pytest.raises(ValueError, match="under nn.scan or nn.vmap, name it in split_rngs"):
        jax.eval_shape(lambda: Noisy(()).apply(variables, x, rngs=rngs))
    assert jax.eval_shape(lambda: Noisy((RNG,)).apply(variables, x, rngs=rngs)).shape == x.shape


# Transformations of functions ---------------------------------------------------------------------


def test_forward_mode_is_refused():
    model, x = dense(), data(4, 8)
    variables, loss = variables_of(model, x), loss_of(model, x)
    for transform in (lambda v: jax.jvp(loss, (v,), (v,)), jax.jacfwd(loss)):
        with pytest.raises(TypeError, match="forward-mode autodiff .* custom_vjp"):
            jax.jit(transform)(variables)


@pytest.mark.parametrize("recipe", ["fp8_current", "nvfp4", DELAYED])
def test_second_derivatives_are_refused(recipe):
    """Of a gradient penalty, and a Hessian; JAX would differentiate the casts of the backward."""
    x = data(4, 8)
    model = dense(use_bias=False, recipe=recipe)
    variables = variables_of(model, x)
    rngs = {RNG: jax.random.key(3)}
    loss = lambda v: mean_square(nn.tanh(model.apply(v, x, rngs=rngs)))  # noqa: E731
    square = lambda v: jnp.sum(jax.grad(loss)(v)["params"]["kernel"] ** 2)  # noqa: E731
    for second in (jax.grad(square), jax.jacrev(jax.grad(loss)), jax.hessian(loss)):
        with pytest.raises((NotImplementedError, TypeError), match="first derivatives only|jvp"):
            jax.jit(second)(variables)


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block", "nvfp4", DELAYED])
def test_second_derivatives_through_the_gradient_alone_are_refused(recipe):
    """Of weights of examples through a step of SGD, and of a pull-back: x and w are constants."""
    x, w, target = data(8, 16), data(16, 4), data(8, 4)
    given = dict(recipe=recipe, key=jax.random.key(3), state=fp8jax.init_state(recipe))
    dot = lambda x, w: fp8jax.dot_general(x, w, (((1,), (0,)), ((), ())), **given)  # noqa: E731

    def outer(of_examples):
        inner = lambda w: jnp.sum(of_examples[:, None] * (dot(x, w) - target) ** 2)  # noqa: E731
        return jnp.sum((x @ (w - 0.01 * jax.grad(inner)(w)) - target) ** 2)

    _, pull = jax.vjp(dot, x, w)
    for second, at in ((outer, jnp.ones(8)), (lambda g: jnp.sum(pull(g)[0] ** 2), target)):
        with pytest.raises(NotImplementedError, match="first derivatives only"):
            jax.jit(jax.grad(second))(at)


def test_second_derivatives_are_right_without_casts():
    x = data(4, 8)

    def penalty(model):
        loss = lambda v: mean_square(nn.tanh(model.apply(v, x)))  # noqa: E731
        square = lambda v: jnp.sum(jax.grad(loss)(v)["params"]["kernel"] ** 2)  # noqa: E731
        return jax.jit(jax.grad(square))(variables_of(model, x))["params"]

    ours = penalty(dense(use_bias=False, recipe="bf16"))
    assert relative_error(ours, penalty(nn.Dense(8, use_bias=False))) < 1e-5


@pytest.mark.optimized_too
def test_checkpoint_policies_change_no_bit():
    """Also with stochastic rounding of gradients, whose key is used twice."""
    recipe = fp8jax.RECIPES["fp8_delayed"]
    g = dataclasses.replace(recipe.dgrad_g, rounding="stochastic")
    model = dense(8, dataclasses.replace(recipe, name="stochastic", dgrad_g=g, wgrad_g=g))
    x = data(8, 8)
    variables = variables_of(model, x)
    loss = lambda v: mean_square(nn.gelu(model.apply(v, x, rngs={RNG: jax.random.key(3)})))  # noqa: E731
    exact = jax.jit(jax.grad(loss))(variables)
    names = jax.checkpoint_policies.save_only_these_names
    for policy in (None, names("fp8jax.product"), names("fp8jax.operand")):
        gradients = jax.jit(jax.grad(jax.checkpoint(loss, policy=policy)))(variables)
        jax.tree.map(np.testing.assert_array_equal, gradients, exact)


def test_donated_variables_give_the_same_steps():
    model, x = Mlp(DELAYED, 16), data(8, 8)
    start = variables_of(model, x)

    def step(variables, state):
        gradients = jax.grad(loss_of(model, x))(variables)
        return fp8jax.update(optax.adam(1e-2), variables, state, gradients)

    results = []
    for donate in ((), (0, 1)):
        variables = jax.tree.map(jnp.copy, start)
        state = fp8jax.init_update(optax.adam(1e-2), variables)
        given, program = variables, jax.jit(step, donate_argnums=donate)
        for _ in range(3):
            variables, state, faults = program(variables, state)
            fp8jax.histories.raise_if(faults)
        assert all(leaf.is_deleted() == bool(donate) for leaf in jax.tree.leaves(given))
        results.append(variables)
    jax.tree.map(np.testing.assert_array_equal, *results)


# Devices ------------------------------------------------------------------------------------------


def replicated(variables, mesh):
    return jax.device_put(variables, NamedSharding(mesh, PartitionSpec()))


def sharded(variables, mesh):
    """Return variables with kernels split over the mesh by their first axis, where it fits."""

    def put(leaf):
        fits = leaf.ndim == 2 and leaf.shape[0] % 8 == 0
        return jax.device_put(
            leaf, NamedSharding(mesh, PartitionSpec("d") if fits else PartitionSpec())
        )

    return jax.tree.map(put, variables)


@functools.cache
def result_of_one_device(name, recipe):
    """(x, variables, function of loss and gradients, its results) of a model."""
    model, shape, _ = MODELS[name]
    model, x = model(recipe), data(*shape)
    variables = variables_of(model, x)
    program = jax.jit(jax.value_and_grad(lambda v, x: loss_of(model, x)(v)))
    return x, variables, program, program(variables, x)


@pytest.mark.parametrize(
    ("name", "recipe", "place"),
    [
        # It only has more of the MLP's linears.
        pytest.param("mixer", DELAYED, sharded, marks=pytest.mark.full),
        ("mlp", DELAYED, sharded),
        ("mlp", DELAYED, replicated),
        ("mlp", "fp8_block", sharded),
    ],
)
def test_eight_devices_give_the_loss_and_the_histories_of_one(name, recipe, place):
    x, variables, program, (loss, gradients) = result_of_one_device(name, recipe)
    mesh = jax.make_mesh((8,), ("d",), (AxisType.Auto,))
    x = jax.device_put(x, NamedSharding(mesh, PartitionSpec("d")))
    their_loss, theirs = program(place(variables, mesh), x)
    np.testing.assert_allclose(their_loss, loss, rtol=1e-5)
    if HISTORIES in variables:
        close = functools.partial(np.testing.assert_allclose, rtol=1e-3)
        jax.tree.map(close, theirs[HISTORIES], gradients[HISTORIES])
    # Sums in another order round a few elements the other way.
    assert relative_error(theirs["params"], gradients["params"]) < 10 ** (-24.6 / 20) / 10


@functools.cache
def on_one_device(recipe):
    """(model, x, variables, function of loss and gradients, its results) of a wide linear."""
    model, x = dense(128, recipe, use_bias=False), data(16, 4, 128)
    variables = variables_of(model, x)
    gradient = jax.jit(jax.value_and_grad(lambda v, x: loss_of(model, x)(v)))
    return model, x, variables, gradient, gradient(variables, x)


@pytest.mark.parametrize("recipe", [DELAYED, "fp8_block"])
@pytest.mark.parametrize(
    "of_x, of_kernel",
    [(("d",), ()), (("d",), ("d", None)), (("d",), (None, "m")), ((), ("d", "m"))],
)
def test_explicit_mesh_axes(recipe, of_x, of_kernel):
    model, x, variables, gradient, (loss, gradients) = on_one_device(recipe)
    mesh = jax.make_mesh((4, 2), ("d", "m"), (AxisType.Explicit,) * 2)

    def put(array, axes=()):
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))

    with jax.set_mesh(mesh):
        x = put(x, of_x)
        variables = jax.tree.map(lambda v: put(v, of_kernel if v.ndim == 2 else ()), variables)
        their_loss, theirs = gradient(variables, x)
        y = jax.eval_shape(model.apply, variables, x)
    assert y.sharding.spec == PartitionSpec(*(of_x or (None,)), None, *(of_kernel[1:] or (None,)))
    same = jax.tree.map(
        lambda v, g: g.sharding.is_equivalent_to(v.sharding, v.ndim), variables, theirs
    )
    assert all(jax.tree.leaves(same))
    np.testing.assert_allclose(their_loss, loss, rtol=1e-5)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), theirs, gradients
    )


def test_split_contracting_axes_need_out_sharding_under_explicit_axes():
    x, w = data(8, 128), data(128, 32)
    mesh = jax.make_mesh((8,), ("d",), (AxisType.Explicit,))
    x, w = (
        jax.device_put(a, NamedSharding(mesh, PartitionSpec(*s)))
        for a, s in ((x, (None, "d")), (w, ("d", None)))
    )
    multiply = functools.partial(
        fp8jax.dot_general, dimension_numbers=(((1,), (0,)), ((), ())), recipe="fp8_current"
    )
    with jax.set_mesh(mesh):
        with pytest.raises(Exception, match="specify the output sharding"):
            multiply(x, w)
        y = jax.jit(functools.partial(multiply, out_sharding=PartitionSpec("d", None)))(x, w)
    assert y.sharding.spec == PartitionSpec("d", None)
    on_one = jax.jit(multiply)(data(8, 128), data(128, 32))
    np.testing.assert_allclose(y, on_one, rtol=1e-5, atol=1e-5)


def test_pmap_merges_gradients_of_devices():
    model, x = dense(), data(8, 4, 8)
    variables = variables_of(model, x)
    by_device = jax.jit(jax.vmap(jax.grad(lambda v, x: loss_of(model, x)(v)), (None, 0)))
    gradients = by_device(variables, x)
    merged = jax.pmap(lambda g: fp8jax.histories.merge_devices(g, "d"), axis_name="d")(gradients)
    expected = fp8jax.histories.merge_stacked(gradients)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7)
    jax.tree.map(lambda a, b: close(a[3], b), merged, expected)


# Other collections, other checkpoints -------------------------------------------------------------


class Normalized(nn.Module):
    recipe: str = DELAYED

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, momentum=0.9)(dense(16, self.recipe)(x))
        x = nn.Dropout(0.5, deterministic=False)(nn.relu(x))
        return dense(8, self.recipe)(x)


def test_batch_statistics_and_dropout_next_to_histories():
    model, x = Normalized(), data(32, 8)
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = jax.jit(model.init)(rngs, x)
    statistics = variables.pop("batch_stats")
    state = fp8jax.init_update(SGD, variables)

    @jax.jit
    def step(variables, statistics, state, key):
        def loss(variables):
            y, new = model.apply(
                variables | {"batch_stats": statistics},
                x,
                mutable=["batch_stats"],
                rngs={"dropout": key},
            )
            return mean_square(y), new["batch_stats"]

        gradients, statistics = jax.grad(loss, has_aux=True)(variables)
        return *fp8jax.update(SGD, variables, state, gradients), statistics

    first = {name: tree["Dense_0"] for name, tree in variables.items()}
    y = jax.jit(dense(16).apply)(first, x)
    for i in range(4):
        variables, state, faults, statistics = step(variables, statistics, state, jax.random.key(i))
        fp8jax.histories.raise_if(faults)
        if i == 0:
            mean = statistics["BatchNorm_0"]["mean"]
            np.testing.assert_allclose(mean, 0.1 * y.mean(0), rtol=1e-3, atol=1e-5)
    history = variables[HISTORIES]["Dense_0"]["Fp8DotGeneral_0"]["x_amax_history"]
    np.testing.assert_array_equal(history, np.full(3, jnp.abs(x).max()))
    assert all((h > 0).all() for h in jax.tree.leaves(variables[HISTORIES]))


def test_parameters_of_a_bf16_model_in_a_quantized_one():
    x = data(8, 8)
    params = variables_of(Mlp("bf16", 16), x)["params"]
    fresh = variables_of(Mlp(DELAYED, 16), x, seed=5)
    assert jax.tree.structure(fresh["params"]) == jax.tree.structure(params)
    with pytest.raises(ValueError, match="has no x_amax_history.*BF16 checkpoint"):
        Mlp(DELAYED, 16).apply({"params": params}, x)
    y = jax.jit(Mlp(DELAYED, 16).apply)({"params": params, HISTORIES: fresh[HISTORIES]}, x)
    np.testing.assert_array_equal(y, jax.jit(Mlp("fp8_current", 16).apply)({"params": params}, x))
    exact = jax.jit(Mlp("bf16", 16).apply)({"params": params}, x)
    assert relative_error(y, exact) < 2 * 10 ** (-28.5 / 20)  # two GEMMs, noise of a forward
