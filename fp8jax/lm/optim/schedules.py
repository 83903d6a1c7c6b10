"""Learning-rate schedules by name: functions from the step, counted from 1, to a learning rate."""

from collections.abc import Callable

import optax

from fp8jax.lm.optim.config import OptimizerConfig


def _cosine(c: OptimizerConfig) -> optax.Schedule:
    """Linear warm-up, then half a cosine that reaches final_fraction at the last step."""
    return optax.schedules.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=c.learning_rate,
        warmup_steps=c.warmup,
        decay_steps=c.num_steps,
        end_value=c.final_fraction * c.learning_rate,
    )


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


SCHEDULES: dict[str, Callable[[OptimizerConfig], optax.Schedule]] = {
    "cosine": _cosine,
    "wsd": _wsd,
    "decay": _decay,
}
