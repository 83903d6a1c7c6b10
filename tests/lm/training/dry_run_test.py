"""The figures of a dry run against sums by hand, and the flags that look before training."""

import dataclasses
import functools
import json
import math

import jax
import pytest

from configs import base
from fp8jax.lm.corpus import build_corpus
from fp8jax.lm.data.loader import to_devices, train_batches
from fp8jax.lm.training import dry_run, parameter_table, profile, programs, step_memory
from fp8jax.lm.training.build import build
from fp8jax.numerics.policy import POLICIES
from tests.support.commands import command_line
from tests.support.runs import ONE_LINEAR, set_keys
from tests.support.text import write_generated_text

# Two layers of width 32. Cut by fsdp: embedding and head, each 320 x 32; in each layer q, k, v and
# o, each 32 x 32, and gate, up and down, each 32 x 64. Not cut: two norms a layer and the last one.
CUT = 2 * 320 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64)
WHOLE = (2 * 2 + 1) * 32
COUNTERS = 4 + 4  # int32: Adam's and the schedule's
HISTORIES = 2 * 7 * 3 * 16 * 4  # layers, linears, operands, steps, bytes
SIZES = dict(d_model=32, n_layers=2, n_heads=2, n_kv_heads=2, d_ff=64, head_dim=16)
SCANNED = {"unroll": 1}


def tiny(**changes):
    config = base.get_config()
    config.model_overrides.update(SIZES)
    config.unroll = 2  # compiles in half the time of a loop
    sizes = dict(batch_size=16, seq_len=64, num_steps=20, optimizer__warmup_steps=5)
    return set_keys(config, **sizes | changes)


def one_layer(**changes):
    """For tests that add nothing up."""
    config = tiny(unroll=1, **changes)
    config.model_overrides.n_layers = 1
    return config


@functools.cache
def planned(devices, **changes):
    """(plan, run) on that many devices, along fsdp."""
    config = tiny(mesh="fsdp", **changes)
    run = build(config, jax.devices()[:devices])
    return dry_run.make_plan(run), run


@pytest.mark.parametrize(("devices", "precision"), [(1, "bf16"), (8, "fp8_delayed")])
def test_figures_are_the_sums_by_hand(devices, precision):
    # Scanned layers, and unrolled ones.
    made, _ = planned(devices, precision=precision, **SCANNED if precision == "bf16" else {})
    histories = HISTORIES if precision == "fp8_delayed" else 0
    assert made.parameters == CUT + WHOLE
    assert made.weights_bytes == made.gradients_bytes == 4 * (CUT // devices + WHOLE)
    assert made.optimizer_bytes == 2 * made.weights_bytes + COUNTERS
    assert made.histories_bytes == histories
    assert made.batch_bytes == 5 * 4 * 16 * 64 // devices
    # Weights and two moments whole; besides the counters the int32 step and a key of 8 bytes.
    assert made.checkpoint_bytes == 12 * (CUT + WHOLE) + COUNTERS + histories + 4 + 8
    assert made.mesh == {"data": 1, "fsdp": devices, "tensor": 1}
    assert (made.devices, made.device_kind, made.capacity_bytes) == (devices, "cpu", None)
    assert made.backends == ({"fp8_delayed": "emulated"} if histories else {})
    # The state itself, rounded up to whole blocks, is what making it leaves.
    state = made.weights_bytes + made.optimizer_bytes + histories
    assert state < made.initialize_bytes < made.peak_bytes == made.total_bytes
    assert json.loads(json.dumps(dataclasses.asdict(made)))["mesh"] == made.mesh
    # 6 a weight of a product, embedding and norms aside, and 6 * 64 * 32 a layer for attention.
    flops = 6 * (CUT - 320 * 32) + 2 * 6 * 64 * 32
    assert (made.flops_per_token, made.tokens_per_step) == (flops, 16 * 64)
    assert (made.tokens, made.flops) == (20 * 16 * 64, 20 * 16 * 64 * flops)


def test_lines_add_up_to_what_the_larger_program_allocates():
    made, run = planned(8, precision="fp8_delayed")
    assert made.activations_bytes > 0
    assert made.total_bytes == sum(size for _, size in made._memory())
    # Results take the arguments' place, but for three scalars of metrics.
    memories = [
        programs.lower_program(run, run.stages[0], name).compile().memory_analysis()
        for name in ("seed_step", "step")
    ]
    totals = [m.argument_size_in_bytes + m.temp_size_in_bytes for m in memories]
    assert max(totals) <= made.total_bytes <= max(totals) + 1024
    assert made.first_step_bytes == pytest.approx(totals[0], abs=1024)


def test_accumulation_saves_work_space_and_not_gradients():
    whole, _ = planned(1, precision="bf16", **SCANNED)
    parts, _ = planned(1, precision="bf16", grad_accum=8, **SCANNED)
    assert parts.gradients_bytes == whole.gradients_bytes
    assert 0 <= parts.activations_bytes < whole.activations_bytes / 2


def test_gradients_are_float32_and_weights_as_the_config_stores_them():
    state = (
        build(tiny(mesh="fsdp", optimizer__master_weights="bfloat16"), jax.devices()[:8])
        .stages[0]
        .state
    )
    assert programs.device_bytes(state.params) == 2 * (CUT // 8 + WHOLE)
    assert step_memory.gradient_bytes(state.params) == 4 * (CUT // 8 + WHOLE)
    assert programs.device_bytes(state.opt_state) == 8 * (CUT // 8 + WHOLE) + COUNTERS


def test_nothing_is_allocated():
    config = one_layer(telemetry__every=5)
    run = build(config, jax.devices()[:1])
    before = sum(array.nbytes for array in jax.live_arrays())
    made = dry_run.make_plan(run)
    assert made.weights_bytes < made.telemetry_bytes <= made.peak_bytes
    assert f"{made.telemetry_bytes / 2**30:,.3f} GiB." in made.text()
    parameter_table.parameter_table(run)
    # Tracing makes a few keys of eight bytes.
    assert sum(array.nbytes for array in jax.live_arrays()) <= before + 64


def test_programs_are_those_that_training_runs(tmp_path):
    """Same program for a real state and batch, which the compilation cache then has."""
    config = one_layer(precision="fp8_delayed", data=write_generated_text(tmp_path))
    run = build(config)
    corpus = build_corpus(
        config.data, run.tokenizer, seq_len=64, valid_fraction=0.05, cache_dir=str(tmp_path)
    )
    batches = train_batches(corpus.train, seed=0, batch_size=16)
    batch = to_devices(next(batches), run.batch_sharding)
    batches.close()
    assert jax.tree.map(jax.typeof, batch) == jax.tree.map(
        jax.typeof, programs.abstract_batch(run, 16)
    )
    compiled = run.stages[0].programs
    with jax.set_mesh(run.mesh):
        state = compiled.initialize()
        real = compiled.step.lower(state, batch, compiled.numbers(state)).as_text()
    assert programs.lower_program(run, run.stages[0], "step").as_text() == real


def test_report_says_what_limits():
    made, run = planned(8, precision="fp8_delayed")
    said = made.text()
    assert "first step seeds the histories" in said and "This is a CPU" in said
    assert "fit" not in said and "add up to more" not in said
    small = dataclasses.replace(
        made,
        capacity_bytes=made.total_bytes // 2,
        device_kind="NVIDIA H200",
        backends={},
        first_step_bytes=None,
        activations_bytes=0,
        gradients_bytes=made.total_bytes,
    ).text()
    assert "It does not fit: 200% of the" in small and "add up to more than the total" in small
    assert "any: nothing is quantized" in small
    assert "seeds" not in small and "This is a CPU" not in small
    fits = dataclasses.replace(made, capacity_bytes=4 * made.total_bytes).text()
    assert "It fits: 25% of the" in fits
    more = dataclasses.replace(
        made, initialize_bytes=5 * made.total_bytes, capacity_bytes=4 * made.total_bytes
    ).text()
    assert "Making the state of step 0 takes more" in more and "It does not fit: 125% of" in more
    assert max(map(len, said.splitlines())) <= 100


def test_dump_hlo_writes_every_program(tmp_path, monkeypatch):
    monkeypatch.setitem(POLICIES, "one_linear", ONE_LINEAR)
    run = build(one_layer(precision="one_linear"), jax.devices()[:1])
    names = ["step", "seed_step", "eval_step"]
    files = programs.dump_hlo(run, tmp_path / "new" / "hlo")
    kinds = ("stablehlo", "hlo")
    assert [file.name for file in files] == [f"{n}.{kind}.txt" for n in names for kind in kinds]
    assert sorted(files) == sorted((tmp_path / "new" / "hlo").iterdir())
    asked, made = ((tmp_path / f"new/hlo/step.{kind}.txt").read_text() for kind in kinds)
    assert "stablehlo.dot_general" in asked and "f8E4M3FN" in asked
    assert made.startswith("HloModule") and "f8e4m3fn" in made
    assert programs.training_programs(build(tiny()).stages[0]) == ["step"]


@pytest.mark.parametrize("model", ["llama_tiny", "gpt2_tiny", "qwen2_tiny", "qwen3_tiny"])
def test_table_has_every_parameter_once(model):
    run = build(tiny(model=model, precision="fp4_mixed"))
    header, *lines, total = parameter_table.parameter_table(run).splitlines()
    leaves = jax.tree_util.tree_leaves_with_path(run.stages[0].state.params)
    assert header.split()[0] == "parameter" and len(lines) == len(leaves)
    for (path, leaf), line in zip(leaves, lines, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        cells = line.split()
        assert cells[:3] == [name, "x".join(map(str, leaf.shape)), "float32"]
        assert str(leaf.sharding.spec) in line
        assert cells[-2] == f"{4 * math.prod(leaf.shape):,}"  # copies along the data axis
        wanted = "-"
        if name.endswith("kernel"):
            attention = {"attention": "fp8_block", "mlp": "fp4_block"}
            wanted = "bf16" if name == "lm_head/kernel" else attention[name.split("/")[1]]
        elif name == "embedding" and run.stages[0].model.config.tie_embeddings:
            wanted = "bf16"  # it is the head's matrix
        assert cells[-1] == wanted, line
    assert total.split() == ["total", f"{programs.device_bytes(run.stages[0].state.params):,}"]


def test_table_shows_shards_and_exempt_layers():
    run = build(tiny(mesh="fsdp"))
    lines = parameter_table.parameter_table(run).splitlines()
    key = next(line for line in lines if line.startswith("layers/attention/k/kernel"))
    assert key.split(maxsplit=3)[3].rsplit(maxsplit=2) == [
        "P(None, 'fsdp', 'tensor')",
        "1,024",
        "bf16",
    ]
    policy = dataclasses.replace(run.stages[0].model.policy, bf16_first=1, bf16_last=1)
    stage = dataclasses.replace(run.stages[0], model=run.stages[0].model.clone(policy=policy))
    exempt = dataclasses.replace(run, stages=(stage,))
    assert parameter_table.parameter_table(exempt).splitlines()[-1] == (
        "Of the 2 stacked layers, the first 1 and the last 1 run in bf16, whatever their recipe."
    )


def test_profile_is_two_steps():
    assert profile.parse_profile("5:8") == (5, 8) and profile.parse_profile("3:3") == (3, 3)
    for text in ("5", "7:3", "0:2", "a:b", "", "1:", ":2", "1:2:3", "-1:2", " 1:2", "1.0:2"):
        with pytest.raises(ValueError, match=f"^profile='{text}': give the first and last step"):
            profile.parse_profile(text)


# The command line ---------------------------------------------------------------------------------


def test_dry_run_prints_the_figures_and_makes_no_workdir(tmp_path):
    overrides = [f"--config.model_overrides.{key}={value}" for key, value in SIZES.items()]
    code, said = command_line(
        "--dry_run",
        "--show_params",
        f"--workdir={tmp_path}/run",
        "--config.mesh=fsdp",
        "--config.batch_size=16",
        "--config.seq_len=64",
        "--config.num_steps=20",
        "--config.optimizer.warmup_steps=5",
        "--config.unroll=2",
        *overrides,
    )
    assert code == 0, said
    made, run = planned(8, precision="fp8_delayed")
    assert "num_steps: 20\n" in said and parameter_table.parameter_table(run) in said
    for label, size in [*made._memory(), ("total", made.total_bytes)]:
        assert dry_run._memory_line(label, size) in said.splitlines()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dry_run", "--dump_hlo"], "--workdir must have a value, except for --dry_run without"),
        (["--dry_run", "--profile=2:3"], "--profile=2:3 traces training, but --dry_run trains"),
        (["--workdir={}", "--profile=7:3"], "profile='7:3': give the first and last step as A:B"),
        (["--dry_run", "--config.data=nowhere"], "unknown source 'nowhere'"),
    ],
)
def test_flags_that_cannot_be_honored_are_one_line(arguments, message, tmp_path):
    code, said = command_line(*(argument.format(tmp_path / "run") for argument in arguments))
    assert code != 0 and "Traceback" not in said
    assert said.splitlines()[-1].startswith(f"error: {message}")
    assert not (tmp_path / "run").exists()
