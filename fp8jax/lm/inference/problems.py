r"""Problems whose answers are numbers, read from local files of JSON lines.

A file's rows may have the fields of experiments/arithmetic/files.py, of GSM8K or of MATH:

    {"prompt": "…", "answer": "14"}
    {"question": "…", "answer": "… #### 14"}       the number after the mark, or the whole answer
    {"problem": "…", "solution": "… \boxed{14}"}

Other fields are not read. MATH also asks for formulas, intervals and words. The verifier compares
numbers only, so problems whose solution has no number are left out, and counted.
"""

import dataclasses
import random
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from fp8jax.lm.data.files import Tally, open_counted, parse_line
from fp8jax.lm.inference.verify import as_number, final_number
from fp8jax.lookup import brief

_FIELDS = (("prompt", "answer"), ("question", "answer"), ("problem", "solution"))
_LEFT_OUT = "solution"  # a field that may hold another answer than a number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A question and the number that answers it."""

    prompt: str
    answer: Fraction


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problems:
    """The problems of a file.

    Attributes:
      problems: at least one.
      left_out: how many more there are, whose answers are no numbers.
    """

    problems: tuple[Problem, ...]
    left_out: int


def read_problems(path: Path) -> Problems:
    """Returns the problems of a file; .gz and .zst are decompressed.

    Raises:
      ValueError: a line is no problem, or the file has none with a number. The message names file
        and line.
      OSError: the file cannot be read.
    """
    problems, left_out = [], 0
    with open_counted(path, Tally(), is_json=True) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                made = _problem(parse_line(line))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            if made is None:
                left_out += 1
            else:
                problems.append(made)
    if not problems:
        raise ValueError(f"{path} has no problem whose answer is a number")
    return Problems(problems=tuple(problems), left_out=left_out)


def shuffled(problems: Sequence[Problem], seed: int) -> list[Problem]:
    """Returns the prompts with each other's answers: a control, on which models fall to chance.

    No problem keeps its own answer, though another one's may be the same number.

    Raises:
      ValueError: there are fewer than two problems.
    """
    if len(problems) < 2:
        raise ValueError(f"answers of {len(problems)} problem(s) cannot be shuffled")
    order = list(range(len(problems)))
    random.Random(seed).shuffle(order)
    answers: dict[int, Fraction] = {
        own: problems[other].answer for own, other in zip(order, order[1:] + order[:1], strict=True)
    }
    return [
        dataclasses.replace(problem, answer=answers[index])
        for index, problem in enumerate(problems)
    ]


def _problem(row: Any) -> Problem | None:
    """Returns the problem of a row; None if its answer may be anything, and is no number."""
    names = [pair for pair in _FIELDS if isinstance(row, dict) and {*pair} <= row.keys()]
    if not names:
        expected = " or ".join(f"{asked} and {answered}" for asked, answered in _FIELDS)
        raise ValueError(f"expected the fields {expected}, got {brief(row)}")
    asked, answered = names[0]
    if not isinstance(row[asked], str) or not row[asked].strip():
        raise ValueError(f"{asked} must be a text that is not blank, got {brief(row[asked])}")
    row[asked].encode("utf-8")  # JSON can spell lone surrogates, which no tokenizer takes
    answer = row[answered]
    if type(answer) not in (str, int, float):
        raise ValueError(f"{answered} must be a text or a number, got {brief(answer)}")
    text = str(answer)
    value = final_number(text)
    if value is None and answered != _LEFT_OUT:
        value = as_number(text)
    if value is not None:
        return Problem(prompt=row[asked], answer=value)
    if answered == _LEFT_OUT:
        return None
    raise ValueError(f"{answered} holds no number, neither alone nor after ####: {brief(answer)}")
