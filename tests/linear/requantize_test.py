"""`requantize`: x itself is saved for the backward, and quantized there to the same codes."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from fp8jax.linear.amax_history import HISTORIES, init_state
from fp8jax.linear.dot import dot_general_shared
from fp8jax.linear.modules import Dense, together
from fp8jax.model.attention import reference
from fp8jax.model.models import MODELS
from fp8jax.model.transformer import Transformer, abstract_variables
from fp8jax.numerics.recipes import RECIPES
from tests.support.products import MATMUL

M, K, N = 136, 264, 144
QUANTIZED = [name for name in RECIPES if RECIPES[name].wgrad_x is not None]


def operands() -> tuple[jax.Array, jax.Array, jax.Array]:
    """x, a kernel and the gradient of the result."""
    shapes = (M, K), (K, N), (M, N)
    keys = map(jax.random.key, range(3))
    x, w, g = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    return x.astype(jnp.bfloat16), w, g.astype(jnp.bfloat16)


def product(name: str, requantize: bool, seeded: bool, x, ws, states):
    keys = [jax.random.key(7 + i) for i in range(len(ws))]
    return dot_general_shared(
        x, ws, MATMUL, recipe=name, states=states, keys=keys, backend="emulated", seeded=seeded,
        requantize=requantize,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "seeded"),
    [(name, True) for name in RECIPES] + [("fp8_delayed", False)],
)
def test_all_results_have_the_same_bits(name, seeded):
    """y, dx, dw and the next histories; not seeded, the empty histories seed themselves."""
    x, w, g = operands()
    old = 3.0 if seeded else 0.0
    state = {k: jnp.full_like(v, old) for k, v in init_state(name).items()}

    @functools.partial(jax.jit, static_argnums=0)
    def run(requantize: bool):
        f = functools.partial(product, name, requantize, seeded)
        ys, vjp = jax.vjp(f, x, (w,), (state,))
        return ys, vjp((g,))

    for one, other in zip(*map(jax.tree.leaves, (run(True), run(False))), strict=True):
        assert (one == other).all()


def test_the_largest_history_of_x_sets_the_scale_of_both_passes():
    x, w, g = operands()
    state = init_state("fp8_delayed")
    first, second = ({k: jnp.full_like(v, h) for k, v in state.items()} for h in (1.0, 64.0))
    results = []
    for requantize in (True, False):
        f = functools.partial(product, "fp8_delayed", requantize, True)
        _, vjp = jax.vjp(f, x, (w, w), (first, second))
        results.append(vjp((g, g)))
    for one, other in zip(*map(jax.tree.leaves, results), strict=True):
        assert (one == other).all()


def residuals(requantize: bool, name: str) -> list[jax.ShapeDtypeStruct]:
    x, w, _ = operands()
    f = functools.partial(product, name, requantize, True)
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
    x = operands()[0]

    class Pair(nn.Module):
        @nn.compact
        def __call__(self, x):
            layers = [Dense(8, "fp8_block", name=n, requantize=n == "a") for n in "ab"]
            return together(layers, x, [None, None])

    def codes(x):
        variables = Pair().init(jax.random.key(0), x)
        return jax.vjp(lambda x: Pair().apply(variables, x), x)[1]

    kept = [leaf for leaf in jax.tree.leaves(jax.eval_shape(codes, x)) if leaf.shape == (M, K)]
    assert sorted(leaf.dtype.itemsize for leaf in kept) == [1, 2]


def test_a_layer_requantizes_what_attention_keeps():
    """`reference` saves its output, so the projection after it keeps no codes; with an
    implementation that says otherwise it does, and all results are the same."""
    config = dataclasses.replace(MODELS["llama_tiny"], n_layers=1)
    tokens = jax.random.randint(jax.random.key(0), (2, 128), 0, config.vocab_size)
    positions, segments = jnp.tile(jnp.arange(128), (2, 1)), jnp.ones((2, 128), jnp.int32)
    saves = reference()
    assert saves.saves_output
    codes, results = [], []
    for attention in (saves, dataclasses.replace(saves, saves_output=False)):
        model = Transformer(config, "fp8_delayed", "emulated", attention, unroll=1)
        shapes = abstract_variables(model)
        variables = Transformer(config).init(jax.random.key(1), tokens, segments, positions)
        histories = jax.tree.map(lambda h: jnp.ones(h.shape, h.dtype), shapes[HISTORIES])

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
    for one, other in zip(*map(jax.tree.leaves, results), strict=True):
        assert (one == other).all()
