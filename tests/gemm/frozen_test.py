"""Frozen kernels against the same linears with their float32 kernels: equal, bit for bit."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fp8jax.gemm.backends.choice import choose_backend
from fp8jax.gemm.backends.operands import QuantizedOperand
from fp8jax.gemm.frozen import (
    FrozenKernel,
    StackedKernel,
    freeze_kernels,
    frozen_dot,
    has_frozen,
    layer_of,
    take_layers,
)
from fp8jax.gemm.histories.amax_history import HISTORIES, init_state
from fp8jax.gemm.modules import Dense, together
from fp8jax.gemm.weight import Weight
from fp8jax.numerics.names import as_recipe
from fp8jax.numerics.quantization import dequantize, quantize
from fp8jax.numerics.recipes import RECIPES
from tests.support.interpreter import interpreting, needs_pallas

M, K, N = 24, 160, 144  # ragged: K and N are no multiples of 128
WEIGHTS_ONLY = ("fp8_block:only=fwd_w", "fp8_rowwise:only=fwd_w", "nvfp4:only=fwd_w")
SCALED = [name for name, recipe in RECIPES.items() if recipe.casts]
AMAXES = {"x": 3.0, "w": 0.7, "g": 1.0}  # below the amaxes of x and w: some codes saturate
pytestmark = pytest.mark.optimized_too  # bits of different programs


# Compiled whole: operation by operation, each one is compiled for each shape.
dequantized = jax.jit(lambda frozen: frozen.dequantized())


def x_MK():
    return jnp.asarray(np.random.default_rng(0).normal(size=(M, K)), jnp.bfloat16)


def kernels(number: int):
    rng = np.random.default_rng(1)
    return [jnp.asarray(rng.normal(size=(K, N)) * 2.0**-i, jnp.float32) for i in range(number)]


def variables_of(recipe, kernel):
    histories = {}
    for operand, history in init_state(recipe).items():
        filled = histories[f"{operand}_amax_history"] = np.array(history)
        filled[0] = AMAXES[operand]
    return {"params": {"kernel": kernel}} | ({HISTORIES: histories} if histories else {})


def states_of(variables):
    given = variables.get(HISTORIES, {})
    return {name[0]: history for name, history in given.items()}


def outputs(recipe, backend=None):
    """The output of a `Dense` with a float32 kernel, and with that kernel frozen."""
    key = jax.random.key(7) if recipe.stochastic else None
    dense = Dense(N, recipe, backend, seeded=True)
    (kernel,) = kernels(1)
    variables = variables_of(recipe, kernel)

    @jax.jit
    def freeze(kernel, states):
        return freeze_kernels([Weight(kernel, states)], recipe, backend=backend)[0]

    frozen = freeze(kernel, states_of(variables))
    apply = jax.jit(lambda variables: dense.apply(variables, x_MK(), key))
    return apply(variables), apply({**variables, "params": {"kernel": frozen}}), frozen


@pytest.mark.parametrize("name", [*SCALED, *WEIGHTS_ONLY])
def test_a_frozen_kernel_gives_the_bits_of_its_float32_kernel(name):
    expected, got, frozen = outputs(as_recipe(name))
    assert got.dtype == expected.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, expected)
    assert frozen.operand.q.values.dtype == as_recipe(name).fwd_w.format.dtype


@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_rowwise"])
def test_in_xlas_own_gemms(name):
    expected, got, frozen = outputs(RECIPES[name], backend="xla")
    np.testing.assert_array_equal(got, expected)
    assert frozen.backend == "xla"


@needs_pallas
@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_rowwise", "fp8_block"])
def test_in_the_layout_of_the_kernels(name):
    """Codes [N, K], padded to whole blocks; dequantized they are [K, N] again."""
    with interpreting():
        expected, got, frozen = jax.block_until_ready(outputs(RECIPES[name], backend="pallas"))
    np.testing.assert_array_equal(got, expected)
    assert frozen.operand.q.values.shape == (256, 256)
    assert frozen.dequantized().shape == (K, N)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["fp8_rowwise", "fp8_amax"])
def test_weights_alone_keep_the_dtype_of_x(name, dtype):
    """Codes are exact in bfloat16, and the scale is multiplied into the result: a float32 sum of K
    terms is off by at most K 2^-24 of the sum of their sizes, and the scale and the result by two
    roundings more."""
    recipe = as_recipe(f"{name}:only=fwd_w")
    (frozen,) = jax.jit(lambda kernel: freeze_kernels([Weight(kernel)], recipe))(*kernels(1))
    x = x_MK().astype(dtype)

    def multiply(x):
        return frozen_dot(x, [Weight(frozen)], recipe=recipe, preferred_element_type=jnp.float32)[0]

    traced = str(jax.make_jaxpr(multiply)(x)).replace("f32", "float32").replace("bf16", "bfloat16")
    assert f"{dtype}[{K},{N}]" in traced and "dot_general" in traced
    if dtype == "bfloat16":
        assert f" float32[{K},{N}]" not in traced
    w, wide = np.asarray(dequantized(frozen), np.float64), np.asarray(x, np.float64)
    assert (
        np.abs(jax.jit(multiply)(x) - wide @ w) <= (K + 2) * 2.0**-24 * (np.abs(wide) @ np.abs(w))
    ).all()


def test_dequantized():
    recipe, (kernel,) = RECIPES["fp8_block"], kernels(1)
    (frozen,) = jax.jit(lambda kernel: freeze_kernels([Weight(kernel)], recipe))(kernel)
    cast = recipe.fwd_w
    expected = jax.jit(lambda w: dequantize(quantize(w, cast.format, cast.tile, contract_axis=-2)))(
        kernel
    )
    np.testing.assert_array_equal(dequantized(frozen), expected)


class Shared(nn.Module):
    """Two linears of one input."""

    recipe: str

    @nn.compact
    def __call__(self, x):
        recipe = as_recipe(self.recipe).sharing_scales()
        layers = [Dense(N, recipe, use_bias=True, name=name, seeded=True) for name in "ab"]
        return together(layers, x, (None, None))


def test_weights_that_share_a_scale():
    """The second kernel's own amax is half of the first's, so a scale of its own would differ."""
    recipe, pair = as_recipe("fp8_current").sharing_scales(), kernels(2)
    model, bias = Shared("fp8_current"), jnp.arange(N, dtype=jnp.float32)
    params = {k: {"kernel": w, "bias": bias} for k, w in zip("ab", pair, strict=True)}
    made = freeze_kernels([*map(Weight, pair)], recipe)
    frozen = {k: {"kernel": w, "bias": bias} for k, w in zip("ab", made, strict=True)}
    apply = jax.jit(lambda params: model.apply({"params": params}, x_MK()))
    for got, expected in zip(apply(frozen), apply(params), strict=True):
        np.testing.assert_array_equal(got, expected)
    scales = [float(one.operand.q.scale[0, 0]) for one in made]
    assert scales[0] == scales[1]


def test_stochastic_activations_take_the_key_of_the_call():
    nearest = RECIPES["fp8_current"]
    recipe = dataclasses.replace(
        nearest, fwd_x=dataclasses.replace(nearest.fwd_x, rounding="stochastic")
    )
    expected, got, _ = outputs(recipe)
    np.testing.assert_array_equal(got, expected)


def test_differentiation_raises():
    recipe, (kernel,) = RECIPES["fp8_block"], kernels(1)
    (frozen,) = freeze_kernels([Weight(kernel)], recipe)
    dense = Dense(N, recipe)

    def loss(x):
        return jnp.sum(dense.apply({"params": {"kernel": frozen}}, x).astype(jnp.float32))

    with pytest.raises(NotImplementedError, match="frozen kernels have a forward only"):
        jax.jit(jax.grad(loss))(x_MK())


def stochastic_weights():
    nearest = RECIPES["fp8_current"]
    return dataclasses.replace(
        nearest, fwd_w=dataclasses.replace(nearest.fwd_w, rounding="stochastic"), name="noisy"
    )


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (stochastic_weights(), "'noisy' rounds weights stochastically, anew in every call"),
        (as_recipe("fp8_block:forward=bf16"), "leaves weights in high precision"),
    ],
)
def test_what_cannot_be_frozen(recipe, message):
    with pytest.raises(ValueError, match=message):
        freeze_kernels([*map(Weight, kernels(1))], recipe)


def test_a_kernel_runs_only_as_it_was_frozen():
    recipe, (first, second) = RECIPES["fp8_block"], kernels(2)
    (frozen,) = freeze_kernels([Weight(first)], recipe)

    def run(*given, recipe=recipe):
        return frozen_dot(x_MK(), [*map(Weight, given)], recipe=recipe)

    with pytest.raises(ValueError, match="some of the kernels that share one input are frozen"):
        run(frozen, second)
    with pytest.raises(ValueError, match="recipe 'fp8_rowwise' casts weights by"):
        run(frozen, recipe=RECIPES["fp8_rowwise"])
    with pytest.raises(ValueError, match="frozen for backend 'pallas', and runs in 'emulated'"):
        run(dataclasses.replace(frozen, backend="pallas"))
    variables = {"params": {"kernel": frozen}}
    with pytest.raises(ValueError, match=r"need a kernel of shape \(8, 144\), but .* \(160, 144\)"):
        Dense(N, recipe).apply(variables, jnp.ones((2, 8)))
    with pytest.raises(ValueError, match="an input scale multiplies the kernel in every call"):
        Dense(N, recipe).apply(variables, x_MK(), input_scale=jnp.ones(K))


def test_explicit_axes_are_refused():
    (frozen,) = freeze_kernels([*map(Weight, kernels(1))], RECIPES["fp8_block"])
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(x_MK(), NamedSharding(mesh, PartitionSpec("data")))
    with pytest.raises(NotImplementedError, match="make the mesh with AxisType.Auto"):
        Dense(N, "fp8_block").apply({"params": {"kernel": frozen}}, x)


def test_layers_of_a_stack():
    """A scan over stretches reads what a loop over layers reads."""
    recipe = RECIPES["fp8_rowwise"]
    stack = jnp.stack(kernels(3))
    frozen = jax.lax.map(lambda w: freeze_kernels([Weight(w)], recipe)[0], stack[1:])
    tree = {"kernel": StackedKernel((stack[:1], frozen), (0, 1, 3)), "scale": jnp.arange(3.0)}
    assert has_frozen(tree) and not has_frozen({"kernel": stack})
    first, rest = take_layers(tree, 0, 1), take_layers(tree, 1, 3)
    np.testing.assert_array_equal(first["kernel"], stack[:1])
    np.testing.assert_array_equal(rest["scale"], [1.0, 2.0])
    assert isinstance(rest["kernel"], FrozenKernel)
    dense = Dense(N, recipe)

    def layer(_, kernel):
        return None, dense.apply({"params": {"kernel": kernel}}, x_MK())

    _, ys = jax.jit(lambda kernel: jax.lax.scan(layer, None, kernel))(rest["kernel"])
    _, expected = jax.jit(lambda kernel: jax.lax.scan(layer, None, kernel))(stack[1:])
    np.testing.assert_array_equal(ys, expected)
    np.testing.assert_array_equal(layer_of(tree, 0)["kernel"], stack[0])
    alone = layer_of(tree, 2)
    assert alone["scale"] == 2.0
    y = jax.jit(lambda kernel: layer(None, kernel)[1])(alone["kernel"])
    np.testing.assert_array_equal(y, expected[1])
    with pytest.raises(ValueError, match=r"layers 0 to 2 run in one recipe.*begin at .* \[0, 1\]"):
        take_layers(tree, 0, 3)


def test_the_backend_of_a_frozen_kernel_is_the_one_that_will_run_it():
    (frozen,) = freeze_kernels([*map(Weight, kernels(1))], RECIPES["fp8_block"])
    assert frozen.backend == choose_backend(None, RECIPES["fp8_block"]).name
    assert isinstance(frozen.operand, QuantizedOperand) and frozen.shape == (K, N)


def test_no_rows_are_no_error():
    frozen = freeze_kernels((Weight(jnp.ones((K, N))),), recipe=RECIPES["fp8_current"])
    (y,) = frozen_dot(jnp.ones((2, 0, K)), [Weight(frozen[0])], recipe=RECIPES["fp8_current"])
    assert y.shape == (2, 0, N)
