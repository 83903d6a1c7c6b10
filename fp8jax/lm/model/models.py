"""The table of models: the sizes that papers and releases use.

Sources: GPT 111M to 13B is Cerebras-GPT (arXiv 2304.03208), the sizes of the paper on 8-bit
floating point (arXiv 2309.17224); Llama 2 (2307.09288), Llama 3 (2407.21783), Qwen 2.5
(2412.15115), Qwen 3 (2505.09388), GPT-2 by its released weights. llama_60m to llama_1b are the
sizes usual in papers on cheap pre-training (GaLore, arXiv 2403.03507, calls them 60M, 130M, 350M
and 1B). gpt2_335m is GPT-2 medium: the FP4 paper (2502.11458) calls it 335M, and its released
weights have 355M parameters.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from fp8jax.lm.model.config import ModelConfig
from fp8jax.lookup import Table, lookup


def model_config(name: str, overrides: dict[str, Any]) -> ModelConfig:
    """Returns the entry `name` of `MODELS`, with the fields replaced that `overrides` gives.

    Fields of `overrides` that are None keep the entry's value.

    Raises:
      ValueError: the model is unknown, or the fields contradict each other (`ModelConfig`).
    """
    return with_overrides(lookup("model", name, MODELS), overrides)


def with_overrides(config: ModelConfig, overrides: Mapping[str, Any]) -> ModelConfig:
    """Returns `config` with the fields replaced that `overrides` gives, except those that are None.

    Raises:
      ValueError: the fields contradict each other (`ModelConfig`).
    """
    given = {field: value for field, value in overrides.items() if value is not None}
    made = dataclasses.replace(config, **given)
    for field in ("window", "window_rope_theta"):
        if field in given and given[field] and "w" not in made.layer_pattern:
            raise ValueError(
                f"{field}={given[field]} is of layers with a window, and layer_pattern="
                f"{made.layer_pattern!r} has none: give it a w"
            )
    return made


BYTES = 320  # the byte tokenizer's 258 ids, padded to a multiple of 64


def _llama(d_model: int, n_layers: int, n_heads: int, d_ff: int, **fields) -> ModelConfig:
    defaults = dict(vocab_size=32_000, n_kv_heads=n_heads, head_dim=d_model // n_heads)
    return ModelConfig(
        d_model=d_model, n_layers=n_layers, n_heads=n_heads, d_ff=d_ff, **(defaults | fields)
    )


def _qwen(d_model: int, n_layers: int, n_heads: int, d_ff: int, **fields) -> ModelConfig:
    family = dict(vocab_size=151_936, norm_eps=1e-6, rope_theta=1e6)
    return _llama(d_model, n_layers, n_heads, d_ff, **(family | fields))


def _gpt(d_model: int, n_layers: int, n_heads: int, **fields) -> ModelConfig:
    family = dict(
        vocab_size=50_257,
        learned_positions=2048,
        norm="layer",
        mlp="gelu",
        biases="all",
        tie_embeddings=True,
    )
    return _llama(d_model, n_layers, n_heads, 4 * d_model, **(family | fields))


_gpt2 = functools.partial(_gpt, learned_positions=1024, mlp="gelu_tanh")


_llama3 = functools.partial(_llama, vocab_size=128_256, rope_theta=5e5)


_ALL: dict[str, ModelConfig] = {
    # Tiny models with a vocabulary of bytes, for tests and for a laptop.
    "llama_tiny": _llama(128, 4, 4, 384, n_kv_heads=2, vocab_size=BYTES),
    "gpt2_tiny": _gpt2(128, 4, 4, vocab_size=BYTES),
    "qwen2_tiny": _qwen(
        128, 4, 4, 384, n_kv_heads=2, vocab_size=BYTES, biases="qkv", tie_embeddings=True
    ),
    "qwen3_tiny": _qwen(
        128, 4, 4, 384, n_kv_heads=2, vocab_size=BYTES, qk_norm=True, tie_embeddings=True
    ),
    # GPT-2 and Cerebras-GPT.
    "gpt2_125m": _gpt2(768, 12, 12),
    "gpt2_335m": _gpt2(1024, 24, 16),
    "gpt_111m": _gpt(768, 10, 12),
    "gpt_256m": _gpt(1088, 14, 17),
    "gpt_590m": _gpt(1536, 18, 12),
    "gpt_1.3b": _gpt(2048, 24, 16),
    "gpt_2.7b": _gpt(2560, 32, 32),
    "gpt_6.7b": _gpt(4096, 32, 32),
    "gpt_13b": _gpt(5120, 40, 40),
    # Llama.
    "llama_60m": _llama(512, 8, 8, 1376),
    "llama_125m": _llama(768, 12, 12, 2048),
    "llama_350m": _llama(1024, 24, 16, 2736),
    "llama_1b": _llama(2048, 24, 32, 5461),
    "llama2_7b": _llama(4096, 32, 32, 11_008),
    "llama2_13b": _llama(5120, 40, 40, 13_824),
    "llama2_70b": _llama(8192, 80, 64, 28_672, n_kv_heads=8),
    "llama3_8b": _llama3(4096, 32, 32, 14_336, n_kv_heads=8),
    # Qwen.
    "qwen2.5_1.5b": _qwen(1536, 28, 12, 8960, n_kv_heads=2, biases="qkv", tie_embeddings=True),
    "qwen2.5_7b": _qwen(3584, 28, 28, 18_944, n_kv_heads=4, biases="qkv", vocab_size=152_064),
    "qwen3_0.6b": _qwen(
        1024, 28, 16, 3072, n_kv_heads=8, head_dim=128, qk_norm=True, tie_embeddings=True
    ),
    "qwen3_8b": _qwen(4096, 36, 32, 12_288, n_kv_heads=8, head_dim=128, qk_norm=True),
}
MODELS: Table[ModelConfig] = Table("model", _ALL)
"""The models by name; the guide of models lists their sizes. An unknown name raises ValueError.

Example:
  >>> config = fp8jax.MODELS["llama3_8b"]
  >>> config.n_layers, config.d_model, config.n_heads, config.n_kv_heads
  (32, 4096, 32, 8)
  >>> list(fp8jax.MODELS)[:4]
  ['llama_tiny', 'gpt2_tiny', 'qwen2_tiny', 'qwen3_tiny']
"""
