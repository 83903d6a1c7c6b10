"""What the memory of a training step is taken by."""

from typing import Any

import jax
import jax.numpy as jnp

from fp8jax.lm.training.programs import abstract_batch, device_bytes
from fp8jax.lm.training.run import Run, Stage


def memory_by_kind(run: Run, stage: Stage, total: int) -> dict[str, int]:
    """Returns bytes on each device by kind: those of a step of a stage, and their total.

    Weights, optimizer state, histories and batch are exact, from shapes and shardings; gradients
    are all of them in float32; "activations" is what the total has beyond these, at least 0, work
    space included. XLA may not hold all gradients at once: the kinds then add up to more than the
    total.

    Args:
      total: what XLA allocates for the step (device/xla.py:program_bytes).
    """
    state = stage.state
    kinds = {
        "weights": device_bytes(state.params),
        "optimizer": device_bytes(state.opt_state),
        "histories": device_bytes(state.histories),
        "batch": device_bytes(abstract_batch(run, run.settings.batch_size)),
        "gradients": gradient_bytes(state.params),
    }
    return kinds | {"activations": max(total - sum(kinds.values()), 0), "total": total}


def gradient_bytes(params: Any) -> int:
    """Returns the bytes on each device of float32 gradients, sharded like the parameters."""
    return device_bytes(jax.tree.map(lambda leaf: leaf.update(dtype=jnp.float32), params))
