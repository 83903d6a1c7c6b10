"""Emulated GEMMs gather the codes of sharded weights, and give the bits of those that do not."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import NamedSharding, P

from fp8jax.analysis.wire import find_transfers
from fp8jax.gemm.modules import Dense

pytestmark = pytest.mark.optimized_too  # bits of different programs, and HLO

M, K, N = 32, 512, 256
CARRIED = "f16"  # the dtype in which XLA for CPUs moves FP8


def make_mesh(fsdp, tensor):
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((fsdp, tensor), ("fsdp", "tensor"), axis_types=auto)


def arrays(mesh, spec):
    """x and g by their rows, and a kernel of unlike tiles."""
    rng = np.random.default_rng(0)
    exponents = rng.integers(-6, 7, (K, 1)) + rng.integers(-6, 7, (1, N))

    def placed(values, dtype, spec):
        return jax.device_put(jnp.asarray(values, dtype), NamedSharding(mesh, spec))

    x, g = (placed(rng.normal(size=(M, n)), jnp.bfloat16, P("fsdp", None)) for n in (K, N))
    return x, placed(rng.normal(size=(K, N)) * np.exp2(exponents), jnp.float32, spec), g


def results_and_gathers(mesh, recipe, specs, gathered):
    """(y, dx, dw) of a layer; dtypes of what is gathered that is as large as its weight."""
    layer = Dense(N, recipe, "emulated", gathered=gathered)

    def step(x, w, g):
        y, pull = jax.vjp(lambda x, w: layer.apply({"params": {"kernel": w}}, x), x, w)
        return y, *pull(g)

    x, w, g = arrays(mesh, specs[0])
    shardings = tuple(array.sharding for array in (g, x, w))
    with jax.set_mesh(mesh):
        compiled = jax.jit(step, out_shardings=shardings).lower(x, w, g).compile()
        results = compiled(x, w, g)
    size = K * N // math.prod(mesh.shape[axis] for axis in specs[1] if axis is not None)
    found = find_transfers(compiled.as_text())
    sent = [each for each in found if each.kind == "all-gather" and math.prod(each.shape) == size]
    return results, [each.dtype for each in sent]


@pytest.mark.parametrize(
    ("recipe", "sizes", "specs"),
    [
        ("fp8_block", (8, 1), (P("fsdp", None), P(None, None))),
        pytest.param(
            "fp8_rowwise", (4, 2), (P("fsdp", "tensor"), P(None, "tensor")), marks=pytest.mark.full
        ),
        pytest.param(
            "mxfp8", (4, 2), (P("tensor", "fsdp"), P("tensor", None)), marks=pytest.mark.full
        ),
    ],
)
def test_codes_are_gathered_and_the_bits_are_the_same(recipe, sizes, specs):
    """Forward and dgrad gather the weight once each."""
    mesh = make_mesh(*sizes)
    results, wide = results_and_gathers(mesh, recipe, specs, None)
    assert len(wide) == 2 and CARRIED not in wide
    with_codes, narrow = results_and_gathers(mesh, recipe, specs, specs)
    assert narrow == [CARRIED] * 2
    for a, b in zip(results, with_codes, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_codes_of_four_bits_are_left_to_xla():
    """Their numbers are gathered: bfloat16 and float32, which a CPU moves as float32."""
    specs = P("fsdp", None), P(None, None)
    _, found = results_and_gathers(make_mesh(8, 1), "fp4_naive", specs, specs)
    assert found == ["f32"] * 2
