"""Accuracy: responses as the generator gives them one by one, few programs, and exact intervals."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from fp8jax.lm.chat.chat_template import load_chat_template
from fp8jax.lm.data.bpe import load_bpe
from fp8jax.lm.data.byte_tokenizer import ByteTokenizer
from fp8jax.lm.inference import accuracy
from fp8jax.lm.inference.accuracy import (
    graded,
    measure_accuracy,
    paired_difference,
    share,
)
from fp8jax.lm.inference.generate import Generator
from fp8jax.lm.inference.paired import difference, measured
from fp8jax.lm.inference.problems import Problem, shuffled
from fp8jax.lm.inference.sampling import Sampling
from tests.support.chat_templates import CHATML, write_chat_folder
from tests.support.tiny_models import tiny_model

BYTES = ByteTokenizer()
Z = 1.6448536269514722


def problems(lengths, answer=0):
    return [Problem(prompt="x" * length, answer=Fraction(answer)) for length in lengths]


@pytest.fixture(scope="module")
def model():
    return tiny_model(vocab_size=BYTES.vocab_size)


# Responses ----------------------------------------------------------------------------------------


def test_responses_are_those_of_single_prompts(model):
    """In float32 a batch changes no token; the last batch is padded with repeated prompts."""
    own = problems([3, 9, 140, 4, 7, 12, 150])
    found = measure_accuracy(*model, BYTES, {"a": own}, template=None, max_tokens=8, batch_size=4)
    single = Generator(*model, vocab_size=BYTES.vocab_size, max_length=256, cache="fp32")
    same_program = dict(least_length=128)  # for all short prompts
    for problem, response, ended in zip(own, found["a"].responses, found["a"].ended, strict=True):
        prompt = [BYTES.bos, *BYTES.encode(problem.prompt + "\n")]
        (ids,) = single.generate([prompt], Sampling(temperature=0), 8, [BYTES.eos], **same_program)
        assert response == BYTES.decode(ids)
        assert ended == (ids[-1] == BYTES.eos)


def test_one_program_for_each_length(model, monkeypatch):
    """Whatever the sets, and however many problems the last batch of a set has."""
    generators = []

    def spied(*arguments, **options):
        generators.append(Generator(*arguments, **options))
        return generators[-1]

    monkeypatch.setattr(accuracy, "Generator", spied)
    sets = {"a": problems([5] * 9 + [140] * 6), "b": problems(range(1, 8))}
    found = measure_accuracy(*model, BYTES, sets, template=None, max_tokens=3, batch_size=4)
    assert [len(found[name].right) for name in sets] == [15, 7]
    (generator,) = generators
    assert generator._prefill._cache_size() == 2  # 128 and 256 positions


def test_grading_and_shares():
    own = problems([1, 1, 1], answer=5)
    responses = ("2 + 3 = 5\n#### 5", "#### 6", "5")
    right = graded(responses, own)
    assert right.tolist() == [True, False, False]
    estimate = share(right).estimate
    assert estimate.value == 1 / 3
    # The standard error of a mean: sqrt(sum of squares / (n - 1) / n) with deviations 2/3, -1/3.
    assert estimate.error == pytest.approx(math.sqrt(6 / 9 / 2 / 3), rel=1e-12)


def test_shuffled_answers_fall_to_chance():
    """A model that is always right has each shuffled answer right as often as two answers agree.

    Over all shuffles the share is the number of ordered pairs of other problems with the same
    answer, over all pairs.
    """
    values = [i % 7 for i in range(50)]
    own = [Problem(prompt="x", answer=Fraction(value)) for value in values]
    responses = tuple(f"#### {value}" for value in values)
    assert graded(responses, own).all()
    shares = [graded(responses, shuffled(own, seed)).mean() for seed in range(200)]
    pairs = sum(a == b for a, b in itertools.permutations(values, 2)) / (50 * 49)
    # 200 shares of 50 items: a standard error of 0.05 / sqrt(200), of which this is five.
    assert abs(np.mean(shares) - pairs) < 5 * np.std(shares) / math.sqrt(200)


def test_numbers_that_are_refused(model):
    one = {"a": problems([300])}
    with pytest.raises(ValueError, match="num_tokens=0 must be at least 1"):
        measure_accuracy(*model, BYTES, one, template=None, max_tokens=0)
    with pytest.raises(ValueError, match="max_requests=0 must be at least 1"):
        measure_accuracy(*model, BYTES, one, template=None, batch_size=0)
    gpt = tiny_model(
        "gpt2_125m", vocab_size=BYTES.vocab_size, learned_positions=128, n_heads=4, n_kv_heads=4
    )
    with pytest.raises(ValueError, match="prompt 0 has 302 tokens: .* does not fit .*128"):
        measure_accuracy(*gpt, BYTES, one, template=None)


def test_prompts_are_rendered_and_turns_end(tmp_path, monkeypatch):
    """The generator gets the template's prompts, and stops at what ends a turn."""
    tokenizer = load_bpe(write_chat_folder(tmp_path, CHATML) / "tokenizer.json")
    template = load_chat_template(tmp_path, tokenizer)
    (end,) = template.turn_ends()
    asked = []

    def generate(self, prompts, sampling, num_tokens, stops, **unused):
        asked.append(([list(prompt) for prompt in prompts], sampling, num_tokens, set(stops)))
        texts = [tokenizer.encode(f"#### {index}") for index in range(len(prompts))]
        ends = [end, end, 7]  # the last is a token of text, and no part of the response
        texts = [np.append(ids, last) for ids, last in zip(texts, ends, strict=True)]
        return [ids[: num_tokens + index] for index, ids in enumerate(texts)]

    monkeypatch.setattr(Generator, "generate", generate)
    own = [Problem(prompt=f"what is {i}", answer=Fraction(i)) for i in range(3)]
    model = tiny_model(vocab_size=tokenizer.vocab_size)
    length = len(tokenizer.encode("#### 0"))
    found = measure_accuracy(
        *model, tokenizer, {"a": own}, template=template, stop_ids=[7], max_tokens=length
    )["a"]
    prompts = [template.prompt([{"role": "user", "content": each.prompt}]) for each in own]
    assert asked == [
        (
            [ids.tolist() for ids in prompts],
            Sampling(temperature=0),
            length,
            {tokenizer.eos, end, 7},
        )
    ]
    assert found.responses == ("#### 0", "#### 1", "#### 2")
    assert found.right.all() and found.ended.tolist() == [False, True, True]


# Intervals ----------------------------------------------------------------------------------------


def flags(b, c, n, both=0):
    """Items of which b are right for the first model only, and c for the second only."""
    first = [True] * b + [False] * c + [True] * both + [False] * (n - b - c - both)
    second = [False] * b + [True] * c + [True] * both + [False] * (n - b - c - both)
    return np.array(first), np.array(second)


@pytest.mark.parametrize("n", [10, 2000])
def test_models_that_never_differ(n):
    found = paired_difference(*flags(0, 0, n, both=n // 2))
    assert found.value == 0
    assert found.upper == -found.lower == pytest.approx(Z**2 / (n + Z**2), rel=1e-9)


@pytest.mark.parametrize("b, c, n", [(3, 1, 20), (1, 3, 20), (40, 25, 2000), (0, 6, 30), (9, 0, 9)])
def test_bounds_are_those_of_the_likelihood(b, c, n):
    """The score at the upper bound, with q from a search for the largest likelihood.

    A grid of 2 million values of q finds the maximum to 1e-6 of its range, and the score there to
    1e-3; the bound's own precision is 1e-9.
    """
    found = paired_difference(*flags(b, c, n))
    assert found.value == (b - c) / n
    for value, (x, y) in ((found.upper, (b, c)), (-found.lower, (c, b))):
        if value == 1:
            continue
        low, high = max(0.0, -value), (1 - value) / 2
        q = low + (high - low) * np.linspace(1e-9, 1 - 1e-9, 2_000_001)
        with np.errstate(all="ignore"):
            likelihood = (
                x * np.log(q + value) + y * np.log(q) + (n - x - y) * np.log(1 - 2 * q - value)
            )
        best = q[np.nanargmax(likelihood)]
        variance = n * (2 * best + value * (1 - value))
        assert (n * value - (x - y)) / math.sqrt(variance) == pytest.approx(Z, abs=1e-3)


def test_bounds_agree_with_the_normal_interval_for_many_items():
    """With 1,000 items that differ, the two agree to a few percent of the standard error."""
    first, second = flags(600, 400, 20_000, both=9000)
    found = paired_difference(first, second)
    usual = difference(share(first), share(second))
    assert found.value == pytest.approx(usual.value, abs=1e-12) == 0.01
    assert abs(found.upper - (usual.value + Z * usual.error)) < 0.05 * usual.error
    assert abs(found.lower - (usual.value - Z * usual.error)) < 0.05 * usual.error


@pytest.mark.parametrize("seeds", [2, 3])
def test_seeds_are_not_more_items(seeds):
    """Seeds that agree have the bounds of one; others, with many items, a normal interval."""
    one = flags(3, 1, 20, both=9)
    same = paired_difference(*(np.mean([each] * seeds, axis=0) for each in one))
    assert same == paired_difference(*one)
    draws, n = np.random.default_rng(0), 20_000
    hard = draws.random(n)  # an item's chance, which all models share
    a, b = (np.mean(draws.random((seeds, n)) < hard - drop, axis=0) for drop in (0, 0.02))
    found = paired_difference(a, b)
    usual = difference(*(measured(each, np.ones(n)) for each in (a, b)))
    assert found.value == pytest.approx(usual.value, abs=1e-12)
    assert abs(found.upper - (usual.value + Z * usual.error)) < 0.05 * usual.error
    assert abs(found.lower - (usual.value - Z * usual.error)) < 0.05 * usual.error


def test_bounds_are_symmetric_and_ordered():
    for b, c, n in itertools.product(range(6), range(6), [12, 100]):
        found, other = paired_difference(*flags(b, c, n)), paired_difference(*flags(c, b, n))
        assert (found.lower, found.upper) == (-other.upper, -other.lower)
        assert -1 <= found.lower < found.value < found.upper <= 1
        assert paired_difference(*flags(b + 1, c, n)).upper > found.upper


@pytest.mark.parametrize("p_a, p_b", [(0.1, 0.1), (0.05, 0.01), (0.02, 0.08)])
def test_coverage(p_a, p_b):
    """The true difference lies below the upper bound in 94% to 96% of all outcomes of 200 items.

    All outcomes are summed but those less likely than 1e-9, so the coverage is exact to 2e-6. A
    bound that is a function of counts cannot cover 95% exactly.
    """
    n, covered = 200, 0.0
    for b in range(45):
        for c in range(45):
            chance = (
                math.comb(n, b)
                * math.comb(n - b, c)
                * p_a**b
                * p_b**c
                * (1 - p_a - p_b) ** (n - b - c)
            )
            if chance > 1e-9:
                covered += chance * (paired_difference(*flags(b, c, n)).upper >= p_a - p_b)
    assert 0.94 < covered < 0.96


def test_items_that_cannot_be_paired():
    none = np.zeros(0, bool)
    for a, b in ((np.ones(3, bool), np.ones(4, bool)), (none, none)):
        with pytest.raises(ValueError, match="items cannot be paired"):
            paired_difference(a, b)


def test_same_responses_on_every_run(model):
    own = {"a": problems([3, 4, 5])}
    runs = [
        measure_accuracy(*model, BYTES, own, template=None, max_tokens=6)["a"].responses
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
