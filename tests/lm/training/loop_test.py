"""The training loop in one process: precisions, meshes, resume, refusals.

What needs a process of its own (kill, signals, the command line) is in experiments/train_test.py.
"""

import collections
import dataclasses
import datetime
import functools
import json
import os
import platform
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from fp8jax.analysis.gemms import find_gemms, format_table
from fp8jax.lm.data.loader import to_devices, train_batches
from fp8jax.lm.model.attention import ATTENTIONS
from fp8jax.lm.records.checkpoint import Checkpointer, DamagedError
from fp8jax.lm.records.jsonl import read_jsonl
from fp8jax.lm.records.metrics import Metrics
from fp8jax.lm.records.workdir_lock import lock_workdir
from fp8jax.lm.stability import swiglu_growth
from fp8jax.lm.training import loop
from fp8jax.lm.training.build import build
from fp8jax.lm.training.faults import Faults
from fp8jax.lm.training.loop import train_and_evaluate
from fp8jax.lm.training.programs import abstract_numbers, lower_program
from fp8jax.lm.training.recovery import NonFiniteError
from fp8jax.lm.training.validate import sample_text
from fp8jax.numerics.module_paths import MODULES
from fp8jax.numerics.policy import POLICIES
from tests.support.products import float8_products
from tests.support.runs import ONE_LINEAR, corpus, happened, numbers, one_layer, steps, tiny
from tests.support.traced_programs import traced_once

GOLDEN = Path(__file__).parent / "golden_losses.json"
# Programs take seconds to compile: whole steps are tested of one policy of each kind, and every
# entry of the tables in dot_test.py and transformer_test.py.
TRAINED = (
    "bf16",
    "fp8_delayed",
    "fp8_current",
    "fp8_block",
    "fp8_block_ue8m0",
    "fp4_block",
    "fp4_mixed",
    "nvfp4_mixed",
)


@pytest.fixture(scope="module", autouse=True)
def policies():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(POLICIES, "one_linear", ONE_LINEAR)
        yield


@pytest.fixture(scope="module", autouse=True)
def traced():
    with traced_once():
        yield


DEFAULT = ("bf16", "fp8_delayed", "fp8_block")  # of FP4, dot_test.py has every cast exactly


@functools.cache
def one_device_losses(precision, data, seed=0, num_steps=10):
    config = tiny(data, precision=precision, seed=seed, unroll=1)
    return steps(config, num_steps, jax.devices()[:1])[0]


# Numbers ------------------------------------------------------------------------------------------


def check_golden(losses, precision, compiled):
    """Compares the first losses with those of this jaxlib, `compiled` so, given the flags of
    tests/conftest.py. FP8JAX_UPDATE_GOLDEN=1 writes them."""
    losses = [float(loss) for loss in losses[:5]]
    golden = json.loads(GOLDEN.read_text())
    key = f"jaxlib {jax.lib.__version__} {platform.machine()} {compiled}"
    if "FP8JAX_UPDATE_GOLDEN" in os.environ:
        golden[key] = (golden[key] if key in golden else {}) | {precision: losses}
        GOLDEN.write_text(json.dumps(golden, indent=1, sort_keys=True) + "\n")
    assert key in golden, f"{GOLDEN.name} has no {key!r}: record it with FP8JAX_UPDATE_GOLDEN=1"
    assert losses == golden[key][precision]


def in_its_tier(precision):
    """Whole steps of one policy for each tile; dot_test.py has the casts of all, exactly."""
    return precision if precision in DEFAULT else pytest.param(precision, marks=pytest.mark.full)


@pytest.mark.parametrize("precision", [in_its_tier(name) for name in TRAINED])
def test_golden_losses(precision, data):
    """A refactoring leaves them bit-identical."""
    check_golden(one_device_losses(precision, data), precision, "not optimized")


@pytest.mark.full  # the same sums in another order
@pytest.mark.optimized
@pytest.mark.parametrize("precision", TRAINED)
def test_golden_losses_as_users_compile(precision, data):
    config = tiny(data, precision=precision, unroll=1)
    check_golden(steps(config, 5, jax.devices()[:1])[0], precision, "optimized")


@pytest.mark.parametrize("names", [DEFAULT, pytest.param(TRAINED, marks=pytest.mark.full)])
def test_precisions_differ_and_all_learn(names, data):
    curves = {name: one_device_losses(name, data) for name in names}
    for name, losses in curves.items():
        assert losses[-1] < 0.7 * losses[0], name
        if name != "bf16":
            assert (losses[1:] != curves["bf16"][1:]).all(), name
            # Ten steps of one model: FP8 within 1%, FP4 within 5% at the end.
            bound = 0.01 if name.startswith("fp8") else 0.05
            assert abs(losses[-1] / curves["bf16"][-1] - 1) < bound, name


@pytest.mark.parametrize(
    "precision",
    # Histories are what devices combine; the others have the same program but for their casts.
    [
        "fp8_delayed",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("bf16", "nvfp4_mixed")),
    ],
)
def test_eight_devices_equal_one(precision, data):
    """The first loss to 1e-5; then, codes flipping on rounding, less than another seed differs."""
    mesh = dict(mesh_axes__data=2, mesh_axes__fsdp=2, mesh_axes__tensor=2)
    eight, run, state = steps(tiny(data, precision=precision, unroll=1, **mesh), 6)
    assert len(state.params["layers"]["mlp"]["up"]["kernel"].sharding.device_set) == 8
    one = one_device_losses(precision, data)[:6]
    other_seed = one_device_losses(precision, data, seed=1, num_steps=6)
    assert abs(eight[0] / one[0] - 1) <= 1e-5
    assert np.abs(eight - one).max() <= np.abs(other_seed - one).max()
    assert np.abs(eight - one).mean() <= np.abs(other_seed - one).mean()


def test_two_runs_are_bit_identical_and_no_step_compiles_twice(data):
    config = one_layer(data, precision="one_linear", grad_accum=2)
    compilations = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: compilations.append(event) if "backend_compile" in event else None
    )
    first, run, state = steps(config, 3)
    assert compilations  # the listener hears
    compilations.clear()
    rows = corpus(*data).train
    batches = train_batches(rows, seed=0, batch_size=16, position=rows.start().advanced(48))
    with jax.set_mesh(run.mesh):
        losses = []
        programs = run.stages[0].programs
        for _ in range(3):
            batch = to_devices(next(batches), run.batch_sharding)
            state, out = programs.step(state, batch, programs.numbers(state))
            losses.append(float(out["loss"]))
    batches.close()
    assert not compilations
    np.testing.assert_array_equal([*first, *losses], steps(config, 6)[0])


@pytest.mark.parametrize("precision", ["fp8_delayed", "fp8_current"])
def test_a_training_step_holds_three_float8_products_a_linear(precision, data):
    config = tiny(data, precision=precision, backend="xla")
    run = build(config, jax.devices()[:1])
    rows = jax.ShapeDtypeStruct((16, 64), jnp.int32)
    batch = dict.fromkeys(("tokens", "targets", "segments", "positions"), rows)
    batch["weights"] = jax.ShapeDtypeStruct((16, 64), jnp.float32)
    (stage,) = run.stages
    jaxpr = stage.programs.step.trace(stage.state, batch, abstract_numbers(run, stage)).jaxpr
    assert float8_products(jaxpr.jaxpr) == 3 * 7  # the layers are one loop body


# The loop -----------------------------------------------------------------------------------------


def test_the_seeding_step_loops_over_layers_where_the_others_do_not(data):
    """It runs once, so that it should compile fast."""
    config = tiny(data, precision="fp8_delayed", model_overrides__n_layers=4, unroll=4)
    run = build(config, jax.devices()[:1])
    seeding, steady = (
        lower_program(run, run.stages[0], name).as_text().count("stablehlo.while")
        for name in ("seed_step", "step")
    )
    assert (seeding, steady) == (2, 0)  # forward and backward


def losses_of(workdir):
    lines = read_jsonl(workdir / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def delayed(data):
    """A config of several tests: its programs are compiled once. Eight devices train in
    experiments/train_test.py."""
    return one_layer(data, precision="one_linear", optimizer__schedule="wsd")


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """(workdir, last metrics) of a run to the end. A test that changes files copies them first."""
    workdir = tmp_path_factory.mktemp("finished")
    return workdir, train_and_evaluate(delayed(data), str(workdir))


def test_a_run_writes_what_it_should(finished):
    tmp_path, last = finished
    lines = read_jsonl(tmp_path / "metrics.jsonl")
    assert len(lines) == 20 and lines[-1] == {"step": 20, "time": lines[-1]["time"], **last}
    times = [datetime.datetime.fromisoformat(line["time"]) for line in lines]
    assert times == sorted(times) and times[0].tzinfo is datetime.UTC
    assert {"loss", "grad_norm", "learning_rate", "step_s", "tokens_per_s", "mfu"} <= set(lines[0])
    # The first call of a program returns late, so that its seconds are no step's.
    speeds = [[line[name] for name in ("step_s", "tokens_per_s")] for line in lines]
    assert speeds[0] == [None, None] and min(map(min, speeds[1:])) > 0
    assert [line["step"] for line in lines if "valid_loss" in line] == [10, 20]
    assert last["valid_loss"] < lines[9]["valid_loss"]
    # One source of ASCII: bytes are tokens but for the EOS of each document, which is no byte.
    ratio = last["valid_bits_per_byte"] * np.log(2) / last["valid_loss"]
    assert 1 < ratio < 1.1
    assert json.loads((tmp_path / "config.json").read_text())["precision"] == "one_linear"
    assert sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir()) == [15, 20]
    assert list((tmp_path / "tensorboard").iterdir())


def test_a_damaged_checkpoint_is_said_and_the_one_before_is_used(data, finished, tmp_path):
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    whole = losses_of(tmp_path)
    for file in sorted((tmp_path / "checkpoints" / "20").rglob("*")):
        if file.is_file() and file.stat().st_size > 100:
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    train_and_evaluate(delayed(data), str(tmp_path))
    assert losses_of(tmp_path) == whole
    events = {event["kind"]: event for event in read_jsonl(tmp_path / "events.jsonl")}
    assert events["damaged_checkpoint"]["step"] == 20 and events["resume"]["step"] == 15


def test_a_run_that_resumes_after_a_rejected_seeding_step_seeds(data, tmp_path):
    """Its histories are all zeros, and would be read as scales of 1."""
    changes = dict(recovery__ladder="skip:5", checkpoint__every=1, num_steps=5)
    config = one_layer(data, precision="one_linear", **changes)
    faults = "nan_loss@1x2"
    train_and_evaluate(config, str(tmp_path / "whole"), faults=Faults.parse(faults))
    for injected in (f"{faults},sigterm@1", ""):
        train_and_evaluate(config, str(tmp_path / "run"), faults=Faults.parse(injected))
    events = read_jsonl(tmp_path / "run/events.jsonl")
    (resume,) = (event for event in events if event["kind"] == "resume")
    assert (resume["step"], resume["seeding"]) == (2, True)
    assert numbers(tmp_path / "run")[2:] == numbers(tmp_path / "whole")[2:]  # NaN before


def test_another_config_is_refused_and_another_precision_resumes_when_asked_for(data, tmp_path):
    train_and_evaluate(one_layer(data, num_steps=5), str(tmp_path))
    config = one_layer(data, precision="one_linear", num_steps=8)
    with pytest.raises(ValueError) as error:
        train_and_evaluate(config, str(tmp_path))
    for line in ("num_steps: 5 -> 8", "precision: 'bf16' -> 'one_linear'", "resume_with_changes"):
        assert line in str(error.value)
    config.resume_with_changes = True
    train_and_evaluate(config, str(tmp_path))
    assert len(losses_of(tmp_path)) == 8
    (resume,) = (e for e in read_jsonl(tmp_path / "events.jsonl") if e["kind"] == "resume")
    assert resume["step"] == 5 and resume["seeding"]


def test_another_optimizer_is_refused_and_a_tampered_checkpoint_stops_a_run(data, tmp_path):
    """Both before a file of the run is touched."""
    train_and_evaluate(one_layer(data, num_steps=2), str(tmp_path))
    assert "valid_loss" in read_jsonl(tmp_path / "metrics.jsonl")[-1]  # the last step validates

    def files():
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    whole = files()
    other = one_layer(data, num_steps=4, optimizer__name="lion")
    with pytest.raises(ValueError, match=r"optimizer.name: 'adamw' -> 'lion'"):
        train_and_evaluate(other, str(tmp_path))
    other.resume_with_changes = True  # its moments are others, whoever asks
    with pytest.raises(ValueError, match=r"opt_state/.*nu/embedding: 'float32.* -> \(missing\)"):
        train_and_evaluate(other, str(tmp_path))
    stored = one_layer(data, num_steps=4, optimizer__moments="fp8", resume_with_changes=True)
    with pytest.raises(ValueError, match=r"opt_state/.*\(missing\) -> 'float8_e4m3fn"):
        train_and_evaluate(stored, str(tmp_path))
    assert files() == whole

    (arrays,) = (tmp_path / "checkpoints" / "2" / "state").rglob("ocdbt.process_0/d")
    largest = max(arrays.iterdir(), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes().replace(b"\x00", b"\x01", 1))
    tampered = files()
    with pytest.raises(DamagedError, match="every checkpoint .* is damaged: 2: changed"):
        train_and_evaluate(one_layer(data, num_steps=4), str(tmp_path))
    assert files() == tampered


def test_batch_learning_rate_and_steps_change_on_resume_and_are_recorded(data, tmp_path):
    """A run of 6 steps goes on to 9 with half the batch and another learning rate."""
    train_and_evaluate(one_layer(data, num_steps=6), str(tmp_path))
    changes = dict(
        num_steps=9, batch_size=8, optimizer__learning_rate=1e-3, resume_with_changes=True
    )
    config = one_layer(data, **changes)
    last = train_and_evaluate(config, str(tmp_path))
    assert len(losses_of(tmp_path)) == 9
    # Each run validates its last step, though not its tenth.
    lines = read_jsonl(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if "valid_loss" in line] == [6, 9]
    (resume,) = (e for e in read_jsonl(tmp_path / "events.jsonl") if e["kind"] == "resume")
    assert resume["step"] == 6 and resume["changes"] == [
        "batch_size: 16 -> 8",
        "num_steps: 6 -> 9",
        "optimizer.learning_rate: 0.003 -> 0.001",
    ]
    assert json.loads((tmp_path / "config.json").read_text())["batch_size"] == 8
    # The schedule is that of the new run at the steps it is at: the last has the final rate.
    np.testing.assert_allclose(last["learning_rate"], 1e-4, rtol=1e-6)
    with Checkpointer(tmp_path / "checkpoints", every=1, keep=1, keep_best=0) as checkpointer:
        step, meta = checkpointer.read_meta()
    assert (step, meta["position"]["rows"]) == (9, 6 * 16 + 3 * 8)  # none twice, none left out
    assert sum(n for name, n in last.items() if name.startswith("rows/")) == 6 * 16 + 3 * 8


def test_samples_profile_and_the_best_checkpoint(data, tmp_path):
    """On request: text every 5 steps, a trace of steps 3 and 4, and the step that validated best
    although later ones are kept."""
    config = one_layer(data, num_steps=15, valid__every=5)
    config.checkpoint.update(keep=1, keep_best=1)
    config.sample.update(every=5, tokens=24, prompt="The ")
    # A learning rate that breaks the model again after step 10.
    config.optimizer.update(warmup_steps=14, learning_rate=0.3)
    train_and_evaluate(config, str(tmp_path), profile=(3, 4))
    samples = read_jsonl(tmp_path / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [5, 10, 15]
    for sample in samples:
        assert sample["text"].startswith("The ") and len(sample["text"]) <= 28
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    valid = {
        line["step"]: line["valid_loss"]
        for line in read_jsonl(tmp_path / "metrics.jsonl")
        if "valid_loss" in line
    }
    best = min(valid, key=valid.get)
    assert best != 15
    kept = sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    assert kept == [best, 15]
    profiled, found = happened(tmp_path)
    assert (profiled["kind"], profiled["step"]) == ("profiled", 4)
    assert (found["kind"], found["step"], found["valid_loss"]) == (
        "best_checkpoint",
        best,
        valid[best],
    )
    with pytest.raises(ValueError, match="profile=3:4 does not lie within the steps 16 to 15"):
        train_and_evaluate(config, str(tmp_path), profile=(3, 4))


def test_what_happens_around_a_step_in_this_order(data, tmp_path, monkeypatch):
    """A step is read once the next one runs, or where something after it is due. One is rejected,
    and a signal that comes after step 6 takes effect after step 7."""
    config = one_layer(data, num_steps=9, valid__every=5, recovery__ladder="skip:1")
    config.sample.update(every=5, tokens=24, prompt="The ")
    order = []

    def record(owner, name, *of):
        """Records calls of a function, with the arguments at some places."""
        original = getattr(owner, name)

        def recorded(*arguments, **named):
            order.append(" ".join([name, *(str(arguments[place]) for place in of)]))
            return original(*arguments, **named)

        monkeypatch.setattr(owner, name, recorded)

    for name, *of in (("event", 2, 1), ("write", 1), ("sample", 1)):
        record(Metrics, name, *of)
    record(Checkpointer, "save", 1)
    record(loop, "_dispatch")
    record(jax.profiler, "start_trace")
    record(jax.profiler, "stop_trace")
    faults = Faults.parse("nan_loss@2,sigterm@6")
    train_and_evaluate(config, str(tmp_path), profile=(3, 4), faults=faults)
    (found,) = (what for what in order if what.startswith("event precision"))  # in a thread
    assert order.index(found) > order.index("event stage 0")
    order.remove(found)
    assert "\n".join(order).replace("_dispatch", "step").split("\n") == [
        "event start 0",
        *["step", "event stage 0"],
        *["step", "write 1"],
        *["start_trace", "step", "event skip 2", "write 2"],
        *["step", "write 3", "stop_trace", "event profiled 4"],
        *["step", "write 4"],
        *["write 5", "sample 5", "save 5", "event checkpoint 5"],
        "step",
        *["step", "write 6", "write 7", "save 7", "event checkpoint 7", "event stopped 7"],
        "event end 7",
    ]


def test_a_non_finite_step_stops_before_its_update_and_its_checkpoint(data, tmp_path):
    config = one_layer(
        data,
        optimizer__learning_rate=1e38,
        optimizer__clip_norm=1e30,
        optimizer__warmup_steps=0,
        num_steps=10,
    )
    config.checkpoint.every = 1
    with pytest.raises(NonFiniteError, match=r"step \d: .*(loss|grad_norm)=.*not finite"):
        train_and_evaluate(config, str(tmp_path))
    lines = read_jsonl(tmp_path / "metrics.jsonl")
    kept = sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit())
    assert kept[-1] == len(lines) and np.isfinite([line["loss"] for line in lines]).all()
    (event,) = happened(tmp_path)
    assert read_jsonl(tmp_path / "events.jsonl")[-1]["reason"] == "NonFiniteError"
    assert event["kind"] == "stop" and event["cause"] == "non_finite"
    assert event["step"] == len(lines) + 1 and event["first"]


def test_swiglu_outputs_that_grow_are_said_and_a_resumed_run_remembers(data, tmp_path, monkeypatch):
    """At a high rate from tiny outputs they grow in each of the first steps; a resumed run goes on
    with what was seen. Outputs of a tiny run stay far below the floor, which is lowered here."""
    monkeypatch.setattr(swiglu_growth, "FLOOR", 0.0)
    config = one_layer(
        data, num_steps=4, optimizer__warmup_steps=0, valid__every=1, optimizer__learning_rate=2e-2
    )
    config.optimizer.update(schedule="wsd", decay_fraction=0.0)
    config.resume_with_changes = True
    train_and_evaluate(config, str(tmp_path))
    assert not happened(tmp_path)
    config.num_steps = 9
    train_and_evaluate(config, str(tmp_path))
    grown = [e for e in read_jsonl(tmp_path / "events.jsonl") if e["kind"] == "swiglu_grows"]
    assert grown and grown[0]["step"] == 6
    for amaxes in grown[0]["amaxes"].values():
        assert len(amaxes) == 6 and amaxes == sorted(amaxes) and amaxes[-1] > 4 * amaxes[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(precision="fp8_delay"), "unknown policy 'fp8_delay'; did you mean 'fp8_delayed'"),
        (dict(model="llama_125"), "unknown model 'llama_125'; did you mean 'llama_125m'"),
        (dict(mesh="fdsp"), "unknown mesh 'fdsp'; did you mean 'fsdp'"),
        (dict(mesh_axes__data=3), "data=3 .* does not fit 8 devices"),
        (dict(mesh="fsdp", batch_size=20), "batch_size=20 must be a multiple of .* 8 devices"),
        (
            dict(mesh="fsdp", batch_size=16, grad_accum=4),
            "batch_size=16 .*grad_accum=4 .* 8 devices",
        ),
        (dict(mesh="tensor"), "n_heads=4 does not divide over tensor=8"),
        (dict(mesh_axes__data=2, mesh_axes__tensor=4), "n_kv_heads=2 does not divide .*tensor=4"),
        (dict(mesh="fsdp", model_overrides__d_model=60), "'embed' has size 60, which is not"),
        (dict(tokenizer="byte"), "unknown tokenizer 'byte'"),
        (dict(remat="ful"), "unknown remat policy 'ful'; did you mean 'full'"),
        (dict(optimizer__name="adamv"), "unknown optimizer 'adamv'; did you mean 'adam'"),
        (dict(optimizer__schedule="cosin"), "unknown schedule"),
        (dict(optimizer__warmup_steps=-1), "warmup_steps=-1 is negative"),
        (dict(unroll=3), "unroll=3 is more than the model's 2 layers"),
        (dict(model_overrides__vocab_size=256), "vocab_size=256 is less than .* 258"),
        (dict(model="gpt2_tiny", seq_len=2048), "seq_len=2048 is more than .*positions=1024"),
        (dict(attention="cudn"), "unknown attention 'cudn'; did you mean 'cudnn'"),
        (
            dict(sample__every=5),
            "1 tokens of prompt and sample.tokens=128 is .*seq_len=64",
        ),
        (dict(sample__prompt="The"), "sample.prompt='The' is for samples: set sample.every"),
        (dict(sample__every=5, sample__tokens=0), "sample.tokens=0 must be at least 1"),
        (
            dict(sample__every=5, sample__tokens=8, sample__temperature=-1.0),
            "temperature=-1.0 must be finite",
        ),
        (
            dict(checkpoint__keep_best=1, checkpoint__every=5, valid__every=10),
            "checkpoint.every=5 must be a multiple of valid.every=10",
        ),
    ],
)
def test_bad_configs_are_refused_with_names_and_numbers(data, changes, message):
    with pytest.raises(ValueError, match=message):
        build(tiny(data, **changes))


def test_a_workdir_in_which_another_program_trains_is_refused_before_anything(data, tmp_path):
    config = tiny(data, cache_dir=str(tmp_path / "cache"))
    with lock_workdir(tmp_path / "run"):
        with pytest.raises(BlockingIOError, match="another program .* trains in the workdir"):
            train_and_evaluate(config, str(tmp_path / "run"))
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]
    assert not (tmp_path / "cache").exists()


def test_a_backend_that_cannot_do_the_policy_says_why(data):
    with pytest.raises(NotImplementedError, match="'xla' cannot run .*'fp8_block' here .*: fwd"):
        build(tiny(data, precision="fp8_block", backend="xla"))


def test_samples_may_be_longer_or_shorter_than_the_attention_of_training_takes(data, monkeypatch):
    """Like cudnn, which takes rows of an even length only: this one takes those of training."""
    picky = dataclasses.replace(
        ATTENTIONS["xla"], refuses=lambda q: None if q.shape[1] == 64 else f"length {q.shape[1]}"
    )
    monkeypatch.setitem(ATTENTIONS, "picky", picky)
    config = one_layer(data, attention="picky", sample__every=5, sample__tokens=8)
    run = build(config, jax.devices()[:1])
    (stage,) = run.stages
    with jax.set_mesh(run.mesh):
        assert isinstance(sample_text(run, stage, stage.programs.initialize()), str)


def test_an_attention_that_cannot_run_here_says_why(data):
    with pytest.raises(NotImplementedError, match="'cudnn' cannot run here: it needs an NVIDIA"):
        build(tiny(data, attention="cudnn"))


@pytest.mark.gpu
def test_every_gemm_of_the_layers_is_fp8_on_a_gpu(data):
    """lm_125m's model: 12 layers of 7 linears of 3 products."""
    changes = dict(model="llama_125m", unroll=12, seq_len=1024, batch_size=32)
    config = tiny(data, precision="fp8_delayed", **changes)
    config.model_overrides = base.get_config().model_overrides
    run = build(config)
    rows = {k: jnp.zeros((32, 1024), jnp.int32) for k in ("tokens", "targets", "positions")}
    batch = {**rows, "segments": rows["tokens"] + 1, "weights": rows["tokens"] + 1.0}
    with jax.set_mesh(run.mesh):
        (stage,) = run.stages
        lowered = stage.programs.step.lower(stage.state, batch, abstract_numbers(run, stage))
        compiled = lowered.compile().as_text()
    gemms = find_gemms(compiled, run.stages[0].policy, run.stages[0].model.config.linears)
    table = format_table(gemms)
    of_layers = collections.Counter()
    for gemm in gemms:  # XLA merges those of one x
        if gemm.module.startswith("layers/") and gemm.role:
            assert gemm.fp8, table
            of_layers.update({(module, gemm.role): gemm.count for module in gemm.modules})
    paths = [path for path in MODULES if path.startswith("layers/")]
    assert of_layers == {(m, p): 12 for m in paths for p in ("fwd", "dgrad", "wgrad")}, table


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp8_delayed", "fp8_block", "fp8_rowwise"])
def test_kernels_train_as_emulated_products_do(data, precision):
    """In a loop over layers, with accumulated gradients and rematerialization. Hopper's sums of 14
    bits move some codes by one: losses differ by less than those of another seed."""
    shape = dict(d_model=256, d_ff=512, head_dim=64)
    changes = dict(precision=precision, unroll=1, remat="quantized", grad_accum=2)

    def losses(**more) -> np.ndarray:
        config = tiny(data, **changes, **more)
        config.model_overrides.update(shape)
        return steps(config, 20, jax.devices()[:1])[0]

    exact = losses(backend="emulated")
    spread = np.abs(losses(backend="emulated", seed=1) - exact).mean()
    assert np.abs(losses(backend="pallas") - exact).mean() < spread / 4
    assert exact[-1] < 0.8 * exact[0]
