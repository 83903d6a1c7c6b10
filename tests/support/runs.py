"""Short runs of a tiny model on generated text, and what they leave."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from configs import base
from fp8jax.lm.corpus import build_corpus
from fp8jax.lm.data.loader import to_devices, train_batches
from fp8jax.lm.data.tokenizers import tokenizer
from fp8jax.lm.records.events import Event
from fp8jax.lm.records.jsonl import read_jsonl
from fp8jax.lm.training.build import build
from fp8jax.numerics.policy import POLICIES, Policy
from fp8jax.numerics.recipes import RECIPES

# Every run has these.
ROUTINE = frozenset({Event.START, Event.STAGE, Event.PRECISION, Event.CHECKPOINT, Event.END})

# A policy with histories that compiles nearly as fast as bf16; a test puts it into `POLICIES`.
ONE_LINEAR = Policy((("layers/mlp/down", RECIPES["fp8_delayed"]),), name="one_linear")


@functools.cache
def corpus(spec, cache):
    return build_corpus(spec, tokenizer("bytes"), seq_len=64, valid_fraction=0.1, cache_dir=cache)


def tiny(data, **changes):
    """A run of seconds, with some keys changed as `set_keys` does."""
    config = base.get_config()
    config.data, config.cache_dir = data
    config.model_overrides.update(
        d_model=64, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=128, head_dim=16
    )
    set_keys(
        config,
        seq_len=64,
        batch_size=16,
        num_steps=20,
        optimizer__warmup_steps=5,
        valid__every=10,
        valid__batches=2,
        checkpoint__every=5,
        optimizer__learning_rate=3e-3,
        valid__fraction=0.1,
    )
    config.unroll = 2  # compiles in half the time of a loop
    return set_keys(config, **changes)


def set_keys(config, **changes):
    """Changes keys of a config, those of a group by `group__key`; returns it."""
    for key, value in changes.items():
        group, _, name = key.rpartition("__")
        (config[group] if group else config)[name] = value
    return config


def one_layer(data, **changes):
    """`tiny` with one layer, for tests that show nothing of depth.

    Tests whose configs differ only in numbers of the schedule, in lengths and in the data share
    their compiled programs: take this one with few changes.
    """
    return tiny(data, **dict(model_overrides__n_layers=1, unroll=1) | changes)


def steps(config, num_steps, devices=None):
    """(losses, run, last state) of the first steps, in the loop's order of programs."""
    run = build(config, devices)
    rows = corpus(config.data, config.cache_dir).train
    batches = train_batches(rows, seed=config.seed, batch_size=config.batch_size)
    losses = []
    with jax.set_mesh(run.mesh):
        programs = run.stages[0].programs
        state = programs.initialize()
        for i in range(num_steps):
            seeding = i == 0 and POLICIES[config.precision].delayed
            step, batch = programs.seed_step if seeding else programs.step, next(batches)
            batch = to_devices(batch, run.batch_sharding)
            state, out = step(state, batch, programs.numbers(state))
            losses.append(float(out["loss"]))
    batches.close()
    return np.array(losses), run, state


@jax.jit
def copied(tree):
    """A copy of a state, whose memory a training step takes."""
    return jax.tree.map(jnp.copy, tree)


def numbers(workdir: Path) -> list[dict]:
    """Every line of the metrics but for what a clock decides."""
    clock = ("time", "step_s", "tokens_per_s", "mfu", "peak_memory_bytes")
    lines = read_jsonl(workdir / "metrics.jsonl")
    return [{key: line[key] for key in line if key not in clock} for line in lines]


def happened(workdir: Path) -> list[dict]:
    """Every event but those of an undisturbed run: its start, stages, checkpoints and end."""
    return [event for event in read_jsonl(workdir / "events.jsonl") if event["kind"] not in ROUTINE]
