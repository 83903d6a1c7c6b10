"""The study of parity: what it runs, how it survives, and what it detects, on made-up ledgers."""

import dataclasses
import hashlib
import itertools
import json
import os
import re
import sys
import time

import numpy as np
import pytest

from configs import base, study
from experiments.study import (
    cast_effects,
    corpus,
    endings,
    parity_analysis,
    parity_ledger,
    parity_parts,
    parity_plan,
)
from experiments.study import parity_runner as runner
from experiments.study.parity_parts import SCORE, TRAIN, Part
from experiments.study.parity_plan import ARMS, BASELINE, FORKS, NULL, PLANS, Arm, Chain
from fp8jax.lm.model.models import model_config
from fp8jax.lm.records.config_keys import by_path
from fp8jax.numerics.names import as_policy
from fp8jax.numerics.policy import POLICIES
from tests.support import ROOT
from tests.support.old_configs import without_groups

# The plan -----------------------------------------------------------------------------------------


def test_forks_begin_at_the_trunk_s_checkpoints_and_decay_over_an_eighth():
    config = study.get_config()
    assert config.batch_size * config.seq_len == parity_plan.STEP_TOKENS
    for fork in FORKS:
        assert fork.begin % config.checkpoint.every == 0
        assert fork.begin == 7 * fork.steps  # an eighth of both
    assert FORKS[-1].begin == config.num_steps and config.optimizer.decay_fraction == 0
    assert [round(fork.tokens / 1e6) for fork in FORKS] == [75, 151, 302, 604]


@pytest.mark.parametrize(
    "size, tiles, millions", [("llama_60m", (4, 11), 58.5), ("llama_125m", (6, 16), 134.1)]
)
def test_no_tile_of_the_model_is_ragged_or_the_whole(size, tiles, millions):
    config = study.get_config(size)
    model = model_config(config.model, {k: v for k, v in config.model_overrides.items() if v})
    widths = model.d_model, model.d_ff, model.vocab_size
    assert widths == (tiles[0] * 128, tiles[1] * 128, 250 * 128)
    layer = 4 * model.d_model**2 + 3 * model.d_model * model.d_ff + 2 * model.d_model
    tables = 2 * model.vocab_size * model.d_model
    assert round((model.n_layers * layer + tables + model.d_model) / 1e6, 1) == millions


def test_a_plan_of_another_size_is_another_setting(tmp_path):
    plan = PLANS["larger"]
    assert [arm.name for arm in plan.arms] == [BASELINE, "fp8_delayed", "fp4_mixed"]
    assert plan.setting() != PLANS["headline"].setting() == parity_plan.setting()
    for name, size in (("larger", "llama_125m"), ("headline", "llama_60m")):
        chain = PLANS[name].chains()[0]
        trunk, decay, _ = parity_parts.parts(chain, FORKS[0], tmp_path, tmp_path / "corpus")
        for part in (trunk, decay):
            assert f"--config=configs/study.py:{size}" in part.command


def test_arms_can_be_honored_and_each_seed_has_its_baseline_first():
    keys = base.get_config()
    for arm in ARMS.values():
        assert as_policy(arm.precision).name == arm.precision
        assert {change.partition("=")[0] for change in arm.changes} <= by_path(keys).keys()
    for plan in (PLANS["screen"], PLANS["headline"]):
        chains = plan.chains()
        assert len({chain.name for chain in chains}) == len(chains)
        for _, own in itertools.groupby(chains, key=lambda chain: chain.seed):
            names = [chain.arm.name for chain in own]
            assert names[0] == BASELINE and NULL in names
    controls = {name for name, arm in ARMS.items() if arm.control}
    assert {arm.name for arm in PLANS["controls"].arms} == {"fp4_naive", "stale_scale"}
    assert controls == {"fp4_naive", "stale_scale", "bf16_then_fp4_naive"}
    assert set(PLANS["controls"].seeds) < set(PLANS["headline"].seeds)
    assert set(PLANS["rate"].seeds).isdisjoint(PLANS["headline"].seeds)


def test_a_part_of_a_plan_has_these_arms_and_seeds_and_no_unknown_one():
    plan = PLANS["headline"]
    part = plan.chains(["fp8_block", "bf16"], [11, 12])  # a baseline comes first all the same
    names = ["bf16-seed11", "fp8_block-seed11", "bf16-seed12", "fp8_block-seed12"]
    assert [chain.name for chain in part] == names
    assert len(plan.chains()) == len(plan.arms) * len(plan.seeds)
    with pytest.raises(ValueError, match="'fp8_blok'.*fp8_block"):
        plan.chains(["fp8_blok"])
    with pytest.raises(ValueError, match="without seeds"):
        plan.chains(seeds=[])


def test_commands_of_a_fork(tmp_path):
    chain = Chain(ARMS[NULL], 3, FORKS)
    folder = tmp_path / chain.folder
    trunk, decay, score = parity_parts.parts(chain, FORKS[1], folder, tmp_path / "corpus")
    assert (trunk.name, decay.name, score.name) == ("trunk_2016", "decay_150M", "score_150M")
    for part in (trunk, decay):
        assert {"--config.seed=3", "--config.attention=xla", "--config.unroll=1"} < set(
            part.command
        )
    assert "--config.num_steps=2016" in trunk.command
    assert f"--config.initial_state={folder}/trunk@2016" in decay.command
    assert {"--config.optimizer.schedule=decay", "--config.num_steps=288"} < set(decay.command)
    assert {f"--workdir={decay.output}", "--step=288"} < set(score.command)
    assert decay.text().startswith(
        "XLA_FLAGS=--xla_gpu_autotune_level=0 python -m experiments.train"
    )


def test_a_branch_decays_from_the_trunk_of_another_arm(tmp_path):
    plan = PLANS["branches"]
    whole = {each.arm.name: each for each in plan.chains(seeds=[7])}
    fork, branch = plan.forks[-1], whole[f"bf16_then_{NULL}"]
    parts = [
        parity_parts.parts(each, fork, tmp_path / each.folder, tmp_path / "corpus")
        for each in (whole[BASELINE], branch)
    ]
    assert parts[0][0] == parts[1][0] and "--config.checkpoint.keep=8" in parts[0][0].command
    trunk, decay, _ = parts[1]
    assert f"--config.initial_state={trunk.output}@4032" in decay.command
    assert {"--config.attention=xla", "--config.precision=bf16"} < set(decay.command)
    assert (trunk.environment, decay.environment) == ({}, dict(branch.arm.environment))
    assert trunk.mark != decay.mark and whole[BASELINE].shared
    assert plan.chains([BASELINE], [7]) == [whole[BASELINE]]  # others may want its trunk later


def test_weights_of_bf16_are_scored_in_the_precisions_that_a_plan_reads(tmp_path):
    plan = PLANS["branches_long"]
    assert [fork.tokens // 10**6 for fork in plan.forks] == [75, 537, 603]
    assert [fork.steps for fork in plan.forks] == [144, 144, 1152]
    assert plan.forks[1].begin == plan.forks[2].begin  # of one trunk
    assert {f"bf16_then_{name}" for name in plan.read} < {arm.name for arm in plan.arms}
    for chain in plan.chains(seeds=[210]):
        *_, score = parity_parts.parts(chain, plan.forks[0], tmp_path, tmp_path / "corpus")
        own = [flag for flag in score.command if flag.startswith("--precision=")]
        read = ["--precision=fp8_delayed,fp8_block,nvfp4,fp4_mixed"]
        assert own == (read if chain.arm.name == BASELINE else []), chain.name


def test_scores_by_hand(tmp_path):
    def number(precision, nats):
        return {
            "of": "jsonl-heldout",
            "measured": "perplexity",
            "precision": precision,
            "items": nats,
            "weights": [10] * 64,
        }

    numbers = [number("bf16", [20] * 64), number("nvfp4", [20, 22] * 32)]
    (path := tmp_path / "scores.json").write_text(json.dumps({"numbers": numbers}))
    scores = parity_parts.read_scores(path, "nvfp4")
    assert (scores["loss"], scores["loss_bf16"], scores["scored"]) == (2.1, 2.0, 640)
    assert scores["read"] == {}
    assert parity_parts.read_scores(path, "bf16")["read"] == {"nvfp4": 2.1}
    assert scores["blocks"] == [2.1] * 32
    assert scores["rows"] == parity_parts.read_scores(path, "bf16")["rows"]
    with pytest.raises(ValueError, match="no scores in fp8_block"):
        parity_parts.read_scores(path, "fp8_block")


# The runner, with programs that train nothing -----------------------------------------------------

FACTS = {"setting": "s", "data": "d", "commit": "c", "code": "x", "versions": {}}
SCORES = {
    "numbers": [{"measured": "perplexity", "precision": "bf16", "items": [30.0], "weights": [10]}]
}

# Notes its name and GPU; waits until so many notes are there; ends with a status.
PROGRAM = """
import os, sys, time
name, notes, awaited, output, text, status = sys.argv[1:]
with open(notes, "a") as file:
    file.write(name + " " + os.environ["CUDA_VISIBLE_DEVICES"] + "\\n")
while len(open(notes).readlines()) < int(awaited):
    time.sleep(0.02)
if text:
    os.makedirs(os.path.dirname(output), exist_ok=True)
    open(output, "w").write(text)
sys.exit(int(status))
"""


class Stub:
    """Programs that only note that they ran; those of `awaited` wait for so many notes."""

    def __init__(self, folder, awaited=None, failing=None):
        self.notes = folder / "notes"
        self.awaited, self.failing = awaited or {}, failing or {}

    def parts(self, chain, fork, folder):
        trunk = folder.parent / chain.trunk.folder / "trunk"
        return [
            self.part(chain.trunk, f"trunk_{fork.begin}", TRAIN, trunk),
            self.part(chain, f"decay_{fork.name}", TRAIN, folder / f"decay_{fork.name}"),
            self.part(chain, f"score_{fork.name}", SCORE, folder / f"score_{fork.name}.json"),
        ]

    def part(self, chain, name, kind, output):
        full = f"{chain.name}/{name}"
        awaited = self.awaited[full] if full in self.awaited else 0
        status, file, text = 0, output, json.dumps(SCORES) if kind == SCORE else ""
        if full in self.failing:
            status, file, text = 1, output / "events.jsonl", self.failing[full]
        arguments = (full, self.notes, awaited, file, text, status)
        command = (sys.executable, "-IS", "-c", PROGRAM, *map(str, arguments))
        return Part(
            name=name,
            kind=kind,
            command=command,
            environment={},
            output=output,
            folder=output.parent,
        )

    def ran(self):
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        return [line.rpartition(" ")[0] for line in lines]


@pytest.mark.parametrize(
    ("visible", "indices"),
    [(None, [0, 1, 2]), ("1", [1]), ("2, 0", [2, 0]), ("", None), ("3", None)],
)
def test_gpus_are_those_that_are_listed_and_visible(tmp_path, monkeypatch, visible, indices):
    listing = tmp_path / "nvidia-smi"
    listing.write_text("#!/bin/sh\nprintf '0, NVIDIA H200\\n1, NVIDIA H200\\n2, NVIDIA H200\\n'\n")
    listing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if indices is None:
        with pytest.raises(ValueError, match="unknown GPU of CUDA_VISIBLE_DEVICES"):
            runner.find_gpus()
    else:
        assert runner.find_gpus() == [runner.Gpu(index, "NVIDIA H200") for index in indices]


@pytest.fixture
def launch(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "GRACE", 0.5)

    def launch(stub, chains, *, machine="one", gpus=2, card="H100", budget=60.0, lasts=1e6, each=1):
        given = runner.Run(
            chains=chains,
            parts=stub.parts,
            workdir=tmp_path / machine,
            gpus=[runner.Gpu(index, card) for index in range(gpus)] * each,
            ledger=tmp_path / "ledger.jsonl",
            budget=budget,
            machine=lasts,
            facts=FACTS,
        )
        return [(line.arm, line.seed, line.fork) for line in runner.run(given)]

    return launch


def chain(name, seed=0, forks=FORKS[:1], speed=1e9):
    return Chain(Arm(name=name, precision="bf16", tokens_per_second=speed), seed, forks)


@pytest.mark.parametrize("count", [1, 2])
def test_gpus_run_two_chains_at_once_and_nothing_twice(tmp_path, launch, count):
    # Each trunk waits for the other's note: one after the other, they would wait forever.
    stub = Stub(tmp_path, awaited={"a-seed0/trunk_1008": 2, "b-seed0/trunk_1008": 2})
    done = launch(stub, [chain("a"), chain("b")], gpus=count, each=2 // count)
    assert sorted(done) == [("a", 0, "75M"), ("b", 0, "75M")]
    gpus = {line.split()[1] for line in stub.notes.read_text().splitlines()}
    assert gpus == set("01"[:count]) and len(stub.ran()) == 6
    line, _ = parity_ledger.read(tmp_path / "ledger.jsonl")
    assert (line.loss, line.card, line.tokens) == (3.0, "H100", FORKS[0].tokens)
    assert 0 <= line.seconds < 60 and len(line.commands) == 3
    assert sorted(launch(stub, [chain("a"), chain("b")], machine="two")) == sorted(done)
    assert len(stub.ran()) == 6  # finished: on another machine, too
    assert not (tmp_path / "one" / "a-seed0").exists()  # its checkpoints have been removed


def test_a_chain_goes_on_where_the_budget_ended_and_begins_anew_elsewhere(tmp_path, launch):
    stub = Stub(tmp_path, awaited={"a-seed0/decay_150M": 99})
    assert launch(stub, [chain("a")], gpus=1) == [("a", 0, "75M")]
    began, a = time.monotonic(), chain("a", forks=FORKS[:2])
    assert launch(stub, [a], gpus=1, budget=3.5) == [("a", 0, "75M")]
    assert time.monotonic() - began < 15
    assert stub.ran()[3:] == ["a-seed0/trunk_2016", "a-seed0/decay_150M"]

    # Another machine has the ledger and nothing else: the trunk of the fork that is missing again.
    (elsewhere := tmp_path / "elsewhere").mkdir()
    other, whole = Stub(elsewhere), [("a", 0, "75M"), ("a", 0, "150M")]
    assert launch(other, [a], machine="two", gpus=1) == whole
    again = ["trunk_2016", "decay_150M", "score_150M"]
    assert other.ran() == [f"a-seed0/{name}" for name in again]

    # The same machine goes on, with a committed ledger that knows nothing of it.
    (tmp_path / "ledger.jsonl").unlink()
    (here := tmp_path / "here").mkdir()
    same = Stub(here)
    assert launch(same, [a], gpus=1, lasts=1.0) == whole  # begun, so that it need not fit
    assert same.ran() == ["a-seed0/decay_150M", "a-seed0/score_150M"]


def test_a_trunk_that_chains_share_is_trained_once_and_stays(tmp_path, launch):
    """Three threads want it at once; what goes on with it waits."""
    stub, (bf16,) = Stub(tmp_path), (chain("bf16", forks=FORKS[:2]),)
    arms = [Arm(name=name, precision="bf16", trunk=bf16.arm) for name in ("a", "b")]
    chains = [dataclasses.replace(bf16, shared=True)]
    chains += [dataclasses.replace(bf16, arm=arm) for arm in arms]
    assert len(launch(stub, chains, gpus=1, each=3)) == 6
    ran = stub.ran()
    assert sorted(name for name in ran if "trunk" in name) == [
        "bf16-seed0/trunk_1008",
        "bf16-seed0/trunk_2016",
    ]
    assert len(ran) == 2 + 2 * 2 * 3 and ran[0] == "bf16-seed0/trunk_1008"
    assert len({line.trunk for line in parity_ledger.read(tmp_path / "ledger.jsonl")}) == 1
    assert [path.name for path in (tmp_path / "one").glob("*-seed0")] == ["bf16-seed0"]


def test_no_thread_waits_for_a_trunk_while_another_chain_could_run(tmp_path, launch):
    """Trunks wait for the notes of what is to run beside them, and for ever where it does not."""
    awaited = {"bf16-seed0/trunk_1008": 2, "bf16-seed1/trunk_1008": 2}
    bf16, forks = Arm(name="bf16", precision="bf16", tokens_per_second=1e9), FORKS[:2]
    a, b = (dataclasses.replace(bf16, name=name, trunk=bf16) for name in "ab")
    plan = parity_plan.Plan(arms=(bf16, a), seeds=(0, 1), forks=FORKS[:1])
    (seeds := tmp_path / "seeds").mkdir()
    stub = Stub(seeds, awaited=awaited)
    assert len(launch(stub, plan.chains(), machine="two")) == 4 and len(stub.ran()) == 2 + 4 * 2
    (tmp_path / "ledger.jsonl").unlink()

    # After three programs of bf16 and two each of a and b, whose first forks need no more trunk.
    stub = Stub(tmp_path, awaited={"bf16-seed0/trunk_2016": 8})
    plan = dataclasses.replace(plan, arms=(bf16, a, b), seeds=(0,), forks=forks)
    assert len(launch(stub, plan.chains())) == 6
    assert len(stub.ran()) == 2 + 3 * 2 * 2 and stub.ran().count("bf16-seed0/trunk_2016") == 1


def test_only_what_fits_the_machine_begins(tmp_path, launch):
    stub = Stub(tmp_path)
    steps = FORKS[0].begin + FORKS[0].steps
    seconds = 100 + runner.PROGRAMS * runner.START
    slow = chain("slow", speed=steps * parity_plan.STEP_TOKENS / 100)
    assert launch(stub, [slow, chain("fast")], gpus=1, lasts=seconds) == [("fast", 0, "75M")]
    assert len(launch(stub, [slow], gpus=1, lasts=seconds + 30)) == 2


def test_speed_of_the_ledger_replaces_the_guess(tmp_path, launch):
    stub, a = Stub(tmp_path), chain("a", speed=1.0)  # by the guess, weeks
    assert launch(stub, [a], gpus=1) == []
    line = dataclasses.replace(made("a", 7, 3.0), tokens=FORKS[0].tokens, seconds=10.0)
    parity_ledger.write(tmp_path / "ledger.jsonl", [line])
    assert launch(stub, [a], gpus=1, lasts=500.0)[1:] == [("a", 0, "75M")]


def test_a_seed_stays_on_one_kind_of_card(tmp_path, launch):
    stub, chains = Stub(tmp_path), [chain("bf16"), chain("a"), chain("a", seed=1)]
    launch(stub, chains[:1], card="H100")
    done = launch(stub, chains, card="H200", machine="two")
    assert done == [("bf16", 0, "75M"), ("a", 1, "75M")]
    assert ("a", 0, "75M") in launch(stub, chains, card="H100", machine="three")


def test_a_loss_that_is_not_finite_is_a_result_and_a_failure_is_none(tmp_path, launch):
    stop = json.dumps({"kind": "stop", "cause": "non_finite", "step": 40, "time": 0.0}) + "\n"
    failing = {"a-seed0/trunk_1008": stop, "b-seed0/trunk_1008": ""}
    stub = Stub(tmp_path, failing=failing)
    with pytest.raises(ChildProcessError, match="b-seed0: trunk_1008 failed"):
        launch(stub, [chain("b"), chain("a"), chain("c")], gpus=1)
    lines = {line.arm: line for line in parity_ledger.read(tmp_path / "ledger.jsonl")}
    assert lines.keys() == {"a", "c"} and lines["c"].stopped == ""
    assert (lines["a"].loss, lines["a"].stopped) == (None, "trunk: not finite after step 40")


# The analysis -------------------------------------------------------------------------------------


def made(arm, seed, loss, fork="75M", **fields):
    return parity_ledger.Line(
        **dict(
            arm=arm,
            seed=seed,
            fork=fork,
            tokens=1,
            setting="s",
            data="d",
            card="H100",
            trunk="t",
            commit="c",
            code="x",
            versions={},
            commands=[],
            seconds=1.0,
            loss=loss,
            rows="r",
        )
        | fields
    )


def ledger(rng, shifts, seeds=5, scatter=0.1):
    """A study of made-up losses: percent above BF16's by arm, with a scatter between seeds."""
    lines = []
    for seed in range(seeds):
        loss = 3 + 0.03 * rng.standard_normal()  # seeds differ by 1%, which pairs take out
        lines.append(made(BASELINE, seed, loss))
        for arm, shift in shifts.items():
            percent = shift + scatter * rng.standard_normal()
            lines.append(made(arm, seed, loss * (1 + percent / 100)))
    return lines


def judged(lines):
    return {verdict.arm: verdict for verdict in parity_analysis.verdicts(lines)}


def test_what_is_shifted_is_detected_and_the_null_is_not():
    shifts = {NULL: 0.0, "fp8_block": 0.0, "nvfp4": 1.0, "fp4_naive": 3.0, "stale_scale": 0.5}
    found = judged(ledger(np.random.default_rng(0), shifts))
    differing = {name for name, verdict in found.items() if verdict.differs}
    assert differing == {"nvfp4", "fp4_naive", "stale_scale"}
    assert found[NULL].equivalent and found[NULL].text() == "within 0.2%"
    assert found["fp4_naive"].text() == "worse"
    assert parity_analysis.control_failures(list(found.values())) == []


def test_a_study_that_detects_no_control_says_so():
    found = judged(ledger(np.random.default_rng(1), {"fp4_naive": 0.0, "stale_scale": 3.0}))
    (failure,) = parity_analysis.control_failures(list(found.values()))
    assert failure.startswith("fp4_naive does not differ")


def test_one_null_in_twenty_differs_by_chance():
    rng = np.random.default_rng(2)
    studies = 400
    differing = sum(judged(ledger(rng, {NULL: 0.0}))[NULL].differs for _ in range(studies))
    deviation = (0.05 * 0.95 / studies) ** 0.5
    assert abs(differing / studies - 0.05) < 4 * deviation


def test_gaps_by_hand():
    lines = [made(BASELINE, 0, 2.0), made(BASELINE, 1, 4.0), made(BASELINE, 2, 4.0)]
    lines += [made("fp8_block", 0, 2.02), made("fp8_block", 1, 4.12), made("nvfp4", 1, 4.04)]
    lines += [made("nvfp4", 0, None, stopped="trunk: not finite after step 40", rows="")]
    lines += [made("mxfp4", 1, 4.04), made("fp8_block", 5, 9.9)]  # no pair of seed 5
    found = judged(lines)
    assert found["fp8_block"].gaps == pytest.approx({0: 1.0, 1: 3.0})
    assert found["fp8_block"].text() == "not decided"  # 2 ± 12.706
    assert found["fp8_block"].interval.half_width == pytest.approx(12.706, abs=1e-3)
    assert found["nvfp4"].differs and found["nvfp4"].text() == "not finite in 1 of 2"
    assert found["mxfp4"].text() == "one seed" and not found["mxfp4"].differs
    numbers = parity_analysis.numbers(list(found.values()))
    assert numbers["gap/fp8_block"]["value"] == pytest.approx(2.0)
    assert numbers["gap_high/fp8_block"]["value"] == pytest.approx(14.706, abs=1e-3)
    assert numbers["gap_low/mxfp4"]["value"] is None and numbers["seeds/mxfp4"]["value"] == 1
    assert numbers["tokens/fp8_block"]["value"] == FORKS[0].tokens
    assert "| `fp8_block` | 75M | +1.000, +3.000 | +2.000 |" in parity_analysis.table(
        list(found.values())
    )


@pytest.mark.parametrize("field", ["setting", "data", "rows", "card", "code"])
def test_what_was_not_run_alike_is_no_pair(field):
    lines = [made(BASELINE, 0, 2.0), made("fp8_block", 0, 2.0, **{field: "other"})]
    with pytest.raises(ValueError, match=f"fp8_block, seed 0, 75M: {field} is other"):
        parity_analysis.verdicts(lines)


def test_forks_of_two_trunks_are_no_pair_where_arms_share_one():
    lines = [made(BASELINE, 0, 2.0), made("bf16_then_nvfp4", 0, 2.02)]
    assert judged(lines)["bf16_then_nvfp4"].gaps == pytest.approx({0: 1.0})
    lines[1] = made("bf16_then_nvfp4", 0, 2.02, trunk="u")
    with pytest.raises(ValueError, match="bf16_then_nvfp4, seed 0, 75M: trunk is u, and t in bf16"):
        parity_analysis.verdicts(lines)


def test_no_run_of_a_setting_and_text_is_no_table():
    with pytest.raises(ValueError, match="no run of this setting and this text"):
        parity_analysis.verdicts([])


def test_a_margin_that_an_interval_crosses_decides_nothing():
    lines = [made(BASELINE, seed, 1.0) for seed in range(3)]
    lines += [made("fp8_block", s, 1 + g / 100) for s, g in enumerate((0.14, 0.17, 0.15))]
    lines += [made("mxfp8", s, 1 + g / 100) for s, g in enumerate((0.19, 0.05, 0.12))]
    found = judged(lines)
    assert found["fp8_block"].text() == "worse, within 0.2%"  # 0.153 ± 0.038
    assert found["mxfp8"].text() == "not decided"  # 0.12 ± 0.17


def made_endings(recipe, whole, alone, gained):
    """Ledger lines of a recipe and its casts: percent above BF16's, by nine tenths to eleven."""
    gaps = {recipe: whole}
    gaps |= {f"{recipe}:only={cast}": gap for cast, gap in alone.items()}
    gaps |= {f"{recipe}:{cast}=bf16": whole - gain for cast, gain in gained.items()}
    return [
        made(parity_plan.then(name), seed, 2 * (1 + scale * gap / 100))
        for seed, scale in enumerate((0.9, 1.0, 1.1))
        for name, gap in gaps.items()
    ]


def test_costs_of_casts_by_hand():
    lines = [made(BASELINE, seed, 2.0) for seed in range(3)]
    nvfp4 = dict(zip(parity_plan.CASTS_OF["nvfp4"], (0.4, 0.32, 0.16, 0.08, 0.04), strict=True))
    lines += made_endings("nvfp4", 0.8, nvfp4, {cast: gap / 2 for cast, gap in nvfp4.items()})
    naive = dict.fromkeys(parity_plan.CASTS_OF["fp4_naive"], 0.5)
    lines += made_endings("fp4_naive", 4.0, naive, naive)
    table = cast_effects.table(lines)
    # 4.303 standard errors of 0.04 / sqrt(3), and half of that; shares are the same in all seeds
    alone, gained = "+0.40 [+0.30, +0.50] | +50 [+50, +50]", "+0.20 [+0.15, +0.25] | +25 [+25, +25]"
    assert f"| `nvfp4` | `fwd_x` | {alone} | {gained} |" in table
    assert "| `nvfp4` | the sum, less all | +0.20 [+0.15, +0.25] | +25 [+25, +25] |" in table
    assert "| `fp4_naive` | the sum, less all | -1.00 [-1.25, -0.75] | -25 [-25, -25] |" in table
    assert len(table.splitlines()) == 2 + (5 + 1) + (6 + 1)
    # a seed of whole recipes alone, as of --plan=branches_recipes, has no part in it
    lines += [made(BASELINE, 7, 2.0), made(parity_plan.then("nvfp4"), 7, 3.0)]
    assert cast_effects.table(lines) == table


def test_costs_of_casts_need_each_run_of_each_seed():
    lines = [made(BASELINE, seed, 2.0) for seed in range(3)]
    for recipe, casts in parity_plan.CASTS_OF.items():
        lines += made_endings(recipe, 1.0, dict.fromkeys(casts, 0.2), dict.fromkeys(casts, 0.2))
    without = [line for line in lines if line.arm != "bf16_then_nvfp4:only=dgrad_w"]
    with pytest.raises(ValueError, match="bf16_then_nvfp4:only=dgrad_w has no gap"):
        cast_effects.table(without)
    without = [line for line in lines if (line.arm, line.seed) != ("bf16_then_nvfp4:fwd_x=bf16", 1)]
    with pytest.raises(
        ValueError, match=r"fwd_x=bf16 has seeds \[0, 2\], and the whole \[0, 1, 2\]"
    ):
        cast_effects.table(without)


def test_endings_are_ordered_and_named_by_format():
    lines = [made(BASELINE, seed, 2.0) for seed in range(2)]
    losses = {"nvfp4": (2.02, 2.03), "fp8_block": (2.01, 2.0), NULL: (2.0, 2.0)}
    losses |= {"fp8_cscale": (2.2, 2.04), "mxfp8": (2.19, 2.0)}  # 6.0% and 4.75% above
    for name, each in losses.items():
        lines += [made(parity_plan.then(name), seed, loss) for seed, loss in enumerate(each)]
    lines += [made(parity_plan.then("mxfp4"), 0, 2.0), made("fp4_naive", 0, 2.5)]
    found, left_out = endings.by_recipe(parity_analysis.verdicts(lines))
    assert list(found) == ["BF16/the null", "FP8/fp8_block", "FP4/nvfp4", "FP8/mxfp8"]
    assert found["FP4/nvfp4"] == pytest.approx([1.0, 1.5])
    assert left_out == ["bf16_then_mxfp4", "bf16_then_fp8_cscale"]
    with pytest.raises(ValueError, match="no decay from the trunk of bf16"):
        endings.by_recipe(parity_analysis.verdicts([made(BASELINE, 0, 2.0), made("mxfp8", 0, 2.0)]))
    later = [dataclasses.replace(line, fork="150M") for line in lines]
    with pytest.raises(ValueError, match="has the forks 75M, 150M: `parity_curves` draws"):
        endings.by_recipe(parity_analysis.verdicts([*lines, *later]))


def test_plans_of_casts_and_recipes_share_their_trunks():
    casts, recipes = PLANS["branches_casts"], PLANS["branches_recipes"]
    assert casts.forks == recipes.forks and casts.setting() == recipes.setting()
    assert {arm.precision for arm in recipes.arms} == set(POLICIES)
    shared = {arm.name for arm in casts.arms} & {arm.name for arm in recipes.arms}
    assert shared == {BASELINE, "bf16_then_nvfp4", "bf16_then_fp4_naive"}


# The ledger ---------------------------------------------------------------------------------------


def test_ledgers_of_two_machines_become_one(tmp_path):
    a, b = made("bf16", 0, 2.0), made("bf16", 1, 2.5)
    later = dataclasses.replace(a, loss=9.0)
    assert parity_ledger.merged([a], [later, b]) == [a, b]
    path = tmp_path / "new" / "ledger.jsonl"
    assert parity_ledger.read(path) == []
    parity_ledger.write(path, [a, b])
    with path.open("a") as file:
        file.write('{"arm": "half a li')
    assert parity_ledger.read(path) == [a, b]
    path.write_text('{"arm": "bf16"}\n')
    with pytest.raises(ValueError, match="ledger.jsonl:1 is no line of a ledger"):
        parity_ledger.read(path)


# What is committed --------------------------------------------------------------------------------

# Of run 1 and run 2 (docs/results/parity_scatter.md); theirs differ by the name of a folder.
SETTINGS = ("f273a0483ed36634", "dfa4e814d324ced6")
TO_A_TENTH = "2a34c2e27ba6b0d2"  # of repeats_long
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def committed():
    """For each setting, the verdicts of the committed ledger."""
    lines = parity_ledger.read(DOCS / "parity_ledger.jsonl")
    assert {line.setting for line in lines} == {*SETTINGS, TO_A_TENTH, parity_plan.setting()}
    data = corpus.digest_of(DOCS / "parity_corpus.json")
    return {
        setting: parity_analysis.verdicts(parity_ledger.comparable(lines, setting, data))
        for setting in (*SETTINGS, parity_plan.setting())
    }


def test_the_setting_has_the_values_of_the_committed_ledger_s():
    """A key or a default that is renamed in configs/base.py parts the study from what has run."""
    assert parity_plan.setting() == "435862a811efd252"
    config = study.get_config()
    config.optimizer.final_fraction = 0.1  # until the plan of twelve seeds
    assert parity_plan.setting(config) == TO_A_TENTH
    values = without_groups(parity_plan.values(config))
    run_2 = values | {"cache_dir": "~/.cache/fp8jax/lm/data"}  # what parted it from run 1
    for config, setting in zip((values, run_2), SETTINGS, strict=True):
        text = json.dumps(config, sort_keys=True)
        assert hashlib.sha256(text.encode()).hexdigest()[:16] == setting


def test_committed_numbers_are_those_of_the_page_s_command(committed):
    found = committed[parity_plan.setting()]
    numbers = json.loads((DOCS / "parity.json").read_text(encoding="utf-8"))
    assert numbers == parity_analysis.numbers(found)
    page = (DOCS / "parity.md").read_text(encoding="utf-8")
    assert parity_analysis.table(found) in page
    larger = parity_ledger.read(DOCS / "larger_ledger.jsonl")
    setting = parity_plan.PLANS["larger"].setting()
    assert len(larger) == 12 and len({line.code for line in larger}) == 1
    data = corpus.digest_of(DOCS / "parity_corpus.json")
    larger = parity_analysis.verdicts(parity_ledger.comparable(larger, setting, data))
    assert parity_analysis.table(larger) in page
    branches = parity_ledger.read(DOCS / "branches_ledger.jsonl")
    assert len(branches) == 42 and len({(line.code, line.trunk) for line in branches}) == 1
    setting = parity_plan.PLANS["branches"].setting()
    branches = parity_analysis.verdicts(parity_ledger.comparable(branches, setting, data))
    page = (DOCS / "results/branches.md").read_text(encoding="utf-8")
    assert parity_analysis.table(branches) in page
    assert parity_analysis.control_failures(branches) == []
    long = parity_ledger.read(DOCS / "branches_long_ledger.jsonl")
    assert len(long) == 72 and len({line.code for line in long}) == 1
    assert len({(line.seed, line.trunk) for line in long}) == 4  # one host a seed
    long = parity_analysis.verdicts(parity_ledger.comparable(long, setting, data))
    assert parity_analysis.table(long) in page


def test_pages_of_casts_and_recipes_have_the_tables_of_their_ledger():
    lines = parity_ledger.read(DOCS / "branches_75m_ledger.jsonl")
    assert len(lines) == 178 and len({line.code for line in lines}) == 1
    assert len({(line.seed, line.trunk) for line in lines}) == 7  # one host a seed
    data = corpus.digest_of(DOCS / "parity_corpus.json")
    lines = parity_ledger.comparable(lines, PLANS["branches_casts"].setting(), data)
    for name in ("branches_casts", "branches_recipes"):
        page = (DOCS / f"results/{name}.md").read_text(encoding="utf-8")
        assert name == "branches_recipes" or cast_effects.table(lines) in page
        arms = {arm.name for arm in PLANS[name].arms}
        found = parity_analysis.verdicts([line for line in lines if line.arm in arms])
        assert parity_analysis.table(found) in page
        assert parity_analysis.control_failures(found) == []
    drawn = cast_effects.by_cast(lines)
    whole = [verdict for verdict in found if verdict.arm == "bf16_then_nvfp4"]
    assert drawn["nvfp4/all casts"] == list(whole[0].gaps.values())[:3] and len(drawn) == 11 + 13
    recipes, left_out = endings.by_recipe(found)
    assert len(recipes) == 22 + 1 and recipes["FP4/nvfp4"] == list(whole[0].gaps.values())
    cscale = ("fp8_cscale_loss_scale_65536", "fp8_cscale")
    assert left_out == [parity_plan.then(name) for name in cscale]


def test_readme_s_gaps_of_the_study_are_the_committed_ones():
    """Its first table has them in the second column, and the sentence below it the null's."""
    numbers = json.loads((DOCS / "parity.json").read_text(encoding="utf-8"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    cell = r"(\S+)% \[(\S+), (\S+)\]"
    told = re.findall(rf"^\| `(\w+)`[^|]*\| {cell} \|", readme, re.M)
    null = re.search(rf"twelve seeds, where BF16 computed another way is {cell}", readme)
    assert null and len(told) == 4
    for arm, *shown in [*told, (NULL, *null.groups())]:
        exact = [numbers[f"{kind}/{arm}"]["value"] for kind in ("gap", "gap_low", "gap_high")]
        assert shown == [f"{value:+.1f}" for value in exact]
        assert numbers[f"seeds/{arm}"]["value"] == 12


def test_gaps_on_the_page_are_the_ledger_s(committed):
    """The table of the screen: by arm, at 75M tokens in run 1 and 2, then at 151M."""
    page = (DOCS / "results" / "parity_scatter.md").read_text(encoding="utf-8")
    table = page.split("one seed, twice")[1].split("\n\n| ")[1].split("\n\n")[0]
    shown = {}
    for arm, cells in re.findall(r"^\| `(\w+)`[^|]*\|(.*)\|$", table, re.M):
        shown[arm] = [cell.strip() for cell in cells.split("|")][:4]
    gaps = {
        (setting, verdict.arm, verdict.fork): f"{verdict.gaps[0]:+.3f}"
        for setting in SETTINGS
        for verdict in committed[setting]
        if 0 in verdict.gaps
    }
    columns = list(itertools.product(("75M", "150M"), SETTINGS))
    told = {
        (setting, arm, fork): cell
        for arm, cells in shown.items()
        for (fork, setting), cell in zip(columns, cells, strict=True)
        if cell
    }
    assert told == gaps and len(told) == 2 * (7 + 12)
