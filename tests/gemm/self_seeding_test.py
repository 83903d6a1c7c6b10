"""Empty histories seed themselves, and damaged ones make the result NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.gemm.histories.amax_history import init_state
from fp8jax.gemm.histories.updates import init_update, raise_if, seed, update
from fp8jax.gemm.modules import Dense
from fp8jax.numerics.names import as_recipe
from tests.support.products import normal_operands, three_products

import optax  # isort: skip

DELAYED, CURRENT = (as_recipe(name) for name in ("fp8_delayed", "fp8_current"))
pytestmark = pytest.mark.optimized_too  # bits of different programs


def operands():
    return [*map(jnp.asarray, normal_operands(16, 32, 24, sigma=(1, 1, 1e-6)).values())]


def all_of(recipe, state, **kwargs):
    """(y, dx, dw, the next state) of operands whose gradients are near 1e-6."""
    return three_products(*operands(), state, recipe=recipe, **kwargs)


@pytest.mark.parametrize("backend", ["emulated", "xla"])
def test_an_empty_history_gives_the_bits_of_current_scaling_and_is_filled(backend):
    y, dx, dw, state = all_of(DELAYED, init_state(DELAYED), backend=backend)
    for got, right in zip((y, dx, dw), all_of(CURRENT, {}, backend=backend), strict=False):
        np.testing.assert_array_equal(got, right)
    for operand, array in zip("xwg", operands(), strict=True):
        assert state[operand][0] == jnp.abs(array).max() and not state[operand][1:].any()


def test_without_self_seeding_small_gradients_are_flushed_to_zero():
    """What it is for: the scale of an empty history is 1, below which e5m2 holds 2^-16 at least."""
    _, dx, dw, _ = all_of(DELAYED, init_state(DELAYED), seeded=True)
    assert not dx.any() and not dw.any()


def test_a_history_that_is_not_empty_is_read_the_same_either_way():
    histories = {k: v.at[2].set(3.0) for k, v in init_state(DELAYED).items()}
    for one, other in zip(
        all_of(DELAYED, histories), all_of(DELAYED, histories, seeded=True), strict=True
    ):
        jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("operand", "xwg")
@pytest.mark.parametrize("entry", [-1e-3, np.nan])
def test_a_damaged_history_makes_the_gemms_that_read_it_nan(operand, entry):
    """Beside a sound entry that is larger, which would hide a negative one."""
    histories = {k: v.at[0].set(3.0) for k, v in init_state(DELAYED).items()}
    histories[operand] = histories[operand].at[5].set(entry)
    y, dx, dw, _ = all_of(DELAYED, histories)
    reads = {"x": (y, dw), "w": (y, dx), "g": (dx, dw)}
    for result in reads[operand]:
        assert jnp.isnan(result).all()


def test_an_infinite_entry_makes_the_gemms_that_read_it_nan_although_its_scale_is_finite():
    """As a float, infinity has an exponent, of which a power of two can be made."""
    recipe = as_recipe("fp8_delayed:scale=pow2")
    histories = init_state(recipe)
    histories["x"] = histories["x"].at[5].set(np.inf)
    y, dx, dw, _ = all_of(recipe, histories)
    assert jnp.isnan(y).all() and jnp.isnan(dw).all() and jnp.isfinite(dx).all()


def test_newest_seeds_itself_only_while_the_whole_history_is_empty():
    recipe = as_recipe("fp8_delayed:amax=newest")
    y, *_ = all_of(recipe, init_state(recipe))
    np.testing.assert_array_equal(y, all_of(CURRENT, {})[0])


def test_seed_fills_histories_of_modules_that_do_not_seed_themselves():
    """Its amaxes are those of a step in current scaling: layer by layer, forward and backward."""

    def network(**kwargs):
        one, two = Dense(24, **kwargs), Dense(8, **kwargs)

        def init(key, x):
            keys = jax.random.split(key)
            first = one.init(keys[0], x)
            return {"one": first, "two": two.init(keys[1], one.apply(first, x))}

        return init, lambda v, x: jnp.mean(two.apply(v["two"], one.apply(v["one"], x)) ** 2) / 1e6

    x = operands()[0]
    init, loss = network(seeded=True)
    variables = jax.jit(init)(jax.random.key(0), x)
    seeded = seed(loss, variables, x)
    assert jax.tree.map(jnp.shape, seeded) == jax.tree.map(jnp.shape, variables)
    current_loss = network(recipe=CURRENT)[1]
    bare = {name: {"params": layer["params"]} for name, layer in variables.items()}
    right = jax.jit(jax.grad(current_loss))(bare, x)
    gradient = jax.jit(jax.grad(loss))
    got, empty = gradient(seeded, x), gradient(variables, x)
    for name in ("one", "two"):
        np.testing.assert_allclose(
            got[name]["params"]["kernel"], right[name]["params"]["kernel"], rtol=1e-6
        )
        assert not np.any(empty[name]["params"]["kernel"])  # flushed
    # Self-seeding modules record the same in their first step.
    itself = network()[1]
    optimizer = optax.sgd(0.0)
    state = init_update(optimizer, variables)
    stepped, _, faults = update(
        optimizer, variables, state, jax.jit(jax.grad(itself))(variables, x)
    )
    raise_if(faults)
    jax.tree.map(np.testing.assert_array_equal, stepped, seeded)


def test_seed_takes_a_loss_with_aux_and_drops_old_histories():
    x = operands()[0]
    layer = Dense(8, seeded=True)
    variables = jax.jit(layer.init)(jax.random.key(0), x)

    def loss(variables, x):
        y = layer.apply(variables, x)
        return jnp.sum(y), {"y": y}

    seeded = seed(loss, variables, x, has_aux=True)
    again = seed(loss, jax.tree.map(lambda a: 2 * a if a.ndim == 1 else a, seeded), x, has_aux=True)
    jax.tree.map(np.testing.assert_array_equal, seeded, again)
