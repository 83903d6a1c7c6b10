"""Reads the safetensors of a Hugging Face folder into our parameters, straight onto shardings.

Only the headers of the files are read at first: every tensor that is missing, left over or of
another shape is found before anything is allocated. Then each device's part of each parameter is
read by itself, from a memory-mapped file. So no process holds more than its own shards and one part
of one parameter, and the files of other processes' parts are not read.

Nothing is unpickled: a folder with .bin files only is refused.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from fp8jax.lm.data.hub import INDEX, add_files, as_folder
from fp8jax.lm.interop.config_json import load_json
from fp8jax.lm.interop.fp8_read import CODE_DTYPES, DequantizedFiles, read_codes, read_layout
from fp8jax.lm.interop.tensor_names import (
    HEAD,
    Slices,
    find_prefix,
    is_buffer,
    parameter_shapes,
    places,
    read_leaf,
    tensor_shapes,
)
from fp8jax.lm.model.config import ModelConfig
from fp8jax.lm.records.checkpoint_files import HASHES, find_damage

SINGLE = "model.safetensors"
READABLE = ("F32", "F16", "BF16")  # dtypes of parameters, as safetensors calls them


@runtime_checkable
class TensorReader(Protocol):
    """The tensors of a folder: `TensorFiles`, or what stands before it and converts.

    Attributes:
      folder: where they are.
      shapes: name -> shape.
      dtypes: name -> dtype, as safetensors calls it.
    """

    folder: Path
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]

    def read(self, name: str, index: Slices) -> np.ndarray:
        """Returns a part of a tensor, in its own dtype."""
        ...


class TensorFiles:
    """The tensors of a folder, from one file or several with an index; a `TensorReader`.

    Raises (the constructor):
      ValueError: there is no safetensors file, the index names a file or a tensor that is not
        there, a file cannot be opened, is cut short or is none of safetensors, or its hash has
        changed (folders that fp8jax wrote have hashes).
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._file_of: dict[str, Any] = {}
        self._path_of: dict[str, Path] = {}
        listed = _listed(folder)
        if (folder / HASHES).exists() and (damage := find_damage(folder, "")) is not None:
            raise ValueError(f"{folder}: {damage}")
        for name in sorted(set(listed.values())) if listed else [SINGLE]:
            self._open(folder / name)
        if absent := sorted(listed.keys() - self.shapes.keys()):
            raise ValueError(f"{folder / INDEX} names tensors that no file has: {grouped(absent)}")

    def _open(self, path: Path) -> None:
        try:
            path.open("rb").close()  # whatever the reason, safetensors says "No such file"
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from error
        try:
            file = safe_open(path, framework="np")
            names = list(file.keys())
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is damaged or no safetensors file: {error}") from error
        for name in names:
            if name in self._file_of:
                raise ValueError(f"{path}: tensor {name} is in another file of the folder, too")
            part = file.get_slice(name)
            self._file_of[name], self._path_of[name] = file, path
            self.shapes[name] = tuple(part.get_shape())
            self.dtypes[name] = part.get_dtype()

    def read(self, name: str, index: Slices) -> np.ndarray:
        """Returns a part of a tensor, in its own dtype."""
        if self.dtypes[name] in CODE_DTYPES:
            return read_codes(self._path_of[name], name)[index]
        if not index:
            return self._file_of[name].get_tensor(name)
        part = self._file_of[name].get_slice(name)
        return part[index if len(index) > 1 else index[0]]


def folder_with_weights(spec: str) -> Path | None:
    """Returns the folder that `hf:…` names, with its weights; None for every other spec.

    Raises:
      ValueError: there is no such folder, or its index is damaged.
    """
    folder = as_folder(spec)
    if folder is not None:
        is_one = (folder / SINGLE).exists() or not (folder / INDEX).exists()
        add_files(spec, {SINGLE} if is_one else {*_weight_map(folder).values()})
    return folder


def open_tensors(folder: Path) -> TensorReader:
    """Returns the tensors of a folder; those of an FP8 checkpoint dequantized to float32.

    Raises ValueError as their constructors do, and for a quantization that is not supported.
    """
    path = folder / "config.json"
    files, layout = TensorFiles(folder), read_layout(load_json(path), str(path))
    return files if layout is None else DequantizedFiles(files, layout)


def _listed(folder: Path) -> dict[str, str]:
    """Returns tensor -> file of a folder with an index; {} for one with a single file."""
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise ValueError(f"{folder} {what}: name a folder with config.json and safetensors files")
    if (folder / SINGLE).exists():
        return {}
    if not (folder / INDEX).exists():
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        shards = sorted(path.name for path in folder.glob("*.safetensors"))
        why = ""
        if shards:
            why = f", although it has {', '.join(shards[:3])}"
        elif pickled:
            why = f"; {', '.join(pickled[:3])} would have to be unpickled, which may run any code"
        raise ValueError(f"{folder} has neither {SINGLE} nor {INDEX}{why}")
    listed = _weight_map(folder)
    missing = sorted({file for file in listed.values() if not (folder / file).is_file()})
    if missing:
        raise ValueError(f"{folder / INDEX} names files that are missing: {', '.join(missing)}")
    return listed


def _weight_map(folder: Path) -> dict[str, str]:
    """Returns tensor -> file of the index of a folder; ValueError unless it is one."""
    index = load_json(folder / INDEX)
    listed = index["weight_map"] if "weight_map" in index else None
    if (
        not isinstance(listed, dict)
        or not listed
        or not all(isinstance(file, str) and Path(file).name == file for file in listed.values())
    ):
        raise ValueError(f"{folder / INDEX}: weight_map must map tensors to files of the folder")
    return listed


def grouped(names: Iterable[str]) -> str:
    """Returns names on one line, the numbers of layers joined: layers.[0-31].mlp.up (32)."""
    by_pattern: dict[str, list[int]] = {}
    plain = []
    for name in names:
        if (found := re.search(r"(?<=\.)\d+(?=\.)", name)) is None:
            plain.append(name)
        else:
            pattern = f"{name[: found.start()]}[]{name[found.end() :]}"
            by_pattern.setdefault(pattern, []).append(int(found[0]))
    joined = [pattern.replace("[]", _ranges(sorted(n))) for pattern, n in by_pattern.items()]
    return ", ".join([*plain, *joined])


def _ranges(numbers: Sequence[int]) -> str:
    """Returns sorted numbers as ranges: [0-3,7]; a single one without brackets."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    if len(numbers) == 1:
        return str(numbers[0])
    return f"[{','.join(str(a) if a == b else f'{a}-{b}' for a, b in runs)}]"


def dropped_tensors(files: TensorReader, model: ModelConfig) -> list[str]:
    """Returns the names of tensors that are not read: buffers, and a tied head that is stored."""
    tied = [HEAD] if model.tie_embeddings and HEAD in files.shapes else []
    return [name for name in files.shapes if is_buffer(model, name)] + tied


def check_tensors(files: TensorReader, model: ModelConfig) -> str:
    """Returns the prefix of the names, once the tensors are known to be those of the model.

    Raises:
      ValueError: with the whole list of those that are missing, of another shape or dtype, or of no
        use for the model; a stored head that differs from the embedding to which config.json ties
        it.
    """
    prefix = find_prefix(model, files.shapes)
    expected = tensor_shapes(model, prefix)
    found = files.shapes.keys() - set(dropped_tensors(files, model))
    problems = []
    if missing := [name for name in expected if name not in found]:
        problems.append(f"missing: {grouped(missing)}")
    if extra := sorted(found - expected.keys()):
        problems.append(f"not part of the model: {grouped(extra)}")
    shared = [name for name in expected if name in found]
    problems += _grouped_by(
        {
            name: f"has shape {list(files.shapes[name])} instead of {list(expected[name])}"
            for name in shared
            if files.shapes[name] != expected[name]
        }
    )
    problems += _grouped_by(
        {
            name: f"has dtype {files.dtypes[name]}, not one of {', '.join(READABLE)}"
            for name in shared
            if files.dtypes[name] not in READABLE
        }
    )
    if problems:
        raise ValueError(
            f"the tensors in {files.folder} are not those of its config.json: {'; '.join(problems)}"
        )
    if model.tie_embeddings and HEAD in files.shapes:
        _check_tied_head(files, places(model)["embedding"].name(0, prefix))
    return prefix


def _grouped_by(problems: Mapping[str, str]) -> list[str]:
    """Returns one line for all tensors with the same problem."""
    names: dict[str, list[str]] = {}
    for name, problem in problems.items():
        names.setdefault(problem, []).append(name)
    return [f"{grouped(those)} {problem}" for problem, those in names.items()]


def _check_tied_head(files: TensorReader, embedding: str) -> None:
    rows = files.shapes[embedding][0]
    same = files.shapes[HEAD] == files.shapes[embedding]
    for begin in range(0, rows, 4096) if same else ():
        index = (slice(begin, min(begin + 4096, rows)), slice(0, files.shapes[embedding][1]))
        head, rows_of_embedding = files.read(HEAD, index), files.read(embedding, index)
        same &= np.array_equal(head, rows_of_embedding, equal_nan=True)  # NaN is refused later
    if not same:
        raise ValueError(
            f"{files.folder}: config.json ties the head to the embedding, but {HEAD} differs from"
            f" {embedding}: set tie_word_embeddings to false"
        )


def read_tree(
    files: TensorReader, model: ModelConfig, prefix: str, shardings: Any, dtype: Any
) -> Any:
    """Returns the parameters of a model from files that `check_tensors` has checked, in our tree.

    Args:
      prefix: as `check_tensors` returned it.
      shardings: our tree of parameters, with the sharding of each.
      dtype: of all parameters; float32 holds every readable dtype exactly.

    Raises:
      ValueError: tensors with NaN or infinities, all that this process reads.
    """
    flat, structure = jax.tree_util.tree_flatten_with_path(shardings)
    paths = [jax.tree_util.keystr(keys, simple=True, separator="/") for keys, _ in flat]
    shapes, where = _shapes_of(model, paths), places(model)
    damaged: dict[str, None] = {}

    def read(name: str, index: Slices) -> np.ndarray:
        tensor = files.read(name, index)
        if not np.isfinite(tensor).all():
            damaged[name] = None
        return tensor

    leaves = []
    shown = tqdm(paths, desc="reading", unit="parameter", disable=None)
    for path, (_, sharding) in zip(shown, flat, strict=True):

        def part(index: Any, path: str = path) -> np.ndarray:
            return read_leaf(where[path], shapes, index, prefix, read, dtype)

        leaf = jax.make_array_from_callback(shapes[path], sharding, part)
        leaves.append(jax.block_until_ready(leaf))  # so that one parameter is read at a time
    if damaged:
        raise not_finite(files.folder, damaged)
    return jax.tree.unflatten(structure, leaves)


def not_finite(where: Path | str, names: Iterable[str]) -> ValueError:
    """Returns the error for tensors, or parameters, with NaN or infinities."""
    return ValueError(f"{where} has NaN or infinities in {grouped(names)}")


def _shapes_of(model: ModelConfig, paths: Sequence[str]) -> dict[str, tuple[int, ...]]:
    shapes = parameter_shapes(model)
    assert shapes.keys() == set(paths), shapes.keys() ^ set(paths)
    return shapes
