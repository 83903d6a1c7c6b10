"""A model without training: each byte says how likely the next one is."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from fp8jax.lm.data.tokenizers import tokenizer
from fp8jax.lm.model.config import ModelConfig
from fp8jax.lm.model.transformer import Transformer, abstract_variables

WORDS = tokenizer("bytes").vocab_size


def bigram_model(likely: dict[str, dict[str, float]]) -> tuple[Transformer, Any, np.ndarray]:
    """A float32 model, its variables, and log p[this, next] of its ids.

    Args:
      likely: of a character and the next one, how many times as likely it is as any other byte.

    Its one layer adds zeros. The embedding is the identity, so the head's rows are the logits.
    """
    weights = np.ones((WORDS, WORDS))
    for this, following in likely.items():
        for after, weight in following.items():
            weights[ord(this), ord(after)] = weight
    log_p = np.log(weights / weights.sum(axis=1, keepdims=True))
    config = ModelConfig(
        vocab_size=WORDS,
        d_model=WORDS,
        n_layers=1,
        n_heads=1,
        n_kv_heads=1,
        d_ff=8,
        head_dim=8,
        norm_eps=1e-12,
    )
    model = Transformer(config, dtype=jnp.float32, attention="xla")
    shapes = nn.meta.unbox(abstract_variables(model))
    variables = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
    params = variables["params"]
    params["embedding"] = np.eye(WORDS, dtype=np.float32)
    params["final_norm"]["scale"][:] = WORDS**-0.5  # a norm gives sqrt(WORDS) e
    params["lm_head"]["kernel"] = log_p.astype(np.float32)
    return model, jax.tree.map(jnp.asarray, variables), log_p
