"""Small models with random weights, for tests of inference."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fp8jax.lm.model.models import MODELS
from fp8jax.lm.model.transformer import Transformer, abstract_variables

WORDS = 24


def tiny_model(
    name: str = "llama_tiny", policy: str = "bf16", dtype: Any = jnp.float32, **fields: Any
) -> tuple[Transformer, Any]:
    """A model of two layers and its variables. Its logits differ much from each other, as those of
    a trained model do: at initialization all tokens are nearly as likely."""
    sizes = dict(vocab_size=32, d_model=32, n_layers=2, d_ff=48, head_dim=8) | fields
    model = Transformer(dataclasses.replace(MODELS[name], **sizes), policy, dtype=dtype)
    return model, random_variables(model)


def random_variables(model: Transformer) -> Any:
    """Six times what a model begins with, and noise, so that biases are not zero. NumPy draws it:
    in JAX each shape would be a program. Histories are empty."""
    rng, shapes = np.random.default_rng(0), nn.meta.unbox(abstract_variables(model))

    def grown(path, leaf):
        name = "/".join(key.key for key in path)
        mean = 1.0 if name.endswith("scale") else 0.0
        deviation = 0.0 if name.endswith(("scale", "bias")) else 0.02
        if name.endswith(("attention/o/kernel", "mlp/down/kernel")):  # added to the residual stream
            deviation /= np.sqrt(2 * model.config.n_layers)
        noise = np.hypot(6 * deviation, 0.05) * rng.normal(size=leaf.shape)
        return jnp.asarray(6 * mean + noise, leaf.dtype)

    params = jax.tree_util.tree_map_with_path(grown, shapes["params"])
    others = {name: tree for name, tree in shapes.items() if name != "params"}
    return {
        **jax.tree.map(lambda leaf: jnp.asarray(np.zeros(leaf.shape, leaf.dtype)), others),
        "params": params,
    }
