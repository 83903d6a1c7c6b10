"""The numbers of a run that the loop reads, checked and frozen.

`build.py` turns a config's names into objects and its numbers into these settings. Nothing after
`build` reads the config, except that checkpoints and config.json record it.
"""

import dataclasses
import json
from typing import Any

from ml_collections import ConfigDict


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a run; each field but `record` is the config key of that name (configs/base.py).

    Attributes:
      record: the whole config as JSON has it, for checkpoints and config.json.

    Raises:
      ValueError: a number below 1, or two keys that do not fit together.
    """

    model: str
    precision: str
    data: str
    valid_fraction: float
    cache_dir: str
    data_timeout: float
    seed: int
    num_steps: int
    batch_size: int
    seq_len: int
    grad_accum: int
    warmup_steps: int
    recovery: str
    valid_every: int
    valid_batches: int | None
    sample_every: int | None
    checkpoint_every: int
    checkpoint_keep: int
    checkpoint_keep_best: int
    require_fp8_gemms: bool
    resume_with_changes: bool
    record: dict[str, Any]

    @classmethod
    def from_config(cls, config: ConfigDict) -> "Settings":
        """The settings of a run's config."""
        _check_numbers(config)
        names = {field.name for field in dataclasses.fields(cls)} - {"record"}
        return cls(record=json.loads(config.to_json()), **{name: config[name] for name in names})

    @property
    def microbatch(self) -> int:
        """Rows of a microbatch, over all devices."""
        return self.batch_size // self.grad_accum

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_len


def _check_numbers(config: ConfigDict) -> None:
    """Raises ValueError for numbers below 1, and for keys that need another one."""
    names = (
        "num_steps", "batch_size", "seq_len", "grad_accum", "unroll", "valid_every",
        "valid_batches", "sample_every", "sample_tokens", "checkpoint_every", "checkpoint_keep",
    )  # fmt: skip
    for name in names:
        if config[name] is not None and config[name] < 1:
            raise ValueError(f"{name}={config[name]} must be at least 1")
    if config.sample_prompt and config.sample_every is None:
        raise ValueError(f"sample_prompt={config.sample_prompt!r} is for samples: set sample_every")
    if config.checkpoint_keep_best and config.checkpoint_every % config.valid_every:
        raise ValueError(
            f"checkpoint_keep_best={config.checkpoint_keep_best} compares validation losses: "
            f"checkpoint_every={config.checkpoint_every} must be a multiple of "
            f"valid_every={config.valid_every}"
        )
