"""Precision schedules in training: when a policy ends, what the next one finds, what is refused.

Losses are compared to the bit with those of single steps put together by hand: the state of a run
without a schedule, given to a step of the next policy.
"""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from ml_collections import ConfigDict, config_flags

from configs import base, fp4
from fp8jax.device import xla
from fp8jax.lm.data.loader import to_devices, train_batches
from fp8jax.lm.records.checkpoint import Checkpointer, Restored
from fp8jax.lm.records.jsonl import read_jsonl
from fp8jax.lm.records.run_checkpoint import CHECKPOINT_VERSION
from fp8jax.lm.training import dry_run, hooks, loop, parameter_table, programs, resume
from fp8jax.lm.training.build import build
from fp8jax.lm.training.loop import train_and_evaluate
from fp8jax.lm.training.policy_switch import enter_policy, leaves_by_path
from fp8jax.numerics.names import as_policy
from fp8jax.numerics.policy import POLICIES, Policy
from fp8jax.numerics.recipes import RECIPES
from fp8jax.numerics.schedule import as_schedule
from tests.support.runs import corpus, happened, numbers, steps, tiny
from tests.support.traced_programs import traced_once

# Two linears with histories are enough, and little to compile.
MLP = Policy((("layers/mlp/*", RECIPES["fp8_delayed"]),), name="mlp")
# Of nine steps: 3 without histories, 2 with new ones to seed, 2 that take those over, 2 without.
SAME = "mlp:history=16"
SCHEDULE = ((1 / 3, "mlp"), (0.55, SAME), (0.8, "bf16"))


@pytest.fixture(scope="module", autouse=True)
def mlp():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(POLICIES, "mlp", MLP)
        yield


def short(data, **changes):
    """Nine steps of one layer."""
    fast = dict(num_steps=9, optimizer__warmup_steps=2, valid__every=2)
    fast |= dict(checkpoint__every=1, checkpoint__keep=9)
    return tiny(
        data, model_overrides__n_layers=1, unroll=1, model_overrides__mlp="gelu", **fast | changes
    )


def one_device(config):
    return build(config, jax.devices()[:1])


def batches_of(config, run, begin, end):
    """The batches of the steps begin + 1 to end, on the run's devices."""
    rows = corpus(config.data, config.cache_dir).train
    position = rows.start().advanced(begin * config.batch_size)
    batches = train_batches(rows, seed=config.seed, batch_size=config.batch_size, position=position)
    made = [to_devices(next(batches), run.batch_sharding) for _ in range(begin, end)]
    batches.close()
    return made


def zeros(abstract):
    return jax.tree.map(
        lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding), abstract
    )


def switches(workdir):
    events = read_jsonl(workdir / "events.jsonl")
    return [event for event in events if event["kind"] == "precision_switch"]


# The switch ---------------------------------------------------------------------------------------


# As JAX names them: initialization and evaluation are lambdas.
PROGRAMS = {"jit(<lambda>)", "jit(of_count)", "jit(step)", "jit(sample)"}


@dataclasses.dataclass
class Whole:
    """A run through all stages, never interrupted.

    compilations: of the run's programs in each step, with the validation and sample after it; in
      the first also before it, since the first step compiles while the state is initialized.
    entered: (state before, state after) of each switch.
    """

    config: ConfigDict
    workdir: Path
    stages: list = dataclasses.field(default_factory=list)
    compilations: list = dataclasses.field(default_factory=list)
    entered: list = dataclasses.field(default_factory=list)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    config = short(data, precision_schedule=SCHEDULE, sample__every=5, sample__tokens=4)
    run = Whole(config, tmp_path_factory.mktemp("whole"))
    compiled = []

    def noted_build(config):
        built = one_device(config)
        run.stages.extend(built.stages)
        return built

    def noted_to_devices(*args):  # the loop's; batches are read ahead
        run.compilations.append(len(compiled) if run.compilations else 0)
        return to_devices(*args)

    def noted_enter(state, *args):
        run.entered.append((state, enter_policy(state, *args)))
        return run.entered[-1][1]

    def listen(event, _, fun_name="", **__):
        if "backend_compile" in event and fun_name in PROGRAMS:
            compiled.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "build", noted_build)
        patch.setattr(hooks, "to_devices", noted_to_devices)
        patch.setattr(hooks, "enter_policy", noted_enter)
        train_and_evaluate(config, str(run.workdir))
    run.compilations = np.diff([*run.compilations, len(compiled)]).tolist()
    return run


@pytest.fixture(scope="module")
def traced(whole):
    """After `whole`, which counts its programs."""
    with traced_once():
        yield


@pytest.mark.usefixtures("traced")
def test_each_stage_goes_on_from_the_bits_of_the_one_before(data, whole):
    """Steps 1 to 3 are those of a run without a schedule. Then its weights, moments and data, with
    empty histories, go through the seeding and steady programs of `mlp`, where the switch to the
    same policy changes no bit; then without histories through those of bf16."""
    losses, _, state = steps(short(data), 3, jax.devices()[:1])
    expected = list(losses)
    for precision, begin, end in (("mlp", 3, 7), ("bf16", 7, 9)):
        config = short(data, precision=precision)
        run = one_device(config)
        with jax.set_mesh(run.mesh):
            state = dataclasses.replace(state, histories=zeros(run.stages[0].state.histories))
            for i, batch in enumerate(batches_of(config, run, begin, end)):
                seeding = precision == "mlp" and i == 0
                given = jax.tree.leaves((state.params, state.opt_state, state.histories))
                stage = run.stages[0].programs
                step = stage.seed_step if seeding else stage.step
                state, out = step(state, batch, stage.numbers(state))
                # A stage's first step, too, was given the memory of what came before.
                assert all(leaf.is_deleted() for leaf in given)
                expected.append(float(out["loss"]))
    assert [line["loss"] for line in numbers(whole.workdir)] == expected


def test_switches_are_events_at_the_right_steps(whole):
    found = switches(whole.workdir)
    assert [(event["step"], event["from"], event["to"], event["seeding"]) for event in found] == [
        (3, "bf16", "mlp", True),
        (5, "mlp", SAME, False),
        (7, SAME, "bf16", False),
    ]
    config = ConfigDict(json.loads((whole.workdir / "config.json").read_text()))
    assert config.precision_schedule == [list(stage) for stage in SCHEDULE]
    assert as_schedule(config.precision, config.precision_schedule).begins(9) == (0, 3, 5, 7)


def test_every_program_is_compiled_once_when_a_stage_needs_it(whole):
    """Validation after the steps 2, 4, 6, 8, 9; a sample after step 5."""
    initial = rates = step = seed = evaluation = sample = 1
    assert whole.compilations == [
        initial + rates + step,
        evaluation,
        0,
        seed + evaluation,
        step + sample,
        step + evaluation,
        0,
        step + evaluation,
        0,
    ]
    for field, counts in {
        "step": [1, 1, 1, 1],
        "seed_step": [0, 1, 0, 0],
        "eval_step": [1, 1, 1, 1],
        "sample": [0, 1, 0, 0],
    }.items():
        programs_of = [getattr(stage.programs, field) for stage in whole.stages]
        assert [program._cache_size() for program in programs_of] == counts, field
    validated = [line["step"] for line in numbers(whole.workdir) if "valid_loss" in line]
    assert validated == [2, 4, 6, 8, 9]
    assert [line["step"] for line in read_jsonl(whole.workdir / "samples.jsonl")] == [5]


def test_a_switch_copies_no_weights(whole):
    assert len(whole.entered) == 3
    for before, after in whole.entered:
        assert before.params is after.params and before.opt_state is after.opt_state


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("step", "switched"),
    [
        pytest.param(3, [3, 5, 7], id="at"),
        # As any run that resumes; the one above goes through the later switches, too.
        pytest.param(2, [3, 5, 7], id="before", marks=pytest.mark.full),
        pytest.param(6, [7], id="after", marks=pytest.mark.full),
    ],
)
def test_resumed_on_either_side_and_at_the_switch_equals_never_stopped(
    step, switched, whole, tmp_path, monkeypatch
):
    monkeypatch.setattr(loop, "build", one_device)
    workdir = tmp_path / "run"
    shutil.copytree(whole.workdir, workdir)
    for later in range(step + 1, 10):
        shutil.rmtree(workdir / f"checkpoints/{later}")
    (workdir / "events.jsonl").unlink()
    train_and_evaluate(whole.config, str(workdir))
    assert numbers(workdir) == numbers(whole.workdir)
    samples = [read_jsonl(folder / "samples.jsonl") for folder in (workdir, whole.workdir)]
    assert samples[0] == samples[1]
    resume = happened(workdir)[0]
    assert (resume["step"], resume["seeding"], resume["changes"]) == (step, False, [])
    assert [event["step"] for event in switches(workdir)] == switched


# Histories ----------------------------------------------------------------------------------------

LAYERS = ("layers/mlp/", "layers/attention/")


@pytest.mark.parametrize(
    ("first", "then", "kept"),
    [
        ("fp8_current", "fp8_delayed", ()),
        ("fp8_delayed", "bf16", ()),
        ("fp8_delayed", "fp8_delayed:gradients=e4m3", LAYERS),
        ("fp8_delayed", "fp8_delayed:history=8", ()),
        ("mlp", "fp8_delayed", ("layers/mlp/",)),
        ("fp8_delayed", "mlp", ("layers/mlp/",)),
        ("fp8_delayed", "fp8_delayed:head=fp8_delayed", LAYERS),
        ("fp8_delayed:head=fp8_delayed", "fp8_delayed", LAYERS),
        ("fp8_delayed", "fp8_delayed:bf16_last=1", LAYERS),
        # Of the last layer, exempt so far, the leaves hold nothing.
        ("fp8_delayed:bf16_last=1", "fp8_delayed", ()),
    ],
)
def test_histories_that_both_policies_have_are_kept_and_new_ones_seeded(data, first, then, kept):
    run = build(tiny(data, precision=first, precision_schedule=((0.5, then),), mesh="fsdp"))
    before, stage = run.stages
    histories = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), before.state.histories)
    state = dataclasses.replace(before.state, histories=histories)
    state = enter_policy(state, stage.state, stage.carried)
    assert stage.begins == 10 and state.params is before.state.params
    assert jax.tree.structure(state.histories) == jax.tree.structure(stage.state.histories)
    old, new = leaves_by_path(histories), leaves_by_path(state.histories)
    for name, abstract in leaves_by_path(stage.state.histories).items():
        if name.startswith(kept):
            assert new[name] is old[name]
        else:
            np.testing.assert_array_equal(new[name], np.zeros(abstract.shape))
            assert new[name].sharding == abstract.sharding
            assert new[name].dtype == abstract.dtype
    assert stage.seeds == any(not name.startswith(kept) for name in new)
    assert programs.training_programs(stage) == (["step", "seed_step"] if stage.seeds else ["step"])


class Found(Checkpointer):
    """A directory with one checkpoint, of that step and config."""

    def __init__(self, step, config, fingerprint):
        self.step = step
        self.meta = {"version": CHECKPOINT_VERSION, "config": config, "data": fingerprint}

    def read_meta(self):
        return self.step, self.meta

    def restore(self, abstract):
        filled = {"histories": abstract["histories"]} if "histories" in abstract else {}
        filled = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), filled)
        return Restored(step=self.step, arrays=abstract | filled, meta=self.meta)


END = {"precision": "fp8_delayed", "precision_schedule": ((0.5, "bf16"),)}


@pytest.mark.parametrize(
    ("old", "new", "step", "stage", "kept"),
    [
        ({"precision": "fp8_delayed"}, {"precision": "fp8_delayed"}, 10, 0, True),
        ({"precision": "fp8_delayed"}, END, 10, 0, True),
        ({"precision": "fp8_delayed"}, END, 11, 1, False),
        ({"precision": "bf16"}, END, 11, 1, True),
        ({"precision": "bf16"}, END, 5, 0, False),
        # At the last step of a stage the checkpoint is that stage's, and the next step's begins
        # where its histories are of no use.
        (END, END, 10, 0, True),
        (END, END, 11, 1, True),
        (END | {"num_steps": 40}, END, 10, 0, True),
        (END | {"num_steps": 40}, END, 20, 1, False),
        (END, END | {"num_steps": 40}, 10, 0, True),
        (END, END | {"num_steps": 40}, 15, 0, False),
        (END, END | {"precision_schedule": ((0.5, "fp8_current"),)}, 10, 0, True),
        ({"precision": "fp8_delayed:history=16"}, {"precision": "fp8_delayed"}, 10, 0, True),
        ({"precision": "a name of the past"}, {"precision": "fp8_delayed"}, 10, 0, False),
    ],
)
def test_a_checkpoint_hands_on_its_histories_to_the_policy_that_made_them(
    data, old, new, step, stage, kept
):
    config = tiny(data, resume_with_changes=True, **new)
    before = (
        json.loads(config.to_json())
        | {"precision_schedule": [], "num_steps": 20}
        | json.loads(json.dumps(old))
    )
    rows = corpus(*data)
    run = one_device(config)
    found = Found(step, before, rows.fingerprint)
    restored, changes = resume.read_checkpoint(found, run, rows)
    assert ("histories" in restored.arrays) == kept
    assert bool(changes) == (old != new)
    position = resume.initial_position(run, restored)
    assert position.stage is run.stages[stage]
    assert jax.tree.structure(position.state) == jax.tree.structure(position.stage.state)
    assert position.seeding == (not kept and position.stage.policy == as_policy("fp8_delayed"))
    assert kept or all((leaf == 0).all() for leaf in jax.tree.leaves(position.state.histories))


# What a schedule may be ---------------------------------------------------------------------------


def parsed(monkeypatch, config, *arguments):
    """The config with these flags, as the command line reads them."""
    values = flags.FlagValues()
    monkeypatch.setattr(sys, "argv", ["train", *arguments])  # where ml_collections looks
    config_flags.DEFINE_config_dict("config", config, lock_config=True, flag_values=values)
    values(sys.argv)
    return values["config"].value


@pytest.mark.parametrize(
    "text", ['((0.9,"bf16"),)', '[[0.9, "bf16"]]', '((0.0,"fp4_mixed"),(0.9,"bf16"))']
)
def test_a_schedule_is_read_from_the_command_line_json_and_lists(text, monkeypatch):
    arguments = ("--config.precision=fp4_mixed", f"--config.precision_schedule={text}")
    config = parsed(monkeypatch, base.get_config(), *arguments)
    from_json = ConfigDict(json.loads(config.to_json()))
    updated = base.get_config()
    updated.update(precision="fp4_mixed", precision_schedule=[[0.9, "bf16"]])
    for given in (config, from_json, updated):
        schedule = as_schedule(given.precision, given.precision_schedule)
        assert schedule.stages == ((0.0, as_policy("fp4_mixed")), (0.9, as_policy("bf16")))
        assert schedule.begins(150) == (0, 135)
        assert [schedule.policy_of(step, 150).name for step in (1, 135, 136, 150)] == [
            "fp4_mixed",
            "fp4_mixed",
            "bf16",
            "bf16",
        ]


def test_the_schedule_of_fp4_is_taken_away_by_a_flag(monkeypatch):
    config = fp4.get_config()
    assert as_schedule(config.precision, config.precision_schedule).begins(150) == (0, 135)
    config = parsed(monkeypatch, config, "--config.precision_schedule=()")
    assert as_schedule(config.precision, config.precision_schedule).begins(150) == (0,)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (((0.9, "bf61"),), "unknown policy 'bf61'; did you mean 'bf16'"),
        (((0.9, "bf16:history=8"),), "history=8: no cast of policy 'bf16'"),
        (
            ((0.5, "bf16"), (0.2, "fp8_current")),
            r"increase and stay below 1, .* 0.5, 0.2\]",
        ),
        (
            ((0.5, "bf16"), (0.5, "fp8_current")),
            r"increase and stay below 1, .* 0.5, 0.5\]",
        ),
        (((1.0, "bf16"),), r"increase and stay below 1, got \[0.0, 1.0\]"),
        (((0.5, "bf16"), (float("nan"), "fp8_current")), r"below 1, got \[0.0, 0.5, nan\]"),
        (((-0.1, "fp8_delayed"),), r"begin at 0.0, got \[-0.1\]"),
        (((0.0, "bf16"), (0.9, "fp8_delayed")), "precision='fp8_delayed' contradicts .*'bf16'"),
        (((0.01, "bf16"),), r"a stage gets none of the 20 steps: the stages begin at \(0, 0\)"),
        (((0.5, "bf16"), (0.51, "fp8_current")), r"the stages begin at \(0, 10, 10\)"),
        (((0.99, "bf16"),), r"a stage gets none of the 20 steps: the stages begin at \(0, 20\)"),
        ((0.9, "bf16"), "0.9 is not a pair .fraction of training, policy.; write a single"),
        ((("bf16", 0.9),), r"\('bf16', 0.9\) is not a pair"),
        (((0.5, "experts"),), "policy 'experts': rule 'layers/experts/\\*' matches no module"),
        (((0.5, "bf16:bf16_first=2,bf16_last=1"),), "2 first and 1 last layers"),
    ],
)
def test_bad_schedules_are_refused_at_start_with_the_values(
    data, monkeypatch, tmp_path, schedule, message
):
    experts = Policy((("layers/experts/*", RECIPES["fp8_current"]),), name="experts")
    monkeypatch.setitem(POLICIES, "experts", experts)
    config = tiny(data, precision="fp8_delayed", precision_schedule=schedule)
    with pytest.raises(ValueError, match=message):
        train_and_evaluate(config, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_backend_that_cannot_run_a_later_stage_says_so_at_start(data, tmp_path):
    stages = ((0.5, "fp8_delayed"), (0.9, "fp8_block"))
    config = tiny(data, precision="fp8_current", precision_schedule=stages, backend="xla")
    with pytest.raises(NotImplementedError, match="'xla' cannot run recipe 'fp8_block'"):
        train_and_evaluate(config, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


# Before training ----------------------------------------------------------------------------------


def test_plan_programs_and_parameters_are_those_of_all_stages(data, tmp_path):
    config = short(data, precision_schedule=SCHEDULE[:1])
    run = one_device(config)
    made = dry_run.make_plan(run)
    delayed = run.stages[1]
    compiled, _ = programs.compile_programs(run, delayed, ["seed_step", "step"])
    size = max(map(xla.program_bytes, compiled.values()))
    assert made.later == ((3, "mlp", size),) and made.policy == "bf16"
    assert made.peak_bytes == max(size, made.total_bytes, made.initialize_bytes)
    assert made.backends == {"fp8_delayed": "emulated"}
    line = f"After step 3 policy mlp: {size / 2**30:,.3f} GiB a step."
    assert line in made.text().splitlines()

    names = ["step", "eval_step", "stage2_step", "stage2_seed_step", "stage2_eval_step"]
    files = programs.dump_hlo(run, tmp_path)
    assert [f.name for f in files] == [f"{n}.{k}.txt" for n in names for k in ("stablehlo", "hlo")]
    quantized = ["f8E4M3FN" in file.read_text() for file in files[::2]]
    assert quantized == [False, False, True, True, True]

    header, *lines, _ = parameter_table.parameter_table(run).splitlines()
    assert header.endswith("recipe  after step 3")
    kernel = next(line for line in lines if line.startswith("layers/mlp/up/kernel"))
    assert kernel.split()[-2:] == ["bf16", "fp8_delayed"]
