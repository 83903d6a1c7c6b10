"""Settings of optimizers, and trees of parameters by their paths."""

import dataclasses

from fp8jax.lm.optim.config import OptimizerConfig

CONFIG = OptimizerConfig(
    name="adamw",
    learning_rate=0.02,
    schedule="cosine",
    warmup_steps=2,
    num_steps=10,
    decay_fraction=0.3,
    final_fraction=0.1,
    weight_decay=0.3,
    b1=0.9,
    b2=0.95,
    eps=1e-8,
    clip_norm=1.5,
    gradients="float32",
    moments="float32",
    reset="",
    reset_from=0.6,
    seed=0,
    warmup_fraction=None,
)


def configured(**changes) -> OptimizerConfig:
    return dataclasses.replace(CONFIG, **changes)


def nested(flat: dict) -> dict:
    tree: dict = {}
    for path, leaf in flat.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree
