"""Hugging Face's own library reads what we write, and we compute what it does.

Slow imports, so extended: transformers and torch are needed by nothing else here.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.lm.interop import convert
from fp8jax.lm.interop.config_json import to_config_json
from fp8jax.lm.interop.export import export_model
from fp8jax.lm.interop.trained import TrainedModel, load_model
from fp8jax.lm.model.config import ModelConfig
from fp8jax.lm.model.models import MODELS
from fp8jax.lm.model.rope import Linear, Llama3, LongRope, RopeScaling, Yarn
from fp8jax.lm.model.transformer import Transformer
from fp8jax.lm.training.step import loss_sum

pytestmark = [
    pytest.mark.extended,
    pytest.mark.filterwarnings("ignore"),  # those of torch and transformers are theirs
]
# First, so that nobody who has torch alone imports it to collect tests that are skipped.
transformers = pytest.importorskip("transformers", reason="the library to compare with")
torch = pytest.importorskip("torch", reason="transformers runs on it")

SHAPE = ModelConfig(
    vocab_size=1021, d_model=96, n_layers=3, n_heads=6, n_kv_heads=2, d_ff=160, head_dim=16
)
GPT2 = dataclasses.replace(
    SHAPE,
    n_kv_heads=6,
    norm="layer",
    mlp="gelu_tanh",
    biases="all",
    tie_embeddings=True,
    learned_positions=48,
)


OLMO = dataclasses.replace(SHAPE, norm_at="after", qk_norm=True, qk_norm_joint=True)
GEMMA = dataclasses.replace(
    SHAPE,
    head_dim=32,
    norm="rms_offset",
    norm_at="both",
    mlp="geglu_tanh",
    qk_norm=True,
    scale_embedding=True,
    tie_embeddings=True,
    layer_pattern="wf",
    window=9,
    rope_theta=1e6,
    window_rope_theta=1e4,
)


def scaled(scaling: RopeScaling) -> ModelConfig:
    return dataclasses.replace(SHAPE, head_dim=32, rope_scaling=scaling, rope_theta=5e5)


LONGROPE = LongRope(
    short=(1.0, 1.1, 1.5, 2.0, 3.0, 4.0),
    long=(1.0, 2.0, 4.0, 8.0, 16.0, 32.0),
    original=40,  # all of TOKENS
    factor=8.0,
)

# GQA and an odd vocabulary everywhere.
SHAPES = {
    "llama": SHAPE,
    "llama_tied": dataclasses.replace(SHAPE, tie_embeddings=True),
    "llama_wide_heads": dataclasses.replace(SHAPE, head_dim=24),
    "llama_linear": scaled(Linear(factor=4.0)),
    "llama_llama3": scaled(Llama3(factor=8.0, low=1.0, high=4.0, original=16)),
    "llama_yarn": scaled(Yarn(factor=4.0, original=16)),
    "llama_yarn_fields": scaled(
        Yarn(factor=4.0, original=16, beta_fast=8.0, attention_factor=1.3, truncate=False)
    ),
    "qwen2": dataclasses.replace(SHAPE, biases="qkv"),
    "qwen2_tied": dataclasses.replace(SHAPE, biases="qkv", tie_embeddings=True),
    "qwen3": dataclasses.replace(SHAPE, qk_norm=True, head_dim=32),
    "qwen3_window": dataclasses.replace(
        SHAPE, qk_norm=True, head_dim=32, layer_pattern="fww", window=9
    ),
    "mistral": dataclasses.replace(SHAPE, layer_pattern="w", window=9),
    "smollm3": dataclasses.replace(SHAPE, layer_pattern="ffn", tie_embeddings=True),
    "phi3": dataclasses.replace(SHAPE, joined_projections=True),
    "phi3_window": dataclasses.replace(
        SHAPE, joined_projections=True, layer_pattern="w", window=9, rotary_dim=12
    ),
    "phi3_longrope": dataclasses.replace(
        SHAPE, joined_projections=True, rope_scaling=LONGROPE, rotary_dim=12
    ),
    "phi3_longrope_fields": dataclasses.replace(
        SHAPE,
        joined_projections=True,
        rope_scaling=dataclasses.replace(LONGROPE, attention_factor=1.3),
        rotary_dim=12,
    ),
    "olmo2": OLMO,
    "olmo3": dataclasses.replace(
        OLMO,
        layer_pattern="wwf",
        window=9,
        rope_theta=5e5,
        rope_scaling=Yarn(factor=4.0, original=16),
        window_rope_theta=5e5,
    ),
    "gemma3": GEMMA,
    "gemma3_scalar": dataclasses.replace(
        GEMMA, query_scalar=40, rope_scaling=Linear(factor=8.0), layer_pattern="wwf"
    ),
    "gpt2": GPT2,
    "gpt2_untied": dataclasses.replace(GPT2, tie_embeddings=False),
}
TOKENS = np.random.default_rng(0).integers(0, SHAPE.vocab_size, (2, 40))
# Both sides round to float32, in unlike orders: sums of up to 160 terms are off by sqrt(160) = 13
# units of 2^-24 as a rule. 4 sums in a row in each of 3 layers and one in the head: 169 units.
BAR = 1e-5


def theirs_of(shape: ModelConfig, seed: int = 0):
    """A model of transformers with random weights, large enough that all parts matter."""
    config = transformers.AutoConfig.for_model(**to_config_json(shape, max_length=64))
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_scale = parameter.ndim == 1 and not name.endswith("bias")
            width = 0.05 if "wte" in name or "embed" in name else 0.15
            parameter.copy_(1 + 0.2 * noise if is_scale else width * noise)
    return model


def ours_of(folder) -> TrainedModel:
    trained = load_model(f"hf:{folder}")
    return dataclasses.replace(trained, model=trained.model.clone(dtype=jnp.float32))


def inputs(tokens=TOKENS):
    tokens = jnp.asarray(tokens, jnp.int32)
    return tokens, tokens * 0 + 1, jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)


def logits_of(trained: TrainedModel) -> np.ndarray:
    return np.asarray(jax.jit(trained.model.apply)(trained.variables, *inputs()))


def their_logits(model) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS)).logits.numpy()


def relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@pytest.mark.parametrize("name", SHAPES)
def test_logits_of_what_transformers_wrote(name, tmp_path):
    theirs = theirs_of(SHAPES[name])
    theirs.save_pretrained(tmp_path, max_shard_size="100KB")
    ours = ours_of(tmp_path)
    assert dataclasses.replace(ours.model.config) == SHAPES[name]
    assert relative(logits_of(ours), their_logits(theirs)) <= BAR


@pytest.mark.parametrize("name", SHAPES)
def test_transformers_reads_what_we_write(name, tmp_path):
    """From a model that we initialized; every tensor of theirs is in our files."""
    model = Transformer(SHAPES[name], dtype=jnp.float32)
    params = jax.jit(model.init)(jax.random.key(0), *inputs(TOKENS[:1, :1]), jax.random.key(1))
    params = jax.tree.map(
        lambda leaf: leaf + 0.1 * jax.random.normal(jax.random.key(leaf.size), leaf.shape),
        jax.tree.map(jnp.asarray, _unboxed(params["params"])),
    )
    trained = TrainedModel(
        model=model, variables={"params": params}, tokenizer=None, name="", record=None
    )
    export_model(trained, tmp_path / "hf", "float32", max_shard_bytes=200_000)
    theirs, said = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(said.values()), said
    assert theirs.dtype == torch.float32
    assert relative(logits_of(trained), their_logits(theirs)) <= BAR


def _unboxed(tree):
    import flax.linen as nn

    return nn.meta.unbox(tree)


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3_window", "olmo3", "gemma3"])
def test_bf16_goes_there_and_back_to_the_bit(name, tmp_path):
    theirs = theirs_of(SHAPES[name]).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="100KB")
    convert.import_folder(f"hf:{tmp_path}/theirs", tmp_path / "workdir")
    convert.export(str(tmp_path / "workdir"), tmp_path / "back", "bf16")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    ours = back.state_dict()
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, ours[key]), key
    for file in ("config.json", "generation_config.json"):
        said = [json.loads((tmp_path / at / file).read_text()) for at in ("theirs", "back")]
        assert said[0] == said[1]


@pytest.mark.parametrize("name", ["qwen3", "phi3_window", "olmo3", "gemma3"])
def test_gradients_are_those_of_torch(name, tmp_path):
    """Of the mean loss of the next token, for every parameter."""
    theirs = theirs_of(SHAPES[name])
    theirs.save_pretrained(tmp_path)
    tokens = torch.from_numpy(TOKENS)
    theirs(tokens, labels=tokens).loss.backward()
    ours = ours_of(tmp_path)
    weights = np.ones(TOKENS.shape, np.float32)
    weights[:, -1] = 0  # the last token has no next one
    names = ("tokens", "segments", "positions")
    batch = dict(zip(names, inputs(), strict=True)) | dict(
        targets=jnp.asarray(np.roll(TOKENS, -1, axis=1), jnp.int32), weights=jnp.asarray(weights)
    )

    def loss(params):
        return loss_sum(ours.model, params, {}, batch, None, total=weights.sum())

    gradients = jax.jit(jax.grad(loss))(ours.variables["params"])
    back = dataclasses.replace(ours, variables={"params": gradients})
    export_model(back, tmp_path / "gradients", "float32")
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "gradients")
    for (name, parameter), (_, ours_there) in zip(
        theirs.named_parameters(), found.named_parameters(), strict=True
    ):
        assert relative(ours_there.detach().numpy(), parameter.grad.numpy()) <= 5e-5, name


@pytest.mark.parametrize("model", ["llama_tiny", "qwen3_tiny"])
def test_our_tiny_models_are_theirs(model):
    """`to_config_json` gives them no key that transformers does not know. Its version 5 moves
    rope_theta, which older versions need, into rope_parameters."""
    config = to_config_json(MODELS[model], max_length=77)
    read = transformers.AutoConfig.for_model(**config).to_dict()
    assert set(config) - set(read) == {"rope_theta"}
    assert read["rope_parameters"]["rope_theta"] == config["rope_theta"]
