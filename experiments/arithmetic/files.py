"""Files of arithmetic problems: training examples, and three tests of increasing distance."""

import dataclasses
import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.arithmetic.problems import (
    HELD_OUT_STORIES,
    STORIES,
    TEST,
    TRAIN,
    Difficulty,
    Problem,
    Story,
    problem,
)

TRAIN_FILE = "train.jsonl"
TEST_FILE = "test.jsonl"
HARDER_FILE = "test_harder.jsonl"
TEMPLATES_FILE = "test_templates.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProblemFile:
    """What a file of problems holds.

    Attributes:
      name: of the file.
      split: `TRAIN` or `TEST`; only lines of tests have the answer by itself.
      difficulty, stories: of the problems.
      count: of the problems, which have the numbers 0, 1, 2, …
    """

    name: str
    split: str
    difficulty: Difficulty
    stories: Sequence[Story]
    count: int

    def problems(self, seed: int) -> Iterable[Problem]:
        """Yields the problems."""
        for index in range(self.count):
            yield problem(
                index, seed=seed, split=self.split, difficulty=self.difficulty, stories=self.stories
            )


def problem_files(*, train: int, test: int, difficulty: Difficulty) -> tuple[ProblemFile, ...]:
    """Returns the four files: training examples, and tests like them, harder, and told otherwise.

    Args:
      train: number of training examples.
      test: number of problems of each test.

    Raises:
      ValueError: a number is less than 1.
    """
    for name, count in (("train", train), ("test", test)):
        if count < 1:
            raise ValueError(f"{name}={count} must be at least 1")
    told, other = tuple(STORIES.values()), tuple(HELD_OUT_STORIES.values())
    return tuple(
        ProblemFile(name=name, split=split, difficulty=hard, stories=stories, count=count)
        for name, split, hard, stories, count in (
            (TRAIN_FILE, TRAIN, difficulty, told, train),
            (TEST_FILE, TEST, difficulty, told, test),
            (HARDER_FILE, TEST, difficulty.harder(), told, test),
            (TEMPLATES_FILE, TEST, difficulty, other, test),
        )
    )


def write_problems(folder: Path, files: Sequence[ProblemFile], *, seed: int) -> None:
    """Writes the files into a folder, over files of the same names: whole ones, or none.

    A line is {"prompt": …, "response": …}, in tests with an "answer", too. A new folder appears in
    one step, with all files. In one that exists they appear one after the other, each whole.

    Raises:
      OSError: the folder cannot be made or written to.
    """
    is_new = not folder.exists()
    above = folder.parent if is_new else folder
    above.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.unfinished-", dir=above) as scratch:
        made = Path(scratch, "made")
        made.mkdir()
        for each in files:
            lines = (_line(one, each.split == TEST) for one in each.problems(seed))
            (made / each.name).write_text("".join(lines), encoding="utf-8")
        if is_new:
            made.rename(folder)
            return
        for each in files:
            (made / each.name).replace(folder / each.name)


def _line(made: Problem, with_answer: bool) -> str:
    row = {"prompt": made.question, "response": made.response}
    if with_answer:
        row["answer"] = str(made.answer)
    return json.dumps(row) + "\n"
