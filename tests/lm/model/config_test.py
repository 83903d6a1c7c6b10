"""Shapes of published models: their parameters counted, their FLOPs, and what is refused."""

import dataclasses
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fp8jax.lm.model.config import (
    BIASES,
    MLP,
    MLPS,
    MOST_LAYERS,
    MOST_WEIGHTS,
    ModelConfig,
    flops_per_token,
)
from fp8jax.lm.model.models import MODELS, with_overrides
from fp8jax.lm.model.rope import ROPE_SCALINGS
from fp8jax.lm.model.transformer import Transformer, abstract_variables, count_params
from fp8jax.lm.training.step import loss_sum
from fp8jax.numerics.module_paths import MODULES
from tests.support.products import equations

CONFIG = dataclasses.replace(
    MODELS["llama_tiny"],
    vocab_size=64,
    d_model=32,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    d_ff=48,
    head_dim=8,
)
GPT2 = dataclasses.replace(MODELS["gpt2_tiny"], learned_positions=24)


def gpt(width: int, layers: int, vocab: int = 50_257, positions: int = 2048) -> int:
    """Tied embedding and positions; a layer's matrices 4 D^2 + 8 D^2, their biases 9 D and two
    norms 4 D; the last norm 2 D."""
    return (vocab + positions) * width + layers * (12 * width**2 + 13 * width) + 2 * width


def llama(vocab: int, width: int, layers: int, hidden: int) -> int:
    """Embedding and head; as many key heads as query heads, three matrices, two norms; a norm."""
    return 2 * vocab * width + layers * (4 * width**2 + 3 * width * hidden + 2 * width) + width


# A layer of the tiny models: attention 128 * 32 * (2 * 4 + 2 * 2), MLP 3 * 128 * 384, norms.
TINY = 49_152 + 147_456 + 2 * 128
COUNTS = {
    "llama_tiny": 2 * 320 * 128 + 4 * TINY + 128,
    "gpt2_tiny": gpt(128, 4, vocab=320, positions=1024),
    "qwen2_tiny": 320 * 128 + 4 * (TINY + 32 * (4 + 2 * 2)) + 128,  # biases of q, k and v
    "qwen3_tiny": 320 * 128 + 4 * (TINY + 2 * 32) + 128,  # norms of a head's size
    # As the released weights count, and as their formula has it.
    "gpt2_125m": 124_439_808,
    "gpt2_335m": 354_823_168,
    "gpt_111m": gpt(768, 10),
    "gpt_256m": gpt(1088, 14),
    "gpt_590m": gpt(1536, 18),
    "gpt_1.3b": gpt(2048, 24),
    "gpt_2.7b": gpt(2560, 32),
    "gpt_6.7b": gpt(4096, 32),
    "gpt_13b": gpt(5120, 40),
    "llama_60m": llama(32_000, 512, 8, 1376),
    "llama_125m": 134_105_856,  # GaLore's logs say 134.11M
    "llama_350m": llama(32_000, 1024, 24, 2736),
    "llama_1b": 1_339_082_752,  # and 1339.08M
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "qwen2.5_1.5b": 1_543_714_304,
    "qwen2.5_7b": 7_615_616_512,
    "qwen3_0.6b": 596_049_920,
    "qwen3_8b": 8_190_735_360,
}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_as_many_as_published(name):
    """Nothing is allocated, so that 70B are counted in a second."""
    assert name in COUNTS, f"say in COUNTS how many parameters {name} has"
    assert count_params(MODELS[name]) == COUNTS[name]


def test_counts_by_formula_are_those_of_releases_where_both_are_known():
    assert gpt(768, 12, positions=1024) == COUNTS["gpt2_125m"]
    assert gpt(1024, 24, positions=1024) == COUNTS["gpt2_335m"]
    assert llama(32_000, 768, 12, 2048) == COUNTS["llama_125m"]
    assert llama(32_000, 2048, 24, 5461) == COUNTS["llama_1b"]
    assert llama(32_000, 4096, 32, 11_008) == COUNTS["llama2_7b"]
    assert llama(32_000, 5120, 40, 13_824) == COUNTS["llama2_13b"]


@pytest.mark.parametrize(
    ("name", "nominal"),
    [
        ("gpt_111m", 111e6),
        ("gpt_256m", 256e6),
        ("gpt_590m", 590e6),
        ("gpt_1.3b", 1.3e9),
        ("gpt_2.7b", 2.7e9),
        ("gpt_6.7b", 6.7e9),
        ("gpt_13b", 13e9),
    ],
)
def test_cerebras_gpt_is_called_by_its_size(name, nominal):
    """To the two or three digits of the name, give or take: 2.65 is called 2.7."""
    assert abs(COUNTS[name] / nominal - 1) < 0.03


def test_no_count_is_left_of_a_model_that_is_gone():
    assert set(COUNTS) == set(MODELS)


# FLOPs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        # Of products only, of which norms, biases and the embedding's look-up are none: three
        # matrices in a gated MLP, two in one that is not; the head, tied or not.
        ("llama_tiny", 4 * (49_152 + 3 * 128 * 384) + 320 * 128),
        ("qwen2_tiny", 4 * (49_152 + 3 * 128 * 384) + 320 * 128),
        ("gpt2_tiny", 4 * (4 * 128 * 128 + 2 * 128 * 512) + 320 * 128),
    ],
)
def test_flops_by_hand(name, weights):
    """6 a weight, and 6 * 512 * 128 a layer for half of the scores' and values' square."""
    assert flops_per_token(MODELS[name], 512) == 6 * weights + 4 * 6 * 512 * 128


@pytest.mark.parametrize(("window", "hidden"), [(4, 9), (8, 4), (16, 0), (40, 0)])
def test_flops_of_windows_by_hand(window, hidden):
    """Of the 16^2 / 2 products of scores, a window hides a triangle: (16 - window)^2 / 2."""
    config = dataclasses.replace(CONFIG, n_layers=3, layer_pattern="wwf", window=window)
    every = dataclasses.replace(config, layer_pattern="f")
    fewer = flops_per_token(every, 16) - flops_per_token(config, 16)
    assert fewer == 2 * 6 * hidden * config.n_heads * config.head_dim


@pytest.mark.parametrize("name", ["llama_tiny", "gpt2_tiny", "qwen2_tiny", "qwen3_tiny"])
def test_flops_are_those_of_the_products_in_the_program(name):
    """Every product of a training step, 2 FLOPs a multiplication. What is run computes the whole
    square of attention, of which a causal model needs half: 6 * L * N * H a layer and token more
    than is counted."""
    config, rows = MODELS[name], (2, 16)
    model = Transformer(config)
    ids = jax.ShapeDtypeStruct(rows, jnp.int32)
    batch = dict.fromkeys(("tokens", "targets", "segments", "positions"), ids)
    batch["weights"] = jax.ShapeDtypeStruct(rows, jnp.float32)
    step = jax.grad(lambda params, batch: loss_sum(model, params, {}, batch, None))
    params = nn.meta.unbox(abstract_variables(model)["params"])
    total = 0
    for eqn, times in equations(jax.make_jaxpr(step)(params, batch).jaxpr):
        if eqn.primitive is lax.dot_general_p:
            (contract, _), _ = eqn.params["dimension_numbers"]
            lhs = eqn.invars[0].aval.shape
            terms = math.prod(lhs[axis] for axis in contract)
            total += 2 * times * terms * math.prod(eqn.outvars[0].aval.shape)
    square = 6 * config.n_layers * rows[1] * config.n_heads * config.head_dim
    assert total == math.prod(rows) * (flops_per_token(config, rows[1]) + square)


# What a config says -------------------------------------------------------------------------------


def test_a_model_has_the_linears_of_its_mlp():
    assert CONFIG.modules == MODULES
    assert GPT2.modules == tuple(path for path in MODULES if path != "layers/mlp/gate")


@pytest.mark.parametrize("biases", BIASES)
@pytest.mark.parametrize("mlp", MLPS)
def test_biases_are_where_the_choice_says(biases, mlp):
    config = dataclasses.replace(CONFIG, biases=biases, mlp=mlp)
    layers = abstract_variables(Transformer(config))["params"]["layers"]
    found = {
        f"layers/{part}/{name}"
        for part in ("attention", "mlp")
        for name, parameters in layers[part].items()
        if "bias" in parameters
    }
    assert found == set(BIASES[biases]) & set(config.modules)


@pytest.mark.parametrize("scaling", ROPE_SCALINGS)
def test_every_rope_scaling_is_taken_by_its_name(scaling):
    config = dataclasses.replace(CONFIG, rope_scaling=scaling)
    assert config.rope_scaling is ROPE_SCALINGS[scaling]
    assert config == dataclasses.replace(CONFIG, rope_scaling=ROPE_SCALINGS[scaling])
    assert count_params(config) == count_params(CONFIG)


# Bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(n_kv_heads=3), "n_heads=4 is not a multiple of .*n_kv_heads=3"),
        (dict(n_kv_heads=8), "n_heads=4 is not a multiple of .*n_kv_heads=8"),
        (dict(head_dim=7), "even head_dim, got 7"),
        (dict(n_kv_heads=0), "n_kv_heads=0 must be positive"),
        (dict(n_layers=-1), "n_layers=-1 must be positive"),
        (dict(norm_eps=0.0), "norm_eps=0.0 must be positive"),
        (dict(rope_theta=-1.0), "rope_theta=-1.0 must be positive"),
        (dict(mlp="swigl"), "unknown MLP 'swigl'.*'swiglu'"),
        (dict(biases="qk"), "unknown choice of biases 'qk'.*'qkv'"),
        (dict(learned_positions=-2), "learned_positions=-2 is negative"),
        (dict(norm_at="behind"), "unknown place of norms 'behind'.*before, after"),
        (dict(layer_pattern="fx"), "unknown kind of layer 'x'.*f, w, n"),
        (dict(layer_pattern=""), "layer_pattern is empty"),
        (dict(layer_pattern="fw"), "window=0 must be positive with layer_pattern='fw'"),
        (dict(window=-1), "window=-1 must be positive"),
        (dict(qk_norm_joint=True), "qk_norm_joint=True needs qk_norm=True"),
        (dict(rotary_dim=3), "rotary_dim=3 must be even and at most head_dim="),
        (dict(rotary_dim=1024), "rotary_dim=1024 must be even and at most head_dim="),
        (dict(query_scalar=-1), "query_scalar=-1 is negative"),
        (dict(learned_positions=32, rotary_dim=4), "rotary_dim=4 is for rotary positions"),
        (dict(rope_scaling="yarn_qwen"), "unknown RoPE scaling 'yarn_qwen'.*'yarn_qwen2.5'"),
        (
            dict(learned_positions=32, rope_theta=5e5),
            "rope_theta=500000.0 .*learned_positions=32",
        ),
        (
            dict(learned_positions=32, rope_scaling="linear_2"),
            "rope_scaling='linear_2' .*learned_positions=32",
        ),
    ],
)
def test_fields_that_contradict_each_other_raise_with_their_values(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)


@pytest.mark.parametrize("given", [dict(window=8), dict(window_rope_theta=500.0)])
def test_keys_of_windows_need_a_layer_with_one(given):
    with pytest.raises(ValueError, match=f"{next(iter(given))}=.* layer_pattern='f' has none"):
        with_overrides(CONFIG, given)
    assert with_overrides(CONFIG, dict(window=8, layer_pattern="wf")).layer_kinds[0] == "w"
    assert with_overrides(CONFIG, dict(window=0, n_layers=None)) == CONFIG


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(n_layers=10**9), "^n_layers=1000000000 is more than 1,000,000: layers run one after"),
        (dict(n_layers=10**400), r"^n_layers=10*\.\.\. is more than 1,000,000"),
        (dict(n_layers=10**6), "^n_layers=1000000 gives the model more than 1.2e.14 weights, whi"),
        (dict(d_model=10**9), "^d_model=1000000000 gives the model more than 1.2e.14 weights"),
        (dict(d_ff=10**9), "^d_ff=1000000000 gives the model"),
        (dict(n_heads=8 * 10**9), "^n_heads=8000000000 gives the model"),
        (dict(n_heads=10**9, n_kv_heads=10**9), "^n_heads=1000000000 gives the model"),
        (dict(head_dim=10**9), "^head_dim=1000000000 gives the model"),
        (dict(vocab_size=10**12), "^vocab_size=1000000000000 gives the model"),
        (dict(learned_positions=10**12, rope_theta=1e4), "^learned_positions=10* gives the model"),
        (dict(layer_pattern="w", window=2**30), "^window=1073741824 must be below 2.30"),
    ],
)
def test_sizes_that_no_machine_holds_are_named_at_once(changes, message, monkeypatch):
    """Before anything is made for each layer, or anything else is checked."""
    monkeypatch.setattr(ModelConfig, "_check_layers", None)
    with pytest.raises(ValueError, match=message) as error:
        dataclasses.replace(MODELS["llama3_8b"], **changes)
    assert "\n" not in str(error.value)


def test_the_largest_sizes_that_are_taken():
    """A weight more than the memory of a pod, and a layer more, are refused."""
    with pytest.raises(ValueError, match="d_ff=.* gives the model"):
        dataclasses.replace(CONFIG, d_ff=MOST_WEIGHTS // (9 * 32) + 1)
    dataclasses.replace(CONFIG, d_ff=MOST_WEIGHTS // (9 * 32) - 99)  # less those of the others
    assert len(dataclasses.replace(CONFIG, n_layers=MOST_LAYERS).layer_kinds) == MOST_LAYERS
    with pytest.raises(ValueError, match="n_layers=1000001 is more than"):
        dataclasses.replace(CONFIG, n_layers=MOST_LAYERS + 1)


@pytest.mark.parametrize(
    "fields", [dict(gated=False, activation=jax.nn.silu), dict(gated=True, activation=jax.nn.gelu)]
)
def test_only_swiglu_is_smoothed(fields):
    with pytest.raises(ValueError, match=f"smooth=True needs a .*gated={fields['gated']}"):
        MLP(smooth=True, **fields)
    assert not MLP(**fields).smooth


def test_limits_bound_the_hidden_activations():
    """min(gate, 10) and up within 10: at most silu(10) * 10, and below both SwiGLU itself."""
    gate, up = jnp.asarray([-30.0, 3.0, 10.0, 1e4]), jnp.asarray([1e4, -3.0, -1e4, 11.0])
    plain, clamped = MLPS["swiglu"], MLPS["clamped_swiglu"]
    top = jax.nn.silu(jnp.float32(10.0))
    expected = [*plain.hidden(gate, up.at[0].set(10.0))[:2], -10 * top, 10 * top]
    np.testing.assert_array_equal(clamped.hidden(gate, up), jnp.stack(expected))
    assert plain.fusible and not clamped.fusible
    with pytest.raises(ValueError, match="limit=10.0 needs a gated MLP"):
        MLP(gated=False, activation=jax.nn.silu, limit=10.0)


def test_smoothing_changes_neither_linears_nor_flops():
    smooth = dataclasses.replace(CONFIG, mlp="smooth_swiglu")
    assert smooth.modules == CONFIG.modules
    assert flops_per_token(smooth, 16) == flops_per_token(CONFIG, 16)


def test_learned_positions_take_an_odd_head_dim():
    """Which only rotation forbids."""
    assert dataclasses.replace(GPT2, head_dim=7).head_dim == 7


def test_an_unknown_norm_raises_when_the_model_is_built():
    with pytest.raises(ValueError, match="unknown norm 'rmss'.*'rms'"):
        abstract_variables(Transformer(dataclasses.replace(CONFIG, norm="rmss")))


def test_rows_are_no_longer_than_the_learned_positions():
    GPT2.check_length(24)
    CONFIG.check_length(10**6)  # rotation has no table
    with pytest.raises(ValueError, match="seq_len=25 is more than .*learned_positions=24"):
        GPT2.check_length(25)


def test_heads_divide_over_the_tensor_axis():
    CONFIG.check_mesh(1)
    CONFIG.check_mesh(2)
    with pytest.raises(ValueError, match="n_kv_heads=2 does not divide over tensor=4 devices"):
        CONFIG.check_mesh(4)
    with pytest.raises(ValueError, match="n_heads=4 does not divide over tensor=8 devices"):
        CONFIG.check_mesh(8)
