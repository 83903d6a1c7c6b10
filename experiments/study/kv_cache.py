"""What inference changes in a trained model's results: an FP8 cache, and sharing a batch.

Rows of held-out text are scored through a cache, as decoding stores it: each query attends to keys
and values that were rounded to the cache's format. A row is taken as one document. Then requests,
the beginnings of rows, are continued greedily, in one batch and each by itself.
"""

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.markdown import markdown_table
from fp8jax.device import xla
from fp8jax.lm.inference.generate import Generator
from fp8jax.lm.inference.sampling import Sampling
from fp8jax.lm.inference.score import log_likelihoods
from fp8jax.lm.interop.trained import TrainedModel, load_model
from fp8jax.lm.training.held_out import corpus_of_run

_BATCH = 8
_NEW_TOKENS = 32


def kv_cache_tables(workdir: Path, policies: Sequence[str], rows: int) -> str:
    """Returns two tables in Markdown: perplexities by cache, and what requests change.

    Args:
      workdir: of a run that trained on text.
      policies: of inference, whatever trained the model.
      rows: how many rows of held-out text, a multiple of 8.

    Raises:
      ValueError: the workdir has no run, too few rows, or `rows` is no multiple of 8.
    """
    if rows < _BATCH or rows % _BATCH:
        raise ValueError(f"{rows=} must be a positive multiple of {_BATCH}")
    first = load_model(str(workdir), precision="bf16")
    tokens = _held_out(first, rows)
    perplexities, couplings = [], []
    for policy in policies:
        trained = load_model(str(workdir), precision=policy)
        bf16, fp8 = (_nats(trained, tokens, cache, _BATCH) for cache in ("bf16", "fp8"))
        ratio = math.exp(fp8.mean() - bf16.mean())
        perplexities.append(
            [
                f"`{policy}`",
                f"{math.exp(bf16.mean()):.4f}",
                f"{math.exp(fp8.mean()):.4f}",
                f"{100 * (ratio - 1):+.3f}%",
            ]
        )
        alone = _nats(trained, tokens, "bf16", 1)
        same, equal = _equal_tokens(trained, tokens)
        couplings.append(
            [
                f"`{policy}`",
                f"{np.abs(alone - bf16).mean():.2g}",
                f"{100 * (math.exp(alone.mean() - bf16.mean()) - 1):+.3f}%",
                f"{same} of {_BATCH}",
                f"{equal:.0%}",
            ]
        )
    header = ["precision", "perplexity, BF16 cache", "FP8 cache", "difference"]
    other = [
        "precision",
        "mean change of a token's nats, alone",
        "perplexity, alone",
        "requests with equal tokens",
        "equal tokens",
    ]
    return f"{markdown_table(header, perplexities)}\n{markdown_table(other, couplings)}"


def _held_out(trained: TrainedModel, rows: int) -> np.ndarray:
    """Returns the first rows of the validation split of the run's first source, [rows, L]."""
    name, found = next(iter(corpus_of_run(trained).valid.items()))
    if len(found) < rows:
        raise ValueError(f"source {name!r} has {len(found)} rows to validate, and {rows=}")
    return np.stack([found[row]["tokens"] for row in range(rows)])


def _nats(trained: TrainedModel, tokens: np.ndarray, cache: str, batch: int) -> np.ndarray:
    """Returns the negative log-likelihood of every token but each row's first, [rows, L - 1]."""
    run: Any = jax.jit(
        functools.partial(log_likelihoods, trained.model, cache=cache),
        compiler_options=xla.compiler_options(),
    )
    ones, key = jnp.ones((batch, tokens.shape[1]), jnp.int32), jax.random.key(0)
    scored = [
        np.asarray(run(trained.variables, jnp.asarray(tokens[i : i + batch]), ones, key=key))
        for i in range(0, len(tokens), batch)
    ]
    return -np.concatenate(scored)[:, 1:].astype(np.float64)


def _equal_tokens(trained: TrainedModel, tokens: np.ndarray) -> tuple[int, float]:
    """Returns how many requests give the same tokens in a batch and alone, and the equal share."""
    assert trained.tokenizer is not None
    length = tokens.shape[1]
    generator = Generator(
        trained.model, trained.variables, vocab_size=trained.tokenizer.vocab_size, max_length=length
    )
    longest = length - _NEW_TOKENS
    prompts = [row[: max(longest * (i + 1) // _BATCH, 1)] for i, row in enumerate(tokens[:_BATCH])]
    greedy = Sampling(temperature=0)
    together = generator.generate(prompts, greedy, _NEW_TOKENS)
    alone = [generator.generate([prompt], greedy, _NEW_TOKENS)[0] for prompt in prompts]
    equal = np.array([a == b for a, b in zip(together, alone, strict=True)])
    return int(equal.all(axis=1).sum()), float(equal.mean())
