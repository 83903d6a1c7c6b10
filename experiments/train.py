"""`fp8jax train` as python -m experiments.train, in a clone (fp8jax/lm/cli)."""

from experiments.config_keys import RUN_KEYS
from fp8jax.lm.cli import main

if __name__ == "__main__":
    main.run("train", program="python -m experiments.train", keys=RUN_KEYS)
