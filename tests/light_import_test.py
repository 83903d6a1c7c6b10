"""`import fp8jax` is light: it loads none of the heavy dependencies, and works without them."""

import subprocess
import sys

import pytest

from tests.support import ROOT

# What only training, data or experiments need.
OPTIONAL = (
    "grain",
    "orbax",
    "tensorboardX",
    "tokenizers",
    "pyarrow",
    "tensorflow_datasets",
    "safetensors",
)
HEAVY = (*OPTIONAL, "jax.experimental.pallas", "ml_collections", "tqdm", "jinja2", "lm_eval")

USE = """
import jax.numpy as jnp
import fp8jax

x, w = jnp.ones((16, 32), jnp.bfloat16), jnp.full((32, 8), 0.5, jnp.bfloat16)
q = fp8jax.quantize(x, fp8jax.FORMATS["e4m3"], fp8jax.TENSOR)
assert (fp8jax.dequantize(q) == 1).all()
y = fp8jax.dot_general(x, w, (((1,), (0,)), ((), ())), recipe="fp8_current")
assert y.shape == (16, 8) and (y == 16).all()
"""

TRAIN = """
import sys
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
import fp8jax

x, optimizer = jnp.ones((8, 16)), optax.sgd(0.1)
model = fp8jax.nn.Dense(4, recipe="fp8_delayed")
variables = jax.jit(model.init)(jax.random.key(0), x)
state, losses = fp8jax.init_update(optimizer, variables), []

@jax.jit
def step(variables, state):
    loss_of = lambda variables: jnp.mean((model.apply(variables, x) - 1) ** 2)
    loss, gradients = jax.value_and_grad(loss_of)(variables)
    return loss, *fp8jax.update(optimizer, variables, state, gradients)

for _ in range(2):
    loss, variables, state, faults = step(variables, state)
    fp8jax.histories.raise_if(faults)
    losses.append(loss)
model = fp8jax.nnx.Linear(16, 4, "fp8_delayed", rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optimizer, wrt=nnx.Param)

@nnx.jit
def step(model, optimizer):
    loss_of = lambda model: jnp.mean((model(x) - 1) ** 2)
    loss, gradients = fp8jax.nnx.value_and_grad(loss_of)(model)
    return loss, fp8jax.nnx.update(model, optimizer, gradients)

for _ in range(2):
    loss, faults = step(model, optimizer)
    fp8jax.histories.raise_if(faults)
    losses.append(loss)
assert losses[1] < losses[0] and losses[3] < losses[2], losses
print(*[name for name in sys.modules if name.startswith("fp8jax.")])
"""


def run(program: str) -> str:
    """What a program prints, in a process without this one's imports and hooks."""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_none_of_the_heavy_modules_is_loaded():
    say = "print(*sys.modules)"
    said = run("\n".join(["import sys, fp8jax", say, USE, say])).splitlines()
    assert len(said) == 2
    for loaded in map(str.split, said):
        assert "fp8jax.gemm.dot" in loaded
        assert [name for name in HEAVY if name in loaded] == []


def test_models_train_without_the_language_model_stack():
    loaded = run(TRAIN).split()
    assert {"fp8jax.gemm.dot", "fp8jax.nnx"} <= set(loaded)
    assert not [name for name in loaded if name.startswith("fp8jax.lm")]


@pytest.mark.parametrize(
    "cases",
    [
        [OPTIONAL],
        # Nothing imports any of them, says the test above: so one is missed no more than all.
        pytest.param([(name,) for name in OPTIONAL], marks=pytest.mark.full),
    ],
    ids=["all", "each"],
)
def test_products_work_where_dependencies_are_missing(cases):
    """In copies of a process that has imported JAX."""
    program = f"""
import os, sys, traceback
import jax.numpy

for names in {cases!r}:
    child = os.fork()
    if child == 0:
        sys.modules.update(dict.fromkeys(names))
        try:
            exec({USE!r}, {{}})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(*names, "works" if status == 0 else "fails")
"""
    assert run(program).splitlines() == [" ".join([*names, "works"]) for names in cases]
