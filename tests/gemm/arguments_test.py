"""`dot_general` where libraries expect `lax.dot_general`: every argument is honored or refused."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from fp8jax.gemm.dot import dot_general
from fp8jax.gemm.modules import RNG, Dense, Fp8DotGeneral
from tests.support.arrays import normal

MATMUL = (((1,), (0,)), ((), ()))


def data(shape=(16, 32), seed=0):
    return jnp.asarray(normal(shape, seed))


@pytest.mark.optimized_too
@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_current", "fp8_amax:margin=1"])
def test_stock_layers_of_linen_and_nnx_take_the_function(recipe):
    """They compute what our own layer does, bit for bit, forward and backward."""
    product, x = functools.partial(dot_general, recipe=recipe), data()
    ours = Dense(8, recipe)
    variables = jax.jit(ours.init)(jax.random.key(0), x)
    stock = nn.Dense(8, use_bias=False, dot_general=product)
    layer = nnx.Linear(32, 8, use_bias=False, dot_general=product, rngs=nnx.Rngs(0))
    layer.kernel.set_value(variables["params"]["kernel"])

    def sum_of_sines(y):
        return jnp.sum(jnp.sin(y)), y

    def gradients(apply):
        f = jax.grad(lambda v, x: sum_of_sines(apply(v, x)), argnums=(0, 1), has_aux=True)
        return jax.jit(f)(variables, x)

    right, y = gradients(ours.apply)
    jax.tree.map(np.testing.assert_array_equal, gradients(stock.apply), (right, y))
    f = nnx.grad(lambda layer, x: sum_of_sines(layer(x)), has_aux=True)
    of_nnx, of_layer = nnx.jit(f)(layer, x)
    np.testing.assert_array_equal(of_layer, y)
    np.testing.assert_array_equal(of_nnx["kernel"].get_value(), right[0]["params"]["kernel"])


@pytest.mark.parametrize("precision", [None, "default", lax.Precision.DEFAULT, (None, None)])
def test_the_default_precision_is_honored(precision):
    x, w = data(), data((32, 8), 1)
    y = dot_general(x, w, MATMUL, precision=precision, recipe="fp8_block")
    np.testing.assert_array_equal(y, dot_general(x, w, MATMUL, recipe="fp8_block"))


def test_the_dtype_of_the_result_by_position_and_by_name():
    x, w = data().astype(jnp.bfloat16), data((32, 8), 1)
    by_name = dot_general(x, w, MATMUL, preferred_element_type=jnp.float32, recipe="fp8_current")
    by_position = dot_general(x, w, MATMUL, None, jnp.float32, recipe="fp8_current")
    assert by_name.dtype == jnp.float32
    np.testing.assert_array_equal(by_name, by_position)


def test_a_layer_that_names_the_dtype_by_position_gets_it():
    layer = Fp8DotGeneral("fp8_current")
    x, w = data().astype(jnp.bfloat16), data((32, 8), 1)
    y, _ = layer.init_with_output(jax.random.key(0), x, w, MATMUL, None, jnp.float32)
    assert y.dtype == jnp.float32


@pytest.mark.parametrize(
    ("positional", "named", "message"),
    [
        ((), dict(precision="highest"), "drop precision='highest'"),
        ((), dict(precision=(None, "high")), "drop precision="),
        ((), dict(out_sharding="x"), "with_sharding_constraint"),
        ((None,), {}, "quantizes x and w differently, and jnp.einsum may swap"),
    ],
)
def test_what_cannot_be_honored_is_refused(positional, named, message):
    with pytest.raises(ValueError, match=message):
        dot_general(data(), data((32, 8)), MATMUL, *positional, recipe="fp8_block", **named)


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4"])
def test_stock_layers_draw_keys_for_stochastic_rounding_from_a_stream(recipe):
    """Another key gives other gradients, and the same forward; no key is one clear line."""
    layer = nn.Dense(8, dot_general_cls=functools.partial(Fp8DotGeneral, recipe))
    x = data()
    variables = jax.jit(layer.init)(jax.random.key(0), x)
    with pytest.raises(ValueError, match=f"{recipe}.* rounds stochastically .*RNG stream '{RNG}'"):
        layer.apply(variables, x)

    @jax.jit
    def gradient(key):
        loss = lambda v: jnp.sum(jnp.sin(layer.apply(v, x, rngs={RNG: key})))  # noqa: E731
        return jax.value_and_grad(loss)(variables)

    (loss, one), (again, same), (other_loss, other) = (
        gradient(jax.random.key(seed)) for seed in (0, 0, 1)
    )
    assert loss == again == other_loss
    kernels = [g["params"]["kernel"] for g in (one, same, other)]
    np.testing.assert_array_equal(kernels[0], kernels[1])
    assert (kernels[0] != kernels[2]).any()
