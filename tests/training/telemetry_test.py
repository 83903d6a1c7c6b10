"""Telemetry of training: the run stays the same, and its numbers do not depend on how it runs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.data.loader import to_devices, train_batches
from fp8jax.records.jsonl import read_jsonl
from fp8jax.telemetry import read, write
from fp8jax.telemetry.transformer import transformer_rows
from fp8jax.training import build as build_module
from fp8jax.training.build import build
from fp8jax.training.loop import train_and_evaluate
from fp8jax.training.programs import lower_program
from tests.support.runs import corpus, tiny

SMALL = dict(
    model_overrides__d_model=32, model_overrides__n_heads=2, model_overrides__n_kv_heads=2,
    model_overrides__d_ff=64, batch_size=8, unroll=1,
)  # fmt: skip


def test_the_training_programs_stay_byte_identical(data):
    texts = []
    for changes in ({}, dict(telemetry_every=2, telemetry_what_if="fp8_block")):
        run = build(tiny(data, precision="fp8_delayed", **SMALL, **changes), jax.devices()[:1])
        (stage,) = run.stages
        texts.append([lower_program(run, stage, name).as_text() for name in ("step", "seed_step")])
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_a_run_is_sampled(data, tmp_path):
    config = tiny(
        data, precision="fp8_delayed:history=4", telemetry_every=2, num_steps=4, valid_every=4,
        checkpoint_every=2, warmup_steps=0, model_overrides__n_layers=1,
        model_overrides__mlp="gelu", **SMALL,
    )  # fmt: skip
    # What a killed run without a checkpoint has left: this run begins at step 0.
    write(tmp_path / "telemetry" / "step_000000009.parquet", [])
    train_and_evaluate(config, str(tmp_path))
    events = [e["kind"] for e in read_jsonl(tmp_path / "events.jsonl")]
    assert events.count("telemetry") == 1

    whole = read(tmp_path)
    assert sorted({row.step for row in whole.rows}) == [2, 4]
    assert len(whole.rows) == 2 * (6 * 6 + 1)  # six linears, six casts; and the MLP's activation
    casts = whole.where(lambda row: row.cast != "")
    assert all(row.elements and row.delay is not None for row in casts.rows)
    curves = b"".join(path.read_bytes() for path in (tmp_path / "tensorboard").glob("events*"))
    assert b"telemetry/layers_0/x/underflow" in curves


# FP8 moments have groups of 32 along axes that a mesh shards.
HEADS = dict(model_overrides__n_heads=4, model_overrides__n_kv_heads=4)


def sample(data, devices, **changes):
    """The rows of the first step, run in a certain way."""
    config = tiny(data, telemetry_every=1, **{**SMALL, **changes})
    run = build(config, jax.devices()[:devices])
    (stage,) = run.stages
    with jax.set_mesh(run.mesh):
        state = stage.programs.initialize()
        rows = train_batches(corpus(*data).train, seed=0, batch_size=config.batch_size)
        batch = to_devices(next(rows), run.batch_sharding)
        rows.close()
        statistics, promoted = jax.device_get(stage.programs.telemetry(state, batch))
    return transformer_rows(stage.model, statistics, step=1, promoted=promoted)


@pytest.mark.slow
def test_loops_remat_accumulation_mesh_moments_and_gnmr_do_not_change_the_numbers(
    data, monkeypatch
):
    """In float32, where sums in another order change a value by a relative 1e-5 at most: 2^7 terms
    a GEMM, and a dozen GEMMs between input and last gradient. An element's distance from the grid
    changes by no more than the element and, through its scale, than its code: each by that share.
    So the noise changes by 2e-5 of the signal, which is 10^(SQNR/20) times the noise."""
    step = build_module.telemetry_step
    monkeypatch.setattr(
        build_module, "telemetry_step",
        lambda *arguments, model, **named: step(
            *arguments, model=model.clone(dtype=jnp.float32), **named
        ),
    )  # fmt: skip
    plain = sample(data, 1, precision="fp8_rowwise", **HEADS)
    halves = sample(data, 1, precision="fp8_rowwise", grad_accum=2, **HEADS)
    other = sample(
        data, 4, precision="fp8_rowwise", remat="full", grad_accum=2, moments="fp8",
        gnmr_alpha=(1.5,), mesh_axes__data=2, mesh_axes__tensor=2, **HEADS,
    )  # fmt: skip
    assert len(plain) == len(halves) == len(other) == 2 * 7 * 6 + 2
    for whole, half in zip(plain, halves, strict=True):
        # Weights are measured in each microbatch.
        assert half.elements == whole.elements * (2 if whole.operand == "w" else 1)
        if whole.cast.startswith("wgrad"):  # scales along tokens: a microbatch has its own
            assert half.amax == pytest.approx(whole.amax, rel=1e-5)
            assert half.scale == pytest.approx(whole.scale, rel=1e-5)
            assert half.smallest_scale <= whole.smallest_scale * (1 + 1e-5)
        else:
            same_to_rounding(whole, half)
    for one, two in zip(halves, other, strict=True):
        assert one.elements == two.elements
        same_to_rounding(one, two)


def same_to_rounding(one, two):
    assert (one.layer, one.linear, one.cast, one.recipe) == (
        two.layer, two.linear, two.cast, two.recipe
    )  # fmt: skip
    assert two.amax == pytest.approx(one.amax, rel=0 if one.operand == "w" else 1e-5)
    if one.operand == "w":  # the same numbers, whose sums alone are in another order
        assert two.sqnr_db == pytest.approx(one.sqnr_db, rel=1e-5)
    elif one.sqnr_db is not None:
        share = 2e-5 * 10 ** (one.sqnr_db / 20)
        assert two.sqnr_db == pytest.approx(one.sqnr_db, abs=20 * np.log10(1 + share))


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(telemetry_every=0), "telemetry_every=0 must be at least 1"),
        (dict(telemetry_every=-5), "telemetry_every=-5 must be at least 1"),
        (dict(telemetry_every=5, telemetry_what_if="fp9"), "unknown policy 'fp9'"),
        (dict(telemetry_what_if="fp8_block"), "telemetry_what_if='fp8_block' is .*telemetry_every"),
        (dict(log_to="wandb"), "log_to='wandb': expected wandb:PROJECT"),
    ],
)
def test_bad_settings_are_one_line(data, changes, message):
    with pytest.raises(ValueError, match=re.compile(message)) as error:
        build(tiny(data, precision="fp8_block", **SMALL, **changes), jax.devices()[:1])
    assert "\n" not in str(error.value)
