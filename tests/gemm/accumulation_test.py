"""Which accumulation each GEMM gets: in StableHLO, from each backend, and on a Hopper GPU."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.analysis.any_program import gemms
from fp8jax.device import hardware
from fp8jax.gemm.backends import operands
from fp8jax.gemm.backends.choice import BACKENDS, choose_backend
from fp8jax.gemm.dot import dot_general
from fp8jax.gemm.histories.amax_history import init_state
from fp8jax.numerics.names import as_recipe
from tests.support.products import MATMUL

H200 = hardware.Device("gpu", "NVIDIA H200", (9, 0))
SHAPES = (64, 128), (128, 32), (64, 32)  # x, w, g
HOW = ("fast", "split")


def products(recipe, backend: str, x, w, g, state):
    dot = functools.partial(dot_general, dimension_numbers=MATMUL, recipe=recipe, backend=backend)
    y, vjp = jax.vjp(lambda x, w: dot(x, w, state=state), x, w)
    return y, *vjp(g)


def stablehlo(spec: str, backend: str) -> str:
    """The program of the three GEMMs for a GPU; none is needed."""
    recipe = as_recipe(spec)
    x, w, g = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in SHAPES)
    f = jax.jit(functools.partial(products, recipe, backend))
    traced = f.trace(x, w, g, init_state(recipe))
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def precisions(spec: str) -> dict[tuple[int, ...], str]:
    """Shape of the result -> precision of each GEMM of the backend `xla`."""
    text = stablehlo(spec, "xla")
    found = re.findall(r"dot_general .*precision = \[(\w+), (\w+)\].*-> tensor<(\d+)x(\d+)x", text)
    assert len(found) == text.count("stablehlo.dot_general") == 3
    assert all(left == right for left, right, *_ in found)
    return {(int(m), int(n)): left for left, _, m, n in found}


@pytest.mark.parametrize("default", [None, "highest"])
@pytest.mark.parametrize("split", ["", "fwd", "dgrad", "wgrad", "dgrad wgrad", "fwd dgrad wgrad"])
@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_rowwise"])
def test_exactly_the_gemms_that_split_have_the_precision_for_it(name, split, default):
    """Also where JAX's own default is another: the recipe decides how a GEMM is computed."""
    options = ",".join(f"{gemm}_accumulation=split" for gemm in split.split())
    if default is None:
        setting = contextlib.nullcontext()
    else:
        setting = jax.default_matmul_precision(default)
    with setting:
        found = precisions(f"{name}:{options}" if options else name)
    results = {"fwd": (64, 32), "dgrad": (64, 128), "wgrad": (128, 32)}
    assert found == {
        shape: "HIGHEST" if gemm in split.split() else "DEFAULT" for gemm, shape in results.items()
    }


def test_the_default_is_the_program_without_the_option():
    plain, fast, split = (
        stablehlo(f"fp8_current{option}", "xla")
        for option in ("", ":accumulation=fast", ":accumulation=split")
    )
    assert plain == fast and "HIGHEST" not in plain
    assert plain == split.replace("HIGHEST", "DEFAULT") != split


def test_who_runs_a_split_sum_on_hopper():
    """The kernel for scales of rows has no split sums, so XLA multiplies; with one scale for the
    tensor XLA does anyway."""
    rows, tensor = (
        as_recipe(f"{n}:wgrad_accumulation=split") for n in ("fp8_rowwise", "fp8_current")
    )
    refuses = {name: BACKENDS[name].refuses(rows, H200) for name in BACKENDS}
    assert refuses["emulated"] is None is refuses["xla"]
    assert refuses["pallas"] == (
        "wgrad asks for split accumulation: the kernel for scales of rows has none"
    )
    assert choose_backend(None, rows, H200).name == "xla"
    assert choose_backend(None, as_recipe("fp8_rowwise"), H200).name == "pallas"
    assert choose_backend(None, tensor, H200).name == "pallas"


def test_the_emulated_backend_sums_in_float32_either_way(monkeypatch):
    """Its program is the same: three dots of bfloat16 codes with float32 results."""
    monkeypatch.setattr(operands, "platform", lambda: "gpu")  # a CPU's third is of float32
    fast, split = (stablehlo(f"fp8_current:accumulation={how}", "emulated") for how in HOW)
    assert fast == split
    assert len(re.findall(r"dot_general .*xbf16>\) -> tensor<\d+x\d+xf32>", fast)) == 3


@pytest.mark.gpu
def test_split_sums_are_exact_where_fast_ones_lose_bits():
    """All operands are 9/8, so all products are 81/64, and each sum of K = 16,384 is 20,736.

    Split: a sum of up to 202 products stays below 256, where 14 bits have a unit of 1/64 or less.
    So every such sum is exact, and float32 adds up multiples of 1/64 below 2^18 exactly.

    Fast: between 8,192 and 16,384 the unit is 1, above it is 2. If each product is aligned to the
    sum by itself, at most 1 of 81/64 remains; if 32 products, the K of an instruction, are added
    first, 40 of 40.5. So at least 1/81 is lost of what comes after 8,192, which is 0.6 of the sum:
    2^-7.1 of it. The matrix is so large that no kernel has a reason to split K.
    """
    if hardware.compute_capability() != (9, 0):
        # Other matrix units keep more bits of a sum, so that fast sums would be exact there, too.
        pytest.skip("the sums of 14 bits are Hopper's")
    M, K = 4096, 16384
    operands = jnp.full((M, K), 9 / 8), jnp.full((K, M), 9 / 8), jnp.zeros((M, M))
    errors = {}
    for how in HOW:
        recipe = as_recipe(f"fp8_cscale:bias=0,accumulation={how}")
        f = jax.jit(functools.partial(products, recipe, "xla")).lower(*operands, {}).compile()
        assert {g.accumulation for g in gemms(f, backend="xla")} == {how}
        y = np.asarray(f(*operands, {})[0], np.float64)
        errors[how] = np.abs(y / 20_736 - 1).max()
    assert errors["split"] == 0 and errors["fast"] > 2**-8
