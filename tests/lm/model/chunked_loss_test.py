"""The head and the loss in chunks, against the same on whole logits.

Sums in float32 (u = 2^-24) of n terms, in any two orders, differ by at most 2 n u times the sum of
the terms' magnitudes. Products of bfloat16 operands are exact in float32.
"""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from fp8jax.analysis.gemms import find_gemms
from fp8jax.analysis.hlo import ROLES
from fp8jax.device import xla
from fp8jax.gemm.dot import dot_general
from fp8jax.lm.mesh import AXES, MeshAxes, make_mesh, spec
from fp8jax.lm.model import chunked_loss as chunked
from fp8jax.lm.model.config import ModelConfig
from fp8jax.lm.model.transformer import Transformer
from fp8jax.lm.training import step
from fp8jax.numerics.names import as_policy
from fp8jax.numerics.recipes import HIGH_PRECISION, RECIPES

U = 2.0**-24
B, L, D, V = 8, 24, 32, 136
pytestmark = pytest.mark.optimized_too  # bits of different programs, and HLO


@functools.cache
def loss_arguments(dtype=jnp.bfloat16):
    """x, w, targets, weights and their sum. A third of the weights are 0."""
    rng = np.random.default_rng(0)
    x_BLD, w_DV = rng.normal(size=(B, L, D)), rng.normal(size=(D, V))
    if dtype == jnp.float32:  # logits are exact sums, whatever their order
        x_BLD, w_DV = np.round(2 * x_BLD) / 2, np.round(4 * w_DV) / 16
    targets_BL = rng.integers(0, V, (B, L)).astype(np.int32)
    weights_BL = (rng.random((B, L)) * rng.integers(0, 3, (B, L)).clip(0, 1)).astype(np.float32)
    arrays = x_BLD.astype(dtype), w_DV.astype(np.float32), targets_BL, weights_BL
    return *map(jnp.asarray, arrays), jnp.sum(weights_BL)


def whole_loss(x_BLD, w_DV, targets_BL, weights_BL, total):
    logits_BLV = dot_general(
        x_BLD,
        w_DV,
        (((2,), (0,)), ((), ())),
        recipe=HIGH_PRECISION,
        preferred_element_type=jnp.float32,
    )
    return jnp.sum(chunked.token_losses(logits_BLV, targets_BL) * weights_BL) / total


@functools.cache
def compiled(loss):
    """The loss and its gradients with respect to x, w, the weights and their sum."""
    grad = jax.value_and_grad(loss, argnums=(0, 1, 3, 4))
    return jax.jit(grad, compiler_options=xla.compiler_options())


@functools.cache
def in_chunks(positions):
    return functools.partial(chunked.chunked_loss, HIGH_PRECISION, positions)


def magnitudes(x_BLD, w_DV, targets_BL, weights_BL, total):
    """The sums of the magnitudes of the terms of dx and dw, in float64."""
    x, w = np.asarray(x_BLD, np.float64), np.asarray(w_DV.astype(x_BLD.dtype), np.float64)
    logits = x @ w
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    # Each g is at most |p - onehot| weight / total, but for roundings: to bfloat16, and smaller.
    g = np.abs(p - np.eye(V)[targets_BL]) * np.asarray(weights_BL / total)[..., None]
    g *= 1 + 2.0**-7
    return g @ np.abs(w).T, np.einsum("bld,blv->dv", np.abs(x), g)


# One device ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("positions", [24, 12, 8, 7])
def test_chunks_give_the_loss_and_gradients_of_whole_logits(dtype, positions):
    """The tokens' losses (times 1 / total, they are the gradient of the weights) and dx to the bit.
    Float32 sums have another order: the loss, dw, and dx where the activations are float32. With
    one chunk these have the same bits, too. 7 does not divide 24."""
    args = loss_arguments(dtype)
    loss, (dx, dw, dweights, dtotal) = compiled(whole_loss)(*args)
    got, (got_dx, got_dw, got_dweights, got_dtotal) = compiled(in_chunks(positions))(*args)
    np.testing.assert_array_equal(got_dweights, dweights)
    np.testing.assert_allclose(got, loss, rtol=0 if positions == L else 2 * B * L * U)
    # -loss / total: a reciprocal and a product, or two quotients.
    np.testing.assert_allclose(got_dtotal, dtotal, rtol=(2 * B * L + 8) * U)
    of_dx, of_dw = magnitudes(*args)
    if dtype == jnp.bfloat16 or positions == L:
        np.testing.assert_array_equal(got_dx, dx)
    assert np.all(np.abs(got_dx.astype(jnp.float32) - dx) <= 2 * V * U * of_dx)
    if positions == L:
        np.testing.assert_array_equal(got_dw, dw)
    assert np.all(np.abs(got_dw - dw) <= 2 * B * L * U * of_dw)
    assert got_dx.dtype == dtype and got_dw.dtype == jnp.float32


def test_without_a_gradient_the_loss_is_the_same():
    args = loss_arguments()
    alone = jax.jit(in_chunks(8), compiler_options=xla.compiler_options())(*args)
    np.testing.assert_allclose(alone, compiled(in_chunks(8))(*args)[0], rtol=2 * B * L * U)


def test_the_cotangent_scales_both_gradients():
    args = loss_arguments()
    _, grads = compiled(in_chunks(8))(*args)
    _, scaled = compiled(lambda *args: -4 * in_chunks(8)(*args))(*args)
    for one, four in zip(grads, scaled, strict=True):
        np.testing.assert_array_equal(-4 * one, four)


def test_a_recipe_that_casts_is_refused():
    with pytest.raises(ValueError, match="'fp8_current' does"):
        chunked.chunked_loss(RECIPES["fp8_current"], 8, *loss_arguments())


# Rows, length, vocabulary and mesh (data, fsdp, tensor) -> positions of a chunk.
@pytest.mark.parametrize(
    ("shape", "sizes", "positions"),
    [
        ((16, 64, 256), None, 64),  # small models have one chunk
        ((4, 4096, 2**15), None, 4096),  # 2^31 bytes exactly
        ((4, 4096, 2**15 + 1), None, 2048),
        # 2^31 bytes are 883.4 positions: 5 chunks, so 819.2 positions each, 3,280 tokens.
        ((4, 4096, 151936), None, 820),
        ((3, 4096, 151936), None, 1024),  # 1,177.8: 4 chunks
        ((4, 4099, 151936), None, 820),  # a prime length
        ((1, 3, 2**28), None, 3),  # eight tokens at least, or all
        ((32, 4096, 151936), (8, 1, 1), 820),
        ((32, 4096, 151936), (2, 2, 2), 820),
        ((8, 4096, 151936), (1, 4, 2), 2048),  # 2 rows and 75,968 words each: 3,533.5
    ],
)
def test_as_few_chunks_as_fit(shape, sizes, positions):
    if sizes is None:
        assert chunked.chunk_length(*shape) == positions
    else:
        with jax.set_mesh(make_mesh(MeshAxes(**dict(zip(AXES, sizes, strict=True))))):
            assert chunked.chunk_length(*shape) == positions


# Meshes -------------------------------------------------------------------------------------------


def collectives(text: str) -> list[tuple[bool, str, str, str]]:
    """(in the loop, results, operation, operands) of each collective of a program."""
    found, computation = [], ""
    for line in text.splitlines():
        computation = computation if line.startswith(" ") else line.split(" ")[0]
        match = re.search(
            r" = (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)"
            r"(?:-start)?\(([^)]*)\)",
            line,
        )
        if match:
            found.append((computation != "ENTRY", *match.groups()))
    return found


@pytest.mark.parametrize("sizes", [(2, 4, 1), (2, 2, 2)])
def test_devices_add_their_gradients_once(sizes):
    mesh = make_mesh(MeshAxes(**dict(zip(AXES, sizes, strict=True))))
    places = (
        ("batch", "length", "residual"),
        ("embed", "vocab"),
        ("batch", "length"),
        ("batch", "length"),
        (),
    )
    shardings = [NamedSharding(mesh, spec(*names)) for names in places]
    args = loss_arguments()
    loss, (dx, dw, *_) = compiled(in_chunks(8))(*args)
    with jax.set_mesh(mesh):
        program = (
            jax.jit(
                jax.value_and_grad(in_chunks(8), argnums=(0, 1)),
                in_shardings=shardings,
                out_shardings=(shardings[-1], tuple(shardings[:2])),
                compiler_options=xla.compiler_options(),
            )
            .lower(*args)
            .compile()
        )
    got, (got_dx, got_dw) = program(*args)
    tensor = sizes[2]
    of_dx, of_dw = magnitudes(*args)
    # 2 B L tokens' additions and as many of the other order, and the sums of V exponentials.
    np.testing.assert_allclose(got, loss, rtol=2 * (B * L + V) * U)
    # With the vocabulary on several devices, the sum of the exponentials may round g to another
    # bfloat16 (2^-8), and dx is the sum of a rounded part of each device.
    of_g = 0 if tensor == 1 else 2.0**-8
    parts = 0 if tensor == 1 else (tensor + 2) * 2.0**-9
    assert np.all(np.abs(np.float32(got_dx) - np.float32(dx)) <= (of_g + parts) * of_dx)
    assert np.all(np.abs(got_dw - dw) <= (of_g + 2 * B * L * U) * of_dw)

    found = collectives(program.as_text())
    part = f"[{D},{V // tensor}]"
    # The weight is gathered once, after the cast (CPUs then widen what they send).
    gathers = [each for each in found if each[2] == "all-gather"]
    ((inside, result, _, operand),) = gathers
    assert not inside and part in result and "param" not in operand
    # The parts of dw are added once, in float32.
    ((inside, result, kind, _),) = [e for e in found if part in e[1] and e not in gathers]
    assert not inside and kind == "all-reduce" and f"f32{part}" in result
    # In the loop: with `tensor`, the maximum, the two sums over the vocabulary, and dx.
    assert len([each for each in found if each[0]]) == (0 if tensor == 1 else 3)
    # A device has the logits of its own rows, and of its own words only.
    rows = B * tensor // 8
    shapes = set(re.findall(r"f32\[([\d,]+)\]", program.as_text()))
    assert f"{rows * 8},{V // tensor}" in shapes or f"{rows},8,{V // tensor}" in shapes
    whole = [shape for shape in shapes if re.search(rf"\b8,{V}$", shape)]
    assert not whole or tensor == 1


# The model ----------------------------------------------------------------------------------------

ROWS, LENGTH, WORDS = 2, 64, 512
SIZES = dict(vocab_size=WORDS, d_model=32, n_layers=1, n_heads=4, n_kv_heads=2, d_ff=48, head_dim=8)


@functools.cache
def batch() -> dict:
    tokens = np.random.default_rng(1).integers(0, WORDS, (ROWS, LENGTH + 1)).astype(np.int32)
    ones = np.ones((ROWS, LENGTH), np.int32)
    arrays = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segments": ones,
        "positions": np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1)),
        "weights": ones.astype(np.float32),
    }
    return {name: jnp.asarray(array) for name, array in arrays.items()}


@functools.cache
def initial(model):
    one = jnp.zeros((1, 1), jnp.int32)
    return nn.meta.unbox(jax.jit(model.init)(jax.random.key(0), one, one, one)["params"])


def gradients_of(model, params):
    """The compiled program of a step's loss and gradients, and the results."""
    state = step.TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        histories={},
        opt_state={},
        key=jax.random.key(0),
    )
    accumulate = functools.partial(step.accumulate, model, grad_accum=1)
    program = jax.jit(accumulate, compiler_options=xla.compiler_options())
    program = program.lower(state, batch()).compile()
    return program.as_text(), program(state, batch())[:2]


def largest(text: str) -> set[str]:
    """The arrays of a program with as many elements as the logits, and words in their last axis."""
    shapes = re.findall(rf"\[([\d,]+,{WORDS})\]", text)
    return {
        shape for shape in shapes if np.prod([*map(int, shape.split(","))]) >= ROWS * LENGTH * WORDS
    }


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_in_chunks_has_the_loss_of_one_without(tied, monkeypatch):
    """Gradients of all parameters but the head's have the same bits. No array has all logits, and
    the head's GEMMs have its name."""
    config = ModelConfig(tie_embeddings=tied, **SIZES)
    model, params = Transformer(config), initial(Transformer(config))
    text, (loss, grads) = gradients_of(model, params)
    assert largest(text)
    monkeypatch.setattr(chunked, "CHUNK_BYTES", 4 * ROWS * 16 * WORDS)
    text, (got_loss, got) = gradients_of(model, params)
    assert not largest(text)
    np.testing.assert_allclose(got_loss, loss, rtol=2 * ROWS * LENGTH * U)
    name = "embedding" if tied else "lm_head"
    (got_head,), (head,) = (jax.tree.leaves(tree.pop(name)) for tree in (got, grads))
    jax.tree.map(np.testing.assert_array_equal, got, grads)
    # |x| is at most sqrt(D), after the norm, and |g| at most 1 / tokens. A tied head's gradient is
    # added to that of the look-up.
    tokens = ROWS * LENGTH
    bound = 2 * tokens * U * np.sqrt(SIZES["d_model"]) + 2 * U * np.abs(head).max()
    assert 0 < np.abs(got_head - head).max() <= bound
    gemms = [g for g in find_gemms(text, as_policy("bf16")) if g.module == "lm_head"]
    assert sorted((g.role, g.count) for g in gemms) == sorted((role, 4) for role in ROLES)


@pytest.mark.parametrize("policy", ["bf16", "fp8_current:head=fp8_current", "fp8_current"])
def test_only_a_head_that_casts_nothing_is_split(policy, monkeypatch):
    model = Transformer(ModelConfig(**SIZES), policy)
    one = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    params = nn.meta.unbox(jax.eval_shape(model.init, jax.random.key(0), one, one, one)["params"])
    monkeypatch.setattr(chunked, "CHUNK_BYTES", 4 * ROWS * 16 * WORDS)
    loss = functools.partial(step.loss_sum, model, histories={}, batch=batch(), key=None)
    logits = f"f32[{ROWS},{LENGTH},{WORDS}]"
    assert (logits in str(jax.make_jaxpr(loss)(params))) == ("head" in policy)


def test_validation_in_chunks_sums_the_same_nats(monkeypatch):
    model = Transformer(ModelConfig(**SIZES))
    params = initial(model)
    state = step.TrainState(
        step=0, params=params, histories={}, opt_state={}, key=jax.random.key(0)
    )

    def evaluate():
        run = functools.partial(step.eval_step, model=model, token_bytes_V=jnp.ones(WORDS))
        return jax.jit(run, compiler_options=xla.compiler_options())(state, batch())

    whole = evaluate()
    monkeypatch.setattr(chunked, "CHUNK_BYTES", 4 * ROWS * 16 * WORDS)
    got = evaluate()
    np.testing.assert_allclose(got.pop("nats"), whole.pop("nats"), rtol=2 * ROWS * LENGTH * U)
    jax.tree.map(np.testing.assert_array_equal, got, whole)
