"""From a data spec to a corpus: packed training and validation rows, with their statistics.

All sources are of text, which is cut into rows (data/rows.py), or all are of conversations, which
are packed as whole examples (chat/packing.py); or one has the rows (data/token_rows.py).
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Protocol, runtime_checkable

from fp8jax.lm.data.bad_examples import BAD_EXAMPLES
from fp8jax.lm.data.byte_tokenizer import Tokenizer
from fp8jax.lm.data.documents import SPLITS
from fp8jax.lm.data.mixture import Mixture
from fp8jax.lm.data.rows import PackedRows, Rows
from fp8jax.lm.data.token_cache import SourceStats, tokenize_sources
from fp8jax.lm.data.token_rows import TokenData, TokenStats, split_rows
from fp8jax.lm.sources import Source, chat_readers, own_rows, parse_sources
from fp8jax.lookup import lookup


@runtime_checkable
class Stats(Protocol):
    """Counts of a source: `SourceStats` of text, `ChatStats`, `TokenStats` of a user's rows."""

    @property
    def name(self) -> str: ...

    def heading(self, width: int) -> str: ...
    def table(self, width: int, share: float) -> list[str]: ...
    def brief(self) -> str: ...


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """Packed text or conversations, ready to be batched.

    Attributes:
      train: the training rows of all sources, mixed by their weights.
      valid: the validation rows of each source, by its name.
      stats: counts of each source.
      fingerprint: hex digest of the token streams; it does not depend on seq_len or weights. A
        resumed run compares it, since changed data would otherwise go unnoticed.
      first: of conversations, the place and text of the first training examples, those of the
        sources in turn, with what is supervised in >>> and <<<; empty for text.
    """

    train: Mixture
    valid: Mapping[str, Rows]
    stats: Sequence[Stats]
    fingerprint: str
    first: Sequence[tuple[str, str]] = ()

    def summary(self) -> str:
        """Returns a table of the sources.

        It shows what each source has by split, its share of the training rows, and what was
        skipped or cut.
        """
        width = max(len(stats.name) for stats in self.stats)
        cycle = sum(self.train.schedule.values())
        lines = [self.stats[0].heading(width)]
        for stats in self.stats:
            lines += stats.table(width, self.train.schedule[stats.name] / cycle)
        return "\n".join(lines)


def _require_rows(stats: SourceStats, seq_len: int, valid_fraction: float) -> None:
    """Raises ValueError if a split of the source does not fill a single row."""
    for split in SPLITS:
        if stats.tokens[split] < seq_len + 1:
            raise ValueError(
                f"source {stats.name!r}: its {split} split does not fill one row of {seq_len=} plus"
                f" one. It has {stats.documents[split]} of {sum(stats.documents.values())} "
                f"documents and {stats.tokens[split]} of {sum(stats.tokens.values())} tokens, with "
                f"valid.fraction={valid_fraction}; {stats.skipped()}. Add text, reduce seq_len, or "
                "hold out another valid.fraction"
            )


def build_corpus(
    data: str,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    valid_fraction: float,
    cache_dir: str | os.PathLike[str],
    long_examples: str = "error",
    bad_examples: str = "error",
    document_masking: bool = True,
) -> Corpus:
    """Tokenizes the sources in `data`, or reads them from the cache, and packs them into rows.

    Args:
      data: sources and their weights, see sources.py.
      tokenizer: encodes the documents; for conversations, its folder has their template.
      seq_len: inputs in a row.
      valid_fraction: fraction of the documents, between 0 and 1, that validate.
      cache_dir: folder of the token files; created if it does not exist. Every call reads and
        hashes all files, so that an edit is never missed.
      long_examples: what becomes of conversations that are longer than a row: error, skip or cut.
      bad_examples: what becomes of records that cannot be learned from: error or skip.
      document_masking: whether the documents of a training row are kept apart (data/rows.py).
        Validation rows always keep them apart: so the validation losses of two runs compare, and a
        document's loss does not depend on its neighbors. Conversations are kept apart in any case.

    Raises:
      ValueError: the spec is wrong (see `parse_sources`), a file cannot be read (the message names
        the file and, in JSON lines, the line), a split of a source does not fill one row, a
        conversation cannot be rendered, learned from or packed, or a number is out of range.
    """
    sources = parse_sources(data)
    if not (chats := chat_readers(sources)):
        if long_examples != "error":
            raise ValueError(f"{long_examples=} is for conversations, and {data!r} has none")
        if (own := own_rows(sources)) is not None:
            if bad_examples != "error":
                raise ValueError(f"{bad_examples=} is for documents, and {data!r} has none")
            name, reader = own
            rows = reader.data(seq_len)
            return own_corpus(rows, name, tokenizer, seq_len, valid_fraction)
        answer = lookup("bad_examples", bad_examples, BAD_EXAMPLES)
        return _text_corpus(
            sources, tokenizer, seq_len, valid_fraction, cache_dir, document_masking, answer
        )
    if not document_masking:
        raise ValueError(
            f"document_masking=False is for text: the conversations of {', '.join(chats)} are kept"
            " apart in any case; set document_masking=True"
        )
    from fp8jax.lm.chat.chat_corpus import pack_chats  # imports jinja2 and the package tokenizers

    packed = pack_chats(
        chats, tokenizer, seq_len=seq_len, valid_fraction=valid_fraction, cache_dir=cache_dir,
        long_examples=long_examples, bad_examples=bad_examples,
    )  # fmt: skip
    return Corpus(
        train=Mixture(packed.rows["train"], _weights(sources)), valid=packed.rows["valid"],
        stats=packed.stats, fingerprint=packed.fingerprint, first=packed.first,
    )  # fmt: skip


def _weights(sources: Sequence[Source]) -> dict[str, Fraction] | None:
    """Returns the weights of sources by name; None if none has one, else all have."""
    return {s.name: s.weight for s in sources if s.weight is not None} or None


def _text_corpus(
    sources: list[Source],
    tokenizer: Tokenizer,
    seq_len: int,
    valid_fraction: float,
    cache_dir: str | os.PathLike[str],
    document_masking: bool,
    answer: Callable[[str], None],
) -> Corpus:
    """Returns the corpus of sources of text."""
    tokenized = tokenize_sources(
        sources, tokenizer, valid_fraction=valid_fraction, cache_dir=cache_dir, answer=answer
    )
    for stats in tokenized.stats:
        _require_rows(stats, seq_len, valid_fraction)
    packed = {
        split: {
            name: PackedRows(
                stream, seq_len=seq_len, document_masking=document_masking or split != "train"
            )
            for name, stream in streams.items()
        }
        for split, streams in tokenized.streams.items()
    }
    return Corpus(
        train=Mixture(packed["train"], _weights(sources)),
        valid=packed["valid"],
        stats=tokenized.stats,
        fingerprint=tokenized.fingerprint,
    )


def own_corpus(
    data: TokenData, name: str, tokenizer: Tokenizer, seq_len: int, valid_fraction: float
) -> Corpus:
    """Returns a corpus of a user's own rows, of which the last ones validate.

    Args:
      data: element i is an array [seq_len + 1] of ids of the tokenizer.
      name: of the source.
      seq_len, valid_fraction: as for `build_corpus`; at least one element validates.

    Raises ValueError as `split_rows` does.
    """
    rows, fingerprint = split_rows(
        data,
        seq_len=seq_len,
        valid_fraction=valid_fraction,
        vocab_size=tokenizer.vocab_size,
    )
    counts = {split: len(rows[split]) for split in SPLITS}
    return Corpus(
        train=Mixture({name: rows["train"]}, None),
        valid={name: rows["valid"]},
        stats=[TokenStats(name, counts, seq_len)],
        fingerprint=fingerprint,
    )
