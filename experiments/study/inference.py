"""Inference in FP8 on held-out text: what each way to scale costs, in perplexity.

The weights of a run are quantized once (lm/model/freeze.py), and its validation rows are scored:

    table       BF16, then each precision: AMAX by tensor (arXiv 2309.17224), rows, blocks, …
    CSCALE      one constant scale 2^-b for all weights and activations, for each bias b
    the leak    AMAX's scale of activations is that of a whole batch, so that it depends on tokens
                that come later, and on other rows. It is compared with the amax of one row, and of
                one token, which depends on nothing else. And the first half of each row is scored
                with and without the second half: the difference is what later tokens change.
                AMAX's scales are powers of two, so that it needs another exponent to change
                anything; fp8_current has the same amaxes and float32 scales.

Ratios of perplexities are paired: each token's log-likelihood is compared with its own in BF16.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from experiments.markdown import markdown_table
from experiments.study.bias_sweep import intervals
from fp8jax.lm.data.loader import valid_batches
from fp8jax.lm.inference.score import log_likelihoods
from fp8jax.lm.interop.trained import TrainedModel, load_model
from fp8jax.lm.model.freeze import freeze
from fp8jax.lm.model.transformer import Transformer, count_params
from fp8jax.lm.training.held_out import corpus_of_run
from fp8jax.numerics.names import as_policy
from fp8jax.numerics.policy import Policy
from fp8jax.numerics.recipes import RECIPES
from fp8jax.numerics.tiles import ROW

PRECISIONS: tuple[str, ...] = (
    "fp8_amax",
    "fp8_current",
    "fp8_rowwise",
    "fp8_block",
    "fp8_block_ue8m0",
    "mxfp8",
    "nvfp4",
    "fp8_amax:only=fwd_w",
    "fp8_block:only=fwd_w",
)

Row = tuple[np.ndarray, np.ndarray]  # tokens and segments, [rows, length]


def amax_by_token() -> Policy:
    """AMAX with a scale for each token: activations depend on no other token."""
    amax = RECIPES["fp8_amax"]
    assert amax.fwd_x is not None
    recipe = dataclasses.replace(
        amax, fwd_x=dataclasses.replace(amax.fwd_x, tile=ROW), name="fp8_amax by token"
    )
    return Policy((("layers/*", recipe),), name="fp8_amax by token")


def inference_tables(
    workdir: str,
    precisions: Sequence[str],
    biases: Sequence[int],
    *,
    rows: int,
    batch_size: int,
    tolerance: float,
) -> str:
    """Scores the held-out text of a run in each precision, with weights that were quantized once.

    Args:
      workdir: of a run.
      precisions: policies without amax histories, unless it is the one that the run ended with.
      biases: exponents b of the constant scale 2^-b, ascending.
      rows: how many validation rows of each source are scored, at most.
      batch_size: rows in a batch; AMAX shares the scale of activations over a batch.
      tolerance: a precision works if its perplexity is at most (1 + tolerance) times BF16's.

    Returns:
      Markdown.

    Raises:
      ValueError: the workdir has no run, or a policy needs histories that it does not have.
    """
    if rows < 1 or batch_size < 1 or not biases:
        raise ValueError(f"nothing to score: {rows=}, {batch_size=}, {biases=}")
    trained = load_model(workdir)
    policies = [_policy(trained, name) for name in precisions]
    batches = held_out(trained, rows, batch_size)
    model, weights = trained.model, trained.variables
    base = scores(model.clone(policy="bf16"), weights, batches)
    score = functools.partial(_compared, model, weights, batches, base, tolerance)
    lines = [score(policy) for policy in policies]
    sweep = [score(as_policy(f"fp8_cscale:bias={bias}")) for bias in biases]
    works = intervals(biases, [line.works for line in sweep])
    header = ["precision", "nats a token", "perplexity", "of BF16's", f"within {tolerance:.1%}"]
    loss = -base.mean()
    of_bf16 = ["bf16", f"{loss:.4f}", f"{math.exp(loss):.3f}", "1", ""]
    return (
        f"{workdir}, step {trained.step}: {count_params(model.config):,} parameters, trained in"
        f" `{as_policy(model.policy).name}`; {base.size:,} held-out tokens, in batches of"
        f" {batch_size} rows. Weights are quantized once; ± is the standard error of the ratio over"
        " rows.\n\n"
        + markdown_table(header, [of_bf16, *(line.cells() for line in lines)])
        + f"\nConstant scales 2^-b (CSCALE). Those that work: {works}.\n\n"
        + markdown_table(header, [line.cells() for line in sweep])
        + "\nThe amax of a batch looks at later tokens and at other rows:\n\n"
        + _leak(model, weights, batches, base)
    )


def held_out(trained: TrainedModel, rows: int, batch_size: int) -> list[Row]:
    """Returns the validation rows of a run's sources, in batches; the last one may be padded.

    Raises ValueError as `corpus_of_run` does.
    """
    batches: list[Row] = []
    for packed in corpus_of_run(trained).valid.values():
        most = -(-rows // batch_size)
        for batch in valid_batches(packed, batch_size=batch_size, max_batches=most):
            batches.append((np.asarray(batch["tokens"]), np.asarray(batch["segments"])))
    return batches


def _policy(trained: TrainedModel, name: str) -> Policy:
    policy, own = as_policy(name), as_policy(trained.model.policy)
    if policy.delayed and policy != own:
        raise ValueError(
            f"precision {name!r} has delayed scaling, and {trained.name}, which ended in"
            f" {own.name!r}, has no amax histories of it"
        )
    return policy


# Scoring ------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="model")
def _score(model: Transformer, variables: Any, tokens_BL, segments_BL):
    key = jax.random.key(0) if as_policy(model.policy).stochastic else None
    return log_likelihoods(model, variables, tokens_BL, segments_BL, key=key)


def log_p(model: Transformer, variables: Any, batches: Sequence[Row]) -> list[np.ndarray]:
    """Returns the log-likelihood of each position, in batches; 0 where there is none."""
    return [
        np.asarray(_score(model, variables, jnp.asarray(tokens), jnp.asarray(segments)), np.float64)
        for tokens, segments in batches
    ]


def _inside(batches: Sequence[Row]) -> list[np.ndarray]:
    """Returns where a token is scored: not the first of a document, and not in padding."""
    masks = []
    for _, segments in batches:
        same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
        masks.append(np.pad(same, ((0, 0), (1, 0))))
    return masks


def scores(model: Transformer, variables: Any, batches: Sequence[Row]) -> np.ndarray:
    """Returns the log-likelihoods of all scored tokens, with weights that are quantized once."""
    frozen = freeze(model, _only_needed(model, variables))
    parts = log_p(model, frozen, batches)
    return np.concatenate([p[m] for p, m in zip(parts, _inside(batches), strict=True)])


def _only_needed(model: Transformer, variables: Any) -> Any:
    return variables if as_policy(model.policy).delayed else {"params": variables["params"]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Line:
    """A precision's row of the table."""

    name: str
    loss: float
    ratio: float
    error: float
    works: bool

    def cells(self) -> list[str]:
        if not math.isfinite(self.loss):
            return [f"`{self.name}`", "not finite", "", "", "no"]
        return [
            f"`{self.name}`",
            f"{self.loss:.4f}",
            f"{math.exp(self.loss):.3f}",
            f"{self.ratio:.5f} ± {self.error:.5f}",
            "yes" if self.works else "no",
        ]


def _compared(
    model: Transformer,
    weights: Any,
    batches: Sequence[Row],
    base: np.ndarray,
    tolerance: float,
    policy: Policy,
) -> _Line:
    got = scores(model.clone(policy=policy), weights, batches)
    ratio, error = ratio_of(base, got, batches)
    logging.info("study: %s: perplexity %.5f of BF16's", policy.name, ratio)
    works = ratio <= 1 + tolerance  # False for NaN
    return _Line(name=policy.name, loss=-got.mean(), ratio=ratio, error=error, works=works)


def ratio_of(base: np.ndarray, got: np.ndarray, batches: Sequence[Row]) -> tuple[float, float]:
    """Returns perplexity of `got` over that of `base`, and its standard error over rows.

    Tokens of one row are not independent, so rows are what is counted.
    """
    difference = base - got
    mean = difference.mean()
    counts = np.concatenate([mask.sum(axis=1) for mask in _inside(batches)])
    counts = counts[counts > 0]
    ends = np.cumsum(counts)[:-1]
    by_row = np.array([part.sum() for part in np.split(difference - mean, ends)])
    n = len(counts)
    spread = math.sqrt(float(np.sum(by_row**2)) * n / max(n - 1, 1)) / base.size
    ratio = math.exp(mean) if math.isfinite(mean) else math.inf
    return ratio, ratio * spread


# The leak -----------------------------------------------------------------------------------------


def _leak(model: Transformer, weights: Any, batches: Sequence[Row], base: np.ndarray) -> str:
    """Returns the table of how far scores depend on later tokens and on other rows."""
    alone = [
        (tokens[i : i + 1], segments[i : i + 1])
        for tokens, segments in batches
        for i in range(len(tokens))
    ]
    cases = (
        ("fp8_amax, amax of the batch", as_policy("fp8_amax"), batches),
        ("fp8_amax, amax of the row", as_policy("fp8_amax"), alone),
        ("fp8_amax, amax of the token", amax_by_token(), batches),
        ("fp8_current, amax of the batch", as_policy("fp8_current"), batches),
        ("fp8_current, amax of the row", as_policy("fp8_current"), alone),
        ("fp8_rowwise, amax of the token", as_policy("fp8_rowwise"), batches),
        ("bf16", as_policy("bf16"), batches),
    )
    rows = []
    for name, policy, given in cases:
        one = model.clone(policy=policy)
        frozen = freeze(one, _only_needed(one, weights))
        got = log_p(one, frozen, given)
        flat = np.concatenate([p[m] for p, m in zip(got, _inside(given), strict=True)])
        ratio, error = ratio_of(base, flat, given)
        change = _change_by_later_tokens(one, frozen, given, got)
        rows.append(
            [
                name,
                f"{ratio:.5f} ± {error:.5f}",
                f"{change.mean():+.2e}",
                f"{np.abs(change).mean():.2e}",
                f"{np.abs(change).max():.2e}",
            ]
        )
    header = [
        "scale of activations",
        "perplexity of BF16's",
        "later tokens add, nats a token",
        "mean size",
        "largest",
    ]
    return markdown_table(header, rows)


def _change_by_later_tokens(
    model: Transformer, frozen: Any, batches: Sequence[Row], whole: Sequence[np.ndarray]
) -> np.ndarray:
    """Returns, for the first half of each row, log p with the second half there less that without.

    Attention is causal, so that only scales can carry anything back.
    """
    half = batches[0][0].shape[1] // 2
    cut = [(tokens[:, :half], segments[:, :half]) for tokens, segments in batches]
    without = log_p(model, frozen, cut)
    parts = [
        (with_[:, :half] - alone)[mask]
        for with_, alone, mask in zip(whole, without, _inside(cut), strict=True)
    ]
    return np.concatenate(parts)
