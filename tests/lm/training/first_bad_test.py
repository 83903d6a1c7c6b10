"""The first bad layer and tensor, for faults planted in weights, forward and backward pass."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.lm.data.loader import to_devices, train_batches
from fp8jax.lm.training.build import build
from fp8jax.lm.training.faults import INJECTED, inject_gradient
from fp8jax.lm.training.first_bad import find_bad, first_bad
from tests.support.runs import corpus, tiny


@pytest.fixture(scope="module", params=[("bf16", 2), ("fp8_delayed", 1)], ids=lambda p: p[0])
def found(request, data):
    """A function from changes of state and batch to the words."""
    precision, unroll = request.param
    config = tiny(
        data, precision=precision, unroll=unroll, model_overrides__n_layers=4, batch_size=4
    )
    run = build(config, jax.devices()[:1])
    batches = train_batches(corpus(*data).train, seed=0, batch_size=4)
    batch = to_devices(next(batches), run.batch_sharding)
    batches.close()
    batch[INJECTED] = jnp.zeros_like(batch["weights"])
    with jax.set_mesh(run.mesh):
        programs = run.stages[0].programs
        state = programs.initialize()
        # As after a step, whose amaxes are numbers.
        histories = jax.tree.map(lambda h: jnp.full(h.shape, 4.0), state.histories)
        state = dataclasses.replace(state, histories=histories)
        model = run.stages[0].model
        program = jax.jit(lambda s, b: find_bad(model, s, b, 2, inject=inject_gradient))

        def words(
            path=(), index=None, value=None, kinds=("weight", "output", "gradient"), **changed
        ):
            params = jax.tree.map(lambda leaf: leaf, state.params)
            if path:
                *groups, name = path
                inner = params
                for group in groups:
                    inner = inner[group]
                inner[name] = inner[name].at[index].set(value)
            with jax.set_mesh(run.mesh):
                out = program(dataclasses.replace(state, params=params), batch | changed)
            shown = {kind: out[kind] if kind in kinds else {} for kind in out}
            return first_bad(jax.device_get(shown)), batch

        yield words


def test_a_sound_step_has_none(found):
    assert found()[0] == ""


def test_a_weight_comes_before_what_it_spoils(found):
    path = ("layers", "mlp", "up", "kernel")
    assert found(path, (2, 3, 3), jnp.nan)[0] == "layer 2, weight of mlp/up/kernel"
    assert found(("embedding",), (5, 5), jnp.inf)[0] == "weight of embedding"


def test_a_nan_shows_in_what_comes_after_it(found):
    """A maximum of floats may lose it on CPUs."""
    path = ("layers", "mlp", "up", "kernel")
    assert found(path, (2, 3, 3), jnp.nan, kinds=["output"])[0] == "layer 2, output of mlp/hidden"
    assert found(("embedding",), (slice(None), 5), jnp.nan, kinds=["output"])[0] == (
        "layer 0, output of attention_norm"
    )


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (("layers", "attention_norm", "scale"), "layer 1, output of attention_norm"),
        (("layers", "mlp_norm", "scale"), "layer 1, output of mlp_norm"),
    ],
)
def test_the_first_output_that_overflows(found, path, expected):
    """float32 scales of 3e38 overflow in bfloat16 products of the norm."""
    assert found(path, 1, 3.3e38)[0] == expected


def test_a_loss_whose_outputs_are_finite(found):
    _, batch = found()
    assert found(weights=batch["weights"].at[0, 0].set(jnp.nan))[0] == "output of loss"


@pytest.mark.parametrize("layer", [0, 3])
def test_a_gradient_of_one_layer(found, layer):
    _, batch = found()
    hit = jnp.full_like(batch["weights"], layer + 1)
    assert found(**{INJECTED: hit})[0] == f"layer {layer}, gradient of mlp/down/kernel"


def test_gradients_are_taken_from_the_last_layer_and_module():
    flags = {
        "layers/mlp/down/kernel": np.array([True, True, False]),
        "layers/attention/q/kernel": np.array([True, True, False]),
        "embedding": np.array(True),
        "final_norm/scale": np.array(False),
    }
    none = {"weight": {}, "output": {"loss": np.array(False)}}
    assert first_bad({**none, "gradient": flags}) == "layer 1, gradient of mlp/down/kernel"
    flags["final_norm/scale"] = np.array(True)
    assert first_bad({**none, "gradient": flags}) == "gradient of final_norm/scale"


def test_a_norm_behind_a_part_comes_after_it():
    """As OLMo's and Gemma's, whose names begin as the part's own does."""
    flags = {
        f"layers/{name}": np.array([True])
        for name in ("mlp_post_norm", "attention_post_norm", "attention", "mlp")
    }
    for expected in ("attention", "attention_post_norm", "mlp", "mlp_post_norm"):
        found = {"weight": {}, "output": flags, "gradient": {}}
        assert first_bad(found) == f"layer 0, output of {expected}"
        del flags[f"layers/{expected}"]
