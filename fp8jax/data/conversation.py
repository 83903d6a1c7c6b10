"""Conversations: the messages of chat data, what makes them valid, and files of them.

A message is a dict with a `role` of `ROLES` and a `content`, its text. An assistant's message may
have `tool_calls`, and then its content may be missing or null. Other keys, such as
`reasoning_content` or `tool_call_id`, are for the template to read.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fp8jax.data.readers import Tally, open_counted
from fp8jax.lookup import brief

ROLES = ("system", "developer", "user", "assistant", "tool")

Message = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chat:
    """A conversation from a file.

    Attributes:
      messages: as in the file, and valid.
      tools: descriptions of the tools as JSON has them, None without any.
      place: "FILE, line N", for error messages.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    place: str


def read_chats(path: Path) -> Iterator[Chat]:
    """Yields the conversations of a file of JSON lines {"messages": […], "tools": […]}.

    `tools` may be missing, other keys are not read, and blank lines are skipped. A file whose name
    ends in .gz or .zst is decompressed.

    Raises:
      ValueError: a line is not such an object, or its messages are no example to train on (see
        `check_example`). The message names file and line.
    """
    with open_counted(path, Tally()) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _chat(line, f"{path}, line {number}")


def _chat(line: bytes, place: str) -> Chat:
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not JSON: {error}") from error
    if not isinstance(row, dict) or "messages" not in row:
        raise ValueError(f'{place}: expected {{"messages": […]}}, got {brief(row)}')
    check_example(row["messages"], place)
    tools = row["tools"] if "tools" in row else None
    if not (tools is None or isinstance(tools, list)):
        raise ValueError(f"{place}: tools must be a list, got {brief(tools)}")
    return Chat(messages=row["messages"], tools=tools, place=place)


def check_messages(messages: Any, place: str) -> None:
    """Raises ValueError unless the messages are a conversation that a template can render.

    Calls of tools must be followed by as many messages of the role tool, unless the conversation
    ends with the calls. A tool's message follows an assistant's, or that of another tool. Calls may
    also be written into the assistant's text; then their number is not known, and not checked.

    Args:
      place: where the messages are from, such as "chats.jsonl, line 3"; begins every error.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(f"{place}: messages must be a list of at least one, got {brief(messages)}")
    for i, message in enumerate(messages):
        _check_message(message, f"{place}: message {i + 1}")
    roles = [message["role"] for message in messages]
    for i, message in enumerate(messages):
        if roles[i] == "tool" and (i == 0 or roles[i - 1] not in ("assistant", "tool")):
            raise ValueError(
                f"{place}: message {i + 1} is a tool's result, but the assistant called no tool "
                "before it"
            )
        calls = message["tool_calls"] if "tool_calls" in message else None
        if not calls or i == len(messages) - 1:
            continue
        rest = roles[i + 1 :]
        results = next((n for n, role in enumerate(rest) if role != "tool"), len(rest))
        if results != len(calls):
            raise ValueError(
                f"{place}: message {i + 1} calls {len(calls)} tools, but {results} results follow"
            )


def check_example(messages: Any, place: str) -> None:
    """Raises ValueError unless a model can learn from the messages: the assistant has the last one.

    Whatever `check_messages` refuses is refused here, too.
    """
    check_messages(messages, place)
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise ValueError(
            f"{place}: the assistant has no turn, there is nothing to learn; the roles are "
            f"{', '.join(roles)}"
        )
    if roles[-1] != "assistant":
        raise ValueError(
            f"{place}: the last turn is the {roles[-1]}'s, it must be the assistant's: drop the "
            "messages after the assistant's last one"
        )


def _check_message(message: Any, place: str) -> None:
    if not isinstance(message, Mapping) or "role" not in message:
        raise ValueError(f'{place} must be {{"role": …, "content": …}}, got {brief(message)}')
    role = message["role"]
    if role not in ROLES:
        raise ValueError(f"{place} has the role {brief(role)}; there are {', '.join(ROLES)}")
    calls = message["tool_calls"] if "tool_calls" in message else None
    if calls is not None and (role != "assistant" or not isinstance(calls, list)):
        raise ValueError(
            f"{place}: tool_calls must be a list, of the assistant; the role is {role}"
        )
    content = message["content"] if "content" in message else None
    if not isinstance(content, str) and not (content is None and calls):
        raise ValueError(f"{place}: content must be text, got {brief(content)}")
