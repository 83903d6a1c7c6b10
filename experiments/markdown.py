"""TODO docstring."""

from collections.abc import Iterable, Sequence


def replace_section(page: str, name: str, text: str) -> str:
    """`page` with `text` as its section of that name, at its place or at the end.

    Raises ValueError where the section begins and does not end.
    """
    begin, end = f"<!-- section: {name} -->\n", f"<!-- end: {name} -->\n"
    before, found, rest = page.partition(begin)
    if not found:
        return f"{page.rstrip()}\n\n{begin}\n{text}\n{end}"
    _, closed, after = rest.partition(end)
    if not closed:
        raise ValueError(f"the page's section {name!r} has no end: {end.strip()}")
    return f"{before}{begin}\n{text}\n{end}{after}"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown, with a newline at the end."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
