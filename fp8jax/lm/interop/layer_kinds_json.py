"""Kinds of layers in a config.json: those with a window, and those without positions.

transformers has four ways to say which layers have a `sliding_window`: all of them (Mistral, Phi
3), the layers from max_window_layers on (Qwen), all but every n-th (Gemma 3, OLMo 3), or a list
`layer_types`, which is taken first where a family knows it.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from fp8jax.lm.model.config import ModelConfig
from fp8jax.lookup import brief

# layer_types -> the letter of `LAYER_KINDS`
_TYPES = {"full_attention": "f", "sliding_attention": "w"}

Read = Callable[[Mapping[str, Any], int, str], str]  # (config, layers, its path) -> letters
Write = Callable[[ModelConfig], dict[str, Any]]  # -> keys of config.json


@dataclasses.dataclass(frozen=True)
class Layers:
    """How a family says of which kinds its layers are.

    Attributes:
      kinds: the letters of `LAYER_KINDS` that it has.
      read, write: see there.
      mixed: whether one model may have several kinds.
    """

    kinds: str
    read: Read
    write: Write
    mixed: bool = True


def read_layers(
    layers: Layers, config: Mapping[str, Any], count: int, where: str
) -> tuple[str, int]:
    """Returns `layer_pattern` and `window` of the model of a config.json.

    Raises ValueError for kinds of layers that the family or this decoder does not have.
    """
    letters = layers.read(config, count, where)
    if "w" not in letters:
        return _shortest(letters), 0
    return _shortest(letters), _positive(config, "sliding_window", where)


def _shortest(letters: str) -> str:
    """Returns the shortest pattern that gives these layers: all but their longest border.

    A border begins and ends the letters. Those of all beginnings follow from each other (Knuth,
    Morris and Pratt), so that the work grows with the number of layers, not with its square.
    """
    borders = [0]
    for letter in letters[1:]:
        border = borders[-1]
        while border and letters[border] != letter:
            border = borders[border - 1]
        borders.append(border + (letters[border] == letter))
    return letters[: len(letters) - borders[-1]]


def _positive(config: Mapping[str, Any], key: str, where: str) -> int:
    value = config[key] if key in config else None
    if type(value) is not int or not 0 < value < 2**30:
        raise ValueError(f"{where}: {key} must be a positive whole number, got {brief(value)}")
    return value


def _types(config: Mapping[str, Any], count: int, where: str) -> str | None:
    """Returns the letters of `layer_types`; None without."""
    types = config["layer_types"] if "layer_types" in config else None
    if types is None:
        return None
    if not (isinstance(types, list) and all(isinstance(name, str) for name in types)):
        raise ValueError(f"{where}: layer_types must be names or null, got {brief(types)}")
    if other := sorted(set(types) - _TYPES.keys()):
        raise ValueError(
            f"{where}: layer_types has {', '.join(other)}, which is not supported; only "
            f"{' and '.join(_TYPES)}"
        )
    if len(types) < count:
        raise ValueError(f"{where}: layer_types has {len(types)} names for {count} layers")
    return "".join(_TYPES[name] for name in types[:count])


def _full(config: Mapping[str, Any], count: int, where: str) -> str:
    letters = _types(config, count, where) or "f" * count
    if "w" in letters:
        raise ValueError(
            f"{where}: layer_types has sliding_attention; only full_attention is supported here"
        )
    return letters


def _all_or_none(config: Mapping[str, Any], count: int, where: str) -> str:
    return ("f" if config["sliding_window"] is None else "w") * count


def _qwen(config: Mapping[str, Any], count: int, where: str) -> str:
    uses = config["use_sliding_window"] and config["sliding_window"] is not None
    letters = _types(config, count, where)
    if letters is None:
        first = config["max_window_layers"]
        if type(first) is not int:
            raise ValueError(
                f"{where}: max_window_layers must be a whole number, got {brief(first)}"
            )
        letters = "".join("w" if uses and i >= first else "f" for i in range(count))
    if "w" in letters and not uses:
        raise ValueError(
            f"{where}: layer_types has sliding_attention, but there is no window: "
            f"use_sliding_window={config['use_sliding_window']} and sliding_window="
            f"{config['sliding_window']}"
        )
    return letters


def _all_but_every(key: str | None, default: int) -> Read:
    """All layers but each n-th have a window; n is a key of config.json, or always `default`."""

    def read(config: Mapping[str, Any], count: int, where: str) -> str:
        letters = _types(config, count, where)
        if letters is not None:
            return letters
        every = default if key is None else _positive(config, key, where)
        return "".join("w" if (i + 1) % every else "f" for i in range(count))

    return read


def _smollm3(config: Mapping[str, Any], count: int, where: str) -> str:
    if config["use_sliding_window"] and config["sliding_window"] is not None:
        raise ValueError(
            f"{where}: use_sliding_window=true is not supported for layers without positions: "
            f"sliding_window={brief(config['sliding_window'])}"
        )
    _full(config, count, where)
    turned = config["no_rope_layers"]
    if turned is None:
        every = _positive(config, "no_rope_layer_interval", where)
        turned = [int((i + 1) % every != 0) for i in range(count)]
    known = isinstance(turned, list) and all(entry in (0, 1) for entry in turned)
    if not known or len(turned) < count:
        raise ValueError(
            f"{where}: no_rope_layers must have 0 or 1 for each of {count} layers, got "
            f"{brief(turned)}"
        )
    return "".join("f" if entry else "n" for entry in turned[:count])


def _window_or_null(model: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": model.window if "w" in model.layer_kinds else None}


def _write_types(model: ModelConfig) -> dict[str, Any]:
    names = {letter: name for name, letter in _TYPES.items()}
    types = [names[letter] for letter in model.layer_kinds]
    return {"sliding_window": model.window or 4096, "layer_types": types}


def _write_qwen(model: ModelConfig) -> dict[str, Any]:
    kinds = model.layer_kinds
    if "w" not in kinds:
        return {"use_sliding_window": False}
    from_first = {"use_sliding_window": True, "max_window_layers": kinds.index("w")}
    return from_first | _write_types(model)


def _write_smollm3(model: ModelConfig) -> dict[str, Any]:
    turned = [int(letter != "n") for letter in model.layer_kinds]
    return {"no_rope_layers": turned, "use_sliding_window": False}


FULL = Layers("f", _full, lambda model: {})
ONE_WINDOW = Layers("fw", _all_or_none, _window_or_null, mixed=False)
LATER_WINDOWS = Layers("fw", _qwen, _write_qwen)
GEMMA_WINDOWS = Layers("fw", _all_but_every("sliding_window_pattern", 6), _write_types)
OLMO_WINDOWS = Layers("fw", _all_but_every(None, 4), _write_types)
SOME_WITHOUT_POSITIONS = Layers("fn", _smollm3, _write_smollm3)
