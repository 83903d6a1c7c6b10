"""Weights-only GEMMs on a GPU: against float64, and what an H200 would read."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.device import hardware, xla
from fp8jax.gemm.frozen import freeze_kernels, frozen_dot
from fp8jax.gemm.weight import Weight
from fp8jax.numerics.names import as_recipe
from tests.support import h200

K, N = 512, 384
H200 = hardware.Device("gpu", "NVIDIA H200", (9, 0))
NAMES = ("fp8_block", "fp8_rowwise", "fp8_amax", "mxfp8", "nvfp4")


def weights_only(name: str):
    return as_recipe(f"{name}:only=fwd_w")


def kernel(shape=(K, N)):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def freeze(recipe, w):
    return _freeze(recipe, hardware.device(), w)


def multiply(recipe, x, frozen):
    return _multiply(recipe, hardware.device(), x, frozen)


# The device is an argument so that they are traced anew for another one.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _freeze(recipe, device, w):
    return freeze_kernels([Weight(w)], recipe)[0]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _multiply(recipe, device, x, frozen):
    return frozen_dot(x, [Weight(frozen)], recipe=recipe, preferred_element_type=jnp.float32)[0]


# Compiled whole: operation by operation, each one is compiled for each shape.
dequantized = jax.jit(lambda frozen: frozen.dequantized())


def is_of_codes(recipe, x, frozen):
    """Whether the codes are multiplied as they are: the emulated backend has barriers."""
    return "optimization_barrier" not in str(
        jax.make_jaxpr(multiply, static_argnums=0)(recipe, x, frozen)
    )


@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("name", NAMES)
def test_the_product_is_that_of_the_dequantized_weights(name, rows, monkeypatch):
    """A float32 sum of K terms, in any order, is off by at most K 2^-24 of the sum of their sizes,
    and each term by two roundings, of its scale and of what that multiplies."""
    recipe = weights_only(name)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(rows, 1, K)), jnp.bfloat16)
    usual = freeze(recipe, kernel())
    assert not is_of_codes(recipe, x, usual)
    monkeypatch.setattr(hardware, "device", lambda: H200)
    frozen = freeze(recipe, kernel())
    assert is_of_codes(recipe, x, frozen)
    got = multiply(recipe, x, frozen)
    assert got.shape == (rows, 1, N) and got.dtype == jnp.float32
    weights = dequantized(frozen)
    np.testing.assert_array_equal(weights, dequantized(usual))
    w, wide = np.asarray(weights, np.float64), np.asarray(x, np.float64)
    assert (np.abs(got - wide @ w) <= (K + 2) * 2.0**-24 * (np.abs(wide) @ np.abs(w))).all()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2, 64, 100])
@pytest.mark.parametrize("name", ["fp8_rowwise", "fp8_block"])
def test_a_gpu_multiplies_codes_as_exactly(name, rows):
    """Its matrix unit may cut off bits of a float32 sum, at most one unit in the last place each
    time, where a CPU rounds: twice the bound."""
    recipe = weights_only(name)
    frozen = freeze(recipe, kernel())
    x = jnp.asarray(np.random.default_rng(1).normal(size=(rows, K)), jnp.bfloat16)
    options = xla.compiler_options(weights_only=True)
    got = jax.jit(multiply, static_argnums=0, compiler_options=options)(recipe, x, frozen)
    w, wide = np.asarray(frozen.dequantized(), np.float64), np.asarray(x, np.float64)
    assert (np.abs(got - wide @ w) <= (K + 2) * 2.0**-23 * (np.abs(wide) @ np.abs(w))).all()


def test_codes_in_another_layout_are_left_to_the_emulated_backend(monkeypatch):
    """Such as those of a square kernel that was frozen where there was no GPU."""
    recipe = weights_only("fp8_rowwise")
    frozen = freeze(recipe, kernel((K, K)))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, K)), jnp.bfloat16)
    expected = multiply(recipe, x, frozen)
    monkeypatch.setattr(hardware, "device", lambda: H200)
    assert not is_of_codes(recipe, x, frozen)
    np.testing.assert_array_equal(multiply(recipe, x, frozen), expected)


def test_a_code_that_is_no_number_reaches_its_column_alone(monkeypatch):
    monkeypatch.setattr(hardware, "device", lambda: H200)
    recipe = weights_only("fp8_rowwise")
    frozen = freeze(recipe, kernel().at[3, 5].set(jnp.nan))
    y = multiply(recipe, jnp.ones((1, K), jnp.bfloat16), frozen)
    assert np.flatnonzero(np.isnan(y[0])).tolist() == [5]


@pytest.mark.parametrize(
    "name, rows, size",
    [
        ("fp8_block", 65, K),  # the sums of tiles would take more than the weights
        ("fp8_block", 2, 200),  # the last tile is not whole
        ("nvfp4", 9, K),
    ],
)
def test_float32_weights_are_three_parts(name, rows, size, monkeypatch):
    """Their products with x are exact. Each part's sum of K terms, and their two additions, are off
    by 2^-24 of the sizes of the parts, which are at most 1 + 2 * 2^-8 times those of the weights;
    those have a rounding more."""
    monkeypatch.setattr(hardware, "device", lambda: H200)
    recipe = weights_only(name)
    frozen = freeze(recipe, kernel((size, N)))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(rows, size)), jnp.bfloat16)
    traced = str(jax.make_jaxpr(multiply, static_argnums=0)(recipe, x, frozen))
    assert traced.count("dot_general") == 3
    got = multiply(recipe, x, frozen)
    w, wide = np.asarray(frozen.dequantized(), np.float64), np.asarray(x, np.float64)
    bound = 1.008 * (size + 3) * 2.0**-24 * (np.abs(wide) @ np.abs(w))
    assert (np.abs(got - wide @ w) <= bound).all()


@pytest.mark.parametrize(
    "name, rows, dtype", [("mxfp8", 17, jnp.bfloat16), ("fp8_rowwise", 2, jnp.float32)]
)
def test_the_emulated_backend_multiplies_the_others(name, rows, dtype, monkeypatch):
    """Weights that bfloat16 holds exactly, and activations in float32."""
    monkeypatch.setattr(hardware, "device", lambda: H200)
    recipe = weights_only(name)
    frozen = freeze(recipe, kernel())
    x = jnp.asarray(np.random.default_rng(1).normal(size=(rows, K)), dtype)
    assert not is_of_codes(recipe, x, frozen)
    w, wide = np.asarray(frozen.dequantized(), np.float64), np.asarray(x, np.float64)
    got = multiply(recipe, x, frozen)
    assert (np.abs(got - wide @ w) <= (K + 2) * 2.0**-24 * (np.abs(wide) @ np.abs(w))).all()


@h200.needs_plugin
def test_an_h200_multiplies_parts_in_bfloat16(monkeypatch):
    monkeypatch.setattr(hardware, "device", lambda: H200)
    recipe = weights_only("fp8_block")
    frozen = freeze(recipe, kernel((1024, 1024)))
    leaves, structure = jax.tree.flatten(frozen)

    def product(x, *leaves):
        return multiply(recipe, x, structure.unflatten(leaves))

    text = h200.compiled(product, jnp.ones((1024, 1024), jnp.bfloat16), *leaves).as_text()
    dtypes = dict(re.findall(r"(%\S+) = (\w+)\[", text))
    gemms = re.findall(r"custom-call\((%\S+), (%\S+)\), custom_call_target=\"__cublas", text)
    assert gemms and {dtypes[name] for gemm in gemms for name in gemm} == {"bf16"}, text


@h200.needs_plugin
@pytest.mark.parametrize("rows", [2, 64])
@pytest.mark.parametrize("name", ["fp8_rowwise", "fp8_block"])
def test_an_h200_reads_codes_and_writes_no_widened_weights(name, rows, monkeypatch):
    """Nor does a loop, as decoding is one, widen them before it begins."""
    monkeypatch.setattr(hardware, "device", lambda: H200)
    recipe = weights_only(name)
    frozen = freeze(recipe, kernel((4096, 4096)))
    leaves, structure = jax.tree.flatten(frozen)

    def products(x, *leaves):
        def product(_, x):
            return multiply(recipe, x, structure.unflatten(leaves)).astype(x.dtype)

        return jax.lax.fori_loop(0, 3, product, x)

    with h200.default():
        options = xla.compiler_options(weights_only=True)
    x = jnp.ones((rows, 4096), jnp.bfloat16)
    text = h200.compiled(products, x, *leaves, options=options).as_text()
    called = re.findall(r"fusion\((.*?)\), kind=kCustom, calls=(%\S+?),.*?__triton", text)
    assert len(called) == 1, text
    inside = text[text.index(f"\n{called[0][1]} ") :]
    assert "f8e4m3fn[" in inside[: inside.index("\n}")], text
    outside = text.replace(inside[: inside.index("\n}")], "")
    assert not re.search(r"(?:f32|bf16)\[4096,(?:4096|\d+,\d+)\]", outside), text
