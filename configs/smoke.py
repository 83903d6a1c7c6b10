"""Smoke test: a tiny byte-level Llama on the standard library's source, in minutes on two cores.

python -m experiments.train --config=configs/smoke.py --workdir=runs/smoke
"""

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
    config = base.get_config()
    config.precision = "fp8_delayed"
    config.num_steps = 200
    config.warmup_steps = 15
    config.valid_every = 50
    config.valid_batches = 8
    return config
