"""Modules that are called more than once in a step: what needs no wrapper, and what still does."""

import functools
import gc
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization

from fp8jax.gemm.dot import dot_general
from fp8jax.gemm.histories import shared_leaf
from fp8jax.gemm.histories.amax_history import HISTORIES, max_combining
from fp8jax.gemm.histories.updates import HistoryError, init_update, raise_if, update
from fp8jax.gemm.modules import Fp8DotGeneral
from tests.support.arrays import normal

import optax  # isort: skip

STEPS = 6  # more than a history has entries
SGD = optax.sgd(1e-3)
sgd_update = jax.jit(functools.partial(update, SGD))
PRODUCT = functools.partial(Fp8DotGeneral, "fp8_delayed:history=4")


def stock(features=8, module=nn.Dense):
    return module(features, use_bias=False, dot_general_cls=PRODUCT)


class Once(nn.Module):
    """`amaxes` are those of the inputs of its layer, by call."""

    @nn.compact
    def __call__(self, x):
        self.sow("amaxes", "x", jnp.abs(x).max())
        return stock()(x)


class Twice(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = Once()
        return layer(2.0 * layer(x))


class Shared(nn.Module):
    """One layer three times, in a loop."""

    wrap: bool = False

    @nn.compact
    def __call__(self, x):
        class Body(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return 2.0 * Once()(x), None

        loop = nn.scan(
            nn.remat(Body) if self.wrap else Body,
            variable_broadcast=["params", HISTORIES],
            variable_axes={"amaxes": 0},
            split_rngs={"params": False},
            length=3,
        )
        return loop()(x, None)[0]


class Rematerialized(nn.Module):
    """One layer twice, each time under `wrap`."""

    wrap: Callable = nn.remat

    @nn.compact
    def __call__(self, x):
        layer = stock(module=self.wrap(nn.Dense))
        return layer(2.0 * layer(x))


def data():
    return jnp.asarray(normal((4, 8)))


@functools.cache
def variables_of(model):
    variables = jax.jit(model.init)(jax.random.key(0), data())
    return {name: variables[name] for name in ("params", HISTORIES)}


def sum_of_squares(model):
    return lambda variables: jnp.sum(model.apply(variables, data()) ** 2)


@functools.partial(jax.jit, static_argnums=0)
def amaxes_of(model, variables, x):
    return model.apply(variables, x, mutable=["amaxes"])[1]


def largest_amax(model, variables) -> float:
    seen = amaxes_of(model, variables, data())
    return float(max(np.max(leaf) for leaf in jax.tree.leaves(seen)))


def histories_of_x(variables):
    return [
        leaf
        for path, leaf in jax.tree.leaves_with_path(variables[HISTORIES])
        if path[-1].key == "x_amax_history"
    ]


@pytest.mark.parametrize("how", ["jit of grad", "grad of jit", "jit of grad of remat"])
@pytest.mark.parametrize("model", [Once(), Twice(), Shared()], ids=lambda m: type(m).__name__)
def test_the_history_is_the_largest_amax_of_all_calls(model, how):
    loss, variables = sum_of_squares(model), variables_of(model)
    grad = {
        "jit of grad": lambda f: jax.jit(jax.grad(f)),
        "grad of jit": lambda f: jax.grad(jax.jit(f)),
        "jit of grad of remat": lambda f: jax.jit(jax.grad(jax.checkpoint(f))),
    }[how](loss)
    state, expected = init_update(SGD, variables), []
    state = serialization.from_bytes(state, serialization.to_bytes(state))
    for _ in range(STEPS):
        expected.insert(0, largest_amax(model, variables))
        variables, state, faults = sgd_update(variables, state, grad(variables))
        raise_if(faults)
    (history,) = histories_of_x(variables)
    np.testing.assert_allclose(history, expected[: len(history)], rtol=1e-6)


@pytest.mark.parametrize(
    "model",
    [Rematerialized(nn.remat), Rematerialized(nn.jit), Shared(wrap=True)],
    ids=["remat", "jit", "scan over remat"],
)
def test_what_adds_up_all_the_same_is_found_and_is_right_when_wrapped(model):

    def steps(model, variables, count):
        grad = jax.jit(jax.grad(sum_of_squares(model)))
        state = init_update(SGD, variables)
        for _ in range(count):
            variables, state, faults = sgd_update(variables, state, grad(variables))
            raise_if(faults)
        return variables

    variables = variables_of(model)
    one = steps(model, variables, 1)  # its other entries are zeros: nothing shows yet
    with pytest.raises(HistoryError, match="x_amax_history.* was added up by JAX.*max_combining"):
        steps(model, one, 1)
    wrapped = max_combining(type(model))(**{field: getattr(model, field) for field in ("wrap",)})
    steps(wrapped, variables, 3)


def test_outside_jit_a_second_call_is_refused():
    variables = variables_of(Twice())
    with pytest.raises(ValueError, match="called more than once outside jax.jit"):
        jax.grad(sum_of_squares(Twice()))(variables)
    jax.grad(sum_of_squares(Once()))(variables_of(Once()))
    assert jnp.isfinite(sum_of_squares(Twice())(variables))  # the forward alone


def test_vmap_over_a_shared_history_is_refused_and_over_own_ones_is_right():
    """Also nn.vmap; the forward alone and gradients of each example need no maximum."""
    model, x = stock(), data()
    variables = variables_of(model)
    mapped = jax.vmap(model.apply, in_axes=(None, 0))
    with pytest.raises(ValueError, match="jax.vmap maps the input .* call the module on the whole"):
        jax.jit(jax.grad(lambda v: jnp.sum(mapped(v, x[None]))))(variables)
    alone = jax.jit(model.apply)(variables, x)
    np.testing.assert_array_equal(jax.jit(mapped)(variables, x[None])[0], alone)
    examples = np.stack([x, 10 * x])
    each = jax.jit(jax.vmap(jax.grad(lambda v, x: jnp.sum(model.apply(v, x))), in_axes=(None, 0)))
    new = each(variables, examples)[HISTORIES]["Fp8DotGeneral_0"]["x_amax_history"]
    np.testing.assert_array_equal(new[:, 0], np.abs(examples).max((1, 2)))


def test_a_branch_not_taken_keeps_the_history():
    class Branches(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer, other = stock(), stock()
            other(x[:0])
            return nn.cond(x[0, 0] > 1e3, lambda m, x: m(x), lambda m, x: 2.0 * x, other, layer(x))

    variables = variables_of(Branches())
    filled = jax.tree.map(lambda h: np.asarray(h) + np.float32(3), variables[HISTORIES])
    variables = variables | {HISTORIES: filled}
    gradients = jax.jit(jax.grad(sum_of_squares(Branches())))(variables)
    after, _, faults = sgd_update(variables, init_update(SGD, variables), gradients)
    raise_if(faults)
    after = jax.device_get(after)
    taken, other = after[HISTORIES]["Dense_0"], after[HISTORIES]["Dense_1"]
    jax.tree.map(np.testing.assert_array_equal, other, filled["Dense_1"])
    assert all((h[0] != 3.0) & (h[1:] == 3.0).all() for h in jax.tree.leaves(taken))


def test_a_state_that_two_products_share_needs_no_module():
    x = data()
    state = {k: jnp.zeros(4) for k in "xwg"}
    product = functools.partial(
        dot_general, dimension_numbers=(((1,), (0,)), ((), ())), recipe="fp8_delayed:history=4"
    )

    def loss(state):
        return jnp.sum(product(product(x, x.T, state=state), 100 * x, state=state))

    new = jax.jit(jax.grad(loss))(state)
    new = jax.device_get(new)
    assert new["w"][0] == 100 * np.abs(x).max() and not new["w"][1:].any()

    def looped(state):  # a use in a loop beside one without
        body = lambda y, _: (product(y, y, state=state), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(body, product(x, x.T, state=state), length=1)[0])

    with pytest.raises(ValueError, match="called more than once outside jax.jit"):
        jax.grad(looped)(state)


def test_no_conversion_outlives_its_trace():
    loss, variables = sum_of_squares(Twice()), variables_of(Twice())
    gc.collect()
    before = shared_leaf._CONVERSIONS.ids()  # of other tests' errors, which pytest holds
    transformations = (
        lambda f: jax.jit(jax.grad(f)),
        lambda f: jax.grad(jax.jit(f)),
        jax.jit,
        lambda f: jax.jit(jax.grad(jax.checkpoint(f))),
        lambda f: lambda v: jax.eval_shape(f, v),
        lambda f: lambda v: jax.jit(lambda v: jax.vjp(f, v)[1](1.0))(v),
        lambda f: lambda v: jax.jit(jax.vmap(jax.grad(f)))(jax.tree.map(lambda a: a[None], v)),
    )
    for transform in transformations:
        transform(loss)(variables)
    gc.collect()
    assert shared_leaf._CONVERSIONS.ids() <= before
    with jax.checking_leaks():
        jax.jit(jax.grad(lambda v: loss(v)))(variables)
