"""Random variables of models, drawn by NumPy.

JAX would compile a program for each shape that it draws, and one that initializes each model.
"""

from typing import Any

import flax.linen as nn
import jax
import numpy as np


def random_weights(shapes: Any, seed: int = 0) -> dict[str, Any]:
    """The variables of a linen model: weights as at initialization, and zeros in histories.

    Args:
      shapes: of the variables, as `jax.eval_shape` returns them for `model.init`.

    A matrix maps vectors of size 1 to vectors of size 1, if it contracts its second to last axis.
    """
    draws = np.random.default_rng(seed)

    def draw(path: Any, leaf: Any) -> Any:
        name = path[-1].key
        if path[0].key != "params" or name == "bias":
            return np.zeros(leaf.shape, leaf.dtype)
        if name == "scale":
            return np.ones(leaf.shape, leaf.dtype)
        return (draws.normal(size=leaf.shape) * leaf.shape[-2] ** -0.5).astype(leaf.dtype)

    # Arrays of JAX, which need no program: what takes them may have methods of theirs.
    drawn = jax.tree_util.tree_map_with_path(draw, nn.meta.unbox(shapes))
    return jax.tree.map(jax.numpy.asarray, drawn)
