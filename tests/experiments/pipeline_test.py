"""Pipelines: stages that are run once, whatever kills them; plans, figures, and the command."""

import ast
import concurrent.futures
import dataclasses
import functools
import importlib
import json
import logging
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from configs import pipeline
from experiments.config_keys import PIPELINE_KEYS
from experiments.pipeline import evaluation, figures, plan, stages, training
from experiments.pipeline.chains import read_chains
from experiments.pipeline.stages import Stage, StageError
from fp8jax.lm.chat.chat_tokenizer import write_chat_tokenizer
from fp8jax.lm.cli import charts
from fp8jax.lm.inference.accuracy import paired_difference, share
from fp8jax.lm.inference.paired import measured
from fp8jax.lm.records.jsonl import read_jsonl
from fp8jax.lm.training.faults import Faults
from tests.support import ROOT
from tests.support.commands import run_command, run_here
from tests.support.pages import page_of
from tests.support.text import write_generated_text
from tests.support.traced_programs import traced_once


@pytest.fixture(scope="module", autouse=True)
def traced():
    with traced_once():
        yield


# Stages -------------------------------------------------------------------------------------------


def stage(name, made, *, needs=(), asked=None, fails=False, resumes=False):
    """A stage that writes a file, and says so in the list `made`."""

    def make(folder):
        made.append((name, sorted(path.name for path in folder.iterdir())))
        (folder / "half").write_text("x")
        if fails:
            raise ValueError("no\nluck")
        return {"number": len(made)}

    return Stage(name=name, needs=needs, asked=asked or {}, make=make, resumes=resumes)


def pipeline_here(*given):
    return run_here("pipeline.__main__", *given, keys=PIPELINE_KEYS)


def run(workdir, *whole):
    stages.begin(workdir)
    stages.require_same(workdir, whole)
    stages.run_stages(workdir, whole, whole)


def test_a_failed_stage_is_made_again_and_the_done_ones_are_not(tmp_path):
    made = []
    first = stage("a", made)
    for resumes, left in ((False, []), (True, ["begun.json", "half"])):
        made.clear()
        bad = stage("x/b", made, needs=("a",), fails=True, resumes=resumes)
        with pytest.raises(StageError, match=r"^stage 2 of 2, x/b: no luck\. .* same command goes"):
            run(tmp_path, first, bad)
        assert stages.read_result(tmp_path, "x/b") is None
        good = stage("x/b", made, needs=("a",), resumes=resumes)
        run(tmp_path, first, good)
        assert [name for name, _ in made[-2:]] == ["x/b", "x/b"]
        assert made[-1][1] == left  # what the failed one has left
        count = len(made)
        run(tmp_path, first, good)
        assert len(made) == count and stages.count_done(tmp_path, [first, good]) == 2
        (tmp_path / "x/b/result.json").unlink()
    result = stages.read_result(tmp_path, "a")
    assert result["found"] == {"number": 1} and result["seconds"] >= 0


def test_a_stage_is_never_taken_for_another(tmp_path):
    made = []
    run(tmp_path, stage("a", made, asked={"k": {"n": (1, 2)}}), stage("b", made, needs=("a",)))
    with pytest.raises(ValueError, match=r"a is done with other settings: k\.n: \[1, 2\] -> \[3\]"):
        run(tmp_path, stage("a", made, asked={"k": {"n": (3,)}}))
    with pytest.raises(ValueError, match=f"remove {tmp_path}/a {tmp_path}/b$"):  # b is of this a
        run(tmp_path, stage("a", made), stage("b", made, needs=("a",)))
    again = (tmp_path / "a/result.json").read_text().replace("seconds", "Seconds")
    (tmp_path / "a/result.json").write_text(again)
    given = stage("a", made, asked={"k": {"n": (1, 2)}}), stage("b", made, needs=("a",))
    with pytest.raises(ValueError, match=f"^b was made from another a; .* remove {tmp_path}/b$"):
        run(tmp_path, *given)
    (tmp_path / "a/result.json").unlink()
    with pytest.raises(ValueError, match="^b was made from a, which is missing; take another"):
        run(tmp_path, *given)


def test_a_stage_that_goes_on_is_never_taken_for_another(tmp_path):
    made = []
    first = stage("a", made)
    begun = dict(needs=("a",), fails=True, resumes=True)
    with pytest.raises(StageError):
        run(tmp_path, first, stage("b", made, **begun))
    with pytest.raises(ValueError, match=r"b has begun with other settings: n: \(missing\) -> 3"):
        run(tmp_path, first, stage("b", made, asked={"n": 3}, **begun))
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(ValueError, match="b was made from a, which is missing; take another"):
        run(tmp_path, first, stage("b", made, **begun))
    assert len(made) == 2


def test_an_interrupt_ends_a_stage_that_begins_anew(tmp_path):
    """At once, wherever it comes: a KeyboardInterrupt may be lost in a callback of XLA."""
    source = f"""
import os, pathlib, signal, time
from experiments.pipeline import stages
def make(folder):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    finally:
        print("not at once")
whole = [stages.Stage(name="a", asked={{}}, make=make)]
stages.run_stages(pathlib.Path({str(tmp_path)!r}), whole, whole)
"""
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
    assert stages.read_result(tmp_path, "a") is None


def test_programs_share_the_stages_of_a_pipeline(tmp_path, monkeypatch):
    """Two make `a` and `b` at the same time, then one of them makes `c` while the other waits."""
    monkeypatch.setattr(stages, "_POLL_SECONDS", 0.01)
    both, made = threading.Barrier(2), []

    def make(name, folder):
        if name in "ab":
            both.wait(60)
        made.append(name)
        return {}

    whole = [
        Stage(name=name, needs=needs, asked={}, make=functools.partial(make, name))
        for name, needs in (("a", ()), ("b", ()), ("c", ("a", "b")), ("d", ("c",)))
    ]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for program in [pool.submit(run, tmp_path, *whole) for _ in range(2)]:
            program.result(60)
    assert sorted(made[:2]) == ["a", "b"] and made[2:] == ["c", "d"]
    assert stages.count_done(tmp_path, whole) == 4


def test_a_program_may_start_while_another_marks_the_workdir(tmp_path, monkeypatch):
    listed = Path.iterdir

    def begun_by_another(path):
        monkeypatch.undo()
        run(tmp_path, stage("a", []))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", begun_by_another)
    stages.refuse_other_folder(tmp_path)
    assert stages.read_result(tmp_path, "a") is not None


def test_who_waits_for_a_program_that_fails_makes_its_stage(tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "_POLL_SECONDS", 0.01)
    begun, waiting, made = threading.Event(), threading.Event(), []

    def fail(folder):
        begun.set()
        assert waiting.wait(60)
        raise ValueError("no luck")

    def said(text, *_):
        if text.startswith("waiting for other programs"):
            waiting.set()

    monkeypatch.setattr(stages.logging, "info", said)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(run, tmp_path, Stage(name="a", asked={}, make=fail))
        assert begun.wait(60)
        second = pool.submit(run, tmp_path, stage("a", made))
        with pytest.raises(StageError, match="no luck"):
            first.result(60)
        second.result(60)
    assert [name for name, _ in made] == ["a"]


def test_other_folders_are_left_alone(tmp_path):
    new = tmp_path / "new"
    new.mkdir()
    (new / ".pipeline.json.unfinished").write_text("{")  # of a killed program
    (new / "lock").touch()
    stages.begin(new)
    assert (new / "pipeline.json").exists()
    shutil.rmtree(new)
    (tmp_path / "thesis").mkdir()
    with pytest.raises(ValueError, match="a pipeline: it holds thesis; take another --workdir"):
        stages.begin(tmp_path)
    (tmp_path / "work").mkdir()
    done = pipeline_here("--config=configs/infir2/small.py", f"--workdir={tmp_path}")
    assert done.returncode == 1 and "it holds thesis and 1 more; take" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"thesis", "work"}  # and no lock


# Plans --------------------------------------------------------------------------------------------


def config(**changes):
    """A pipeline's config with some keys changed; dotted ones have two underscores."""
    made = pipeline.get_config()
    made.cpt.model_overrides.vocab_size = 1024
    for key, value in changes.items():
        group, name = made, key
        while "__" in name:
            head, _, name = name.partition("__")
            group = group[head]
        group[name] = value
    return made.lock()


def test_chains_share_what_they_have_in_common(tmp_path):
    made = plan.Plan.from_config(
        config(
            precisions=("fp8_block", "bf16"),
            chains=(("fp8_block", "fp8_block", "fp8_block_ue8m0"), ("fp8_block", "bf16", "bf16")),
            seeds=(0, 3),
        ),
        tmp_path,
    )
    names = [each.name for each in plan.stages(made)]
    assert len(names) == len(set(names))
    mixed, late = "fp8_block+bf16", "fp8_block+fp8_block+fp8_block_ue8m0"
    shared = ["tokenizer", "problems_1", "problems_2"]
    pre = [f"{name}/{s}" for name in ("bf16", "fp8_block") for s in ("cpt", "evaluate_cpt")]
    tuned = [
        f"{name}/seed_{seed}/{each}"
        for seed in (0, 3)
        for name in ("bf16", "fp8_block", mixed)
        for each in ("sft_1", "sft_2", "evaluate")
    ]
    exported = [
        f"{name}/seed_{seed}/{each}"
        for seed in (0, 3)
        for name in ("bf16", "fp8_block", late, f"{mixed}+bf16")
        for each in ("export", "reload")
    ]
    assert names == shared + pre + tuned + exported
    needs = {each.name: each.needs for each in plan.stages(made)}
    assert needs["fp8_block/cpt"] == ("tokenizer",)
    assert needs[f"{mixed}/seed_3/sft_1"] == ("tokenizer", "problems_1", "fp8_block/cpt")
    assert needs[f"{mixed}/seed_3/sft_2"] == ("tokenizer", "problems_2", f"{mixed}/seed_3/sft_1")
    assert needs[f"{late}/seed_0/export"] == ("fp8_block/seed_0/sft_2",)
    assert needs["bf16/seed_0/evaluate"][0] == needs["bf16/seed_0/reload"][0] == "problems_2"
    assert needs["bf16/evaluate_cpt"] == ("bf16/cpt",)  # solves no problems
    for name, needed in needs.items():
        assert all(names.index(each) < names.index(name) for each in needed)


def test_each_seed_may_pre_train_a_model_of_its_own(tmp_path):
    changes = dict(precisions=("bf16", "fp8_block"), seeds=(0, 3), cpt__seed=5)
    made = plan.Plan.from_config(config(pretrain_each_seed=True, **changes), tmp_path)
    staged = {each.name: each for each in plan.stages(made)}
    pre = [name for name in staged if name.endswith("/cpt")]
    assert pre == [f"{name}/seed_{n}/cpt" for n in (0, 3) for name in ("bf16", "fp8_block")]
    assert staged["bf16/seed_3/sft_1"].needs[-1] == "bf16/seed_3/cpt"
    assert staged["bf16/seed_3/evaluate_cpt"].needs == ("bf16/seed_3/cpt",)
    assert [staged[name].asked["seed"] for name in pre] == [5, 5, 8, 8]
    # The first is the model that all seeds share otherwise.
    alone = plan.Plan.from_config(config(**changes), tmp_path)
    (shared,) = [each for each in plan.stages(alone) if each.name == "bf16/cpt"]
    assert shared.asked == staged["bf16/seed_0/cpt"].asked


def test_fine_tuning_from_a_shared_model_is_not_that_from_a_model_of_its_own(tmp_path):
    """The folders of fine-tuning are the same, and so is what they are asked."""

    def made(each: bool):
        whole = plan.stages(plan.Plan.from_config(config(pretrain_each_seed=each), tmp_path))
        return [dataclasses.replace(stage, make=lambda folder: {}) for stage in whole]

    stages.run_stages(tmp_path, made(False), made(False))
    stages.require_same(tmp_path, made(False))
    with pytest.raises(ValueError, match="bf16/seed_0/sft_1 was not made from bf16/seed_0/cpt;"):
        stages.require_same(tmp_path, made(True))


def test_fine_tuning_has_the_model_and_tokenizer_of_pre_training(tmp_path):
    made = plan.Plan.from_config(config(cpt__model="qwen2_tiny"), tmp_path)
    own = made.training_config("sft_2", "fp8_block", 7, "before")
    assert (own.precision, own.seed, own.initial_weights) == ("fp8_block", 7, "before")
    assert own.model == "qwen2_tiny" and own.model_overrides.vocab_size == 1024
    assert own.tokenizer == f"bpe:{tmp_path}/tokenizer/tokenizer.json"
    assert own.data == f"chat:{tmp_path}/problems_2/train.jsonl"


BAD = [
    (dict(seeds=(1, 1)), r"seeds=\(1, 1\) must be one or more different"),
    (dict(seeds=()), "seeds"),
    (dict(seeds=(0, -1)), r"seeds=\(0, -1\) must be at least 0"),
    (dict(precisions=("bf16", 8)), "name policies, and 8 is no name"),
    (dict(precisions=("bf16", "fp8_blok")), "unknown policy 'fp8_blok'; did you mean"),
    (dict(precisions=("bf16", "nvfp4")), "unknown precision with an export format 'nvfp4'"),
    (dict(precisions=("fp8_block",)), "precisions lack bf16"),
    (dict(precisions=("bf16", "bf16")), "name bf16 twice"),
    (dict(chains=(("bf16", "bf16"),)), "must be three precisions"),
    (dict(chains=(("bf16", "fp7", "bf16"),)), "unknown policy 'fp7'"),
    (dict(cpt__precision="fp8_block"), "cpt.precision is set by the pipeline: set precisions"),
    (dict(cpt__resume_with_changes=True), "cpt.resume_with_changes .*: a stage that has begun"),
    (dict(sft_1__seed=3), "sft_1.seed is set by the pipeline: set seeds"),
    (dict(sft_2__model="llama_60m"), "sft_2.model is set by the pipeline: set cpt.model"),
    (dict(sft_1__initial_weights="a"), "sft_1.initial_weights .* starts from the stage before"),
    (dict(sft_1__data="chat:{problems_3}/a"), "unknown stage with files 'problems_3'; did you"),
    (dict(tokenizer__vocab_size=258), "tokenizer.vocab_size=258 must be at least 259"),
    (dict(tokenizer__vocab_size=2000), "2000 tokens, more than the model's vocab_size=1024"),
    (dict(tokenizer__folder="/nowhere"), "/nowhere"),
    (dict(cpt__model="hf:/nowhere"), "tokenizer.folder"),
    (dict(problems_2__steps="3"), "problems_2: steps='3' must be A:B"),
    (dict(problems_1__train=0), "problems_1: train=0 must be at least 1"),
    (dict(evaluate__rows=0), "evaluate.rows=0 must be at least 1"),
    (dict(evaluate__seed=-1), "evaluate.seed=-1 must be at least 0 and less than"),
    (dict(evaluate__problems=("a.jsonl",)), "must be a tuple of NAME=FILE"),
    (dict(evaluate__problems=(1,)), "must be a tuple of NAME=FILE"),
    (dict(evaluate__problems=("a=b", "a=c")), "problems: the name 'a' must be one of its own"),
    (dict(evaluate__problems=("a/b=c",)), "the name 'a/b' must be one of its own, without /"),
]


@pytest.mark.parametrize("changes, message", BAD, ids=[str(changes) for changes, _ in BAD])
def test_refused_before_anything_is_made(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message) as refused:
        plan.Plan.from_config(config(**changes), tmp_path)
    assert "\n" not in str(refused.value) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "flag, message",
    [
        (
            "--config.cpt.lerning_rate=1",
            "configs/pipeline.py has no key 'cpt.lerning_rate'; did you",
        ),
        ("--config.num_steps=1", "configs/pipeline.py has no key 'num_steps'"),
        ("--config=configs/smoke.py", "configs/pipeline.py has no key 'attention'"),
    ],
)
def test_wrong_keys_are_refused(flag, message):
    done = pipeline_here("--config=configs/infir2/small.py", "--workdir=nowhere", flag)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert re.search(message, done.stderr), done.stderr


@pytest.mark.parametrize("name", ["small", "h200"])
def test_the_configs_are_plans(name, tmp_path):
    module = importlib.import_module(f"configs.infir2.{name}")
    made = plan.Plan.from_config(module.get_config().lock(), tmp_path)
    assert made.problems == plan.PROBLEMS and made.chains[0].name == "bf16"
    docstring = ast.get_docstring(ast.parse((ROOT / f"configs/infir2/{name}.py").read_text()))
    assert f"python -m experiments.pipeline --config=configs/infir2/{name}.py" in docstring


def test_every_key_is_read():
    """Outside the configs of training, which runs read."""
    source = "".join(path.read_text() for path in (ROOT / "experiments/pipeline").glob("*.py"))
    read = set(re.findall(r"\b(?:config|settings)\.(?:tokenizer\.)?(\w+)|\"(\w+)\"", source))
    names = {name for pair in read for name in pair}
    made = pipeline.get_config()
    keys = set(made) | {
        key for group in ("tokenizer", *plan.PROBLEMS, "evaluate") for key in made[group]
    }
    assert keys <= names, keys - names


def test_other_files_of_the_user_are_other_stages(tmp_path):
    """A tokenizer or problems that change in place, or come in the place of learned ones."""
    files = tmp_path / "files"
    files.mkdir()
    write_chat_tokenizer(files / "tokenizer.json", iter(["one two three"] * 9), 262)
    problems = files / "mine.jsonl"
    problems.write_text('{"prompt": "1 + 1", "answer": "2"}\n' * 2)
    changes = dict(
        tokenizer__folder=str(files), evaluate__problems=(f"mine={problems}", "a={problems_2}/t")
    )

    def asked(**changes):
        made = plan.Plan.from_config(config(**changes), tmp_path / "work")
        return {stage.name: stage.asked for stage in plan.stages(made)}

    def changed(old, new):
        return {name for name in old if name in new and old[name] != new[name]}

    before = asked(**changes)
    trained = {name for name in before if re.search("/(cpt|sft_.)$", name)}
    assert changed(before, asked(**changes)) == set()
    learned = asked(evaluate__problems=changes["evaluate__problems"])
    assert changed(before, learned) >= trained
    template = files / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    after = asked(**changes)
    assert changed(before, after) == trained
    problems.write_text('{"prompt": "1 + 2", "answer": "3"}\n' * 2)
    solved = {name for name in before if re.search("/(evaluate|reload)$", name)}
    assert changed(after, asked(**changes)) == solved
    problems.unlink()
    with pytest.raises(ValueError, match=f"evaluate.problems: mine={problems}: No such file"):
        asked(**changes)


@pytest.mark.parametrize("content", [b"", b"PK"])
def test_damaged_items_name_the_folder(tmp_path, content):
    (tmp_path / "items.npz").write_bytes(content)
    with pytest.raises(ValueError, match=f"items.npz is damaged: .*; remove {tmp_path}$"):
        evaluation.read_items(tmp_path)


def test_a_url_is_refused(tmp_path):
    done = pipeline_here("--config=configs/infir2/small.py", "--workdir=gs://b/x")
    assert done.returncode == 1 and "the workdir gs://b/x is a URL" in done.stderr


# Figures ------------------------------------------------------------------------------------------

RIGHT = np.array([1, 1, 0, 0, 1]), np.array([1, 0, 0, 0, 1])  # of BF16, of FP8
NATS = {"bf16": np.array([4.0, 6.0]), "fp8_block": np.array([5.0, 6.0])}
TOKENS = np.array([2.0, 3.0])


def numbers(precision, shift=0.0):
    """What the evaluations of a chain would find."""
    nats = NATS[precision] + shift
    right = RIGHT[precision != "bf16"].astype(bool)
    found = {
        f"{model}|{own}|loss|{text}/a": measured(nats, TOKENS)
        for model in ("cpt", "sft_1", "sft_2", "export")
        for own in {precision, "bf16"}
        for text in ("cpt", "sft_1", "sft_2")
    }
    for model in ("sft_2", "export"):
        found[f"{model}|{precision}|accuracy|t"] = share(right)
        found[f"{model}|{precision}|shuffled|t"] = share(~right)
    return found


def results(tmp_path, seeds):
    made = plan.Plan.from_config(
        config(precisions=("bf16", "fp8_block"), seeds=tuple(range(seeds))), tmp_path
    )
    names = [chain.name for chain in made.chains]
    return figures.Results(
        plan=made,
        cpt={name: [numbers(name)] for name in names},
        tuned={name: [numbers(name, shift=i) for i in range(seeds)] for name in names},
        exported={name: [numbers(name, shift=i + 0.5) for i in range(seeds)] for name in names},
    )


@pytest.mark.parametrize("seeds", [1, 3])
def test_figures_by_hand(tmp_path, monkeypatch, seeds):
    monkeypatch.setattr(figures, "_costs", lambda plan: {})
    found = figures.figures(results(tmp_path, seeds))
    # (5 + 6) / 5 nats a token above (4 + 6) / 5, and 1 nat a row more for each further seed.
    mean = sum(10 + 2 * i for i in range(seeds)) / seeds / 5
    gap = found["loss_gap/fp8_block/sft_2"]
    assert gap["value"] == pytest.approx(0.2 / mean) and gap["loss_bf16"] == pytest.approx(mean)
    apart = [1 / (10 + 2 * i) for i in range(seeds)]
    assert gap["seeds"] == pytest.approx(apart)
    if seeds == 1:
        assert gap["seeds_error"] is None
    else:
        assert gap["seeds_error"] == pytest.approx(np.std(apart, ddof=1) / math.sqrt(seeds))
    assert found["loss_gap/fp8_block/cpt"]["value"] == pytest.approx(0.1)
    assert found["loss_gap/fp8_block"]["value"] == pytest.approx(0.1)  # the largest
    assert "loss_gap/bf16" not in found
    accuracy = found["accuracy/t/fp8_block"]
    assert (accuracy["value"], accuracy["shuffled"], accuracy["items"]) == (0.4, 0.6, 5)
    assert accuracy["bf16_minus"] == pytest.approx(0.2)
    # Seeds that answer alike are not more items.
    assert accuracy["bf16_minus_upper"] == paired_difference(*map(bool_, RIGHT)).upper
    assert found["accuracy/t/bf16"]["value"] == 0.6 and "bf16_minus" not in found["accuracy/t/bf16"]
    # Half a nat more on each of two rows of five tokens.
    assert found["inference_kept/bf16"]["value"] == pytest.approx(math.exp(1 / 5))


def bool_(array):
    return array.astype(bool)


def test_the_baseline_is_the_first_chain():
    chains = read_chains(("fp8_block", "bf16"), ())
    assert [chain.name for chain in chains] == ["bf16", "fp8_block"]


# The command --------------------------------------------------------------------------------------


def flags(folder, workdir):
    """A pipeline of seconds a stage, on generated text."""
    text = write_generated_text(folder, documents=300)
    keys = {
        "cpt.data": text,
        "precisions": '("bf16",)',
        "chains": '(("bf16","bf16","fp8_block_ue8m0"),)',
        "tokenizer.vocab_size": 300,
        "cpt.model_overrides.vocab_size": 320,
        "cpt.num_steps": 12,
        "cpt.optimizer.warmup_steps": 2,
        "problems_1.train": 80,
        "problems_1.test": 5,
        "problems_2.train": 80,
        "problems_2.test": 6,
        "evaluate.rows": 16,
        "evaluate.max_tokens": 8,
        **{f"{stage}.cache_dir": folder / "cache" for stage in plan.TRAINING},
        **{f"{stage}.checkpoint.every": 3 for stage in plan.TRAINING},
        **{f"{stage}.unroll": 1 for stage in plan.TRAINING},
        "cpt.model_overrides.n_layers": 1,
        **{f"{stage}.batch_size": 4 for stage in plan.TRAINING},
        **{f"sft_{i}.long_examples": "skip" for i in (1, 2)},
    }
    return [
        "--config=configs/infir2/small.py",
        f"--workdir={workdir}",
        *(f"--config.{key}={value}" for key, value in keys.items()),
    ]


def losses(path):
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]


def test_a_mistake_in_the_last_stage_is_said_before_any_is_trained(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "2 + 2?", "response": "4"}\n{"prompt": "2?"}\n')
    bad = [
        (f"sft_2.data=chat:{tmp_path}/bad.jsonl", r"sft_2 in bf16: .*bad\.jsonl, line 2"),
        ("sft_2.optimizer.name=adamv", "sft_2 in bf16: unknown optimizer 'adamv'; did you mean"),
        ("cpt.model_overrides.d_ff=200", "export of .*fp8_block_ue8m0: .* multiples of 128"),
    ]
    for change, message in bad:
        done = pipeline_here(*flags(tmp_path, tmp_path / "run"), f"--config.{change}")
        assert done.returncode == 1
        assert re.search(f"^error: {message}", done.stderr, re.MULTILINE), done.stderr
        made = {path.name for path in (tmp_path / "run").iterdir()}
        assert made == {"lock", "locks", "pipeline.json", "tokenizer", "problems_1", "problems_2"}


def finished(workdir):
    """When each stage of a whole pipeline was done."""
    results = {path: path.stat().st_mtime_ns for path in workdir.rglob("result.json")}
    assert len(results) == 3 + 2 + 3 + 2 + 2
    assert len(losses(workdir / "bf16/cpt/metrics.jsonl")) == 12
    return results


def test_failed_inside_stages_and_finished(tmp_path, caplog, monkeypatch):
    """In pre-training and in fine-tuning, whose data fails; then to the end, and once more."""
    monkeypatch.setattr(jax, "clear_caches", lambda: None)  # stages share what they have traced
    workdir = tmp_path / "run"
    arguments = flags(tmp_path, workdir)
    begun = workdir / "bf16/cpt/result.json", workdir / "bf16/seed_0/sft_1/result.json"
    whole = training.train_and_evaluate
    for fault, stage, path in [
        ("source_raises@8", "stage 4 of 12, bf16/cpt", begun[0]),
        # Pre-training goes on after step 7.
        ("source_raises@6", "stage 6 of 12, bf16/seed_0/sft_1", begun[1]),
    ]:
        with pytest.MonkeyPatch.context() as patch:
            failing = functools.partial(whole, faults=Faults.parse(fault))
            patch.setattr(training, "train_and_evaluate", failing)
            done = pipeline_here(*arguments)
        assert done.returncode == 1 and not path.exists()
        assert f"error: {stage}: the data source failed" in done.stderr
    cpt = begun[0].read_bytes()
    done = pipeline_here(*arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    for path, step in zip(begun, (7, 5), strict=True):
        events = read_jsonl(path.with_name("events.jsonl"))
        assert [event["step"] for event in events if event["kind"] == "resume"] == [step]
    results = finished(workdir)
    found = json.loads((workdir / "figures.json").read_text())
    report = (workdir / "report.html").read_text()
    assert begun[0].read_bytes() == cpt
    # Makes nothing again, but the report; its figures take seconds.
    monkeypatch.setattr(charts, "have_matplotlib", lambda: False)
    with caplog.at_level(logging.INFO, "absl"):
        done = pipeline_here(*arguments, "--verbosity=0")
    assert "12 of 12 stages are done" in caplog.text and "stage 1" not in caplog.text
    assert results == finished(workdir)
    assert json.loads((workdir / "figures.json").read_text()) == found
    done = pipeline_here(*arguments, "--config.cpt.num_steps=13")
    assert done.returncode == 1
    assert re.match(
        r"error: bf16/cpt is done with other settings: num_steps: 12 -> 13; take", done.stderr
    )
    late = "bf16+bf16+fp8_block_ue8m0"
    assert 0.9 < found[f"inference_kept/{late}"]["value"] < 1.1
    assert found["inference_kept/bf16"]["value"] == pytest.approx(1, abs=0.01)
    assert found[f"loss_gap/{late}/sft_2"]["value"] == 0  # only the export differs
    assert found["time/sft_2/bf16"]["value"] > 0 and found["memory/cpt/bf16"]["value"] > 0
    sections = page_of(report)
    assert list(sections) == ["table-1", "table-2", "table-3", "cpt", "sft_1", "sft_2"]
    assert late in sections["table-1"] and "No figure" not in report


KILLED = """
import runpy, sys
from experiments.pipeline import training
from fp8jax.lm.training.faults import Faults

stage, fault = sys.argv.pop(1), Faults.parse(sys.argv.pop(1))
whole = training.train_and_evaluate

def train(config, workdir, **named):
    return whole(config, workdir, faults=fault if workdir.endswith(stage) else Faults(), **named)

training.train_and_evaluate = train
runpy.run_module("experiments.pipeline", run_name="__main__", alter_sys=True)
"""


# The one above goes on in the same stages; faults_test.py kills a run, and it goes on to the bit.
@pytest.mark.full
def test_killed_inside_stages_and_finished(tmp_path):
    """kill -9 in pre-training and in fine-tuning; then to the end."""
    workdir = tmp_path / "run"
    arguments = flags(tmp_path, workdir)
    for stage, fault in (("bf16/cpt", "kill@7"), ("bf16/seed_0/sft_1", "kill@5")):
        done = subprocess.run(
            [sys.executable, "-c", KILLED, stage, fault, *arguments],
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
        assert not (workdir / stage / "result.json").exists()
    cpt = (workdir / "bf16/cpt/result.json").read_bytes()
    done = run_command("pipeline", *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    finished(workdir)
    assert (workdir / "bf16/cpt/result.json").read_bytes() == cpt
    assert "No figure" not in (workdir / "report.html").read_text()
    done = run_command("pipeline", *arguments)
    assert "12 of 12 stages are done" in done.stderr and "stage 1" not in done.stderr
