"""Where each parameter of ours lies in a Hugging Face checkpoint: one table for each family.

Our layers are one stack, [n_layers, ...]; theirs are tensors of their own. Our kernels lie
[in, out], as GPT-2's do; those of torch's Linear lie [out, in]. GPT-2 joins query, key and value.

A row whose parameter a model does not have (a bias, a norm of queries, a head of its own) is left
out. Names are those of the class with a language-model head. Checkpoints of the bare model lack
its prefix (`Family prefix`), as the published GPT-2 does.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from fp8jax.lm.model.config import ModelConfig
from fp8jax.lm.model.transformer import Transformer, abstract_variables

LAYER = "{layer}"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a parameter lies.

    Attributes:
      ours: path in our tree; under "layers/" the leaf has a leading axis of layers.
      theirs: name of the tensor, with `LAYER` for the number of the layer.
      transposed: whether theirs lies [out, in].
      part: (i, n): it is the i-th of n equal parts of theirs along its last axis.
    """

    ours: str
    theirs: str
    transposed: bool = False
    part: tuple[int, int] = (0, 1)

    def name(self, layer: int, prefix: str) -> str:
        """The tensor's name in a checkpoint whose names begin with `prefix`."""
        return self.theirs.replace(LAYER, str(layer)).replace("{prefix}", prefix)

    @property
    def per_layer(self) -> bool:
        return LAYER in self.theirs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Names:
    """The table of a family.

    Attributes:
      prefix: what the names of the bare model begin with.
      places: one for each parameter.
      buffers: patterns of tensors that old versions stored and that are computed, not read.
    """

    prefix: str
    places: tuple[Place, ...]
    buffers: tuple[str, ...]


def _linears(at: str, linears: Mapping[str, str]) -> list[Place]:
    """Weights [out, in] and biases of torch's Linear, for path in our layer -> name."""
    rows = []
    for ours, theirs in linears.items():
        rows.append(Place(f"layers/{ours}/kernel", f"{at}{theirs}.weight", transposed=True))
        rows.append(Place(f"layers/{ours}/bias", f"{at}{theirs}.bias"))
    return rows


def _conv1d(at: str, ours: str, theirs: str, part: tuple[int, int] = (0, 1)) -> list[Place]:
    """Weight [in, out] and bias of GPT-2's linears."""
    return [
        Place(f"layers/{ours}/kernel", f"{at}{theirs}.weight", part=part),
        Place(f"layers/{ours}/bias", f"{at}{theirs}.bias", part=part),
    ]


def _norm(ours: str, theirs: str) -> list[Place]:
    return [Place(f"{ours}/scale", f"{theirs}.weight"), Place(f"{ours}/bias", f"{theirs}.bias")]


_LAYER_OF_LLAMA = f"{{prefix}}layers.{LAYER}."
_LLAMA = Names(
    prefix="model.",
    places=(
        Place("embedding", "{prefix}embed_tokens.weight"),
        *_norm("layers/attention_norm", f"{_LAYER_OF_LLAMA}input_layernorm"),
        *_linears(
            _LAYER_OF_LLAMA,
            {
                "attention/q": "self_attn.q_proj",
                "attention/k": "self_attn.k_proj",
                "attention/v": "self_attn.v_proj",
                "attention/o": "self_attn.o_proj",
                "mlp/gate": "mlp.gate_proj",
                "mlp/up": "mlp.up_proj",
                "mlp/down": "mlp.down_proj",
            },
        ),
        *_norm("layers/attention/q_norm", f"{_LAYER_OF_LLAMA}self_attn.q_norm"),
        *_norm("layers/attention/k_norm", f"{_LAYER_OF_LLAMA}self_attn.k_norm"),
        *_norm("layers/mlp_norm", f"{_LAYER_OF_LLAMA}post_attention_layernorm"),
        *_norm("final_norm", "{prefix}norm"),
        Place("lm_head/kernel", "lm_head.weight", transposed=True),
    ),
    buffers=(r"(.*\.)?rotary_emb\.inv_freq",),
)

_LAYER_OF_GPT2 = f"{{prefix}}h.{LAYER}."
_GPT2 = Names(
    prefix="transformer.",
    places=(
        Place("embedding", "{prefix}wte.weight"),
        Place("position_embedding", "{prefix}wpe.weight"),
        *_norm("layers/attention_norm", f"{_LAYER_OF_GPT2}ln_1"),
        *_conv1d(_LAYER_OF_GPT2, "attention/q", "attn.c_attn", part=(0, 3)),
        *_conv1d(_LAYER_OF_GPT2, "attention/k", "attn.c_attn", part=(1, 3)),
        *_conv1d(_LAYER_OF_GPT2, "attention/v", "attn.c_attn", part=(2, 3)),
        *_conv1d(_LAYER_OF_GPT2, "attention/o", "attn.c_proj"),
        *_norm("layers/mlp_norm", f"{_LAYER_OF_GPT2}ln_2"),
        *_conv1d(_LAYER_OF_GPT2, "mlp/up", "mlp.c_fc"),
        *_conv1d(_LAYER_OF_GPT2, "mlp/down", "mlp.c_proj"),
        *_norm("final_norm", "{prefix}ln_f"),
        Place("lm_head/kernel", "lm_head.weight", transposed=True),
    ),
    buffers=(r"(.*\.)?h\.\d+\.attn\.(bias|masked_bias)",),
)

HEAD = "lm_head.weight"  # a checkpoint of a tied model may hold it too, equal to the embedding


def names_for(model: ModelConfig) -> Names:
    """Returns the table of a model's family."""
    return _GPT2 if model.learned_positions else _LLAMA


def places(model: ModelConfig) -> dict[str, Place]:
    """Returns path of ours -> where it lies, for each parameter of a model."""
    table = {place.ours: place for place in names_for(model).places}
    return {path: table[path] for path in parameter_shapes(model)}


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns path -> shape of our parameters."""
    params = nn.meta.unbox(abstract_variables(Transformer(model))["params"])
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(k, simple=True, separator="/"): leaf.shape for k, leaf in leaves}


def tensor_shapes(model: ModelConfig, prefix: str) -> dict[str, tuple[int, ...]]:
    """Returns name -> shape of the tensors that a checkpoint of the model must have."""
    shapes: dict[str, tuple[int, ...]] = {}
    ours = parameter_shapes(model)
    for path, place in places(model).items():
        shape = ours[path][1:] if place.per_layer else ours[path]
        shape = shape[::-1] if place.transposed else shape
        shape = (*shape[:-1], shape[-1] * place.part[1])
        for layer in range(model.n_layers if place.per_layer else 1):
            shapes[place.name(layer, prefix)] = shape
    return shapes


def find_prefix(model: ModelConfig, names: Iterable[str]) -> str:
    """Returns what the names of a checkpoint begin with: its family's prefix, or nothing."""
    prefix = names_for(model).prefix
    return prefix if any(name.startswith(prefix) for name in names) else ""


def is_buffer(model: ModelConfig, name: str) -> bool:
    """Whether a tensor of a checkpoint is computed, not read."""
    return any(re.fullmatch(pattern, name) for pattern in names_for(model).buffers)


Slices = tuple[slice, ...]


def read_leaf(
    place: Place,
    shape: tuple[int, ...],
    index: Slices,
    prefix: str,
    read: Callable[[str, Slices], np.ndarray],
    dtype: Any,
) -> np.ndarray:
    """Returns the part `index` of a parameter of ours, from the tensors that hold it.

    Args:
      shape: the whole parameter's.
      index: a slice for each of its axes.
      read: (name, slices) -> that part of a tensor.
      dtype: of the result; a tensor of another dtype is cast.
    """
    bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    if not place.per_layer:
        return _read_tensor(place, place.name(0, prefix), shape, bounds, read).astype(dtype)
    out = np.empty([end - begin for begin, end in bounds], dtype)
    for row, layer in enumerate(range(*bounds[0])):
        name = place.name(layer, prefix)
        out[row] = _read_tensor(place, name, shape[1:], bounds[1:], read)
    return out


def _read_tensor(place, name, shape, bounds, read) -> np.ndarray:
    """Reads one tensor's part, in the order of our axes."""
    if place.transposed:
        return read(name, tuple(slice(*b) for b in reversed(bounds))).T
    shift = place.part[0] * shape[-1]
    *rest, (begin, end) = bounds
    return read(name, (*(slice(*b) for b in rest), slice(begin + shift, end + shift)))


def tensors_of(
    model: ModelConfig, leaf: Callable[[str], Any], prefix: str
) -> dict[str, Callable[[], np.ndarray]]:
    """Returns name -> a function that makes the tensor, for all tensors of a checkpoint.

    Args:
      leaf: path -> our parameter, an array whose layers can be indexed.
    """
    made: dict[str, list[tuple[str, Place, int | None]]] = {}
    for path, place in places(model).items():
        for layer in range(model.n_layers) if place.per_layer else [None]:
            name = place.name(0 if layer is None else layer, prefix)
            made.setdefault(name, []).append((path, place, layer))

    def make(parts: list[tuple[str, Place, int | None]]) -> np.ndarray:
        arrays = []
        for path, place, layer in sorted(parts, key=lambda part: part[1].part):
            array = leaf(path)
            array = np.asarray(array if layer is None else array[layer])
            arrays.append(array.T if place.transposed else array)
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=-1)

    return {name: lambda parts=parts: make(parts) for name, parts in made.items()}  # type: ignore[misc]
