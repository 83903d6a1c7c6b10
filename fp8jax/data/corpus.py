"""TODO docstring."""

import dataclasses
import os

from fp8jax.data.byte_tokenizer import Tokenizer
from fp8jax.data.documents import SPLITS
from fp8jax.data.mixture import Mixture
from fp8jax.data.rows import PackedRows
from fp8jax.data.sources import parse_sources
from fp8jax.data.token_cache import SourceStats, tokenize_sources

# Corpora: text to rows.


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """Packed text, ready to be batched.

    Attributes:
      train: the training rows of all sources, mixed by their weights.
      valid: the validation rows of each source, by its name.
      stats: what became of each source.
      fingerprint: hex digest; equal for equal token streams, whatever seq_len and weights. A
        resumed run compares it: other data under the same step would go unnoticed.
    """

    train: Mixture
    valid: dict[str, PackedRows]
    stats: list[SourceStats]
    fingerprint: str

    def summary(self) -> str:
        """A small table: documents, bytes and tokens by source and split, each source's share of
        the training rows, and what was skipped.
        """
        width = max(len(stats.name) for stats in self.stats)
        lines = [f"{'source':{width}}  split{'documents':>16}{'bytes':>16}{'tokens':>16}   share"]
        cycle = sum(self.train.schedule.values())
        for stats in self.stats:
            for split in SPLITS:
                counts = (stats.documents[split], stats.bytes[split], stats.tokens[split])
                line = f"{stats.name:{width}}  {split}" + "".join(f"{n:16,}" for n in counts)
                share = self.train.schedule[stats.name] / cycle
                lines.append(line + (f"{share:8.2%}" if split == "train" else ""))
            lines.append(f"{'':{width}}  {stats.skipped()}")
        return "\n".join(lines)


def _require_rows(stats: SourceStats, seq_len: int, valid_fraction: float) -> None:
    """Refuses a source of which a split does not fill a single row."""
    for split in SPLITS:
        if stats.tokens[split] < seq_len + 1:
            raise ValueError(
                f"source {stats.name!r}: its {split} split is less than one row of {seq_len=} plus "
                f"one. It has {stats.documents[split]} of {sum(stats.documents.values())} documents"
                f" and {stats.tokens[split]} of {sum(stats.tokens.values())} tokens, with "
                f"{valid_fraction=}; {stats.skipped()}"
            )


def build_corpus(
    data: str,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    valid_fraction: float,
    cache_dir: str | os.PathLike[str],
) -> Corpus:
    """Tokenizes the sources named in `data`, or finds them tokenized, and packs them into rows.

    Args:
      data: sources and their weights, see sources.py.
      valid_fraction: share of the documents, between 0 and 1, that validate.
      cache_dir: folder for the token files; made if need be. All files are read and hashed at
        each call, so that an edit is never missed.

    Raises:
      ValueError: a bad spec (see `parse_sources`), a file that cannot be read (with its name and,
        in JSON lines, the line), a source of which either split does not fill one row, or a bad
        number.
    """
    sources = parse_sources(data)
    tokenized = tokenize_sources(
        sources, tokenizer, valid_fraction=valid_fraction, cache_dir=cache_dir
    )
    for stats in tokenized.stats:
        _require_rows(stats, seq_len, valid_fraction)
    packed = {
        split: {name: PackedRows(stream, seq_len=seq_len) for name, stream in streams.items()}
        for split, streams in tokenized.streams.items()
    }
    # Sources have weights all or not at all.
    weights = {source.name: source.weight for source in sources if source.weight is not None}
    return Corpus(
        train=Mixture(packed["train"], weights or None),
        valid=packed["valid"],
        stats=tokenized.stats,
        fingerprint=tokenized.fingerprint,
    )
