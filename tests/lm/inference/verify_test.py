"""The verifier, on answers written by hand, honest ones and others."""

import time
from fractions import Fraction

import pytest

from fp8jax.lm.inference.verify import as_number, final_number, is_right

NUMBERS = [
    ("14", 14),
    (" 14 ", 14),
    ("007", 7),
    ("-3", -3),
    ("\N{MINUS SIGN}3", -3),
    ("+3", 3),
    ("-0", 0),
    ("$18", 18),
    ("-$18", -18),
    ("1,234", 1234),
    ("12,345,678.9", Fraction(123456789, 10)),
    ("0.50", Fraction(1, 2)),
    (".5", Fraction(1, 2)),
    ("5.", 5),
    ("3/4", Fraction(3, 4)),
    ("-3 / 4", Fraction(-3, 4)),
    ("6/3", 2),
    ("1,000/3", Fraction(1000, 3)),
    ("9" * 100, 10**100 - 1),
]

NO_NUMBERS = [
    "",
    " ",
    "-",
    ".",
    "$",
    "x",
    "1 2",
    "1,23",
    "1,2345",
    ",123",
    "1.2.3",
    "1.5/2",
    "1/0",
    "1/",
    "/2",
    "1/2/3",
    "1e5",
    "1_000",
    "0x10",
    "--1",
    "5%",
    "٣",
    "²",
    "½",
    "inf",
    "nan",
    "9" * 101,
    "9" * 99999,
    "12 apples",
]


@pytest.mark.parametrize("text, value", NUMBERS, ids=[text[:20] for text, _ in NUMBERS])
def test_numbers(text, value):
    found = as_number(text)
    assert isinstance(found, Fraction) and found == value
    assert final_number(f"#### {text}") == final_number(f"\\boxed{{{text}}}") == value


@pytest.mark.parametrize("text", NO_NUMBERS, ids=[repr(text[:20]) for text in NO_NUMBERS])
def test_what_is_no_number(text):
    assert as_number(text) is None


MARKED = [
    ("12 + 7 = 19\n#### 19", 19),
    ("####19", 19),
    ("####\t 19  apples", 19),
    (r"#### \boxed{19}", 19),
    ("#### 19\n", 19),
    ("#### 19\r\n", 19),
    ("#### 19.", 19),
    ("#### 1,900 dollars", 1900),
    ("#### $19 per day.", 19),
    ("#### 50%", 50),
    ("#### 50 % of all", 50),
    ("#### 5\n#### 6", 6),
    ("#### 6\nand more text with 7", 6),
    (r"so it is \boxed{540}", 540),
    (r"$\boxed{ 540 }$.", 540),
    (r"\boxed {540}", 540),
    (r"\boxed{1}, no: \boxed{2}", 2),
    (r"\boxed{\frac{3}{4}}", Fraction(3, 4)),
    (r"\boxed{-\dfrac{3}{4}}", Fraction(-3, 4)),
    (r"\boxed{\tfrac{-3}{4}}", Fraction(-3, 4)),
    (r"\boxed{10{,}000}", 10000),
    (r"\boxed{10,\!000}", 10000),
    (r"\boxed{12\text{ inches}}", 12),
    (r"\boxed{\text{about } 12 \text{ cents}\%}", 12),
    (r"\boxed{90^\circ}", 90),
    (r"\boxed{25\%}", 25),
    (r"\boxed{\$5.50}", Fraction(11, 2)),
    ("#### 3\n\\boxed{4}", 4),
    ("\\boxed{4}\n#### 3", 3),
]

NOT_MARKED = [
    "",
    "19",
    "the answer is 19",
    "### 19",
    "####",
    "####\n19",
    "#### nineteen",
    "##### 19",
    "#### x = 19",
    "#### 19 or 20",
    "#### 19, 20",
    "#### 19 20",
    "#### 3 1/2",
    "#### 19 + 1",
    "#### 19 = 19",
    "#### 19-20",
    "#### 19abc",
    "#### 1e5",
    "#### 19 ± 3",
    "#### 19 (or 20)",
    "#### 19\n#### unsure",
    "#### 19\n####",
    r"#### \boxed",
    r"\boxed{}",
    r"\boxed{19",
    r"\boxed{x+19}",
    r"\boxed{1, 2, 3}",
    r"\boxed{(1, 2)}",
    r"\boxed{\frac{1}{0}}",
    r"\boxed{\frac{1}{2}\frac{1}{2}}",
    r"\boxed{2\frac{1}{2}}",
    r"\boxed{5\text{ or }6}",
    r"\boxed{\text{5 or }6}",
    r"\boxed{2\text{ hours }30\text{ minutes}}",
    r"\boxed{1\mathrm{e}5}",
    r"\boxed{5^\circ30^\circ}",
    r"\boxed{1\%2}",
    r"\boxed{\sqrt{2}}",
    r"\boxed{\boxed{}}",
    r"boxed{19}",
    "#### 5\n\\boxed{x}",
]


@pytest.mark.parametrize("text, value", MARKED, ids=[text for text, _ in MARKED])
def test_final_number(text, value):
    assert final_number(text) == value
    assert is_right(text, Fraction(value)) and not is_right(text, Fraction(value) + 1)


@pytest.mark.parametrize("text", NOT_MARKED, ids=map(repr, NOT_MARKED))
def test_no_final_number(text):
    assert final_number(text) is None
    assert not is_right(text, 19)


def test_comparison_is_exact():
    assert is_right("#### 0.50", Fraction(1, 2)) and is_right("#### 2/4", Fraction(1, 2))
    assert not is_right("#### 0.333333333333333333333", Fraction(1, 3))
    # As floats they would be equal.
    assert not is_right("#### 9007199254740993", 9007199254740992)
    assert not is_right(f"#### 1.{'0' * 30}1", 1)


@pytest.mark.parametrize(
    "text",
    [
        "#### " * 50_000,
        "\\boxed{" * 50_000,
        "#### " + "1," * 50_000,
        "#### 1" + " a" * 50_000,
        "\\boxed{" + "{" * 100_000,
        "#### " + "9" * 200_000,
        "#### 1" + " " * 100_000 + "2",
        "\\boxed" + " " * 100_000,
        "\\boxed{" + "\\text{" * 100_000 + "}",
    ],
    ids=["marks", "boxes", "commas", "words", "braces", "digits", "spaces", "no box", "units"],
)
def test_long_texts_take_no_long_time(text):
    begin = time.process_time()
    final_number(text)
    assert time.process_time() - begin < 2  # milliseconds; a quadratic search would take minutes
