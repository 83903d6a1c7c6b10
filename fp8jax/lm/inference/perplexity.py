"""Perplexity and bits per byte of packed text, by source.

Rows are those of training (lm/data/rows.py): a document that is cut by the end of a row continues
in the next one without what came before, so the numbers are those of the run's own validation.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int32
from tqdm import tqdm

from fp8jax.lm.data.byte_tokenizer import Tokenizer
from fp8jax.lm.data.files import Tally
from fp8jax.lm.data.loader import valid_batches
from fp8jax.lm.data.rows import PackedRows, Row, Rows
from fp8jax.lm.data.token_cache import TokenStream
from fp8jax.lm.inference.paired import Measured, measured
from fp8jax.lm.inference.scorer import Scorer
from fp8jax.lm.model.transformer import Transformer
from fp8jax.lm.sources import chat_readers, parse_sources


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TextScores:
    """Sums over each row of a source.

    Attributes:
      nats: negative log-likelihood of the predicted tokens.
      tokens: predicted tokens.
      bytes: bytes of UTF-8 text that these tokens stand for.
    """

    nats: Float[np.ndarray, " rows"]
    tokens: Float[np.ndarray, " rows"]
    bytes: Float[np.ndarray, " rows"]

    def perplexity(self) -> Measured:
        """Returns the exponential of the mean nats a token."""
        return measured(self.nats, self.tokens, exponential=True)

    def bits_per_byte(self) -> Measured:
        return measured(self.nats / math.log(2), self.bytes)


def joined(scores: Sequence[TextScores]) -> TextScores:
    """Returns the scores of several sources as if they were one."""
    return TextScores(
        nats=np.concatenate([each.nats for each in scores]),
        tokens=np.concatenate([each.tokens for each in scores]),
        bytes=np.concatenate([each.bytes for each in scores]),
    )


def read_texts(
    data: str, tokenizer: Tokenizer, *, seq_len: int, begin: bool = True
) -> dict[str, PackedRows]:
    """Returns the rows of all documents of some sources, by source. Nothing is held out or cached.

    Args:
      data: sources, in the syntax of the config key `data` (lm/sources.py). Weights do not
        count.
      seq_len: tokens of a row.
      begin: whether the tokenizer's `bos` stands before every document, as in training. Without
        it, a document's first token is not predicted.

    Raises:
      ValueError: the spec is wrong, a file cannot be read, a source has no documents or only empty
        ones, or it has conversations.
    """
    rows = {}
    sources = parse_sources(data)
    if chats := chat_readers(sources):
        raise ValueError(
            f"{', '.join(chats)} have conversations, which are no text: a run on conversations "
            "evaluates those that it held out"
        )
    for source in sources:
        pieces, starts, length, characters = [], [], 0, 0
        for text in source.reader.documents(Tally()):
            characters += len(text)
            ends: list[Any] = [[tokenizer.bos] * begin, tokenizer.encode(text), [tokenizer.eos]]
            piece = np.concatenate(ends)
            pieces.append(piece.astype(np.uint32))
            starts.append(length)
            length += len(piece)
        if not pieces:
            raise ValueError(f"source {source.name!r} has no documents")
        if not characters:
            raise ValueError(
                f"source {source.name!r} has no text: its documents ({len(pieces)}) are empty"
            )
        stream = TokenStream(np.concatenate(pieces), np.array(starts, np.int64))
        rows[source.name] = PackedRows(stream, seq_len=seq_len)
    return rows


def score_texts(
    model: Transformer,
    variables: Any,
    rows: Mapping[str, Rows],
    *,
    token_bytes: Int32[np.ndarray, " vocab"],
    batch_size: int,
    seed: int = 0,
) -> dict[str, TextScores]:
    """Returns the scores of each source; on a terminal with a bar for each.

    Args:
      variables: parameters, and histories if the policy has delayed scaling.
      rows: the rows of each source.
      token_bytes: of the tokenizer.
      batch_size: rows in a batch. Recipes that scale whole tensors by their current amax see all
        of them together, so with such a recipe it changes the numbers slightly.
      seed: for policies that round stochastically.

    Raises:
      ValueError: a source has no rows, or a batch does not fit the memory.
    """
    key = jax.random.key(seed) if model.resolved_policy.stochastic else None
    scorer = Scorer(model, variables, key)
    scores = {}
    for source, source_rows in rows.items():
        if not len(source_rows):
            raise ValueError(f"source {source!r} has no rows")
        score = scorer.program(batch_size, len(source_rows[0]["tokens"]))
        sums: list[np.ndarray] = []
        before: tuple[Row, Array] | None = None  # read while the device computes the next batch
        batches = valid_batches(source_rows, batch_size=batch_size)
        total, label = (
            -(-len(source_rows) // batch_size),
            f"{model.resolved_policy.name}, {source}",
        )
        for batch in tqdm(batches, total=total, desc=label, unit="batch", disable=None):
            scores_of_batch = score(
                batch["tokens"], batch["targets"], batch["segments"], batch["positions"]
            )
            if before is not None:
                sums.append(_row_sums(*before, token_bytes))
            before = batch, scores_of_batch.log_p_BL
        assert before is not None
        sums.append(_row_sums(*before, token_bytes))
        nats, tokens, sizes = np.concatenate(sums, axis=1)
        used = tokens > 0  # the last batch is padded with empty rows
        scores[source] = TextScores(nats=nats[used], tokens=tokens[used], bytes=sizes[used])
    return scores


def _row_sums(batch: Row, log_p_BL: Array, token_bytes: np.ndarray) -> np.ndarray:
    """Returns nats, tokens and bytes of each row of a batch, float64 [3, rows]."""
    weights_BL = batch["weights"].astype(np.float64)
    each = (
        -np.asarray(log_p_BL, np.float64),
        np.ones_like(weights_BL),
        token_bytes[batch["targets"]],
    )
    return np.stack([np.sum(values * weights_BL, axis=1) for values in each])
