"""Several commands in one module, such as bench and study.

The module describes them as `Command` objects, finds the requested one with `choose`, and checks
its flags with `check_flags`. `show_help` answers `NAME --help` with the flags of that one alone.
"""

import dataclasses
import sys
import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import TypeVar

from absl import app, flags


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """One of several commands of a module: python -m experiments.MODULE NAME --flags

    Attributes:
      name: the first argument.
      about: what it does, a sentence or two for its help.
      needs: flags that must have a value.
      takes: further flags. Flags that no command of the module lists are for all of them.
    """

    name: str
    about: str
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


def show_help(commands: Sequence[Command], program: str) -> None:
    """Prints the help of a command and exits, if the command line asks for it: NAME --help.

    Without a name it does nothing: absl's --help then shows what the module does and all its flags.

    Args:
      commands: all of the module.
      program: how the module is started, such as "python -m experiments.bench".
    """
    words = sys.argv[1:]
    words = words[: words.index("--")] if "--" in words else words  # what follows is another's
    asked = [each for each in commands if each.name in words]
    if asked and {"--help", "-help", "--helpshort", "-h"} & set(words):
        print(help_of(asked[0], commands, program))
        sys.exit(0)


def help_of(command: Command, commands: Iterable[Command], program: str) -> str:
    """Returns how a command is called, what it does, and its flags."""
    listed = {name for each in commands for name in (*each.needs, *each.takes)}
    shared = [
        flag.name
        for flag in flags.FLAGS.get_flags_for_module(sys.argv[0])
        if flag.name not in listed
    ]
    call = " ".join([program, command.name, *(f"--{name}=…" for name in command.needs)])
    parts = [f"{call}\n\n{textwrap.fill(command.about, 100)}"]
    groups = {"needs": command.needs, "takes": command.takes, "takes, as all commands do": shared}
    for title, names in groups.items():
        if names:
            parts.append("\n".join([f"{title}:", *map(_flag_help, dict.fromkeys(names))]))
    return "\n\n".join(parts)


def _flag_help(name: str) -> str:
    flag = flags.FLAGS[name]
    default = str(flag.default_as_str).strip("'") if flag.default else ""
    text = f"--{name}: {flag.help}" + (f" By default {default}." if default else "")
    return textwrap.fill(text, 100, initial_indent="  ", subsequent_indent="    ")
