"""The architectures of Hugging Face that are this decoder, as tables.

Each has the values of keys that a config.json may leave out (those of the library transformers),
and the values of keys that decide what the model computes and that this decoder does not have: soft
caps, for example, or biases of other linears. Such a config is refused by the name of its key.
Keys that do not change the logits (dropout rates, ids of special tokens) are listed.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from fp8jax.lm.interop.layer_kinds_json import (
    FULL,
    GEMMA_WINDOWS,
    LATER_WINDOWS,
    OLMO_WINDOWS,
    ONE_WINDOW,
    SOME_WITHOUT_POSITIONS,
    Layers,
)
from fp8jax.lm.model.rope import Linear, Llama3, LongRope, Yarn
from fp8jax.lookup import brief, lookup, unknown

# Keys that change nothing of what the model computes for a row of tokens.
WITHOUT_EFFECT = frozenset(
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
        "compression_config",
        "quantization_config",
        "return_dict",
        "task_specific_params",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)

# Keys of any family -> the values that mean what this decoder computes.
ONLY: dict[str, tuple[Any, ...]] = {
    "auto_map": (None,),  # names code of the folder, which is never executed
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "is_causal": (True,),
}

# What of a model that no family here has, by keys of its config.json.
_REFUSED = {
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size"),
    "multi-head latent attention": ("kv_lora_rank", "q_lora_rank"),
    "vision": ("vision_config", "image_token_id", "image_token_index"),
    "audio": ("audio_config",),
    "soft caps of scores or logits": ("attn_logit_softcapping", "final_logit_softcapping"),
    "layers that are no attention": ("ssm_cfg", "state_size", "mamba_d_state", "linear_num_heads"),
}

_ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu"}
_GEMMA_ACTIVATIONS = {"gelu_pytorch_tanh": "geglu_tanh"}
GPT2_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}


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
      layers: the kinds of its layers.
      local_theta: key of the base of windowed layers; "" for that of full layers, which are scaled
        alone; None where all layers are rotated alike.
      scaled: how RoPE may be scaled.
      partial: whether RoPE may rotate a part of each head.
      divisible: whether transformers refuses a width that the number of heads does not divide.
    """

    architecture: str
    model_type: str
    sizes: Mapping[str, str]
    defaults: Mapping[str, Any]
    only: Mapping[str, tuple[Any, ...]]
    without_effect: frozenset[str] = frozenset()
    fields: Mapping[str, Any]
    layers: Layers = FULL
    local_theta: str | None = None
    scaled: tuple[type, ...] = (Linear, Llama3, Yarn)
    partial: bool = False
    divisible: bool = False

    @property
    def activation(self) -> tuple[str, Mapping[str, str]]:
        """The key of the activation, and its value -> ours."""
        if "hidden_activation" in self.defaults:
            return "hidden_activation", _GEMMA_ACTIVATIONS
        return "hidden_act", _ACTIVATIONS


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
_OLMO = _LLAMA | dict(rms_norm_eps=1e-5)
_OLMO_FIELDS = dict(norm_at="after", qk_norm=True, qk_norm_joint=True)
_PHI_3_CODE = {
    "AutoConfig": "configuration_phi3.Phi3Config",
    "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
}
_GEMMA = {key: value for key, value in _LLAMA.items() if key != "hidden_act"} | dict(
    num_key_value_heads=4,
    head_dim=256,
    hidden_activation="gelu_pytorch_tanh",
    tie_word_embeddings=True,
    rope_theta=1e6,
    rope_local_base_freq=1e4,
    query_pre_attn_scalar=256,
    sliding_window=4096,
    sliding_window_pattern=6,
    layer_types=None,
)

_ALL = (
    Family(
        architecture="LlamaForCausalLM",
        model_type="llama",
        sizes=_SIZES,
        defaults=_LLAMA,
        only=_NO_BIAS | dict(sliding_window=(None,)),
        fields={},
        divisible=True,
    ),
    Family(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        sizes=_SIZES,
        defaults=_QWEN,
        only={},
        fields=dict(biases="qkv"),
        layers=LATER_WINDOWS,
    ),
    Family(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        sizes=_SIZES,
        defaults=_QWEN | dict(head_dim=128),
        only=_NO_BIAS,
        fields=dict(qk_norm=True),
        layers=LATER_WINDOWS,
    ),
    Family(
        architecture="MistralForCausalLM",
        model_type="mistral",
        sizes=_SIZES,
        defaults=_LLAMA | dict(num_key_value_heads=8, sliding_window=4096),
        only=_NO_BIAS,
        fields={},
        layers=ONE_WINDOW,
    ),
    Family(
        architecture="SmolLM3ForCausalLM",
        model_type="smollm3",
        sizes=_SIZES,
        defaults=_LLAMA
        | dict(
            num_key_value_heads=4,
            tie_word_embeddings=True,
            rope_theta=2e6,
            use_sliding_window=False,
            sliding_window=None,
            no_rope_layers=None,
            no_rope_layer_interval=4,
            layer_types=None,
        ),
        only=_NO_BIAS,
        without_effect=frozenset({"max_window_layers"}),
        fields={},
        layers=SOME_WITHOUT_POSITIONS,
    ),
    Family(
        architecture="Phi3ForCausalLM",
        model_type="phi3",
        sizes=_SIZES,
        defaults=_LLAMA
        | dict(rms_norm_eps=1e-5, sliding_window=None, original_max_position_embeddings=4096),
        # Folders that are older than the class in transformers name the same code as their own.
        only=_NO_BIAS
        | dict(auto_map=(None, _PHI_3_CODE))
        | dict(full_attn_mod=(1,), interpolate_factor=(1,), lm_head_bias=(False,)),
        without_effect=frozenset({"embd_pdrop", "resid_pdrop"}),
        fields=dict(joined_projections=True),
        layers=ONE_WINDOW,
        scaled=(LongRope,),
        partial=True,
    ),
    Family(
        architecture="Olmo2ForCausalLM",
        model_type="olmo2",
        sizes=_SIZES,
        defaults=_OLMO,
        only=_NO_BIAS,
        fields=_OLMO_FIELDS,
    ),
    Family(
        architecture="Olmo3ForCausalLM",
        model_type="olmo3",
        sizes=_SIZES,
        defaults=_OLMO | dict(rope_theta=5e5, sliding_window=4096, layer_types=None),
        only=_NO_BIAS,
        fields=_OLMO_FIELDS,
        layers=OLMO_WINDOWS,
        local_theta="",
    ),
    Family(
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        sizes=_SIZES,
        defaults=_GEMMA,
        only=_NO_BIAS
        | dict(
            attn_logit_softcapping=(None,),
            final_logit_softcapping=(None,),
            use_bidirectional_attention=(False, None),
        ),
        without_effect=frozenset({"cache_implementation", "_sliding_window_pattern"}),
        fields=dict(norm="rms_offset", norm_at="both", qk_norm=True, scale_embedding=True),
        layers=GEMMA_WINDOWS,
        local_theta="rope_local_base_freq",
        divisible=True,
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


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """Returns the family that a config.json names.

    Raises:
      ValueError: it names none, several, or one that is not supported; the message lists those
        that are, and says what of the model is the reason, where a key does.
    """
    try:
        return _named_family(config, where)
    except ValueError as error:
        reasons = [
            f"{what} ({key}={brief(config[key])})"
            for what, keys in _REFUSED.items()
            for key in [key for key in keys if key in config and config[key] is not None][:1]
        ]
        if not reasons:
            raise
        raise ValueError(f"{error}; this model has {' and '.join(reasons)}") from error


def _named_family(config: Mapping[str, Any], where: str) -> Family:
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
