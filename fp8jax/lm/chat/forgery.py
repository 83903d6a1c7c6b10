"""Text in a message that spells a token stays text: only the template can write tokens.

A guard, a reserved character, stands in each such spelling until the text is encoded.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fp8jax.lm.chat.sandbox import GUARD, RESERVED
from fp8jax.lm.data.bad_examples import BadChatError, Reason
from fp8jax.lookup import brief

# Roles that speak for the model, and whose messages may hold its tags. Datasets write thinking into
# the assistant's text, and the format of calls into the system's.
_SPEAK_FOR_THE_MODEL = ("system", "developer", "assistant")

_TAG = re.compile(r"<(/?)([^<>/\s]+)>")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
    """Spellings of tokens that messages must not forge.

    Attributes:
      special: the special tokens. Any message can only spell them.
      written: other added tokens that the template writes, such as <｜User｜>; the same holds.
      tags: pairs that the template writes, such as <think> and </think>. Messages of the system and
        the assistant may hold them; those of users and tools can only spell them.
    """

    special: tuple[str, ...]
    written: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.special, *self.written, *self.tags)

    def spelled_by(self, role: str) -> tuple[str, ...]:
        """Returns the tokens that a message of a role can only spell."""
        return (*self.special, *self.written) if role in _SPEAK_FOR_THE_MODEL else self.all


def tokens_of(added: Mapping[str, bool], texts: Iterable[str], place: str) -> Tokens:
    """Returns which added tokens of a tokenizer messages must not forge.

    Args:
      added: the added tokens, and whether each is special.
      texts: the source of a template, and renderings of it: it may put tokens together.
      place: where the template is from; begins errors.

    Raises:
      ValueError: a special token has a single character, so that text could not be told from it.
    """
    special = tuple(token for token in added if added[token])
    if short := [token for token in special if len(token) < 2]:
        raise ValueError(f"{place}: special tokens of one character cannot be guarded: {short}")
    texts = list(texts)
    written = [
        token
        for token in added
        if not added[token]
        and len(token) > 1
        and token.strip()  # runs of white space are no marks
        and any(token in text for text in texts)
    ]
    tags = [token for token in written if _other_of_pair(token) in added]
    return Tokens(
        special=special,
        written=tuple(token for token in written if token not in tags),
        tags=tuple(tags),
    )


def _other_of_pair(token: str) -> str | None:
    """Returns </x> for <x>, <x> for </x>, None for others."""
    found = _TAG.fullmatch(token)
    return found and f"<{'' if found[1] else '/'}{found[2]}>"


def plain_message(message: Mapping[str, Any], tokens: Tokens, place: str) -> dict[str, Any]:
    """Returns a copy of a message with guards; `place` begins errors, with the names of fields.

    Raises:
      BadChatError: it is no JSON data, or has a reserved character or a lone surrogate.
    """
    return _plain(message, tokens.spelled_by(message["role"]), f"{place}: ")


def plain_tools(tools: Sequence[Any], tokens: Tokens, place: str) -> list[Any]:
    """Returns a copy of the descriptions of tools, as `plain_message` does."""
    return _plain(tools, tokens.all, f"{place}: tools")


def _plain(value: Any, tokens: Sequence[str], place: str) -> Any:
    """Returns a copy of JSON data in which no string can contribute to a token."""
    if isinstance(value, str):
        if reserved := RESERVED & set(value):
            raise BadChatError(
                Reason.NOT_TEXT, f"{place}: the text has reserved characters: {sorted(reserved)}"
            )
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:  # a lone surrogate, which JSON can spell
            raise BadChatError(
                Reason.NOT_TEXT, f"{place}: the text is not Unicode: {error}"
            ) from error
        return _guarded(value, tokens)
    if isinstance(value, Mapping):
        dot = "" if place.endswith(": ") else "."
        return {
            _plain(key, tokens, f"{place}{dot}a key"): _plain(
                item, tokens, f"{place}{dot}{shown(key)}"
            )
            for key, item in value.items()
        }
    if isinstance(value, Sequence):
        return [_plain(item, tokens, f"{place}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):  # which Python reads and writes
        raise BadChatError(
            Reason.NO_CONVERSATION, f"{place}: JSON has no number {value}: write it as a text"
        )
    if value is None or type(value) in (bool, int, float):
        return value
    raise BadChatError(
        Reason.NO_CONVERSATION, f"{place}: only JSON data can be rendered, got {brief(value)}"
    )


def shown(key: Any) -> str:
    """Returns the name of a field for error messages, which have one line."""
    text = " ".join(str(key).replace(GUARD, "").split())
    return text if len(text) <= 40 else f"{text[:37]}..."


def _guarded(text: str, tokens: Sequence[str]) -> str:
    """Returns `text` with a guard in each token that it spells, or begins to at its end."""
    for token in tokens:
        text = text.replace(token, token[0] + GUARD + token[1:])
        for length in range(len(token) - 1, 0, -1):
            if text.endswith(token[:length]):
                begin = len(text) - length
                text = text[: begin + 1] + GUARD + text[begin + 1 :]
                break
    return text
