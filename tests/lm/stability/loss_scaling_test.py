"""The loss scale against NumPy, and what it leaves as it was: gradients, and runs that go on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.lm.data.loader import to_devices, train_batches
from fp8jax.lm.model.models import MODELS
from fp8jax.lm.model.transformer import Transformer
from fp8jax.lm.records.jsonl import read_jsonl
from fp8jax.lm.stability.loss_scaling import LossScaling
from fp8jax.lm.training import step
from fp8jax.lm.training.build import build
from fp8jax.lm.training.faults import Faults
from fp8jax.lm.training.loop import train_and_evaluate
from fp8jax.lm.training.step import TrainState, accumulate
from fp8jax.numerics.names import as_policy
from fp8jax.numerics.policy import Policy
from fp8jax.numerics.recipes import RECIPES
from tests.support.runs import corpus, happened, numbers, one_layer, tiny

GOOD, OVERFLOW, REJECTED = range(3)

# It compiles nearly as fast as bf16.
ONE_AMAX = Policy((("layers/mlp/down", RECIPES["fp8_amax"]),), name="one_amax")


def by_hand(kinds: list[int], window: int) -> list[tuple[float, int]]:
    """Scale and count after each step: halved by an overflow, doubled by `window` good steps."""
    scale, good, seen = np.float32(65536), 0, []
    for kind in kinds:
        if kind == OVERFLOW and scale > 1:
            scale, good = scale / 2, 0
        elif kind == GOOD:
            good += 1
            if good == window:
                scale, good = min(scale * 2, np.float32(2**24)), 0
        seen.append((float(scale), good))
    return seen


@pytest.mark.parametrize("likely", [(0.8, 0.1, 0.1), (0.97, 0.01, 0.02), (0.05, 0.9, 0.05)])
def test_a_dynamic_scale_step_by_step(likely):
    """The first two go up to the largest scale, the third down to 1."""
    scaling = LossScaling.parse("dynamic", 3)
    kinds = np.random.default_rng(1).choice(3, 400, p=likely)

    def one(seen, kind):
        loss = jnp.float32(3)
        grad_norm = jnp.where(kind == OVERFLOW, jnp.inf, 1.0)
        overflow = scaling.overflows(seen, loss, grad_norm)
        seen = scaling.update(seen, overflow, kind == GOOD)
        return seen, (seen["scale"], seen["good"])

    _, found = jax.lax.scan(one, scaling.init(), jnp.asarray(kinds))
    expected = by_hand(list(kinds), 3)
    np.testing.assert_array_equal(np.transpose(found), expected)
    least, largest = min(expected)[0], max(expected)[0]
    assert (largest == 2**24) == (likely[0] > 0.5) and (least == 1) == (likely[1] > 0.5)


@pytest.mark.parametrize(
    "loss, grad_norm, scale, overflows",
    [
        (3, np.inf, 2, True),
        (3, np.nan, 2**24, True),
        (3, 1, 2, False),
        (np.nan, np.nan, 2, False),  # no smaller scale makes this loss finite
        (np.inf, np.inf, 2, False),
        (3, np.inf, 1, False),  # nothing is left to halve
    ],
)
def test_what_an_overflow_is(loss, grad_norm, scale, overflows):
    scaling = LossScaling.parse("dynamic", 1)
    seen = {"scale": jnp.float32(scale), "good": jnp.int32(0)}
    assert scaling.overflows(seen, jnp.float32(loss), jnp.float32(grad_norm)) == overflows


def test_scales_in_words():
    assert LossScaling.parse("none", 1) is LossScaling.parse("1", 1) is None
    assert LossScaling.parse("1024", 7).scale({}) == 1024
    for text in ("1000", "0", "-2", "2.0", "", "static", str(2**25)):
        with pytest.raises(ValueError, match=f"loss_scale='{text}' is neither none, dynamic, nor"):
            LossScaling.parse(text, 1)
    with pytest.raises(ValueError, match="loss_scale_window=0 must be at least 1"):
        LossScaling.parse("none", 0)


def test_amax_histories_refuse_a_scale_that_jumps(data):
    with pytest.raises(ValueError, match="the amax histories of fp8_delayed would clip them"):
        build(one_layer(data, precision="fp8_delayed", optimizer__loss_scale="dynamic"))


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ({"precision": "fp8_cscale"}, True),
        ({"precision_schedule": ((0.5, "fp8_cscale"),)}, True),
        ({"recovery__precision": "fp8_cscale"}, True),
        ({"gnmr__precision": "fp8_cscale"}, True),
        ({"precision": "fp8_cscale", "optimizer__loss_scale": "1"}, True),
        ({"precision": "fp8_cscale", "optimizer__loss_scale": "4096"}, False),
        ({"precision": "fp8_cscale", "optimizer__loss_scale": "dynamic"}, False),
        ({"precision": "fp8_amax"}, False),
    ],
)
def test_constant_scales_of_gradients_ask_for_a_loss_scale(data, caplog, changes, warned):
    build(one_layer(data, **{"precision": "bf16"} | changes))
    said = "fp8_cscale has a constant scale for gradients. Those of a mean over 1024 tokens"
    assert (said in caplog.text) == warned


@pytest.mark.parametrize(
    ("precision", "constant"),
    [
        ("fp8_cscale", True),
        ("fp8_cscale:only=dgrad_g", True),
        ("fp8_cscale:only=wgrad_g", True),
        ("fp8_cscale:margin=0", True),
        ("fp8_cscale:margin=-1", False),
        ("fp8_cscale:only=wgrad", True),
        ("fp8_cscale:only=wgrad,margin=-12", False),
        ("fp8_cscale:backward=bf16", False),
        ("fp8_cscale:only=fwd_x", False),
        ("fp8_amax:margin=3", False),
        ("bf16", False),
    ],
)
def test_which_policies_have_gradients_of_constant_scale(precision, constant):
    assert as_policy(precision).constant_gradients == constant


def first_batch(run, data):
    batches = train_batches(corpus(*data).train, seed=0, batch_size=16)
    batch = to_devices(next(batches), run.batch_sharding)
    batches.close()
    return batch


@jax.custom_vjp
def flushing(w):
    """w, whose gradient is lost where it is below 1, as in a format with a bounded exponent."""
    return w


flushing.defvjp(lambda w: (w, None), lambda _, g: (jnp.where(jnp.abs(g) < 1, 0, g),))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_scale_saves_gradients_that_would_be_lost(monkeypatch, microbatches):
    """In place of the loss: w times the mean of the rows. Rows of 2^-9 need a scale of 2^9 each."""

    def loss(model, params, histories, micro, key, promotion, total):
        return jnp.sum(flushing(params["w"]) * micro["rows"]) / total

    monkeypatch.setattr(step, "loss_sum", loss)
    model = Transformer(MODELS["llama_tiny"], "bf16")
    state = TrainState(jnp.asarray(0), {"w": jnp.float32(3)}, {}, {}, jax.random.key(0))
    batch = {"rows": np.full(4, 2.0**-9, np.float32), "weights": np.full(4, 0.25, np.float32)}
    for scale, gradient in ((None, 0), (1.0, 0), (2.0**9, 2.0**-7), (jnp.float32(2**11), 2.0**-7)):
        mean, grads, _ = accumulate(model, state, batch, microbatches, None, scale)
        assert mean == 3 * 2.0**-7 and grads["w"] == gradient


@pytest.mark.full
def test_a_power_of_two_changes_no_bit_of_the_gradients(data):
    """One program with 1 and with 2^12, two microbatches, casts with scales of powers of two: every
    operation of the backward pass is linear in the gradient, and so is its rounding."""
    run = build(one_layer(data), jax.devices()[:1])
    batch = first_batch(run, data)
    model = run.stages[0].model.clone(policy=ONE_AMAX)
    with jax.set_mesh(run.mesh):
        state = run.stages[0].programs.initialize()
        program = jax.jit(functools.partial(accumulate, model, state, batch, 2, None))
        plain, scaled = program(jnp.float32(1)), program(jnp.float32(2**12))
    jax.tree.map(np.testing.assert_array_equal, plain, scaled)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(plain))


@pytest.mark.full
def test_a_static_scale_is_a_constant_of_the_step(data):
    run = build(
        one_layer(data, precision="fp8_delayed", optimizer__loss_scale="4096"), jax.devices()[:1]
    )
    stage = run.stages[0]
    assert not stage.state.loss_scale
    rates = jax.eval_shape(stage.programs.numbers, stage.state)
    text = stage.programs.step.lower(stage.state, first_batch(run, data), rates).as_text()
    assert "4.096000e+03" in text


@pytest.mark.full
def test_overflows_are_no_bad_steps_and_a_run_goes_on_to_the_bit(data, tmp_path):
    """Infinite gradients at steps 3 and 4, a scale that doubles after three steps, and no ladder. A
    second run stops after step 7, with a count of 2, and goes on."""
    config = tiny(data, optimizer__loss_scale="dynamic", optimizer__loss_scale_window=3)
    config.update(num_steps=12)
    faults = "inf_gradient@3x2"
    train_and_evaluate(config, str(tmp_path / "whole"), faults=Faults.parse(faults))
    train_and_evaluate(config, str(tmp_path / "two"), faults=Faults.parse(f"{faults},sigterm@7"))
    train_and_evaluate(config, str(tmp_path / "two"))
    lines = numbers(tmp_path / "whole")
    scales = [2.0**n for n in (16, 16, 16, 15, 14, 14, 14, 15, 15, 15, 16, 16)]
    assert [line["loss_scale"] for line in lines] == scales
    assert [line["step"] for line in lines if line["overflow"]] == [3, 4]
    found = happened(tmp_path / "whole")
    assert [(e["kind"], e["step"], e["loss_scale"]) for e in found] == [
        ("overflow", 3, 2.0**16),
        ("overflow", 4, 2.0**15),
    ]
    assert numbers(tmp_path / "two") == lines
    assert [e["step"] for e in read_jsonl(tmp_path / "two/events.jsonl") if e["kind"] == "resume"]
