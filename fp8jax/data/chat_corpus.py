"""Conversations become a corpus: rendered by the tokenizer's template, packed as whole examples.

Before anything is rendered, it is checked that the tokenizer can encode what the template writes.
An example that is longer than a row is an error, or skipped, or cut, as the config key
`long_examples` says. It is counted, and named with file and line.

Templates may write today's date, as Llama 3's do. Here they always write `DATE`, so that a run that
resumes on another day continues with the same tokens.
"""

import dataclasses
import datetime
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from absl import logging
from jaxtyping import Bool, Int32, Int64

from fp8jax.data.bpe import BPETokenizer
from fp8jax.data.byte_tokenizer import Tokenizer
from fp8jax.data.chat import ChatTemplate, load_chat_template
from fp8jax.data.conversation import ChatFiles
from fp8jax.data.documents import SPLITS
from fp8jax.data.examples import Examples, read_examples
from fp8jax.data.packing import ExampleRows
from fp8jax.lookup import lookup

DATE = datetime.datetime(2024, 7, 26)  # the date of Llama 3.1's template where it knows no other

_NAMED = 2  # long examples that a message names
_SHOWN = 400  # characters of a turn that are shown


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatStats:
    """Counts of one source of conversations, by split ("train" and "valid").

    Attributes:
      name: the source's name.
      seq_len: places of a row.
      documents: conversations with an example in the rows.
      examples: examples in the rows. They are as many, unless each turn is one.
      tokens: tokens of these examples.
      supervised: tokens of the assistant that are targets.
      rows: rows that hold the examples.
      fill: share of the rows' places that hold a token.
      skipped: examples left out because they are longer than a row.
      cut: examples that were cut to a row.
      cut_tokens: tokens that were cut off.
    """

    name: str
    seq_len: int
    documents: dict[str, int]
    examples: dict[str, int]
    tokens: dict[str, int]
    supervised: dict[str, int]
    rows: dict[str, int]
    fill: dict[str, float]
    skipped: dict[str, int]
    cut: dict[str, int]
    cut_tokens: dict[str, int]

    def heading(self, width: int) -> str:
        """Returns the head of the table, with a first column of `width` characters."""
        columns = ("conversations", "examples", "tokens", "supervised", "rows")
        heads = "".join(f"{column:>15}" for column in columns)
        return f"{'source':{width}}  split{heads}   fill   share"

    def table(self, width: int, share: float) -> list[str]:
        """Returns the lines of the table; `share` is that of the training rows."""
        lines = []
        for split in SPLITS:
            parts = (self.documents, self.examples, self.tokens, self.supervised, self.rows)
            counts = "".join(f"{part[split]:15,}" for part in parts)
            end = f"{share:8.2%}" if split == "train" else ""
            lines.append(f"{self.name:{width}}  {split}{counts}{self.fill[split]:7.1%}{end}")
        return [*lines, f"{'':{width}}  {self.long()}"]

    def long(self) -> str:
        """Returns a sentence about examples that were longer than a row."""
        skipped, cut = sum(self.skipped.values()), sum(self.cut.values())
        if not skipped and not cut:
            return f"no example was longer than a row of {self.seq_len:,} tokens"
        return (
            f"longer than a row of {self.seq_len:,} tokens: skipped {skipped:,} examples, cut "
            f"{cut:,} by {sum(self.cut_tokens.values()):,} tokens together"
        )

    def brief(self) -> str:
        """Returns the counts in a line, for the console."""
        share = self.supervised["train"] / self.tokens["train"]
        line = (
            f"{self.documents['train']:,} conversations, {self.tokens['train']:,} tokens,"
            f" {self.supervised['train']:,} ({share:.0%}) supervised; rows {self.fill['train']:.1%}"
            f" full; {self.documents['valid']:,} held out, {self.tokens['valid']:,} tokens"
        )
        any_long = any([*self.skipped.values(), *self.cut.values()])
        return f"{line}; {self.long()}" if any_long else line


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PackedChats:
    """The rows of all sources of conversations.

    Attributes:
      rows: by split and source.
      stats: counts of each source.
      first: the first training example, with what is supervised in >>> and <<<.
      fingerprint: hex digest of the examples; it does not depend on seq_len.
    """

    rows: dict[str, dict[str, ExampleRows]]
    stats: list[ChatStats]
    first: str
    fingerprint: str


def pack_chats(
    readers: Mapping[str, ChatFiles],
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    valid_fraction: float,
    cache_dir: str | os.PathLike[str],
    long_examples: str,
) -> PackedChats:
    """Renders the conversations of all sources, and packs them into rows.

    Args:
      readers: the reader of each source, by its name.
      tokenizer: from a folder with a chat template.
      seq_len, valid_fraction, cache_dir: as in `build_corpus`.
      long_examples: a key of `LONG_EXAMPLES`.

    Raises:
      ValueError: the tokenizer or its template does not fit; a line of a file is no example, or
        longer than a row while `long_examples` is "error" (the message names file and line); or a
        split of a source has no examples.
    """
    fit = lookup("long_examples", long_examples, LONG_EXAMPLES)
    template = chat_template(tokenizer)
    examples, fingerprint = read_examples(
        readers, template, valid_fraction=valid_fraction, cache_dir=cache_dir
    )
    rows: dict[str, dict[str, ExampleRows]] = {split: {} for split in SPLITS}
    stats = []
    for name in readers:
        found = {split: examples[split][name] for split in SPLITS}
        _require_examples(name, found, valid_fraction)
        fitted = {split: fit(found[split], seq_len) for split in SPLITS}
        for split in SPLITS:
            if not len(fitted[split]):
                raise ValueError(
                    f"source {name!r}: all {len(found[split])} examples of its {split} split are "
                    f"longer than a row of {seq_len=} tokens and were skipped"
                )
            rows[split][name] = ExampleRows(fitted[split], seq_len=seq_len)
        stats.append(_stats(name, found, {split: rows[split][name] for split in SPLITS}))
    first = next(iter(rows["train"].values())).examples
    return PackedChats(
        rows=rows, stats=stats, first=marked(template, *first[0]), fingerprint=fingerprint
    )


def _require_examples(name: str, examples: Mapping[str, Examples], valid_fraction: float) -> None:
    """Raises ValueError if a split of a source is empty."""
    for split in SPLITS:
        if not len(examples[split]):
            raise ValueError(
                f"source {name!r}: its {split} split has none of its "
                f"{sum(each.conversations() for each in examples.values())} conversations, with "
                f"{valid_fraction=}: add conversations, or take another valid_fraction"
            )


def _stats(
    name: str, found: Mapping[str, Examples], packed: Mapping[str, ExampleRows]
) -> ChatStats:
    """Counts what a source had, and what of it is in the rows."""
    kept = {split: rows.examples for split, rows in packed.items()}

    def count(number: Callable[[str], Any]) -> dict[str, int]:
        return {split: int(number(split)) for split in SPLITS}

    before = {split: _lengths_of(found[split], kept[split]) for split in SPLITS}
    return ChatStats(
        name=name,
        seq_len=packed["train"].seq_len,
        documents=count(lambda split: kept[split].conversations()),
        examples=count(lambda split: len(kept[split])),
        tokens=count(lambda split: kept[split].lengths.sum()),
        supervised=count(lambda split: kept[split].targets().sum()),
        rows=count(lambda split: len(packed[split])),
        fill={split: packed[split].fill() for split in SPLITS},
        skipped=count(lambda split: len(found[split]) - len(kept[split])),
        cut=count(lambda split: np.count_nonzero(before[split] > kept[split].lengths)),
        cut_tokens=count(lambda split: (before[split] - kept[split].lengths).sum()),
    )


def _lengths_of(found: Examples, kept: Examples) -> Int64[np.ndarray, " kept"]:
    """Returns the lengths that the kept examples had before they were cut."""
    return found.lengths[np.searchsorted(found.begins, kept.begins)]


# Examples longer than a row ---------------------------------------------------------------------


def _refuse(examples: Examples, seq_len: int) -> Examples:
    """Returns the examples; raises ValueError if one does not fit into a row."""
    if (long := _too_long(examples, seq_len)).any():
        raise ValueError(
            f"{_named(examples, long, seq_len)}. Take a larger seq_len, or config.long_examples="
            "skip or cut"
        )
    return examples


def _skip(examples: Examples, seq_len: int) -> Examples:
    """Returns the examples that fit into a row."""
    if (long := _too_long(examples, seq_len)).any():
        logging.warning("skipped: %s", _named(examples, long, seq_len))
    return examples.only(~long)


def _cut(examples: Examples, seq_len: int) -> Examples:
    """Returns the examples, the long ones without their ends.

    Those that keep nothing of the assistant's are left out.
    """
    if not (long := _too_long(examples, seq_len)).any():
        return examples
    cut = dataclasses.replace(examples, lengths=np.minimum(examples.lengths, seq_len + 1))
    empty = cut.targets() == 0
    logging.warning("cut: %s", _named(examples, long & ~empty, seq_len))
    if empty.any():
        logging.warning("skipped, since no turn of the assistant begins in their first row: %s",
                        _named(examples, empty, seq_len))  # fmt: skip
    return cut.only(~empty)


# What the config key long_examples may be.
LONG_EXAMPLES: dict[str, Callable[[Examples, int], Examples]] = {
    "error": _refuse, "skip": _skip, "cut": _cut,
}  # fmt: skip


def _too_long(examples: Examples, seq_len: int) -> Bool[np.ndarray, " examples"]:
    return np.asarray(examples.lengths - 1 > seq_len)


def _named(examples: Examples, long: Bool[np.ndarray, " examples"], seq_len: int) -> str:
    """Says how many examples are longer than a row, and where the first ones are."""
    which = np.flatnonzero(long).tolist()
    named = [f"{examples.place(i)} ({examples.lengths[i]:,} tokens)" for i in which[:_NAMED]]
    more = f" and {len(which) - _NAMED:,} more" if len(which) > _NAMED else ""
    return (
        f"{len(which):,} of {len(examples):,} examples are longer than a row of {seq_len=} tokens: "
        f"{', '.join(named)}{more}"
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
        if len(text) > _SHOWN:
            text = f"{text[: _SHOWN // 2]} […] {text[-_SHOWN // 2 :]}"
        parts.append(f">>>{text}<<<" if mask[0] else text)
    return "".join(parts)
