"""Learning-rate schedules by name: functions from the step, counted from 1, to a learning rate."""

from collections.abc import Callable

import optax

from fp8jax.lm.optim.config import OptimizerConfig
from fp8jax.lookup import lookup, own_object


def _cosine(c: OptimizerConfig) -> optax.Schedule:
    """Linear warm-up, then half a cosine that reaches final_fraction at the last step."""
    # optax's warmup_cosine_decay_schedule, which logs a warning if there is no warm-up.
    end = c.final_fraction * c.learning_rate / c.learning_rate
    fall = optax.schedules.cosine_decay_schedule(c.learning_rate, c.num_steps - c.warmup, alpha=end)
    return _warmed_up(c, fall)


def _wsd(c: OptimizerConfig) -> optax.Schedule:
    """Linear warm-up, a constant phase, then half a cosine over the last decay_fraction of the run.

    This is the schedule of InfiR2 (arXiv 2509.22536).
    """
    return optax.schedules.join_schedules(
        [
            optax.schedules.linear_schedule(0.0, c.learning_rate, max(c.warmup, 1)),
            optax.schedules.constant_schedule(c.learning_rate),
            optax.schedules.cosine_decay_schedule(
                c.learning_rate, max(c.decay_steps, 1), alpha=c.final_fraction
            ),
        ],
        boundaries=[c.warmup, c.num_steps - c.decay_steps],
    )


def _decay(c: OptimizerConfig) -> optax.Schedule:
    """The last phase of "wsd" alone: half a cosine over the whole run, without a warm-up."""
    return optax.schedules.cosine_decay_schedule(
        c.learning_rate, c.num_steps, alpha=c.final_fraction
    )


def _warmed_up(c: OptimizerConfig, then: optax.Schedule) -> optax.Schedule:
    rise = optax.schedules.linear_schedule(0.0, c.learning_rate, max(c.warmup, 1))
    return optax.schedules.join_schedules([rise, then], boundaries=[c.warmup])


def _constant(c: OptimizerConfig) -> optax.Schedule:
    """Linear warm-up, then the learning rate to the end."""
    return _warmed_up(c, optax.schedules.constant_schedule(c.learning_rate))


def _linear(c: OptimizerConfig) -> optax.Schedule:
    """Linear warm-up, then a line that reaches final_fraction at the last step."""
    last = c.final_fraction * c.learning_rate
    fall = optax.schedules.linear_schedule(c.learning_rate, last, c.num_steps - c.warmup)
    return _warmed_up(c, fall)


SCHEDULES: dict[str, Callable[[OptimizerConfig], optax.Schedule]] = {
    "cosine": _cosine,
    "wsd": _wsd,
    "decay": _decay,
    "constant": _constant,
    "linear": _linear,
}


def schedule_of(config: OptimizerConfig) -> optax.Schedule:
    """Returns the schedule of a config: a function from the step, counted from 1, to the rate.

    Raises ValueError if there is none of that name. MODULE:OBJECT names a function of the user's
    own code that takes the config and returns such a function.
    """
    if ":" in config.schedule:
        return own_object("schedule", config.schedule)(config)
    return lookup("schedule", config.schedule, SCHEDULES)(config)
