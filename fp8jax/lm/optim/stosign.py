"""Optimizers whose update is a stochastic sign: StoSignSGD, and Adam converted in the same way.

StoSignSGD (arXiv 2604.15416, algorithm 3) adds uniform noise to the momentum m before it takes the
sign. The size of the noise is the largest magnitude G that m has had so far, element by element:

    m <- b1 m + (1 - b1) g  (g at first)      G <- max(G, |m|)      u = sign(m + G n),  n in [-1, 1)

The expected value of u is then m / G: the sign is unbiased. The paper's second version (algorithm
11) shrinks G by a factor of 0.99995 a step. `scale_by_sign_adam` converts Adam in the same way
(algorithm 4): sqrt(v) + eps takes the place of G. The noise depends only on the seed, the step and
the leaf, so it is the same on every mesh.

Between steps m is stored as a moment (moment_formats.py), and G in float32, unless the format keeps
a slow decay by stochastic rounding ("fp8"). In E4M3 or bfloat16, rounded to nearest, the second
version would be the first: a decay by 5e-5 is far below half the distance to the next number, which
is at least 2^-5 and 2^-9 of G, so 0.99995 G would be rounded to G for ever. In float32 that half
distance is at most 2^-24 of G, 0.12% of a step's decay. And in E4M3 without a scale, G below 2^-10
would become zero in both versions: as m is zero there as well, both would be the sign of the newest
gradient, like "signum" in that format. The paper stores momentum buffers in unscaled E4M3 and finds
different losses for these three, from which we conclude that its G is wider, too.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

V2_DECAY = 0.99995  # of G each step, in the paper's second version


class StoSignState(NamedTuple):
    """The state of `scale_by_stosign`: finished steps, momentum m, and its largest magnitude G."""

    step: Int[Array, ""]
    mu: Any
    bound: Any


def _stochastic_sign(mean: Any, bound: Any, key: Array) -> Any:
    """Returns sign(mean + bound * n) for each leaf; n is uniform in [-1, 1)."""
    leaves, treedef = jax.tree.flatten(mean)
    keys = [jax.random.fold_in(key, i) for i in range(len(leaves))]
    noise = [jax.random.uniform(k, m.shape, minval=-1.0) for k, m in zip(keys, leaves, strict=True)]
    return jax.tree.map(
        lambda m, g, n: jnp.sign(m + g * n), mean, bound, jax.tree.unflatten(treedef, noise)
    )


def scale_by_stosign(b1: float, decay: float, seed: int) -> optax.GradientTransformation:
    """StoSignSGD: signs whose expected value is the momentum divided by its largest magnitude.

    Args:
      b1: decay rate of the momentum.
      decay: factor by which G shrinks each step; 1 in the paper's first version.
      seed: seeds the noise.
    """

    def init(params: Any) -> StoSignState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return StoSignState(jnp.zeros((), jnp.int32), zeros, zeros)

    def update(updates: Any, state: StoSignState, params: Any = None):
        b = jnp.where(state.step == 0, 0.0, b1)
        mu = jax.tree.map(lambda m, g: b * m + (1 - b) * g, state.mu, updates)
        bound = jax.tree.map(lambda g, m: jnp.maximum(decay * g, jnp.abs(m)), state.bound, mu)
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        signs = _stochastic_sign(mu, bound, key)
        return signs, StoSignState(state.step + 1, mu, bound)

    return optax.GradientTransformation(init, update)


def scale_by_sign_adam(b1: float, b2: float, eps: float, seed: int) -> optax.GradientTransformation:
    """Adam whose update m / (sqrt(v) + eps) is replaced by signs with that expected value.

    Where the magnitude of Adam's update exceeds 1, the sign is deterministic.
    """
    adam = optax.scale_by_adam(b1, b2, eps)

    def update(updates: Any, state: optax.ScaleByAdamState, params: Any = None):
        _, new = adam.update(updates, state, params)
        mean = optax.tree.bias_correction(new.mu, b1, new.count)
        bound = optax.tree.bias_correction(new.nu, b2, new.count)
        bound = jax.tree.map(lambda v: jnp.sqrt(v) + eps, bound)
        key = jax.random.fold_in(jax.random.key(seed), state.count)
        return _stochastic_sign(mean, bound, key), new

    return optax.GradientTransformation(adam.init, update)
