"""The numbers of a run that the loop reads, checked and frozen.

`build.py` turns a config's names into objects and its numbers into these settings. Nothing after
`build` reads the config, except that checkpoints and config.json record it.
"""

import dataclasses
import json
import math
import threading
from typing import Any

from ml_collections import ConfigDict

from fp8jax.lm.records.config_keys import by_path, refuse_old_keys
from fp8jax.lm.records.sinks import check_sink
from fp8jax.lm.training.config import base_config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a run, each the config key of that name, in a group `a` that of `a_name`.

    Attributes:
      warmup_steps: those of the warm-up, which are fewer than the key if that does not fit.
      record: the whole config as JSON has it, for checkpoints and config.json.

    Raises:
      ValueError: a number out of its range, or two keys that do not fit together.
    """

    model: str
    initial_weights: str
    initial_state: str
    precision: str
    data: str
    valid_fraction: float
    cache_dir: str
    long_examples: str
    bad_examples: str
    document_masking: bool
    data_timeout: float
    seed: int
    num_steps: int
    num_epochs: int | None
    batch_size: int
    seq_len: int
    grad_accum: int
    warmup_steps: int
    recovery_ladder: str
    valid_every: int
    valid_batches: int | None
    sample_every: int | None
    telemetry_every: int | None
    log_to: str
    checkpoint_every: int
    checkpoint_keep: int
    checkpoint_keep_best: int
    require_fp8_gemms: bool
    require_fp8_gathers: bool
    resume_with_changes: bool
    record: dict[str, Any]

    @classmethod
    def from_config(cls, config: ConfigDict, *, warmup_steps: int) -> "Settings":
        """The settings of a checked config, with a warm-up of `warmup_steps`."""
        names = {field.name for field in dataclasses.fields(cls)} - {"record", "warmup_steps"}
        values = {path.replace(".", "_"): value for path, value in by_path(config).items()}
        return cls(
            record=json.loads(config.to_json()),
            warmup_steps=warmup_steps,
            **{name: values[name] for name in names},
        )

    @property
    def microbatch(self) -> int:
        """Rows of a microbatch, over all devices."""
        return self.batch_size // self.grad_accum

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_len


def check_numbers(config: ConfigDict) -> None:
    """Raises ValueError for numbers out of their range, and for keys that require another key."""
    names = (
        "num_steps",
        "num_epochs",
        "batch_size",
        "seq_len",
        "grad_accum",
        "unroll",
        "valid.every",
        "valid.batches",
        "sample.every",
        "sample.tokens",
        "telemetry.every",
        "checkpoint.every",
        "checkpoint.keep",
    )
    values = by_path(config)
    refuse_old_keys(values)
    _refuse_none(values)
    for name in names:
        if values[name] is not None and values[name] < 1:
            raise ValueError(f"{name}={values[name]} must be at least 1")
    if not 0 <= config.seed < 2**32:
        raise ValueError(f"seed={config.seed} does not lie in [0, 2^32)")
    if not 0 < config.valid.fraction < 1:  # also refuses NaN, as the comparisons below
        raise ValueError(f"valid.fraction={config.valid.fraction} must lie between 0 and 1")
    if not 0 < config.data_timeout <= threading.TIMEOUT_MAX:
        raise ValueError(
            f"data_timeout={config.data_timeout} must be positive and at most "
            f"{threading.TIMEOUT_MAX:.0f} seconds"
        )
    if not (deviations := config.recovery.spike_deviations) > 0:
        raise ValueError(f"recovery.spike_deviations={deviations} must be positive")
    if config.checkpoint.keep_best < 0:
        raise ValueError(f"checkpoint.keep_best={config.checkpoint.keep_best} is negative")
    if not 0 <= config.sample.temperature < math.inf:
        raise ValueError(
            f"sample.temperature={config.sample.temperature} must be finite and not negative"
        )
    check_sink(config.log_to)
    if config.initial_state and config.initial_weights:
        raise ValueError(
            f"initial_state={config.initial_state} has weights of its own: leave out"
            f" initial_weights={config.initial_weights}"
        )
    if config.telemetry.what_if is not None and config.telemetry.every is None:
        raise ValueError(
            f"telemetry.what_if={config.telemetry.what_if!r} is measured with telemetry: set"
            " telemetry.every"
        )
    if config.sample.prompt and config.sample.every is None:
        raise ValueError(f"sample.prompt={config.sample.prompt!r} is for samples: set sample.every")
    if config.checkpoint.keep_best and config.checkpoint.every % config.valid.every:
        raise ValueError(
            f"checkpoint.keep_best={config.checkpoint.keep_best} compares validation losses: "
            f"checkpoint.every={config.checkpoint.every} must be a multiple of "
            f"valid.every={config.valid.every}"
        )


def _refuse_none(values: dict[str, Any]) -> None:
    """Raises ValueError for a key that is None, and whose default is not."""
    counted = values["num_epochs"] is not None  # which gives num_steps
    for path, default in by_path(base_config()).items():
        if default is not None and values[path] is None and not (path == "num_steps" and counted):
            raise ValueError(f"{path}=None: it must have a value, such as {default!r}")
