"""The program `fp8jax`: fp8jax COMMAND --flags

    train      trains a model
    generate   continues texts with a trained model, or chats
    evaluate   measures a trained model beside BF16
    convert    converts Hugging Face folders to workdirs, and back
    tokenizer  trains a tokenizer
    report     writes a page on one run or several

`fp8jax COMMAND --help` has the flags of a command.
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from fp8jax.lm.cli.config_flag import Keys

COMMANDS = ("train", "generate", "evaluate", "convert", "tokenizer", "report")
SEVERAL = ("train",)  # that may run in several processes


def main() -> None:
    """Runs the command that the first argument names, with the other arguments as its flags."""
    name = sys.argv[1] if len(sys.argv) > 1 else None
    if name in ("--help", "-h", "help"):
        print(__doc__)
    elif name in COMMANDS:
        sys.argv[:2] = [f"fp8jax {name}"]
        sys.path.append(os.getcwd())  # --config.precision=my_recipes:tile64 names a file there
        run(name)
    else:
        said = "name a command" if name is None else f"there is no command {name!r}"
        sys.exit(f"error: {said}: one of {', '.join(COMMANDS)}")


def run(name: str, *, program: str | None = None, keys: "Keys | None" = None) -> None:
    """Runs a command with the flags of `sys.argv`, and exits.

    Args:
      name: one of `COMMANDS`.
      program: how the command was started, where not as `fp8jax NAME`; its help says so.
      keys: those that --config must have, where not those of `fp8jax.base_config()`.
    """
    try:
        from absl import flags

        from fp8jax.lm.cli import command, config_flag, join

        module = importlib.import_module(f"fp8jax.lm.cli.{name}")  # defines its flags
    except ModuleNotFoundError as error:
        missing(f"fp8jax {name}", error)
    join.define_flags()
    for name_of in (module.__name__, join.__name__):
        for flag in flags.FLAGS.get_flags_for_module(name_of):  # which --help shows
            flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
    began = f"fp8jax {name}"
    sys.modules["__main__"].__doc__ = (module.__doc__ or "").replace(began, program or began)
    keys = keys or config_flag.RUN_KEYS
    command.run(
        module.main,
        errors=module.ERRORS,
        verbosity=module.VERBOSITY,
        config=keys,
        several=name in SEVERAL,
    )


def missing(program: str, error: ModuleNotFoundError) -> NoReturn:
    """Ends the process with what to install; a module of fp8jax's own raises `error` again."""
    if (error.name or "fp8jax").partition(".")[0] == "fp8jax":
        raise error
    sys.exit(
        f"error: {program} needs {error.name}: install fp8jax's extra `train`, in a clone"
        " by pip install -e '.[train]'"
    )
