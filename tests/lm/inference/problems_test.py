"""Files of problems: the fields that are understood, what is left out, and what is refused."""

import gzip
import json
from collections import Counter
from fractions import Fraction

import pytest

from experiments.arithmetic.files import problem_files, write_problems
from experiments.arithmetic.problems import TEST, Difficulty
from fp8jax.lm.inference.problems import Problem, read_problems, shuffled


def write(path, *rows):
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")
    return path


def test_fields_of_gsm8k(tmp_path):
    path = write(
        tmp_path / "gsm8k.jsonl",
        {"question": "How many?", "answer": "2+3=<<2+3=5>>5 eggs.\n#### 1,005"},
        "",
        {"question": "How much?", "answer": 2.5, "id": 7},
        {"question": "And now?", "answer": "3/4"},
    )
    found = read_problems(path)
    assert found.problems == (
        Problem(prompt="How many?", answer=Fraction(1005)),
        Problem(prompt="How much?", answer=Fraction(5, 2)),
        Problem(prompt="And now?", answer=Fraction(3, 4)),
    )
    assert found.left_out == 0


def test_fields_of_math(tmp_path):
    path = write(
        tmp_path / "math.jsonl",
        {"problem": "Half?", "solution": r"It is $\boxed{\frac{1}{2}}$.", "answer": "unused"},
        {"problem": "An interval?", "solution": r"It is $\boxed{(1, 2]}$."},
        {"problem": "Nothing marked?", "solution": "2"},
    )
    found = read_problems(path)
    assert found.problems == (Problem(prompt="Half?", answer=Fraction(1, 2)),)
    assert found.left_out == 2


def test_arithmetic_files_are_read(tmp_path):
    files = problem_files(train=1, test=30, difficulty=Difficulty())
    write_problems(tmp_path, files, seed=0)
    for each in files:
        if each.split == TEST:
            expected = [
                Problem(prompt=made.question, answer=Fraction(made.answer))
                for made in each.problems(0)
            ]
            assert list(read_problems(tmp_path / each.name).problems) == expected


def test_compressed_files_are_read(tmp_path):
    text = json.dumps({"prompt": "1?", "answer": "1"}).encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text))
    assert len(read_problems(tmp_path / "a.jsonl.gz").problems) == 1


@pytest.mark.parametrize(
    "row, message",
    [
        ("{", "line 2: Expecting property name"),
        ("[1]", r"line 2: expected the fields prompt and answer or question and .*, got \[1\]"),
        ({"prompt": "a"}, "line 2: expected the fields"),
        ({"prompt": 3, "answer": "3"}, "line 2: prompt must be a text that is not blank, got 3"),
        ({"question": " ", "answer": "3"}, "line 2: question must be a text"),
        ({"question": "\ud800", "answer": "3"}, "line 2: .*surrogates"),
        ({"question": "a", "answer": None}, "answer must be a text or a number, got None"),
        ({"question": "a", "answer": True}, "answer must be a text or a number, got True"),
        ({"question": "a", "answer": "many"}, "answer holds no number, .*: 'many'"),
        ({"question": "a", "answer": "3\n#### x"}, "answer holds no number"),
        ('{"question": "a", "answer": NaN}', "answer holds no number, .*: nan"),
    ],
)
def test_refused_with_file_and_line(tmp_path, row, message):
    path = write(tmp_path / "bad.jsonl", {"question": "a", "answer": "1"}, row)
    with pytest.raises(ValueError, match=message) as refused:
        read_problems(path)
    assert str(refused.value).startswith(f"{path}, line 2: ")


def test_a_file_without_numbers_is_refused(tmp_path):
    for rows in ([], [{"problem": "a", "solution": "b"}]):
        with pytest.raises(ValueError, match="has no problem whose answer is a number"):
            read_problems(write(tmp_path / "none.jsonl", *rows))


def test_shuffled_answers():
    problems = [Problem(prompt=str(i), answer=Fraction(i)) for i in range(40)]
    mixed = shuffled(problems, 0)
    assert [each.prompt for each in mixed] == [each.prompt for each in problems]
    answers = [each.answer for each in mixed]
    assert Counter(answers) == Counter(each.answer for each in problems)
    assert all(a.answer != b.answer for a, b in zip(mixed, problems, strict=True))
    assert mixed == shuffled(problems, 0) != shuffled(problems, 1)
    with pytest.raises(ValueError, match=r"answers of 1 problem\(s\) cannot be shuffled"):
        shuffled(problems[:1], 0)
