"""Word problems of several steps of arithmetic, with worked answers: a task that needs no download.

A problem is a short story of one quantity that changes step by step:

    question   Anna has 12 apples. Anna buys 7 more. Anna gives away 5. How many apples does Anna
               have now?
    answer     12 + 7 = 19
               19 - 5 = 14
               #### 14

Each step is one operation on whole numbers, and the last line has GSM8K's form. All numbers lie
between 1 and `Difficulty.largest`, divisions leave no remainder. A problem is a function of seed,
split and index alone.

No calculation is in both splits, whatever the seeds, difficulties and templates: the hash of the
calculation decides which split it belongs to. So a model has not seen a question of the test split,
nor another story with the same numbers, whichever training problems it has learned.
"""

import dataclasses
import hashlib
import random
from collections.abc import Callable, Sequence
from types import MappingProxyType

from fp8jax.lookup import lookup

TRAIN, TEST = "train", "test"

_TEST_ONE_IN = 10  # calculations, of which one belongs to the test split
_ATTEMPTS = 2000  # the chance that all attempts miss a tenth of all calculations is 10^-91
_MOST_FACTOR = 9
_LEAST_LARGEST = 10  # below it there are hardly any calculations
_MOST_LARGEST = 10**9  # far below the lengths that Python's ranges may have


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difficulty:
    """How hard problems are.

    Attributes:
      least_steps, most_steps: a problem has so many operations, each number equally often.
      largest: of all numbers of a problem.

    Raises:
      ValueError: there are no such problems.
    """

    least_steps: int = 1
    most_steps: int = 3
    largest: int = 99

    def __post_init__(self) -> None:
        if not 1 <= self.least_steps <= self.most_steps:
            raise ValueError(
                f"steps={self.least_steps}:{self.most_steps} must be A:B with 1 <= A <= B"
            )
        if not _LEAST_LARGEST <= self.largest <= _MOST_LARGEST:
            raise ValueError(
                f"largest={self.largest} must be at least {_LEAST_LARGEST} and at most "
                f"{_MOST_LARGEST}"
            )

    def harder(self) -> "Difficulty":
        """Returns problems of one or two steps more, with numbers of the same size."""
        return dataclasses.replace(
            self, least_steps=self.most_steps + 1, most_steps=self.most_steps + 2
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A question and its worked answer.

    Attributes:
      question: a story that ends with a question.
      steps: the operations in their order, such as "12 + 7 = 19".
      answer: the result of the last one.
    """

    question: str
    steps: tuple[str, ...]
    answer: int

    @property
    def response(self) -> str:
        """The steps and the answer, as a model should write them."""
        return "\n".join([*self.steps, f"#### {self.answer}"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Story:
    """A template of questions: a sentence to begin, one for each operation, and the question.

    Sentences have the number {n}, and may have a {name} and a kind of {things}.
    """

    begin: str
    add: str
    subtract: str
    multiply: str
    divide: str
    ask: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """A step of a problem.

    Attributes:
      field: the sentence of a `Story` that tells it.
      sign: how worked steps write it.
      operands: the numbers that it can be applied with to a value, so that no result exceeds a
        largest one.
      apply: of a value and one of these operands.
    """

    field: str
    sign: str
    operands: Callable[[int, int], Sequence[int]]
    apply: Callable[[int, int], int]


OPERATIONS = (
    Operation(
        field="add",
        sign="+",
        operands=lambda value, largest: range(2, largest - value + 1),
        apply=lambda a, b: a + b,
    ),
    Operation(
        field="subtract",
        sign="-",
        operands=lambda value, largest: range(2, value),
        apply=lambda a, b: a - b,
    ),
    Operation(
        field="multiply",
        sign="*",
        operands=lambda value, largest: range(2, min(largest // value, _MOST_FACTOR) + 1),
        apply=lambda a, b: a * b,
    ),
    Operation(
        field="divide",
        sign="/",
        operands=lambda value, largest: [
            n for n in range(2, min(value, _MOST_FACTOR) + 1) if value % n == 0
        ],
        apply=lambda a, b: a // b,
    ),
)

STORIES = MappingProxyType(
    {
        "owner": Story(
            begin="{name} has {n} {things}.",
            add="{name} buys {n} more.",
            subtract="{name} gives away {n}.",
            multiply="Now there are {n} times as many.",
            divide="{name} shares them equally among {n} people and keeps one share.",
            ask="How many {things} does {name} have now?",
        ),
        "box": Story(
            begin="There are {n} {things} in a box.",
            add="{name} puts in {n} more.",
            subtract="{name} takes out {n}.",
            multiply="The box is filled until it has {n} times as many.",
            divide="The {things} are split into {n} equal piles, and only one pile stays.",
            ask="How many {things} are in the box at the end?",
        ),
        "number": Story(
            begin="Start with {n}.",
            add="Add {n}.",
            subtract="Subtract {n}.",
            multiply="Multiply by {n}.",
            divide="Divide by {n}.",
            ask="What is the result?",
        ),
        "game": Story(
            begin="{name} begins a game with {n} points.",
            add="{name} wins {n} points.",
            subtract="{name} loses {n} points.",
            multiply="A bonus multiplies the points by {n}.",
            divide="A penalty divides the points by {n}.",
            ask="How many points does {name} have?",
        ),
        "money": Story(
            begin="{name} has saved {n} dollars.",
            add="{name} earns {n} dollars.",
            subtract="{name} spends {n} dollars.",
            multiply="The money grows to {n} times as much.",
            divide="{name} splits the money into {n} equal parts and spends all but one.",
            ask="How many dollars are left at the end?",
        ),
        "bus": Story(
            begin="A bus leaves the station with {n} passengers.",
            add="At the next stop {n} people get on.",
            subtract="At the next stop {n} people get off.",
            multiply="A holiday makes it {n} times as many passengers.",
            divide="The passengers change into {n} small buses, the same number into each.",
            ask="How many passengers does a bus have now?",
        ),
    }
)

# No training problem is told like these, and some of their words are in none.
HELD_OUT_STORIES = MappingProxyType(
    {
        "tank": Story(
            begin="A tank contains {n} liters of water.",
            add="{n} liters flow in.",
            subtract="{n} liters flow out.",
            multiply="Rain raises the amount to {n} times what it was.",
            divide="The water is divided equally among {n} tanks, and one tank is kept.",
            ask="How many liters does the tank contain?",
        ),
        "variable": Story(
            begin="Let x be {n}.",
            add="Increase x by {n}.",
            subtract="Decrease x by {n}.",
            multiply="Replace x by {n} times x.",
            divide="Replace x by x divided by {n}.",
            ask="What is x?",
        ),
    }
)

_NAMES = (
    "Anna",
    "Carl",
    "Dina",
    "Emil",
    "Fatima",
    "Greta",
    "Hugo",
    "Ines",
    "Jonas",
    "Kim",
    "Lena",
    "Maria",
    "Nils",
    "Omar",
    "Paula",
    "Quinn",
    "Rosa",
    "Sam",
    "Tom",
    "Uma",
    "Vera",
    "Will",
)
_THINGS = (
    "apples",
    "balls",
    "books",
    "boxes",
    "cards",
    "coins",
    "cookies",
    "cups",
    "eggs",
    "flowers",
    "keys",
    "lamps",
    "letters",
    "marbles",
    "nuts",
    "pears",
    "pencils",
    "photos",
    "plates",
    "shells",
    "stamps",
    "stones",
    "tickets",
    "toys",
)


def problem(
    index: int,
    *,
    seed: int,
    split: str,
    difficulty: Difficulty,
    stories: Sequence[Story] = tuple(STORIES.values()),
) -> Problem:
    """Returns the problem with a number, always the same one.

    Args:
      index: from 0 on, without an end.
      seed: other seeds give other problems of the same split.
      split: `TRAIN` or `TEST`.
      stories: what the question is told with, each equally often.

    Raises:
      ValueError: the split is unknown, or the difficulty leaves it without calculations.
    """
    in_test = lookup("split", split, {TRAIN: False, TEST: True})
    draws = random.Random(f"{seed}/{split}/{index}")
    for _ in range(_ATTEMPTS):
        made = _draw(draws, difficulty, stories)
        if _belongs_to_test(made.steps) == in_test:
            return made
    raise ValueError(f"{difficulty} has hardly any problems of the split {split!r}")


def _belongs_to_test(steps: Sequence[str]) -> bool:
    digest = hashlib.sha256("\n".join(steps).encode()).digest()
    return int.from_bytes(digest[:8], "big") % _TEST_ONE_IN == 0


def _draw(draws: random.Random, difficulty: Difficulty, stories: Sequence[Story]) -> Problem:
    story = draws.choice(stories)
    value = draws.randint(2, difficulty.largest)
    told, steps = [("begin", value)], []
    for _ in range(draws.randint(difficulty.least_steps, difficulty.most_steps)):
        possible = [
            (operation, operands)
            for operation in OPERATIONS
            if (operands := operation.operands(value, difficulty.largest))
        ]
        operation, operands = draws.choice(possible)
        operand = draws.choice(operands)
        result = operation.apply(value, operand)
        told.append((operation.field, operand))
        steps.append(f"{value} {operation.sign} {operand} = {result}")
        value = result
    words = {"name": draws.choice(_NAMES), "things": draws.choice(_THINGS)}
    sentences = [getattr(story, field).format(n=number, **words) for field, number in told]
    question = " ".join([*sentences, story.ask.format(**words)])
    return Problem(question=question, steps=tuple(steps), answer=value)
