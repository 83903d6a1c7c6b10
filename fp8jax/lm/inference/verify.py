r"""The verifier: the final number of a worked answer, compared exactly.

A worked answer marks its result as GSM8K does, "#### 1,234" at the end of a line, or as MATH does,
\boxed{1234}. The last mark counts, and only what it marks: a right number elsewhere in the text is
no answer, and a mark that holds no single number gives none, even if an earlier one did. A model
that has learned the form gains nothing by naming several numbers.

Numbers are integers, decimals and simple fractions, and become exact fractions: 0.5, 1/2 and
\frac{1}{2} are equal, and 0.333 is not 1/3.
"""

import re
from fractions import Fraction

_MARK = re.compile(r"####|\\boxed *(?=\{)")
_MOST_DIGITS = 100  # longer texts of digits are no answers, and slow to convert

_WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?) ?\$? ?(?:(?P<over>{_WHOLE}) ?/ ?(?P<under>{_WHOLE})"
    rf"|(?P<whole>{_WHOLE}?)(?:\.(?P<part>[0-9]*))?)"
)
# What may follow a number: a period, or a unit in words. Neither more digits nor an operator.
_UNIT = re.compile(r" ?%?\.?|(?: ?%)? [^\W\d_][^0-9+*/=<>^\\-]*")

_LATEX_PART = r" *(?:\{(?P<%s>[^{}]*)\}|(?P<%s_digit>[0-9]))"  # \frac{1}{2} or \frac12
_LATEX_FRACTION = re.compile(
    r"(?P<sign>[+-]?) *\\[dt]?frac"
    + _LATEX_PART % ("over", "over")
    + _LATEX_PART % ("under", "under")
)
_LATEX_UNIT = re.compile(r"\\(?:text|mbox|textrm|mathrm)\{[^{}0-9]*\}|\^\{?\\circ\}?|\\?%")
_LATEX_SPACE = re.compile(r"\\[!,;: ] *|\{,\}")


def is_right(response: str, answer: Fraction | int) -> bool:
    """Whether the final number of a response is the answer."""
    return final_number(response) == answer


def final_number(text: str) -> Fraction | None:
    r"""Returns the number after the last "####" or in the last \boxed{…}, whichever comes later.

    None if there is no mark, or if the last one holds anything but one number. After "####" a unit
    in words may follow.
    """
    marks = list(_MARK.finditer(text))
    if not marks:
        return None
    last = marks[-1]
    if last[0] == "####":
        return _number_with_unit(text[last.end() :].partition("\n")[0])
    boxed = _in_braces(text, last.end())
    return None if boxed is None else _latex_number(boxed)


def as_number(text: str) -> Fraction | None:
    """Returns the number that a text is, such as "-1,234.5" or "3/4"; None if it is none."""
    found = _NUMBER.fullmatch(_plain(text))
    return None if found is None else _exact(found)


def _plain(text: str) -> str:
    """Returns the text with a usual minus sign, and one space for any white space."""
    return " ".join(text.replace("\N{MINUS SIGN}", "-").split())


def _number_with_unit(line: str) -> Fraction | None:
    line = _plain(line)
    found = _NUMBER.match(line)
    if found is None or not _UNIT.fullmatch(line, found.end()):
        return None
    return _exact(found)


def _exact(found: re.Match[str]) -> Fraction | None:
    """Returns the number that `_NUMBER` found; None for no digits, too many, or a division by 0."""
    digits = {
        name: (found[name] or "").replace(",", "") for name in ("over", "under", "whole", "part")
    }
    if not any(digits.values()) or max(map(len, digits.values())) > _MOST_DIGITS:
        return None
    if digits["over"]:
        if not int(digits["under"]):
            return None
        value = Fraction(int(digits["over"]), int(digits["under"]))
    else:
        value = Fraction(int(digits["whole"] + digits["part"] or "0"), 10 ** len(digits["part"]))
    return -value if found["sign"] == "-" else value


def _in_braces(text: str, begin: int) -> str | None:
    """Returns what the braces hold that open at `begin`; None if they do not close."""
    depth = 0
    for at in range(begin, len(text)):
        depth += {"{": 1, "}": -1}[text[at]] if text[at] in "{}" else 0
        if depth == 0:
            return text[begin + 1 : at]
    return None


def _latex_number(text: str) -> Fraction | None:
    text = _LATEX_UNIT.sub("\0", _LATEX_SPACE.sub("", text)).replace(r"\$", "$")
    text = _plain(text.strip("\0$ "))  # a unit between digits stays, so that they are no number
    found = _LATEX_FRACTION.fullmatch(text)
    if found is None:
        return as_number(text)
    over, under = (as_number(found[name] or found[f"{name}_digit"]) for name in ("over", "under"))
    if over is None or not under:
        return None
    return -over / under if found["sign"] == "-" else over / under
