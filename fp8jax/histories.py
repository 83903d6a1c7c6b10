"""Trees of amax histories between two steps: filled, kept apart from parameters, and combined."""

from fp8jax.gemm.histories.updates import (
    join,
    merge,
    merge_devices,
    merge_stacked,
    raise_if,
    seed,
    split,
)

__all__ = ["join", "merge", "merge_devices", "merge_stacked", "raise_if", "seed", "split"]
