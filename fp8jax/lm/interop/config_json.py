"""From the config.json of a Hugging Face folder to a `ModelConfig`, and back.

families.py has the architectures, and which keys they read. Keys that are not listed are not read;
`unknown_keys` names them.

RoPE is read in the form of transformers 5, `rope_parameters`, and in the older one, `rope_scaling`
beside `rope_theta`. rope_json.py has both. layer_kinds_json.py has the layers with windows.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8jax.lm.interop.families import (
    FAMILIES,
    GPT2_ACTIVATIONS,
    ONLY,
    WITHOUT_EFFECT,
    Family,
    family_of,
)
from fp8jax.lm.interop.layer_kinds_json import (
    read_layers,
)
from fp8jax.lm.interop.rope_json import ORIGINAL_LENGTH, read_rope, read_ropes, write_rope
from fp8jax.lm.model.config import ModelConfig, too_deep
from fp8jax.lm.model.rope import LongRope
from fp8jax.lookup import brief

# Fields of models of which no family says otherwise.
_PLAIN = dict(
    norm="rms",
    norm_at="before",
    biases="none",
    qk_norm=False,
    qk_norm_joint=False,
    joined_projections=False,
    scale_embedding=False,
)


def load_json(path: Path) -> dict[str, Any]:
    """Returns the object that a JSON file holds; ValueError unless it can be read and is one."""
    try:
        parsed = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:  # too many levels
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(parsed).__name__}")
    return parsed


def to_model_config(config: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Returns the shape that a config.json describes.

    Args:
      config: the parsed file.
      where: its path, for messages.

    Raises:
      ValueError: an unknown architecture, or a key whose value this decoder does not support; the
        message has the key and what is supported. Keys that are missing or of another type.
    """
    family = family_of(config, where)
    _check_keys(family, config, where)
    full = {**family.defaults, **config}
    sizes = {field: _whole(full, key, where) for field, key in family.sizes.items()}
    if said := too_deep(family.sizes["n_layers"], sizes["n_layers"]):
        raise ValueError(f"{where}: {said}")
    if family.model_type == "gpt2":
        fields = _gpt2_fields(full, sizes, where)
    else:
        fields = _llama_fields(family, full, sizes, where)
    tied = _true_or_false(full, "tie_word_embeddings", where)
    everything: dict[str, Any] = {**sizes, **family.fields, **fields, "tie_embeddings": tied}
    try:
        return ModelConfig(**everything)
    except ValueError as error:
        field = str(error).partition("=")[0]
        named = field in family.sizes and family.sizes[field] != field
        key = f" ({field} is {family.sizes[field]})" if named else ""
        raise ValueError(f"{where}: {error}{key}") from error


def _llama_fields(
    family: Family, config: Mapping[str, Any], sizes: Mapping[str, int], where: str
) -> dict:
    heads = sizes["n_heads"]
    pattern, window = read_layers(family.layers, config, sizes["n_layers"], where)
    head_dim = _head_dim(config, "head_dim", sizes, where)
    if family.local_theta is None:
        rope, local = read_rope(config, where), None
    else:
        rope, local = read_ropes(config, family.local_theta or None, where)
    if rope.scaling is not None and not isinstance(rope.scaling, family.scaled):
        kinds = " or ".join(kind.__name__ for kind in family.scaled)
        raise ValueError(
            f"{where}: RoPE scaled by {type(rope.scaling).__name__} is not supported for "
            f"{family.architecture}, only {kinds}"
        )
    if rope.part != 1 and not family.partial:
        raise ValueError(f"{where}: partial_rotary_factor={rope.part} is not supported, only 1")
    apart = "w" in pattern and local is not None
    apart = apart and (local != rope.theta or rope.scaling is not None)
    fields = dict(
        n_kv_heads=_whole_or(config, "num_key_value_heads", heads, where),
        head_dim=head_dim,
        norm_eps=_number(config, "rms_norm_eps", where),
        mlp=_activation(config, *family.activation, where),
        layer_pattern=pattern,
        window=window,
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        window_rope_theta=local if apart else 0.0,
        rotary_dim=0 if rope.part == 1 else int(head_dim * rope.part),
    )
    if "query_pre_attn_scalar" in family.defaults:
        scalar = _whole(config, "query_pre_attn_scalar", where)
        fields["query_scalar"] = 0 if scalar == head_dim else scalar
    return fields


def _gpt2_fields(config: Mapping[str, Any], sizes: Mapping[str, int], where: str) -> dict:
    return dict(
        n_kv_heads=sizes["n_heads"],
        head_dim=_head_dim({**config, "head_dim": None}, "head_dim", sizes, where),
        d_ff=_whole_or(config, "n_inner", 4 * sizes["d_model"], where),
        norm_eps=_number(config, "layer_norm_epsilon", where),
        mlp=_activation(config, "activation_function", GPT2_ACTIVATIONS, where),
    )


def _check_keys(family: Family, config: Mapping[str, Any], where: str) -> None:
    """Refuses values of keys that change what the model computes."""
    if missing := [key for key in family.sizes.values() if key not in config]:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    only = {**ONLY, **family.only}
    for key, values in only.items():
        if key in config and _without_tokenizer(key, config[key]) not in values:
            supported = " or ".join(json.dumps(value) for value in values)
            raise ValueError(
                f"{where}: {key}={json.dumps(config[key])[:100]} is not supported for "
                f"{family.architecture}, only {supported}"
            )


def _without_tokenizer(key: str, value: Any) -> Any:
    """Returns the value of a key; of `auto_map` without what it says of tokenizers."""
    if key != "auto_map" or not isinstance(value, Mapping):
        return value
    return {name: code for name, code in value.items() if name != "AutoTokenizer"} or None


def unknown_keys(config: Mapping[str, Any], where: str = "config.json") -> list[str]:
    """Returns the keys that are not read, and of which nobody here knows what they do."""
    family = family_of(config, where)
    only = {**ONLY, **family.only}
    known = {
        *WITHOUT_EFFECT,
        *only,
        *family.without_effect,
        *family.defaults,
        *family.sizes.values(),
        *({ORIGINAL_LENGTH} if "rope_parameters" in family.defaults else ()),
    }
    return sorted(config.keys() - known)


def _whole(config: Mapping[str, Any], key: str, where: str) -> int:
    value = config[key]
    if type(value) is not int or not 0 < value < 2**31:
        raise ValueError(
            f"{where}: {key} must be a positive whole number below 2^31, got {brief(value)}"
        )
    return value


def _whole_or(config: Mapping[str, Any], key: str, unset: int, where: str) -> int:
    return unset if config[key] is None else _whole(config, key, where)


def _number(config: Mapping[str, Any], key: str, where: str) -> float:
    value = config[key]
    if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{where}: {key} must be a number, got {brief(value)}")
    return float(value)


def _true_or_false(config: Mapping[str, Any], key: str, where: str) -> bool:
    value = config[key]
    if type(value) is not bool:
        raise ValueError(f"{where}: {key} must be true or false, got {brief(value)}")
    return value


def _head_dim(config: Mapping[str, Any], key: str, sizes: Mapping[str, int], where: str) -> int:
    if config[key] is not None:
        return _whole(config, key, where)
    width, heads = sizes["d_model"], sizes["n_heads"]
    if width % heads:
        raise ValueError(f"{where}: a width of {width} does not divide into {heads} heads")
    return width // heads


def _activation(config: Mapping[str, Any], key: str, names: Mapping[str, str], where: str) -> str:
    if not isinstance(config[key], str) or config[key] not in names:
        raise ValueError(
            f"{where}: {key}={brief(config[key])} is not supported, only {' or '.join(names)}"
        )
    return names[config[key]]


# Back ---------------------------------------------------------------------------------------------


def to_config_json(model: ModelConfig, *, max_length: int) -> dict[str, Any]:
    """Returns the config.json of a model, in the form of transformers 5, without dtype and tokens.

    Args:
      max_length: `max_position_embeddings` of a model with rotary positions: the longest rows it
        has seen. A scaling of RoPE raises it to what it extends.

    Raises:
      ValueError: no architecture of `FAMILIES` computes what this model does; the message says
        which fields.
    """
    family = family_for(model)
    common = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{key: getattr(model, field) for field, key in family.sizes.items()},
        "tie_word_embeddings": model.tie_embeddings,
    }
    if family.model_type == "gpt2":
        activation = {"gelu_tanh": "gelu_new", "gelu": "gelu"}[model.mlp]
        return common | {
            "n_inner": model.d_ff,
            "activation_function": activation,
            "layer_norm_epsilon": model.norm_eps,
        }
    rope, length = write_rope(model.rope_theta, model.rope_scaling, max_length)
    # transformers before version 5, and servers that use it, read these two instead.
    older: dict[str, Any] = {"rope_theta": model.rope_theta}
    if model.rope_scaling is not None:
        older["rope_scaling"] = rope
    if isinstance(model.rope_scaling, LongRope):  # Phi's classes take this one first
        older[ORIGINAL_LENGTH] = model.rope_scaling.original
    if family.local_theta is not None:
        local = model.window_rope_theta or model.rope_theta
        rope = {"full_attention": rope, "sliding_attention": write_rope(local, None, length)[0]}
        if family.local_theta:
            older[family.local_theta] = local
    if family.partial:
        older["partial_rotary_factor"] = (model.rotary_dim or model.head_dim) / model.head_dim
        rope["partial_rotary_factor"] = older["partial_rotary_factor"]
    key, activations = family.activation
    if "query_pre_attn_scalar" in family.defaults:
        older["query_pre_attn_scalar"] = model.query_scalar or model.head_dim
    return (
        common
        | family.layers.write(model)
        | older
        | {
            "num_key_value_heads": model.n_kv_heads,
            "head_dim": model.head_dim,
            key: next(iter(activations)),
            "rms_norm_eps": model.norm_eps,
            "pad_token_id": None,  # the default of some is an id that small vocabularies lack
            "max_position_embeddings": length,
            "rope_parameters": rope,
        }
    )


def family_for(model: ModelConfig) -> Family:
    """Returns the family that computes what a model does.

    Smooth-SwiGLU is SwiGLU there: it only changes how an input is quantized.

    Raises:
      ValueError: there is none.
    """

    def is_family(family: Family) -> bool:
        gpt2 = family.model_type == "gpt2"
        mlps = set((GPT2_ACTIVATIONS if gpt2 else family.activation[1]).values())
        mlps |= {"smooth_swiglu"} if "swiglu" in mlps else set()
        fields = {**_PLAIN, **family.fields}
        kinds = set(model.layer_kinds)
        heads = (
            model.n_heads * model.head_dim == model.d_model and model.n_kv_heads == model.n_heads
        )
        scalar = "query_pre_attn_scalar" in family.defaults
        return (
            all(getattr(model, name) == value for name, value in fields.items())
            and model.mlp in mlps
            and gpt2 == bool(model.learned_positions)
            and (heads or not gpt2)
            and (model.d_model % model.n_heads == 0 or not family.divisible)
            and kinds <= set(family.layers.kinds)
            and (family.layers.mixed or len(kinds) == 1)
            and (scalar or model.query_scalar in (0, model.head_dim))
            and (family.partial or model.rotary_dim in (0, model.head_dim))
            and (model.rope_scaling is None or isinstance(model.rope_scaling, family.scaled))
            and _has_windowed_rope(family, model)
        )

    for family in FAMILIES.values():
        if is_family(family):
            return family
    names = (*_PLAIN, "mlp", "learned_positions", "d_model", "n_heads", "n_kv_heads", "head_dim")
    names = (*names, "layer_pattern", "query_scalar", "rotary_dim", "window_rope_theta")
    fields = ", ".join(f"{name}={getattr(model, name)!r}" for name in names)
    raise ValueError(
        f"no supported architecture of Hugging Face computes what this model does: {fields}."
        f" There are: {', '.join(FAMILIES)}"
    )


def _has_windowed_rope(family: Family, model: ModelConfig) -> bool:
    """Whether the family rotates the windowed layers of a model as the model does."""
    if "w" not in model.layer_kinds:
        return True
    apart = bool(model.window_rope_theta)
    if family.local_theta is None:
        return not apart
    if not apart:  # as the other layers, which the family would leave unscaled
        return model.rope_scaling is None
    return bool(family.local_theta) or model.window_rope_theta == model.rope_theta
