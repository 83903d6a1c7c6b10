"""Weights-only GEMMs of one or two rows: against float64, and what an H200 would read."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.device import hardware
from fp8jax.linear.frozen import freeze_kernels, frozen_dot
from fp8jax.numerics.names import as_recipe
from tests.support import h200

K, N = 512, 384
H200 = hardware.Device("gpu", "NVIDIA H200", (9, 0))
NAMES = ("fp8_block", "fp8_rowwise", "fp8_amax", "mxfp8", "nvfp4")


def weights_only(name: str):
    return as_recipe(f"{name}:only=fwd_w")


def kernel(shape=(K, N)):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def multiply(recipe, x, frozen):
    return frozen_dot(
        x, [frozen], recipe=recipe, states=[{}], keys=[None], preferred_element_type=jnp.float32
    )[0]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name, size", [*((name, K) for name in NAMES), ("fp8_block", 200)])
def test_the_product_is_that_of_the_dequantized_weights(name, size, rows, monkeypatch):
    """A float32 sum of K terms is off by at most K 2^-24 of the sum of their sizes, and each term
    by two roundings. The other backend's program contains a GEMM, this one none."""
    recipe = weights_only(name)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(rows, 1, size)), jnp.bfloat16)
    (usual,) = freeze_kernels([kernel((size, N))], recipe, [{}])
    assert "dot_general" in str(jax.make_jaxpr(multiply, static_argnums=0)(recipe, x, usual))
    jax.clear_caches()
    monkeypatch.setattr(hardware, "device", lambda: H200)
    (frozen,) = freeze_kernels([kernel((size, N))], recipe, [{}])
    assert "dot_general" not in str(jax.make_jaxpr(multiply, static_argnums=0)(recipe, x, frozen))
    got = jax.jit(multiply, static_argnums=0)(recipe, x, frozen)
    assert got.shape == (rows, 1, N) and got.dtype == jnp.float32
    np.testing.assert_array_equal(frozen.dequantized(), usual.dequantized())
    w, wide = np.asarray(frozen.dequantized(), np.float64), np.asarray(x, np.float64)
    assert (np.abs(got - wide @ w) <= (size + 2) * 2.0**-24 * (np.abs(wide) @ np.abs(w))).all()


def test_a_code_that_is_no_number_reaches_its_column_alone(monkeypatch):
    monkeypatch.setattr(hardware, "device", lambda: H200)
    recipe = weights_only("fp8_rowwise")
    (frozen,) = freeze_kernels([kernel().at[3, 5].set(jnp.nan)], recipe, [{}])
    y = multiply(recipe, jnp.ones((1, K), jnp.bfloat16), frozen)
    assert np.flatnonzero(np.isnan(y[0])).tolist() == [5]


def test_three_rows_are_a_gemm(monkeypatch):
    monkeypatch.setattr(hardware, "device", lambda: H200)
    recipe = weights_only("fp8_block")
    (frozen,) = freeze_kernels([kernel()], recipe, [{}])
    x = jnp.asarray(np.random.default_rng(1).normal(size=(3, K)), jnp.bfloat16)
    assert "dot_general" in str(jax.make_jaxpr(multiply, static_argnums=0)(recipe, x, frozen))
    w, wide = np.asarray(frozen.dequantized(), np.float64), np.asarray(x, np.float64)
    got = multiply(recipe, x, frozen)
    assert (np.abs(got - wide @ w) <= (K + 2) * 2.0**-24 * (np.abs(wide) @ np.abs(w))).all()


@h200.needs_plugin
@pytest.mark.parametrize("rows", [1, 2])
def test_an_h200_reads_codes_and_writes_no_widened_weights(rows, monkeypatch):
    monkeypatch.setattr(hardware, "device", lambda: H200)
    recipe = weights_only("fp8_block")
    (frozen,) = freeze_kernels([kernel((4096, 4096))], recipe, [{}])
    leaves, structure = jax.tree.flatten(frozen)

    def product(x, *leaves):
        return multiply(recipe, x, structure.unflatten(leaves))

    text = h200.compiled(product, jnp.ones((rows, 4096), jnp.bfloat16), *leaves).as_text()
    entry = text[text.index("ENTRY") :]
    wide = re.findall(r"(?:f32|bf16)\[(?:4096|32,128|4096,32),(?:4096|128)\]", entry)
    codes = re.search(r"(%\S+) = f8e4m3fn\[4096,4096\]\S* parameter", entry)
    assert not wide and codes, entry
    reads = [line for line in entry.splitlines() if "fusion(" in line and f"{codes[1]}" in line]
    assert len(reads) == 1, entry
