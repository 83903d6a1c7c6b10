"""Markdown tables, and pages with sections that a program rewrites between two HTML comments."""

from collections.abc import Iterable, Sequence


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown, with a newline at its end."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def replace_between(page: str, begin: str, end: str, text: str) -> str | None:
    """Returns `page` with `text` between the lines `begin` and `end`.

    A blank line separates `text` from `begin`, and a newline separates it from `end`. Returns None
    if `page` has no line `begin`.

    Raises:
      ValueError: no line `end` follows `begin`.
    """
    before, begins, rest = page.partition(f"{begin}\n")
    if not begins:
        return None
    _, ends, after = rest.partition(f"{end}\n")
    if not ends:
        raise ValueError(f"the page has no line {end!r} after {begin!r}: add it")
    return f"{before}{begin}\n\n{text}\n{end}\n{after}"


def replace_section(page: str, name: str, text: str) -> str:
    """Returns `page` with `text` as its section `name`; a new section is appended.

    Raises:
      ValueError: the section has no end.
    """
    begin, end = f"<!-- section: {name} -->", f"<!-- end: {name} -->"
    replaced = replace_between(page, begin, end, text)
    if replaced is None:
        return f"{page.rstrip()}\n\n{begin}\n\n{text}\n{end}\n"
    return replaced
