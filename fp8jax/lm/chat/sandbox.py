"""The sandbox in which chat templates run: what Hugging Face's templates expect, and limits.

jinja2's immutable sandbox keeps a template from the machine, not from running forever. So its steps
are counted here: the rounds of its loops, and its calls. A count stops the same template on the
same data on every machine, which a clock would not. What a template stores, passes, multiplies or
pads has a largest size, too.

Nothing in a template is drawn at random: rendering the same data gives the same text.
"""

import datetime
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Characters that Unicode reserves for internal use, and that no text has.
GUARD = "\ufdd0"  # stands after the first character of what must not become a token
BEGIN, END = "\ufdd1", "\ufdd2"  # stand around what a `generation` tag holds
MARK = "\ufdd3"  # stands around the number of a text (leaves.py)
RESERVED = frozenset((GUARD, BEGIN, END, MARK))

STEPS = 5_000_000  # of a rendering: rounds of loops, and calls
LARGEST = 2**24  # characters or entries of what a template stores, passes or multiplies
_POWER = 2**12  # bits of the largest power
_INDENT = 80  # of JSON


class Sandbox(ImmutableSandboxedEnvironment):
    """Renders templates, in `STEPS` steps at most; `restart` begins to count."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self, now: datetime.datetime):
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        self.restart()
        self.filters |= {"tojson": _tojson, "_counted": _counted, "_bounded": _bounded}
        self.globals |= {"raise_exception": _raise, "strftime_now": now.strftime}
        del self.filters["random"], self.globals["lipsum"]
        self.filters = {name: _measured(name, f) for name, f in self.filters.items()}

    def restart(self, steps: int | None = None) -> None:
        """Begins a rendering, of `STEPS` steps at most or of others."""
        self._steps = self._left = STEPS if steps is None else steps

    def step(self) -> None:
        """Counts a step; TemplateError if there were too many."""
        self._left -= 1
        if self._left < 0:
            _raise(f"it takes more than {self._steps:,} steps, and may never end")

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        """Parses a template, and has its loops counted and what it stores measured."""
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(jinja2.nodes.For)):
            loop.iter = _filtered(loop.iter, "_counted")
        for assign in list(tree.find_all(jinja2.nodes.Assign)):
            assign.node = _filtered(assign.node, "_bounded")
        for block in list(tree.find_all(jinja2.nodes.AssignBlock)):
            block.filter = _filtered(block.filter, "_bounded")
        return tree

    # The names of the parameters are those of jinja2: keywords of a template must not meet them.
    def call(__self, __context, __obj, *args, **kwargs):  # noqa: N805
        """Calls what a template calls."""
        __self.step()
        given = (*args, *kwargs.values())
        for value in given:
            _check_size(value)
        method = getattr(__obj, "__wrapped__", __obj)  # jinja2 wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            _check_result(method.__name__, owner, given)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        """Multiplies, raises to a power, adds or formats."""
        if operator == "%" and isinstance(left, str):
            _check_result("format", left, right if isinstance(right, tuple) else (right,))
        size = _size_of_result(operator, left, right)
        if size > (_POWER if operator == "**" else LARGEST):
            _raise(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _filtered(node: Any, name: str) -> jinja2.nodes.Filter:
    lineno = 1 if node is None else node.lineno
    return jinja2.nodes.Filter(node, name, [], [], None, None, lineno=lineno)


@jinja2.pass_context  # so that jinja2 does not apply it to constants when it compiles
def _counted(context: jinja2.runtime.Context, items: Iterable[Any]) -> Iterator[Any]:
    """Yields what a loop runs over, and counts its rounds."""
    sandbox = context.environment
    assert isinstance(sandbox, Sandbox)
    for item in items:
        sandbox.step()
        yield item


@jinja2.pass_context
def _bounded(context: jinja2.runtime.Context, value: Any) -> Any:
    """Returns what a template stores."""
    _check_size(value)
    return value


def _check_size(value: Any) -> None:
    if isinstance(value, str | list | tuple) and len(value) > LARGEST:
        _raise(f"it makes a {type(value).__name__} of more than {LARGEST:,} entries")


# What has widths in formats such as "%8.2f" and "{:>8}"; and those with widths of their arguments.
_FORMATS = re.compile(r"%[-+ #\d.]*|\{[^{}]*")
_WIDTH_GIVEN = re.compile(r"\*|\{[^{}]*\{")

# Filters and methods of texts that make as much as a number says.
_AS_WIDE = ("batch", "center", "expandtabs", "indent", "ljust", "rjust", "slice", "zfill")


def _measured(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a filter that raises TemplateError before it makes too much."""

    @functools.wraps(function)  # with what jinja2 reads of it
    def measured(*args: Any, **kwargs: Any) -> Any:
        about = (jinja2.Environment, jinja2.runtime.Context, jinja2.nodes.EvalContext)
        value, *others = [each for each in args if not isinstance(each, about)]
        _check_result(name, value, (*others, *kwargs.values()))
        return function(*args, **kwargs)

    return measured


def _check_result(name: str, value: Any, given: Sequence[Any]) -> None:
    """TemplateError if a filter or a method of a text would make too much of `value`."""
    texts = [each for each in given if isinstance(each, str)]
    numbers = [abs(each) for each in given if isinstance(each, int)]
    size = 0
    if name in _AS_WIDE and isinstance(value, str | list | tuple):
        size = (len(value) + 1) * max([*numbers, *map(len, texts)], default=0)
    elif name == "replace" and isinstance(value, str) and len(texts) > 1:
        size = len(value) + value.count(texts[0]) * len(texts[1])
    elif name == "join":  # a filter of a list, or a method of what stands between its entries
        many = [each for each in (value, *given) if isinstance(each, list | tuple)]
        between = value if isinstance(value, str) else "".join(texts[:1])
        sizes = [len(each) for each in (many[0] if many else ()) if isinstance(each, str)]
        size = sum(sizes) + len(sizes) * len(between)
    elif name == "format" and isinstance(value, str):
        widths = [int(n) for part in _FORMATS.findall(value) for n in re.findall(r"\d+", part)]
        size = max([*widths, *(numbers if _WIDTH_GIVEN.search(value) else ())], default=0)
    if size > LARGEST:
        _raise(f"{name} makes more than {LARGEST:,} entries")


def _size_of_result(operator: str, left: Any, right: Any) -> int:
    """Returns the entries of a product or sum, or the bits of a power; 0 for those of numbers."""
    if operator == "+":
        sizes = [len(each) for each in (left, right) if isinstance(each, str | list | tuple)]
        return sum(sizes)
    if operator == "**":
        whole = isinstance(left, int) and isinstance(right, int)
        return left.bit_length() * abs(right) if whole else 0
    for many, times in ((left, right), (right, left)):
        if isinstance(many, str | list | tuple) and isinstance(times, int):
            return len(many) * times
    return 0


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Like jinja2's own filter, but without HTML's escapes."""
    if indent is not None and indent > _INDENT:
        _raise(f"tojson indents by more than {_INDENT}")
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    for character in (GUARD, MARK):  # which ensure_ascii would spell out
        text = text.replace(json.dumps(character)[1:-1], character)
    return text


class _Generation(jinja2.ext.Extension):
    """The tag {% generation %}…{% endgeneration %}: writes marks around what it holds."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_mark")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{BEGIN}{caller()}{END}"
