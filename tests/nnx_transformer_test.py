"""A decoder in the manner of flax's NNX examples, with every linear quantized by `fp8jax.nnx`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import fp8jax
import fp8jax.nnx

WIDTH, WORDS, LENGTH, LAYERS = 32, 64, 16, 2
DELAYED = "fp8_delayed:history=4"


class Block(nnx.Module):
    def __init__(self, recipe, rngs):
        self.norm, self.mlp_norm = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            4, WIDTH, decode=False, use_bias=False, rngs=rngs, keep_rngs=False
        )
        for layer in (
            self.attention.query,
            self.attention.key,
            self.attention.value,
            self.attention.out,
        ):
            layer.dot_general = nnx.data(fp8jax.nnx.Fp8DotGeneral(recipe))
        self.up = fp8jax.nnx.Linear(WIDTH, 4 * WIDTH, recipe, rngs=rngs)
        self.down = fp8jax.nnx.Linear(4 * WIDTH, WIDTH, recipe, rngs=rngs)

    def __call__(self, x):
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class Decoder(nnx.Module):
    def __init__(self, recipe, rngs):
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(recipe, rngs) for _ in range(LAYERS)])
        self.head = fp8jax.nnx.Linear(WIDTH, WORDS, recipe, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def next_token_loss(model, tokens):
    logits = model(tokens[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@nnx.jit
def step(model, optimizer, tokens):
    loss, gradients = fp8jax.nnx.value_and_grad(next_token_loss)(model, tokens)
    return loss, fp8jax.nnx.update(model, optimizer, gradients)


def batch(i):
    """Rows that count upwards in one of four strides, so that there is something to learn."""
    rng = np.random.default_rng(i)
    first, stride = rng.integers(0, WORDS, (16, 1)), rng.integers(1, 5, (16, 1))
    return jnp.asarray((first + stride * np.arange(LENGTH + 1)) % WORDS, jnp.int32)


@functools.cache
def run(recipe, seed=0, steps=30, devices=1):
    """(losses, model) of a run with the batch over some devices."""
    model = Decoder(recipe, nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    mesh = jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:devices])
    rows = NamedSharding(mesh, PartitionSpec("data"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    for node in (model, optimizer):
        nnx.update(node, jax.device_put(nnx.state(node), everywhere))
    losses = []
    for i in range(steps):
        loss, faults = step(model, optimizer, jax.device_put(batch(i), rows))
        fp8jax.histories.raise_if(faults)
        losses.append(float(loss))
    return np.array(losses), model


@pytest.mark.parametrize(
    "recipe",
    # nnx_test.py: a step of NNX has the bits of one of linen; foreign_models_test.py trains others.
    [pytest.param(name, marks=pytest.mark.full) for name in (DELAYED, "fp8_block")],
)
def test_it_trains_as_near_to_bf16_as_another_seed(recipe):
    losses, exact, other = run(recipe)[0], run("bf16")[0], run("bf16", seed=1)[0]
    assert losses[-1] < 0.8 * losses[0]
    assert (losses != exact).any()
    assert np.abs(losses - exact).mean() <= np.abs(other - exact).mean()


def test_every_linear_has_histories_of_its_own_that_are_full():
    histories = nnx.to_flat_state(nnx.state(run(DELAYED)[1], fp8jax.nnx.AmaxHistory))
    assert len(histories) == 3 * (6 * LAYERS + 1)
    values = [np.asarray(variable.get_value()) for _, variable in histories]
    assert all((value > 0).all() for value in values)
    repeated = 2 * LAYERS  # q, k and v have one x
    assert len({value.tobytes() for value in values}) >= len(values) - repeated


# lm/training/loop_test.py shows it for this library's own model, gemm/dot_test.py for each
# product.
@pytest.mark.full
def test_eight_devices_equal_one():
    """The first loss to 1e-5; then less than another seed differs, as codes flip on rounding."""
    one, other = run(DELAYED)[0], run(DELAYED, seed=1)[0]
    eight = run(DELAYED, devices=8)[0]
    assert abs(eight[0] / one[0] - 1) <= 1e-5
    assert np.abs(eight - one).mean() <= np.abs(other - one).mean()
