"""config.json in and out: what is understood, what is refused by name."""

import dataclasses
import json
import math

import numpy as np
import pytest

from fp8jax.lm.interop import config_json as json_reader
from fp8jax.lm.interop import layer_kinds_json
from fp8jax.lm.interop.config_json import (
    family_for,
    load_json,
    to_config_json,
    to_model_config,
    unknown_keys,
)
from fp8jax.lm.interop.families import FAMILIES
from fp8jax.lm.interop.fp8_read import read_layout
from fp8jax.lm.model.models import MODELS
from fp8jax.lm.model.rope import ROPE_SCALINGS, Linear, Llama3, LongRope, Yarn
from tests.support.hf_folders import config_json

LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)

YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024)
LONGROPE = dict(rope_type="longrope", short_factor=[1.0, 1.5], long_factor=[1.0, 4.0], factor=4.0)

# Published files, without the keys that say nothing about the shape.
LLAMA_2 = dict(
    architectures=["LlamaForCausalLM"],
    hidden_act="silu",
    hidden_size=4096,
    intermediate_size=11008,
    max_position_embeddings=4096,
    model_type="llama",
    num_attention_heads=32,
    num_hidden_layers=32,
    num_key_value_heads=32,
    pretraining_tp=1,
    rms_norm_eps=1e-5,
    rope_scaling=None,
    tie_word_embeddings=False,
    torch_dtype="float16",
    vocab_size=32000,
)
LLAMA_3_1 = LLAMA_2 | dict(
    attention_bias=False,
    intermediate_size=14336,
    max_position_embeddings=131072,
    mlp_bias=False,
    num_key_value_heads=8,
    rope_scaling=LLAMA3,
    rope_theta=500000.0,
    vocab_size=128256,
)
QWEN_2_5 = dict(
    architectures=["Qwen2ForCausalLM"],
    hidden_act="silu",
    hidden_size=1536,
    intermediate_size=8960,
    max_window_layers=28,
    model_type="qwen2",
    num_attention_heads=12,
    num_hidden_layers=28,
    num_key_value_heads=2,
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    sliding_window=131072,
    tie_word_embeddings=True,
    use_sliding_window=False,
    vocab_size=151936,
)
QWEN_3 = dict(
    architectures=["Qwen3ForCausalLM"],
    attention_bias=False,
    head_dim=128,
    hidden_act="silu",
    hidden_size=1024,
    intermediate_size=3072,
    max_window_layers=28,
    model_type="qwen3",
    num_attention_heads=16,
    num_hidden_layers=28,
    num_key_value_heads=8,
    rms_norm_eps=1e-6,
    rope_scaling=None,
    rope_theta=1000000,
    sliding_window=None,
    tie_word_embeddings=True,
    use_sliding_window=False,
    vocab_size=151936,
)
GPT_2 = dict(
    activation_function="gelu_new",
    architectures=["GPT2LMHeadModel"],
    attn_pdrop=0.1,
    layer_norm_epsilon=1e-5,
    model_type="gpt2",
    n_ctx=1024,
    n_embd=768,
    n_head=12,
    n_layer=12,
    n_positions=1024,
    vocab_size=50257,
)


@pytest.mark.parametrize(
    ("config", "model"),
    [
        (LLAMA_2, "llama2_7b"),
        (LLAMA_3_1 | dict(rope_scaling=None), "llama3_8b"),
        (QWEN_2_5, "qwen2.5_1.5b"),
        (QWEN_3, "qwen3_0.6b"),
        (GPT_2, "gpt2_125m"),
    ],
)
def test_published_files_are_our_models(config, model):
    assert to_model_config(config) == MODELS[model]
    assert unknown_keys(config) == []


MISTRAL = {key: value for key, value in LLAMA_2.items() if key != "pretraining_tp"} | dict(
    architectures=["MistralForCausalLM"],
    intermediate_size=14336,
    max_position_embeddings=32768,
    model_type="mistral",
    num_key_value_heads=8,
    rope_theta=10000.0,
    sliding_window=4096,
)
OLMO_3 = LLAMA_2 | dict(
    architectures=["Olmo3ForCausalLM"],
    attention_bias=False,
    layer_types=[*["sliding_attention"] * 3, "full_attention"] * 8,
    max_position_embeddings=65536,
    model_type="olmo3",
    rms_norm_eps=1e-6,
    rope_scaling=dict(
        rope_type="yarn",
        factor=8.0,
        original_max_position_embeddings=8192,
        attention_factor=1.2079441541679836,
        beta_fast=32.0,
        beta_slow=1.0,
    ),
    rope_theta=500000,
    sliding_window=4096,
    vocab_size=100278,
)
OLMO_2 = LLAMA_2 | dict(
    architectures=["Olmo2ForCausalLM"],
    attention_bias=False,
    model_type="olmo2",
    rms_norm_eps=1e-6,
    rope_theta=500000,
    vocab_size=100352,
)
GEMMA_3 = dict(
    architectures=["Gemma3ForCausalLM"],
    attention_bias=False,
    attn_logit_softcapping=None,
    cache_implementation="hybrid",
    final_logit_softcapping=None,
    head_dim=256,
    hidden_activation="gelu_pytorch_tanh",
    hidden_size=1152,
    intermediate_size=6912,
    max_position_embeddings=32768,
    model_type="gemma3_text",
    num_attention_heads=4,
    num_hidden_layers=26,
    num_key_value_heads=1,
    query_pre_attn_scalar=256,
    rms_norm_eps=1e-6,
    rope_local_base_freq=10000,
    rope_scaling=None,
    rope_theta=1000000,
    sliding_window=512,
    sliding_window_pattern=6,
    vocab_size=262144,
)
PHI_3 = LLAMA_2 | dict(
    architectures=["Phi3ForCausalLM"],
    attention_bias=False,
    auto_map={
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
        "AutoTokenizer": "Xenova/gpt-4o",  # as Phi 4 mini has it
    },
    embd_pdrop=0.0,
    full_attn_mod=1,
    hidden_size=3072,
    intermediate_size=8192,
    interpolate_factor=1,
    lm_head_bias=False,
    model_type="phi3",
    original_max_position_embeddings=4096,
    resid_pdrop=0.0,
    rope_theta=10000.0,
    sliding_window=2047,
    vocab_size=32064,
)
SMOLLM_3 = QWEN_3 | dict(
    architectures=["SmolLM3ForCausalLM"],
    hidden_size=2048,
    intermediate_size=11008,
    mlp_bias=False,
    model_type="smollm3",
    no_rope_layer_interval=4,
    no_rope_layers=[1, 1, 1, 0] * 9,
    num_hidden_layers=36,
    num_key_value_heads=4,
    rope_theta=5000000.0,
    vocab_size=128256,
)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (MISTRAL, dict(layer_pattern="w", window=4096, n_kv_heads=8, head_dim=128)),
        (MISTRAL | dict(sliding_window=None), dict(layer_pattern="f", window=0)),
        # What transformers takes for a key that is left out.
        ({k: v for k, v in MISTRAL.items() if k != "sliding_window"}, dict(window=4096)),
        (PHI_3, dict(window=2047, joined_projections=True, rotary_dim=0, head_dim=96)),
        (PHI_3 | dict(partial_rotary_factor=0.75), dict(rotary_dim=72)),
        (SMOLLM_3, dict(layer_pattern="fffn", tie_embeddings=True, rope_theta=5e6)),
        ({**SMOLLM_3, "no_rope_layers": None}, dict(layer_pattern="fffn")),
        (
            OLMO_3,
            dict(
                layer_pattern="wwwf",
                window=4096,
                norm_at="after",
                qk_norm_joint=True,
                window_rope_theta=5e5,
                rope_scaling=Yarn(factor=8.0, original=8192, attention_factor=1.2079441541679836),
            ),
        ),
        (OLMO_2, dict(layer_pattern="f", norm_at="after", window_rope_theta=0.0)),
        (
            GEMMA_3,
            dict(
                layer_pattern="wwwwwf",
                window=512,
                mlp="geglu_tanh",
                tie_embeddings=True,
                query_scalar=0,
                rope_theta=1e6,
                window_rope_theta=1e4,
                norm="rms_offset",
            ),
        ),
        (GEMMA_3 | dict(query_pre_attn_scalar=168), dict(query_scalar=168)),
        (
            QWEN_3 | dict(use_sliding_window=True, sliding_window=32, max_window_layers=20),
            dict(layer_pattern="f" * 20 + "w" * 8, window=32),
        ),
    ],
)
def test_other_published_files(config, expected):
    """A model goes out and returns as it came, and knows every key."""
    model = to_model_config(config)
    assert {name: getattr(model, name) for name in expected} == expected
    assert unknown_keys(config) == []
    written = json.loads(json.dumps(to_config_json(model, max_length=77)))
    assert to_model_config(written) == model
    assert unknown_keys(written) == []


@pytest.mark.parametrize("name", MODELS)
def test_every_model_goes_out_and_returns(name):
    config = to_config_json(MODELS[name], max_length=77)
    assert to_model_config(json.loads(json.dumps(config))) == MODELS[name]
    assert unknown_keys(config) == []


@pytest.mark.parametrize(
    "scaling",
    [
        *ROPE_SCALINGS.values(),
        Yarn(factor=2.0, original=64, beta_fast=16.0, attention_factor=1.5, truncate=False),
    ],
)
def test_every_scaling_goes_out_and_returns(scaling):
    model = dataclasses.replace(MODELS["llama_tiny"], rope_scaling=scaling, rope_theta=3e5)
    assert to_model_config(to_config_json(model, max_length=77)) == model


def rope_of(new: bool, **rope) -> Linear | Llama3 | Yarn | None:
    """The scaling of a Llama, in the form of transformers 5 or the older one."""
    theta = {"rope_theta": 7e5}
    added = {"rope_parameters": rope | theta} if new else {"rope_scaling": rope} | theta
    model = to_model_config(LLAMA_2 | added)
    assert model.rope_theta == 7e5
    return model.rope_scaling


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (dict(rope_type="default"), None),
        (dict(type="linear", factor=4), Linear(factor=4.0)),
        (LLAMA3, Llama3(factor=8.0, low=1.0, high=4.0, original=8192)),
        (
            dict(type="yarn", factor=4.0, original_max_position_embeddings=1024),
            Yarn(factor=4.0, original=1024),
        ),
        (dict(rope_type="yarn", factor=4.0), Yarn(factor=4.0, original=4096)),  # max_position_…
        (
            dict(rope_type="yarn", factor=None, original_max_position_embeddings=2048),
            Yarn(factor=2.0, original=2048),
        ),  # 4096 / 2048
        (
            dict(
                rope_type="yarn",
                factor=4.0,
                attention_factor=1.1,
                beta_fast=64,
                beta_slow=2,
                truncate=False,
            ),
            Yarn(
                factor=4.0,
                original=4096,
                attention_factor=1.1,
                beta_fast=64.0,
                beta_slow=2.0,
                truncate=False,
            ),
        ),
        (
            dict(rope_type="yarn", factor=4.0, mscale=2.0, mscale_all_dim=0.5),
            Yarn(
                factor=4.0,
                original=4096,
                attention_factor=(0.2 * math.log(4) + 1) / (0.05 * math.log(4) + 1),
            ),
        ),
        (dict(rope_type="yarn", factor=4.0, mscale=2.0), Yarn(factor=4.0, original=4096)),
    ],
)
def test_rope_in_either_form(rope, expected, new):
    assert rope_of(new, **rope) == expected


def test_a_length_beside_the_scaling_takes_priority():
    config = LLAMA_3_1 | dict(original_max_position_embeddings=512)
    assert to_model_config(config).rope_scaling.original == 512


def test_a_length_beside_nested_scalings_is_not_theirs():
    nested = {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}
    given = dict(rope_parameters=nested, rope_theta=5e5, original_max_position_embeddings=512)
    model = to_model_config(config_json("olmo3", rope_scaling=None) | given)
    assert model.rope_scaling.original == YARN["original_max_position_embeddings"]


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "llama",
            dict(architectures=["FalconForCausalLM"]),
            "unknown architecture 'FalconForCausalLM'.* LlamaForCausalLM, Qwen2ForCausalLM",
        ),
        ("llama", dict(architectures=["A", "B"]), "must name one class, got"),
        ("llama", dict(architectures=None, model_type="mamba"), "unknown model_type 'mamba'"),
        ("llama", dict(attention_bias=True), "attention_bias=true is not supported for Llama"),
        ("llama", dict(mlp_bias=True), "mlp_bias=true is not supported for LlamaForCausalLM"),
        ("llama", dict(hidden_act="relu"), "hidden_act='relu' is not supported, only silu"),
        ("llama", dict(sliding_window=4096), "sliding_window=4096 is not supported for Llama"),
        ("llama", dict(layer_types=["sliding_attention"] * 2), "has sliding_attention; only full"),
        ("llama", dict(auto_map={"AutoModel": "modeling.X"}), "auto_map=.* is not supported"),
        ("llama", dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5 is not supported"),
        ("llama", dict(hidden_size="32"), "hidden_size must be a positive whole .*, got '32'"),
        ("llama", dict(num_attention_heads=3), "width of 32 does not divide into 3 heads"),
        ("llama", dict(num_key_value_heads=3), "config.json: n_heads=4 is not a multiple"),
        ("llama", dict(tie_word_embeddings="no"), "tie_word_embeddings must be true or false"),
        ("llama", dict(rms_norm_eps="x"), "rms_norm_eps must be a number, got 'x'"),
        ("llama", dict(hidden_size=None, vocab_size=None), "lacks vocab_size, hidden_size"),
        (
            "qwen2",
            dict(layer_types=["full_attention", "sliding_attention"]),
            "layer_types has sliding_attention, but there is no window: use_sliding_window=False",
        ),
        ("qwen3", dict(layer_types=["chunked_attention"] * 2), "has chunked_attention, which is"),
        ("qwen3", dict(layer_types=["full_attention"]), "layer_types has 1 names for 2 layers"),
        ("mistral", dict(sliding_window=0), "sliding_window must be a positive whole .*, got 0"),
        ("smollm3", dict(no_rope_layers=[1]), r"0 or 1 for each of 2 layers, got \[1\]"),
        (
            "smollm3",
            dict(use_sliding_window=True, sliding_window=8),
            "use_sliding_window=true is not supported for layers without positions: .*=8",
        ),
        ("olmo2", dict(attention_bias=True), "attention_bias=true is not supported for Olmo2"),
        ("olmo3", dict(sliding_window="8"), "sliding_window must be a positive .*, got '8'"),
        ("gemma3", dict(final_logit_softcapping=30.0), "final_logit_softcapping=30.0 is not"),
        ("gemma3", dict(attn_logit_softcapping=50.0), "attn_logit_softcapping=50.0 is not"),
        ("gemma3", dict(use_bidirectional_attention=True), "use_bidirectional_attention=true is"),
        ("gemma3", dict(hidden_activation="silu"), "hidden_activation='silu' is not supported"),
        (
            "phi3",
            dict(auto_map={"AutoModel": "modeling_x.Y"}),
            "auto_map=.*modeling_x.* is not sup",
        ),
        (
            "phi3",
            dict(rope_parameters=YARN),
            "scaled by Yarn is not supported for Phi3ForCausalLM, only LongRope",
        ),
        (
            "phi3",
            dict(rope_parameters=LONGROPE | dict(short_factor=[1.0])),
            "LongRope has 1 divisors, but heads have 4 pairs",
        ),
        (
            "olmo3",
            dict(rope_parameters=dict(full_attention=dict(rope_type="default"))),
            "rope_parameters must have full_attention and sliding_attention",
        ),
        (
            "gemma3",
            dict(rope_parameters=dict(full_attention=YARN, sliding_attention=YARN)),
            "rope_parameters of sliding_attention=.* is not supported, only another rope_theta",
        ),
        ("qwen3", dict(attention_bias=True), "attention_bias=true is not supported for Qwen3"),
        ("gpt2", dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_.*=true"),
        ("gpt2", dict(scale_attn_weights=False), "scale_attn_weights=false is not supported"),
        ("gpt2", dict(add_cross_attention=True), "add_cross_attention=true is not supported"),
        ("llama", dict(is_causal=False), "is_causal=false is not supported"),
        ("gpt2", dict(activation_function="relu"), "'relu' is not supported, only gelu_new or"),
        ("llama", dict(hidden_act=["silu"]), r"hidden_act=\['silu'\] is not supported, only silu"),
        ("llama", dict(vocab_size=10**12), "vocab_size must be a positive .* below 2.31, got 1000"),
        ("qwen2", dict(layer_types=3), "config.json: layer_types must be names or null, got 3"),
        ("qwen2", dict(layer_types=[None, "x"]), "layer_types must be names or null, got .None"),
        (
            "qwen2",
            dict(use_sliding_window=True, sliding_window=8, max_window_layers="2"),
            "max_window_layers must be a whole number, got '2'",
        ),
    ],
)
def test_what_this_decoder_does_not_compute_is_refused_by_name(family, changes, message):
    with pytest.raises(ValueError, match=message):
        to_model_config(config_json(family, **changes))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        *(
            (family, {key: 10**9}, f"{key}=1000000000 is more than 1,000,000: layers run one")
            for family, key in (
                *((family, "num_hidden_layers") for family in ("llama", "qwen2", "mistral")),
                *((family, "num_hidden_layers") for family in ("smollm3", "olmo3", "gemma3")),
                ("gpt2", "n_layer"),
            )
        ),
        ("llama", dict(num_hidden_layers=2**31), "num_hidden_layers must be a positive .* 2.31"),
        ("llama", dict(num_hidden_layers=1e9), "num_hidden_layers must be a positive whole"),
        ("mistral", dict(sliding_window=2**30), "sliding_window must be a positive whole number"),
    ],
)
def test_absurd_sizes_are_refused_before_a_list_of_layers(family, changes, message, monkeypatch):
    monkeypatch.setattr(json_reader, "read_layers", None)  # is not called
    if "sliding_window" in changes:
        monkeypatch.undo()
    with pytest.raises(ValueError, match=f"^folder: {message}"):
        to_model_config(config_json(family, **changes), "folder")


@pytest.mark.parametrize(
    ("key", "field"),
    [
        ("hidden_size", "d_model"),
        ("intermediate_size", "d_ff"),
        ("vocab_size", None),
        ("num_attention_heads", "n_heads"),
        ("head_dim", None),
    ],
)
def test_absurd_sizes_are_named_as_the_file_names_them(key, field):
    wide = LLAMA_2 | dict(num_hidden_layers=10_000, head_dim=128, hidden_size=65_536)
    said = f"^folder: {field or key}=2000000000 gives the model more than"
    with pytest.raises(ValueError, match=rf"{said}.* \({field} is {key}\)$" if field else said):
        to_model_config(wide | {key: 2 * 10**9}, "folder")


def test_patterns_of_many_layers_are_the_shortest():
    """By trying them all; and so fast that a hundred thousand layers take no second."""
    rng = np.random.default_rng(0)
    for length in [*range(1, 9)] * 20:
        letters = "".join(rng.choice(["f", "w"], length))
        tried = (letters[:n] for n in range(1, length + 1))
        expected = next(part for part in tried if (part * length).startswith(letters))
        assert layer_kinds_json._shortest(letters) == expected
    types = ["full_attention", *["sliding_attention"] * 99_999]
    model = to_model_config(config_json("olmo3", num_hidden_layers=10**5, layer_types=types))
    assert model.layer_pattern == model.layer_kinds == "f" + "w" * 99_999


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (dict(rope_type="dynamic", factor=2.0), "type 'dynamic' is not supported. There are: def"),
        (dict(rope_type="longrope"), "RoPE's short_factor must be a list of numbers, got None"),
        (LONGROPE | dict(long_factor=[1.0, 0]), "long_factor must be a positive number, got 0"),
        (LONGROPE | dict(mscale=1.0), "type 'longrope' has mscale, which is not supported"),
        (LONGROPE, "scaled by LongRope is not supported for LlamaForCausalLM, only Linear or"),
        (dict(type="linear", rope_type="yarn", factor=2.0), "rope_type and type contradict"),
        (dict(rope_type="linear"), "RoPE's factor is missing"),
        (dict(rope_type="linear", factor=0.5), "factor=0.5 must be at least 1"),
        (dict(rope_type="linear", factor="2"), "factor must be a positive number, got '2'"),
        (
            dict(rope_type="linear", factor=2.0, mrope_section=[1]),
            "has mrope_section, which is not",
        ),
        (dict(full_attention=dict(rope_type="default")), "has full_attention, which is not"),
        (LLAMA3 | dict(low_freq_factor=4.0), "low_freq_factor=4.0 must be below 4.0"),
        (dict(rope_type="default", partial_rotary_factor=0.25), "partial_rotary_factor=0.25"),
        (dict(rope_type=["linear"]), r"RoPE of type \['linear'\] is not supported"),
        (
            YARN | dict(original_max_position_embeddings=0.5),
            "json: .* whole number, got 0.5",
        ),
        (YARN | dict(truncate="no"), "truncate must be true or false, got 'no'"),
    ],
)
def test_other_ropes_are_refused_by_name(rope, message):
    for key in ("rope_parameters", "rope_scaling"):
        with pytest.raises(ValueError, match=message):
            to_model_config(LLAMA_2 | {"rope_scaling": None, key: rope})


def test_longrope_is_that_of_the_published_files():
    """As Phi-3-mini-128k (`su` first, then `longrope`) and Phi-4-mini have it."""
    short, long = [1.0 + i / 48 for i in range(48)], [1.0 + i for i in range(48)]
    for kind in ("su", "longrope"):
        rope = dict(type=kind, short_factor=short, long_factor=long)
        mini = PHI_3 | dict(rope_scaling=rope, max_position_embeddings=131072)
        model = to_model_config(mini)
        assert model.rope_scaling == LongRope(
            short=tuple(short), long=tuple(long), original=4096, factor=32.0
        )
        # sqrt(1 + log_4096(32)) = sqrt(1 + 5 / 12)
        assert math.isclose(model.rope_scaling.magnitude, math.sqrt(17 / 12))
    part = mini | dict(partial_rotary_factor=0.75, head_dim=128)
    assert to_model_config(part).rotary_dim == 96
    # Phi3Config's own length, above that of the scaling, where the file has none beside it
    assert PHI_3["original_max_position_embeddings"] == 4096
    del part["original_max_position_embeddings"]
    part["rope_scaling"] = rope | dict(original_max_position_embeddings=64)
    assert to_model_config(part).rope_scaling == model.rope_scaling
    model.check_length(4096)
    with pytest.raises(ValueError, match="seq_len=4097 .*=4096 of RoPE of type 'longrope'"):
        model.check_length(4097)


@pytest.mark.parametrize("length", [None, "4096", 0.5])
def test_yarn_without_a_factor_needs_both_lengths(length):
    config = LLAMA_2 | dict(rope_scaling=YARN | dict(factor=None))
    config |= dict(max_position_embeddings=length)
    if length is None:
        del config["max_position_embeddings"]
    with pytest.raises(ValueError, match="config.json: RoPE's max_position_embeddings "):
        to_model_config(config)


ODD = (
    None,
    True,
    -1,
    0,
    0.5,
    10**12,
    10**400,
    math.inf,
    math.nan,
    "x",
    [],
    ["silu"],
    [None, "x"],
    [[1]],
    {},
    {"a": 1},
)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_values_of_any_type_are_read_or_refused_with_the_files_name(family):
    config = config_json("gemma3" if family.model_type == "gemma3_text" else family.model_type)
    keys = [
        *family.defaults,
        *family.sizes.values(),
        *family.only,
        "architectures",
        "model_type",
        "max_position_embeddings",
    ]
    ropes = [LLAMA3 | {key: odd} for key in LLAMA3 for odd in ODD]
    more = ("beta_fast", "attention_factor", "mscale", "truncate", "rope_theta")
    ropes += [YARN | {key: odd} for key in (*YARN, *more) for odd in ODD]
    ropes += [YARN | dict(factor=None, type=odd) for odd in ODD]
    ropes += [LONGROPE | {key: odd} for key in LONGROPE for odd in ODD]
    changes = [{key: odd} for key in keys for odd in ODD]
    changes += [{"rope_scaling": rope, "rope_parameters": None} for rope in ropes]
    for change in changes:
        try:
            to_model_config(config | change, "folder/config.json")
        except ValueError as error:
            message = str(error)
            assert message.startswith("folder/config.json") and len(message) < 400, message
            assert "\n" not in message, message


def test_a_quantization_that_is_no_object():
    with pytest.raises(ValueError, match="^config.json: quantization_config must be an object, g"):
        read_layout({"quantization_config": 3}, "config.json")


def test_two_ropes_that_contradict_each_other():
    rope = dict(rope_type="linear", factor=2.0)
    with pytest.raises(ValueError, match="rope_scaling=.* contradicts rope_parameters="):
        to_model_config(LLAMA_3_1 | dict(rope_parameters=rope))


@pytest.mark.parametrize(
    ("architecture", "keys", "reason"),
    [
        ("MixtralForCausalLM", dict(num_local_experts=8), r"experts \(num_local_experts=8\)"),
        ("Qwen3MoeForCausalLM", dict(num_experts=128), r"experts \(num_experts=128\)"),
        (
            "DeepseekV3ForCausalLM",
            dict(kv_lora_rank=512, n_routed_experts=256),
            r"experts \(n_routed_experts=256\) and multi-head latent attention \(kv_lora_rank=512",
        ),
        ("Gemma3ForConditionalGeneration", dict(vision_config={}), r"vision \(vision_config="),
        (
            "Gemma2ForCausalLM",
            dict(attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
            r"soft caps of scores or logits \(attn_logit_softcapping=50.0\)",
        ),
    ],
)
def test_what_no_family_has_is_named(architecture, keys, reason):
    config = LLAMA_2 | dict(architectures=[architecture], model_type="x", **keys)
    message = f"^folder: unknown architecture '{architecture}'.*; this model has {reason}"
    with pytest.raises(ValueError, match=message):
        to_model_config(config, "folder")


def test_windows_that_no_layer_has_are_no_windows():
    config = config_json("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=2)
    assert to_model_config(config) == to_model_config(config_json("qwen2"))


def test_yarn_of_a_length_below_the_original_has_no_temperature():
    """Its factor is then the quotient of the two lengths, and transformers takes no logarithm."""
    rope = YARN | dict(factor=None, mscale=1.0, mscale_all_dim=0.5)
    config = LLAMA_2 | dict(original_max_position_embeddings=4096, max_position_embeddings=64)
    for scaling in (rope, {key: rope[key] for key in ("rope_type", "factor")}):
        found = to_model_config(config | dict(rope_scaling=scaling)).rope_scaling
        assert (found.factor, found.original, found.magnitude) == (1 / 64, 4096, 1.0)
    assert unknown_keys(config | dict(rope_scaling=rope)) == []


def test_keys_that_nobody_knows_are_named():
    assert unknown_keys(LLAMA_2 | dict(final_logit_softcapping=30, x=1)) == [
        "final_logit_softcapping",
        "x",
    ]


@pytest.mark.parametrize(
    "changes",
    [
        dict(norm="layer"),
        dict(mlp="gelu"),
        dict(biases="all"),
        dict(qk_norm=True, biases="qkv"),
        dict(learned_positions=8),
    ],
)
def test_models_that_hugging_face_does_not_have_are_refused(changes):
    with pytest.raises(ValueError, match=f"no supported architecture.* {next(iter(changes))}="):
        family_for(dataclasses.replace(MODELS["llama_tiny"], **changes))


def test_heads_that_do_not_divide_the_width_are_not_llama_s():
    """The config of transformers refuses them in Llama and in Gemma 3."""
    changes = dict(d_model=56, n_heads=6, n_kv_heads=2, head_dim=12)
    odd = dataclasses.replace(MODELS["llama_tiny"], **changes)
    assert family_for(odd) is FAMILIES["MistralForCausalLM"]
    gemma = dataclasses.replace(to_model_config(config_json("gemma3")), **changes)
    with pytest.raises(ValueError, match="no supported architecture.* d_model=56, n_heads=6"):
        family_for(gemma)


def test_smooth_swiglu_is_swiglu_there():
    smooth = dataclasses.replace(MODELS["llama_tiny"], mlp="smooth_swiglu")
    assert to_config_json(smooth, max_length=8)["hidden_act"] == "silu"
    assert family_for(smooth) is FAMILIES["LlamaForCausalLM"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[1]", "JSON object"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "cannot be read: maximum recursion depth"),
    ],
    ids=["cut", "list", "deep"],
)
def test_a_file_that_is_no_object(content, message, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=f"config.json .*{message}"):
        load_json(tmp_path / "config.json")
