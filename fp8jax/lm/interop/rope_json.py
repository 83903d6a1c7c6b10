"""RoPE in a config.json: `rope_parameters` of transformers 5, `rope_scaling` of older files."""

import math
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from fp8jax.lm.model.rope import Linear, Llama3, LongRope, RopeScaling, Yarn
from fp8jax.lookup import brief

# Type -> the keys that it has besides rope_type and rope_theta.
_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "longrope": (
        "short_factor",
        "long_factor",
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
    ),
}
ORIGINAL_LENGTH = "original_max_position_embeddings"
_OLDER_NAMES = {"su": "longrope"}  # of Phi 3's first files


class Rope(NamedTuple):
    """The base of the wavelengths, how they are scaled, and which part of a head is rotated."""

    theta: float
    scaling: RopeScaling | None
    part: float


def read_rope(config: Mapping[str, Any], where: str) -> Rope:
    """Returns the rotary positions of a config.json.

    Args:
      config: a parsed config.json that has the keys rope_parameters, rope_scaling, rope_theta and
        partial_rotary_factor, perhaps None.
      where: its path, for messages.

    Raises:
      ValueError: a type of scaling, or a key of one, that is not supported; numbers out of range.
    """
    old, new = config["rope_scaling"], config["rope_parameters"]
    for key, value in (("rope_scaling", old), ("rope_parameters", new)):
        if not isinstance(value, dict | None):
            raise ValueError(f"{where}: {key} must be an object or null, got {brief(value)}")
    if old and new and old != new:
        raise ValueError(f"{where}: rope_scaling={old} contradicts rope_parameters={new}")
    rope = dict(old or new or {})
    theta = rope.pop("rope_theta") if "rope_theta" in rope else config["rope_theta"]
    part = rope.pop("partial_rotary_factor", None) or config["partial_rotary_factor"] or 1.0
    if type(part) not in (int, float) or not 0 < part <= 1:
        raise ValueError(f"{where}: partial_rotary_factor={brief(part)} is not supported, only 1")
    kind = _kind(rope, where)
    if unknown := sorted(rope.keys() - set(_KEYS[kind])):
        raise ValueError(
            f"{where}: RoPE of type {kind!r} has {', '.join(unknown)}, which is not supported;"
            f" only {', '.join(_KEYS[kind]) or 'rope_theta'}"
        )
    read = _Reader(rope | _original(config), where)
    return Rope(_positive(theta, "rope_theta", where), read.scaling(kind, config), part)


def read_ropes(
    config: Mapping[str, Any], local_theta: str | None, where: str
) -> tuple[Rope, float]:
    """Returns the rotary positions of full layers, and the base in those with a window.

    Windowed layers are never scaled. transformers 5 has both in `rope_parameters`, by the names of
    `layer_types`; older files have those of full layers as other families do.

    Args:
      local_theta: the key of the base in older files; None where it is that of full layers.
    """
    given = config["rope_parameters"]
    if not isinstance(given, dict) or not {"full_attention", "sliding_attention"} & given.keys():
        full = read_rope(config, where)
        theta = full.theta if local_theta is None else config[local_theta]
        return full, _positive(theta, local_theta or "rope_theta", where)
    if missing := {"full_attention", "sliding_attention"} ^ given.keys():
        raise ValueError(
            f"{where}: rope_parameters must have full_attention and sliding_attention, and not "
            f"more: {', '.join(sorted(missing))}"
        )
    # A length beside them is of flat ones.
    beside = {key: value for key, value in config.items() if key != ORIGINAL_LENGTH}
    full = read_rope({**beside, "rope_parameters": given["full_attention"]}, where)
    alone = {"rope_parameters": given["sliding_attention"], "rope_scaling": None}
    windowed = read_rope({**beside, **alone}, where)
    if windowed.scaling is not None or windowed.part != full.part:
        raise ValueError(
            f"{where}: rope_parameters of sliding_attention={brief(given['sliding_attention'])} is"
            " not supported, only another rope_theta"
        )
    return full, windowed.theta


def _kind(rope: dict[str, Any], where: str) -> str:
    """Takes the type out of `rope`; `type` is its older name."""
    given = [rope.pop(key) for key in ("rope_type", "type") if key in rope] or ["default"]
    if any(other != given[0] for other in given):
        raise ValueError(f"{where}: rope_type and type contradict each other: {brief(given)}")
    kind = given[0]
    if isinstance(kind, str) and kind in _OLDER_NAMES:
        kind = _OLDER_NAMES[kind]
    if not isinstance(kind, str) or kind not in _KEYS:
        raise ValueError(
            f"{where}: RoPE of type {brief(kind)} is not supported. There are: {', '.join(_KEYS)}"
        )
    return kind


def _original(config: Mapping[str, Any]) -> dict[str, Any]:
    """The original length if a config.json has it beside the scaling, where it takes priority."""
    return {ORIGINAL_LENGTH: config[ORIGINAL_LENGTH]} if ORIGINAL_LENGTH in config else {}


def _positive(value: Any, key: str, where: str) -> float:
    if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
        raise ValueError(f"{where}: RoPE's {key} must be a positive number, got {brief(value)}")
    return float(value)


class _Reader:
    """Reads the numbers of one scaling."""

    def __init__(self, rope: Mapping[str, Any], where: str):
        self._rope, self._where = rope, where

    def scaling(self, kind: str, config: Mapping[str, Any]) -> RopeScaling | None:
        if kind == "default":
            return None
        if kind == "linear":
            return Linear(factor=self._factor())
        original = self._original(config)
        if kind == "longrope":
            return self._longrope(original, config)
        if kind == "llama3":
            low, high = self._number("low_freq_factor"), self._number("high_freq_factor")
            if low >= high:
                raise ValueError(
                    f"{self._where}: RoPE's low_freq_factor={low} must be below {high}, its "
                    "high_freq_factor"
                )
            return Llama3(factor=self._factor(), low=low, high=high, original=original)
        return self._yarn(original, config)

    def _yarn(self, original: int, config: Mapping[str, Any]) -> Yarn:
        factor = self._factor_of(original, config)
        truncate = self._rope["truncate"] if "truncate" in self._rope else True
        if type(truncate) is not bool:
            raise ValueError(
                f"{self._where}: RoPE's truncate must be true or false, got {brief(truncate)}"
            )
        return Yarn(
            factor=factor,
            original=original,
            attention_factor=self._attention_factor(factor),
            beta_fast=self._number("beta_fast") if self._has("beta_fast") else 32.0,
            beta_slow=self._number("beta_slow") if self._has("beta_slow") else 1.0,
            truncate=truncate,
        )

    def _longrope(self, original: int, config: Mapping[str, Any]) -> LongRope:
        return LongRope(
            short=self._numbers("short_factor"),
            long=self._numbers("long_factor"),
            original=original,
            factor=self._factor_of(original, config),
            attention_factor=(
                self._number("attention_factor") if self._has("attention_factor") else None
            ),
        )

    def _attention_factor(self, factor: float) -> float | None:
        """The given one; or the quotient of DeepSeek's two; None for the paper's."""
        if "attention_factor" in self._rope and self._rope["attention_factor"] is not None:
            return self._number("attention_factor")
        if not (self._has("mscale") and self._has("mscale_all_dim")):
            return None
        above, below = self._number("mscale"), self._number("mscale_all_dim")
        logarithm = max(0.0, math.log(factor))  # of lengths, a factor may be below 1
        return (0.1 * above * logarithm + 1) / (0.1 * below * logarithm + 1)

    def _has(self, key: str) -> bool:
        """Whether a number is given; transformers reads 0 and null as none."""
        return key in self._rope and bool(self._rope[key])

    def _number(self, key: str) -> float:
        if key not in self._rope:
            raise ValueError(f"{self._where}: RoPE's {key} is missing")
        return _positive(self._rope[key], key, self._where)

    def _factor(self) -> float:
        factor = self._number("factor")
        if factor < 1:
            raise ValueError(f"{self._where}: RoPE's factor={factor} must be at least 1")
        return factor

    def _factor_of(self, original: int, config: Mapping[str, Any]) -> float:
        """The given factor; without one, that of the lengths."""
        if self._has("factor"):
            return self._factor()
        return self._length(config, "max_position_embeddings") / original

    def _numbers(self, key: str) -> tuple[float, ...]:
        given = self._rope[key] if key in self._rope else None
        if not isinstance(given, list) or not given:
            raise ValueError(
                f"{self._where}: RoPE's {key} must be a list of numbers, got {brief(given)}"
            )
        return tuple(_positive(value, key, self._where) for value in given)

    def _original(self, config: Mapping[str, Any]) -> int:
        """Positions of training; without them, max_position_embeddings, as in transformers."""
        key = ORIGINAL_LENGTH
        if self._has(key):
            return self._length(self._rope, key)
        if "max_position_embeddings" not in config:
            raise ValueError(f"{self._where}: RoPE's {key} is missing")
        return self._length(config, "max_position_embeddings")

    def _length(self, given: Mapping[str, Any], key: str) -> int:
        """Returns a number of positions."""
        if key not in given:
            raise ValueError(f"{self._where}: RoPE's {key} is missing")
        length = _positive(given[key], key, self._where)
        if length != int(length):
            raise ValueError(
                f"{self._where}: RoPE's {key} must be a whole number, got {brief(given[key])}"
            )
        return int(length)


def write_rope(
    theta: float, scaling: RopeScaling | None, max_length: int
) -> tuple[dict[str, Any], int]:
    """Returns `rope_parameters`, and how many positions the scaled model is for, at least
    `max_length`."""
    base = {"rope_theta": theta}
    if scaling is None:
        return {"rope_type": "default", **base}, max_length
    if isinstance(scaling, Linear):
        return {"rope_type": "linear", **base, "factor": scaling.factor}, max_length
    assert isinstance(scaling, Llama3 | Yarn | LongRope)
    shared = {
        **base,
        "factor": scaling.factor,
        ORIGINAL_LENGTH: scaling.original,
    }
    length = max(max_length, round(scaling.factor * scaling.original))
    if isinstance(scaling, Llama3):
        bounds = {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
        return {"rope_type": "llama3", **shared, **bounds}, length
    given = {} if scaling.attention_factor is None else {"attention_factor": scaling.magnitude}
    if isinstance(scaling, LongRope):
        divisors = {"short_factor": list(scaling.short), "long_factor": list(scaling.long)}
        return {"rope_type": "longrope", **shared, **divisors, **given}, length
    betas = {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
    ends = {} if scaling.truncate else {"truncate": False}
    return {"rope_type": "yarn", **shared, **betas, **given, **ends}, length
