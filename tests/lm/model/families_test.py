"""All families are one decoder: it computes what theirs do, and each family trains.

The logits to compare with are those of Hugging Face's models, as tests/support/hf_vectors.py wrote
them, with the same weights drawn here again and put into our tree.
"""

import dataclasses
import functools
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from fp8jax.gemm.histories.amax_history import HISTORIES
from fp8jax.lm.data.loader import to_devices
from fp8jax.lm.model.cache import empty_cache
from fp8jax.lm.model.config import ModelConfig
from fp8jax.lm.model.models import MODELS
from fp8jax.lm.model.norms import LayerNorm
from fp8jax.lm.model.rope import Linear, Llama3, Yarn
from fp8jax.lm.model.transformer import Transformer, abstract_variables
from fp8jax.lm.training.build import build
from fp8jax.lm.training.step import loss_sum
from fp8jax.numerics.names import as_policy
from fp8jax.numerics.policy import POLICIES, Policy
from fp8jax.numerics.recipes import RECIPES
from tests.support import hf_vectors
from tests.support.hf_vectors import EPSILON, HEADS, HIDDEN, LAYERS, TOKENS, VOCAB, WIDTH, weight

# The models of Hugging Face --------------------------------------------------------------------

GPT2 = ModelConfig(
    vocab_size=VOCAB,
    d_model=WIDTH,
    n_layers=LAYERS,
    n_heads=HEADS,
    n_kv_heads=HEADS,
    d_ff=HIDDEN,
    head_dim=WIDTH // HEADS,
    norm="layer",
    norm_eps=EPSILON,
    mlp="gelu_tanh",
    biases="all",
    tie_embeddings=True,
    learned_positions=24,
)
LLAMA = ModelConfig(
    vocab_size=VOCAB,
    d_model=WIDTH,
    n_layers=LAYERS,
    n_heads=HEADS,
    n_kv_heads=2,
    d_ff=HIDDEN,
    head_dim=WIDTH // HEADS,
    norm_eps=EPSILON,
)
# With an original length that so small a model's wavelengths straddle.
SMALL_LLAMA3 = Llama3(factor=8.0, low=1.0, high=4.0, original=64)
SMALL_YARN = Yarn(factor=4.0, original=64)
OLMO = dataclasses.replace(LLAMA, norm_at="after", qk_norm=True, qk_norm_joint=True)
CONFIGS = {
    "gpt2": GPT2,
    "gpt": dataclasses.replace(GPT2, mlp="gelu"),
    "llama": LLAMA,
    "llama_linear": dataclasses.replace(LLAMA, head_dim=16, rope_scaling=Linear(factor=4.0)),
    "llama_llama3": dataclasses.replace(LLAMA, head_dim=16, rope_scaling=SMALL_LLAMA3),
    "llama_yarn": dataclasses.replace(LLAMA, head_dim=16, rope_scaling=SMALL_YARN),
    "qwen2": dataclasses.replace(LLAMA, biases="qkv", tie_embeddings=True),
    "qwen3": dataclasses.replace(LLAMA, head_dim=16, qk_norm=True, tie_embeddings=True),
    "qwen3_window": dataclasses.replace(
        LLAMA, head_dim=16, qk_norm=True, layer_pattern="fw", window=5
    ),
    "mistral": dataclasses.replace(LLAMA, layer_pattern="w", window=5),
    "smollm3": dataclasses.replace(LLAMA, layer_pattern="fn"),
    "phi3": dataclasses.replace(
        LLAMA, layer_pattern="w", window=5, rotary_dim=4, joined_projections=True
    ),
    "olmo2": OLMO,
    "olmo3": dataclasses.replace(
        OLMO,
        layer_pattern="wf",
        window=5,
        rope_scaling=Yarn(factor=4.0, original=16),
        window_rope_theta=1e4,
    ),
    "gemma3": dataclasses.replace(
        LLAMA,
        head_dim=16,
        norm="rms_offset",
        norm_at="both",
        mlp="geglu_tanh",
        qk_norm=True,
        query_scalar=24,
        scale_embedding=True,
        layer_pattern="wf",
        window=5,
        rope_theta=1e6,
        rope_scaling=Linear(factor=4.0),
        window_rope_theta=1e4,
    ),
}


def conv1d(name: str, features: int, inputs: int) -> dict:
    """GPT-2's linears: weights lie [in, out] as ours do."""
    return {
        "kernel": weight(f"{name}.weight", (inputs, features)),
        "bias": weight(f"{name}.bias", (features,)),
    }


def linear(name: str, features: int, inputs: int, bias: bool = False) -> dict:
    """torch's linears: weights lie [out, in]."""
    kernel = {"kernel": weight(f"{name}.weight", (features, inputs)).T}
    return kernel | ({"bias": weight(f"{name}.bias", (features,))} if bias else {})


def scale(name: str, size: int = WIDTH, bias: bool = False) -> dict:
    parameters = {"scale": weight(f"{name}.weight", (size,))}
    return parameters | ({"bias": weight(f"{name}.bias", (size,))} if bias else {})


def gpt2_layer(config: ModelConfig, at: str) -> dict:
    joined = conv1d(f"{at}.attn.c_attn", 3 * WIDTH, WIDTH)
    parts = {name: np.split(joined[name], 3, axis=-1) for name in ("kernel", "bias")}
    qkv = {name: {k: parts[k][i] for k in parts} for i, name in enumerate("qkv")}
    return {
        "attention_norm": scale(f"{at}.ln_1", bias=True),
        "attention": {**qkv, "o": conv1d(f"{at}.attn.c_proj", WIDTH, WIDTH)},
        "mlp_norm": scale(f"{at}.ln_2", bias=True),
        "mlp": {
            "up": conv1d(f"{at}.mlp.c_fc", HIDDEN, WIDTH),
            "down": conv1d(f"{at}.mlp.c_proj", WIDTH, HIDDEN),
        },
    }


def llama_layer(config: ModelConfig, at: str) -> dict:
    c = config
    sizes = {"q": c.n_heads * c.head_dim, "k": c.n_kv_heads * c.head_dim}
    sizes["v"] = sizes["k"]
    if c.joined_projections:
        joined = {
            "attention": (f"{at}.self_attn.qkv_proj", sizes),
            "mlp": (f"{at}.mlp.gate_up_proj", {"gate": HIDDEN, "up": HIDDEN}),
        }
        attention, mlp = (split_linear(*joined[part]) for part in ("attention", "mlp"))
    else:
        attention = {
            name: linear(f"{at}.self_attn.{name}_proj", size, WIDTH, c.biases == "qkv")
            for name, size in sizes.items()
        }
        mlp = {name: linear(f"{at}.mlp.{name}_proj", HIDDEN, WIDTH) for name in ("gate", "up")}
    attention["o"] = linear(f"{at}.self_attn.o_proj", WIDTH, c.n_heads * c.head_dim)
    mlp["down"] = linear(f"{at}.mlp.down_proj", WIDTH, HIDDEN)
    if c.qk_norm:
        for name in ("q", "k"):
            size = sizes[name] if c.qk_norm_joint else c.head_dim
            attention[f"{name}_norm"] = scale(f"{at}.self_attn.{name}_norm", size)
    norms = {name: scale(f"{at}.{theirs}") for name, theirs in NORMS[c.norm_at].items()}
    return {"attention": attention, "mlp": mlp, **norms}


NORMS = {
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


def split_linear(name: str, sizes: dict[str, int]) -> dict:
    """One linear of theirs whose outputs are those of several of ours, one after the other."""
    whole = linear(name, sum(sizes.values()), WIDTH)["kernel"]
    parts = np.split(whole, np.cumsum(list(sizes.values()))[:-1], axis=1)
    return {own: {"kernel": part} for own, part in zip(sizes, parts, strict=True)}


def our_parameters(config: ModelConfig) -> dict:
    """Hugging Face's weights in our tree: layers stacked, kernels [in, out]."""
    if config.learned_positions:
        layers = [gpt2_layer(config, f"transformer.h.{i}") for i in range(LAYERS)]
        params = {
            "embedding": weight("transformer.wte.weight", (VOCAB, WIDTH)),
            "position_embedding": weight("transformer.wpe.weight", (24, WIDTH)),
            "final_norm": scale("transformer.ln_f", bias=True),
        }
    else:
        layers = [llama_layer(config, f"model.layers.{i}") for i in range(LAYERS)]
        params = {
            "embedding": weight("model.embed_tokens.weight", (VOCAB, WIDTH)),
            "final_norm": scale("model.norm"),
        }
        if not config.tie_embeddings:
            params["lm_head"] = linear("lm_head", VOCAB, WIDTH)
    return params | {"layers": jax.tree.map(lambda *leaves: np.stack(leaves), *layers)}


def logits_of(config: ModelConfig, params: dict, **kwargs) -> np.ndarray:
    tokens = jnp.asarray(TOKENS, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    model = Transformer(config, "bf16", dtype=jnp.float32, **kwargs)
    apply = jax.jit(
        lambda params: model.apply({"params": params}, tokens, jnp.ones_like(tokens), positions)
    )
    return np.asarray(apply(params))


@functools.cache
def vectors() -> dict:
    return json.loads(hf_vectors.FILE.read_text())


def error(family: str, logits: np.ndarray) -> float:
    """Largest difference from Hugging Face's logits, relative to the largest of them."""
    expected = np.array(vectors()["logits"][family], np.float32)
    assert logits.shape == expected.shape
    return float(np.abs(logits - expected).max() / np.abs(expected).max())


# Both sides round to float32, in unlike orders. Rounding errors have either sign, so that a sum
# of up to 48 terms, in vectors of 3 or more, is off by sqrt(16) = 4 units of 2^-24 of its size. A
# layer has 4 sums in a row and may double what comes in; two layers and the head:
# 4 * (4 + 2 * 4 + 4 * 4 + 1) units.
BOUND = 116 * 2.0**-24


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        *((family, "xla") for family in CONFIGS),
        ("qwen3", "reference"),  # its queries and keys are normalized, its heads grouped
        # What `reference` computes is for lm/model/attention_test.py; families differ outside it.
        *(
            pytest.param(family, "reference", marks=pytest.mark.full)
            for family in CONFIGS
            if family != "qwen3"
        ),
    ],
)
def test_logits_are_those_of_hugging_face(family, attention):
    params = our_parameters(CONFIGS[family])
    assert error(family, logits_of(CONFIGS[family], params, attention=attention)) <= BOUND


def greedy(family: str, *ways: tuple[int, ...]) -> list:
    """Tokens after the prompts, for each way of giving them to the cache, in pieces of so many."""
    config, params = CONFIGS[family], our_parameters(CONFIGS[family])
    model = Transformer(config, "bf16", dtype=jnp.float32)
    prompt, end = hf_vectors.PROMPT, hf_vectors.PROMPT + hf_vectors.GENERATED

    @jax.jit
    def run(tokens, begin, cache):
        positions = jnp.broadcast_to(begin + jnp.arange(tokens.shape[1]), tokens.shape)
        ones = jnp.ones_like(tokens)
        logits, cache = model.apply({"params": params}, tokens, ones, positions, cache=cache)
        return jnp.argmax(logits[:, -1:], axis=-1), cache

    made = []
    for pieces in ways:
        unrolled = len(pieces) > 1  # one layer after the other, or a loop
        cache, begin, out = empty_cache(config, 2, end, "fp32", unrolled=unrolled), 0, []
        for size in pieces:
            piece = jnp.asarray(TOKENS[:, begin : begin + size], jnp.int32)
            token, cache = run(piece, begin, cache)
            begin += size
        assert begin == prompt
        for at in range(prompt, end):
            out.append(token)
            token, cache = run(token, at, cache)
        made.append(np.concatenate(out, axis=1).tolist())
    return made


@pytest.mark.parametrize(
    "family",
    [
        name if name == "gemma3" else pytest.param(name, marks=pytest.mark.full)
        for name in hf_vectors.GREEDY
    ],
)
def test_greedy_text_is_that_of_hugging_face(family):
    """With a prompt longer than the windows, in one piece and in chunks; then token by token."""
    assert greedy(family, (8,), (4, 4)) == 2 * [vectors()["greedy"][family]]


@pytest.mark.parametrize("family", CONFIGS)
def test_our_tree_is_filled_exactly(family):
    """No leaf of theirs is left out, none of ours is without a value."""
    ours = abstract_variables(Transformer(CONFIGS[family]))["params"]
    shapes = jax.tree.map(lambda leaf: leaf.shape, nn.meta.unbox(ours))
    assert shapes == jax.tree.map(lambda leaf: leaf.shape, our_parameters(CONFIGS[family]))


def ways_to_run_layers():
    """A model whose exemptions cut its layers into stretches, recomputed in the backward; what it
    is applied to; and its parameters, in a loop and one layer after the other."""
    params = our_parameters(CONFIGS["gemma3"])
    tokens = jnp.asarray(TOKENS, jnp.int32)
    rows = (tokens, tokens * 0 + 1, jnp.broadcast_to(jnp.arange(20), tokens.shape))
    exempt = as_policy("fp8_block:bf16_first=1,bf16_last=1")  # both layers: all in bf16
    model = Transformer(CONFIGS["gemma3"], exempt, dtype=jnp.float32, remat="full")
    layers = [jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]) for i in range(LAYERS)]
    apply = jax.jit(lambda tree: model.apply({"params": tree}, *rows))
    return apply, params, params | {"layers": tuple(layers)}


def test_layers_keep_their_kinds_however_they_are_run():
    apply, *trees = ways_to_run_layers()
    for params in trees:
        assert error("gemma3", np.asarray(apply(params))) <= BOUND


@pytest.mark.full
def test_gradients_of_unlike_layers_in_a_loop_and_one_by_one():
    apply, *trees = ways_to_run_layers()
    gradient = jax.grad(lambda tree: jnp.sum(apply(tree) ** 2))
    together, apart = map(jax.jit(gradient), trees)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *apart["layers"])
    jax.tree.map(
        lambda a, b: np.testing.assert_array_less(relative(a, b), BOUND),
        stacked,
        together["layers"],
    )


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt2", dict(mlp="gelu")),
        ("gpt2", dict(norm_eps=1e-5)),
        ("gpt", dict(mlp="gelu_tanh")),
        ("llama", dict(norm_eps=1e-5)),
        ("llama", dict(rope_theta=1.1e4)),
        ("llama", dict(rope_scaling="linear_2")),
        ("llama_linear", dict(rope_scaling=None)),
        ("llama_llama3", dict(rope_scaling=SMALL_YARN)),
        ("llama_yarn", dict(rope_scaling=SMALL_LLAMA3)),
        # A Llama above has another one, too.
        pytest.param("qwen2", dict(rope_theta=1e6), marks=pytest.mark.full),
        pytest.param("qwen3", dict(norm_eps=1e-5), marks=pytest.mark.full),
        pytest.param("qwen3_window", dict(layer_pattern="wf"), marks=pytest.mark.full),
        ("mistral", dict(window=6)),
        pytest.param("smollm3", dict(layer_pattern="nf"), marks=pytest.mark.full),
        ("phi3", dict(rotary_dim=6)),
        ("olmo3", dict(window_rope_theta=0.0)),
        ("gemma3", dict(query_scalar=0)),
        pytest.param("gemma3", dict(norm="rms"), marks=pytest.mark.full),
        pytest.param("gemma3", dict(window_rope_theta=1.1e4), marks=pytest.mark.full),
        pytest.param("gemma3", dict(mlp="swiglu"), marks=pytest.mark.full),
    ],
)
def test_a_wrong_field_would_show(family, changes):
    """What the bound above is worth: a wrong choice is off by ten bounds at least."""
    wrong = dataclasses.replace(CONFIGS[family], **changes)
    assert error(family, logits_of(wrong, our_parameters(CONFIGS[family]))) > 10 * BOUND


# What the families have of their own -----------------------------------------------------------

EVERYWHERE = Policy((("*", RECIPES["fp8_delayed"]),), name="everywhere")  # the head, too
TARGETS = np.roll(TOKENS, -1, axis=1).astype(np.int32)


@functools.cache
def gradients_of(family: str, policy: str | Policy = "bf16", tied: bool = True):
    """(gradients, new histories) of the summed loss, with large weights, in float32. Not tied: the
    head has the embedding's numbers in a matrix of its own."""
    config, params = CONFIGS[family], our_parameters(CONFIGS[family])
    if not tied:
        config = dataclasses.replace(config, tie_embeddings=False)
        params["lm_head"] = {"kernel": params["embedding"].T}
    model = Transformer(config, policy, dtype=jnp.float32, seeded=False)
    tokens = jnp.asarray(TOKENS, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    batch = dict(
        tokens=tokens,
        targets=jnp.asarray(TARGETS),
        segments=jnp.ones_like(tokens),
        positions=positions,
        weights=jnp.ones(tokens.shape, jnp.float32),
    )
    variables = nn.meta.unbox(abstract_variables(model))
    histories = variables[HISTORIES] if HISTORIES in variables else {}
    histories = jax.tree.map(lambda h: jnp.zeros(h.shape, h.dtype), histories)
    loss = functools.partial(loss_sum, model, batch=batch, key=None)
    return jax.device_get(jax.jit(jax.grad(loss, argnums=(0, 1)))(params, histories))


def relative(a, b) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize(
    ("family", "policy"),
    [
        pytest.param("gpt2", "bf16", id="gpt2-bf16"),
        pytest.param("qwen2", "bf16", id="qwen2-bf16", marks=pytest.mark.full),
        pytest.param("gpt2", EVERYWHERE, id="gpt2-fp8"),
    ],
)
def test_a_tied_embedding_gets_the_gradients_of_both_its_uses(family, policy):
    """Those of a model whose head has a matrix of its own, with the same numbers; sums are in
    another order. In FP8 that may turn a cast to the neighboring code, which in E5M2 moves one of
    40 * 32 elements by 2^-3 of it, 3.5e-3 of their norm: a few of these are allowed."""
    tied, histories = gradients_of(family, policy)
    apart, histories_apart = gradients_of(family, policy, tied=False)
    look_up, product = apart["embedding"], apart["lm_head"]["kernel"].T
    bound = BOUND if policy == "bf16" else 1e-2
    assert relative(tied["embedding"], look_up + product) <= bound
    for use in (look_up, product):
        assert np.linalg.norm(use) > 0.05 * np.linalg.norm(tied["embedding"])
    assert jax.tree.structure(histories) == jax.tree.structure(histories_apart)


def test_a_tied_head_in_delayed_fp8_keeps_histories():
    """Of its input, of the embedding as its weight, and of its gradient."""
    _, histories = gradients_of("qwen2", EVERYWHERE)
    head = histories["lm_head"]
    assert set(head) == {f"{operand}_amax_history" for operand in "xwg"}
    assert all(float(history[0]) > 0 for history in head.values())
    embedding = weight("model.embed_tokens.weight", (VOCAB, WIDTH))
    assert float(head["w_amax_history"][0]) == np.abs(embedding).max()


@pytest.mark.parametrize("policy", ["bf16", EVERYWHERE], ids=["bf16", "fp8"])
@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_every_bias_gets_a_gradient(family, policy):
    """But that of GPT-2's keys: it adds the same to all scores of a query, and is never felt. Its
    gradient is what sums of hundreds of float32 terms leave of zero (in FP8: of rounded ones)."""
    gradients, _ = gradients_of(family, policy)
    layers, found = gradients["layers"], []
    for part in ("attention", "mlp"):
        for name, leaves in layers[part].items():
            if "bias" not in leaves:
                continue
            found.append(name)
            sizes = np.linalg.norm(leaves["bias"], axis=-1)
            assert sizes.shape == (LAYERS,)
            if (family, name, policy) == ("gpt2", "k", "bf16"):
                assert (sizes < 1e-4 * np.linalg.norm(layers[part]["q"]["bias"], axis=-1)).all()
            elif (family, name) != ("gpt2", "k"):
                assert (sizes > 1e-2).all(), name
    assert sorted(found) == sorted("qkv" if family == "qwen2" else [*"qkvo", "up", "down"])


def test_layer_norm_by_hand():
    """As in `RMSNorm` 22 roundings, relative to the result before its bias; mean and difference add
    32 / 2 + 2 of the largest |x|, by which the variance is off as much again; the bias one of the
    sum. Around 5: a mean of squares less the square of the mean would lose digits."""
    x = 5 + np.random.default_rng(0).normal(size=(2, 4, WIDTH)).astype(np.float32)
    gain = np.linspace(0.5, 2, WIDTH).astype(np.float32)
    bias = np.linspace(-1, 1, WIDTH).astype(np.float32)
    norm = LayerNorm(1e-2)
    params = {"params": {"scale": jnp.asarray(gain), "bias": jnp.asarray(bias)}}
    wide = x.astype(np.float64)
    centerd = wide - wide.mean(axis=-1, keepdims=True)
    root = np.sqrt(np.mean(centerd**2, axis=-1, keepdims=True) + 1e-2)
    expected = centerd / root * gain + bias
    size = np.abs(wide).max(axis=-1, keepdims=True) / root * 2  # 2 is the largest scale
    units = 22 * np.abs(centerd / root * gain) + 2 * 18 * size + np.abs(expected)
    error = np.abs(norm.apply(params, jnp.asarray(x)) - expected)
    assert (error <= units * 2.0**-24).all()
    assert norm.apply(params, jnp.asarray(x, jnp.bfloat16)).dtype == jnp.bfloat16


def test_learned_positions_restart_with_documents():
    """A document packed second has the logits that it has alone; with positions that ran on it
    would have others."""
    config, params = CONFIGS["gpt2"], our_parameters(CONFIGS["gpt2"])
    model, begin = Transformer(config, dtype=jnp.float32), 8
    tokens = jnp.asarray(TOKENS, jnp.int32)
    at = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    apply = jax.jit(lambda *args: model.apply({"params": jax.tree.map(jnp.asarray, params)}, *args))
    restarted = jnp.where(at < begin, at, at - begin)
    second = 1 + (at >= begin).astype(jnp.int32)
    packed = np.asarray(apply(tokens, second, restarted))[:, begin:]
    rows = tokens[:, begin:]
    alone = np.asarray(apply(rows, jnp.ones_like(rows), at[:, : rows.shape[1]]))
    assert np.abs(packed - alone).max() <= BOUND * np.abs(alone).max()
    ran_on = np.asarray(apply(tokens, second, at))[:, begin:]
    assert (np.abs(ran_on - alone).max(axis=-1) > 1000 * BOUND * np.abs(alone).max()).all()


@pytest.mark.parametrize("name", ["q", "k"])
def test_normalized_queries_and_keys_do_not_feel_the_size_of_their_kernels(name):
    """Twice the kernel, a power of two, is the same to the bit where epsilon is too small to
    count; without the norms it is not."""
    config = dataclasses.replace(CONFIGS["qwen3"], norm_eps=1e-30)
    params = our_parameters(config)

    def twice(path, leaf):
        inside = any(getattr(key, "key", None) == name for key in path)
        return 2 * leaf if inside else leaf

    doubled = jax.tree_util.tree_map_with_path(twice, params)
    np.testing.assert_array_equal(logits_of(config, doubled), logits_of(config, params))
    plain = dataclasses.replace(config, qk_norm=False)
    for tree in (params, doubled):
        for norm in ("q_norm", "k_norm"):
            del tree["layers"]["attention"][norm]
    difference = logits_of(plain, doubled) - logits_of(plain, params)
    assert np.abs(difference).max() > 0.1


# Training --------------------------------------------------------------------------------------

FAMILIES = {
    "gpt2": ("gpt2_tiny", {}),
    "llama": ("llama_tiny", {}),
    "qwen2": ("qwen2_tiny", {}),
    "qwen3": ("qwen3_tiny", {}),
}
ROWS, LENGTH, SECOND = 8, 32, 20  # the second document of each row begins at its 20th token
PATTERN = "the cat sat on the mat; a dog ran to the log. one frog is in the bog! "


def small(model: str, overrides: dict | None = None, **changes):
    """A run of base.py's, of the smallest size that has every part."""
    config = base.get_config()
    config.model = model
    config.model_overrides.update(d_model=32, n_layers=1, n_heads=2, n_kv_heads=2, d_ff=64)
    config.model_overrides.update(head_dim=16, **(overrides or {}))
    if MODELS[model].learned_positions:
        config.model_overrides.learned_positions = LENGTH
    config.update(
        seq_len=LENGTH,
        batch_size=ROWS,
        num_steps=50,
        optimizer=dict(warmup_steps=5, learning_rate=1e-2),
        **changes,
    )
    return config


def batch_of(step: int) -> dict[str, np.ndarray]:
    """Rows of two documents each: the pattern from anywhere on, as bytes."""
    text = np.frombuffer((4 * PATTERN).encode(), np.uint8).astype(np.int32)
    starts = np.random.default_rng(step).integers(0, len(PATTERN), (ROWS, 2))
    rows = [np.r_[text[a:][:SECOND], text[b:][: LENGTH + 1 - SECOND]] for a, b in starts]
    tokens = np.stack(rows)
    at = np.arange(LENGTH)
    positions = np.where(at < SECOND, at, at - SECOND).astype(np.int32)
    every = lambda row: np.broadcast_to(row, (ROWS, LENGTH)).copy()  # noqa: E731
    return dict(
        tokens=tokens[:, :-1],
        targets=tokens[:, 1:],
        positions=every(positions),
        segments=every(1 + (at >= SECOND).astype(np.int32)),
        weights=every((at != SECOND - 1).astype(np.float32)),
    )


def losses_of(config, num_steps: int, devices=None) -> np.ndarray:
    """Of the first steps, in the loop's order of programs."""
    run = build(config, jax.devices()[:1] if devices is None else devices)
    losses = []
    with jax.set_mesh(run.mesh):
        programs = run.stages[0].programs
        state = programs.initialize()
        for i in range(num_steps):
            seeding = i == 0 and POLICIES[config.precision].delayed
            step = programs.seed_step if seeding else programs.step
            batch = to_devices(batch_of(i), run.batch_sharding)
            state, out = step(state, batch, programs.numbers(state))
            losses.append(out["loss"])
    return np.array(jax.device_get(losses))


@pytest.mark.parametrize(
    ("family", "precision"),
    [
        ("gpt2", "fp8_block"),
        ("qwen3", "bf16"),
        # Of what they are made of, the others have nothing that these two and
        # `test_a_new_family_is_one_entry` do not train. The bits of both precisions, and delayed
        # scaling's, are those of gemm/dot_test.py; lm/training/loop_test.py runs it on the Llama.
        *(
            pytest.param(family, precision, marks=pytest.mark.full)
            for precision in ("bf16", "fp8_delayed", "fp8_block")
            for family in FAMILIES
            if (family, precision) not in [("gpt2", "fp8_block"), ("qwen3", "bf16")]
        ),
    ],
)
def test_every_family_trains_in_every_precision(family, precision):
    losses = losses_of(small(*FAMILIES[family], precision=precision), 50)
    assert np.isfinite(losses).all()
    assert abs(losses[0] - np.log(320)) < 0.1  # nothing is known at first
    assert losses[-5:].mean() < 0.8 * losses[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parameter_tree_does_not_depend_on_the_policy(family):
    """Nor do the shapes; the histories have a leaf for each operand of each linear there is. One
    policy of each structure: lm/model/transformer_test.py has all of them, on the Llama."""
    model, overrides = FAMILIES[family]
    config = dataclasses.replace(MODELS[model], **overrides)
    expected = abstract_variables(Transformer(config))["params"]
    for name in ("fp8_delayed", "fp8_block", "nvfp4_mixed"):
        variables = abstract_variables(Transformer(config, name))
        assert variables["params"] == expected, name
        if POLICIES[name].delayed:
            layers = variables[HISTORIES]["layers"]
            linears = {f"layers/{part}/{at}" for part in layers for at in layers[part]}
            assert linears == set(config.modules) - {"lm_head"}


@functools.cache
def loss_and_gradients(**kwargs):
    """GPT-2's, as it begins."""
    config = dataclasses.replace(CONFIGS["gpt2"], vocab_size=320, learned_positions=LENGTH)
    batch, model = batch_of(0), Transformer(config, dtype=jnp.float32, **kwargs)

    @jax.jit
    def initial():
        one = jnp.zeros((1, 1), jnp.int32)
        return nn.meta.unbox(Transformer(config).init(jax.random.key(0), one, one, one)["params"])

    @jax.jit
    def f(params, batch):
        return jax.value_and_grad(lambda params: loss_sum(model, params, {}, batch, None))(params)

    return jax.device_get(f(initial(), batch))


@pytest.mark.parametrize("changes", [dict(remat="full"), dict(unroll=2)])
def test_rematerialization_and_unrolling_keep_the_loss(changes):
    """Layer norms, biases, learned positions and a tied head among what is computed again. In
    float32, on one batch: the loss is a mean of logits' differences, each of which may be off by
    `BOUND`; no rounding is between them in either program, so it is the same order of sums or
    next to it. The bias of k adds one number to all scores of a query, which changes no weight of
    its softmax: its gradient is zero but for the rounding of those sums that k's kernel has, too.
    """
    (one, gradients), (other, others) = loss_and_gradients(), loss_and_gradients(**changes)
    assert float(abs(one - other)) <= BOUND * float(one)
    for (path, a), (_, b) in zip(*map(jax.tree.leaves_with_path, (gradients, others)), strict=True):
        of_k_bias = jax.tree_util.keystr(path) == "['layers']['attention']['k']['bias']"
        size = gradients["layers"]["attention"]["k"]["kernel"] if of_k_bias else a
        assert np.linalg.norm(a - b) <= BOUND * np.linalg.norm(size), path


# lm/training/loop_test.py shows it for the Llama, gemm/dot_test.py to the bound of each sum.
@pytest.mark.full
def test_eight_devices_equal_one():
    """The first loss, which bfloat16 sums of other lengths move by 1e-5 at most (loop_test.py);
    learned positions, biases and the tied head are cut as well."""
    mesh = dict(mesh_axes=dict(data=2, fsdp=2, tensor=2))
    one = losses_of(small("gpt2_tiny"), 1)
    eight = losses_of(small("gpt2_tiny", **mesh), 1, jax.devices())
    assert abs(eight[0] / one[0] - 1) <= 1e-5


def test_a_new_family_is_one_entry(monkeypatch):
    """Layer norms, a gated MLP, biases of q, k and v, and stretched rotary positions."""
    fields = dict(norm="layer", mlp="swiglu", biases="qkv", rope_scaling="linear_4")
    entry = dataclasses.replace(MODELS["llama_tiny"], tie_embeddings=True, **fields)
    monkeypatch.setitem(MODELS, "falconish", entry)
    losses = losses_of(small("falconish"), 3)
    assert np.isfinite(losses).all() and losses[-1] < losses[0]
    tree = abstract_variables(build(small("falconish"), jax.devices()[:1]).stages[0].model)[
        "params"
    ]
    assert set(tree["layers"]["attention"]["q"]) == {"kernel", "bias"}
    assert set(tree["layers"]["attention_norm"]) == {"scale", "bias"}
    assert set(tree["layers"]["mlp"]) == {"gate", "up", "down"}
