"""The texts of a conversation, and which of them a template renders.

Templates leave out what they do not know: reasoning, messages of a developer, a text beside a call,
tools. Nothing in the rendered text shows it. So a copy of the conversation is rendered, too, in
which each text has a mark, and the marks that are missing tell what is left out.

A mark stands at the end of each line of a text and before each tag, such as </think>, so that a
text which is rendered in part is noticed, while templates that look at how a text begins or ends
see the same. Where a template cuts the beginning of a line, its mark is there; so the text that is
rendered without marks must hold each line as it is.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fp8jax.lm.chat.forgery import shown
from fp8jax.lm.chat.sandbox import GUARD, MARK

_TAGS_AND_LINES = re.compile(r"(<[^<>\n]*>|\[/?[A-Z_]+\]|\n)")
_MARK = re.compile(f"{MARK}([0-9]+){MARK}")

# Fields that refer to other messages and are no texts: templates need not render them.
_REFERENCES = ("role", "id", "type", "index", "tool_call_id")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """A text of a conversation, or a line of one.

    Attributes:
      message: the number of its message, from 0; None for tools.
      field: its name in the message, or in the list of tools.
      text: of the line, without white space around it.
      last: whether no other line of the text comes after it.
    """

    message: int | None
    field: str
    text: str
    last: bool

    def stands_in(self, rendered: str) -> bool:
        """Whether a text without guards has this one as it is, or as JSON spells it."""
        text = self.text.replace(GUARD, "")
        spellings = (json.dumps(text, ensure_ascii=ascii)[1:-1] for ascii in (False, True))
        return text in rendered or any(each in rendered for each in spellings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Marked:
    """A conversation with marks in its texts.

    Attributes:
      leaves: by the number that their marks have.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    leaves: list[Leaf]

    def missing(self, rendered: str) -> list[Leaf]:
        """Returns the texts that are not rendered, in order."""
        found = self.numbers(rendered)
        return [leaf for number, leaf in enumerate(self.leaves) if number not in found]

    def messages_of(self, rendered: str) -> set[int | None]:
        """Returns the numbers of the messages that a part of the rendered text is from."""
        return {self.leaves[number].message for number in self.numbers(rendered)}

    def numbers(self, rendered: str) -> set[int]:
        return {int(number) for number in _MARK.findall(rendered.replace(GUARD, ""))}


def mark(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> Marked:
    """Returns a copy of a conversation with marks in its texts; both may have guards."""
    marker = _Marker()
    marked = [marker.message(i, message) for i, message in enumerate(messages)]
    described = None if tools is None else [marker.tool(i, tool) for i, tool in enumerate(tools)]
    return Marked(messages=marked, tools=described, leaves=marker.leaves)


class _Marker:
    """Marks texts, and numbers them."""

    def __init__(self) -> None:
        self.leaves: list[Leaf] = []

    def message(self, index: int, message: Mapping[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key, value in message.items():
            # A tool's own name stands in the call, too.
            if key in _REFERENCES or (key == "name" and message["role"] == "tool"):
                made[key] = value
            elif key == "tool_calls":
                made[key] = [self._call(index, f"{key}[{i}]", call) for i, call in enumerate(value)]
            else:
                made[key] = self._all(index, shown(key), value)
        return made

    def tool(self, index: int, tool: Any) -> Any:
        """Marks what a tool is called and what is said about it; of others, all texts."""
        before = len(self.leaves)
        made = self._described(f"[{index}]", tool)
        return made if len(self.leaves) > before else self._all(None, f"[{index}]", tool)

    def _call(self, index: int, field: str, call: Any) -> Any:
        if not isinstance(call, Mapping):
            return self._all(index, field, call)
        made = {}
        for key, value in call.items():
            where = f"{field}.{shown(key)}"
            if key in _REFERENCES:
                made[key] = value
            elif key == "function":
                made[key] = self._call(index, where, value)
            else:
                made[key] = self._all(index, where, value, keys=key == "arguments")
        return made

    def _described(self, field: str, value: Any) -> Any:
        """Marks names, descriptions and the names of parameters in the description of a tool."""
        if isinstance(value, Mapping):
            made: dict[str, Any] = {}
            for key, item in value.items():
                where = f"{field}.{shown(key)}"
                if key in ("name", "description") and isinstance(item, str):
                    made[key] = self._text(None, where, item)
                elif key == "properties" and isinstance(item, Mapping):
                    made[key] = {
                        self._text(None, f"{where}.{shown(name)}", name): self._described(
                            f"{where}.{shown(name)}", each
                        )
                        for name, each in item.items()
                    }
                else:
                    made[key] = self._described(where, item)
            return made
        if isinstance(value, list):
            return [self._described(f"{field}[{i}]", item) for i, item in enumerate(value)]
        return value

    def _all(self, index: int | None, field: str, value: Any, *, keys: bool = False) -> Any:
        """Marks every text of JSON data, and with `keys` those that are keys."""
        if isinstance(value, str):
            return self._text(index, field, value)
        if isinstance(value, Mapping):
            return {
                self._text(index, f"{field}.{shown(key)}", key) if keys else key: self._all(
                    index, f"{field}.{shown(key)}", item, keys=keys
                )
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self._all(index, f"{field}[{i}]", v, keys=keys) for i, v in enumerate(value)]
        return value

    def _text(self, index: int | None, field: str, text: str) -> str:
        parts = _TAGS_AND_LINES.split(text)
        marked = [i for i in range(0, len(parts), 2) if parts[i].strip()]
        if not marked and text.strip():  # tags alone
            parts, marked = [text], [0]
        for i in marked:
            kept = parts[i].rstrip()
            number = len(self.leaves)
            leaf = Leaf(message=index, field=field, text=kept.strip(), last=i == marked[-1])
            self.leaves.append(leaf)
            parts[i] = f"{kept}{MARK}{number}{MARK}{parts[i][len(kept) :]}"
        return "".join(parts)
