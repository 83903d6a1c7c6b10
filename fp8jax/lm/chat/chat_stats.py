"""Counts of a source of conversations, for data.txt and the console."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fp8jax.lm.chat.examples import Examples
from fp8jax.lm.chat.packing import ExampleRows
from fp8jax.lm.data.bad_examples import BadChats
from fp8jax.lm.data.documents import SPLITS


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatStats:
    """Counts of one source of conversations, by split ("train" and "valid").

    Attributes:
      name: the source's name.
      seq_len: places of a row.
      conversations: those with an example in the rows.
      examples: examples in the rows. They are as many, unless each turn is one.
      tokens: tokens of these examples.
      supervised: tokens of the assistant that are targets.
      rows: rows that hold the examples.
      fill: share of the rows' places that hold a token.
      skipped: examples left out because they are longer than a row.
      cut: examples that were cut to a row.
      cut_tokens: tokens that were cut off.
      bad: conversations left out because nothing can be learned from them; of both splits.
    """

    name: str
    seq_len: int
    conversations: dict[str, int]
    examples: dict[str, int]
    tokens: dict[str, int]
    supervised: dict[str, int]
    rows: dict[str, int]
    fill: dict[str, float]
    skipped: dict[str, int]
    cut: dict[str, int]
    cut_tokens: dict[str, int]
    bad: BadChats

    def heading(self, width: int) -> str:
        """Returns the head of the table, with a first column of `width` characters."""
        columns = ("conversations", "examples", "tokens", "supervised", "rows")
        heads = "".join(f"{column:>15}" for column in columns)
        return f"{'source':{width}}  split{heads}   fill   share"

    def table(self, width: int, share: float) -> list[str]:
        """Returns the lines of the table; `share` is that of the training rows."""
        lines = []
        for split in SPLITS:
            parts = (self.conversations, self.examples, self.tokens, self.supervised, self.rows)
            counts = "".join(f"{part[split]:15,}" for part in parts)
            end = f"{share:8.2%}" if split == "train" else ""
            lines.append(f"{self.name:{width}}  {split}{counts}{self.fill[split]:7.1%}{end}")
        said = [self.long(), *([str(self.bad)] if self.bad.total else [])]
        return [*lines, *(f"{'':{width}}  {line}" for line in said)]

    def long(self) -> str:
        """Returns a sentence about examples that were longer than a row."""
        skipped, cut = sum(self.skipped.values()), sum(self.cut.values())
        if not skipped and not cut:
            return f"no example was longer than a row of {self.seq_len:,} tokens"
        return (
            f"examples longer than a row of {self.seq_len:,} tokens: {skipped:,} skipped, {cut:,} "
            f"cut, tokens cut off: {sum(self.cut_tokens.values()):,}"
        )

    def brief(self) -> str:
        """Returns the counts in a line, for the console."""
        share = self.supervised["train"] / self.tokens["train"]
        line = (
            f"{self.conversations['train']:,} conversations, {self.tokens['train']:,} tokens,"
            f" {self.supervised['train']:,} ({share:.0%}) supervised; rows {self.fill['train']:.1%}"
            f" full; {self.conversations['valid']:,} held out, {self.tokens['valid']:,} tokens"
        )
        any_long = any([*self.skipped.values(), *self.cut.values()])
        said = [
            line,
            *([self.long()] if any_long else []),
            *([str(self.bad)] if self.bad.total else []),
        ]
        return "; ".join(said)


def count_chats(
    name: str,
    found: Mapping[str, Examples],
    packed: Mapping[str, ExampleRows],
    bad: BadChats,
) -> ChatStats:
    """Counts a source.

    Args:
      name: the source's name.
      found: all its examples, by split.
      packed: the rows of those that fit, by split.
      bad: its conversations that were left out.
    """
    kept = {split: rows.examples for split, rows in packed.items()}

    def count(number: Callable[[str], Any]) -> dict[str, int]:
        return {split: int(number(split)) for split in SPLITS}

    # The lengths that the kept examples had before they were cut.
    before = {
        split: found[split].lengths[np.searchsorted(found[split].begins, kept[split].begins)]
        for split in SPLITS
    }
    return ChatStats(
        name=name,
        seq_len=packed["train"].seq_len,
        conversations=count(lambda split: kept[split].conversations()),
        examples=count(lambda split: len(kept[split])),
        tokens=count(lambda split: kept[split].lengths.sum()),
        supervised=count(lambda split: kept[split].targets().sum()),
        rows=count(lambda split: len(packed[split])),
        fill={split: packed[split].fill() for split in SPLITS},
        skipped=count(lambda split: len(found[split]) - len(kept[split])),
        cut=count(lambda split: np.count_nonzero(before[split] > kept[split].lengths)),
        cut_tokens=count(lambda split: (before[split] - kept[split].lengths).sum()),
        bad=bad,
    )
