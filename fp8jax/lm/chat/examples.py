"""Renders and tokenizes conversations into examples, cached on disk.

An example is the ids of a rendered conversation, or of one of its turns, and for each id whether
the assistant wrote it (chat_template.py). The examples of one source and split lie end to end in
flat little-endian files, as documents do (data/token_cache.py). Beside them are the file and line
that each one is from, so that an example which does not fit into a row can be named. The length of
rows is no part of the cache.

The texts of all messages decide by their hash whether a conversation trains or validates, as for
documents. All turns of a conversation are on the same side.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32, Int64, UInt
from tqdm import tqdm

from fp8jax.lm.chat.chat_template import ChatExample, ChatTemplate
from fp8jax.lm.chat.conversation import Chat, ChatFiles, OnBad, place_of
from fp8jax.lm.data.bad_examples import BadChatError, BadChats, BadCounter, Reason, read_stats
from fp8jax.lm.data.cache_folder import Stats, read_or_build
from fp8jax.lm.data.digests import digests
from fp8jax.lm.data.documents import SPLITS, require_fraction, split_of
from fp8jax.lm.data.files import Tally
from fp8jax.lm.data.token_cache import map_array, token_dtype
from fp8jax.lm.data.urls import size_of

# Version of the cached files; raise it whenever the same conversations would give other examples.
FORMAT_VERSION = 4

_NUMBERS = np.dtype("<i8")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Examples:
    """The examples of one source and split.

    Attributes:
      tokens: the ids of all of them, end to end.
      supervised: which ids the assistant wrote.
      begins: offset of each example in `tokens`.
      lengths: its number of ids, at least 2.
      files: the number of the file that it is from.
      lines: its line there, from 1.
      paths: the files.
    """

    tokens: UInt[np.ndarray, " tokens"]
    supervised: Bool[np.ndarray, " tokens"]
    begins: Int64[np.ndarray, " examples"]
    lengths: Int64[np.ndarray, " examples"]
    files: Int64[np.ndarray, " examples"]
    lines: Int64[np.ndarray, " examples"]
    paths: tuple[Path, ...]

    def __len__(self) -> int:
        return len(self.begins)

    def __getitem__(
        self, index: int
    ) -> tuple[Int32[np.ndarray, " length"], Bool[np.ndarray, " length"]]:
        """Returns the ids of an example, and which of them the assistant wrote."""
        part = slice(self.begins[index], self.begins[index] + self.lengths[index])
        return self.tokens[part].astype(np.int32), np.asarray(self.supervised[part])

    def place(self, index: int) -> str:
        """Returns the file and line of an example, for people."""
        return place_of(self.paths[self.files[index]], int(self.lines[index]))

    def only(self, kept: Bool[np.ndarray, " examples"]) -> "Examples":
        """Returns some of the examples."""
        parts = {name: getattr(self, name)[kept] for name in _PARTS[2:]}
        return dataclasses.replace(self, **parts)

    def conversations(self) -> int:
        """Returns how many conversations the examples are from."""
        return len(np.unique(np.stack([self.files, self.lines]), axis=1).T)

    def targets(self) -> Int64[np.ndarray, " examples"]:
        """Returns how many tokens of each example are trained: the assistant's, but no first one.

        The first token of an example is nobody's target.
        """
        spans = zip((self.begins + 1).tolist(), (self.begins + self.lengths).tolist(), strict=True)
        counts = [np.count_nonzero(self.supervised[begin:end]) for begin, end in spans]
        return np.array(counts, np.int64)


_PARTS = ("tokens", "supervised", "begins", "lengths", "files", "lines")


def read_examples(
    readers: Mapping[str, ChatFiles],
    template: ChatTemplate,
    *,
    valid_fraction: float,
    cache_dir: str | os.PathLike[str],
    answer: Callable[[str], None],
) -> tuple[dict[str, dict[str, Examples]], dict[str, BadChats], str]:
    """Renders the conversations of all sources, or reads their examples from the cache.

    Args:
      readers: the reader of each source, by its name.
      template: renders and encodes the conversations.
      valid_fraction: fraction of the conversations, between 0 and 1, that validate.
      cache_dir: folder of the token files; created if it does not exist. Hashes of the files are
        kept there, and a call reads those files that have changed.
      answer: of `BAD_EXAMPLES`; called with what is wrong with a line that is no conversation, or
        cannot be rendered or learned from. If it returns, the whole conversation is left out.

    Returns:
      The examples by split, "train" or "valid", and by source; what was left out, by source; and a
      hex digest of the files and all else on which the examples depend.

    Raises:
      ValueError: a file cannot be read, or what `answer` raises.
    """
    require_fraction(valid_fraction)
    parts = {
        "version": ["chat", FORMAT_VERSION, template.tokenizer.fingerprint, template.fingerprint],
        "valid_fraction": valid_fraction,
        "sources": [[name, *reader.reads] for name, reader in readers.items()],
        "files": digests([reader.files() for reader in readers.values()], cache_dir),
    }
    fingerprint = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    folder = Path(cache_dir).expanduser() / f"chats-{fingerprint[:16]}"

    def write(new: Path) -> Stats:
        return [
            _write(new, name, reader, template, valid_fraction, answer)
            for name, reader in readers.items()
        ]

    stats = zip(readers.items(), read_or_build(folder, write), strict=True)
    bad = {name: read_stats(each, reader.paths) for (name, reader), each in stats}
    for each in bad.values():  # which another run may have left out
        for message in each.first:
            answer(message)
    examples = {
        split: {
            name: Examples(paths=reader.paths, **_read(folder, name, split, template))
            for name, reader in readers.items()
        }
        for split in SPLITS
    }
    return examples, bad, fingerprint


def _dtypes(template: ChatTemplate) -> dict[str, np.dtype]:
    """The type of each part of a stored stream."""
    types = dict.fromkeys(_PARTS, _NUMBERS)
    return types | {"tokens": token_dtype(template.tokenizer), "supervised": np.dtype(bool)}


def _path(folder: Path, name: str, split: str, part: str) -> Path:
    return folder / f"{name}.{split}.{part}"


def _read(folder: Path, name: str, split: str, template: ChatTemplate) -> dict[str, np.ndarray]:
    return {
        part: map_array(_path(folder, name, split, part), dtype)
        for part, dtype in _dtypes(template).items()
    }


def _write(
    folder: Path,
    name: str,
    reader: ChatFiles,
    template: ChatTemplate,
    fraction: float,
    answer: Callable[[str], None],
) -> dict[str, Any]:
    """Writes the examples of a source, of both splits; returns counts of its bad conversations."""
    written, tally, types = dict.fromkeys(SPLITS, 0), Tally(), _dtypes(template)
    numbers = {path: number for number, path in enumerate(reader.paths)}
    bad = BadCounter(reader.paths)

    def on_bad(path: Path, error: BadChatError) -> None:
        answer(str(error))
        bad.add(path, error)

    with contextlib.ExitStack() as stack:
        outputs = {
            (split, part): stack.enter_context(_path(folder, name, split, part).open("wb"))
            for split in SPLITS
            for part in _PARTS
        }
        # disable=None shows the bar only if stderr is a terminal.
        total = sum(map(size_of, reader.paths))
        bar = tqdm(total=total, unit="B", unit_scale=True, desc=name, disable=None)
        stack.enter_context(bar)
        for chat, examples in _rendered_chats(reader, template, tally, on_bad):
            split = split_of(chat.contents.encode("utf-8", "surrogatepass"), fraction)
            for example in examples:
                begin, length = written[split], len(example.ids)
                values = (example.ids, example.mask, begin, length, numbers[chat.path], chat.line)
                for part, value in zip(_PARTS, values, strict=True):
                    outputs[split, part].write(np.asarray(value).astype(types[part]).tobytes())
                written[split] += length
            bar.update(tally.bytes_read - bar.n)
    return bad.stats


def _rendered_chats(
    reader: ChatFiles, template: ChatTemplate, tally: Tally, on_bad: OnBad
) -> Iterator[tuple[Chat, list[ChatExample]]]:
    """Yields the conversations of a source with their examples; calls `on_bad` for bad ones."""
    for chat in reader.chats(tally, on_bad):
        try:
            examples = _rendered(reader, template, chat)
        except BadChatError as error:
            on_bad(chat.path, error)
            continue
        yield chat, examples


def _rendered(reader: ChatFiles, template: ChatTemplate, chat: Chat) -> list[ChatExample]:
    """Returns the examples of a conversation; BadChatError if one is bad."""
    if reader.each_turn:
        examples = template.turns(chat.messages, tools=chat.tools, place=chat.place)
    else:
        examples = [template.example(chat.messages, tools=chat.tools, place=chat.place)]
    if not all(example.mask[1:].any() for example in examples):
        raise BadChatError(
            Reason.SUPERVISION,
            f"{chat.place}: only the first token is the assistant's, and nothing comes before it "
            "from which it could be predicted",
        )
    return examples
