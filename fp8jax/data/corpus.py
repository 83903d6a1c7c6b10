"""From a data spec to a corpus: packed training and validation rows, with their statistics."""

import dataclasses
import os

from fp8jax.data.byte_tokenizer import Tokenizer
from fp8jax.data.documents import SPLITS
from fp8jax.data.mixture import Mixture
from fp8jax.data.rows import PackedRows
from fp8jax.data.sources import parse_sources
from fp8jax.data.token_cache import SourceStats, tokenize_sources


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """Packed text, ready to be batched.

    Attributes:
      train: the training rows of all sources, mixed by their weights.
      valid: the validation rows of each source, by its name.
      stats: counts of each source.
      fingerprint: hex digest of the token streams; it does not depend on seq_len or weights. A
        resumed run compares it, since changed data would otherwise go unnoticed.
    """

    train: Mixture
    valid: dict[str, PackedRows]
    stats: list[SourceStats]
    fingerprint: str

    def summary(self) -> str:
        """Returns a table of the sources.

        It shows documents, bytes and tokens by source and split, each source's share of the
        training rows, what was skipped, and whether documents were cut.
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
            if stats.piece_size:
                lines.append(
                    f"{'':{width}}  its documents were too few to hold any out: they are cut into "
                    f"pieces of up to {stats.piece_size:,} characters"
                )
        return "\n".join(lines)


def _require_rows(stats: SourceStats, seq_len: int, valid_fraction: float) -> None:
    """Raises ValueError if a split of the source does not fill a single row."""
    for split in SPLITS:
        if stats.tokens[split] < seq_len + 1:
            raise ValueError(
                f"source {stats.name!r}: its {split} split does not fill one row of {seq_len=} plus"
                f" one. It has {stats.documents[split]} of {sum(stats.documents.values())} "
                f"documents and {stats.tokens[split]} of {sum(stats.tokens.values())} tokens, with "
                f"{valid_fraction=}; {stats.skipped()}. Add text or reduce seq_len"
            )


def build_corpus(
    data: str,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    valid_fraction: float,
    cache_dir: str | os.PathLike[str],
    document_masking: bool = True,
) -> Corpus:
    """Tokenizes the sources in `data`, or reads them from the cache, and packs them into rows.

    Args:
      data: sources and their weights, see sources.py.
      tokenizer: encodes the documents.
      seq_len: inputs in a row.
      valid_fraction: fraction of the documents, between 0 and 1, that validate.
      cache_dir: folder of the token files; created if it does not exist. Every call reads and
        hashes all files, so that an edit is never missed.
      document_masking: whether the documents of a training row are kept apart (rows.py). Validation
        rows always keep them apart: so the validation losses of two runs compare, and a document's
        loss does not depend on its neighbors.

    Raises:
      ValueError: the spec is wrong (see `parse_sources`), a file cannot be read (the message names
        the file and, in JSON lines, the line), a split of a source does not fill one row, or a
        number is out of range.
    """
    sources = parse_sources(data)
    tokenized = tokenize_sources(
        sources, tokenizer, valid_fraction=valid_fraction, cache_dir=cache_dir
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
    # Either all sources have a weight or none has.
    weights = {source.name: source.weight for source in sources if source.weight is not None}
    return Corpus(
        train=Mixture(packed["train"], weights or None),
        valid=packed["valid"],
        stats=tokenized.stats,
        fingerprint=tokenized.fingerprint,
    )
