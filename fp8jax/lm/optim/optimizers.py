"""Optimizers by name, as optax transformations.

All arithmetic is float32. Between steps, moments are stored in a format of moment_formats.py, and
master weights in a dtype of master_weights.py. Every optimizer first clips the gradients by their
global norm and rounds them to a format of gradients.py, then computes its update, then adds
decoupled weight decay and multiplies by the learning rate. Amax histories never reach an optimizer:
they are not parameters.

"adam", "sgd" and "adafactor" are optax's of that name, which have no weight decay: "sgd" has the
momentum `b1`, and to "adafactor" a leaf is a block, so that the layers of a stack are one.
MODULE:OBJECT names a function of the user's own code: it takes an `OptimizerConfig`, and returns a
`optax.GradientTransformation` from gradients to an update, as `optax.scale_by_adam` is one, without
weight decay and learning rate.

"muon" is Muon for the kernels of layers and AdamW for all else (muon.py).

"signum" is the sign of the momentum m <- b1 m + (1 - b1) g (Bernstein et al., arXiv 1802.04434),
the baseline of StoSignSGD's paper: Lion with the same decay rate in the sign and in the momentum.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Int

from fp8jax.lm.optim.config import OptimizerConfig
from fp8jax.lm.optim.gradients import GRADIENTS, clip_and_round, refuse_saturation
from fp8jax.lm.optim.master_weights import to_float32
from fp8jax.lm.optim.moment_formats import MOMENTS
from fp8jax.lm.optim.moments import stored
from fp8jax.lm.optim.muon import scale_by_muon_and_adam
from fp8jax.lm.optim.oscillation import ResetState, reset_oscillating
from fp8jax.lm.optim.schedules import schedule_of
from fp8jax.lm.optim.stosign import V2_DECAY, scale_by_sign_adam, scale_by_stosign
from fp8jax.lookup import lookup, own_object

# The transformation from gradients to an update, and the fields of its state that are stored as
# moments. The value of a field says whether it is a second moment, which is never negative. None:
# the transformation stores its moments itself.
Core = tuple[optax.GradientTransformation, dict[str, bool] | None]

_MOMENTUM = dict(mu=False)
_ADAM = dict(mu=False, nu=True)


def _stosign(c: OptimizerConfig, decay: float) -> Core:
    """StoSignSGD. Its largest magnitude is stored as a moment only where it can decay."""
    fields = _MOMENTUM | (dict(bound=False) if MOMENTS[c.moments].decays else {})
    return scale_by_stosign(c.b1, decay, c.seed), fields


def _adafactor(c: OptimizerConfig) -> Core:
    """Adafactor without momentum (optax.adafactor, in which the rate comes before the last)."""
    core = optax.chain(
        optax.scale_by_factored_rms(),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms(),
    )
    return core, {}


def _muon(c: OptimizerConfig) -> Core:
    return scale_by_muon_and_adam(c.b1, c.b2, c.eps, MOMENTS[c.moments], c.seed), None


OPTIMIZERS: dict[str, Callable[[OptimizerConfig], Core]] = {
    "adamw": lambda c: (optax.scale_by_adam(c.b1, c.b2, c.eps), _ADAM),
    "adam": lambda c: (optax.scale_by_adam(c.b1, c.b2, c.eps), _ADAM),
    "sgd": lambda c: (optax.trace(c.b1), dict(trace=False)),
    "adafactor": _adafactor,
    "muon": _muon,
    "lion": lambda c: (optax.scale_by_lion(c.b1, c.b2), _MOMENTUM),
    "signum": lambda c: (optax.scale_by_lion(c.b1, c.b1), _MOMENTUM),
    "stosignsgd": lambda c: _stosign(c, 1.0),
    "stosignsgd_v2": lambda c: _stosign(c, V2_DECAY),
    "sign_adamw": lambda c: (scale_by_sign_adam(c.b1, c.b2, c.eps, c.seed), _ADAM),
}


_WITHOUT_DECAY = ("adam", "sgd", "adafactor")


def _core(config: OptimizerConfig) -> Core:
    """The transformation of a config, and its moments."""
    name = config.name
    if name in _WITHOUT_DECAY and config.weight_decay:
        raise ValueError(
            f"optimizer {name} has no weight decay, got weight_decay={config.weight_decay}: set it"
            " to 0, or take adamw"
        )
    if ":" not in name:
        core, moments = lookup("optimizer", name, OPTIMIZERS)(config)
    else:
        core, moments = own_object("optimizer", name)(config), {}
        if not isinstance(core, optax.GradientTransformation):
            raise TypeError(f"optimizer {name} returned no optax.GradientTransformation: {core}")
    if moments == {} and config.moments != "float32":
        raise ValueError(
            f"moments={config.moments}: optimizer {name} keeps its state as it is; take float32"
        )
    if moments and any(moments.values()) and not MOMENTS[config.moments].second_moments:
        raise ValueError(
            f"moments={config.moments} holds no second moments, and optimizer {name} has some: take"
            " fp8, or muon"
        )
    rounds_away = not MOMENTS[config.moments].decays and 1 - config.b2 < 2**-8
    if moments and any(moments.values()) and rounds_away:
        raise ValueError(
            f"moments={config.moments} with b2={config.b2}: some second moments would hardly decay:"
            " rounding to nearest takes changes below 2^-8 away. Take moments=fp8, whose rounding"
            " is stochastic, or b2=0.99"
        )
    return core, moments


# Keys of the leaves that weight decay applies to, as `str` shows them in a path.
MATRICES = ("['kernel']", "['embedding']", "['position_embedding']")


def is_matrix(params: Any) -> Any:
    """Returns a tree of bools: True for kernels and embeddings, False for norms and biases.

    Weight decay applies to the True leaves. The names decide, not the number of axes: the norms of
    stacked layers have two axes as well.
    """

    def has_matrix_name(path, _) -> bool:
        return any(str(key) in MATRICES for key in path)

    return jax.tree_util.tree_map_with_path(has_matrix_name, params)


def schedule_steps(opt_state: Any) -> Int[Array, ""]:
    """Returns the finished steps that the schedule has counted, in an optimizer's state.

    They are those of the run. Other counts in the state may be older, Adam's for one, in a run
    that starts from the state of another (lm/training/initial_state.py).
    """
    (count,) = (
        leaf.count
        for leaf in jax.tree.leaves(opt_state, is_leaf=_is_schedule)
        if _is_schedule(leaf)
    )
    return count


def restart_schedule(opt_state: Any) -> Any:
    """Returns an optimizer's state whose schedule has counted no step; all else is kept.

    Resets of oscillating weights count from the start of the schedule, too.
    """

    def restarted(leaf: Any) -> Any:
        if _is_schedule(leaf):
            return optax.ScaleByScheduleState(jnp.zeros_like(leaf.count))
        return leaf._replace(step=jnp.zeros_like(leaf.step)) if _is_reset(leaf) else leaf

    return jax.tree.map(
        restarted, opt_state, is_leaf=lambda leaf: _is_schedule(leaf) or _is_reset(leaf)
    )


def _is_schedule(leaf: Any) -> bool:
    return isinstance(leaf, optax.ScaleByScheduleState)


def _is_reset(leaf: Any) -> bool:
    return isinstance(leaf, ResetState)


def _scale_by_rate() -> optax.GradientTransformationExtraArgs:
    """Multiplies by minus the `learning_rate` of an update. Its state counts the steps, as that of
    `optax.scale_by_schedule` does, so that checkpoints of one load into the other."""

    def update(
        updates: Any, state: Any, params: Any = None, *, learning_rate: ArrayLike, **_: Any
    ) -> tuple[Any, Any]:
        return optax.scale_by_schedule(lambda _: -1 * learning_rate).update(updates, state, params)

    return optax.GradientTransformationExtraArgs(
        lambda _: optax.ScaleByScheduleState(jnp.zeros((), jnp.int32)), update
    )


def _reset(config: OptimizerConfig) -> list[optax.GradientTransformation]:
    """The reset of weights, if a config asks for it."""
    if not config.reset:
        return []
    return [reset_oscillating(config.reset, round(config.reset_from * config.num_steps))]


def make_optimizer(
    config: OptimizerConfig,
) -> tuple[optax.GradientTransformationExtraArgs, optax.Schedule]:
    """Returns the optimizer, clipping included, and its schedule (finished steps -> learning rate).

    The optimizer does not know `config.learning_rate`, the schedule or `config.clip_norm`: its
    update takes `learning_rate` and `clip_norm` by keyword, so that a program that computes both
    elsewhere need not compile anew for other ones. It counts the steps for the schedule
    (`schedule_steps`). It takes parameters in any dtype of `MASTER_WEIGHTS`; its state and its
    updates are those of float32 parameters.

    The first of w warm-up steps uses 1 / w of the largest learning rate, not zero. The last step of
    the run uses the final learning rate.

    Raises:
      ValueError: the optimizer, the format of moments or of gradients, or the schedule is unknown;
        weight decay, or a format of moments, for an optimizer that has none; the phases of the
        schedule do not fit into the run; or `clip_norm` is beyond the largest number of the
        gradients' format.
    """
    fmt = lookup("moment format", config.moments, MOMENTS)
    core, moments = _core(config)
    gradients = lookup("gradient format", config.gradients, GRADIENTS)
    refuse_saturation(config.clip_norm, gradients)
    counted_from_one = schedule_of(config)

    def schedule(count):
        return counted_from_one(count + 1)

    # The nesting is that of optax.adamw, so that checkpoints of one load into the other.
    update = optax.chain(
        core if moments is None else stored(core, fmt, moments=moments, seed=config.seed),
        optax.add_decayed_weights(config.weight_decay, is_matrix),
        _scale_by_rate(),
        *_reset(config),
    )
    chain = optax.chain(clip_and_round(gradients), update)

    def apply(
        grads: Any,
        state: Any,
        params: Any = None,
        *,
        learning_rate: ArrayLike,
        clip_norm: ArrayLike,
    ) -> tuple[Any, Any]:
        numbers = dict(learning_rate=learning_rate, clip_norm=clip_norm)
        return chain.update(grads, state, to_float32(params), **numbers)

    return optax.GradientTransformationExtraArgs(
        lambda params: chain.init(to_float32(params)), apply
    ), schedule
