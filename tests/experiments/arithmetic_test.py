"""Arithmetic problems: right, within bounds, always the same, and disjoint between the splits."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter

import pytest

from experiments.arithmetic.files import problem_files, write_problems
from experiments.arithmetic.problems import (
    HELD_OUT_STORIES,
    OPERATIONS,
    STORIES,
    TEST,
    TRAIN,
    Difficulty,
    problem,
)
from tests.support import ROOT
from tests.support.commands import command_here

EASY = Difficulty(least_steps=1, most_steps=1, largest=10)
USUAL = Difficulty()
HARD = Difficulty(least_steps=4, most_steps=6, largest=999)

CALCULATE = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}


def problems(count, *, seed=0, split=TRAIN, difficulty=USUAL, **stories):
    return [
        problem(i, seed=seed, split=split, difficulty=difficulty, **stories) for i in range(count)
    ]


def numbers(text):
    return [int(number) for number in re.findall(r"\d+", text)]


@pytest.mark.parametrize("difficulty", [EASY, USUAL, HARD], ids=["easy", "usual", "hard"])
@pytest.mark.parametrize("split", [TRAIN, TEST])
def test_worked_steps_are_right(difficulty, split):
    steps_seen = Counter()
    for made in problems(300, split=split, difficulty=difficulty):
        told = numbers(made.question)
        value = told.pop(0)
        for step, operand in zip(made.steps, told, strict=True):
            a, sign, b, equals, result = step.split(" ")
            assert (int(a), int(b), equals) == (value, operand, "=")
            if sign == "/":
                assert value % operand == 0
            value = CALCULATE[sign](value, operand)
            assert value == int(result) and 1 <= value <= difficulty.largest
        assert value == made.answer and max(told) <= difficulty.largest
        assert made.response == "\n".join([*made.steps, f"#### {value}"])
        steps_seen[len(made.steps)] += 1
    assert sorted(steps_seen) == list(range(difficulty.least_steps, difficulty.most_steps + 1))


def test_every_operation_and_story_occurs():
    made = problems(500)
    signs = {step.split(" ")[1] for each in made for step in each.steps}
    assert signs == {operation.sign for operation in OPERATIONS}
    for story in STORIES.values():
        told = re.escape(story.ask.format(name="NAME", things="THINGS"))
        pattern = told.replace("NAME", r"\w+").replace("THINGS", r"\w+") + "$"
        assert 30 < sum(bool(re.search(pattern, each.question)) for each in made) < 300


def test_held_out_stories_share_no_sentence():
    def sentences(stories):
        return {text for story in stories.values() for text in vars(story).values()}

    assert not sentences(STORIES) & sentences(HELD_OUT_STORIES)
    for text in sentences(STORIES | HELD_OUT_STORIES):
        assert text.count("{n}") == (0 if text.endswith("?") else 1)
        assert not numbers(text), "a number of a story is none of the problem"


def test_no_calculation_is_in_both_splits():
    """Neither with other seeds, nor other difficulties, nor told otherwise."""
    learned = [
        each
        for seed in (0, 1)
        for difficulty in (EASY, USUAL)
        for each in problems(3000, seed=seed, difficulty=difficulty)
    ]
    tested = [
        each
        for seed in (0, 1, 2)
        for difficulty in (EASY, USUAL)
        for stories in (STORIES, HELD_OUT_STORIES)
        for each in problems(
            300, seed=seed, split=TEST, difficulty=difficulty, stories=tuple(stories.values())
        )
    ]
    assert len({each.steps for each in learned}) > 2000
    assert not {each.steps for each in learned} & {each.steps for each in tested}
    assert not {each.question for each in learned} & {each.question for each in tested}


def test_a_problem_is_a_function_of_seed_split_and_index():
    digest = hashlib.sha256()
    for split in (TRAIN, TEST):
        for each in problems(50, seed=3, split=split):
            digest.update(f"{each.question}\n{each.response}\n".encode())
    # Other bits mean that every set of problems changed: those of finished runs, too.
    assert digest.hexdigest()[:16] == "fd3a71c97fabf83b"
    assert problems(9, seed=3)[8] != problems(9, seed=4)[8]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"least_steps": 0}, "steps=0:3 must be A:B with 1 <= A <= B"),
        ({"least_steps": 3, "most_steps": 2}, "steps=3:2 must be"),
        ({"largest": 9}, "largest=9 must be at least 10"),
        ({"largest": 10**9 + 1}, "largest=1000000001 must be .* at most 1000000000"),
    ],
)
def test_difficulties_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Difficulty(**options)


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="unknown split 'tets'; did you mean 'test'"):
        problem(0, seed=0, split="tets", difficulty=USUAL)


# Files --------------------------------------------------------------------------------------------


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_files(tmp_path):
    files = problem_files(train=40, test=20, difficulty=Difficulty(most_steps=2))
    write_problems(tmp_path, files, seed=5)
    made = {path.name: rows(path) for path in tmp_path.iterdir()}
    assert {name: len(found) for name, found in made.items()} == {
        "train.jsonl": 40,
        "test.jsonl": 20,
        "test_harder.jsonl": 20,
        "test_templates.jsonl": 20,
    }
    steps = {
        name: {len(row["response"].splitlines()) - 1 for row in found}
        for name, found in made.items()
    }
    assert steps.pop("test_harder.jsonl") == {3, 4}
    assert all(found == {1, 2} for found in steps.values())
    assert all(set(row) == {"prompt", "response"} for row in made.pop("train.jsonl"))
    for found in made.values():
        assert all(row["response"].endswith(f"\n#### {row['answer']}") for row in found)
    asks = {text.ask for text in HELD_OUT_STORIES.values()}
    assert all(
        any(row["prompt"].endswith(ask) for ask in asks) for row in made["test_templates.jsonl"]
    )


def test_command(tmp_path, capsys):
    flags = [f"--output={tmp_path}/new", "--train=30", "--test=10", "--steps=2:3", "--largest=50"]
    with command_here("arithmetic.__main__") as run:
        run(*flags)
        said = capsys.readouterr().out.splitlines()
        write_problems(
            tmp_path / "same",
            problem_files(
                train=30, test=10, difficulty=Difficulty(least_steps=2, most_steps=3, largest=50)
            ),
            seed=0,
        )
        for path in (tmp_path / "same").iterdir():
            assert path.read_bytes() == (tmp_path / "new" / path.name).read_bytes()
        assert said[0] == f"{tmp_path}/new: numbers up to 50, seed 0"
        assert said[4].split() == ["test_harder.jsonl", "10", "4", "to", "5", "6"]
        assert said[7] == rows(tmp_path / "new" / "train.jsonl")[0]["prompt"]
        with pytest.raises(SystemExit, match="has a train.jsonl, which is not overwritten"):
            run(*flags)


KILLED = """
import os, signal, sys
from experiments.arithmetic import __main__, files
from fp8jax.lm.cli import command

line, made = files._line, []

def line_or_death(*arguments):
    made.append(arguments)
    if len(made) == 35:  # in the second file
        os.kill(os.getpid(), signal.SIGKILL)
    return line(*arguments)

files._line = line_or_death
command.run(__main__.main)
"""


@pytest.mark.parametrize("exists", [False, True])
def test_killed_while_writing(tmp_path, exists):
    """Nothing under the names of the files, so the same command starts again."""
    folder, flags = tmp_path / "new", ["--train=30", "--test=10"]
    if exists:
        folder.mkdir()
        (folder / "notes").touch()
    arguments = [sys.executable, "-c", KILLED, f"--output={folder}", *flags]
    done = subprocess.run(arguments, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert done.returncode == -signal.SIGKILL
    assert not list(folder.glob("*.jsonl")) and folder.exists() == exists
    with command_here("arithmetic.__main__") as run:
        run(f"--output={folder}", *flags)
    assert len(list(folder.glob("*.jsonl"))) == 4


@pytest.mark.parametrize(
    "flag, message",
    [
        ("--steps=3", "--steps=3 must be A:B, such as 1:3"),
        ("--steps=0:2", "steps=0:2 must be A:B with 1 <= A <= B"),
        ("--largest=3", "largest=3 must be at least 10"),
        (f"--largest={10**23}", f"largest={10**23} must be at least 10 and at most"),
        ("--train=0", "train"),
        ("--output=", "--output is empty"),
        ("more", "arguments that are not flags"),
    ],
)
def test_command_refuses_in_one_line(tmp_path, flag, message):
    with command_here("arithmetic.__main__") as run, pytest.raises(SystemExit) as ended:
        run(f"--output={tmp_path}/new", flag)
    assert re.search(message, str(ended.value)) and "\n" not in str(ended.value)
    assert not (tmp_path / "new").exists()
