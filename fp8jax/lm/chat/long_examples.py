"""What becomes of examples that are longer than a row: an error, left out, or cut.

`LONG_EXAMPLES` has the answers, by the values of the config key `long_examples`. Each names the
first ones by file and line.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
from absl import logging
from jaxtyping import Bool

from fp8jax.lm.chat.examples import Examples

_NAMED = 2  # long examples that a message names


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
    if (shorter := long & ~empty).any():
        logging.warning("cut: %s", _named(examples, shorter, seq_len))
    if empty.any():
        logging.warning(
            "skipped, since no turn of the assistant begins in their first row: %s",
            _named(examples, empty, seq_len),
        )
    return cut.only(~empty)


# What the config key long_examples may be.
LONG_EXAMPLES: dict[str, Callable[[Examples, int], Examples]] = {
    "error": _refuse,
    "skip": _skip,
    "cut": _cut,
}


def _too_long(examples: Examples, seq_len: int) -> Bool[np.ndarray, " examples"]:
    return np.asarray(examples.lengths - 1 > seq_len)


def _named(examples: Examples, long: Bool[np.ndarray, " examples"], seq_len: int) -> str:
    """Says how many examples are longer than a row, and where the first ones are."""
    which = np.flatnonzero(long).tolist()
    named = [f"{examples.place(i)} ({examples.lengths[i]:,} tokens)" for i in which[:_NAMED]]
    more = f" and {len(which) - _NAMED:,} more" if len(which) > _NAMED else ""
    are = "is" if len(which) == 1 else "are"
    return (
        f"{len(which):,} of {len(examples):,} examples {are} longer than a row of {seq_len=} "
        f"tokens: {', '.join(named)}{more}"
    )
