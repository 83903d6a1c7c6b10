"""Frozen models against the same models with float32 weights: equal logits, bit for bit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from fp8jax.device import xla
from fp8jax.gemm.frozen import FrozenKernel, StackedKernel
from fp8jax.gemm.histories.amax_history import HISTORIES
from fp8jax.lm.mesh import MeshAxes, make_mesh, tree_shardings
from fp8jax.lm.model.config import ModelConfig
from fp8jax.lm.model.freeze import freeze
from fp8jax.lm.model.promotion import Promotion
from fp8jax.lm.model.transformer import Transformer, abstract_variables
from fp8jax.numerics.policy import POLICIES
from tests.support.tiny_models import random_variables

CONFIG = ModelConfig(
    vocab_size=64, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=48, head_dim=8
)
TIED = dataclasses.replace(CONFIG, tie_embeddings=True)
TOKENS = np.random.default_rng(0).integers(0, 64, (8, 16)).astype(np.int32)
POSITIONS = np.broadcast_to(np.arange(16, dtype=np.int32), TOKENS.shape)
pytestmark = pytest.mark.optimized_too  # bits of different programs


@functools.cache
def initial(model: Transformer):
    """Variables with kernels so large that every layer matters, and full histories. Those of q are
    2^-10 of those of k, so that with one scale for both many of q's codes are subnormal."""
    variables = random_variables(model)
    attention = variables["params"]["layers"]["attention"]
    for name, factor in (("q", 2.0**-5), ("k", 2.0**5)):
        attention[name]["kernel"] = attention[name]["kernel"] * factor
    if HISTORIES in variables:
        fill = lambda h: jnp.asarray(np.full(h.shape, 2.5, h.dtype))  # noqa: E731
        variables[HISTORIES] = jax.tree.map(fill, variables[HISTORIES])
    return variables


# With every rounding executed, as in all programs of the library.
@functools.partial(jax.jit, static_argnums=0, compiler_options=xla.compiler_options())
def logits_of(model, variables, tokens):
    key = jax.random.key(1)  # for recipes whose gradients are rounded stochastically
    return model.apply(variables, tokens, jnp.ones_like(tokens), jnp.asarray(POSITIONS), key)


@pytest.mark.optimized_too
@pytest.mark.parametrize(
    ("config", "policy"),
    [
        (CONFIG, "nvfp4_mixed:head=fp8_rowwise"),  # the last layer is exempt; an untied head
        (TIED, "fp8_delayed:head=fp8_delayed,bf16_first=1"),  # histories; a tied head
        (TIED, "fp8_amax:qkv=shared"),  # one scale for q, k and v; a tied head in BF16
    ],
)
def test_a_frozen_model_gives_the_same_logits(config, policy):
    model = Transformer(config, policy)
    variables = initial(model)
    frozen = freeze(model, variables)
    expected, got = (logits_of(model, given, TOKENS) for given in (variables, frozen))
    np.testing.assert_array_equal(got, expected)
    wide = [leaf for leaf in jax.tree.leaves(frozen["params"]) if leaf.dtype == jnp.float32]
    # What is left in float32 are norms, biases and scales: at most an element a row or column.
    assert sum(leaf.size for leaf in wide) < 0.1 * sum(map(jnp.size, jax.tree.leaves(variables)))
    assert frozen["params"]["embedding"].dtype == jnp.bfloat16


def test_exempt_layers_keep_kernels_of_their_own():
    model = Transformer(CONFIG, "fp8_block:bf16_last=1")
    kernel = freeze(model, initial(model))["params"]["layers"]["mlp"]["up"]["kernel"]
    assert isinstance(kernel, StackedKernel) and kernel.begins == (0, 1, 2)
    frozen, exempt = kernel.parts
    assert isinstance(frozen, FrozenKernel) and frozen.operand.q.values.shape == (1, 32, 48)
    assert exempt.dtype == jnp.bfloat16 and exempt.shape == (1, 32, 48)


def test_on_eight_devices():
    """fp8_block's blocks, and the shards of a kernel, are the same as on one device."""
    config = dataclasses.replace(CONFIG, d_model=256, d_ff=256, n_heads=8, n_kv_heads=8)
    model = Transformer(config, "fp8_block")
    variables, mesh = initial(model), make_mesh(MeshAxes(data=2, fsdp=2, tensor=2))
    alone = freeze(model, variables)
    shardings = tree_shardings(abstract_variables(model), mesh)
    with jax.set_mesh(mesh):
        spread = jax.device_put(variables, shardings)
        frozen = freeze(model, spread)
        tokens = jax.device_put(TOKENS, NamedSharding(mesh, PartitionSpec(("data", "fsdp"))))
        expected, got = (logits_of(model, given, tokens) for given in (spread, frozen))
    np.testing.assert_array_equal(got, expected)
    assert jax.tree.structure(frozen) == jax.tree.structure(alone)
    for one, other in zip(jax.tree.leaves(frozen), jax.tree.leaves(alone), strict=True):
        np.testing.assert_array_equal(one.astype(jnp.float32), other.astype(jnp.float32))
    codes = frozen["params"]["layers"]["mlp"]["up"]["kernel"].operand.q.values
    assert codes.addressable_shards[0].data.size < codes.size


def test_what_cannot_be_frozen():
    model = Transformer(CONFIG, "fp8_delayed")
    variables = initial(model)
    with pytest.raises(ValueError, match="attention/q runs 'fp8_delayed' and has no x_amax_hist"):
        freeze(model, {"params": variables["params"]})
    with pytest.raises(ValueError, match="frozen already"):
        freeze(model, freeze(model, variables))
    smooth = Transformer(dataclasses.replace(CONFIG, mlp="smooth_swiglu"), "fp8_block")
    with pytest.raises(ValueError, match="mlp='smooth_swiglu' scales the kernel of layers/mlp/dow"):
        freeze(smooth, {"params": variables["params"]})


def test_another_policy_is_refused():
    model = Transformer(CONFIG, "fp8_block")
    frozen = freeze(model, initial(model))
    with pytest.raises(ValueError, match="freeze for the policy that the model runs"):
        logits_of(Transformer(CONFIG, "fp8_current"), frozen, TOKENS)
    exempt = freeze(Transformer(CONFIG, "fp8_block:bf16_last=1"), initial(model))
    with pytest.raises(ValueError, match="freeze for the model's own policy"):
        logits_of(model, exempt, TOKENS)
    promotion, tokens = Promotion(POLICIES["bf16"], jnp.zeros(2, bool)), jnp.asarray(TOKENS)
    with pytest.raises(ValueError, match="layers with frozen kernels cannot be promoted"):
        model.apply(frozen, tokens, tokens, tokens, None, promotion)
