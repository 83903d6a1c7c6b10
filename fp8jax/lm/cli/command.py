"""What commands share: how they run, and how they read their flags."""

import functools
import logging as python_logging
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from absl import app, flags, logging

from fp8jax.lm.cli import join
from fp8jax.lm.cli.config_flag import RUN_KEYS, Keys, check_config_flags, with_files, with_meshes

ERRORS = (ValueError, NotImplementedError, OSError)
INTERRUPTED = 130  # the status of a command that Ctrl-C ended, as shells have it


def run(
    main: Callable[[Sequence[str]], None],
    *,
    errors: Iterable[type[Exception]] = ERRORS,
    verbosity: int = logging.WARNING,
    quiet: Iterable[str] = ("jax",),
    config: Keys = RUN_KEYS,
    several: bool = False,
) -> None:
    """Parses the flags, calls `main` and exits; with status 130 after Ctrl-C.

    Args:
      main: takes the arguments that are not flags, without the program's name.
      errors: exceptions that end the process with the line `error: MESSAGE` and status 1 instead of
        a traceback, as `app.UsageError` does. `--verbosity=1` logs the traceback, too.
      verbosity: absl's logging level, unless --verbosity is given.
      quiet: Python loggers that log warnings and errors only.
      config: the keys that --config must have.
      several: whether `main` can run in several processes.
    """
    logging.set_verbosity(verbosity)
    logging.get_absl_handler().setFormatter(_Plain())
    for name in quiet:
        python_logging.getLogger(name).setLevel(python_logging.WARNING)
    app.run(
        functools.partial(call, main, errors, several=several),
        flags_parser=functools.partial(parse_flags, config=config),
    )


class _Plain(python_logging.Formatter):
    """Formats messages for people: only warnings and errors say what they are."""

    def format(self, record: python_logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno < python_logging.WARNING:
            return text
        return f"{record.levelname.lower()}: {text}"


def call(
    main: Callable[[Sequence[str]], None],
    errors: Iterable[type[Exception]],
    argv: Sequence[str],
    *,
    several: bool = False,
) -> None:
    """Joins the processes of this run, and calls `main` with the arguments after the first.

    Ends the process as `run` says.
    """
    caught: tuple[type[Exception], ...] = (app.UsageError, *errors)
    joined = False
    try:
        joined = join.join(several=several)
        main(argv[1:])
    except caught as error:
        logging.debug("", exc_info=True)
        if joined:
            _leave(f"error: {error}")
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        logging.debug("", exc_info=True)
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _leave(line: str) -> NoReturn:
    """Ends one of several processes, which would wait for the others in `sys.exit`."""
    from fp8jax.device import processes  # imports JAX

    print(line, file=sys.stderr)
    processes.leave(1)


def parse_flags(argv: list[str], *, config: Keys = RUN_KEYS) -> list[str]:
    """Parses the flags as absl does, and returns the program's name and the other arguments.

    --help ends the process with status 0, where absl's own has 1. A wrong flag, or a wrong --config
    or --config.KEY=VALUE, ends it with one line and status 1. So does an argument that is not
    UTF-8: libraries fail on such paths and texts.
    """
    join.define_flags()
    for argument in argv:
        if any("\ud800" <= c <= "\udfff" for c in argument):  # how Python holds other bytes
            sys.exit(f"error: the argument {argument!r} is not UTF-8")
    try:
        argv = flags.FLAGS.read_flags_from_files(argv, force_gnu=False)
        argv = with_meshes(with_files(argv))
        sys.argv[1:] = with_meshes(sys.argv[1:])  # where ml_collections looks for --config.KEY
        check_config_flags(argv, config)
        return flags.FLAGS(argv)
    except SystemExit:  # of --help, which has written it
        sys.exit(0)
    except (flags.Error, AttributeError, KeyError, TypeError, *ERRORS) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")


def refuse_arguments(arguments: Sequence[str]) -> None:
    """Raises `app.UsageError` if there are arguments that are not flags."""
    if arguments:
        raise app.UsageError(f"arguments that are not flags: {list(arguments)}")


def split_specs(text: str) -> list[str]:
    """Splits a list like "bf16,fp8_x:a=1,b=2" at the commas that do not precede an option b=2."""
    return re.split(r",(?![^,:]*=)", text)
