"""Runs a pipeline: python -m experiments.pipeline --config=configs/infir2/small.py \\
    --workdir=runs/infir2

Continues the pre-training of a model, fine-tunes it twice, evaluates, exports and reloads it: once
for each precision, so that they can be compared at every stage. --config.cpt.num_steps=20 changes a
key. The same command goes on with a pipeline that was stopped or killed, and does only what is
missing. Started several times at once, for instance once for each GPU, the programs share the
stages. At the end WORKDIR has report.html, report.md and figures.json (docs/infir2.md).
"""

from collections.abc import Sequence
from pathlib import Path

from absl import flags, logging
from ml_collections import config_flags

import fp8jax  # noqa: F401  # sets the XLA flags, before JAX starts
from experiments.config_keys import PIPELINE_KEYS
from experiments.pipeline import plan, report, stages
from fp8jax.device import xla
from fp8jax.lm.cli import command
from fp8jax.lm.records.checkpoint import DamagedError
from fp8jax.lm.records.workdir_lock import refuse_url

_CONFIG = config_flags.DEFINE_config_file("config", None, "A pipeline's file.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "The pipeline's directory.", required=True)
flags.mark_flag_as_required("config")

ERRORS = (*command.ERRORS, stages.StageError, DamagedError)


def main(arguments: Sequence[str]) -> None:
    command.refuse_arguments(arguments)
    if not _WORKDIR.value:
        raise ValueError("--workdir is empty: name the pipeline's directory")
    refuse_url(_WORKDIR.value)
    workdir = Path(_WORKDIR.value).expanduser()
    made = plan.Plan.from_config(_CONFIG.value, workdir)
    xla.set_compilation_cache()
    stages.begin(workdir)
    whole = plan.stages(made)
    stages.require_same(workdir, whole)
    if done := stages.count_done(workdir, whole):
        logging.info("%d of %d stages are done", done, len(whole))
    if done < len(whole):
        stages.run_stages(workdir, plan.shared(made), whole)
        plan.check_training(made)
        stages.run_stages(workdir, whole, whole)
    with stages.locked(workdir):
        for path in report.write(made):
            logging.info("wrote %s", path)


if __name__ == "__main__":
    command.run(main, errors=ERRORS, verbosity=logging.INFO, config=PIPELINE_KEYS)
