"""Studies of precision:

    python -m experiments.study recipes --output=docs/recipes.md
    python -m experiments.study curves --config=configs/smoke.py --workdir=runs/curves
    python -m experiments.study sweep --config=configs/cscale_sweep.py --workdir=runs/cscale

`recipes` makes the tables of a page anew. `curves` trains a config in each precision and compares
losses with BF16's; what is finished is not trained again. `sweep` looks for the constant biases of
fp8_cscale that work, in training and in inference, at several widths of a model.
"""

import logging as python_logging
import re
import sys
from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_flags

from experiments.study import bias_sweep, loss_curves, recipe_page
from fp8jax.device import xla
from fp8jax.numerics.policy import POLICIES
from fp8jax.training.recovery import NonFiniteError

_CONFIG = config_flags.DEFINE_config_file("config", None, "A file of configs/.", lock_config=True)


_WORKDIR = flags.DEFINE_string("workdir", "", "Where runs, tables and figures go.")


_OUTPUT = flags.DEFINE_string("output", "", "The page whose tables `recipes` makes anew.")


_PRECISIONS = flags.DEFINE_string("precisions", ",".join(POLICIES), "Policies, beside bf16.")


_SEEDS = flags.DEFINE_list("seeds", None, "Seeds of `curves`; the config's own if not given.")


_WIDTHS = flags.DEFINE_list("widths", ["48", "128"], "Values of d_model that `sweep` tries.")


_BIASES = flags.DEFINE_string("biases", "-6:10", "First and last bias that `sweep` tries.")


_TOLERANCE = flags.DEFINE_float("tolerance", 0.01, "Relative excess over BF16's loss that works.")


_COMMANDS = {  # command -> the flags that it needs, and those that it takes
    "recipes": (["output"], []),
    "curves": (["config", "workdir"], ["precisions", "seeds"]),
    "sweep": (["config", "workdir"], ["widths", "biases", "tolerance"]),
}


def _numbers(flag: str, texts: list[str]) -> list[int]:
    try:
        return [int(text) for text in texts]
    except ValueError:
        raise ValueError(f"--{flag}: {texts} are not all whole numbers") from None


def _run(command: str) -> None:
    needed, taken = _COMMANDS[command]
    for name in [name for pair in _COMMANDS.values() for name in sum(pair, [])]:
        if name not in needed + taken and flags.FLAGS[name].present:
            raise ValueError(f"--{name} is not for {command}")
        if name in needed and not flags.FLAGS[name].value:
            raise ValueError(f"{command} needs --{name}")
    page, config, workdir = Path(_OUTPUT.value), _CONFIG.value, Path(_WORKDIR.value)
    if command == "recipes":
        logging.set_verbosity(logging.WARNING)  # which backend a device would have is on the page
        page.write_text(recipe_page.fill_page(page.read_text(encoding="utf-8")), encoding="utf-8")
        return
    xla.set_compilation_cache()
    if command == "curves":
        seeds = _numbers("seeds", _SEEDS.value or [config.seed])
        precisions = re.split(r",(?![^,:]*=)", _PRECISIONS.value)  # not at "fp8_x:a=1,b=2"'s comma
        print(loss_curves.loss_curves(config, workdir, precisions, seeds))
    else:
        first, *last = _numbers("biases", _BIASES.value.split(":"))
        if len(last) != 1:
            raise ValueError(f"--biases={_BIASES.value}: expected FIRST:LAST")
        biases, widths = range(first, last[0] + 1), _numbers("widths", _WIDTHS.value)
        print(bias_sweep.sweep_bias(config, workdir, widths, biases, _TOLERANCE.value))


def main(argv: list[str]) -> None:
    if len(argv) != 2 or argv[1] not in _COMMANDS:
        raise app.UsageError(f"first comes one of {', '.join(_COMMANDS)}; got {argv[1:]}")
    try:
        _run(argv[1])
    except (ValueError, NotImplementedError, NonFiniteError, OSError, ImportError) as error:
        logging.debug("", exc_info=True)
        sys.exit(f"error: {error}")


def parse(argv: list[str]) -> list[str]:
    """absl's parser, with ml_collections' errors about keys as one line (experiments/train.py)."""
    try:
        return app.parse_flags_with_usage(argv)
    except (AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        inner: object = error
        while isinstance(inner, Exception) and inner.args:
            inner = inner.args[0]
        sys.exit(f"error: {inner}")


if __name__ == "__main__":
    logging.set_verbosity(logging.INFO)
    for name in ("jax", "matplotlib"):  # which tells of a new cache of fonts
        python_logging.getLogger(name).setLevel(python_logging.WARNING)
    app.run(main, flags_parser=parse)
