"""Reads FP8 checkpoints in the formats of fp8_format.py, dequantized to float32."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fp8jax.lm.interop.fp8_format import E4M3, FP8_FORMATS, Fp8Format, scale_name
from fp8jax.lookup import brief

CODES = "F8_E4M3"  # as safetensors calls it

# The keys of quantization_config that decide what the tensors mean.
_DECISIVE = {
    "fp8_block": ("quant_method", "fmt", "weight_block_size"),
    "compressed_tensors": ("quant_method", "format", "config_groups"),
}


def read_codes(path: Path, name: str) -> np.ndarray:
    """Returns the FP8 codes of a tensor, mapped from its file, whose header is known to be sound.

    The NumPy reader of safetensors has no FP8 dtypes; its writer has.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(length))[name]
    begin = 8 + length + entry["data_offsets"][0]
    return np.memmap(path, E4M3.dtype, "r", begin, tuple(entry["shape"]))


def read_format(config: Mapping[str, Any], where: str) -> Fp8Format | None:
    """Returns the format of a folder's weights by its config.json; None if they are not quantized.

    Raises ValueError for a quantization that is not one of `FP8_FORMATS`, as this file writes them.
    """
    if "quantization_config" not in config or config["quantization_config"] is None:
        return None
    given = config["quantization_config"]
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}: quantization_config must be an object, got {brief(given)}")
    for fmt in FP8_FORMATS.values():
        expected = fmt.config(())
        if all(key in given and given[key] == expected[key] for key in _DECISIVE[fmt.name]):
            return fmt
    raise ValueError(
        f"{where}: quantization_config={json.dumps(given)[:200]} is not supported: only"
        " quant_method=fp8 with weight_block_size=[128, 128], and compressed-tensors with"
        " float-quantized channels"
    )


class DequantizedFiles:
    """The tensors of an FP8 folder as if they were stored in float32; reads as `TensorFiles` does.

    Attributes:
      folder, shapes, dtypes: as those of `files`, without the scales.

    Raises (the constructor):
      ValueError: codes without scales, or scales of another shape; all of them.
    """

    def __init__(self, files: Any, fmt: Fp8Format):
        self._files, self._format = files, fmt
        self.folder = files.folder
        scales = {name for name in files.shapes if name.endswith(f".{fmt.suffix}")}
        self.shapes = {name: s for name, s in files.shapes.items() if name not in scales}
        self.dtypes = {name: files.dtypes[name] for name in self.shapes}
        problems = []
        for name in [name for name, dtype in self.dtypes.items() if dtype == CODES]:
            scale, expected = scale_name(fmt, name), self._scale_shape(name)
            if scale not in scales:
                problems.append(f"{name} has no {fmt.suffix}")
            elif files.shapes[scale] != expected:
                problems.append(
                    f"{scale} has shape {list(files.shapes[scale])} instead of {list(expected)}"
                )
            scales.discard(scale)
            self.dtypes[name] = "F32"
        problems += [f"{name} belongs to no codes" for name in sorted(scales)]
        if problems:
            raise ValueError(f"{self.folder}: {'; '.join(problems)}")

    def _tile(self, shape: tuple[int, ...]) -> tuple[int, int]:
        sizes = self._format.tile.per_axis(2, -1)
        out, inner = (d if t is None else t for d, t in zip(shape, sizes, strict=True))
        return out, inner

    def _scale_shape(self, name: str) -> tuple[int, ...]:
        shape = self.shapes[name]
        return tuple(-(-d // t) for d, t in zip(shape, self._tile(shape), strict=True))

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Returns a part of a tensor: quantized ones in float32, others in their own dtype."""
        codes = self._files.read(name, index)
        if self._files.dtypes[name] != CODES:
            return codes
        tile, shape = self._tile(self.shapes[name]), self.shapes[name]
        bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
        around = tuple(slice(b // t, -(-e // t)) for (b, e), t in zip(bounds, tile, strict=True))
        scale = self._files.read(scale_name(self._format, name), around).astype(np.float32)
        rows, columns = (
            np.arange(begin, end) // size - begin // size
            for (begin, end), size in zip(bounds, tile, strict=True)
        )
        return codes.astype(np.float32) * scale[np.ix_(rows, columns)]
