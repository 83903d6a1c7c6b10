"""`recompute_codes`: x itself is saved for the backward, and quantized there to the same codes."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.gemm.dot import dot_general_together
from fp8jax.gemm.histories.amax_history import HISTORIES, init_state
from fp8jax.gemm.modules import Dense, together
from fp8jax.gemm.weight import Weight
from fp8jax.lm.model.attention import reference
from fp8jax.numerics.recipes import RECIPES
from tests.support.products import MATMUL, normal_operands
from tests.support.tiny_models import tiny_model

M, K, N = 136, 264, 144
pytestmark = pytest.mark.optimized_too  # bits of different programs
QUANTIZED = [name for name in RECIPES if RECIPES[name].wgrad_x is not None]


def operands() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, a kernel and the gradient of the result."""
    x, w, g = normal_operands(M, K, N, sigma=(1, 1, 1), dtype=jnp.bfloat16).values()
    return x, w, g


def product(name: str, recompute_codes: bool, seeded: bool, x, ws, states):
    keys = [jax.random.key(7 + i) for i in range(len(ws))]
    return dot_general_together(
        x,
        tuple(map(Weight, ws, states, keys)),
        MATMUL,
        recipe=name,
        backend="emulated",
        seeded=seeded,
        recompute_codes=recompute_codes,
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def results(name: str, recompute_codes: bool, seeded: bool, x, ws, gs, states):
    """ys, dx, dws and the next histories."""
    f = functools.partial(product, name, recompute_codes, seeded)
    ys, vjp = jax.vjp(f, x, ws, states)
    return ys, vjp(gs)


def filled(name: str, value: float) -> dict[str, np.ndarray]:
    """Histories of a recipe."""
    return {k: np.full(v.shape, value, np.float32) for k, v in init_state(name).items()}


def assert_same(one, other):
    for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        np.testing.assert_array_equal(a, b)


DEFAULT = ("bf16", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4")


@pytest.mark.parametrize(
    ("name", "seeded"),
    [
        # One recipe of each tile; the others recompute them by the same function.
        (name, True) if name in DEFAULT else pytest.param(name, True, marks=pytest.mark.full)
        for name in RECIPES
    ]
    + [("fp8_delayed", False)],
)
def test_all_results_have_the_same_bits(name, seeded):
    """y, dx, dw and the next histories; not seeded, the empty histories seed themselves."""
    x, w, g = operands()
    state = filled(name, 3.0 if seeded else 0.0)
    one, other = (results(name, how, seeded, x, (w,), (g,), (state,)) for how in (True, False))
    assert_same(one, other)


def test_the_largest_history_of_x_sets_the_scale_of_both_passes():
    x, w, g = operands()
    states = tuple(filled("fp8_delayed", value) for value in (1.0, 64.0))
    one, other = (
        results("fp8_delayed", how, True, x, (w, w), (g, g), states) for how in (True, False)
    )
    assert_same(one, other)


def residuals(recompute_codes: bool, name: str) -> list[jax.ShapeDtypeStruct]:
    x, w, _ = operands()
    f = functools.partial(product, name, recompute_codes, True)
    _, vjp = jax.eval_shape(lambda x, w: jax.vjp(f, x, (w,), (init_state(name),)), x, w)
    return [leaf for leaf in jax.tree.leaves(vjp) if getattr(leaf, "shape", ()) == (M, K)]


@pytest.mark.parametrize("name", [n for n in QUANTIZED if RECIPES[n].wgrad_x.hadamard == 1])
def test_x_is_saved_in_place_of_its_codes(name):
    (kept,) = residuals(True, name)
    assert kept.dtype == jnp.bfloat16
    (kept,) = residuals(False, name)
    assert kept.dtype.itemsize == 1


def test_layers_of_other_settings_do_not_share_x():
    """One saves x, the other its codes: they are applied one by one."""
    x = jnp.asarray(operands()[0])

    class Pair(nn.Module):
        @nn.compact
        def __call__(self, x):
            layers = [Dense(8, "fp8_block", name=n, recompute_codes=n == "a") for n in "ab"]
            return together(layers, x, [None, None])

    def codes(x):
        variables = Pair().init(jax.random.key(0), x)
        return jax.vjp(lambda x: Pair().apply(variables, x), x)[1]

    kept = [leaf for leaf in jax.tree.leaves(jax.eval_shape(codes, x)) if leaf.shape == (M, K)]
    assert sorted(leaf.dtype.itemsize for leaf in kept) == [1, 2]


def test_a_layer_requantizes_what_attention_keeps():
    """`reference` saves its output, so the projection after it keeps no codes; with an
    implementation that says otherwise it does, and all results are the same."""
    tiny, variables = tiny_model("llama_tiny", "fp8_delayed", jnp.bfloat16, n_layers=1)
    histories = jax.tree.map(lambda h: np.ones(h.shape, h.dtype), variables[HISTORIES])
    draw = np.random.default_rng(0).integers(0, tiny.config.vocab_size, (2, 32))
    tokens = jnp.asarray(draw, jnp.int32)
    positions, segments = jnp.asarray(np.tile(np.arange(32), (2, 1))), jnp.ones_like(tokens)
    saves = reference()
    assert saves.saves_output
    codes, results = [], []
    for attention in (saves, dataclasses.replace(saves, saves_output=False)):
        model = tiny.clone(backend="emulated", attention=attention)

        def loss(params, histories, model=model):
            variables = {"params": params, HISTORIES: histories}
            logits = model.apply(variables, tokens, segments, positions)
            return jnp.mean(logits**2)

        given = variables["params"], histories
        _, vjp = jax.eval_shape(functools.partial(jax.vjp, loss), *given)
        leaves = jax.tree.leaves(vjp)
        codes.append(sum(getattr(x, "dtype", None) == jnp.float8_e4m3fn for x in leaves))
        results.append(jax.jit(jax.value_and_grad(loss, (0, 1)))(*given))
    assert codes[1] == codes[0] + 1
    assert_same(*results)
