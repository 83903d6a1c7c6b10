"""Runs that start from another run's state: a decay of its own equals one run's, bit for bit."""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from fp8jax.lm.data.bpe import train_bpe
from fp8jax.lm.data.tokenizers import tokenizer
from fp8jax.lm.interop.folders import keep_small_files
from fp8jax.lm.records.checkpoint import Checkpointer
from fp8jax.lm.records.jsonl import read_jsonl
from fp8jax.lm.records.run_checkpoint import CHECKPOINT_VERSION
from fp8jax.lm.training.build import build
from fp8jax.lm.training.initial_state import InitialState
from fp8jax.lm.training.loop import train_and_evaluate
from fp8jax.lm.training.resume import checkpoint_items
from fp8jax.numerics.policy import POLICIES, Policy
from fp8jax.numerics.recipes import RECIPES
from tests.support.runs import ONE_LINEAR, numbers, one_layer, set_keys, tiny
from tests.support.traced_programs import traced_once


@pytest.fixture(scope="module", autouse=True)
def traced():
    with traced_once():
        yield


STABLE, DECAY = 5, 3  # steps


def whole_run(data, **changes):
    """Warm-up and stable phase of 5 steps, and a decay of 3."""
    return one_layer(
        data,
        optimizer__schedule="wsd",
        num_steps=STABLE + DECAY,
        optimizer__decay_fraction=DECAY / (STABLE + DECAY),
        optimizer__warmup_steps=2,
        checkpoint__every=STABLE,
        valid__every=4,
        valid__batches=1,
        **changes,
    )


def decay_of(config, state: str, **changes):
    """The decay alone, from the state of another run."""
    config = config.copy_and_resolve_references()
    config.optimizer.update(schedule="decay", warmup_steps=0)
    return set_keys(config, **dict(num_steps=DECAY, initial_state=state) | changes)


def saved(workdir: Path, config, step: int):
    """The checkpoint's items, the counts of the schedule aside."""
    run = build(config)
    abstract = checkpoint_items(run, run.stages[0].state)
    with Checkpointer(workdir / "checkpoints", every=1, keep=9, keep_best=0) as checkpointer:
        restored = checkpointer.restore(abstract)
    assert restored is not None and restored.step == step
    return restored.arrays, restored.meta


def phase(workdir: Path, after: int) -> list[dict]:
    """Loss, gradient norm and learning rate of the steps after one, and the last validation."""
    lines = [line for line in numbers(workdir) if line["step"] > after]
    kept = [{name: line[name] for name in ("loss", "grad_norm", "learning_rate")} for line in lines]
    return [*kept, {name: value for name, value in lines[-1].items() if name != "step"}]


@pytest.fixture(scope="module", autouse=True)
def policies():
    """Of one linear that is quantized: with histories, and rounded stochastically."""
    noisy = Policy((("layers/mlp/down", RECIPES["nvfp4"]),), name="noisy")
    with pytest.MonkeyPatch.context() as patch:
        for policy in (ONE_LINEAR, noisy):
            patch.setitem(POLICIES, policy.name, policy)
        yield


@pytest.mark.parametrize(
    "changes",
    [
        dict(precision="one_linear"),  # histories go on
        # So does the noise of policy and moments, and what the spike detector remembers.
        # resume_test.py shows the same of a run that resumes.
        pytest.param(
            dict(
                precision="noisy",
                optimizer__moments="fp8",
                optimizer__name="lion",
                recovery__spike_window=8,
            ),
            marks=pytest.mark.full,
        ),
    ],
    ids=lambda changes: changes["precision"],
)
def test_a_decay_of_its_own_equals_that_of_one_run(changes, data, tmp_path):
    whole, alone = tmp_path / "whole", tmp_path / "alone"
    config = whole_run(data, **changes)
    train_and_evaluate(config, str(whole))
    decay = decay_of(config, f"{whole}@{STABLE}")
    train_and_evaluate(decay, str(alone))
    assert phase(alone, 0) == phase(whole, STABLE)
    (one, before), (other, after) = saved(whole, config, 8), saved(alone, decay, 3)
    differing = [
        jax.tree_util.keystr(path)
        for (path, left), right in zip(
            jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True
        )
        if not np.array_equal(raw(left), raw(right))
    ]
    assert len(differing) == 1 and differing[0].endswith(".count")  # the schedule's own
    assert before["position"] == after["position"]
    # What goes on is decided by the policy of the run's first step, whatever comes later.
    switching = decay_of(
        config, f"{whole}@{STABLE}", num_steps=STABLE, precision_schedule=((0.5, "bf16"),)
    )
    restored = InitialState.parse(switching.initial_state).read(build(switching))
    assert "histories" in restored.arrays
    # Without the run that it came from, it resumes from its own checkpoints.
    shutil.rmtree(whole)
    train_and_evaluate(decay, str(alone))
    assert [e["kind"] for e in read_jsonl(alone / "events.jsonl")].count("already_finished") == 1


def raw(leaf) -> np.ndarray:
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def test_another_precision_begins_with_fresh_histories(data, tmp_path):
    config = whole_run(data, precision="bf16")
    train_and_evaluate(config, str(tmp_path / "bf16"))
    decay = decay_of(config, str(tmp_path / "bf16"), precision="one_linear", num_steps=2)
    train_and_evaluate(decay, str(tmp_path / "fp8"))
    before, after = (numbers(tmp_path / name) for name in ("bf16", "fp8"))
    assert after[0]["loss"] == pytest.approx(before[-1]["loss"], rel=0.1)
    assert sum(after[-1][key] for key in after[-1] if key.startswith("rows/")) == (8 + 2) * 16
    # A later stage of the run drops no histories of its first.
    switching = dict(precision="one_linear", num_steps=2, precision_schedule=((0.5, "bf16"),))
    switched = decay_of(config, str(tmp_path / "fp8"), **switching)
    restored = InitialState.parse(switched.initial_state).read(build(switched))
    assert "histories" in restored.arrays
    _check_refusals(config, tmp_path)


def _check_refusals(config, tmp_path):
    """What no state of the run `bf16` can be, before anything is written."""
    there = str(tmp_path / "bf16")
    for changes, message in [
        (
            dict(optimizer__name="lion"),
            "of another optimizer: optimizer.name: adamw -> lion. Take these",
        ),
        (dict(optimizer__moments="bf16"), "moments: float32 -> bf16"),
        (dict(optimizer__master_weights="bfloat16"), "master_weights: float32 -> bfloat16"),
        (dict(initial_state=f"{there}@7"), "bf16 has no sound checkpoint of step 7"),
        (dict(initial_state=f"{there}/none"), "none is not a folder: name the workdir"),
        (dict(initial_state="hf:here"), "hf:here has weights and no optimizer's state: take it as"),
        (dict(initial_weights=there), "has weights of its own: leave out initial_weights="),
    ]:
        refused = decay_of(config, there)
        set_keys(refused, **changes)
        with pytest.raises(ValueError, match=message):
            train_and_evaluate(refused, str(tmp_path / "refused"))
    smaller = decay_of(config, there)
    smaller.model_overrides.d_ff = 64
    with pytest.raises(ValueError, match=r"is that of another model: layers/mlp/down/kernel: "):
        train_and_evaluate(smaller, str(tmp_path / "refused"))
    assert not (tmp_path / "refused").exists()


def test_a_conversion_has_no_state(data, tmp_path):
    with Checkpointer(tmp_path / "checkpoints", every=1, keep=1, keep_best=0) as checkpointer:
        meta = {"version": 3, "converted_from": "qwen", "names": {}}
        checkpointer.save(1, {"params": {"a": np.zeros(1)}}, meta, None)
    with pytest.raises(ValueError, match="converted from qwen, and no optimizer's state: take it"):
        InitialState.parse(str(tmp_path)).check(build(tiny(data)))


@pytest.fixture
def tokenized(data, tmp_path):
    """A function: the config of a run with the tokenizer of a folder, learned from some text."""

    def make(folder: str, text: str):
        path = tmp_path / folder / "tokenizer.json"
        path.parent.mkdir()
        train_bpe(iter([text] * 9), 260).save(str(path))
        return tiny(data, tokenizer=f"bpe:{path}", model_overrides__vocab_size=260)

    return make


def test_another_tokenizer_is_refused(tokenized, tmp_path):
    """Of the same size, too; the same content at another path is the same tokenizer."""
    own, same = build(tokenized("own", "a b a b")), build(tokenized("same", "a b a b"))
    other = build(tokenized("other", "c d c d"))
    workdir = tmp_path / "run"
    with Checkpointer(workdir / "checkpoints", every=1, keep=1, keep_best=0) as checkpointer:
        meta = {"version": CHECKPOINT_VERSION, "config": own.settings.record}
        checkpointer.save(1, {"params": {"a": np.zeros(1)}}, meta, None)
    keep_small_files(own.settings.record, workdir)
    shutil.rmtree(tmp_path / "own")  # the workdir has a copy
    state = InitialState.parse(str(workdir))
    state.check(same)
    with pytest.raises(ValueError, match="another tokenizer, .* of tokenizer=bpe:.*other") as said:
        state.check(other)
    advice = str(said.value).partition("set tokenizer=")[2]
    assert tokenizer(advice).fingerprint == own.tokenizer.fingerprint
    assert "\n" not in str(said.value)


@pytest.mark.parametrize(
    "spec, what",
    [
        ("none", "none is not a folder"),
        ("run@", "run@ is not a folder"),
        ("run@x", "run@x is not a folder"),
        ("run", "run has no checkpoints"),
        ("run@3", "run has no checkpoints"),
    ],
)
def test_what_no_workdir_is(data, tmp_path, spec, what):
    (tmp_path / "run").mkdir()
    advice = "name the workdir of a run as WORKDIR, or as WORKDIR@STEP with a number"
    with pytest.raises(ValueError, match=f"^initial_state: {tmp_path}/{what}: {advice}$"):
        InitialState.parse(f"{tmp_path}/{spec}").check(build(tiny(data)))


@pytest.mark.parametrize(
    ("spec", "source", "step"),
    [("runs/a", "runs/a", None), ("runs/a@30", "runs/a", 30), ("runs/a@b", "runs/a@b", None)],
)
def test_what_a_spec_names(spec, source, step):
    assert InitialState.parse(spec) == InitialState(source=source, step=step)
