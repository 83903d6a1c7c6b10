"""From the config.json of a Hugging Face folder to a `ModelConfig`, and back.

`FAMILIES` has the architectures. Each has the values of keys that a config.json may leave out
(those of the library transformers), and the values of keys that decide what the model computes and
that this decoder does not have: sliding windows, for example, or biases of other linears. Such a
config is refused by the name of its key. Keys that do not change the logits (dropout rates, ids of
special tokens) are listed. Keys that are not listed are not read; `unknown_keys` names them.

RoPE is read in the form of transformers 5, `rope_parameters`, and in the older one, `rope_scaling`
beside `rope_theta`. rope_json.py has both.
"""

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8jax.lm.interop.rope_json import read_rope, write_rope
from fp8jax.lm.model.config import ModelConfig
from fp8jax.lookup import brief, lookup, unknown

# Keys that change nothing of what the model computes for a row of tokens.
_WITHOUT_EFFECT = frozenset(
    {
        "_attn_implementation_autoset",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "max_position_embeddings",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "quantization_config",
        "return_dict",
        "task_specific_params",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)

# Keys of any family -> the values that mean what this decoder computes.
_ONLY: dict[str, tuple[Any, ...]] = {
    "auto_map": (None,),  # names code of the folder, which is never executed
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
}

_ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu"}
_GPT2_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture.

    Attributes:
      architecture: the class of transformers, as config.json names it.
      model_type: config.json's other name of it.
      sizes: our field -> key; a config.json has all these keys.
      defaults: key -> its value where a config.json leaves it out.
      only: key -> the values that this decoder supports, besides those of all families.
      without_effect: keys that change no logits, besides those of all families.
      fields: fields of `ModelConfig` that all models of the family share.
    """

    architecture: str
    model_type: str
    sizes: Mapping[str, str]
    defaults: Mapping[str, Any]
    only: Mapping[str, tuple[Any, ...]]
    without_effect: frozenset[str] = frozenset()
    fields: Mapping[str, Any]


_SIZES = dict(
    vocab_size="vocab_size",
    d_model="hidden_size",
    n_layers="num_hidden_layers",
    n_heads="num_attention_heads",
    d_ff="intermediate_size",
)
_ROPE = dict(rope_parameters=None, rope_scaling=None, rope_theta=1e4, partial_rotary_factor=None)
_LLAMA = dict(
    num_key_value_heads=None,
    head_dim=None,
    hidden_act="silu",
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    **_ROPE,
)
_QWEN = _LLAMA | dict(
    num_key_value_heads=32,
    use_sliding_window=False,
    sliding_window=4096,
    max_window_layers=28,
    layer_types=None,
)
_NO_BIAS = dict(attention_bias=(False,), mlp_bias=(False,))

_ALL = (
    Family(
        architecture="LlamaForCausalLM",
        model_type="llama",
        sizes=_SIZES,
        defaults=_LLAMA,
        only=_NO_BIAS | dict(sliding_window=(None,)),
        fields={},
    ),
    Family(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        sizes=_SIZES,
        defaults=_QWEN,
        only={},
        fields=dict(biases="qkv"),
    ),
    Family(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        sizes=_SIZES,
        defaults=_QWEN | dict(head_dim=128),
        only=_NO_BIAS,
        fields=dict(qk_norm=True),
    ),
    Family(
        architecture="GPT2LMHeadModel",
        model_type="gpt2",
        sizes=dict(
            vocab_size="vocab_size",
            d_model="n_embd",
            n_layers="n_layer",
            n_heads="n_head",
            learned_positions="n_positions",
        ),
        defaults=dict(
            n_inner=None,
            activation_function="gelu_new",
            layer_norm_epsilon=1e-5,
            tie_word_embeddings=True,
        ),
        only=dict(scale_attn_weights=(True,), scale_attn_by_inverse_layer_idx=(False,)),
        without_effect=frozenset(
            {
                "attn_pdrop",
                "embd_pdrop",
                "n_ctx",
                "reorder_and_upcast_attn",
                "resid_pdrop",
                "summary_activation",
                "summary_first_dropout",
                "summary_proj_to_labels",
                "summary_type",
                "summary_use_proj",
            }
        ),
        fields=dict(norm="layer", biases="all"),
    ),
)
FAMILIES = {family.architecture: family for family in _ALL}


def load_json(path: Path) -> dict[str, Any]:
    """Returns the object that a JSON file holds; ValueError unless it can be read and is one."""
    try:
        parsed = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:  # too many levels
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(parsed).__name__}")
    return parsed


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """Returns the family that a config.json names.

    Raises:
      ValueError: it names none, several, or one that is not supported; the message lists those
        that are.
    """
    named = config["architectures"] if "architectures" in config else None
    if named is None:  # transformers writes null for a config without a model
        types = {family.model_type: family for family in _ALL}
        named = config["model_type"] if "model_type" in config else None
        return _looked_up("model_type", named, types, where)
    if not isinstance(named, list) or len(named) != 1:
        raise ValueError(f"{where}: architectures must name one class, got {brief(named)}")
    return _looked_up("architecture", named[0], FAMILIES, where)


def _looked_up(kind: str, name: Any, table: Mapping[str, Family], where: str) -> Family:
    try:
        if not isinstance(name, str):
            raise unknown(kind, name, table)
        return lookup(kind, name, table)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


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
    if family.model_type == "gpt2":
        fields = _gpt2_fields(full, sizes, where)
    else:
        fields = _llama_fields(full, sizes, where)
    tied = _true_or_false(full, "tie_word_embeddings", where)
    everything: dict[str, Any] = {**sizes, **family.fields, **fields, "tie_embeddings": tied}
    try:
        return ModelConfig(**everything)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _llama_fields(config: Mapping[str, Any], sizes: Mapping[str, int], where: str) -> dict:
    heads = sizes["n_heads"]
    theta, scaling = read_rope(config, where)
    return dict(
        n_kv_heads=_whole_or(config, "num_key_value_heads", heads, where),
        head_dim=_head_dim(config, "head_dim", sizes, where),
        norm_eps=_number(config, "rms_norm_eps", where),
        mlp=_activation(config, "hidden_act", _ACTIVATIONS, where),
        rope_theta=theta,
        rope_scaling=scaling,
    )


def _gpt2_fields(config: Mapping[str, Any], sizes: Mapping[str, int], where: str) -> dict:
    return dict(
        n_kv_heads=sizes["n_heads"],
        head_dim=_head_dim({**config, "head_dim": None}, "head_dim", sizes, where),
        d_ff=_whole_or(config, "n_inner", 4 * sizes["d_model"], where),
        norm_eps=_number(config, "layer_norm_epsilon", where),
        mlp=_activation(config, "activation_function", _GPT2_ACTIVATIONS, where),
    )


def _check_keys(family: Family, config: Mapping[str, Any], where: str) -> None:
    """Refuses values of keys that change what the model computes."""
    if missing := [key for key in family.sizes.values() if key not in config]:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    only = {**_ONLY, **family.only}
    for key, values in only.items():
        if key in config and config[key] not in values:
            supported = " or ".join(json.dumps(value) for value in values)
            raise ValueError(
                f"{where}: {key}={json.dumps(config[key])[:100]} is not supported for "
                f"{family.architecture}, only {supported}"
            )
    _refuse_windows(config, where)


def unknown_keys(config: Mapping[str, Any], where: str = "config.json") -> list[str]:
    """Returns the keys that are not read, and of which nobody here knows what they do."""
    family = family_of(config, where)
    only = {**_ONLY, **family.only}
    known = {
        *_WITHOUT_EFFECT,
        *only,
        *family.without_effect,
        *family.defaults,
        *family.sizes.values(),
    }
    return sorted(config.keys() - known)


def _refuse_windows(config: Mapping[str, Any], where: str) -> None:
    """Raises ValueError if a layer attends to a window of the row only (Qwen)."""
    types = config["layer_types"] if "layer_types" in config else None
    if types is not None and not (
        isinstance(types, list) and all(isinstance(name, str) for name in types)
    ):
        raise ValueError(f"{where}: layer_types must be names or null, got {brief(types)}")
    if types is not None and set(types) != {"full_attention"}:
        raise ValueError(
            f"{where}: layer_types has {', '.join(sorted(set(types)))}; only full_attention is"
            " supported"
        )
    window = config["sliding_window"] if "sliding_window" in config else None
    uses = "use_sliding_window" in config and config["use_sliding_window"]
    if types is None and uses and window is not None:
        first = config["max_window_layers"] if "max_window_layers" in config else 28
        if type(first) is not int:
            raise ValueError(
                f"{where}: max_window_layers must be a whole number, got {brief(first)}"
            )
        if first < config["num_hidden_layers"]:
            raise ValueError(
                f"{where}: use_sliding_window=true: the layers from max_window_layers={first} on"
                f" would attend to sliding_window={window} tokens only, which is not supported"
            )


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
    windows = {} if family.model_type == "llama" else {"use_sliding_window": False}
    # transformers before version 5, and servers that use it, read these two instead.
    older = {"rope_theta": model.rope_theta} | (
        {} if model.rope_scaling is None else {"rope_scaling": rope}
    )
    return (
        common
        | windows
        | older
        | {
            "num_key_value_heads": model.n_kv_heads,
            "head_dim": model.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": model.norm_eps,
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
        mlps = _GPT2_ACTIVATIONS.values() if gpt2 else ("swiglu", "smooth_swiglu")
        fields = dict(norm="rms", biases="none", qk_norm=False) | dict(family.fields)
        same = all(getattr(model, name) == value for name, value in fields.items())
        heads = (
            model.n_heads * model.head_dim == model.d_model and model.n_kv_heads == model.n_heads
        )
        return (
            same
            and model.mlp in mlps
            and gpt2 == bool(model.learned_positions)
            and (heads or not gpt2)
        )

    for family in _ALL:
        if is_family(family):
            return family
    names = ("norm", "mlp", "biases", "qk_norm", "learned_positions", "n_kv_heads", "head_dim")
    fields = ", ".join(f"{name}={getattr(model, name)!r}" for name in names)
    raise ValueError(
        f"no supported architecture of Hugging Face computes what this model does: {fields}."
        f" There are: {', '.join(FAMILIES)}"
    )
