"""The forms in which a conversation can be given to a template.

Files spell the same conversation in several ways, and templates read one of them. Exporters write
null where a message has no such key, and OpenAI's format has the arguments of a call as a text of
JSON, which servers decode before they render. So keys that say nothing are left out, arguments are
decoded, and what has two spellings, both of which templates need, is tried in order.

The keys `weight` (0 or 1) and `train` say whether a turn is trained; templates do not see them.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fp8jax.lm.data.bad_examples import BadChatError, Reason
from fp8jax.lookup import brief

Message = Mapping[str, Any]

# Keys by which other programs change the loss of a message or a conversation.
_WEIGHT, _TRAIN = "weight", "train"
_OTHER_LOSSES = (
    "loss",
    "loss_mask",
    "loss_weight",
    "mask",
    "trainable",
    "training",
    "train_detail",
    "training_detail",
)

# Keys of a row that change its text for other programs, and are not read here.
_OTHER_TEXTS = (
    "system",
    "system_prompt",
    "functions",
    "documents",
    "chat_template_kwargs",
    "history",
    "image",
    "images",
    "video",
    "videos",
    "audio",
    "audios",
)
# The same of a row that has a prompt and a response.
_BESIDE_PROMPT = ("context", "input", "instruction")

_SILENT: tuple[Any, ...] = (None, [], "", {})  # values of a row's key that say nothing


def check_row(row: Mapping[str, Any], place: str) -> None:
    """Raises BadChatError if a row has keys, not null, that would change its loss or its text."""
    for key in (_WEIGHT, _TRAIN, *_OTHER_LOSSES):
        if _says_something(row, key):
            raise BadChatError(
                Reason.NO_CONVERSATION,
                f"{place}: the key {key!r} of a conversation is not supported: give messages the "
                f"key {_WEIGHT!r}, 0 or 1",
            )
    others = _OTHER_TEXTS if "messages" in row else (*_OTHER_TEXTS, *_BESIDE_PROMPT)
    for key in others:
        if key in row and row[key] not in _SILENT:
            raise BadChatError(
                Reason.NO_CONVERSATION,
                f"{place}: the key {key!r} of a conversation is not supported: only messages and "
                "tools are rendered",
            )


def check_loss(message: Message, place: str) -> None:
    """Raises BadChatError for keys of a message that would change its loss and cannot."""
    for key in _OTHER_LOSSES:
        if _says_something(message, key):
            raise BadChatError(
                Reason.NO_CONVERSATION,
                f"{place}: the key {key!r} is not supported: {_WEIGHT!r}, 0 or 1, and {_TRAIN!r}, "
                "true or false, say which turns are trained",
            )
    said = {key: message[key] for key in (_WEIGHT, _TRAIN) if _says_something(message, key)}
    if _WEIGHT in said and not (type(said[_WEIGHT]) in (int, float) and said[_WEIGHT] in (0, 1)):
        raise BadChatError(
            Reason.NO_CONVERSATION, f"{place}: weight must be 0 or 1, got {brief(said[_WEIGHT])}"
        )
    if _TRAIN in said and not isinstance(said[_TRAIN], bool):
        raise BadChatError(
            Reason.NO_CONVERSATION,
            f"{place}: train must be true or false, got {brief(said[_TRAIN])}",
        )
    if len({bool(value) for value in said.values()}) > 1:
        raise BadChatError(
            Reason.NO_CONVERSATION, f"{place}: weight and train say different things: {said}"
        )
    if any(said.values()) and message["role"] != "assistant":
        raise BadChatError(
            Reason.NO_CONVERSATION,
            f"{place}: {' and '.join(said)} would train a message of the role {message['role']}; "
            "only the assistant's are trained",
        )


def is_trained(message: Message) -> bool:
    """Whether the loss counts a valid message of the assistant."""
    return not any(message[key] == 0 for key in (_WEIGHT, _TRAIN) if _says_something(message, key))


def forms(messages: Sequence[Message], place: str) -> list[list[dict[str, Any]]]:
    """Returns the forms of a valid conversation, first the one that servers and exporters mean.

    Raises:
      BadChatError: the arguments of a call are no JSON object.
    """
    decoded = [_cleaned(m, f"{place}: message {i + 1}") for i, m in enumerate(messages)]
    found = [decoded]
    if any(isinstance(each, str) for m in messages for each in arguments_of(m)):
        found.append([_cleaned(m, "", decode=False) for m in messages])
    if any(map(_is_silent, messages)):
        found += [_with_content(form, content) for content in ("", None) for form in found]
    return [form for i, form in enumerate(found) if form not in found[:i]]


def _says_something(message: Mapping[str, Any], key: str) -> bool:
    return key in message and message[key] is not None and message[key] != []


def _cleaned(message: Message, place: str, *, decode: bool = True) -> dict[str, Any]:
    """Returns a message without keys that say nothing, or that say how to train it."""
    kept = {
        key: value
        for key, value in message.items()
        if key not in (_WEIGHT, _TRAIN) and (_says_something(message, key) or key == "content")
    }
    if "tool_calls" in kept:
        kept["tool_calls"] = [
            _call(call, f"{place}: tool_calls[{i}]", decode)
            for i, call in enumerate(kept["tool_calls"])
        ]
    return kept


def _call(call: Any, place: str, decode: bool) -> Any:
    """Returns a call, or its function, with its arguments decoded."""
    if not isinstance(call, Mapping):
        return call
    kept = {key: value for key, value in call.items() if value is not None}
    if "function" in kept:
        kept["function"] = _call(kept["function"], f"{place}.function", decode)
        return kept
    name = kept["name"] if "name" in kept else None
    if not (isinstance(name, str) and name.strip()):
        raise BadChatError(
            Reason.NO_CONVERSATION, f"{place}.name must be that of a tool, got {brief(name)}"
        )
    if decode:
        given = kept["arguments"] if "arguments" in kept else ""
        if isinstance(given, str):
            kept["arguments"] = _json_object(given, f"{place}.arguments")
    return kept


def _json_object(arguments: str, place: str) -> dict[str, Any]:
    """Returns the JSON object that a text spells; an empty text is one without arguments."""
    try:
        value = json.loads(arguments, object_pairs_hook=unique_keys) if arguments.strip() else {}
    except (ValueError, RecursionError) as error:
        raise BadChatError(
            Reason.NO_CONVERSATION, f"{place} is not JSON: {error}, in {brief(arguments)}"
        ) from error
    if not isinstance(value, dict):
        raise BadChatError(
            Reason.NO_CONVERSATION, f"{place} must be a JSON object, got {brief(arguments)}"
        )
    return value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object; ValueError for a key that comes twice, of which one would be lost."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} comes twice")
    return made


def arguments_of(message: Message) -> list[Any]:
    """Returns the arguments of the calls of a valid message."""
    calls = message["tool_calls"] if _says_something(message, "tool_calls") else []
    functions = [
        call["function"] if isinstance(call, Mapping) and "function" in call else call
        for call in calls
    ]
    return [f["arguments"] for f in functions if isinstance(f, Mapping) and "arguments" in f]


def _is_silent(message: Message) -> bool:
    """Whether a message calls tools and says nothing else."""
    content = message["content"] if "content" in message else None
    return not content and _says_something(message, "tool_calls")


def _with_content(form: list[dict[str, Any]], content: str | None) -> list[dict[str, Any]]:
    """Returns a form in which silent messages have a content that says so."""
    return [{**message, "content": content} if _is_silent(message) else message for message in form]
