"""Trains a model: fp8jax train --config=configs/smoke.py --workdir=runs/smoke

--config.KEY=VALUE changes a key of the config. A run whose workdir holds a checkpoint of the same
config resumes from it. --dry_run prints what the run would cost, without training.

    --config=base                     the keys of fp8jax.base_config(), as they are
    --config.precision=fp8_delayed    bf16, fp8_block, nvfp4, …: a key of fp8jax.POLICIES
    --config.mesh=fsdp                shards parameters and batch over all devices
"""

import contextlib
import io
import os
import tempfile
from collections.abc import Sequence

from absl import flags, logging
from ml_collections import ConfigDict, config_flags

from fp8jax.device import processes, xla
from fp8jax.lm.cli import command
from fp8jax.lm.records.checkpoint import DamagedError
from fp8jax.lm.records.workdir_lock import lock_workdir
from fp8jax.lm.training import dry_run, parameter_table, programs
from fp8jax.lm.training.build import build
from fp8jax.lm.training.channel import STEP_TIMEOUT_S, Channel
from fp8jax.lm.training.config import base_config
from fp8jax.lm.training.epochs import with_steps
from fp8jax.lm.training.faults import Faults
from fp8jax.lm.training.loop import train_and_evaluate
from fp8jax.lm.training.profile import parse_profile
from fp8jax.lm.training.recovery import StoppedError

_CONFIG = config_flags.DEFINE_config_file("config", None, "A file of configs/.", lock_config=True)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "The run's directory, or s3://BUCKET/NAME; created if missing."
)
_DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Print what the run would cost in FLOPs, memory and disk; train nothing."
)
_SHOW_PARAMS = flags.DEFINE_bool(
    "show_params", False, "Print all parameters with their shardings and recipes."
)
_DUMP_HLO = flags.DEFINE_bool(
    "dump_hlo", False, "Write the compiled programs as text to WORKDIR/hlo."
)
_PROFILE = flags.DEFINE_string(
    "profile", None, "A:B traces the steps A to B, inclusive, into WORKDIR/profile."
)
_INJECT = flags.DEFINE_string(
    "inject", "", "Faults to inject, KIND@STEP[xCOUNT],…: see fp8jax/lm/training/faults.py."
)
_STEP_TIMEOUT = flags.DEFINE_float(
    "step_timeout",
    STEP_TIMEOUT_S,
    "Seconds for a step of several processes, with all but compilation, or the run ends.",
    10,
)
flags.register_validator(
    "config",
    lambda config: config is not None,
    "a run needs one: --config=smoke, say, or --config=FILE.py; --help has examples",
)

ERRORS = (*command.ERRORS, StoppedError, DamagedError)  # that end in one line
VERBOSITY = logging.INFO


def _inspect(config: ConfigDict, workdir: str) -> None:
    """Prints and writes what the flags request that needs no training.

    Of several processes all compile, since they share the work, and the first one speaks.
    """
    xla.set_compilation_cache()  # the run reuses the programs that are compiled here
    config, _ = with_steps(config)
    run = build(config)
    if run.initial_weights is not None:
        run.initial_weights.check(run.tokenizer)
    with contextlib.ExitStack() as stack:
        if processes.index() > 0:
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            workdir = stack.enter_context(tempfile.TemporaryDirectory())
        if _DRY_RUN.value:
            print(config)
        if _SHOW_PARAMS.value:
            print(parameter_table.parameter_table(run), end="\n\n")
        if _DUMP_HLO.value:
            with contextlib.nullcontext() if _DRY_RUN.value else lock_workdir(workdir):
                for path in programs.dump_hlo(run, os.path.join(workdir, "hlo")):
                    logging.info("wrote %s", path)
        if _DRY_RUN.value:
            print(dry_run.make_plan(run).text())
            if (used := dry_run.bytes_in_use(run)) is not None:
                print(f"This dry run itself used at most {used / 2**20:,.1f} MiB of a device.")


def _run(channel: Channel | None) -> None:
    profile = None if _PROFILE.value is None else parse_profile(_PROFILE.value)
    faults = Faults.parse(_INJECT.value)
    workdir = _WORKDIR.value or ""
    if not workdir and not (_DRY_RUN.value and not _DUMP_HLO.value):
        raise ValueError("--workdir must have a value, except for --dry_run without --dump_hlo")
    if _DRY_RUN.value and profile is not None:
        raise ValueError(
            f"--profile={_PROFILE.value} traces training, but --dry_run trains nothing: drop one"
        )
    if _DRY_RUN.value and not _DUMP_HLO.value:  # --dump_hlo compiles the programs of a real run
        xla.allocate_nothing()
    if _DRY_RUN.value or _SHOW_PARAMS.value or _DUMP_HLO.value:
        _inspect(_CONFIG.value, workdir)
    if not _DRY_RUN.value:
        train_and_evaluate(
            _CONFIG.value,
            workdir,
            profile=profile,
            faults=faults,
            defaults=base_config(),
            channel=channel,
        )


def main(arguments: Sequence[str]) -> None:
    command.refuse_arguments(arguments)
    if processes.count() == 1:
        _run(None)
        return
    with Channel(step_timeout=_STEP_TIMEOUT.value) as channel:
        _run(channel)
