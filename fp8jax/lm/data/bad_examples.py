"""What becomes of records that no model can learn from: an error, or left out and counted.

They are conversations that are bad for one of many reasons, and documents that are no text.
`BAD_EXAMPLES` has the answers, by the values of the config key `bad_examples`. Conversations that
are only longer than a row are a matter of chat/long_examples.py.
"""

import dataclasses
import enum
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import logging

_NAMED = 3  # bad conversations of a source that the log names


class Reason(enum.StrEnum):
    """Why a conversation is bad, for counting."""

    NOT_JSON = "not JSON"
    NO_CONVERSATION = "no conversation"
    ROLE = "unknown role"
    TOOLS = "tool calls without results, or results without calls"
    NO_TURN = "no turn of the assistant"
    ENDS_WITH_OTHER = "last turn not the assistant's"
    BLANK = "blank prompt or response"
    NOT_TEXT = "text that cannot be encoded"
    TEMPLATE = "refused or left out by the template"
    TURNS = "turns of the assistant not found"
    SUPERVISION = "nothing or everything supervised"


class BadChatError(ValueError):
    """A conversation is bad. The message begins with the place that it is from.

    Attributes:
      reason: the kind of its fault.
    """

    def __init__(self, reason: Reason, message: str):
        super().__init__(message)
        self.reason = reason


@dataclasses.dataclass(frozen=True, kw_only=True)
class BadChats:
    """The bad conversations of a source.

    Attributes:
      counts: how many there are of each `Reason`.
      first: messages about the first ones.
    """

    counts: dict[str, int]
    first: tuple[str, ...]

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{reason}: {count:,}" for reason, count in self.counts.items())
        return f"bad conversations skipped: {self.total:,}" + (f" ({parts})" if parts else "")

    def log(self, name: str) -> None:
        """Logs a warning with the first ones of the source `name`, if there are any."""
        if self.total:
            more = f"; and {self.total - len(self.first):,} more"
            named = "; ".join(self.first) + (more if self.total > len(self.first) else "")
            logging.warning("source %r: %s: %s", name, self, named)


class BadCounter:
    """Counts the bad conversations of a source while its files are read.

    `stats` are the counts as JSON. It has numbers of files instead of paths, so that it is still
    true after the files were moved.
    """

    def __init__(self, paths: Sequence[Path]):
        self._paths = list(paths)
        self.stats: dict[str, Any] = {"counts": {}, "first": []}

    def add(self, path: Path, error: BadChatError) -> None:
        """Counts a conversation of the file `path`, whose name begins the error."""
        counts, first = self.stats["counts"], self.stats["first"]
        counts[error.reason] = counts[error.reason] + 1 if error.reason in counts else 1
        if len(first) < _NAMED:
            first.append([self._paths.index(path), str(error).removeprefix(str(path))])


def read_stats(stats: dict[str, Any], paths: Sequence[Path]) -> BadChats:
    """Returns what a `BadCounter` counted in files that now have these paths."""
    first = tuple(f"{paths[number]}{rest}" for number, rest in stats["first"])
    return BadChats(counts=dict(stats["counts"]), first=first)


def _refuse(message: str) -> None:
    """Raises ValueError."""
    raise ValueError(f"{message}; config.bad_examples=skip leaves such records out")


def _skip(message: str) -> None:
    """Does nothing: once all are read, the log names the first ones (`BadChats.log`)."""


# What the config key bad_examples may be: functions of the message about a bad record.
BAD_EXAMPLES: dict[str, Callable[[str], None]] = {"error": _refuse, "skip": _skip}
