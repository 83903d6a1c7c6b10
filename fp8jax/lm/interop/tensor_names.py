"""Where each parameter of ours lies in a Hugging Face checkpoint: one table for each family.

Our layers are one stack, [n_layers, ...]; theirs are tensors of their own. Our kernels lie
[in, out], as GPT-2's do; those of torch's Linear lie [out, in]. GPT-2 and Phi-3 join query, key and
value along their outputs, Phi-3 also gate and up.

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
      joined: paths of ours whose outputs theirs has one after the other; () if it has ours only.
    """

    ours: str
    theirs: str
    transposed: bool = False
    joined: tuple[str, ...] = ()

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


def _joined_linear(at: str, theirs: str, *ours: str, transposed: bool) -> list[Place]:
    """Weight and bias of one linear of theirs that does what several of ours do."""
    rows = []
    for leaf, name in (("kernel", "weight"), ("bias", "bias")):
        paths = tuple(f"layers/{path}/{leaf}" for path in ours)
        for path in paths:
            turned = transposed and leaf == "kernel"
            rows.append(Place(path, f"{at}{theirs}.{name}", transposed=turned, joined=paths))
    return rows


def _conv1d(at: str, ours: str, theirs: str) -> list[Place]:
    """Weight [in, out] and bias of GPT-2's linears."""
    return _joined_linear(at, theirs, ours, transposed=False)


def _norm(ours: str, theirs: str) -> list[Place]:
    return [Place(f"{ours}/scale", f"{theirs}.weight"), Place(f"{ours}/bias", f"{theirs}.bias")]


_AT = f"{{prefix}}layers.{LAYER}."  # a layer of Llama
_QKV = {f"attention/{name}": f"self_attn.{name}_proj" for name in "qkv"}
_GATE_UP = {f"mlp/{name}": f"mlp.{name}_proj" for name in ("gate", "up")}
# Our norms -> theirs, by the place of the norms.
_NORMS = {
    "before": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "after": {
        "attention_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
    "both": {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
}


def _llama(norm_at: str, joined: bool) -> Names:
    """The table of Llama and its kin."""
    norms = _NORMS[norm_at] | {f"attention/{n}": f"self_attn.{n}" for n in ("q_norm", "k_norm")}
    if joined:
        inputs = [
            *_joined_linear(_AT, "self_attn.qkv_proj", *_QKV, transposed=True),
            *_joined_linear(_AT, "mlp.gate_up_proj", *_GATE_UP, transposed=True),
        ]
    else:
        inputs = _linears(_AT, _QKV | _GATE_UP)
    outputs = {"attention/o": "self_attn.o_proj", "mlp/down": "mlp.down_proj"}
    return Names(
        prefix="model.",
        places=(
            Place("embedding", "{prefix}embed_tokens.weight"),
            *(
                row
                for ours, theirs in norms.items()
                for row in _norm(f"layers/{ours}", _AT + theirs)
            ),
            *inputs,
            *_linears(_AT, outputs),
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
        *_joined_linear(_LAYER_OF_GPT2, "attn.c_attn", *_QKV, transposed=False),
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
    return _GPT2 if model.learned_positions else _llama(model.norm_at, model.joined_projections)


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
        shape = (*shape[:-1], sum(ours[part][-1] for part in place.joined or (path,)))
        shape = shape[::-1] if place.transposed else shape
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
    shapes: Mapping[str, tuple[int, ...]],
    index: Slices,
    prefix: str,
    read: Callable[[str, Slices], np.ndarray],
    dtype: Any,
) -> np.ndarray:
    """Returns the part `index` of a parameter of ours, from the tensors that hold it.

    Args:
      shapes: of all parameters of ours.
      index: a slice for each axis of this one.
      read: (name, slices) -> that part of a tensor.
      dtype: of the result; a tensor of another dtype is cast.
    """
    sizes = shapes[place.ours]
    bounds = [part.indices(size)[:2] for part, size in zip(index, sizes, strict=True)]
    before = place.joined[: place.joined.index(place.ours)] if place.joined else ()
    shift = sum(shapes[path][-1] for path in before)  # of our outputs in theirs
    theirs = (*(slice(*b) for b in bounds[:-1]), slice(*(b + shift for b in bounds[-1])))
    if not place.per_layer:
        return _read_tensor(place, place.name(0, prefix), theirs, read).astype(dtype)
    out = np.empty([end - begin for begin, end in bounds], dtype)
    for row, layer in enumerate(range(*bounds[0])):
        out[row] = _read_tensor(place, place.name(layer, prefix), theirs[1:], read)
    return out


def _read_tensor(place: Place, name: str, index: Slices, read) -> np.ndarray:
    """Reads one tensor's part, in the order of our axes."""
    return read(name, index[::-1]).T if place.transposed else read(name, index)


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
        order = parts[0][1].joined or (parts[0][0],)
        for path, _, layer in sorted(parts, key=lambda part: order.index(part[0])):
            array = leaf(path)
            arrays.append(np.asarray(array if layer is None else array[layer]))
        whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=-1)
        return whole.T if parts[0][1].transposed else whole

    return {name: lambda parts=parts: make(parts) for name, parts in made.items()}  # type: ignore[misc]
