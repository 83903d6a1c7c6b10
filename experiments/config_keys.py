"""The keys of configs in a clone, named by the files of configs/ that have them all."""

from fp8jax.lm.cli import main

try:
    from fp8jax.lm.cli.config_flag import Keys
except ModuleNotFoundError as error:
    main.missing("this command", error)
try:
    from configs import base, pipeline
except ImportError as error:  # a folder of that name where the command was started
    raise SystemExit(
        f"error: {error}: start `python -m experiments.NAME` in the clone, whose configs/ it reads;"
        " the program `fp8jax` starts in any folder"
    ) from error

RUN_KEYS = Keys("configs/base.py", "configs.base.get_config()", base.get_config)
PIPELINE_KEYS = Keys("configs/pipeline.py", "configs.pipeline.get_config()", pipeline.get_config)
