"""TODO docstring."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int


class StoSignState(NamedTuple):
    """The state of `scale_by_stosign`: finished steps, momentum, and the bound G on it."""

    step: Int[Array, ""]
    mu: Any
    bound: Any


def _stochastic_sign(mean: Any, bound: Any, key: Array) -> Any:
    """sign(mean + bound n) of each leaf, n uniform in [-1, 1)."""
    leaves, treedef = jax.tree.flatten(mean)
    keys = [jax.random.fold_in(key, i) for i in range(len(leaves))]
    noise = [jax.random.uniform(k, m.shape, minval=-1.0) for k, m in zip(keys, leaves, strict=True)]
    return jax.tree.map(
        lambda m, g, n: jnp.sign(m + g * n), mean, bound, jax.tree.unflatten(treedef, noise)
    )  # fmt: skip


def scale_by_stosign(b1: float, decay: float, seed: int) -> optax.GradientTransformation:
    """StoSignSGD: signs whose mean is the momentum over its largest magnitude.

    Args:
      b1: decay of the momentum.
      decay: of the bound, 1 in the first version.
      seed: of the noise.
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
    """Adam with its update m / (sqrt(v) + eps) turned into signs with that mean, up to where it
    exceeds 1."""
    adam = optax.scale_by_adam(b1, b2, eps)

    def update(updates: Any, state: optax.ScaleByAdamState, params: Any = None):
        _, new = adam.update(updates, state, params)
        mean = optax.tree.bias_correction(new.mu, b1, new.count)
        bound = optax.tree.bias_correction(new.nu, b2, new.count)
        bound = jax.tree.map(lambda v: jnp.sqrt(v) + eps, bound)
        key = jax.random.fold_in(jax.random.key(seed), state.count)
        return _stochastic_sign(mean, bound, key), new

    return optax.GradientTransformation(adam.init, update)
