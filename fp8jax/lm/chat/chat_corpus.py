"""Conversations become a corpus: rendered by the tokenizer's template, packed as whole examples.

Before anything is rendered, it is checked that the tokenizer can encode what the template writes.
Templates may write today's date, as Llama 3's do. Here they always write `DATE`, so that a run that
resumes on another day continues with the same tokens.
"""

import dataclasses
import datetime
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from jaxtyping import Bool, Int32

from fp8jax.lm.chat.chat_stats import ChatStats, count_chats
from fp8jax.lm.chat.chat_template import ChatTemplate, load_chat_template
from fp8jax.lm.chat.conversation import ChatFiles
from fp8jax.lm.chat.examples import Examples, read_examples
from fp8jax.lm.chat.long_examples import LONG_EXAMPLES
from fp8jax.lm.chat.packing import ExampleRows
from fp8jax.lm.data.bad_examples import BAD_EXAMPLES, BadChats
from fp8jax.lm.data.bpe import BPETokenizer
from fp8jax.lm.data.byte_tokenizer import Tokenizer
from fp8jax.lookup import lookup

T = TypeVar("T")

DATE = datetime.datetime(2024, 7, 26)  # the date of Llama 3.1's template where it knows no other

_SHOWN = 3  # examples that are shown
_SHOWN_TEXT = 400  # characters of one of their turns


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PackedChats:
    """The rows of all sources of conversations.

    Attributes:
      rows: by split and source.
      stats: counts of each source.
      first: the place and text of the first training examples of the sources, in turn, with what
        is supervised in >>> and <<<.
      fingerprint: hex digest of the examples; it does not depend on seq_len.
    """

    rows: dict[str, dict[str, ExampleRows]]
    stats: list[ChatStats]
    first: tuple[tuple[str, str], ...]
    fingerprint: str


def pack_chats(
    readers: Mapping[str, ChatFiles],
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    valid_fraction: float,
    cache_dir: str | os.PathLike[str],
    long_examples: str,
    bad_examples: str,
) -> PackedChats:
    """Renders the conversations of all sources, and packs them into rows.

    Args:
      readers: the reader of each source, by its name.
      tokenizer: from a folder with a chat template.
      seq_len, valid_fraction, cache_dir: as in `build_corpus`.
      long_examples: a key of `LONG_EXAMPLES`.
      bad_examples: a key of `BAD_EXAMPLES`.

    Raises:
      ValueError: the tokenizer or its template does not fit; a line of a file is no example
        while `bad_examples` is "error", or longer than a row while `long_examples` is (the message
        names file and line); or a split of a source has no examples.
    """
    fit = lookup("long_examples", long_examples, LONG_EXAMPLES)
    answer = lookup("bad_examples", bad_examples, BAD_EXAMPLES)
    template = chat_template(tokenizer)
    examples, bad, fingerprint = read_examples(
        readers, template, valid_fraction=valid_fraction, cache_dir=cache_dir, answer=answer
    )
    _require_examples(examples, bad, valid_fraction)
    for name, each in bad.items():
        each.log(name)
    rows = {
        split: {name: _pack(name, each, fit, seq_len) for name, each in found.items()}
        for split, found in examples.items()
    }
    return PackedChats(
        rows=rows,
        stats=[
            count_chats(name, _of(name, examples), _of(name, rows), bad[name]) for name in readers
        ],
        first=_first(template, [each.examples for each in rows["train"].values()]),
        fingerprint=fingerprint,
    )


def _of(name: str, by_split: Mapping[str, Mapping[str, T]]) -> dict[str, T]:
    """Returns what each split has of a source."""
    return {split: found[name] for split, found in by_split.items()}


def _pack(
    name: str, examples: Examples, fit: Callable[[Examples, int], Examples], seq_len: int
) -> ExampleRows:
    """Returns the rows of a source and split; ValueError if no example is left for them."""
    if not len(kept := fit(examples, seq_len)):
        raise ValueError(
            f"source {name!r}: all {len(examples)} examples of a split are longer than a row of "
            f"{seq_len=} tokens and were left out"
        )
    return ExampleRows(kept, seq_len=seq_len)


def _require_examples(
    examples: Mapping[str, Mapping[str, Examples]],
    bad: Mapping[str, BadChats],
    valid_fraction: float,
) -> None:
    """Raises ValueError if a split of a source is empty."""
    for split, sources in examples.items():
        for name, found in sources.items():
            if len(found):
                continue
            total = sum(each.conversations() for each in _of(name, examples).values())
            if not total and bad[name].total:
                raise ValueError(
                    f"source {name!r}: no conversation is left; {bad[name]}; the first: "
                    f"{bad[name].first[0]}"
                )
            if not total:
                raise ValueError(f"source {name!r} has no conversations: its files are empty")
            raise ValueError(
                f"source {name!r}: its {split} split has no conversation, of {total} in all, with "
                f"valid.fraction={valid_fraction}: add conversations, or hold out another "
                "valid.fraction"
            )


# The template -----------------------------------------------------------------------------------

_SPELLED = re.compile(r"<[|｜][^<>|｜\s]+[|｜]>")  # special tokens as templates spell them
_PROBE = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"})


def chat_template(tokenizer: Tokenizer) -> ChatTemplate:
    """Returns the chat template in the folder of a tokenizer, which always writes `DATE`.

    Raises:
      ValueError: it is no tokenizer.json, its folder has no template, or the template writes
        special tokens that the tokenizer lacks. The message says what can be done.
    """
    if not isinstance(tokenizer, BPETokenizer):
        raise ValueError(
            "conversations are rendered by the chat template beside a tokenizer.json, and "
            f"config.tokenizer is {tokenizer.name}: take bpe:FOLDER/tokenizer.json of a folder "
            "with a chat template"
        )
    try:
        template = load_chat_template(tokenizer.folder, tokenizer, now=DATE)
    except ValueError as error:
        raise ValueError(
            f"{error}. Conversations need one: take the tokenizer of a model for chats, or write "
            f"{tokenizer.folder / 'chat_template.jinja'}"
        ) from error
    if lacking := _lacking(template):
        raise ValueError(
            f"{template.template.place} writes {', '.join(lacking)}, which the tokenizer in "
            f"{tokenizer.folder} does not have, so the model would learn them as text: take the "
            "tokenizer of the model for chats, or add the special tokens to tokenizer.json"
        )
    return template


def _lacking(template: ChatTemplate) -> list[str]:
    """Returns the special tokens that a template writes into a short chat and the tokenizer lacks.

    Templates that refuse this chat are not checked.
    """
    try:
        text = template.text(_PROBE)
    except ValueError:
        return []
    named = [token for token in template.template.variables.values() if token and token in text]
    spelled = dict.fromkeys([*_SPELLED.findall(text), *named])
    return [token for token in spelled if template.backend.token_to_id(token) is None]


# What is shown ----------------------------------------------------------------------------------


def _first(template: ChatTemplate, sources: Sequence[Examples]) -> tuple[tuple[str, str], ...]:
    """Returns the place and text of the first examples, those of the sources in turn."""
    turns = [(examples, i) for i in range(_SHOWN) for examples in sources if i < len(examples)]
    return tuple(
        (examples.place(i), marked(template, *examples[i])) for examples, i in turns[:_SHOWN]
    )


def marked(
    template: ChatTemplate,
    ids: Int32[np.ndarray, " length"],
    supervised: Bool[np.ndarray, " length"],
) -> str:
    """Returns the text of an example, with what is supervised in >>> and <<<.

    It is decoded from the ids, so it shows what is trained and not what was meant. Long turns are
    shortened.
    """
    borders = np.flatnonzero(np.diff(supervised)) + 1
    parts = []
    for run, mask in zip(np.split(ids, borders), np.split(supervised, borders), strict=True):
        text = template.backend.decode(run.tolist(), skip_special_tokens=False)
        if len(text) > _SHOWN_TEXT:
            text = f"{text[: _SHOWN_TEXT // 2]} […] {text[-_SHOWN_TEXT // 2 :]}"
        parts.append(f">>>{text}<<<" if mask[0] else text)
    return "".join(parts)
