"""Conversations: the messages of chat data, what makes them valid, and files of them.

A message is a dict with a `role` of `ROLES` and a `content`, its text. An assistant's message may
have `tool_calls`, and then its content may be missing or null. Its `weight` of 0, or `train` of
false, leave a turn untrained. Other keys, such as `reasoning_content` or `tool_call_id`, are for
the template to read, which must render their texts. Keys that are null or an empty list count as
missing.

A file has JSON lines, `{"messages": […], "tools": […]}` or `{"prompt": "…", "response": "…"}`. The
latter is a message of the user and one of the assistant.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fp8jax.lm.chat.message_forms import Message, check_loss, check_row, is_trained, unique_keys
from fp8jax.lm.data.bad_examples import BadChatError, Reason
from fp8jax.lm.data.files import Tally, parse_line, read_lines
from fp8jax.lookup import brief

ROLES = ("system", "developer", "user", "assistant", "tool")

OnBad = Callable[[Path, BadChatError], None]  # what is done about a bad conversation of a file


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chat:
    """A conversation from a file.

    Attributes:
      messages: as in the file, and valid.
      tools: descriptions of the tools as JSON has them, None without any.
      path, line: where it is from; the first line of a file is 1.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    path: Path
    line: int

    @property
    def place(self) -> str:
        """FILE, line N: begins error messages."""
        return place_of(self.path, self.line)

    @property
    def contents(self) -> str:
        """The texts of all messages, with a blank line between two; decides the split."""
        texts = [m["content"] for m in self.messages if "content" in m and m["content"]]
        return "\n\n".join(texts)


def place_of(path: Path, line: int) -> str:
    """Returns how error messages name a line of a file."""
    return f"{path}, line {line}"


def too_many_levels(place: str) -> BadChatError:
    """Returns the error for a conversation that Python cannot walk through."""
    return BadChatError(Reason.NO_CONVERSATION, f"{place}: its data has too many levels")


def refuse(path: Path, error: BadChatError) -> None:
    """Raises the error, whatever the file."""
    raise error


def read_chats(path: Path, tally: Tally | None = None, on_bad: OnBad = refuse) -> Iterator[Chat]:
    """Yields the conversations of a file (see the module's docstring).

    `tools` may be missing, and blank lines are skipped. Files may be compressed (data/files.py).

    Args:
      tally: counts the bytes read, for showing progress.
      on_bad: called for a bad line, which is then left out.

    Raises:
      BadChatError: a line is not such an object, or its messages are no example to train on (see
        `check_example`). The message names file and line.
    """
    for number, line in read_lines(path, Tally() if tally is None else tally):
        try:
            messages, tools = _conversation(line, place_of(path, number))
        except BadChatError as error:
            on_bad(path, error)
            continue
        except RecursionError:
            on_bad(path, too_many_levels(place_of(path, number)))
            continue
        yield Chat(messages=messages, tools=tools, path=path, line=number)


def _conversation(line: bytes, place: str) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Returns the messages and tools of a line."""
    try:
        row = parse_line(line, object_pairs_hook=unique_keys)
    except ValueError as error:
        raise BadChatError(Reason.NOT_JSON, f"{place}: not JSON: {error}") from error
    if isinstance(row, dict):
        check_row(row, place)
    if isinstance(row, dict) and "messages" not in row and {"prompt", "response"} <= row.keys():
        return _pair(row["prompt"], row["response"], place), None
    if not isinstance(row, dict) or "messages" not in row:
        raise BadChatError(
            Reason.NO_CONVERSATION,
            f'{place}: expected {{"messages": […]}} or {{"prompt": "…", "response": "…"}}, got '
            f"{brief(row)}",
        )
    check_example(row["messages"], place)
    tools = row["tools"] if "tools" in row else None
    if not (tools is None or isinstance(tools, list)):
        raise BadChatError(
            Reason.NO_CONVERSATION, f"{place}: tools must be a list, got {brief(tools)}"
        )
    return row["messages"], tools


def _pair(prompt: Any, response: Any, place: str) -> list[dict[str, Any]]:
    """Returns a prompt and its response as messages."""
    for name, text in (("prompt", prompt), ("response", response)):
        if not isinstance(text, str) or not text.strip():
            raise BadChatError(
                Reason.BLANK, f"{place}: {name} must be a text that is not blank, got {brief(text)}"
            )
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatFiles:
    """The reader of the source kind `chat`: files of conversations.

    Attributes:
      label, paths: as for the readers of text (data/readers.py).
      each_turn: whether each of the assistant's turns is an example of its own, with what came
        before it; else a conversation is one example.
    """

    label: str
    paths: tuple[Path, ...]
    each_turn: bool = False

    @property
    def reads(self) -> tuple[str, ...]:
        return ("turns",) if self.each_turn else ()

    def files(self) -> Sequence[Path]:
        return self.paths

    def chats(self, tally: Tally, on_bad: OnBad = refuse) -> Iterator[Chat]:
        """Yields the conversations of all files, in order; raises as `read_chats` does."""
        for path in self.paths:
            yield from read_chats(path, tally, on_bad)

    def documents(self, tally: Tally) -> Iterator[str]:
        """Yields the contents of each conversation, for training a tokenizer."""

        def on_bad(path: Path, error: BadChatError) -> None:
            tally.skip_record(path, str(error).removeprefix(str(path)))

        for chat in self.chats(tally, on_bad):
            yield chat.contents


def check_messages(messages: Any, place: str) -> None:
    """Raises BadChatError unless the messages are a conversation that a template can render.

    Calls of tools must be followed by as many messages of the role tool, unless the conversation
    ends with the calls. A tool's message follows an assistant's, or that of another tool. Calls may
    also be written into the assistant's text; then their number is not known, and not checked.

    Args:
      place: where the messages are from, such as "chats.jsonl, line 3"; begins every error.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise BadChatError(
            Reason.NO_CONVERSATION,
            f"{place}: messages must be a list of at least one, got {brief(messages)}",
        )
    for i, message in enumerate(messages):
        _check_message(message, f"{place}: message {i + 1}")
    roles = [message["role"] for message in messages]
    for i, message in enumerate(messages):
        if roles[i] == "tool" and (i == 0 or roles[i - 1] not in ("assistant", "tool")):
            raise BadChatError(
                Reason.TOOLS,
                f"{place}: message {i + 1} is a tool's result, but the assistant called no tool "
                "before it",
            )
        calls = message["tool_calls"] if "tool_calls" in message else None
        if not calls or i == len(messages) - 1:
            continue
        rest = roles[i + 1 :]
        results = next((n for n, role in enumerate(rest) if role != "tool"), len(rest))
        if results != len(calls):
            raise BadChatError(
                Reason.TOOLS,
                f"{place}: message {i + 1} calls {_counted(len(calls), 'tool')}, but "
                f"{_counted(results, 'result')} {'follows' if results == 1 else 'follow'}",
            )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def check_example(messages: Any, place: str) -> None:
    """Raises BadChatError unless a model can learn from the messages.

    The assistant has the last one, and none of the assistant's is blank without calling a tool.
    Whatever `check_messages` refuses is refused here, too.
    """
    check_messages(messages, place)
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise BadChatError(
            Reason.NO_TURN,
            f"{place}: the assistant has no turn, there is nothing to learn; the roles are "
            f"{', '.join(roles)}",
        )
    if roles[-1] != "assistant":
        raise BadChatError(
            Reason.ENDS_WITH_OTHER,
            f"{place}: the last turn is the {roles[-1]}'s, it must be the assistant's: drop the "
            "messages after the assistant's last one",
        )
    for i, message in enumerate(messages):
        if roles[i] == "assistant" and not _says_anything(message):
            raise BadChatError(
                Reason.BLANK,
                f"{place}: message {i + 1}, the assistant's, is blank and calls no tool, there is "
                "nothing to learn",
            )
    if not any(is_trained(message) for message in messages if message["role"] == "assistant"):
        raise BadChatError(
            Reason.SUPERVISION,
            f"{place}: weight or train leave all turns of the assistant untrained",
        )


def _says_anything(message: Message) -> bool:
    """Whether a valid message has a text that is not blank, or calls a tool."""
    text = message["content"] if "content" in message else None
    return bool((text and text.strip()) or ("tool_calls" in message and message["tool_calls"]))


def _check_message(message: Any, place: str) -> None:
    if not isinstance(message, Mapping) or "role" not in message:
        raise BadChatError(
            Reason.NO_CONVERSATION,
            f'{place} must be {{"role": …, "content": …}}, got {brief(message)}',
        )
    role = message["role"]
    if role not in ROLES:
        raise BadChatError(
            Reason.ROLE, f"{place} has the role {brief(role)}; there are {', '.join(ROLES)}"
        )
    calls = message["tool_calls"] if "tool_calls" in message else None
    if calls not in (None, []) and (role != "assistant" or not isinstance(calls, list)):
        raise BadChatError(
            Reason.NO_CONVERSATION,
            f"{place}: tool_calls must be a list, of the assistant; the role is {role}",
        )
    check_loss(message, place)
    content = message["content"] if "content" in message else None
    if not isinstance(content, str) and not (content is None and calls):
        raise BadChatError(
            Reason.NO_CONVERSATION, f"{place}: content must be text, got {brief(content)}"
        )
