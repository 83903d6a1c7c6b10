"""Reads FP8 checkpoints, ours and those of others, dequantized to float32.

A tensor X.weight [out, in] of E4M3 codes has scales beside it, and weight = codes * scales:

    quant_method        layout                       scales                     of shape
    fp8                 weight_block_size [m, n]     weight_scale_inv           a block each
    fp8                 none: one for a tensor       weight_scale(_inv)         [] or [1]
    compressed-tensors  strategy block, channel or   weight_scale               a block each, [out,
                        tensor                                                  1], [1]

Scales are float32, bfloat16, float16 or E8M0. What the configuration says of activations is for
servers and is not read, as long as servers compute it themselves. Whatever else could change what
the codes mean is refused by the name of its field; so is a scale that is there but was not named.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from fp8jax.lm.interop.fp8_format import E4M3
from fp8jax.lookup import brief

CODES = "F8_E4M3"  # as safetensors calls it
# What its NumPy reader has no dtypes for; its writer has.
CODE_DTYPES = {CODES: E4M3.dtype, "F8_E8M0": ml_dtypes.float8_e8m0fnu}
_SCALES = ("F32", "BF16", "F16", "F8_E8M0")

_FIELD = "quantization_config"
_OLD_FIELD = "compression_config"  # of compressed-tensors before 0.7

# Fields of a group's weights that have no effect on what is stored.
_HOW_CHOSEN = ("observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype")


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the scales of codes are.

    Attributes:
      tile: weights [out, in] that share a scale; None for all along an axis.
      suffixes: of the names of scales, which replace "weight"; a folder has one of them.
    """

    tile: tuple[int | None, int | None]
    suffixes: tuple[str, ...]


def read_codes(path: Path, name: str) -> np.ndarray:
    """Returns the FP8 numbers of a tensor, mapped from its file, whose header is known to be sound.

    The NumPy reader of safetensors has no FP8 dtypes; its writer has.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(length))[name]
    begin = 8 + length + entry["data_offsets"][0]
    return np.memmap(path, CODE_DTYPES[entry["dtype"]], "r", begin, tuple(entry["shape"]))


def read_layout(config: Mapping[str, Any], where: str) -> Layout | None:
    """Returns the layout of a folder's weights by its config.json; None if they are not quantized.

    Raises ValueError for a quantization that is not supported, with the field that says so.
    """
    for field in (_FIELD, _OLD_FIELD):
        if field in config and config[field] is not None:
            given = _Fields(config[field], f"{where}: {field}")
            break
    else:
        return None
    method = given.only("quant_method", "fp8", "compressed-tensors")
    return _fp8(given) if method == "fp8" else _compressed_tensors(given)


class _Fields:
    """An object of a configuration, read field by field: what is not expected is refused by name.

    Args:
      given: the parsed object.
      where: the path of the file, and of the object in it.
    """

    def __init__(self, given: Any, where: str):
        if not isinstance(given, Mapping):
            raise ValueError(f"{where} must be an object, got {brief(given)}")
        self._given, self.where = given, where

    def value(self, name: str) -> Any:
        """Returns the value; null for a field that is left out."""
        return self._given[name] if name in self._given else None

    def only(self, name: str, *supported: Any) -> Any:
        """Returns the value, which has to be one of those."""
        value = self.value(name)
        if not any(value == one and type(value) is type(one) for one in supported):
            names = " or ".join(json.dumps(one) for one in supported)
            raise ValueError(f"{self.where}.{name}={brief(value)} is not supported, only {names}")
        return value

    def part(self, name: str) -> "_Fields | None":
        """Returns the object there; None without one, and for an empty one."""
        value = self.value(name)
        return None if value in (None, {}) else _Fields(value, f"{self.where}.{name}")

    def block(self, name: str) -> tuple[int, int]:
        """Returns the two sizes there."""
        value = self.value(name)
        if (
            not isinstance(value, list)
            or len(value) != 2
            or not all(type(size) is int and size > 0 for size in value)
        ):
            raise ValueError(f"{self.where}.{name}={brief(value)} must be two sizes of a block")
        return value[0], value[1]

    def refuse_others(self, known: Iterable[str]) -> None:
        """Refuses fields that nobody here knows, unless they are null, false or empty."""
        for name in sorted(self._given.keys() - set(known)):
            if self._given[name] not in (None, False, {}, []):
                raise ValueError(
                    f"{self.where}.{name}={brief(self._given[name])} is not supported: nobody here"
                    " knows what it means"
                )


def _fp8(given: _Fields) -> Layout:
    """DeepSeek's and transformers' format, and that of old files for vLLM, which say less."""
    given.only("fmt", "e4m3", "float8_e4m3fn", None)
    given.only("activation_scheme", "dynamic", None)
    given.only("scale_fmt", "ue8m0", "float", "float32", None)
    given.only("expert_dtype", "fp8", None)
    given.refuse_others(
        (
            *("quant_method", "fmt", "activation_scheme", "scale_fmt", "expert_dtype"),
            *("weight_block_size", "modules_to_not_convert", "ignored_layers"),
            *("modules_to_convert", "dequantize", "is_checkpoint_fp8_serialized"),
        )
    )
    if given.value("weight_block_size") is None:
        return Layout((None, None), ("weight_scale_inv", "weight_scale"))
    return Layout(given.block("weight_block_size"), ("weight_scale_inv",))


def _compressed_tensors(given: _Fields) -> Layout:
    """llm-compressor's format: groups of linears, all of one layout here."""
    given.only("format", "float-quantized", "naive-quantized")
    for name in ("kv_cache_scheme", "transform_config"):
        if given.part(name) is not None:
            given.only(name, None)
    sparsity = given.part("sparsity_config")
    if sparsity is not None:
        sparsity.only("format", "dense", None)
    given.refuse_others(
        (
            *("quant_method", "format", "config_groups", "ignore", "kv_cache_scheme"),
            *("transform_config", "sparsity_config", "quantization_status", "version"),
            "global_compression_ratio",
        )
    )
    groups = given.part("config_groups")
    if groups is None:
        raise ValueError(f"{given.where}.config_groups has no group")
    layouts = {name: _group(groups, name) for name in groups._given}
    if len(set(layouts.values())) > 1:
        raise ValueError(
            f"{groups.where} has groups of unlike layouts, which is not supported: "
            f"{', '.join(layouts)}"
        )
    return next(iter(layouts.values()))


def _group(groups: _Fields, name: str) -> Layout:
    """The layout of one group's weights."""
    group = groups.part(name)
    weights = None if group is None else group.part("weights")
    if group is None or weights is None:
        raise ValueError(f"{groups.where}.{name}.weights is missing: they are not quantized")
    group.only("format", "float-quantized", "naive-quantized", None)
    group.only("output_activations", None)
    known = ("weights", "format", "input_activations", "output_activations", "targets")
    group.refuse_others(known)
    inputs = group.part("input_activations")
    if inputs is not None:
        inputs.only("num_bits", 8)
        inputs.only("type", "float")
        inputs.only("dynamic", True)
    weights.only("num_bits", 8)
    weights.only("type", "float")
    weights.only("symmetric", True, None)
    weights.only("dynamic", False, None)
    strategy = weights.only("strategy", "channel", "tensor", "block")
    weights.only("group_size", None)
    weights.refuse_others(
        (
            *("num_bits", "type", "symmetric", "dynamic", "strategy", "group_size"),
            *("block_structure", *_HOW_CHOSEN),
        )
    )
    if strategy == "block":
        return Layout(weights.block("block_structure"), ("weight_scale",))
    return Layout((1 if strategy == "channel" else None, None), ("weight_scale",))


class DequantizedFiles:
    """The tensors of an FP8 folder as if they were stored in float32; reads as `TensorFiles` does.

    Attributes:
      folder, shapes, dtypes: as those of `files`, without the scales.

    Raises (the constructor):
      ValueError: codes without scales, or scales of another shape or dtype; all of them.
    """

    def __init__(self, files: Any, layout: Layout):
        self._files, self._layout = files, layout
        self.folder = files.folder
        endings = tuple(f".{suffix}" for suffix in layout.suffixes)
        scales = {name for name in files.shapes if name.endswith(endings)}
        self.shapes = {name: s for name, s in files.shapes.items() if name not in scales}
        self.dtypes = {name: files.dtypes[name] for name in self.shapes}
        self._scale_of: dict[str, str] = {}
        problems = []
        for name in [name for name, dtype in self.dtypes.items() if dtype == CODES]:
            own = [name.removesuffix("weight") + suffix for suffix in layout.suffixes]
            found = [scale for scale in own if scale in scales]
            if len(self.shapes[name]) != 2:
                problems.append(f"{name} has codes of shape {list(self.shapes[name])}")
            elif len(found) != 1:
                count = "no" if not found else "more than one"
                problems.append(f"{name} has {count} {' or '.join(layout.suffixes)}")
            else:
                self._scale_of[name] = found[0]
                problems += self._problems(name, found[0])
            scales -= set(found)
            self.dtypes[name] = "F32"
        problems += [f"{name} belongs to no codes" for name in sorted(scales)]
        if problems:
            raise ValueError(f"{self.folder}: {'; '.join(problems)}")

    def _tile(self, shape: tuple[int, ...]) -> tuple[int, int]:
        out, inner = (d if t is None else t for d, t in zip(shape, self._layout.tile, strict=True))
        return out, inner

    def _scale_shape(self, name: str) -> tuple[int, ...]:
        shape = self.shapes[name]
        return tuple(-(-d // t) for d, t in zip(shape, self._tile(shape), strict=True))

    def _problems(self, name: str, scale: str) -> list[str]:
        expected, shape = self._scale_shape(name), self._files.shapes[scale]
        problems = []
        # One number for a row or a tensor may have fewer axes; those of size 1 are left out.
        short = shape == expected[: len(shape)] and set(expected[len(shape) :]) <= {1}
        if not (short and self._layout.tile[1] is None or shape == expected):
            problems.append(f"{scale} has shape {list(shape)} instead of {list(expected)}")
        dtype = self._files.dtypes[scale]
        if dtype not in _SCALES:
            problems.append(f"{scale} has dtype {dtype}, not one of {', '.join(_SCALES)}")
        return problems

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Returns a part of a tensor: quantized ones in float32, others in their own dtype."""
        codes = self._files.read(name, index)
        if name not in self._scale_of:
            return codes
        tile, shape = self._tile(self.shapes[name]), self.shapes[name]
        bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
        around = tuple(slice(b // t, -(-e // t)) for (b, e), t in zip(bounds, tile, strict=True))
        stored = self._scale_of[name]
        scale = self._files.read(stored, around[: len(self._files.shapes[stored])])
        scale = scale.astype(np.float32).reshape([part.stop - part.start for part in around])
        rows, columns = (
            np.arange(begin, end) // size - begin // size
            for (begin, end), size in zip(bounds, tile, strict=True)
        )
        return codes.astype(np.float32) * scale[np.ix_(rows, columns)]
