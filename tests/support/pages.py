"""HTML pages as text."""

from html.parser import HTMLParser


class _Sections(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found: dict[str, list[str]] = {}
        self._open: list[str] = []

    def handle_starttag(self, tag, attributes):
        if tag == "section":
            self._open.append(dict(attributes)["id"])
            self.found[self._open[-1]] = []
        elif tag not in ("strong", "span", "code"):  # what stands in a line of its own, or a cell
            self.handle_data(" ")

    def handle_endtag(self, tag):
        if tag == "section":
            self._open.pop()

    def handle_data(self, data):
        if self._open:
            self.found[self._open[-1]].append(data)


def page_of(text: str) -> dict[str, str]:
    """The visible text of each <section> of a page by its id, spaces and lines made one space."""
    parser = _Sections()
    parser.feed(text)
    parser.close()
    return {name: " ".join("".join(parts).split()) for name, parts in parser.found.items()}
