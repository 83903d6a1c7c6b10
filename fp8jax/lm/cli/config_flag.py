"""Checks --config=FILE[:SIZE] and --config.KEY=VALUE before absl and ml_collections parse them.

Their own errors for a wrong file or key name neither of the two, take several lines or are
tracebacks. A config must have the keys of `fp8jax.base_config()`: all of them, since the run reads
them, and no other, since the run would ignore it.
"""

import dataclasses
import difflib
import inspect
import re
import tomllib
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from fp8jax.lm.records.config_keys import OLD_KEYS, REMOVED, answer, by_path
from fp8jax.lm.training.config import base_config

_OVERRIDE = re.compile(r"--?(?:no)?config\.([^=]*)(?:=.*)?", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Keys:
    """The keys that configs must have.

    Attributes:
      name: what has them, for people.
      begin: the expression that a config begins with.
      get_config: returns a config that has them all.
    """

    name: str
    begin: str
    get_config: Callable[[], ConfigDict]


RUN_KEYS = Keys("fp8jax.base_config()", "fp8jax.base_config()", base_config)

# A wheel has the files of configs/ beside this one; in a clone they are where they are.
_INSTALLED = Path(__file__).with_name("configs")
_CONFIGS = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).parents[3] / "configs"


def with_files(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with --config=NAME as the file NAME.py of configs/.

    A value that is a file, or no such name, stays as it is. A size may follow, as in smoke:SIZE.
    """
    found = list(arguments)
    for index, begin, value in _config_values(arguments):
        path, colon, size = value.partition(":")
        file = _CONFIGS / f"{path}.py"
        if path and not Path(path).is_file() and file.is_file():
            found[index] = f"{begin}{file}{colon}{size}"
    return found


def with_meshes(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with --config.mesh=NAME as the keys of NAME.toml in configs/meshes/.

    A name without a file stays as it is. A size that another argument gives goes before the file's.
    """
    given = {match[1] for each in arguments if (match := _OVERRIDE.fullmatch(each))}
    found = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        file = _CONFIGS / "meshes" / f"{value}.toml"
        if name.lstrip("-") != "config.mesh" or not equals or not file.is_file():
            found.append(argument)
            continue
        sizes = read_mesh(value)["mesh_axes"].items()
        keys = {f"mesh_axes.{axis}": size for axis, size in sizes}
        found.append(f"{name}=data")
        found += [f"--config.{key}={size}" for key, size in keys.items() if key not in given]
    return found


def mesh_names() -> list[str]:
    """Returns the names of the files of configs/meshes/."""
    return sorted(path.stem for path in (_CONFIGS / "meshes").glob("*.toml"))


def read_mesh(name: str) -> dict[str, Any]:
    """Returns what the file of that name in configs/meshes/ says; ValueError if there is none."""
    file = _CONFIGS / "meshes" / f"{name}.toml"
    if name not in mesh_names():
        raise ValueError(f"there is no mesh {name!r}: one of {', '.join(mesh_names())}")
    return tomllib.loads(file.read_text(encoding="utf-8"))


def _config_values(arguments: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """Yields each value of --config, written with "=" or as the next argument.

    Before it come the index of the argument that it is in, and what it has before the value.
    """
    for index, argument in enumerate(arguments):
        name, equals, text = argument.partition("=")
        if name in ("-config", "--config"):
            if equals:
                yield index, f"{name}=", text
            elif index + 1 < len(arguments):
                yield index + 1, "", arguments[index + 1]


def check_config_flags(arguments: Sequence[str], keys: Keys = RUN_KEYS) -> None:
    """Checks the config that the command line names, if it names one, and the keys it changes.

    Raises:
      ValueError: the file cannot be run, or has no `get_config` that returns a config; the config
        lacks a key or has an unknown one; or the command line changes an unknown key.
    """
    specs = [value for _, _, value in _config_values(arguments)]
    if not specs:
        return
    spec = specs[-1]
    config = _load(spec)
    _require_keys(spec, config, keys.get_config(), keys)
    for argument in arguments:
        if match := _OVERRIDE.fullmatch(argument):
            before = _require_key(config, match[1], keys)
            if argument.endswith("=None") and not isinstance(before, str):
                raise ValueError(
                    f"{argument}: a command line cannot unset a key: set it to None in a file of"
                    " --config"
                )


def _load(spec: str) -> ConfigDict:
    """Runs the file as ml_collections does: after the first colon comes get_config's argument."""
    path, colon, size = spec.partition(":")
    if not Path(path).is_file():
        raise ValueError(f"--config={spec}: there is no file {path!r}{_names(path)}")
    names = {"__name__": "config", "__file__": path}
    sizes = [size] if colon else []
    try:
        exec(compile(Path(path).read_bytes(), path, "exec"), names)
        get_config = names["get_config"] if "get_config" in names else None
        if callable(get_config) and _takes(get_config, sizes):
            config = get_config(*sizes)
    except ValueError as error:  # a config's own refusal, of a size say
        raise ValueError(f"--config={spec}: {error}") from error
    except Exception as error:
        line = _line(error, path)
        place = "" if line is None else f"line {line}: "
        text = _set_as_key(path, line) or _name(error)
        raise ValueError(f"--config={spec}: {place}{text}") from error
    if not callable(get_config):
        raise ValueError(f"--config={spec}: the file has no function get_config")
    if not _takes(get_config, sizes):
        needs = "takes no size" if colon else "needs a size"
        raise ValueError(f"--config={spec}: get_config {needs}, which follows a colon")
    if not isinstance(config, ConfigDict):
        kind = type(config).__name__
        raise ValueError(f"--config={spec}: get_config must return a ConfigDict, got {kind}")
    return config


def _names(path: str) -> str:
    """Returns the names that --config takes in place of a file, unless `path` names a file."""
    if "." in path or "/" in path:
        return ""
    names = sorted(file.stem for file in _CONFIGS.glob("[!_]*.py"))
    return f"; configs by name: {', '.join(names)}"


def _takes(function: object, arguments: list[str]) -> bool:
    assert callable(function)
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    return True


def _line(error: Exception, path: str) -> int | None:
    """Returns the line of the file at which it failed, None if it failed elsewhere."""
    if isinstance(error, SyntaxError):
        return error.lineno if error.filename == path else None
    frames = traceback.extract_tb(error.__traceback__)
    return next((f.lineno for f in reversed(frames) if f.filename == path), None)


def _set_as_key(path: str, line: int | None) -> str:
    """Returns the answer to a line that sets a group as the key that it once was, else ""."""
    if line is None:
        return ""
    text = Path(path).read_text(encoding="utf-8").splitlines()[line - 1]
    groups = [old for old, new in OLD_KEYS.items() if new.startswith(f"{old}.")]
    found = re.search(rf"\b({'|'.join(groups)})\s*=", text)
    return answer(found[1]) if found else ""


def _name(error: Exception) -> str:
    text = error.msg if isinstance(error, SyntaxError) else error
    return f"{type(error).__name__}: {text}"


def _require_keys(
    spec: str, config: ConfigDict, whole: ConfigDict, keys: Keys, group: str = ""
) -> None:
    """Raises ValueError unless both have the same keys, in their groups, too."""
    for key in config:
        if key not in whole:
            raise ValueError(f"--config={spec}: {_unknown(group, key, whole, keys)}")
    if missing := [group + key for key in whole if key not in config]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(
            f"--config={spec} lacks {', '.join(missing[:3])}{more}: begin with {keys.begin}"
        )
    for key, value in whole.items():
        if isinstance(value, ConfigDict):
            if not isinstance(config[key], ConfigDict):
                raise ValueError(f"--config={spec}: {group}{key} must be a group of keys")
            _require_keys(spec, config[key], value, keys, f"{group}{key}.")


def _require_key(config: ConfigDict, path: str, keys: Keys) -> object:
    """Returns the value of a key such as "mesh_axes.data"; raises ValueError if there is none."""
    node: object = config
    group = ""
    for key in path.split("."):
        known = node if isinstance(node, ConfigDict) else ConfigDict()
        if key not in known:
            raise ValueError(f"--config.{path}: {_unknown(group, key, known, keys)}")
        node, group = known[key], f"{group}{key}."
    if isinstance(node, ConfigDict) and key in OLD_KEYS:  # a group that once was a key
        raise ValueError(f"--config.{path}: {answer(key, group.removesuffix(f'{key}.'))}")
    return node


def _unknown(group: str, key: str, known: ConfigDict, keys: Keys) -> str:
    """Says which key stands for an unknown one: its new name, or those with similar names."""
    paths = by_path(known)
    if key in REMOVED or (key in OLD_KEYS and OLD_KEYS[key] in paths):
        return answer(key, group)
    # Those of a group are found without its name, too.
    named = {path.rpartition(".")[2]: path for path in paths} | {path: path for path in paths}
    similar = difflib.get_close_matches(key, named, n=3, cutoff=0.6)
    hints = dict.fromkeys(repr(group + named[name]) for name in similar)
    hint = f"; did you mean {' or '.join(hints)}?" if hints else ""
    return f"{keys.name} has no key {group + key!r}{hint}"
