"""Makes arithmetic problems: python -m experiments.arithmetic --output=problems \\
    --train=20000 --test=2000 --steps=1:3 --seed=0

Writes four files of JSON lines into the new folder --output:

    train.jsonl           training examples {"prompt": …, "response": …}
    test.jsonl            problems of the same kinds, with other calculations, and an "answer"
    test_harder.jsonl     of one or two steps more
    test_templates.jsonl  told with sentences that no training example has

A run trains on chat:problems/train.jsonl, and experiments.evaluate --problems=problems/test.jsonl
measures it.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from experiments.arithmetic.files import ProblemFile, problem_files, write_problems
from experiments.arithmetic.problems import Difficulty
from fp8jax.lm.cli import command
from fp8jax.text_table import aligned

_OUTPUT = flags.DEFINE_string(
    "output", None, "The folder to write; none of its files may exist.", required=True
)
_TRAIN = flags.DEFINE_integer("train", 20_000, "Number of training examples.", lower_bound=1)
_TEST = flags.DEFINE_integer("test", 2_000, "Number of problems of each test.", lower_bound=1)
_STEPS = flags.DEFINE_string("steps", "1:3", "Least and most steps of a problem, A:B.")
_LARGEST = flags.DEFINE_integer("largest", 99, "No number of a problem is larger.")
_SEED = flags.DEFINE_integer("seed", 0, "Other seeds give other problems.", lower_bound=0)


def main(arguments: Sequence[str]) -> None:
    command.refuse_arguments(arguments)
    files = problem_files(train=_TRAIN.value, test=_TEST.value, difficulty=_difficulty())
    if not _OUTPUT.value:
        raise ValueError("--output is empty: name the folder to write")
    folder = Path(_OUTPUT.value).expanduser()
    for each in files:
        if (folder / each.name).exists():
            raise ValueError(f"--output={folder} has a {each.name}, which is not overwritten")
    write_problems(folder, files, seed=_SEED.value)
    print(_summary(folder, files))


def _difficulty() -> Difficulty:
    parts = re.fullmatch(r"(\d{1,3}):(\d{1,3})", _STEPS.value, re.ASCII)
    if parts is None:
        raise ValueError(f"--steps={_STEPS.value} must be A:B, such as 1:3")
    least, most = map(int, parts.groups())
    return Difficulty(least_steps=least, most_steps=most, largest=_LARGEST.value)


def _summary(folder: Path, files: Sequence[ProblemFile]) -> str:
    """Returns a table of the files, and the first problem."""
    lines = [["file", "problems", "steps", "templates"]]
    for each in files:
        steps = f"{each.difficulty.least_steps} to {each.difficulty.most_steps}"
        lines.append([each.name, f"{each.count:,}", steps, str(len(each.stories))])
    first = next(iter(files[0].problems(_SEED.value)))
    return "\n".join(
        [
            f"{folder}: numbers up to {_LARGEST.value}, seed {_SEED.value}",
            *aligned(lines),
            "",
            first.question,
            first.response,
        ]
    )


if __name__ == "__main__":
    command.run(main)
