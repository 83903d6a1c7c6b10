"""Shared row maxima in attention, and the bias of each arithmetic (arXiv 2510.04212).

Legend: B batch, T queries, S keys, H head size. Each row of the batch has one head.

Where several keys of a row share the largest score, their exponentials p are all exactly 1, and the
rounding of p v in bfloat16 is biased. The table counts such rows, and shows the bias of the output
and of delta = rowsum(do * output), against float64.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.markdown import markdown_table
from fp8jax.device import xla
from fp8jax.lm.model import blockwise_attention
from fp8jax.lm.model.attention import ATTENTIONS
from fp8jax.lm.model.blockwise_attention import Blockwise

NAMES = (
    "reference",
    "reference_bf16",
    "reference_all_bf16",
    "stabilized",
    "stabilized_bf16",
    "stabilized_all_bf16",
)
HEADS, LENGTH, SIZE = 256, blockwise_attention.BLOCK, 64  # a row is one block of keys
SKIPPED = 4  # queries at the start that do not see all sinks
KINDS = {
    "random": "scores with a standard deviation of 2",
    "repeated keys": "as random, with 16 different keys in each row",
    "two equal sinks": "two keys share a score of 12 to 16; scores of others are normal numbers",
    "four near sinks": "four keys have scores of 12 to 16 that differ by 0.2%, others as before",
}


def ones_per_row(p: np.ndarray) -> np.ndarray:
    """Returns how many entries of each row, along the last axis, are exactly 1."""
    return np.sum(np.asarray(p) == 1, axis=-1)


def ulps(x: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Returns by how many bfloat16 units in the last place of `exact` |x| is above |exact|."""
    _, exponent = np.frexp(exact)  # |exact| in [2^(e-1), 2^e), whose bfloat16 numbers are 2^(e-8)
    return (np.abs(x) - np.abs(exact)) / np.ldexp(1.0, exponent - 8)


def keys_and_queries(kind: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Returns q and k [B, T, H] of a kind of `KINDS`."""
    q, k = rng.normal(size=(2, HEADS, LENGTH, SIZE))
    if kind == "random":
        return 2 * q, k
    if kind == "repeated keys":
        drawn = rng.integers(16, size=(HEADS, LENGTH))
        return 2 * q, np.take_along_axis(k, drawn[:, :, None], axis=1)
    sinks = {"two equal sinks": 2, "four near sinks": 4}[kind]
    spread = 0 if sinks == 2 else 2e-3
    # The score of sinks: the first eight bits, more bits, and what tells sinks apart.
    q[:, :, :1] = q[:, :, 2:3] = rng.uniform(12, 16, (HEADS, LENGTH, 1))
    q[:, :, 1] = rng.uniform(0, 1 / 16, (HEADS, LENGTH))
    k[:, :, :3], k[:, :sinks] = 0, 0
    k[:, :sinks, :2] = np.sqrt(SIZE)
    k[:, :sinks, 2] = np.sqrt(SIZE) * spread * rng.normal(size=(HEADS, sinks))
    return q, k


def exact_outputs(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Returns causal attention [B, T, H] in float64."""
    s = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
    s = np.where(np.tri(*s.shape[1:]) > 0, s, -np.inf)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return p @ v / p.sum(axis=-1, keepdims=True)


@functools.partial(jax.jit, static_argnums=0, compiler_options=xla.compiler_options())
def _measure(how: Blockwise, q_BTKH, k_BTKH, v_BTKH, do_BTKH) -> tuple[jax.Array, ...]:
    """Returns p [B, T, S], the outputs [B, T, H] and the deltas [B, T]."""
    segments = jnp.ones(q_BTKH.shape[:2], jnp.int32)
    p = blockwise_attention.first_exponentials(how, q_BTKH[:, :, :, None], k_BTKH, segments)
    out_BTKH = how(q_BTKH, k_BTKH, v_BTKH, segments)
    deltas = blockwise_attention.deltas(how, do_BTKH[:, :, :, None], out_BTKH[:, :, :, None])
    return p[:, 0, 0], out_BTKH[:, :, 0], deltas[:, :, 0, 0]


def _row(kind: str, name: str, arrays: list[np.ndarray]) -> list[str]:
    q, k, v, do = (np.asarray(x, np.float64) for x in arrays)
    exact = exact_outputs(q, k, v)
    how = ATTENTIONS[name].attend
    assert isinstance(how, Blockwise)
    measured = _measure(how, *(jnp.asarray(x)[:, :, None] for x in arrays))
    p, out, deltas = (np.asarray(x, np.float64)[:, SKIPPED:] for x in measured)
    ones, exact, do = ones_per_row(p), exact[:, SKIPPED:], do[:, SKIPPED:]
    tied = ones > 1
    several = f"{ones[tied].mean():.1f}" if tied.any() else ""
    biases = (ulps(out, exact), ulps(deltas, np.sum(do * exact, axis=-1)))
    return [kind, f"`{name}`", f"{100 * tied.mean():.1f}%", several, *map(_mean, biases)]


def _mean(x: np.ndarray) -> str:
    """The mean and its standard error; the heads are independent, their queries are not."""
    heads = x.reshape(len(x), -1).mean(axis=1)
    return f"{heads.mean():+.4f} ± {heads.std() / np.sqrt(len(heads)):.4f}"


def ties_table() -> str:
    """Returns a Markdown table: shared maxima and biases of each arithmetic on `KINDS` of rows.

    Values and output gradients are in (-2, -1]. The biases are the errors of magnitudes, so that a
    positive one is away from zero, in units of the last bfloat16 place.
    """
    header = [
        "inputs",
        "attention",
        "rows with several p = 1",
        "p = 1 in them",
        "output: bias, ulp",
        "delta: bias, ulp",
    ]
    rows = []
    for kind in KINDS:
        rng = np.random.default_rng(0)
        v, do = -rng.uniform(1, 2, (2, HEADS, LENGTH, SIZE))
        arrays = [np.asarray(x, jnp.bfloat16) for x in (*keys_and_queries(kind, rng), v, do)]
        rows += [_row(kind, name, arrays) for name in NAMES]
    return markdown_table(header, rows)
