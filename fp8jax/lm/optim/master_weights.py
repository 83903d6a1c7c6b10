"""The dtypes in which master weights are stored between steps.

    float32   the default
    bfloat16  as in StoSignSGD's paper (arXiv 2604.15416)

All arithmetic is float32 with both: the model, its gradients and the optimizer read `to_float32` of
the stored weights, and the updated weight p + u is rounded once, to nearest, when it is stored. The
paper does not name the rounding; to nearest is what an update in place in PyTorch does.

Small updates are lost. A bfloat16 number p with 2^e < |p| < 2^(e+1) does not move unless |u| is at
least 2^(e-8), half its distance to the next number. Where the update is a sign, |u| is about the
learning rate: 1e-4 moves no weight above 2^-5 = 0.031, and 1e-6 none above 2^-11 = 0.0005. The
scale of a norm begins at 1: it needs 0.002 to shrink and 0.004 to grow. Weight decay by itself is
learning_rate * weight_decay of a weight, far below the 2^-9 that would move it; it only turns the
rounding of some sums. docs/results/stosignsgd.md has the losses.
"""

from typing import Any

import jax
import jax.numpy as jnp

MASTER_WEIGHTS = {"float32": jnp.dtype(jnp.float32), "bfloat16": jnp.dtype(jnp.bfloat16)}


def to_float32(params: Any) -> Any:
    """Returns the tree with float32 leaves; float32 leaves stay the same arrays."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)


def to_master(params: Any, dtype: jnp.dtype) -> Any:
    """Returns the tree rounded to a dtype of `MASTER_WEIGHTS`, to nearest."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)
