"""Optimizers and learning-rate schedules by name, as optax transformations.

Master weights, gradients and the arithmetic are float32; moments are kept between the steps as
moments.py has it. What comes before the update, clipping by the global norm, and after it,
decoupled weight decay and the learning rate, is the same for all. Amax histories never get here:
they are not parameters.

StoSignSGD (arXiv 2604.15416, algorithm 3) takes the sign of the momentum m after a uniform noise of
the size of its largest magnitude so far, element by element:

    m <- b1 m + (1 - b1) g  (g at first)      G <- max(G, |m|)      u = sign(m + G n),  n in [-1, 1)

so that the mean of u is m / G: a sign without bias. Its second version (algorithm 11) lets G shrink
by 0.99995 a step. `sign_adamw` converts Adam in the same way (algorithm 4), with sqrt(v) + eps in
the place of G. The noise comes from the seed, the step and the leaf: the same on every mesh.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax

from fp8jax.lookup import lookup
from fp8jax.optim.config import OptimizerConfig
from fp8jax.optim.moment_formats import MOMENTS
from fp8jax.optim.moments import stored
from fp8jax.optim.schedules import SCHEDULES
from fp8jax.optim.stosign import scale_by_sign_adam, scale_by_stosign

# name -> (what turns gradients into an update, its moments and which of them are second ones)
Core = tuple[optax.GradientTransformation, dict[str, bool]]


_STOSIGN = dict(mu=False, bound=False)


_ADAM = dict(mu=False, nu=True)


OPTIMIZERS: dict[str, Callable[[OptimizerConfig], Core]] = {
    "adamw": lambda c: (optax.scale_by_adam(c.b1, c.b2, c.eps), _ADAM),
    "lion": lambda c: (optax.scale_by_lion(c.b1, c.b2), dict(mu=False)),
    "stosignsgd": lambda c: (scale_by_stosign(c.b1, 1.0, c.seed), _STOSIGN),
    "stosignsgd_v2": lambda c: (scale_by_stosign(c.b1, 0.99995, c.seed), _STOSIGN),
    "sign_adamw": lambda c: (scale_by_sign_adam(c.b1, c.b2, c.eps, c.seed), _ADAM),
}


MATRICES = ("['kernel']", "['embedding']", "['position_embedding']")


def is_matrix(params: Any) -> Any:
    """Which leaves weight decay applies to: kernels and embeddings, not norms and biases.

    By name: a norm of stacked layers has two axes as well.
    """

    def named_so(path, _) -> bool:
        return any(str(key) in MATRICES for key in path)

    return jax.tree_util.tree_map_with_path(named_so, params)


def make_optimizer(
    config: OptimizerConfig,
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """The optimizer, clipping included, and its schedule (finished steps -> learning rate).

    The first of w warm-up steps has 1 / w of the learning rate, not zero, and the last step of the
    run the final one.

    Raises:
      ValueError: an unknown optimizer, moment format or schedule, or phases that do not fit into
        the run.
    """
    core, moments = lookup("optimizer", config.name, OPTIMIZERS)(config)
    fmt = lookup("moment format", config.moments, MOMENTS)
    counted_from_one = lookup("schedule", config.schedule, SCHEDULES)(config)

    def schedule(count):
        return counted_from_one(count + 1)

    # Nested as optax.adamw is: checkpoints of either fit the other.
    update = optax.chain(
        stored(core, fmt, moments=moments, seed=config.seed),
        optax.add_decayed_weights(config.weight_decay, is_matrix),
        optax.scale_by_learning_rate(schedule),
    )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), update), schedule
