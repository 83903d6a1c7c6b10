"""Muon for the kernels of a model's layers, Adam for all else.

    m <- b m + (1 - b) g        u = 0.2 sqrt(max(in, out)) NS(n)

n is Nesterov's look ahead of m with bias correction, and NS brings the singular values of a matrix
near 1 by five Newton-Schulz iterations: `optax.contrib.scale_by_muon` (Jordan, 2024). Updates have
the root mean square of Adam's, 0.2 (arXiv 2502.16982): one learning rate and weight decay serve
both. `optax.contrib.muon` by itself takes every matrix of two axes: the kernels [L, in, out] of a
stack of layers would go to Adam, and its norms [L, D] and the embedding to Muon. Here the names
decide, and each layer is a matrix of its own: dimension numbers -2 and -1 for the kernels below
`layers`. Embedding, LM head, norms and biases are Adam's, with b1 and b2; Muon's b is DECAY.

On a mesh, XLA gathers the rows of a kernel's momentum for NS: its products need whole matrices.

On GPUs, NS multiplies in bfloat16 with float32 sums, as in Jordan's code; elsewhere in float32.
"""

from typing import Any

import jax
import optax
from flax.linen import Partitioned

from fp8jax.lm.optim.moment_formats import MomentFormat
from fp8jax.lm.optim.moments import stored

DECAY = 0.95  # of the momentum, in Jordan's code and in arXiv 2502.16982
SIZE = 0.2  # root mean square of an update (arXiv 2502.16982)


def _is_box(leaf: Any) -> bool:
    return isinstance(leaf, Partitioned)


def labels(params: Any) -> Any:
    """Returns "muon" for the kernels of layers and "adam" for all else, in the place of each leaf.

    An array that is boxed with its logical axis names is one leaf.
    """

    def label(path: Any, _: Any) -> str:
        keys = [str(key) for key in path]
        return "muon" if "['layers']" in keys and keys[-1] == "['kernel']" else "adam"

    return jax.tree_util.tree_map_with_path(label, params, is_leaf=_is_box)


def _dimensions(updates: Any) -> Any:
    """Returns the dimension numbers of each kernel [..., in, out]."""
    numbers = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
    return jax.tree.map(lambda _: numbers, updates)


def _scale_by_shape() -> optax.GradientTransformation:
    """Multiplies the orthogonal matrices of `scale_by_muon` by 0.2 sqrt(max(in, out))."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        scaled = jax.tree.map(lambda u: SIZE * max(u.shape[-2:]) ** 0.5 * u, updates)
        return scaled, state

    return optax.GradientTransformation(optax.init_empty_state, update)


def _scale_by_muon() -> optax.GradientTransformation:
    inner = optax.contrib.scale_by_muon(beta=DECAY, weight_dimension_numbers=_dimensions)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if jax.default_backend() != "gpu":
            return inner.update(updates, state, params)
        with jax.default_matmul_precision("BF16_BF16_F32"):
            return inner.update(updates, state, params)

    return optax.GradientTransformation(inner.init, update)


def scale_by_muon_and_adam(
    b1: float, b2: float, eps: float, fmt: MomentFormat, seed: int
) -> optax.GradientTransformation:
    """Muon's updates of kernels, Adam's of all else; both before decay and learning rate.

    Args:
      b1, b2, eps: of Adam.
      fmt: in which moments are stored; of Adam float32, if the format is for first moments only.
      seed: seeds stochastic rounding.
    """
    adam: Any = optax.scale_by_adam(b1, b2, eps)
    if fmt.second_moments:
        adam = stored(adam, fmt, moments=dict(mu=False, nu=True), seed=seed)
    muon = stored(_scale_by_muon(), fmt, moments=dict(mu=False), seed=seed)
    return optax.partition({"muon": optax.chain(muon, _scale_by_shape()), "adam": adam}, labels)
