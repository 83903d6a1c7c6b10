"""`score_targets`, compiled for each shape of a batch, after a look at the memory it needs."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.device import xla
from fp8jax.lm.inference.memory_check import array_bytes, require_memory
from fp8jax.lm.inference.score import Scores, score_targets
from fp8jax.lm.model.transformer import Transformer

_REMEDY = "lower --batch_size or --length"


# From the first arrays of `score_targets`, int32 [B, L] of one shape: tokens, targets, segments and
# positions.
Program = Callable[..., Scores]


class Scorer:
    """Scores batches with one model."""

    def __init__(self, model: Transformer, variables: Any, key: Any = None) -> None:
        """
        Args:
          variables: parameters, and histories if the policy has delayed scaling.
          key: random key, for policies that round stochastically.
        """
        self._model, self._variables, self._key = model, variables, key
        self._jitted = jax.jit(
            functools.partial(score_targets, model), compiler_options=xla.compiler_options()
        )
        self._programs: dict[tuple[int, int], Program] = {}

    def program(self, rows: int, length: int) -> Program:
        """Returns what scores batches of some shape; compiles it once.

        Raises:
          ValueError: its arrays would take more than the memory.
        """
        if (rows, length) not in self._programs:
            require_room(self._model, rows, length)
            ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)
            compiled = self._jitted.lower(self._variables, *[ids] * 4, key=self._key).compile()
            require_memory(xla.program_bytes(compiled), _batch(rows, length), _REMEDY)
            self._programs[rows, length] = functools.partial(self._run, compiled)
        return self._programs[rows, length]

    def _run(self, compiled: Any, *batch: np.ndarray) -> Scores:
        return compiled(self._variables, *batch, key=self._key)


def require_room(model: Transformer, rows: int, length: int) -> None:
    """Raises ValueError if a batch cannot fit the memory, whatever the compiler does.

    There are at least the ids of `score_targets` and two arrays of activations.
    """
    ids = jax.ShapeDtypeStruct((rows, length), np.int32)
    x = jax.ShapeDtypeStruct((rows, length, model.config.d_model), model.dtype)
    require_memory(array_bytes([ids] * 4 + [x] * 2), _batch(rows, length), _REMEDY)


def _batch(rows: int, length: int) -> str:
    return f"a batch of {rows} rows of {length} tokens"
