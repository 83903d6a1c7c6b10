"""The keys of configs in a clone, named by the files of configs/ that have them all."""

from configs import base, pipeline
from fp8jax.lm.cli.config_flag import Keys

RUN_KEYS = Keys("configs/base.py", "configs.base.get_config()", base.get_config)
PIPELINE_KEYS = Keys("configs/pipeline.py", "configs.pipeline.get_config()", pipeline.get_config)
