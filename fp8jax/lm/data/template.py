"""Chat templates of Hugging Face's tokenizers: jinja2 programs, run in a sandbox.

A template is someone else's program. It runs in jinja2's immutable sandbox, sees nothing but plain
JSON data, and gets what such templates expect: the filter `tojson`, the functions `raise_exception`
and `strftime_now`, `break` and `continue`, and the tag `generation`, which marks what the assistant
wrote.

Two things must be known about a rendered text besides its characters: which of them a `generation`
tag holds, and which of them spell a special token in a message, where they are text. Both are
marked by characters that Unicode reserves for internal use and that no text has.
"""

import dataclasses
import datetime
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fp8jax.lm.data.bad_examples import BadChatError, Reason
from fp8jax.lookup import brief, lookup

GUARD = "\ufdd0"  # stands after the first character of what must not become a special token
_BEGIN, _END = "\ufdd1", "\ufdd2"  # stand around what a `generation` tag holds

_TAG = re.compile(r"\{%[-+]?\s*generation\b")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rendered:
    """A rendered conversation.

    Attributes:
      text: the text; contains `GUARD`s.
      spans: begin and end of what each `generation` tag holds, as offsets in `text`.
    """

    text: str
    spans: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Template:
    """A compiled template; `Template.compile` creates it.

    Attributes:
      place: where it is from, for error messages.
      has_tags: whether it has a `generation` tag.
      special_tokens: spellings of the special tokens, which messages must not forge.
      variables: what the template may read besides messages and tools, such as bos_token.
    """

    place: str
    has_tags: bool
    special_tokens: tuple[str, ...]
    variables: Mapping[str, Any]
    program: jinja2.Template = dataclasses.field(repr=False)

    @classmethod
    def compile(
        cls,
        source: str,
        *,
        place: str,
        special_tokens: Iterable[str],
        variables: Mapping[str, Any],
        now: datetime.datetime,
    ) -> "Template":
        """Compiles a template's source. `strftime_now` always says `now`, so texts can be repeated.

        Raises:
          ValueError: the source is not a template; or a special token has a single character, so
            that text could not be told from it.
        """
        special_tokens = tuple(special_tokens)
        if short := [token for token in special_tokens if len(token) < 2]:
            raise ValueError(f"{place}: special tokens of one character cannot be guarded: {short}")
        try:
            program = _environment(now).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"{place}: line {error.lineno}: {error.message}") from error
        return cls(
            place=place,
            has_tags=bool(_TAG.search(source)),
            special_tokens=special_tokens,
            variables=dict(variables),
            program=program,
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        place: str,
    ) -> Rendered:
        """Renders messages. `place` says where they are from, for error messages.

        Raises:
          BadChatError: the template raises or fails, or a message has a character that is reserved,
            or a lone surrogate.
        """
        try:
            text = self.program.render(
                **{**self.variables, **variables},
                messages=_plain(messages, self.special_tokens, place),
                tools=_plain(tools, self.special_tokens, place),
                add_generation_prompt=add_generation_prompt,
            )
        except BadChatError:
            raise
        except Exception as error:  # a template can fail like any program
            said = error.message if isinstance(error, jinja2.TemplateError) else brief(str(error))
            line = " ".join(str(said).split())  # of a message that may have several
            raise BadChatError(
                Reason.TEMPLATE,
                f"{place}: {self.place} refuses the conversation: {type(error).__name__}: {line}",
            ) from error
        return _take_marks(text, place)


def _environment(now: datetime.datetime) -> ImmutableSandboxedEnvironment:
    """Returns the sandbox with what Hugging Face's templates expect."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = now.strftime
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Like jinja2's own filter, but without HTML's escapes."""
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return text.replace(json.dumps(GUARD)[1:-1], GUARD)  # which ensure_ascii would spell out


class _Generation(jinja2.ext.Extension):
    """The tag {% generation %}…{% endgeneration %}: writes marks around what it holds."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_mark")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{_BEGIN}{caller()}{_END}"


def _plain(value: Any, special_tokens: Sequence[str], place: str) -> Any:
    """Returns a copy of JSON data in which no string can contribute to a special token."""
    if isinstance(value, str):
        if reserved := {GUARD, _BEGIN, _END} & set(value):
            raise BadChatError(
                Reason.NOT_TEXT, f"{place}: the text has reserved characters: {sorted(reserved)}"
            )
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:  # a lone surrogate, which JSON can spell
            raise BadChatError(
                Reason.NOT_TEXT, f"{place}: the text is not Unicode: {error}"
            ) from error
        return _guarded(value, special_tokens)
    if isinstance(value, Mapping):
        return {
            _plain(key, special_tokens, place): _plain(item, special_tokens, place)
            for key, item in value.items()
        }
    if isinstance(value, Sequence):
        return [_plain(item, special_tokens, place) for item in value]
    if value is None or type(value) in (bool, int, float):
        return value
    raise BadChatError(
        Reason.NO_CONVERSATION, f"{place}: only JSON data can be rendered, got {brief(value)}"
    )


def _guarded(text: str, special_tokens: Sequence[str]) -> str:
    """Returns `text` with a guard in each special token that it spells, or begins to at its end."""
    for token in special_tokens:
        text = text.replace(token, token[0] + GUARD + token[1:])
        for length in range(len(token) - 1, 0, -1):
            if text.endswith(token[:length]):
                begin = len(text) - length
                text = text[: begin + 1] + GUARD + text[begin + 1 :]
                break
    return text


def _take_marks(text: str, place: str) -> Rendered:
    """Returns the text without the marks of `generation` tags, and the spans between them."""
    parts: list[str] = []
    spans: list[tuple[int, int]] = []
    begin, length = None, 0
    for part in re.split(f"([{_BEGIN}{_END}])", text):
        if part == _BEGIN and begin is None:
            begin = length
        elif part == _END and begin is not None:
            spans += [(begin, length)] if begin < length else []
            begin = None
        elif part in (_BEGIN, _END):
            raise BadChatError(
                Reason.TEMPLATE, f"{place}: the template has generation tags within each other"
            )
        else:
            parts.append(part)
            length += len(part)
    return Rendered(text="".join(parts), spans=tuple(spans))


# Files --------------------------------------------------------------------------------------------


def read_source(folder: Path, name: str | None) -> tuple[str, str]:
    """Returns the source of a folder's template, and the place that it is from.

    chat_template.jinja goes before `chat_template` in tokenizer_config.json, as in transformers.
    The latter may be a list of named templates; further ones may lie in additional_chat_templates/.

    Args:
      name: which of several; None for the only one, or the one named default.

    Raises:
      ValueError: there is no template, or none of that name.
    """
    templates = _templates(folder)
    if not templates:
        raise ValueError(
            f"{folder} has no chat template: neither chat_template.jinja nor a chat_template in "
            "tokenizer_config.json"
        )
    if name is None:
        name = next(iter(templates)) if len(templates) == 1 else "default"
    return lookup("chat template", name, templates)


def has_template(folder: Path) -> bool:
    """Whether `read_source` finds any template in a folder, which need not exist."""
    return bool(_templates(folder))


def _templates(folder: Path) -> dict[str, tuple[str, str]]:
    """Returns the folder's templates by name, each with its place."""
    config = read_config(folder)
    place = str(folder / "tokenizer_config.json")
    found = config["chat_template"] if "chat_template" in config else None
    templates: dict[str, tuple[str, str]] = {}
    if isinstance(found, str):
        templates["default"] = found, place
    elif isinstance(found, list):
        try:
            templates |= {each["name"]: (each["template"], place) for each in found}
        except (TypeError, KeyError) as error:
            raise ValueError(
                f'{place}: chat_template must list {{"name": …, "template": …}}, got {brief(found)}'
            ) from error
    elif found is not None:
        raise ValueError(f"{place}: chat_template must be text or a list, got {brief(found)}")
    files = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (path := folder / "chat_template.jinja").exists():
        files["default"] = path
    return templates | {name: (_text(path), str(path)) for name, path in files.items()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error


def read_config(folder: Path) -> dict[str, Any]:
    """Returns a folder's tokenizer_config.json, {} without one; ValueError if it is no object."""
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold a JSON object, got {brief(config)}")
    return config
