"""Chat templates of Hugging Face's tokenizers: jinja2 programs, run in a sandbox.

A template is someone else's program. It runs in a sandbox (sandbox.py), sees nothing but plain JSON
data, and gets what such templates expect: the filter `tojson`, the functions `raise_exception` and
`strftime_now`, `break` and `continue`, and the tag `generation`, which marks what the assistant
wrote.

Three things must be known about a rendered text besides its characters: which of them a
`generation` tag holds, which of them spell a token in a message, where they are text (forgery.py),
and which texts of the conversation they are from (leaves.py). All are marked by characters that no
text has.
"""

import dataclasses
import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from fp8jax.lm.chat.sandbox import BEGIN, END, Sandbox
from fp8jax.lm.data.bad_examples import BadChatError, Reason
from fp8jax.lookup import brief, lookup

_TOOLS = "tool_use"  # the name of the template for conversations with tools

_TAG = re.compile(r"\{%[-+]?\s*generation\b")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rendered:
    """A rendered conversation.

    Attributes:
      text: the text; contains guards, and marks if the messages have some.
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
      source: its text.
      variables: what the template may read besides messages and tools, such as bos_token.
    """

    place: str
    has_tags: bool
    source: str
    variables: Mapping[str, Any]
    sandbox: Sandbox = dataclasses.field(repr=False)
    program: jinja2.Template = dataclasses.field(repr=False)

    @classmethod
    def compile(
        cls,
        source: str,
        *,
        place: str,
        variables: Mapping[str, Any],
        now: datetime.datetime,
    ) -> "Template":
        """Compiles a template's source. `strftime_now` always says `now`, so texts can be repeated.

        Raises:
          ValueError: the source is not a template.
        """
        sandbox = Sandbox(now)
        try:
            program = sandbox.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"{place}: line {error.lineno}: {error.message}") from error
        except RecursionError as error:
            raise ValueError(f"{place}: its parts are too deep within each other") from error
        return cls(
            place=place,
            has_tags=bool(_TAG.search(source)),
            source=source,
            variables=dict(variables),
            sandbox=sandbox,
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
        steps: int | None = None,
    ) -> Rendered:
        """Renders messages and tools with guards (forgery.py).

        Args:
          place: where the messages are from, for errors.
          steps: the most that it may take; None for the sandbox's own limit.

        Raises:
          BadChatError: the template raises, fails, or takes too many steps.
        """
        self.sandbox.restart(steps)
        try:
            text = self.program.render(
                **{**self.variables, **variables},
                messages=messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # a template can fail like any program
            said = error.message if isinstance(error, jinja2.TemplateError) else brief(str(error))
            line = " ".join(str(said).split())  # of a message that may have several
            raise BadChatError(
                Reason.TEMPLATE,
                f"{place}: {self.place} refuses the conversation: {type(error).__name__}: {line}",
            ) from error
        return _take_marks(text, place)


def _take_marks(text: str, place: str) -> Rendered:
    """Returns the text without the marks of `generation` tags, and the spans between them."""
    parts: list[str] = []
    spans: list[tuple[int, int]] = []
    begin, length = None, 0
    for part in re.split(f"([{BEGIN}{END}])", text):
        if part == BEGIN and begin is None:
            begin = length
        elif part == END and begin is not None:
            spans += [(begin, length)] if begin < length else []
            begin = None
        elif part in (BEGIN, END):
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


def read_tools_source(folder: Path, name: str | None) -> tuple[str, str]:
    """Returns the template for conversations with tools: `tool_use` of several, as `read_source`.

    Raises:
      ValueError: as `read_source`.
    """
    templates = _templates(folder)
    several = name is None and len(templates) > 1
    return read_source(folder, _TOOLS if several and _TOOLS in templates else name)


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
        return path.read_text(encoding="utf-8-sig")  # a byte order mark is no part of the text
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
