"""Converts models: from a Hugging Face folder to a workdir, and back.

    fp8jax convert --from=hf:DIR --to=WORKDIR
    fp8jax convert --from=WORKDIR --to=hf:DIR --format=bf16
    fp8jax convert --from=WORKDIR --to=hf:DIR --format=fp8_block

The target must not exist; it appears whole at the end, or not at all. docs/hugging_face.md says
what is converted and what is refused.
"""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags, logging

from fp8jax.lm.cli import command
from fp8jax.lm.cli.solve import turn_ends
from fp8jax.lm.data.hub import names_folder
from fp8jax.lm.data.urls import is_url
from fp8jax.lm.interop import convert
from fp8jax.lm.interop.export import EXPORTS
from fp8jax.lm.interop.fp8_format import SCALE_RULES
from fp8jax.lm.interop.write import MAX_SHARD_BYTES
from fp8jax.lm.model.transformer import count_params
from fp8jax.lm.records.checkpoint import DamagedError
from fp8jax.lookup import lookup

_FROM = flags.DEFINE_string("from", None, "A workdir, or hf:DIR.", required=True)
_TO = flags.DEFINE_string("to", None, "hf:DIR, or a workdir; must not exist.", required=True)
_FORMAT = flags.DEFINE_string("format", None, f"Of hf:DIR in --to: {', '.join(EXPORTS)}.")
_SCALES = flags.DEFINE_enum(
    "scales",
    None,
    list(SCALE_RULES),
    "Of FP8 formats; by default powers of two, and those of the run for channels.",
)
_STEP = flags.DEFINE_integer("step", None, "Which checkpoint of a workdir; the newest without.")
_SHARD = flags.DEFINE_integer(
    "max_shard_bytes", MAX_SHARD_BYTES, "A safetensors file ends before it becomes larger.", 1
)

ERRORS = (*command.ERRORS, DamagedError)
VERBOSITY = logging.INFO


def main(arguments: Sequence[str]) -> None:
    command.refuse_arguments(arguments)
    # So that `kill` cleans up as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    source, target = _FROM.value, _TO.value
    to_folder = names_folder(target)
    path = Path(os.path.expanduser(target.removeprefix("hf:")))
    if not target.removeprefix("hf:"):
        raise ValueError(f"--to={target} names no folder")
    if is_url(target.removeprefix("hf:")):
        raise ValueError(f"--to={target} is a URL: name a folder here, and copy it there")
    if to_folder:
        if _FORMAT.value is None:
            raise ValueError(f"--to={target} needs a --format: {', '.join(EXPORTS)}")
        lookup("export format", _FORMAT.value, EXPORTS)
        notes = convert.export(
            source,
            path,
            _FORMAT.value,
            scales=_SCALES.value,
            step=_STEP.value,
            max_shard_bytes=_SHARD.value,
            stop_ids=turn_ends,
        )
        print("\n".join([f"wrote {path} in {_FORMAT.value}", *notes]))
        return
    for flag in (_FORMAT, _SCALES, _STEP, _SHARD):
        if flag.present:
            raise ValueError(f"--{flag.name} is for --to=hf:DIR, not for --to={target}")
    if not names_folder(source):
        raise ValueError(f"one of --from={source} and --to={target} must be hf:DIR")
    trained = convert.import_folder(source, path)
    print(f"wrote {path}: {count_params(trained.model.config):,} parameters in float32")
