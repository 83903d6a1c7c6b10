"""Small models with random weights, for tests of inference."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fp8jax.model.models import MODELS
from fp8jax.model.transformer import Transformer

WORDS = 24


def tiny_model(
    name: str = "llama_tiny", policy: str = "bf16", dtype: Any = jnp.float32, **fields: Any
) -> tuple[Transformer, Any]:
    """A model of two layers and its variables. Its logits differ much from each other, as those of
    a trained model do: at initialization all tokens are nearly as likely."""
    sizes = dict(vocab_size=32, d_model=32, n_layers=2, d_ff=48, head_dim=8) | fields
    model = Transformer(dataclasses.replace(MODELS[name], **sizes), policy, dtype=dtype)
    ids = jnp.zeros((1, 1), jnp.int32)
    variables = jax.jit(model.init)(jax.random.key(0), ids, ids, ids, jax.random.key(1))
    variables = nn.meta.unbox(variables)
    keys = iter(jax.random.split(jax.random.key(2), 64))

    def grown(leaf):  # biases, too
        return 6 * leaf + 0.05 * jax.random.normal(next(keys), leaf.shape)

    return model, {**variables, "params": jax.tree.map(grown, variables["params"])}
