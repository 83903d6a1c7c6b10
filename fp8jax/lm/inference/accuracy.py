"""Accuracy on problems whose answers are numbers, and differences of two models' accuracies.

Responses are decoded greedily, many at a time. Prompts are padded to a few lengths, powers of two,
and a batch always has the same number of rows, so there is one program for each length.

A prompt is the user's message in the model's chat template, and the response its turn. A model
without a template gets the prompt after BOS, and a new line.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from fp8jax.lm.data.byte_tokenizer import Tokenizer
from fp8jax.lm.inference.generate import Generator, bucket
from fp8jax.lm.inference.paired import Measured, measured
from fp8jax.lm.inference.problems import Problem
from fp8jax.lm.inference.sampling import Sampling
from fp8jax.lm.inference.verify import is_right
from fp8jax.lm.model.transformer import Transformer

_SHORTEST = 128  # what shorter prompts are padded to; less would only compile more programs
_NORMAL_95 = 1.6448536269514722  # 95% of a normal distribution lie below it

Right = Bool[np.ndarray, " items"]
Shares = Float[np.ndarray, " items"]


class Template(Protocol):
    """Makes prompts of messages, as `ChatTemplate` does (chat/chat_template.py)."""

    def prompt(self, messages: Sequence[Mapping[str, Any]], *, place: str) -> Any: ...

    def turn_ends(self) -> tuple[int, ...]: ...


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Accuracy:
    """What a model answered to some problems.

    Attributes:
      right: which responses are right.
      ended: which responses the model ended by itself, and not `max_tokens`.
      responses: the texts.
    """

    right: Right
    ended: Right
    responses: tuple[str, ...]

    def measured(self) -> Measured:
        """Returns the share of right responses."""
        return share(self.right)

    def against(self, problems: Sequence[Problem]) -> Right:
        """Returns which responses answer some other problems, such as shuffled ones."""
        return graded(self.responses, problems)


def share(flags: Right) -> Measured:
    """Returns the share of items that are True."""
    return measured(flags.astype(np.float64), np.ones(len(flags)))


def graded(responses: Sequence[str], problems: Sequence[Problem]) -> Right:
    """Returns which responses are right."""
    pairs = zip(responses, problems, strict=True)
    return np.array([is_right(response, problem.answer) for response, problem in pairs], bool)


def measure_accuracy(
    model: Transformer,
    variables: Any,
    tokenizer: Tokenizer,
    problems: Mapping[str, Sequence[Problem]],
    *,
    template: Template | None,
    stop_ids: Sequence[int] = (),
    begin: bool = True,
    max_tokens: int = 256,
    batch_size: int = 128,
) -> dict[str, Accuracy]:
    """Returns the accuracy on each set of problems.

    Args:
      variables: parameters, trained or frozen, and amax histories if the policy has any.
      problems: sets of problems by name; each has at least one.
      template: renders prompts; None for models without one.
      stop_ids: ids that end a response, besides the tokenizer's EOS and the token with which the
        template ends a turn.
      begin: whether the tokenizer's `bos` begins a prompt that no template renders, as in training.
      max_tokens: of a response.
      batch_size: problems that are answered at a time. Recipes that scale whole tensors by their
        current amax see all of them together, so with such a recipe it changes results slightly.

    Raises:
      ValueError: a prompt does not fit the model, the template refuses it, a number is out of its
        range, or a batch does not fit the memory.
    """
    prompts = {
        name: [
            _prompt(each, tokenizer, template, begin, f"{name}, problem {i + 1}")
            for i, each in enumerate(own)
        ]
        for name, own in problems.items()
    }
    stops = {tokenizer.eos, *stop_ids, *(() if template is None else template.turn_ends())}
    longest = max(len(prompt) for own in prompts.values() for prompt in own)
    generator = Generator(
        model,
        variables,
        vocab_size=tokenizer.vocab_size,
        max_length=_room(model, longest, max_tokens),
        max_requests=batch_size,
        cache="fp32" if model.dtype == jnp.float32 else "bf16",
    )
    found = {}
    for name, own in problems.items():
        ids = _generate(generator, prompts[name], sorted(stops), max_tokens)
        ended = [each[-1] in stops for each in ids]
        written = [each[:-1] if over else each for each, over in zip(ids, ended, strict=True)]
        responses = tuple(map(tokenizer.decode, written))
        found[name] = Accuracy(
            right=graded(responses, own),
            responses=responses,
            ended=np.array(ended, bool),
        )
    return found


def _room(model: Transformer, longest: int, max_tokens: int) -> int:
    """Returns the slots for the longest prompt and its response, a power of two if they fit."""
    room = bucket(max(longest, _SHORTEST) + max_tokens)
    longest_row = model.config.max_positions
    return min(room, longest_row) if longest_row else room


def _prompt(
    problem: Problem, tokenizer: Tokenizer, template: Template | None, begin: bool, place: str
) -> Sequence[int]:
    if template is None:
        return [tokenizer.bos] * begin + tokenizer.encode(problem.prompt + "\n").tolist()
    messages = [{"role": "user", "content": problem.prompt}]
    return template.prompt(messages, place=place).tolist()


def _generate(
    generator: Generator, prompts: Sequence[Sequence[int]], stops: Sequence[int], max_tokens: int
) -> list[list[int]]:
    """Returns the new ids of each prompt, stop ids included."""
    found: list[list[int]] = [[] for _ in prompts]
    for indices, length in _batches(prompts, generator.max_requests):
        out = generator.generate(
            [prompts[i] for i in indices],
            Sampling(temperature=0),
            max_tokens,
            stops,
            least_length=length,
        )
        for index, ids in zip(indices, out, strict=True):
            found[index] = ids.tolist()
    return found


def _batches(
    prompts: Sequence[Sequence[int]], batch_size: int
) -> Iterator[tuple[Sequence[int], int]]:
    """Yields the indices of prompts that share a batch, and the length that they are padded to.

    The last batch of several repeats its last prompt until it is full, which compiles no program
    for fewer rows, and changes no amax.
    """
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        by_length[bucket(max(len(prompt), _SHORTEST))].append(index)
    for length, indices in sorted(by_length.items()):
        for begin in range(0, len(indices), batch_size):
            batch = indices[begin : begin + batch_size]
            missing = batch_size - len(batch) if begin else 0
            yield [*batch, *[batch[-1]] * missing], length


# Differences --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """How much more of the same items one model has right than another.

    Attributes:
      value: the difference of the two shares.
      lower, upper: it is not less, and not more, each with 95% confidence.
    """

    value: float
    lower: float
    upper: float


def paired_difference(
    right_a: Right | Shares,
    right_b: Bool[np.ndarray, " as_many"] | Float[np.ndarray, " as_many"],
) -> PairedDifference:
    """Returns a's accuracy minus b's on the same items, with one-sided 95% bounds.

    The bounds are Tango's (1998), from the score test of paired proportions. Of n items, let b be
    right for the first model only, and c for the second only. Suppose that the true difference is
    D. Then b - c has the mean nD and the variance n(2q + D(1 - D)), where q, the chance of an item
    that only the second has right, has its most likely value given D: the positive root of

        2n q^2 + ((2n - b + c)D - b - c) q - cD(1 - D) = 0.

    The upper bound is the D at which b - c lies 1.645 standard deviations below its mean. Unlike
    the interval of a normal distribution, it has a width even if the models never differ:
    1.645^2 / (n + 1.645^2), which is 0.14 points for 2,000 items.

    Items may also be shares from 0 to 1: of the seeds that have an item right. Seeds share the
    items, so they are not more items. Let d be the differences of the items. They are treated as
    if those that are not 0 had one size, s = sum(d^2) / sum(|d|), with their sums of d and d^2
    unchanged: b and c are the sums of positive and of negative d over s, and D is in units of s.
    Where all seeds agree, s is 1, and the bounds are those of one of them. The bounds are for these
    models on other items, not for other seeds.

    Raises:
      ValueError: the models did not answer the same number of items, or none.
    """
    if right_a.shape != right_b.shape or not right_a.size:
        raise ValueError(f"accuracies on {right_a.size} and {right_b.size} items cannot be paired")
    n, d = right_a.size, right_a.astype(np.float64) - right_b
    size = float(np.sum(d**2) / np.sum(np.abs(d))) if d.any() else 1.0
    a_only, b_only = (float(np.sum(np.maximum(each, 0))) / size for each in (d, -d))
    return PairedDifference(
        value=float(np.sum(d)) / n,
        lower=-size * _upper_bound(b_only, a_only, n),
        upper=size * _upper_bound(a_only, b_only, n),
    )


def _upper_bound(b: float, c: float, n: int) -> float:
    """Returns Tango's upper bound; by bisection, since the score falls as D rises."""
    low, high = (b - c) / n, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if _score(b, c, n, middle) > -_NORMAL_95:
            low = middle
        else:
            high = middle
    return high


def _score(b: float, c: float, n: int, difference: float) -> float:
    """Returns how many standard deviations b - c lies above its mean."""
    linear = (2 * n - b + c) * difference - b - c
    constant = c * difference * (1 - difference)
    q = (math.sqrt(max(linear**2 + 8 * n * constant, 0.0)) - linear) / (4 * n)
    variance = n * (2 * q + difference * (1 - difference))
    above = b - c - n * difference
    if variance > 0:
        return above / math.sqrt(variance)
    return 0.0 if above >= 0 else -math.inf
