"""Trains a model: python -m experiments.train --config=configs/smoke.py --workdir=runs/smoke

Any key of the config can be given as --config.KEY=VALUE. A workdir that holds a checkpoint of the
same config is resumed.
"""

import logging as python_logging
import sys

from absl import app, flags, logging
from ml_collections import config_flags

import fp8jax  # sets the XLA flags, before JAX starts
from fp8jax.train import NonFiniteError

_CONFIG = config_flags.DEFINE_config_file("config", None, "A file of configs/.", lock_config=True)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "The run's directory; made if missing.", required=True
)
flags.mark_flag_as_required("config")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"arguments that are no flags: {argv[1:]}")
    try:
        logging.info("config:\n%s", _CONFIG.value)
        fp8jax.train_and_evaluate(_CONFIG.value, _WORKDIR.value)
    except (ValueError, NotImplementedError, NonFiniteError, OSError) as error:
        logging.debug("", exc_info=True)
        sys.exit(f"error: {error}")


def parse(argv: list[str]) -> list[str]:
    """absl's parser, with ml_collections' errors about keys as one line, not a traceback."""
    try:
        return app.parse_flags_with_usage(argv)
    except (AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        inner: BaseException = error
        while inner.args and isinstance(inner.args[0], Exception):
            inner = inner.args[0]
        sys.exit(f"error: {inner.args[0] if inner.args else inner}")


if __name__ == "__main__":
    logging.set_verbosity(logging.INFO)
    python_logging.getLogger("jax").setLevel(python_logging.WARNING)
    app.run(main, flags_parser=parse)
