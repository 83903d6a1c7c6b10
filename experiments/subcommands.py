"""Several commands in one module, such as bench and study.

The module describes them as `Command` objects, finds the requested one with `choose`, and checks
its flags with `check_flags`.
"""

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import TypeVar

from absl import app, flags


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """One of several commands of a module: python -m experiments.MODULE NAME --flags

    Attributes:
      name: the first argument.
      needs: flags that must have a value.
      takes: further flags. Flags that no command of the module lists are for all of them.
    """

    name: str
    needs: Collection[str] = ()
    takes: Collection[str] = ()


C = TypeVar("C", bound=Command)


def choose(commands: Iterable[C], arguments: Sequence[str]) -> C:
    """Returns the command that the arguments name; raises `app.UsageError` if they name none."""
    by_name = {command.name: command for command in commands}
    if len(arguments) != 1 or arguments[0] not in by_name:
        names = ", ".join(by_name)
        raise app.UsageError(f"the first argument must be one of {names}; got {list(arguments)}")
    return by_name[arguments[0]]


def check_flags(command: Command, commands: Iterable[Command]) -> None:
    """Checks that the flags on the command line are those of `command`.

    Raises:
      ValueError: a flag is only for other commands, or a flag that is needed has no value.
    """
    own = {*command.needs, *command.takes}
    for name in dict.fromkeys(name for each in commands for name in (*each.needs, *each.takes)):
        if name not in own and flags.FLAGS[name].present:
            raise ValueError(f"--{name} is not for {command.name}")
        if name in command.needs and not flags.FLAGS[name].value:
            raise ValueError(f"{command.name} needs --{name}")
